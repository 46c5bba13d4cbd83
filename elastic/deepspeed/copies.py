"""Whole weights, copied to a model's parameters, and to what an optimizer of ZeRO's keeps of them.

Which parameters are trained now says nothing about where their values are: that is as it was when they were saved.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_set_local_fp32_param
from torch import Tensor, nn

from ..saving.replicas import unwrapped, without_prefixes
from ..training.reading_state import check_same_names
from ..universal.loading import load
from ..universal.shards import FP32
from ..universal.values import ShardedValues
from .view import model_states_file

# In the names of all parameters of DeepSpeed's `Experts`, which are numbered on each rank from 0.
_EXPERTS = ".deepspeed_experts."


def copy_whole(parameter: Any, value: Tensor, *, optimizers: bool = False) -> None:
    """Copies a whole value to a parameter. Collective at stage 3.

    Args:
        optimizers: Also into the optimizer's own copy, if it has one.
    """
    if not hasattr(parameter, "ds_id"):
        parameter.copy_(value)
    else:
        # Of the ranks that share it, the first one's copy is the one that is partitioned anew.
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if dist.get_rank(parameter.ds_process_group) == 0:
                parameter.copy_(value)
    if optimizers:
        _copy_to_optimizer(parameter, value.reshape(-1))


def _copy_to_optimizer(parameter: Any, whole: Tensor) -> None:
    """This rank's part of a weight, as exact as it was saved. DeepSpeed marks only what is in an optimizer's groups."""
    if not hasattr(parameter, "ds_id"):
        if getattr(parameter, "_hp_mapping", None) is not None:
            parameter.set_full_hp_param(whole)
        return
    optimizer = getattr(parameter, "_z3_optimizer", None)
    if optimizer is None or optimizer.get_param_id(parameter) not in optimizer.grad_position:
        return
    # DeepSpeed's way for whole values does not know that the last rank's part is padded.
    size = parameter.ds_tensor.numel()
    own = whole[dist.get_rank(parameter.ds_process_group) * size :][:size]
    safe_set_local_fp32_param(parameter, nn.functional.pad(own, (0, size - own.numel())))


def load_parameters(engine: Any, values: ShardedValues, *, optimizers: bool = False) -> None:
    """Copies the weights of all parameters that have values. Collective at stage 3.

    Args:
        optimizers: Also into the optimizer's own copies.

    Raises:
        ValueError: One has another shape.
    """
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if name in values.names:
                shape, saved = tuple(getattr(parameter, "ds_shape", parameter.shape)), tuple(values.shape(name))
                if shape != saved:
                    raise ValueError(f"{name} was saved with shape {saved}, the model's has {shape}")
                whole = torch.empty(values.size(name), dtype=values.dtype(name, FP32), device="cpu")
                values.read(name, FP32, 0, whole)
                copy_whole(parameter, whole.reshape(shape), optimizers=optimizers)


def load_whole_model(engine: Any, directory: Path, *, strict: bool = False) -> None:
    """Copies the weights that stage 0 saves as they are. A compiled model has the names of the script's own.

    Args:
        strict: See `check_names`.

    Raises:
        ValueError: They are another model's.
    """
    model = unwrapped(engine.module)
    wanted = model.state_dict()
    weights = without_prefixes(load(model_states_file(directory), mmap=True)["module"], wanted)
    check_names(model, weights, wanted, strict=strict)
    try:
        model.load_state_dict(weights, strict=False)
    except RuntimeError as error:  # of a shape
        raise ValueError(f"{directory.name} is of another model: {error}") from error


def check_names(model: nn.Module, saved: Collection[str], wanted: Collection[str], *, strict: bool = False) -> None:
    """Checks that weights are a model's, of which frozen ones may have been left out as they were saved.

    Experts lie in files of their own, which DeepSpeed's loader alone knows.

    Args:
        wanted: Names in the model's ``state_dict()``.
        strict: No frozen one may.

    Raises:
        ValueError: They are not.
    """
    parameters = model.named_parameters(remove_duplicate=False)
    absent = {
        name
        for name, one in parameters
        # DeepSpeed's mark of an expert.
        if not getattr(one, "allreduce", True) or not (strict or one.requires_grad)
    }
    if other := other_experts(set(saved) - set(wanted)):
        raise ValueError(other)
    check_same_names(saved, [name for name in wanted if name in saved or name not in absent])


def other_experts(only_saved: Collection[str]) -> str:
    """A line, if all of these names, which only a checkpoint has, are those of experts; else empty."""
    if not only_saved or not all(_EXPERTS in name for name in only_saved):
        return ""
    return (
        "the checkpoint has other experts on each rank than this world: a run whose experts are spread over all its"
        " ranks (ep_size) goes on with as many ranks as before; give ep_size a number that stays"
    )


__all__ = ("check_names", "copy_whole", "load_parameters", "load_whole_model", "other_experts")
