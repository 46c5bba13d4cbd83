"""Whether values have changed, by some of them: in each step that costs little, where a sum of all would not.

What is written through ``tensor.data`` torch does not count. Such a change of a whole tensor (a weight decay by hand,
weights that are merged or swapped) is in any sample of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import xxhash
from torch import Tensor

from ..rank.tensor_bytes import as_it_lies, bytes_of
from ..universal.recording import dense

__all__ = ["Sample", "Samples"]

# Bytes that are looked at of each tensor, and how many tensors at once: 0.6 µs for each.
BYTES, MOST_TENSORS = 64, 512


class Sample(NamedTuple):
    """Which values, and what they were."""

    first: int
    place: float
    digest: bytes


class Samples:
    """Of these tensors, as far as they lie in the host's memory in one piece. They are kept alive."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        here = [one for one in tensors if one.device.type == "cpu" and one.numel() and dense(one) and _lies_there(one)]
        views = [memoryview(bytes_of(as_it_lies(tensor))) for tensor in here]
        # Each with the last place where a piece of it can begin.
        self._values = [(view, max(0, len(view) - BYTES)) for view in views]
        self._stride = -(-len(views) // MOST_TENSORS) or 1
        self._random = random.Random()  # The script's own generators are not touched.

    def take(self) -> Sample:
        """Values at places that nobody can foresee."""
        first, place = self._random.randrange(self._stride), self._random.random()
        return Sample(first, place, self._digest(first, place))

    def are_as(self, sample: Sample) -> bool:
        """Whether its values are what they were."""
        return self._digest(sample.first, sample.place) == sample.digest

    def _digest(self, first: int, place: float) -> bytes:
        chosen = self._values[first :: self._stride]
        pieces = [view[(begin := int(place * last)) : begin + BYTES] for view, last in chosen]
        return xxhash.xxh3_128(b"".join(pieces)).digest()


def _lies_there(tensor: Tensor) -> bool:
    """Its values are written down, and not computed from what is: bytes of that would not change with it."""
    return not (tensor.is_conj() or tensor.is_neg())
