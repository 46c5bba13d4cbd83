"""Appends to a file, and sums its bytes while they pass."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import xxhash

__all__ = ["WRITE_BYTES", "SummingWriter"]

# Bytes of one write. With larger writes the page cache takes larger blocks of memory, and on a virtual machine those
# are blocks that nobody has touched yet: on Linux 6.18 writes of 256 KiB and more were measured to cost up to four
# times as much. Writes below 64 KiB cost too many system calls.
WRITE_BYTES = 128 << 10


class SummingWriter:
    """What is written to an open file, from its beginning. For one thread; it does not close the file.

    Args:
        descriptor: The file, open for writing.
        moved: Called with the number of bytes written just now.

    Attributes:
        size: Bytes written.
    """

    def __init__(self, descriptor: int, moved: Callable[[int], None] = lambda count: None) -> None:
        self.descriptor, self._moved = descriptor, moved
        self._sum = xxhash.xxh3_128()
        self.size = 0

    @property
    def digest(self) -> str:
        """The checksum of what was written, as manifests have it."""
        return self._sum.hexdigest()

    def write(self, data: Any) -> None:
        """Appends bytes, of whatever has a buffer.

        Raises:
            OSError: The file system says no. What was written until then is in the sum.
        """
        rest = memoryview(data).cast("B")
        while rest:
            # Up to a boundary in the file: writes that begin and end within a page cost the kernel more.
            part = rest[: WRITE_BYTES - self.size % WRITE_BYTES]
            count = os.write(self.descriptor, part)  # It may take less than it was given.
            self._sum.update(part[:count])
            rest, self.size = rest[count:], self.size + count
            self._moved(count)
