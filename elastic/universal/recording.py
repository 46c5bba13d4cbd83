"""What ``torch.save`` writes around the bytes of tensors: a file is made without holding, or copying, what is in it.

Imports torch and nothing of DeepSpeed's.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, BinaryIO, cast

import torch


def recorded(content: Any) -> list[bytes | int]:
    """The file that ``torch.save`` makes of ``content``, with a number of bytes in the place of each storage's.

    Storages come in the order of `storage_order`. Their memory is not touched. One without bytes is not among them.

    Raises:
        RuntimeError: ``torch.save`` went back in the file.
    """
    recorder = _Recorder()
    with without_crc32(), torch.serialization.skip_data():
        torch.save(content, cast(BinaryIO, recorder))
    return [part if isinstance(part, int) else bytes(part) for part in recorder.parts if part]


def storage_order(count: int) -> list[int]:
    """Numbers of ``count`` storages in the order in which ``torch.save`` writes them.

    A storage's number says how many others a content has before it.

    Raises:
        RuntimeError: This version of torch has an order of its own.
    """
    return sorted(range(count), key=str) if _sorts_as_text() else list(range(count))


def dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie side by side, in any order of its dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


@lru_cache(maxsize=1)
def _sorts_as_text() -> bool:
    """Whether storages are sorted by their numbers as texts, as torch 2.6 does: 0, 1, 10, 2."""
    probe = recorded([torch.empty(n + 1, dtype=torch.uint8) for n in range(11)])
    sizes = [part for part in probe if isinstance(part, int)]
    for as_text, numbers in ((False, range(11)), (True, sorted(range(11), key=str))):
        if sizes == [n + 1 for n in numbers]:
            return as_text
    raise RuntimeError("torch.save writes tensors in an order that is not known")


# The option is a thread's own since torch 2.13 and the process's before: set where it is used, by one at a time.
_crc32 = threading.RLock()


@contextmanager
def without_crc32() -> Iterator[None]:
    """Leaves out the archive's own checksums, which cost more than ours and which torch never looks at."""
    with _crc32:
        before = torch.serialization.get_crc32_options()
        torch.serialization.set_crc32_options(False)
        try:
            yield
        finally:
            torch.serialization.set_crc32_options(before)


class _Recorder(io.RawIOBase):
    """A file that keeps what is written, and the lengths of the places that are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytearray | int] = [bytearray()]
        self._size = 0

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, data: Any, /) -> int:
        view = memoryview(data).cast("B")
        last = self.parts[-1]
        if isinstance(last, int):
            self.parts.append(last := bytearray())
        last.extend(view)
        self._size += len(view)
        return len(view)

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        ahead = offset if whence == os.SEEK_CUR else offset - self._size
        if ahead < 0 or (ahead > 0 and isinstance(self.parts[-1], int)):
            raise io.UnsupportedOperation("torch.save went back, or left out two records at once")
        if ahead:
            self.parts.append(ahead)
            self._size += ahead
        return self._size
