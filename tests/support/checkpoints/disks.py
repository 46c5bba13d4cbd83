"""Disks that this machine may not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint import files
from dalsegno.elastic.checkpoint.durability import FileSystem
from dalsegno.elastic.universal import syncing


def sync_as_if(patch: pytest.MonkeyPatch, at_once: bool) -> None:
    """On a disk of this machine that can be asked, and that nobody else writes to; or on another one."""
    plain = FileSystem.__init__

    def init(system: FileSystem, directory: Path) -> None:
        plain(system, directory)
        system.tells = at_once

    patch.setattr(FileSystem, "__init__", init)
    patch.setattr(FileSystem, "sync", lambda system: None)
    for module in (syncing, files):
        patch.setattr(module, "unwritten", lambda: 0)
