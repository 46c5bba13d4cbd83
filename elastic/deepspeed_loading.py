"""What DeepSpeed's universal loading leaves out or gets wrong, made right. Measured with 0.19.8, each has a test.

- ZeRO-1 and 2: a rank that owns nothing of a parameter group (a small one in a large world) fails with IndexError; a
  file that is missing leaves weights at random or moments reset;
- ZeRO-3: all groups get group 0's hyperparameters, and all share one ``step`` tensor, which then counts once per group;
- all stages: buffers, frozen parameters and parameters that no optimizer knows keep what the script initialised them
  with; each rank reads all of every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

from .deepspeed_view import COMMON, NESTED, ZERO, model_state_files
from .universal.loading import load

_PARAMETER = "param"
_FP32 = "fp32"
_ADAM = ("exp_avg", "exp_avg_sq")
_EXPERT = "is_expert_param"
_TENSOR_PARALLEL = "ds_autotp_universal_checkpoint_meta"


@contextmanager
def own_loading(engine: Any) -> Iterator[None]:
    """Lets the engine's ZeRO optimizer load universal files by `load_groups` or `load_partition` while it lasts.

    With tensor parallelism DeepSpeed's own loader stays: it knows how parameters are sliced there.
    """
    optimizer = engine.optimizer
    sliced = any(hasattr(parameter, _TENSOR_PARALLEL) for parameter in engine.module.parameters())
    stage = int(engine.zero_optimization_stage())
    name = "load_hp_checkpoint_state" if stage == 3 else "load_hp_checkpoint_state_from_checkpoint_dir"
    theirs = getattr(optimizer, name, None)
    if theirs is None or sliced or getattr(optimizer, "mpu", None) is not None:
        yield
        return
    if stage == 3:

        def ours(folder: str, key: str, param: Any = None) -> Tensor:
            return load_partition(optimizer, Path(folder), key, param, theirs)

    else:

        def ours(groups: str, directory: str) -> None:  # type: ignore[misc]  # each stage's own signature
            trained = int(engine.global_steps) > int(engine.skipped_steps)
            load_groups(optimizer, groups, Path(directory) / ZERO, trained=trained)

    setattr(optimizer, name, ours)
    try:
        yield
    finally:
        delattr(optimizer, name)


def load_partition(optimizer: Any, folder: Path, state: str, parameter: Any, theirs: Callable[..., Tensor]) -> Tensor:
    """This rank's part of one state of one parameter for ZeRO-3, padded; reads only its own range.

    Args:
        optimizer: ``DeepSpeedZeroOptimizer_Stage3``.
        folder: The parameter's directory.
        state: ``"fp32"``, ``"exp_avg"`` or ``"exp_avg_sq"``.
        parameter: The model's; None where an older DeepSpeed does not say.
        theirs: DeepSpeed's own method, for experts and tensor parallelism.

    Returns:
        Shape ``(ceil(numel / ranks),)``, dtype as saved.

    Raises:
        RuntimeError: The file is missing, or is not this parameter's.
    """
    path = folder / f"{state}.pt"
    content = _loaded(path)
    if hasattr(parameter, _TENSOR_PARALLEL) or (isinstance(content, dict) and content.get(_EXPERT)):
        return theirs(str(folder), state, param=parameter)
    whole = _flat(content)
    if parameter is not None and whole.numel() != parameter.ds_numel:
        raise RuntimeError(f"{path} has {whole.numel()} values, the model's parameter has {parameter.ds_numel}")
    rank, world = dist.get_rank(optimizer.dp_process_group), dist.get_world_size(optimizer.dp_process_group)
    size = -(-whole.numel() // world)
    start = min(rank * size, whole.numel())
    own = whole[start : start + size]
    return own if own.numel() == size else torch.cat([own, own.new_zeros(size - own.numel())])


def load_groups(optimizer: Any, groups_name: str, directory: Path, *, trained: bool = True) -> None:
    """Fills this rank's flat partitions of ZeRO-1 and 2 from universal files, reading only its own ranges.

    Args:
        optimizer: ``DeepSpeedZeroOptimizer`` or ``BF16_Optimizer``.
        groups_name: Its attribute that lists the parameters by group.
        directory: The checkpoint's ``zero/``.
        trained: The optimizer had made steps when the checkpoint was saved.

    Raises:
        OSError: A file cannot be read.
        RuntimeError: A file is missing.
        ValueError: The checkpoint's groups or sizes are not this model's.
    """
    common = load(directory / COMMON)
    optimizer._load_global_state(common)
    groups = getattr(optimizer, groups_name)
    if len(groups) != len(common["param_groups"]):
        raise ValueError(f"{len(common['param_groups'])} parameter groups were saved, the script makes {len(groups)}")
    for parameters, group, saved in zip(groups, optimizer.optimizer.param_groups, common["param_groups"], strict=True):
        flat = group["params"][0]
        state = optimizer.optimizer.state[flat]
        files = {id(parameter): _state_files(directory / optimizer.param_names[parameter]) for parameter in parameters}
        wanted = set(files[id(parameters[0])]) | {_FP32}
        if trained and "betas" in saved and "eps" in saved:
            wanted |= set(_ADAM)
        for parameter in parameters:
            missing = wanted - set(files[id(parameter)])
            if missing:
                raise RuntimeError(f"{directory / optimizer.param_names[parameter]} has no {sorted(missing)[0]}.pt")
        _make_states(files[id(parameters[0])], flat, state, common)
        for parameter in parameters:
            if parameter._hp_mapping is not None:
                _load_fragment(parameter, files[id(parameter)], state)
        group.update({key: value for key, value in saved.items() if key != "params"})


def _make_states(files: Mapping[str, Path], flat: Tensor, state: dict[str, Any], common: Mapping[str, Any]) -> None:
    """An optimizer's states as they are to be filled: flat like the partition, of the dtype that was saved."""
    for key, path in files.items():
        if key == "step":
            state["step"] = load(path)
        elif key != _FP32:
            state[key] = torch.zeros_like(flat, dtype=_flat(_loaded(path)).dtype)
    if "step" not in files and NESTED in common:  # made by stage 3
        state["step"] = common[NESTED]["state"][0]["step"]


