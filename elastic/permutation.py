"""A random-access permutation: position to index in O(1) time and memory, for data sets of any length.

A balanced Feistel network over the smallest domain of 4^k numbers that holds the length, with cycle walking back into
range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). The domain is less than four times the
length, so a walk takes fewer than four rounds on average. Not for secrets: the round function is a mixer, not a cipher.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

ROUNDS = 8
MAX_LENGTH = 1 << 62
_MASK = (1 << 64) - 1


class Permutation:
    """A permutation of ``range(length)`` fixed by ``key``.

    Args:
        length: Size of the range, 1 to 2^62.
        key: Whatever fixes the order; its text is hashed, so equal tuples of plain values give equal orders on every
            machine and Python version.

    Raises:
        ValueError: ``length`` is out of range.
    """

    def __init__(self, length: int, *key: int | str) -> None:
        if not 1 <= length <= MAX_LENGTH:
            raise ValueError(f"a permutation has a length from 1 to 2^62, not {length}")
        self.length = length
        self._half = max(1, ((length - 1).bit_length() + 1) // 2)
        digest = hashlib.blake2b(repr((length, *key)).encode(), digest_size=8 * ROUNDS, person=b"dalsegno-order")
        raw = digest.digest()
        self._keys = [int.from_bytes(raw[8 * i : 8 * i + 8], "little") for i in range(ROUNDS)]

    def __getitem__(self, position: int) -> int:
        """The index at ``position``.

        Raises:
            IndexError: ``position`` is outside ``range(length)``.
        """
        if not 0 <= position < self.length:
            raise IndexError(position)
        index: int = self._encrypt(position)
        while index >= self.length:
            index = self._encrypt(index)
        return index

    def slice(self, start: int, stop: int) -> Sequence[int]:
        """The indices at positions ``start`` to ``stop - 1``, computed together.

        Raises:
            IndexError: The slice leaves ``range(length)``.
        """
        if not 0 <= start <= stop <= self.length:
            raise IndexError((start, stop))
        values = self._encrypt(np.arange(start, stop, dtype=np.uint64))
        outside = np.flatnonzero(values >= self.length)
        while outside.size:
            values[outside] = self._encrypt(values[outside])
            outside = outside[values[outside] >= self.length]
        result: list[int] = values.tolist()
        return result

    def _encrypt(self, value: Any) -> Any:
        """One pass of the network, alike for a Python int and for a uint64 array (which wraps by itself)."""
        half, low = self._half, (1 << self._half) - 1
        left, right = value >> half, value & low
        for key in self._keys:
            left, right = right, left ^ (_mix(right, key) & low)
        return (left << half) | right


def _mix(value: Any, key: int) -> Any:
    """Finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) over value and key."""
    value = (value + key) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
