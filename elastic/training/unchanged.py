"""Whether a rank still holds exactly what it held at its last boundary. Pure.

Three things must say so. No optimizer's step has begun. Each tensor of the state lies where it lay, and torch has
counted no change of it (``_version``; optimizers whose kernels do not count are seen by their step). All else that the
state has, numbers and names, is the same. Where one of them is not clear, the answer is no.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Boundaries in which there is one look.
_LOOKED_AT_EVERY = 128
_PLAIN = (bool, int, float, str, type(None))


class UnclearError(ValueError):
    """Nobody could tell whether this has changed."""


@dataclass(frozen=True)
class SeenState:
    """A state, as it was looked at.

    Attributes:
        places: Of each tensor, by its path: where its values lie and how, in the order of the state.
        rest: All else, but for what changes with each step (see `BoundaryNote.plain`).
    """

    places: tuple[tuple[str, Any], ...]
    rest: Any


@dataclass(frozen=True)
class BoundaryNote:
    """What is noted at a boundary.

    Attributes:
        step: Optimizer steps done.
        versions: How often torch has counted a change of each tensor.
        plain: What changes with each step and is no tensor: hyperparameters, schedules, a loss scale.
        witnessed: An optimizer was seen to step before it. Otherwise this training steps in a way that is not seen.
    """

    step: int
    versions: tuple[int, ...]
    plain: Any
    witnessed: bool


@dataclass(frozen=True)
class Now:
    """The same a moment later.

    Attributes:
        stepping: An optimizer's step has begun since the boundary.
        lone: Tensors of this rank's own (by place in the state) that may not have moved since they were last compared
            with rank 0's; and their versions then.
    """

    seen: SeenState
    versions: tuple[int, ...]
    plain: Any
    stepping: bool
    lone: Mapping[int, int]


def why_not(known: SeenState, boundary: BoundaryNote, now: Now) -> str:
    """Why the state is not surely that of the boundary; empty: it is.

    Args:
        known: The state when it was last looked at.
        boundary: The last boundary.
        now: This moment.
    """
    if now.stepping:
        return "an optimizer has begun its step"
    if not boundary.witnessed:
        return "no optimizer was seen to step before the boundary"
    if now.seen.places != known.places:
        return f"{_first_other(known.places, now.seen.places)} is another tensor than the one that is watched"
    if len(boundary.versions) != len(known.places):
        return "the boundary was not noted"
    for (path, _), before, after in zip(known.places, boundary.versions, now.versions, strict=True):
        if before != after:
            return f"{path} has changed"
    for index, version in now.lone.items():
        if boundary.versions[index] != version:
            return f"{known.places[index][0]} is this rank's own"
    if now.plain != boundary.plain:
        return "a hyperparameter, a schedule or another small part has changed"
    return "" if now.seen.rest == known.rest else "something else in the state is not as it was"


def _first_other(before: Sequence[tuple[str, Any]], after: Sequence[tuple[str, Any]]) -> str:
    for one, other in zip(before, after, strict=False):
        if one != other:
            return one[0]
    return "a tensor"


def plain(value: Any, *, where: bool = True) -> Any:
    """A copy that can be compared: of containers, plain values, and where tensors lie (``where``; else only that).

    Raises:
        UnclearError: There is something else in it.
    """
    kind = type(value)
    if kind in _PLAIN:
        return kind.__name__, value
    if hasattr(value, "data_ptr") and hasattr(value, "_version"):
        return ("tensor", value.data_ptr(), value._version) if where else "tensor"
    if isinstance(value, Mapping):
        return tuple((plain(key), plain(item, where=where)) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        items = value if isinstance(value, list | tuple) else sorted(value, key=repr)
        return tuple(plain(item, where=where) for item in items)
    raise UnclearError(f"a {kind.__name__} in the state: nobody knows whether it changes")


def is_due(boundaries: int) -> bool:
    """Whether a state is looked at behind so many boundaries: often at first, and then once in 128.

    Where among these is as good as random, and alike on all ranks: what a script does in each 64th step is to be met.
    """
    if boundaries <= _LOOKED_AT_EVERY:
        return boundaries & (boundaries - 1) == 0
    period, place = divmod(boundaries, _LOOKED_AT_EVERY)
    return place == zlib.crc32(str(period).encode()) % _LOOKED_AT_EVERY
