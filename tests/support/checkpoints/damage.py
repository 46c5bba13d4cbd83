"""What can happen to a checkpoint's manifest."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dalsegno.elastic.checkpoint import Manifest


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[data.index(b'"step"') + 7] ^= 1
    path.write_bytes(data)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _other(path: Path) -> None:
    manifest = Manifest.read(path.parent)
    path.write_bytes(replace(manifest, generation=99).to_bytes())


def _link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _elsewhere(path: Path) -> None:
    """Whole, but another file's."""
    path.rename(path.parent.parent / "elsewhere.json")
    path.symlink_to(path.parent.parent / "elsewhere.json")


def loop(directory: Path) -> None:
    """Puts a link to itself in a directory's place."""
    shutil.rmtree(directory)
    directory.symlink_to(directory)


HARM: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (_flip, "checksum is not that of its content"),
    "empty": (lambda path: path.write_bytes(b""), "not JSON"),
    "deleted": (Path.unlink, "not there"),
    "other": (_other, "recorded is"),
    "nested": (lambda path: path.write_bytes(b"[" * 200_000), "not JSON"),
    "endless": (lambda path: os.truncate(path, 8 << 30), "more than"),
    "pipe": (_fifo, "no regular file"),
    "link": (_link, "no regular file"),
    "elsewhere": (_elsewhere, "no regular file"),
}
"""Ways to spoil a manifest, and what is said of it then."""
