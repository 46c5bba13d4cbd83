"""Files of a checkpoint that are summed while they are written, and on their way to the disk meanwhile."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import FileEntry
from ..checkpoint.durability import begin_to_write
from ..checkpoint.spares import make_room_for, take_spare_of
from ..checkpoint.summing import SummingWriter
from ..universal.recording import without_crc32
from .packed import PackedFile

# Torch writes some five pieces for each tensor, of which all but one are short: these are put together up to so many
# bytes.
SHORT_BYTES, TOGETHER_BYTES = 4 << 10, 64 << 10
PAGE_BYTES = 4 << 10
# The disk begins with so many bytes while the next ones are written, so that little is left to wait for at the end.
AHEAD_BYTES = 32 << 20


@dataclass(frozen=True)
class _Sum:
    """The checksum of a file that was written here, and how the file looked then."""

    root: Path
    entry: FileEntry
    looked: tuple[int, ...]


class Summed:
    """What was summed while it was written: nobody needs to read that back. A context manager around the writing.

    Nothing but `write_files` tells it, through whatever it is called by. Not durable yet.

    Args:
        check_room: Raises OSError (ENOSPC) where new files must not take more. Asked before each `AHEAD_BYTES` of them,
            but for the first.
    """

    def __init__(self, check_room: Callable[[], None] = lambda: None) -> None:
        self._check_room = check_room
        self._grown = 0
        self._found: list[_Sum] = []

    def __enter__(self) -> Summed:
        self._before = _summed.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _summed.reset(self._before)

    def grows(self, count: int) -> None:
        """New files have so many bytes more."""
        self._grown += count
        if self._grown >= AHEAD_BYTES:
            self._grown = 0
            self._check_room()

    def add(self, one: _Sum) -> None:
        """A file is written."""
        self._found.append(one)

    def entries(self, root: Path) -> tuple[FileEntry, ...]:
        """Files below ``root`` that nobody has touched since."""
        last = {one.entry.path: one for one in self._found if one.root == root}
        return tuple(one.entry for path, one in last.items() if _look(root / path) == one.looked)


_summed: ContextVar[Summed] = ContextVar("summed")


def _look(path: Path) -> tuple[int, ...] | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def _date_back(path: Path) -> None:
    """Gives it a time that no later change of it has: some kernels' clocks for files tick every 10 ms."""
    with contextlib.suppress(OSError):
        about = os.lstat(path)
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns - 10**9), follow_symlinks=False)


class SummedFile:
    """A new file. As a context manager it is closed at the end.

    What fails is kept for `finish`: it must not pass through torch's C++ code, which would try to write on.

    Args:
        path: Is not there yet.
        moved: Told of bytes that were written just now.
        anew: What is there is replaced. Whoever has it open or mapped still sees that, perhaps to write it once more.
    """

    def __init__(self, path: Path, moved: Callable[[int], None] = lambda count: None, *, anew: bool = False) -> None:
        self._path, self._moved, self._anew = path, moved, anew
        self._mode = 0o666 if anew else 0o644  # what libraries write has the umask's
        self._error: OSError | None = None
        self._summed = _summed.get(None)
        self._short = bytearray()
        self._told = 0

    def __enter__(self) -> SummedFile:
        descriptor = take_spare_of(self._path)
        self._is_spare = descriptor is not None
        if descriptor is None:
            descriptor = self._new()
        self._file = SummingWriter(descriptor, self._moved)
        return self

    def _new(self) -> int:
        how = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        if self._anew and _is_regular(self._path):
            os.unlink(self._path)
        how |= os.O_TRUNC if self._anew else os.O_EXCL
        try:
            return os.open(self._path, how, self._mode)
        except OSError as error:
            make_room_for(self._path, error)
            return os.open(self._path, how, self._mode)

    def __exit__(self, *_: object) -> None:
        try:
            self._append(last=True)
        finally:
            os.close(self._file.descriptor)

    @property
    def size(self) -> int:
        """Bytes that were written."""
        return self._file.size + len(self._short)

    def write(self, data: Any) -> int:
        """Appends bytes, of whatever has a buffer. Returns how many there were."""
        view = memoryview(data).cast("B")
        count = len(view)
        if count < SHORT_BYTES:
            self._short += view
            if len(self._short) >= TOGETHER_BYTES:
                self._append()
        else:
            self._append(view)
        return count

    def _append(self, view: memoryview | bytes = b"", *, last: bool = False) -> None:
        """Writes what has come together, then these, in whole pages. The rest waits for more, unless this is the last.

        A page of an older file that is written in part would have to be read, if it is no longer in memory.
        """
        short, self._short = self._short, bytearray()
        left = 0 if last else (len(short) + len(view)) % PAGE_BYTES
        if left > len(view):
            short += view
            view = b""
            short, self._short = short[: len(short) - left], short[len(short) - left :]
        else:
            self._short += view[len(view) - left :]
            view = view[: len(view) - left]
        begin = -len(short) % PAGE_BYTES
        short += view[:begin]
        try:
            if self._error is None:
                self._put(short)
                for at in range(begin, max(len(view), begin + 1), AHEAD_BYTES):
                    self._put(view[at : at + AHEAD_BYTES])
                    self._begin_to_write()
        except OSError as error:
            self._error = error

    def _put(self, data: bytes | bytearray | memoryview) -> None:
        before = self._file.size
        try:
            self._file.write(data)
        except OSError as error:
            make_room_for(self._path, error)
            self._file.write(memoryview(data)[self._file.size - before :])
        # What is written over has its memory.
        if self._summed is not None and not self._is_spare:
            self._summed.grows(len(data))

    def _begin_to_write(self) -> None:
        if self.size - self._told >= AHEAD_BYTES:
            begin_to_write(self._file.descriptor, self._told, self.size - self._told)
            self._told = self.size

    def flush(self) -> None:
        """Does nothing: `finish` does it. (Torch calls it.)"""

    def finish(self, *, lasting: bool = True) -> str:
        """Returns the checksum. Raises what went wrong.

        Args:
            lasting: Make it durable. False: somebody else will.
        """
        self._append(last=True)
        if self._error is not None:
            raise self._error
        if self._is_spare:
            os.ftruncate(self._file.descriptor, self.size)
        if lasting:
            os.fsync(self._file.descriptor)
        return self._file.digest


def save(content: Any, file: SummedFile) -> None:
    """Writes ``bytes`` as they are, a `PackedFile` in its own form, and what else it is as ``torch.save`` does."""
    if isinstance(content, bytes):
        file.write(content)
    elif isinstance(content, PackedFile):
        for piece in content.pieces():
            file.write(piece)
    else:
        with without_crc32():
            torch.save(content, file)  # type: ignore[arg-type]  # all that it calls are write and flush


def write_files(root: Path, files: Mapping[str, Any]) -> None:
    """Writes files, not durable yet; a `Summed` hears of their checksums.

    Args:
        root: The checkpoint's directory.
        files: By path from there, what `save` takes.

    Raises:
        OSError: One could not be written.
    """
    for path, content in files.items():
        target = root / path
        if "/" in path:
            target.parent.mkdir(parents=True, exist_ok=True)
        with SummedFile(target, anew=True) as file:
            save(content, file)
            digest = file.finish(lasting=False)
        if (summed := _summed.get(None)) is not None:
            _date_back(target)
            if (looked := _look(target)) is not None:
                summed.add(_Sum(root, FileEntry(path, file.size, digest), looked))
