"""Files of ``torch.save``: where a tensor's bytes lie in one, and what surrounds the bytes in a new one.

Such a file is a zip archive without compression. Each storage is a record with its bytes as they are in memory. So a
range of a tensor can be read without mapping or loading the rest, and a file can be written without holding its tensor.
"""

from __future__ import annotations

import os
import sys
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from .archive import HEADER_BYTES, first_byte
from .loading import load
from .recording import recorded

_BYTE_ORDER = "byteorder"


class NotInPieces(Exception):
    """Torch can load the file, but it cannot be read in pieces: an old format, or another machine's byte order."""


class OpenedRecord(Protocol):
    """A file that is open."""

    @property
    def path(self) -> Path: ...
    @property
    def descriptor(self) -> int: ...


@dataclass(frozen=True)
class Extent:
    """A run of bytes in a file of ``torch.save``."""

    file: OpenedRecord
    start: int
    nbytes: int

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fills ``buffer`` with the bytes from ``offset`` on. From any thread.

        Raises:
            OSError: The file system says no, or the file is shorter than it was.
        """
        done = 0
        while done < len(buffer):
            count = os.preadv(self.file.descriptor, [buffer[done:]], self.start + offset + done)
            if count == 0:
                raise OSError(f"{self.file.path.name} ended early: was it changed while it was read?")
            done += count


class TorchFile:
    """A file of ``torch.save``, open.

    Attributes:
        path: Where it is.
        content: What was saved. Its tensors are memory-mapped: pages of them that are touched count as this process's
            memory.
        descriptor: The open file; -1 once it is closed.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file.

        Raises:
            NotInPieces: It is of a format that only ``torch.load`` knows.
            OSError: It cannot be read.
            pickle.UnpicklingError: It holds a class that is not on the closed list.
            RuntimeError: It is not a whole file of ``torch.save``.
        """
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.pread(self.descriptor, 1, 0) == b"\x80":  # a bare pickle
                raise NotInPieces(f"{path.name} is of torch's format before 1.6")
            mapped: list[tuple[int, int]] = []
            self.content: Any = load(
                path, mmap=True, seen=lambda storage: mapped.append((storage.data_ptr(), storage.nbytes()))
            )
            self._base = _mapping_base(path, self.descriptor, mapped)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> TorchFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the file: pieces can no longer be read. ``content`` stays mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def extent(self, tensor: Tensor, start: int = 0, numel: int | None = None) -> Extent:
        """The bytes of elements ``[start, start + numel)`` of a `dense` tensor of ``content``, in storage order."""
        count = tensor.numel() - start if numel is None else numel
        if count == 0:
            return Extent(self, 0, 0)
        first = tensor.data_ptr() - self._base + start * tensor.element_size()
        return Extent(self, first, count * tensor.element_size())


def _mapping_base(path: Path, descriptor: int, mapped: list[tuple[int, int]]) -> int:
    """The address at which torch mapped the file. Torch hands out parts of the mapping, but not its beginning.

    The addresses of *all* storages are compared with the places of all records: one base address fits, or none.
    """
    records = sorted((start, size) for start, size in _storage_records(path, descriptor) if size > 0)
    storages = sorted({(address, size) for address, size in mapped if size > 0})
    base = storages[0][0] - records[0][0] if storages and records else 0
    if [(address - base, size) for address, size in storages] != records:
        raise NotInPieces(f"{path.name}: its records are not where torch mapped them")
    return base


def _storage_records(path: Path, descriptor: int) -> list[tuple[int, int]]:
    """(first byte, size) of every storage's record."""
    found = []
    with open(os.dup(descriptor), "rb") as file, zipfile.ZipFile(file) as archive:
        listed = archive.infolist()
    for info in listed:
        start = first_byte(info, os.pread(descriptor, HEADER_BYTES, info.header_offset))
        parts = info.filename.split("/")
        # Not read with zipfile, which wants a checksum that torch may have left out.
        if parts[1:] == [_BYTE_ORDER] and os.pread(descriptor, info.file_size, start).decode() != sys.byteorder:
            raise NotInPieces(f"{path.name} was saved on a machine with another order of bytes")
        if len(parts) == 3 and parts[1] == "data":
            found.append((start, info.file_size))
    return found


@dataclass(frozen=True)
class Frame:
    """What ``torch.save`` writes around the bytes of the one tensor in its content.

    Attributes:
        head: What comes before the tensor's bytes.
        nbytes: Number of the tensor's bytes.
        tail: What comes after them.
    """

    head: bytes
    nbytes: int
    tail: bytes


@lru_cache(maxsize=1024)
def frame(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    stride: tuple[int, ...] | None = None,
    key: str | None = None,
    cat_dim: int | None = None,
) -> Frame:
    """The frame of a file that holds one tensor, bare or as ``{"cat_dim": ..., "param": tensor}``.

    Args:
        shape: The tensor's shape.
        dtype: The tensor's dtype.
        stride: In elements; None: contiguous. The tensor must be `dense`.
        key: The tensor's key in a dictionary; None: the content is the bare tensor.
        cat_dim: DeepSpeed's entry before the tensor; None: no such entry.

    The archive's own checksums are left out, as ``set_crc32_options(False)`` does: they would not be of the values that
    are written, and torch never reads them.
    """
    # The storage is never touched, so it takes addresses but no memory.
    tensor = torch.empty(shape, dtype=dtype) if stride is None else torch.empty_strided(shape, stride, dtype=dtype)
    content: Any = tensor if key is None else {key: tensor}
    if key is not None and cat_dim is not None:
        content = {"cat_dim": cat_dim, key: tensor}
    found = recorded(content)
    head, nbytes, tail = (*found, 0, b"") if len(found) == 1 else found  # nothing is left out of a tensor without bytes
    return Frame(cast(bytes, head), cast(int, nbytes), cast(bytes, tail))
