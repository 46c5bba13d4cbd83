"""ZeRO-3 in each new process: which parameters are given up behind a module, without a walk through all that follow.

DeepSpeed 0.19 keeps those of a module that come again within `stage3_max_reuse_distance` (10**9 numbers). To learn
which these are it walks, for each module of the second step, through the modules behind it: 15 s with 1,500 layers.
Here one walk through all of them notes where each parameter is used, and a look-up says the same.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from deepspeed.runtime.zero import partitioned_param_coordinator as theirs

_CLASS = theirs.PartitionedParameterCoordinator
_PREFIX = f"_{_CLASS.__name__}__"
_METHOD, _ORDER, _REACH, _FETCHED = (
    _PREFIX + name
    for name in (
        *("params_to_release", "submodule_order", "max_reuse_dist_in_numel"),
        "most_recent_step_id_param_fetched_for",
    )
)
# What the method asks for in the versions that this stands for: another one may decide otherwise.
_KNOWN_NAMES = frozenset(
    {
        *("is_complete_trace", "RuntimeError", "set", "iter_params", "z3_leaf_module", "discard", "ds_id", "ds_numel"),
        *(_FETCHED, _ORDER, _REACH),
    }
)
# Where the uses of a coordinator's last trace are kept.
_USES = "dalsegno_parameter_uses"


class ParameterUses:
    """Where each parameter of a trace is used.

    Args:
        modules: Of each module in the order in which they run, the parameters: ids and sizes.
    """

    def __init__(self, modules: Iterable[Sequence[tuple[int, int]]]) -> None:
        self._places: dict[int, list[int]] = {}
        self._before = [0]
        for place, parameters in enumerate(modules):
            for name, _ in parameters:
                self._places.setdefault(name, []).append(place)
            self._before.append(self._before[-1] + sum(size for _, size in parameters))

    def comes_again(self, parameter: int, place: int, reach: int) -> bool:
        """Whether it is used from this place on, before the modules in between have so many numbers."""
        places = self._places.get(parameter, [])
        index = bisect.bisect_left(places, place)
        return index < len(places) and self._before[places[index]] - self._before[place] < reach


def release_by_look_up() -> None:
    """Has ZeRO-3 decide so in all engines. A version that decides in another way is left alone."""
    if names(getattr(_CLASS, _METHOD, None)) == _KNOWN_NAMES:
        setattr(_CLASS, _METHOD, functools.cache(_params_to_release))


def names(method: Any) -> frozenset[str]:
    """What a method asks for by name, below its decorators."""
    while True:
        inner = [cell.cell_contents for cell in getattr(method, "__closure__", None) or ()]
        inner = [one for one in [*inner, getattr(method, "__wrapped__", None)] if callable(one)]
        if not inner:
            return frozenset(getattr(getattr(method, "__code__", None), "co_names", ()))
        method = inner[0]


def _params_to_release(coordinator: Any, module: Any, step: int) -> set[int]:
    if not coordinator.is_complete_trace():
        raise RuntimeError("expected trace to be complete")
    leaf, fetched = theirs.z3_leaf_module(module), getattr(coordinator, _FETCHED)
    uses, reach = _uses_of(coordinator, leaf=leaf), getattr(coordinator, _REACH)
    return {
        parameter.ds_id
        for parameter in theirs.iter_params(module, recurse=leaf)
        # What was fetched for a later use was skipped when that was looked for.
        if not parameter.ds_persist
        and fetched[parameter] <= step
        and not uses.comes_again(parameter.ds_id, step, reach)
    }


def _uses_of(coordinator: Any, *, leaf: bool) -> ParameterUses:
    order = getattr(coordinator, _ORDER)
    kept = vars(coordinator).get(_USES)
    if kept is None or kept[0] is not order:
        kept = (order, {})
        setattr(coordinator, _USES, kept)
    found: dict[bool, ParameterUses] = kept[1]
    if leaf not in found:
        found[leaf] = ParameterUses(
            [(p.ds_id, p.ds_numel) for p in theirs.iter_params(one, recurse=leaf)] for one in order
        )
    return found[leaf]
