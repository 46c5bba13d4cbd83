"""Why what a script saved is not taken, in words that say what helps."""

from __future__ import annotations

import os
from pathlib import Path

from dalsegno.elastic.checkpoint import CheckpointDamaged, Damage
from dalsegno.elastic.checkpoint.errors import is_full, printable

from .present import may_be_there

__all__ = ["is_gone", "problem_of"]


def problem_of(error: Exception) -> str:
    """The reason for a person; of each checkpoint of a script with the same habit the same, as it is said once."""
    if is_full(error):
        return f"{error.strerror}: the run's copy of it takes as much room again; make room, then it is taken"
    if isinstance(error, CheckpointDamaged) and error.reason is Damage.NOT_A_FILE:
        return (
            f"{printable(error.file)} in it is a link, a pipe or a device: only files are taken, so have the script "
            "put a copy there, or leave it out"
        )
    return str(error)


def is_gone(path: Path, error: Exception) -> bool:
    """Whether a checkpoint cannot be read because nothing of it is there, in a run that is."""
    missing = isinstance(error, CheckpointDamaged) and isinstance(error.__cause__, FileNotFoundError)
    return missing and os.path.isdir(path.parent) and not may_be_there(path)
