"""What differs between the versions of torch (2.6 and newer) in what the agent uses of torch's own."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["LIBUV_LISTENS", "filtered_of", "known", "set_local_rank", "tails_of"]

# Whether the server of a store that is made with libuv, which serves many ranks faster, takes a socket that listens
# already.
LIBUV_LISTENS = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 8)


def known(theirs: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """Those of the options that a function or a data class of torch has in this version.

    Args:
        theirs: Torch's own.
        options: By name. One that is not known must be None or empty: nobody could have asked for it.

    Raises:
        TypeError: An option that was asked for is not known.
    """
    names = _names_of(theirs)
    if lost := [name for name, value in options.items() if value and name not in names]:
        raise TypeError(f"this version of torch has no {', '.join(lost)}")
    return {name: value for name, value in options.items() if name in names}


def set_local_rank(agent: Any, environment: dict[str, Any], local_rank: int, spec: Any) -> None:
    """Sets what tells a worker its local rank, and its card in torch's mode of virtual local ranks."""
    theirs = getattr(agent, "_set_local_rank_env", None)
    if theirs is None:
        environment["LOCAL_RANK"] = str(local_rank)
    else:
        theirs(environment, local_rank, spec)


def tails_of(context: Any) -> list[Any]:
    """What shows the lines of workers' files, of a ``PContext``. Later versions have a list of them."""
    tails = getattr(context, "_tail_logs", None)
    return [context._stdout_tail, context._stderr_tail] if tails is None else list(tails)


def filtered_of(context: Any) -> list[Any]:
    """The open files with filtered lines, of a ``PContext`` that has any."""
    found = (getattr(context, name, None) for name in ("filtered_stdout", "filtered_stderr"))
    return [file for file in found if file is not None]


def _names_of(theirs: Callable[..., Any]) -> frozenset[str]:
    if dataclasses.is_dataclass(theirs):
        return frozenset(field.name for field in dataclasses.fields(theirs))
    return frozenset(inspect.signature(theirs).parameters)
