"""Files of a checkpoint: listing, checksums, durability. Everything streams; memory is a few buffers."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable
from io import FileIO
from pathlib import Path
from threading import Lock

import xxhash

from .durability import FileSystem, at_once, unwritten
from .errors import CheckpointDamaged, Damage
from .layout import MANIFEST
from .manifest import FileEntry
from .pool import Pool
from .reading import NotRegular, open_regular, walk

BUFFER_BYTES = 4 << 20
# Bytes that are read at once to be summed: they are summed out of the core's own cache (of 1 to 2 MiB in most servers),
# where larger pieces come from beyond it. Of files in the page cache, 100 MB were measured to take 14.8 ms of CPU so,
# 17.5 in pieces of 2 and 4 MiB, 15.5 in pieces of 64 KiB and 1 MiB.
READ_BYTES = 512 << 10
THREADS = 4
# What a mount answers that has no rename, links or hard links: some FUSE and object-store mounts, SMB.
CANNOT = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


class Meter:
    """Adds up the bytes that several threads move, and reports the sum from time to time.

    Args:
        tell: called with the sum, on one of those threads, one call at a time.
        every: least number of seconds between two calls, and from the meter's making to the first call.
    """

    def __init__(self, tell: Callable[[int], None], every: float) -> None:
        self._tell, self._every = tell, every
        self._sum = 0
        self._told_at = time.monotonic()
        self._lock = Lock()

    def __call__(self, count: int) -> None:
        """Adds ``count`` bytes that were moved."""
        with self._lock:
            self._sum += count
            now = time.monotonic()
            if now - self._told_at >= self._every:
                self._told_at = now
                self._tell(self._sum)


def list_files(directory: Path) -> list[str]:
    """All files below ``directory`` except its own ``MANIFEST.json``: sorted relative paths with forward slashes.

    Raises:
        CheckpointDamaged: NOT_A_FILE for a symbolic link, device or pipe: its content is not the checkpoint's own.
        FileNotFoundError: ``directory`` does not exist.
    """
    found: list[str] = []
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(directory / prefix) as entries:
            for entry in entries:
                path = f"{prefix}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path + "/")
                elif not entry.is_file(follow_symlinks=False):
                    raise CheckpointDamaged(directory, path, Damage.NOT_A_FILE)
                elif path != MANIFEST:
                    found.append(path)
    return sorted(found)


def checksum(root: Path, path: str, *, moved: Callable[[int], None] = lambda count: None) -> FileEntry:
    """Reads one file and describes it.

    Args:
        root: The checkpoint's directory.
        path: The file, relative to it.
        moved: Called with the number of bytes that were read just now.

    Raises:
        CheckpointDamaged: MISSING_FILE, NOT_A_FILE.
        OSError: The file system failed in another way.
    """
    digest = xxhash.xxh3_128()
    size = 0
    with _opened(root, path) as file:
        # A universal checkpoint has thousands of small files, and memory that is touched for each costs more than they.
        buffer = bytearray(min(READ_BYTES, os.fstat(file.fileno()).st_size + 1))
        view = memoryview(buffer)
        while count := _read(file, buffer, root / path):
            digest.update(view[:count])
            size += count
            moved(count)
    return FileEntry(path, size, digest.hexdigest())


def _read(file: FileIO, buffer: bytearray, path: Path) -> int:
    """Reads some of a file. An error names it, which read(2) does not."""
    try:
        return file.readinto(buffer)
    except OSError as error:
        error.filename = str(path)
        raise


def _opened(root: Path, path: str) -> FileIO:
    try:
        return open(open_regular(root / path), "rb", buffering=0)
    except FileNotFoundError as error:
        raise CheckpointDamaged(root, path, Damage.MISSING_FILE) from error
    except NotRegular as error:
        raise CheckpointDamaged(root, path, Damage.NOT_A_FILE) from error


def _sync(root: Path, path: str, moved: Callable[[int], None]) -> None:
    with _opened(root, path) as file:
        os.fsync(file.fileno())
        moved(os.fstat(file.fileno()).st_size)


def write_problem(directory: Path, size: int = 1 << 20) -> str:
    """Why ``size`` bytes cannot be written below ``directory``; empty if they can.

    It serves to tell a person: libraries that write by themselves hide what the file system said.
    """
    try:
        with tempfile.TemporaryFile(dir=directory if directory.is_dir() else directory.parent) as file:
            file.write(bytes(size))
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def checksums(
    root: Path,
    paths: Iterable[str],
    *,
    threads: int = THREADS,
    sync: bool = False,
    known: Iterable[FileEntry] = (),
    moved: Callable[[int], None] = lambda count: None,
) -> list[FileEntry]:
    """``checksum`` of several files, in the order of ``paths``, with ``threads`` at work (hashing drops the GIL).

    Args:
        root, paths: See ``checksum``.
        threads: How many files are read at once.
        sync: Also make the files durable (fsync) while they are read, so that the checksum is of what was written.
        known: Entries of files that are described already. They are only made durable, and come behind the others.
        moved: Called with the number of bytes that were synced or read just now, on the threads that do it.
    """
    wanted, known = list(paths), list(known)
    with (
        Pool(max(1, threads), thread_name_prefix="dalsegno-sync") as syncing,
        Pool(max(1, threads), thread_name_prefix="dalsegno-checksum") as summing,
    ):
        durable = [*wanted, *(entry.path for entry in known)] if sync else []
        synced = [syncing.submit(_sync, root, path, moved) for path in durable]
        entries = list(summing.map(lambda path: checksum(root, path, moved=moved), wanted))
        for one in synced:
            one.result()
    return [*entries, *known]


def fsync_directory(directory: Path) -> None:
    """Makes the names in ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(directory: Path) -> None:
    """Makes the names in ``directory``, in all directories below it, and its own name durable.

    One call makes all of them durable if that is possible. That call also reports earlier failures: a file system that
    could not record a name takes no further names, and so no manifest.
    """
    names = [Path(current) for current, _, _ in walk(directory)]
    with FileSystem(directory) as system:
        if system.tells and at_once(len(names), unwritten()):
            system.sync()
        else:
            with Pool(THREADS, thread_name_prefix="dalsegno-sync") as pool:
                for _ in pool.map(fsync_directory, names):
                    pass
    fsync_directory(directory.parent)


