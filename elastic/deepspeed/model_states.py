"""What no optimizer knows: a parameter's value from the model states of as few ranks as have it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..universal.loading import load
from .view import model_states_of


class ModelStates:
    """The ranks' model states, each opened when it is first asked for.

    Args:
        first: Rank 0's file.
    """

    def __init__(self, first: Path) -> None:
        self._first = first
        self._open: dict[int, Mapping[str, Any]] = {}

    def __getitem__(self, rank: int) -> Mapping[str, Any]:
        if rank not in self._open:
            self._open[rank] = load(model_states_of(rank, self._first), mmap=True)
        return self._open[rank]


def unpartitioned(name: str, shape: tuple[int, ...], states: ModelStates) -> Tensor | None:
    """A parameter's whole value from the model states, if they have one.

    Raises:
        RuntimeError: It has another shape, or a file with a part of it is missing.
    """
    value = states[0]["module"].get(name)
    if isinstance(value, Tensor) and tuple(value.shape) == shape:
        return value
    saved = (states[0].get("frozen_param_shapes") or {}).get(name)
    if saved is None:
        return None
    if tuple(saved) != shape:
        raise RuntimeError(f"{name} was saved with shape {tuple(saved)}, the model's has {shape}")
    return _put_together(name, torch.Size(shape).numel(), states).reshape(shape)


def _put_together(name: str, numel: int, states: ModelStates) -> Tensor:
    """A frozen parameter that stage 3 has partitioned: each rank's file has a fragment, padded at the end.

    Raises:
        RuntimeError: A file is missing.
    """
    fragments: list[Tensor] = []
    have = 0
    while have < numel:
        try:
            fragments.append(states[len(fragments)]["frozen_param_fragments"][name].reshape(-1))
        except FileNotFoundError as error:
            missing = Path(error.filename).name
            raise RuntimeError(f"{name}: {have} of {numel} values are there, {missing} is missing") from error
        have += fragments[-1].numel()
    return torch.cat(fragments)[:numel]


__all__ = ("ModelStates", "unpartitioned")
