"""Making many files durable at once, where the kernel can do that and says what failed.

``fsync`` makes one file durable, and each call has the disk write its journal. ``syncfs`` (Linux) does it for all of a
file system, names in directories included, in about the time of one ``fsync``. Three things limit its use, see
`at_once`:

- Since Linux 5.8 it reports bytes that could not be written back, but *once for each descriptor*, and only failures
  after that descriptor was opened. So a `FileSystem` is opened before the first file is written.
- Only file systems whose data goes straight to a disk of this machine report reliably. NFS, FUSE, Lustre and the like
  may write back elsewhere, or later; an overlay does not pass on what the file system below it has noted.
- It also waits for what other processes have written to the same file system.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from pathlib import Path
from types import TracebackType

# The numbers in statfs(2) of the file systems whose reports are reliable. (ext2 and ext3 have ext4's number.)
TELLING = {0xEF53: "ext4", 0x58465342: "xfs", 0x9123683E: "btrfs", 0x01021994: "tmpfs"}
# The first Linux whose syncfs reports bytes that could not be written back (commit 735e4ae5ba28).
FIRST_LINUX = (5, 8)
# Syncing a file by itself costs about as much as writing this many bytes: measured on ext4, see docs/conversion.md.
BYTES_PER_SYNC = 256 << 10
# The most bytes of other processes that one sync may wait for. Nothing is heard while it runs, so it must end soon.
MOST_OF_OTHERS_BYTES = 1 << 30
# Fewer files than this are synced one by one, several at a time: one sync of all would save nothing.
FEWEST = 16

_MEMINFO = Path("/proc/meminfo")
_UNWRITTEN = re.compile(rb"^(?:Dirty|Writeback):\s+(\d+) kB$", re.MULTILINE)


def at_once(files: int, others: int) -> bool:
    """Whether one sync of the whole file system is cheaper than one of each file.

    Args:
        files: How many files are to be made durable.
        others: Bytes of other processes that wait to be written. The sync waits for them, too.
    """
    return files >= FEWEST and others <= min(files * BYTES_PER_SYNC, MOST_OF_OTHERS_BYTES)


def tells(kind: int, release: str) -> bool:
    """Whether ``syncfs`` reports all that could not be made durable.

    Args:
        kind: The file system's type, as in ``statfs``.
        release: The Linux release, as ``uname -r`` prints it.
    """
    version = re.match(r"(\d+)\.(\d+)", release)
    return kind in TELLING and version is not None and tuple(map(int, version.groups())) >= FIRST_LINUX


def is_of_this_machine(directory: Path) -> bool:
    """Whether its file system is known to be used by this machine alone. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _kind(descriptor) in TELLING
    finally:
        os.close(descriptor)


def unwritten() -> int:
    """Bytes that this machine has in memory and not on a disk yet; 0 if it does not say."""
    try:
        found = _UNWRITTEN.findall(_MEMINFO.read_bytes())
    except OSError:
        return 0
    return sum(int(kilobytes) << 10 for kilobytes in found)


def begin_to_write(descriptor: int, start: int, count: int) -> None:
    """Has the disk begin with these bytes of a file, and waits for nothing. No promise; what fails ``fsync`` tells.

    Where there is no such call (Linux has it) they wait until then.
    """
    if _sync_file_range is not None:
        _sync_file_range(descriptor, ctypes.c_int64(start), ctypes.c_int64(count), _WRITE)


class FileSystem:
    """The file system of a directory, to be made durable as a whole. A context manager.

    Args:
        directory: It exists. Nothing that is to be made durable has been written to it yet.

    Attributes:
        tells: Whether `sync` may be called. If it is False, each file needs an ``fsync`` of its own.

    Raises:
        OSError: The directory cannot be opened.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.tells = _may_ask() and tells(_kind(self._descriptor), os.uname().release)

    def __enter__(self) -> FileSystem:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def sync(self) -> None:
        """Makes all files and names durable that existed when it was called.

        Raises:
            OSError: Something that any process has written since this object was made is lost. It is reported once.
        """
        assert self.tells
        assert _syncfs is not None
        if _syncfs(self._descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(self._directory))


def _may_ask() -> bool:
    """Whether ``syncfs`` exists and no sandbox forbids it: a call then gets as far as rejecting the descriptor."""
    return _syncfs is not None and _syncfs(-1) != 0 and ctypes.get_errno() == errno.EBADF


def _kind(descriptor: int) -> int:
    """``f_type`` of ``fstatfs``, the first field of its structure; 0: not known."""
    answer = (ctypes.c_long * 64)()  # much more than the structure has
    if _fstatfs is None or _fstatfs(descriptor, ctypes.byref(answer)) != 0:
        return 0
    return int(answer[0]) & 0xFFFFFFFF


_libc = ctypes.CDLL(None, use_errno=True)
_syncfs = getattr(_libc, "syncfs", None)
_fstatfs = getattr(_libc, "fstatfs", None)
_sync_file_range = getattr(_libc, "sync_file_range", None)
_WRITE = ctypes.c_uint(2)  # SYNC_FILE_RANGE_WRITE
