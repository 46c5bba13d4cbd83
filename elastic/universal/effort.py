"""How much of a machine a conversion may take."""

from __future__ import annotations

from dataclasses import dataclass

THREADS = 4
MEMORY_BYTES = 16 << 20
# Each thread's buffers (values, converted values, values to compare with) and short-lived memory.
_SHARES = 4
_SMALLEST_PIECE_BYTES, _LARGEST_PIECE_BYTES = 4 << 10, 4 << 20
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class Effort:
    """What a conversion may take of the machine.

    Attributes:
        threads: Parameters that are worked on at the same time.
        memory: Bytes of buffers for all threads together. What Python and torch need themselves comes on top.
    """

    threads: int = THREADS
    memory: int = MEMORY_BYTES

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"threads must be at least 1, not {self.threads}")
        least = self.threads * _SHARES * _SMALLEST_PIECE_BYTES
        if self.memory < least:
            raise ValueError(f"{self.threads} threads need at least {least} bytes of memory, not {self.memory}")

    @property
    def piece(self) -> int:
        """Bytes of values that a thread handles at once, in whole pages."""
        return min(_LARGEST_PIECE_BYTES, self.memory // self.threads // _SHARES // _PAGE_BYTES * _PAGE_BYTES)
