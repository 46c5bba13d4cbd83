"""Removes what scripts without a session left below `${save_dir}` in epochs that are over, as far as the run has it.

Each checkpoint of a script's that was adopted is noted beside it, file by file. Only files that are noted, and have not
changed since, are removed: what was never adopted stays, and so do logs and whatever else the script has put there. And
only what a later epoch has saved again: the run's copy of a best model may be pruned long before there is another one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

from .foreign import OURS
from .layouts import FileState, state_of
from .naming import series_of

__all__ = ["note", "remove"]

# In an epoch's directory: a line for each file that was adopted, or put there as a copy of the resume point.
_NOTES = f"{OURS}-adopted"
_EPOCH = re.compile(r"e([0-9]{1,15})")

logger = logging.getLogger(__name__)


def note(root: Path, files: Iterable[FileState]) -> None:
    """Notes that the run has a copy of these files, as they are now, of an epoch's directory.

    Raises:
        OSError: it cannot be written.
    """
    lines = [json.dumps([file.name, file.size, file.written, file.number]) + "\n" for file in files]
    if not lines:
        return
    with open(root / _NOTES, "a", encoding="utf-8") as notes:
        notes.write("".join(lines))


def remove(run_dir: Path, epoch: int, keep: int) -> list[str]:
    """Removes noted files of epochs before this one, except for the last `keep` that have any; 0 removes nothing.

    The newest of each series stays, whichever epoch has saved it.

    Returns:
        Their paths relative to `run_dir`. What cannot be removed stays, and the log says why.
    """
    if keep <= 0 or os.path.islink(run_dir):
        return []
    try:
        numbers = [int(match[1]) for one in os.listdir(run_dir) if (match := _EPOCH.fullmatch(one))]
    except OSError as error:
        logger.warning("what the script saved in earlier epochs stays: %s", error)
        return []
    removed: list[str] = []
    having, later = 0, set[str]()
    for number in sorted((number for number in numbers if number < epoch), reverse=True):
        root = run_dir / f"e{number}"
        try:
            files = (
                [] if root.is_symlink() else [name for name, noted in _noted(root).items() if _is_still(root, noted)]
            )
            having += bool(files)
            replaced = [name for name in files if series_of(name) in later] if having > keep else []
            removed += [f"{root.name}/{name}" for name in replaced if _remove(root, name)]
            later |= {series_of(name) for name in files}
        except OSError as error:
            logger.warning("what the script saved in %s stays: %s", root, error)
    if removed:
        logger.info("removed what the script had saved and the run has: %s", ", ".join(removed))
    return removed


def _is_still(root: Path, noted: FileState) -> bool:
    """Whether a file is as it was when it was noted."""
    # No link is followed on the way: it may lead to what is not the script's.
    parts = Path(noted.name).parts
    if ".." in parts or any((root / Path(*parts[:depth])).is_symlink() for depth in range(1, len(parts) + 1)):
        return False
    try:
        return state_of(root, [noted.name]) == (noted,)
    except (FileNotFoundError, ValueError):  # no file can have that name
        return False


def _noted(root: Path) -> dict[str, FileState]:
    """The last note of each file."""
    try:
        text = (root / _NOTES).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return {}
    found = {}
    for line in text.splitlines():
        with contextlib.suppress(ValueError, TypeError):  # cut off by a power cut: such a file stays
            name, size, written, number = json.loads(line)
            found[str(name)] = FileState(str(name), int(size), int(written), int(number))
    return found


def _remove(root: Path, name: str) -> bool:
    try:
        (root / name).unlink()
    except OSError as error:
        logger.warning("%s cannot be removed: %s", root / name, error)
        return False
    with contextlib.suppress(OSError):  # as far up as nothing else is there
        for directory in (root / name).parents:
            if directory == root:
                break
            directory.rmdir()
    return True
