"""Files of checkpoints that newer ones have replaced: their pages are written again.

A new page of a file must be found and cleared, and where a virtual machine has given it back, its host must find one
first. That costs 2 to 25 µs for 4 KiB, and copying them takes half a microsecond. So the file of an older checkpoint
gets the name of a new one, and is written over. One of each path is kept, in `FOLDER` of a run's directory: in memory
the agent decides what lies there, on a disk whoever deletes checkpoints that have been replaced.

Nobody else may see the bytes change. So a file is taken only where the kernel grants a lease for writing (fcntl(2),
F_SETLEASE): it does if no process has the file open or mapped. It knows of the processes of its own machine alone, so
only file systems of this machine have spares.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import signal
import stat
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from .durability import is_of_this_machine
from .errors import CheckpointDamaged, is_full
from .files import list_files
from .layout import is_checkpoint_name

__all__ = [
    "FOLDER",
    "LEAST_BYTES",
    "clear_spares",
    "keep_retired",
    "keep_spares",
    "make_room",
    "make_room_for",
    "spare_bytes",
    "take_spare",
    "take_spare_of",
]

FOLDER = ".spare"
# What the name of each spare begins with.
_MARK = "="
# Folders that frameworks name after a step: transformers, DeepSpeed.
_OF_A_STEP = re.compile(r"(?<![^/])(checkpoint-|global_step)\d+(?=/)")
# Smaller files cost more than their pages.
LEAST_BYTES = 128 << 10
# On a disk spares are kept where so many times their size stays free beside them, and so many bytes more.
FREE_TIMES, FREE_BYTES = 2, 256 << 20


def keep_retired(run_dir: Path, directory: Path, paths: Iterable[str]) -> None:
    """`keep_spares` for a checkpoint on a disk that is no longer sealed, and is about to be deleted.

    Nothing is kept where others may read the files from another machine, or where room is short. Errors keep nothing:
    the deletion is what counts.

    Args:
        run_dir: The run's directory.
        directory: Of the checkpoint, in it.
        paths: Its files.
    """
    try:
        # Listed first: below a link lie files of somebody else.
        here = set(list_files(directory))
        sizes = {path: _own_bytes(directory / path) for path in paths if path in here}
        there, local = os.statvfs(run_dir), is_of_this_machine(run_dir)
    except (OSError, CheckpointDamaged):
        return
    total = sum(sizes.values())
    free = there.f_bavail * there.f_frsize + spare_bytes(run_dir)
    if total and local and free >= FREE_TIMES * total + FREE_BYTES:
        keep_spares(run_dir, directory, [path for path, size in sizes.items() if size])
    else:
        clear_spares(run_dir)


def _own_bytes(path: Path) -> int:
    """The size of a file that is worth keeping, and has no other name; else 0."""
    about = os.lstat(path)
    alone = stat.S_ISREG(about.st_mode) and about.st_nlink == 1
    return about.st_size if alone and about.st_size >= LEAST_BYTES else 0


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
                if _is_ours(folder):
                    os.rename(directory / path, folder / name)
                    kept.add(name)
    _remove(folder, kept)


def take_spare(run_dir: Path, path: str, target: Path) -> int | None:
    """Gives the spare of a path another name, and opens it to be written over, from its beginning.

    Whoever writes cuts off what is left behind the last byte. Any process may call it; one gets the file.

    Args:
        run_dir: Where the spares are.
        path: Of the new file, as it will be in the manifest. A number of a step in it may be another one.
        target: Its new name. Nothing of this name is there.

    Returns:
        A descriptor; None where there is no spare, or somebody still reads it.
    """
    name, folder = _name(path), run_dir / FOLDER
    if not name or not _is_ours(folder):
        return None
    # In the directory of a checkpoint that is not sealed yet, if this process is killed here.
    claimed = target.with_name(f".spare-{secrets.token_hex(8)}")
    try:
        os.rename(folder / name, claimed)  # only one of many gets it
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
        # If somebody opens it just now, the kernel tells us: by a signal that does nothing, not by SIGIO, which kills.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
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
    directory = _checkpoint_of(target)
    return None if directory is None else take_spare(directory.parent, str(target.relative_to(directory)), target)


def make_room_for(target: Path, error: OSError) -> None:
    """`make_room` beside the checkpoint that a file is in. Raises ``error`` also where it is in none."""
    if (directory := _checkpoint_of(target)) is None:
        raise error
    make_room(directory.parent, error)


def _checkpoint_of(target: Path) -> Path | None:
    return next((directory for directory in target.parents if is_checkpoint_name(directory.name)), None)


def spare_bytes(run_dir: Path) -> int:
    """What the spares take."""
    total = 0
    if not _is_ours(run_dir / FOLDER):
        return 0
    with contextlib.suppress(OSError), os.scandir(run_dir / FOLDER) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
    return total


def clear_spares(run_dir: Path) -> None:
    """Deletes all of them."""
    _remove(run_dir / FOLDER, set())


def make_room(run_dir: Path, error: OSError) -> None:
    """After a write that failed: gives back what is kept for later saves, so that another try is worth it.

    Raises:
        OSError: ``error``, where the disk is not what is full.
    """
    if not is_full(error):
        raise error
    clear_spares(run_dir)


def _remove(folder: Path, but: set[str]) -> None:
    if not _is_ours(folder):
        return
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(_MARK) and name not in but:
                with contextlib.suppress(OSError):  # somebody has taken it just now, or put something else there
                    os.unlink(folder / name)
        if not but:
            os.rmdir(folder)


def _is_ours(folder: Path) -> bool:
    """Whether it is there, and no link: nothing is moved or deleted elsewhere."""
    try:
        return stat.S_ISDIR(os.lstat(folder).st_mode)
    except OSError:
        return False


def _name(path: str) -> str:
    """One path component, whatever step a folder on the path is named after; empty where it would be too long."""
    name = _MARK + quote(_OF_A_STEP.sub(r"\1", path), safe="")
    return name if len(name) < 200 else ""
