"""What DeepSpeed's universal loading leaves out or gets wrong, made right. Measured with 0.19.8, each has a test.

- ZeRO-1 and 2: a rank that owns nothing of a parameter group (a small one in a large world) fails with IndexError;
- ZeRO-3: all groups get group 0's hyperparameters, and all share one ``step`` tensor, which then counts once per group;
- all stages: buffers and frozen parameters keep what the script initialised them with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from .universal.loading import load

_PARAMETER = "param"


@contextmanager
def own_group_loading(engine: Any) -> Iterator[None]:
    """Lets ZeRO-1 and 2 load their partitions by `load_groups` while the context lasts.

    With a model-parallel unit DeepSpeed's own loader stays: it knows how parameters are sliced there.
    """
    optimizer = engine.optimizer
    name = "load_hp_checkpoint_state_from_checkpoint_dir"
    if not hasattr(optimizer, name) or getattr(optimizer, "mpu", None) is not None or not _is_zero_1_2(engine):
        yield
        return
    setattr(optimizer, name, lambda groups, directory: load_groups(optimizer, groups, Path(directory) / "zero"))
    try:
        yield
    finally:
        delattr(optimizer, name)


def load_groups(optimizer: Any, groups_name: str, directory: Path) -> None:
    """Fills this rank's flat partitions of ZeRO-1 and 2 from universal files, reading only its own ranges.

    Args:
        optimizer: ``DeepSpeedZeroOptimizer``.
        groups_name: Its attribute that lists the parameters by group.
        directory: The checkpoint's ``zero/``.

    Raises:
        OSError: A file cannot be read.
        ValueError: The checkpoint's groups or sizes are not this model's.
    """
    common = load(directory / "optimizer_state.pt")
    optimizer._load_global_state(common)
    groups = getattr(optimizer, groups_name)
    if len(groups) != len(common["param_groups"]):
        raise ValueError(f"{len(common['param_groups'])} parameter groups were saved, the script makes {len(groups)}")
    for parameters, group, saved in zip(groups, optimizer.optimizer.param_groups, common["param_groups"], strict=True):
        flat = group["params"][0]
        state = optimizer.optimizer.state[flat]
        files = {id(parameter): _state_files(directory / optimizer.param_names[parameter]) for parameter in parameters}
        first = files[id(parameters[0])]
        for key in first:
            if key == "step":
                state["step"] = load(first[key])
            elif key != "fp32":
                state[key] = torch.zeros_like(flat)
        for parameter in parameters:
            if parameter._hp_mapping is not None:
                _load_fragment(parameter, files[id(parameter)], state)
        group.update({key: value for key, value in saved.items() if key != "params"})


def _load_fragment(parameter: Any, files: Mapping[str, Path], state: Mapping[str, Any]) -> None:
    mapping = parameter._hp_mapping
    source, target = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
    mapping.optim_fragment = {}
    for key, path in files.items():
        if key == "step":
            continue
        whole = load(path, mmap=True)[_PARAMETER].reshape(-1)
        if whole.numel() != parameter.numel():
            raise ValueError(f"{path} has {whole.numel()} values, the model's parameter has {parameter.numel()}")
        values = whole.narrow(0, source.start, source.numel)
        if key == "fp32":
            mapping.get_hp_fragment().data.copy_(values)
            continue
        mapping.optim_fragment[key] = state[key].narrow(0, target.start, target.numel)
        mapping.optim_fragment[key].copy_(values)


def _state_files(directory: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(directory.glob("*.pt"))}


def _is_zero_1_2(engine: Any) -> bool:
    return int(engine.zero_optimization_stage()) in (1, 2)


def torch_optimizer(engine: Any) -> Any:
    """The client's optimizer below DeepSpeed's wrappers."""
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def repair_groups(engine: Any, directory: Path) -> None:
    """Gives each parameter group its own hyperparameters and each state its own right ``step``."""
    state = load(directory / "zero" / "optimizer_state.pt")
    optimizer = torch_optimizer(engine)
    inner = state.get("optimizer_state_dict", state)  # stage 3 nests it
    saved = inner["param_groups"]
    if len(saved) != len(optimizer.param_groups):
        raise ValueError(f"{len(saved)} parameter groups were saved, the script makes {len(optimizer.param_groups)}")
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})


def separate_steps(engine: Any) -> None:
    """Clones every ``step``: a tensor shared between groups would count once per group."""
    for state in getattr(torch_optimizer(engine), "state", {}).values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].clone()


def restore_unpartitioned(engine: Any, directory: Path) -> None:
    """Copies buffers and frozen parameters from the model states."""
    stage = int(engine.zero_optimization_stage())
    files = _model_files(directory, stage)
    states = load(files[0])
    module = states["module"]
    buffers = dict(engine.module.named_buffers())
    with torch.no_grad():
        for name in states.get("buffer_names") or ():
            if name in buffers:
                buffers[name].copy_(module[name])
        frozen = {name: p for name, p in engine.module.named_parameters() if not p.requires_grad}
        if stage < 3:
            for name, parameter in frozen.items():
                if name in module:
                    parameter.copy_(module[name])
            return
        _restore_frozen_stage_3(frozen, files)


def _restore_frozen_stage_3(frozen: Mapping[str, Any], files: list[Path]) -> None:
    """Stage 3 partitions frozen parameters too; each rank's file has its fragment."""
    if not frozen:
        return
    loaded = [load(path, mmap=True) for path in files]
    shapes = loaded[0].get("frozen_param_shapes") or {}
    for name, parameter in frozen.items():
        if name not in shapes:
            continue
        fragments = [states["frozen_param_fragments"][name].reshape(-1) for states in loaded]
        numel = int(torch.Size(shapes[name]).numel())
        whole = torch.cat(fragments)[:numel].reshape(shapes[name])
        # Rank 0's copy is the one that is partitioned anew.
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if dist.get_rank() == 0:
                parameter.copy_(whole)


def _model_files(directory: Path, stage: int) -> list[Path]:
    if stage < 3:
        return [directory / "mp_rank_00_model_states.pt"]
    files: list[Path] = []
    while (path := directory / f"zero_pp_rank_{len(files)}_mp_rank_00_model_states.pt").is_file():
        files.append(path)
    if not files:
        raise RuntimeError(f"no model states of ZeRO-3 in {directory}")
    return files
