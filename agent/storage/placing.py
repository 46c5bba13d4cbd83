"""Copies the resume point to where its script had saved it, in the directory of a new epoch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from dalsegno.elastic.checkpoint import Manifest
from dalsegno.elastic.checkpoint.files import CANNOT, copy_file, replace_file
from dalsegno.elastic.checkpoint.reading import read_regular

from .foreign import NOTE_BYTES, OURS
from .taking import save_directory
from .volume_clock import now_at

__all__ = ["is_placed", "place", "put_back"]

# In an epoch's directory: the resume point is there, and by how many ns its times were put back. No layout has such a
# name.
_PLACED, _MARK_BYTES = f"{OURS}-resume-point", 32
# What was put back lies so far behind: some file systems count whole seconds, or two.
_BEFORE_NANOSECONDS = 2 * 10**9


def place(
    source: Path, manifest: Manifest, target: Path, given_up: Callable[[], bool] = lambda: False
) -> tuple[str, ...]:
    """Copies a checkpoint to where its script had saved it, in another directory. What cannot be finished is removed.

    Copies keep the times of their files: a script may take the newest of several. Times that are still to come are put
    back, all alike, or what the script saves next would count as older.

    Args:
        source: the run's checkpoint.
        manifest: its manifest, with `saved_as`.
        target: the directory in which the script will look.
        given_up: whether nobody needs it any more.

    Returns:
        The names of its files in `target`.

    Raises:
        OSError: the file system says no.
    """
    saved_as = manifest.saved_as
    assert saved_as is not None
    names = [f"{saved_as.below}/{entry.path}" if saved_as.below else entry.path for entry in manifest.files]
    ahead = _ahead(source, manifest, target)
    try:
        for name, entry in zip(names, manifest.files, strict=True):
            if given_up():
                break
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # of a start in this epoch that was given up
            copy_file(source / entry.path, path)
            if entry.size <= NOTE_BYTES:
                _point_here(path, save_directory(source.parent, manifest.epoch), target)
            written = os.stat(source / entry.path)
            os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns - ahead))
        for name, leads_to in saved_as.links:
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            try:
                path.symlink_to(os.path.relpath(target / leads_to, path.parent))
            except OSError as error:
                # Mounts without links have none of the script's, either; but this may be another mount.
                if error.errno not in CANNOT or not (target / leads_to).is_file():
                    raise
                copy_file(target / leads_to, path)
    except OSError:
        for name in names:
            (target / name).unlink(missing_ok=True)
        raise
    replace_file(target / _PLACED, str(ahead).encode(), lasting=False)
    return tuple(names)


def is_placed(target: Path) -> bool:
    """Whether `place` has come to its end in this directory."""
    return os.path.lexists(target / _PLACED)


def put_back(target: Path) -> int:
    """By how many ns the times of the copies there are before those of their files.

    Raises:
        OSError: the file system says no.
    """
    try:
        return int(read_regular(target / _PLACED, _MARK_BYTES))
    except (FileNotFoundError, ValueError):  # none was put there, or by an agent that left their times alone
        return 0


def _ahead(source: Path, manifest: Manifest, target: Path) -> int:
    """By how many ns the newest file's time is still to come; 0: it is not.

    The clock was set back since then, or it was another node's.
    """
    newest = max((os.stat(source / entry.path).st_mtime_ns for entry in manifest.files), default=0)
    ahead = newest - now_at(target)
    return ahead + _BEFORE_NANOSECONDS if ahead > 0 else 0


def _point_here(path: Path, old: Path, new: Path) -> None:
    """A note that names a checkpoint by its whole path would lead to the directory of an epoch that is over."""
    text = read_regular(path, NOTE_BYTES)
    if text.startswith(f"{old}/".encode()):
        replace_file(path, f"{new}/".encode() + text[len(f"{old}/".encode()) :], lasting=False)
