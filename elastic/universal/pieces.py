"""Where each parameter's values lie in the flat tensors of a sharded ZeRO checkpoint's ranks."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dalsegno.protos.reads import cut, slot

Shapes = Sequence[Mapping[str, tuple[int, ...]]]
"""By (sub-)group, the parameters' shapes by name, in the order in which they lie there."""
GROUP_ALIGNMENT = 2
"""DeepSpeed pads a flat group to a multiple of so many elements on each rank (``nccl_start_alignment_factor``)."""


class Piece(NamedTuple):
    """A run of one parameter's values: elements ``[start, start + numel)`` of a flat tensor of ``rank``'s file.

    ``first`` is the place of the first one among the parameter's elements.
    """

    rank: int
    group: int
    start: int
    numel: int
    first: int


@dataclass(frozen=True)
class Parameter:
    """One parameter: its full shape, its (sub-)group, and the pieces that make it up in order, by ascending ranks."""

    name: str
    shape: tuple[int, ...]
    group: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def of_rank(self, rank: int) -> Piece | None:
        """The piece of one rank, if that has any. Searched, as there may be hundreds of ranks and many parameters."""
        at = bisect_left(self.pieces, rank, key=lambda piece: piece.rank)
        return self.pieces[at] if at < len(self.pieces) and self.pieces[at].rank == rank else None

    def within(self, start: int, stop: int) -> Iterator[tuple[Piece, int, int]]:
        """Where elements ``[start, stop)`` lie: each piece that has some, and which ones it has."""
        at = max(0, bisect_right(self.pieces, start, key=lambda piece: piece.first) - 1)
        for index in range(at, len(self.pieces)):
            piece = self.pieces[index]
            if piece.first >= stop:
                break
            low, high = max(start, piece.first), min(stop, piece.first + piece.numel)
            if low < high:
                yield piece, low, high


def partitioned(shapes: Shapes, ranks: int) -> dict[str, Parameter]:
    """Stage 3: each parameter is cut by itself, and every rank has a slot for its part (``stage3.py``)."""
    parameters = {}
    for group, names in enumerate(shapes):
        offset = 0
        for name, shape in names.items():
            numel = math.prod(shape)
            size = slot(numel, ranks)
            pieces = tuple(Piece(rank, group, offset, end - low, low) for rank, low, end in cut(0, numel, size))
            parameters[name] = Parameter(name, shape, group, pieces)
            offset += size
    return parameters


def flattened(shapes: Shapes, ranks: int) -> dict[str, Parameter]:
    """Stages 1 and 2: a group's parameters lie in a row, which is cut (``stage_1_and_2.py``, ``bf16_optimizer.py``).

    Not with pads between parameters: see `mapped`.
    """
    parameters = {}
    for group, names in enumerate(shapes):
        size = slot(sum(map(math.prod, names.values())), ranks, GROUP_ALIGNMENT)
        offset = 0
        for name, shape in names.items():
            numel = math.prod(shape)
            pieces = tuple(
                Piece(rank, group, low - rank * size, end - low, low - offset)
                for rank, low, end in cut(offset, offset + numel, size)
            )
            parameters[name] = Parameter(name, shape, group, pieces)
            offset += numel
    return parameters


def mapped(shapes: Shapes, mappings: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Parameter]:
    """Stages 1 and 2, of any layout: what all ranks say of their own pieces. ``mappings[rank][group][name]``."""
    parameters = {}
    for group, names in enumerate(shapes):
        for name, shape in names.items():
            pieces: list[Piece] = []
            first = 0
            for rank, mapping in enumerate(mappings):
                if name in mapping[group]:
                    start, numel = int(mapping[group][name].start), int(mapping[group][name].numel)
                    pieces.append(Piece(rank, group, start, numel, first))
                    first += numel
            parameters[name] = Parameter(name, shape, group, tuple(pieces))
    return parameters


def of_rank(parameters: Mapping[str, Parameter], rank: int) -> list[tuple[str, Piece]]:
    """One rank's pieces, with the names of their parameters."""
    found = ((name, parameter.of_rank(rank)) for name, parameter in parameters.items())
    return [(name, piece) for name, piece in found if piece is not None]


def says(mapping: Sequence[Mapping[str, Any]], pieces: Sequence[tuple[str, Piece]]) -> bool:
    """Whether a rank's own ``param_slice_mappings`` says that it has just these pieces."""
    there = {
        (group, name, int(address.start), int(address.numel))
        for group, names in enumerate(mapping)
        for name, address in names.items()
    }
    return there == {(piece.group, name, piece.start, piece.numel) for name, piece in pieces}


__all__ = ("GROUP_ALIGNMENT", "Parameter", "Piece", "Shapes", "flattened", "mapped", "of_rank", "partitioned", "says")
