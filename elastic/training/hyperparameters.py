"""Describes what trains a model in plain words, for comparing it over the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .digest import short

# Names of hyperparameters that may be whole numbers. Other whole numbers may be a rank's own, such as its number.
_NUMBERS = ("lr", "momentum", "dampening", "weight_decay", "betas", "eps")
# How an optimizer computes, which may differ between devices of different kinds.
_HOW = ("foreach", "fused", "capturable", "differentiable")
_LONG = 120


def told_of(model: nn.Module, optimizers: Sequence[Any], scheduler: Any) -> dict[str, Any]:
    """The hyperparameters by name, as plain values.

    Args:
        model: The model without wrappers.
        optimizers: Those that train it.
        scheduler: None: there is none, or it is not known.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    told: dict[str, Any] = {
        "the model": f"{type(model).__name__} with {_counted(model)}",
        "the optimizer": ", ".join(map(_kind, optimizers)) or "none",
        "the scheduler": "none" if scheduler is None else _scheduled(scheduler),
    }
    for optimizer in optimizers:
        groups, kind = list(getattr(optimizer, "param_groups", ())), _kind(optimizer)
        for key in sorted({key for group in groups for key in group if key != "params" and key not in _HOW}):
            values = [_plain(group.get(key), whole=key in _NUMBERS) for group in groups]
            if any(value is not None for value in values):
                told[f"{key} of {kind}"] = _brief(", ".join(map(str, values)))
        if len(groups) > 1:
            told[f"parameters of {kind}'s groups"] = _brief(" + ".join(str(len(group["params"])) for group in groups))
        order = [names.get(id(p), "?") for group in groups for p in group["params"]]
        told[f"parameters of {kind}"] = f"{len(order)} ({short(order)})"
    return told


def _counted(model: nn.Module) -> str:
    every = list(model.named_parameters())
    trained = sum(parameter.requires_grad for _, parameter in every)
    told = short(f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}" for name, p in every)
    return f"{len(every)} parameters, {trained} of them trained ({told})"


def _kind(optimizer: Any) -> str:
    inner = getattr(optimizer, "optimizer", None)
    return type(optimizer if inner is None else inner).__name__


def _scheduled(scheduler: Any) -> str:
    state = scheduler.state_dict() if hasattr(scheduler, "state_dict") else {}
    values = {str(key).lstrip("_"): _plain(value, whole=True) for key, value in state.items()}
    return _brief(f"{type(scheduler).__name__} {' '.join(f'{k}={v}' for k, v in values.items() if v is not None)}")


def _plain(value: Any, *, whole: bool) -> Any:
    """A number, a switch, or several of them; with ``whole`` also a whole number or a name; None: something else."""
    if isinstance(value, Tensor):
        value = float(value) if value.numel() == 1 and value.device.type != "meta" else None
    if isinstance(value, bool | float):
        return value
    if isinstance(value, int | str):
        return value if whole else None
    if isinstance(value, list | tuple):
        return [_plain(item, whole=whole) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item, whole=whole) for key, item in value.items()}
    return None


def _brief(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_LONG]}... ({short([text])})"
