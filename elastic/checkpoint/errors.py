"""What can be wrong with a checkpoint on disk."""

from __future__ import annotations

import enum
import errno
from pathlib import Path
from typing import TypeGuard


class Damage(enum.Enum):
    """Why a checkpoint cannot be trusted. The values appear in messages to the master and to people."""

    MANIFEST = "MANIFEST"  # missing, torn, or not what the format allows
    DIGEST = "DIGEST"  # a readable manifest, but not the one that was recorded
    MISSING_FILE = "MISSING_FILE"
    EXTRA_FILE = "EXTRA_FILE"  # a file that the manifest does not list
    WRONG_SIZE = "WRONG_SIZE"
    WRONG_CHECKSUM = "WRONG_CHECKSUM"
    NOT_A_FILE = "NOT_A_FILE"  # a symbolic link, device or pipe where a file must be


class CheckpointDamaged(Exception):
    """One checkpoint directory does not hold what its manifest promises.

    Attributes:
        directory: The checkpoint's directory.
        file: Path of the culprit relative to ``directory``, with forward slashes.
        reason: The kind of damage.
        detail: Figures for a person, may be empty.
    """

    def __init__(self, directory: Path, file: str, reason: Damage, detail: str = "") -> None:
        self.directory, self.file, self.reason, self.detail = directory, file, reason, detail
        where = printable(f"{directory.name}/{file}")
        super().__init__(f"{where}: {reason.value}" + (f" ({printable(detail)})" if detail else ""))


def is_full(error: BaseException) -> TypeGuard[OSError]:
    """Whether a write failed because the disk, or somebody's share of it, has no room left."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def printable(text: str) -> str:
    """``text`` in one line that any terminal, log and message can carry: what cannot be printed is escaped."""
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
