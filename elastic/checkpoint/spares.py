"""Files of memory checkpoints that newer ones have replaced: their pages are written again.

A new page in shared memory must be found and cleared, and where a virtual machine has given it back, its host must find
one first. That costs 2 to 25 µs for 4 KiB, and copying them takes half a microsecond. So the file of an older
checkpoint gets the name of a new one, and is written over. One of each path is kept, in `FOLDER` of a run's directory
in memory. The agent decides what lies there; a directory on a disk has no such folder.

Nobody else may see the bytes change. So a file is taken only where the kernel grants a lease for writing (fcntl(2),
F_SETLEASE): it does if no process has the file open or mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from .layout import is_checkpoint_name

__all__ = ["FOLDER", "LEAST_BYTES", "clear_spares", "keep_spares", "spare_bytes", "take_spare", "take_spare_of"]

FOLDER = ".spare"
# Smaller files cost more than their pages.
LEAST_BYTES = 128 << 10


def keep_spares(run_dir: Path, directory: Path, paths: Iterable[str]) -> None:
    """Makes the files of a checkpoint that nobody needs any more the spares, in place of those of before.

    Args:
        run_dir: The run's directory in memory.
        directory: Of the checkpoint, on the same file system. What is not taken from it stays there.
        paths: Its files.
    """
    folder = run_dir / FOLDER
    kept = set()
    for path in paths:
        with contextlib.suppress(OSError):
            if (name := _name(path)) and os.lstat(directory / path).st_size >= LEAST_BYTES:
                folder.mkdir(mode=0o700, exist_ok=True)
                os.rename(directory / path, folder / name)
                kept.add(name)
    _remove(folder, kept)


def take_spare(run_dir: Path, path: str, target: Path) -> int | None:
    """Gives the spare of a path another name, and opens it to be written over, from its beginning.

    Whoever writes cuts off what is left behind the last byte. Any process may call it; one gets the file.

    Args:
        run_dir: Where the spares are.
        path: Which one, as in the manifest.
        target: Its new name. Nothing of this name is there.

    Returns:
        A descriptor; None where there is no spare, or somebody still reads it.
    """
    name = _name(path)
    if not name:
        return None
    # In a directory that is deleted if this process is killed here.
    claimed = target.with_name(f".spare-{secrets.token_hex(8)}")
    try:
        os.rename(run_dir / FOLDER / name, claimed)  # only one of many gets it
    except OSError:
        return None
    try:
        return _alone(claimed, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            claimed.unlink()


def _alone(claimed: Path, target: Path) -> int | None:
    descriptor = -1
    try:
        descriptor = os.open(claimed, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        # Another name of the file may be somebody's, who has not opened it yet.
        if os.fstat(descriptor).st_nlink == 1:
            os.link(claimed, target)  # unlike a rename it replaces nothing
            return descriptor
    except (OSError, AttributeError):  # Python has no F_SETLEASE where there are no leases
        pass
    if descriptor >= 0:
        os.close(descriptor)
    return None


def take_spare_of(target: Path) -> int | None:
    """`take_spare` for a file in the directory of a checkpoint; None also where ``target`` is in none."""
    for directory in target.parents:
        if is_checkpoint_name(directory.name):
            return take_spare(directory.parent, str(target.relative_to(directory)), target)
    return None


def spare_bytes(run_dir: Path) -> int:
    """What the spares take."""
    total = 0
    with contextlib.suppress(OSError), os.scandir(run_dir / FOLDER) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
    return total


def clear_spares(run_dir: Path) -> None:
    """Deletes all of them."""
    _remove(run_dir / FOLDER, set())


def _remove(folder: Path, but: set[str]) -> None:
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name not in but:
                with contextlib.suppress(FileNotFoundError):  # somebody has taken it just now
                    os.unlink(folder / name)
        if not but:
            os.rmdir(folder)


def _name(path: str) -> str:
    """One path component; empty where it would be too long."""
    name = "=" + quote(path, safe="")
    return name if len(name) < 200 else ""