def write_exclusive(path: Path, data: bytes, *, lasting: bool = True) -> None:
    """Creates ``path`` with ``data``. If the data cannot be written whole, the file is removed again.

    Args:
        path: The file.
        data: Its content.
        lasting: Make it durable. False: the caller does that later, for many files at once.

    Raises:
        FileExistsError: It exists already.
        OSError: The file system failed in another way, for instance with ENOSPC.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            if lasting:
                os.fsync(descriptor)
    except OSError:
        # What failed first is what a person has to know, also where the file cannot be removed.
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def replace_file(path: Path, text: bytes, *, lasting: bool = True) -> None:
    """Puts ``text`` (JSON) at ``path`` in one go: readers see the old content or the new, see ``move_over``.

    Args:
        path: The file.
        text: Its content.
        lasting: Make that durable. False: after a power cut the old content may be there again, and whole.
    """
    # A name of this call's own: other nodes do the same at the same time, and containers may have the same process id.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    write_exclusive(temporary, text)
    move_over(temporary, path)
    if lasting:
        fsync_directory(path.parent)


def place_file(source: Path, target: Path) -> bool:
    """Puts a finished file under a second name: a hard link, or a durable copy where links are not possible.

    The copy has the time of ``source``, as a link has: some look at what is newer by it.

    Returns:
        Whether it is a link, so that a change of the one is a change of the other.

    Raises:
        FileExistsError: ``target`` is there already.
        OSError: The file system says no.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
        return True
    except FileExistsError:
        raise
    except OSError:
        # The names are on two file systems, or on one without links (some FUSE mounts, SMB).
        with open(source, "rb") as reader, open(target, "xb") as writer:
            about = os.fstat(reader.fileno())
            shutil.copyfileobj(reader, writer, 4 << 20)
            writer.flush()
            # Some mounts let nobody set a time.
            with contextlib.suppress(OSError):
                os.utime(writer.fileno(), ns=(about.st_atime_ns, about.st_mtime_ns))
            os.fsync(writer.fileno())
        return False


def copy_file(source: Path, target: Path) -> None:
    """Copies one file. Where the file system can, the copy shares its blocks until one of them is written to.

    Raises:
        FileExistsError: ``target`` is there already.
        OSError: The file system says no.
    """
    with open(source, "rb") as reader, open(target, "xb") as writer:
        try:
            while os.copy_file_range(reader.fileno(), writer.fileno(), 1 << 30):
                pass
        except OSError as error:
            if error.errno not in (*CANNOT, errno.EXDEV):
                raise
            shutil.copyfileobj(reader, writer, BUFFER_BYTES)


def move_over(aside: Path, path: Path) -> None:
    """Puts the small JSON file ``aside`` in the place of ``path``, as durable as ``aside`` is.

    Where the mount cannot rename, ``path`` is overwritten in place, in one write and padded to the old length. At worst
    a reader then sees half of each, and reads again.
    """
    try:
        os.replace(aside, path)
    except OSError as error:
        if error.errno not in CANNOT:
            raise
        text = aside.read_bytes()
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", buffering=0) as file:
            file.write(text.ljust(os.fstat(file.fileno()).st_size))
            os.fsync(file.fileno())
        aside.unlink()


def publish(aside: Path, path: Path) -> None:
    """Gives the small file ``aside`` the name ``path`` too, unless that name is taken.

    Where the mount has no links, a file is created under that name and written at once. A reader that finds it empty
    looks again.

    Raises:
        FileExistsError: Another process took the name first.
    """
    try:
        os.link(aside, path)
    except OSError as error:
        if error.errno not in CANNOT:
            raise
        mode = stat.S_IMODE(aside.stat().st_mode)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(descriptor, "wb", buffering=0) as file:
            file.write(aside.read_bytes())
            os.fsync(descriptor)
