"""ZeRO checkpoints written straight in DeepSpeed's layout: as large as wanted, and without training anything.

What DeepSpeed itself writes is in `zero_runs`; these say nothing about DeepSpeed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

Shapes = Mapping[str, tuple[int, ...]]
STATES = ("fp32", "exp_avg", "exp_avg_sq")


def write_shards(
    directory: Path,
    shapes: Shapes,
    *,
    stage: int = 2,
    world: int = 2,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 1,
    groups: int = 1,
) -> dict[str, dict[str, Tensor]]:
    """Writes a checkpoint; the values of every state of every parameter, flat.

    Args:
        directory: Made.
        shapes: Of the parameters, by name.
        stage: 2 or 3.
        world: Ranks.
        dtype: Of the model's own weights.
        seed: Of the values.
        groups: Parameter groups, to which the parameters are dealt out in turn.
    """
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    values = {
        name: {state: torch.randn(torch.Size(shape).numel(), generator=generator) for state in STATES}
        for name, shape in shapes.items()
    }
    dealt = [list(shapes)[group::groups] for group in range(groups)]
    sizes = [OrderedDict((name, torch.Size(shapes[name])) for name in names) for names in dealt]
    module = {name: values[name]["fp32"].to(dtype).reshape(shape) for name, shape in shapes.items()}
    for rank in range(world):
        model = {
            "module": module if stage == 2 else {name: torch.empty(0, dtype=dtype) for name in shapes},
            "buffer_names": [],
            "param_shapes": sizes,
            "frozen_param_shapes": {},
            "frozen_param_fragments": {},
            "dp_world_size": world,
            "mp_world_size": 1,
            "global_steps": 3,
            "skipped_steps": 0,
            "ds_config": {"zero_optimization": {"stage": stage}},
            "ds_version": "0.19.8",
        }
        if stage == 3:
            torch.save(model, directory / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        elif rank == 0:
            torch.save(model, directory / "mp_rank_00_model_states.pt")
        own = [{name: values[name] for name in names} for names in dealt]
        state = _rank_2(own, rank, world) if stage == 2 else _rank_3(own, rank, world)
        path = directory / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": {**state, **_common(stage, world)}}, path)
    return values


def _common(stage: int, world: int) -> dict[str, Any]:
    return {
        "loss_scaler": LossScaler(scale=1.0),
        "dynamic_loss_scale": False,
        "overflow": False,
        "partition_count": [world],
        "zero_stage": ZeroStageEnum(stage),
        "ds_version": "0.19.8",
    }


Group = Mapping[str, Mapping[str, Tensor]]


def _inner(groups: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    group = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    moments = [{state: flat[state] for state in STATES[1:]} for flat in groups]
    return {
        "state": {index: {"step": torch.tensor(3.0), **own} for index, own in enumerate(moments)},
        "param_groups": [{**group, "params": [index]} for index in range(len(groups))],
    }


def _rank_2(groups: Sequence[Group], rank: int, world: int) -> dict[str, Any]:
    """Stages 1 and 2: all parameters of a group in a row, cut into equal parts of an even size; pads are left out."""
    flat, mappings = [], []
    for values in groups:
        whole = sum(states["fp32"].numel() for states in values.values())
        size = 2 * -(-whole // (2 * world))
        begin, end = rank * size, min((rank + 1) * size, whole)
        flat.append({state: torch.cat([one[state] for one in values.values()])[begin:end].clone() for state in STATES})
        mapping, offset = {}, 0
        for name, states in values.items():
            first, last = max(offset, begin), min(offset + states["fp32"].numel(), end)
            if first < last:
                mapping[name] = fragment_address(numel=last - first, start=first - begin)
            offset += states["fp32"].numel()
        mappings.append(mapping)
    return {
        "base_optimizer_state": _inner(flat),
        "single_partition_of_fp32_groups": [own["fp32"] for own in flat],
        "param_slice_mappings": mappings,
        "group_paddings": [0] * len(groups),
    }


def _rank_3(groups: Sequence[Group], rank: int, world: int) -> dict[str, Any]:
    """Stage 3: each parameter cut into equal parts, padded."""
    flat = []
    for values in groups:
        own = {}
        for state in STATES:
            parts = []
            for states in values.values():
                size = -(-states[state].numel() // world)
                part = states[state][rank * size : (rank + 1) * size]
                parts.append(torch.cat([part, part.new_zeros(size - part.numel())]))
            own[state] = torch.cat(parts)
        flat.append(own)
    return {"optimizer_state_dict": _inner(flat), "fp32_flat_groups": [own["fp32"] for own in flat]}
