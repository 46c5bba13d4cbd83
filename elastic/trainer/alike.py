"""The options of a `Trainer` that must be the same on all ranks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import asdict
from types import CodeType
from typing import TYPE_CHECKING, Any

from ..data.evaluated_alike import known_length
from ..data.plan import BatchPlan
from ..training.digest import short

if TYPE_CHECKING:
    from .trainer import Trainer

_PLAIN = (
    *("seed", "shuffle", "drop_last", "max_steps", "data_epochs", "max_grad_norm", "check_data"),
    *("save_every", "memory_every", "save_in_background", "evaluate_every", "log_every"),
)
_FUNCTIONS = ("loss", "collate", "count_tokens")
# The name carries the Python version, because each version compiles differently: only ranks with the same name compare.
_PYTHON = f"Python {sys.version_info.major}.{sys.version_info.minor}"
_OPTIONAL = ("count_tokens", "scheduler", "grad_scaler", "evaluator")


def alike_of(trainer: Trainer, plan: BatchPlan, strategy: str) -> dict[str, Any]:
    """Those options by name, for ``Session.compare``. Compare them first: later steps meet in collectives.

    Args:
        trainer: It is not opened yet.
        plan: This world's plan.
        strategy: Its name.
    """
    return {
        **plan.alike,
        **{name: getattr(trainer, name) for name in _PLAIN},
        **{f"{name} is given": getattr(trainer, name) is not None for name in _OPTIONAL},
        "length of the data set": known_length(trainer.dataset),
        **{f"{name}= (for {_PYTHON})": coded(getattr(trainer, name)) for name in _FUNCTIONS},
        "strategy": strategy,
        "track": None if trainer.track is None else asdict(trainer.track),
    }


def coded(function: Any) -> str | None:
    """A function's name and a digest of what it does; the same text wherever the same script made it.

    Its closure is left out, because that may contain a device or a rank's number.
    """
    if function is None:
        return None
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return str(name) if code is None else f"{name} ({short(_lines(code))})"


def _lines(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _lines(constant)
        else:
            yield _written(constant)


def _written(constant: Any) -> str:
    """The same text in every process, although the order of a set is not."""
    if isinstance(constant, tuple | frozenset):
        parts = [_written(part) for part in constant]
        return str(sorted(parts) if isinstance(constant, frozenset) else parts)
    return repr(constant)