def _load_fragment(parameter: Any, files: Mapping[str, Path], state: Mapping[str, Any]) -> None:
    mapping = parameter._hp_mapping
    source, target = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
    mapping.optim_fragment = {}
    for key, path in files.items():
        if key == "step":
            continue
        whole = _flat(_loaded(path))
        if whole.numel() != parameter.numel():
            raise ValueError(f"{path} has {whole.numel()} values, the model's parameter has {parameter.numel()}")
        values = whole.narrow(0, source.start, source.numel)
        if key == _FP32:
            mapping.get_hp_fragment().data.copy_(values)
            continue
        mapping.optim_fragment[key] = state[key].narrow(0, target.start, target.numel)
        mapping.optim_fragment[key].copy_(values)


def _state_files(directory: Path) -> dict[str, Path]:
    return {path.stem: path for path in sorted(directory.glob("*.pt"))}


def _loaded(path: Path) -> Any:
    try:
        return load(path, mmap=True)
    except FileNotFoundError as error:
        raise RuntimeError(f"{path} is missing") from error


def _flat(content: Any) -> Tensor:
    """The values in a parameter's file: stage 3's files are bare tensors, the others wrap them in a dictionary."""
    value: Tensor = content[_PARAMETER] if isinstance(content, dict) else content
    return value.reshape(-1)


def torch_optimizer(engine: Any) -> Any:
    """The client's optimizer below DeepSpeed's wrappers."""
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def repair_groups(engine: Any, directory: Path) -> None:
    """Gives each parameter group its own hyperparameters."""
    state = load(directory / ZERO / COMMON)
    optimizer = torch_optimizer(engine)
    saved = state.get(NESTED, state)["param_groups"]
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
    """Copies what no optimizer knows from the model states: buffers, frozen and other parameters. Collective.

    Raises:
        RuntimeError: A parameter that is trained is not there: ZeRO-3 saves none that the optimizer does not know; or
            one has another shape: frozen ones do not follow a change of tensor parallelism.
    """
    files = model_state_files(directory, int(getattr(engine, "checkpoint_mp_rank", 0)))
    states = [load(path, mmap=True) for path in files]
    module: Mapping[str, Any] = states[0]["module"]
    partitioned = states[0].get("param_shapes")  # stage 0 partitions nothing, and DeepSpeed loads all of it
    owned = {name for group in partitioned or () for name in group}
    buffers = dict(engine.module.named_buffers())
    with torch.no_grad():
        for name in states[0].get("buffer_names") or ():
            if name in buffers:
                buffers[name].copy_(module[name])
        for name, parameter in engine.module.named_parameters() if partitioned is not None else ():
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            if name in owned or 0 in shape:
                continue
            value = _unpartitioned(name, shape, module, states)
            if value is not None:
                _copy(parameter, value)
            elif parameter.requires_grad:
                raise RuntimeError(f"{name} requires gradients, and no optimizer knows it: the checkpoint has no value")


def _unpartitioned(
    name: str, shape: tuple[int, ...], module: Mapping[str, Any], states: Sequence[Mapping[str, Any]]
) -> Tensor | None:
    """A parameter's whole value from the model states, if they have one."""
    value = module.get(name)
    if isinstance(value, Tensor) and tuple(value.shape) == shape:
        return value
    # Stage 3 partitions these too; each rank's file has its fragment, padded.
    saved = (states[0].get("frozen_param_shapes") or {}).get(name)
    if saved is None:
        return None
    if tuple(saved) != shape:
        raise RuntimeError(f"{name} was saved with shape {tuple(saved)}, the model's has {shape}")
    fragments = [rank["frozen_param_fragments"][name].reshape(-1) for rank in states]
    return torch.cat(fragments)[: torch.Size(shape).numel()].reshape(shape)


def _copy(parameter: Any, value: Tensor) -> None:
    if not hasattr(parameter, "ds_id"):
        parameter.copy_(value)
        return
    # Rank 0's copy is the one that is partitioned anew.
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
        if dist.get_rank() == 0:
            parameter.copy_(value)
