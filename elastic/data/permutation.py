"""A random-access permutation: position to index in O(1) time and memory, for data sets of any length.

A balanced Feistel network over the smallest domain of 4^k numbers that holds the length, with cycle walking back into
range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). The domain is less than four times the
length, so a walk takes fewer than four rounds on average. Not for secrets: the round function is a mixer, not a cipher.

Over few numbers such a network shuffles poorly: its round functions have few values to choose from, and all its
permutations are even (with 5 or 6 numbers out of 16, a chi-square test over whole orders notices after some 10,000
seeds). So up to `TABLE_LENGTH` the order is a table, shuffled as by Durstenfeld (CACM 7, 1964). The order is a format:
`version` 1 is the network at every length, and runs that began with it keep it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

VERSION = 2
TABLE_LENGTH = 256
ROUNDS = 8
MAX_LENGTH = 1 << 62
_MASK = (1 << 64) - 1
_STIRS = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST_SHIFT = np.uint64(31)
# Up to so many numbers one by one is quicker than together: numpy's calls cost as much as 20 to 30 numbers.
_FEW = 24
# A whole window is computed in pieces of this many numbers.
_PIECE = 1 << 16

Numbers = npt.NDArray[np.uint64]


def version_for(length: int) -> int:
    """The oldest version that orders ``length`` as the newest one does."""
    return VERSION if length <= TABLE_LENGTH else 1


class Permutation:
    """A permutation of ``range(length)`` fixed by ``key``.

    Args:
        length: Size of the range, 1 to 2^62.
        key: What fixes the order. Its text is hashed, so equal tuples of plain values give equal orders on every
            machine and Python version.
        version: How the order is computed.

    Raises:
        ValueError: ``length`` or ``version`` is out of range.
    """

    def __init__(self, length: int, *key: int | str, version: int = VERSION) -> None:
        if not 1 <= length <= MAX_LENGTH:
            raise ValueError(f"a permutation has a length from 1 to 2^62, not {length}")
        if not 1 <= version <= VERSION:
            raise ValueError(f"order version {version} is not known, only 1 to {VERSION}: a newer dalsegno wrote it")
        self.length = length
        self._half = max(1, ((length - 1).bit_length() + 1) // 2)
        text = repr((length, *key)).encode()
        raw = hashlib.blake2b(text, digest_size=8 * ROUNDS, person=b"dalsegno-order").digest()
        self._keys = [int.from_bytes(raw[8 * i : 8 * i + 8], "little") for i in range(ROUNDS)]
        self._table = _shuffled(length, raw) if version > 1 and length <= TABLE_LENGTH else None

    def __getitem__(self, position: int) -> int:
        """The index at ``position``.

        Raises:
            IndexError: ``position`` is outside ``range(length)``.
        """
        if not 0 <= position < self.length:
            raise IndexError(position)
        if self._table is not None:
            return self._table[position]
        return self._walk(self._encrypt(position))

    def slice(self, start: int, stop: int) -> list[int]:
        """The indices at positions ``start`` to ``stop - 1``, computed together.

        Raises:
            IndexError: The slice leaves ``range(length)``.
        """
        if not 0 <= start <= stop <= self.length:
            raise IndexError((start, stop))
        if self._table is not None:
            return self._table[start:stop]
        if stop - start <= _FEW:
            return [self[position] for position in range(start, stop)]
        values = self._encrypt_all(np.arange(start, stop, dtype=np.uint64))
        outside = np.flatnonzero(values >= self.length)
        while outside.size > _FEW:
            walked = self._encrypt_all(values[outside])
            values[outside] = walked
            outside = outside[walked >= self.length]
        result: list[int] = values.tolist()
        for position in outside.tolist():
            result[position] = self._walk(result[position])
        return result

    def window(self, start: int, stop: int) -> Window:
        """The same as a sequence that computes an index when it is asked for.

        Raises:
            IndexError: The window leaves ``range(length)``.
        """
        if not 0 <= start <= stop <= self.length:
            raise IndexError((start, stop))
        return Window(self, start, stop)

    def _walk(self, value: int) -> int:
        """Encrypts a number of the domain again and again until the result is within the length."""
        while value >= self.length:
            value = self._encrypt(value)
        return value

    def _encrypt(self, value: int) -> int:
        """One pass of the network."""
        half, low = self._half, (1 << self._half) - 1
        left, right = value >> half, value & low
        for key in self._keys:
            left, right = right, left ^ (_mix(right, key) & low)
        return (left << half) | right

    def _encrypt_all(self, values: Numbers) -> Numbers:
        """The same for each of ``values``, whose type, uint64, wraps by itself."""
        half, low = np.uint64(self._half), np.uint64((1 << self._half) - 1)
        left, right = values >> half, values & low
        mixed, shifted = np.empty_like(values), np.empty_like(values)
        for key in self._keys:
            np.add(right, np.uint64(key), out=mixed)
            for shift, factor in _STIRS:
                np.right_shift(mixed, shift, out=shifted)
                np.bitwise_xor(mixed, shifted, out=mixed)
                np.multiply(mixed, factor, out=mixed)
            np.right_shift(mixed, _LAST_SHIFT, out=shifted)
            np.bitwise_xor(mixed, shifted, out=mixed)
            np.bitwise_and(mixed, low, out=mixed)
            np.bitwise_xor(left, mixed, out=left)
            left, right = right, left
        return (left << half) | right


class Window(Sequence[int]):
    """Consecutive positions of a permutation, computed when asked for."""

    def __init__(self, permutation: Permutation, start: int, stop: int) -> None:
        self._permutation, self._positions = permutation, range(start, stop)

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        chosen = self._positions[index]
        if isinstance(chosen, int):
            return self._permutation[chosen]
        if chosen.step == 1:
            return self._permutation.slice(chosen.start, max(chosen.start, chosen.stop))
        return [self._permutation[position] for position in chosen]

    def __iter__(self) -> Iterator[int]:
        for first in range(0, len(self), _PIECE):
            yield from self[first : first + _PIECE]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have none

    def __repr__(self) -> str:
        return f"Window({self._positions} of {self._permutation.length})"


def _shuffled(length: int, seed: bytes) -> list[int]:
    """``range(length)`` shuffled by numbers from SHAKE-256; modulo 2^64 their bias is below 2^-56."""
    raw = hashlib.shake_256(seed).digest(8 * length)
    table = list(range(length))
    for last in range(length - 1, 0, -1):
        other = int.from_bytes(raw[8 * last : 8 * last + 8], "little") % (last + 1)
        table[last], table[other] = table[other], table[last]
    return table


def _mix(value: int, key: int) -> int:
    """Finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) over value and key; `_encrypt_all` has it too."""
    value = (value + key) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
