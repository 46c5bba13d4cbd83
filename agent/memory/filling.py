"""Bytes of many files in pieces of one size, without gaps."""

from __future__ import annotations

import os
from collections.abc import Iterator

__all__ = ["Filling", "cut"]


class Filling:
    """A piece that is being filled; its memory is used again for the next one.

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self._bytes, self._filled = memoryview(bytearray(size)), 0

    def __len__(self) -> int:
        return self._filled

    @property
    def is_full(self) -> bool:
        return self._filled == len(self._bytes)

    def read(self, descriptor: int, most: int, offset: int) -> memoryview:
        """Reads of a file what fits, and returns that; nothing: the file ends there.

        Raises:
            OSError: it cannot be read.
        """
        count = os.preadv(descriptor, [self._bytes[self._filled : self._filled + most]], offset)
        self._filled += count
        return self._bytes[self._filled - count : self._filled]

    def take(self) -> memoryview:
        """What has come into it, good until the next `read`."""
        taken = self._bytes[: self._filled]
        self._filled = 0
        return taken


def cut(data: bytes, size: int) -> Iterator[memoryview]:
    """Bytes that are there already, in pieces of ``size`` at most."""
    view = memoryview(data)
    for begin in range(0, len(view), size):
        yield view[begin : begin + size]
