"""Is a universal checkpoint complete, and does it agree with the model states? Nothing is sealed before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import EnvironmentFailed, SourceBad
from .loading import load
from .source import FP32, Parameter, Source

ZERO = "zero"
OPTIMIZER_STATE = "optimizer_state.pt"


def expected_files(source: Source) -> tuple[str, ...]:
    """Paths, relative to the target, of the files that the universal form of ``source`` must have."""
    paths = [f"{ZERO}/{name}/{state}.pt" for name in source.parameters for state in source.states]
    if source.stage < 3:
        paths += [f"{ZERO}/{name}/{FP32}.pt" for name in unpartitioned(source)]
        if any(step is not None for step in source.steps):
            paths += [f"{ZERO}/{name}/step.pt" for name, p in source.parameters.items() if p.pieces]
    return (*sorted(paths), f"{ZERO}/{OPTIMIZER_STATE}", *source.model_files)


def unpartitioned(source: Source) -> dict[str, Tensor]:
    """What stages 1 and 2 save and the optimizer does not know: frozen parameters, buffers, names of tied weights."""
    module: dict[str, Tensor] = source.model.get("module") or {}
    return {name: value for name, value in module.items() if name not in source.parameters}


def check_complete(target: Path, source: Source) -> None:
    """Checks that every expected file is there with the right number of values.

    Raises:
        EnvironmentFailed: The converter left something out.
    """
    for path in expected_files(source):
        if not (target / path).is_file():
            raise EnvironmentFailed(f"the converter left out {path}")
    for name, parameter in source.parameters.items():
        for state in source.states:
            check_tensor(parameter, state, tensor_of(load(target / ZERO / name / f"{state}.pt", mmap=True)))


def check_tensor(parameter: Parameter, state: str, value: Tensor) -> None:
    """Raises EnvironmentFailed if ``value`` cannot be ``state`` of ``parameter``."""
    if value.numel() != parameter.numel:
        raise EnvironmentFailed(f"{parameter.name}/{state}.pt has {value.numel()} values, wanted {parameter.numel}")


def check_weights(parameter: Parameter, weights: Tensor, source: Source) -> None:
    """Compares fp32 weights with the model states where those have them (stages 1 and 2).

    Raises:
        SourceBad: They differ: the optimizer's partitions do not belong to this model.
    """
    model: Tensor | None = (source.model.get("module") or {}).get(parameter.name)
    if source.stage == 3 or model is None:
        return
    if not torch.equal(weights.reshape(model.shape).to(model.dtype), model):
        raise SourceBad(f"{parameter.name}: the optimizer's fp32 weights differ from the model states")


def tensor_of(content: Any) -> Tensor:
    """The tensor in an atomic file: stage 3's files are raw tensors, the others wrap it in a dictionary."""
    value = content["param"] if isinstance(content, dict) else content
    if not isinstance(value, Tensor):
        raise EnvironmentFailed(f"an atomic file holds {type(value).__name__}, not a tensor")
    return value
