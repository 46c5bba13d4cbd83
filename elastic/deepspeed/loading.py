"""Corrects what DeepSpeed's universal loading leaves out or gets wrong. Measured with 0.19.8; each point has a test.

- ZeRO-1 and 2: a rank that owns nothing of a parameter group (a small one in a large world) fails with IndexError; a
  missing file leaves weights random or moments reset;
- ZeRO-3: all groups get group 0's hyperparameters, and all share one ``step`` tensor, which then counts once per group;
  only Adam's moments are loaded, and an optimizer that counts no step fails with KeyError;
- all stages: buffers, frozen parameters and parameters that no optimizer knows keep the script's first values; each
  rank reads all of every parameter.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import Tensor

from dalsegno.protos.reads import slot
from dalsegno.protos.text import few

from ..rank.threads import shared_out
from ..saving.optimizers import check_parameters
from ..universal.forms import NESTED, NUMBERS, ZERO
from ..universal.loading import load
from ..universal.numpys import as_numpys
from ..universal.shards import FP32
from ..universal.source import ADAM_STATES, COMMON_STATE
from ..universal.values import STEP, Values
from .copies import copy_whole, other_experts
from .model_states import ModelStates, unpartitioned
from .view import model_states_file
from .weights import weights_from_file

TRAINED_NOTE = "dalsegno_trained"
"""Key in the model states of stage 0, whose files do not name the optimizer's parameters: `trained`."""
_TENSOR_PARALLEL = "ds_autotp_universal_checkpoint_meta"
# Attribute of an engine that says whether its parameters are whole, once that was asked.
_WHOLE = "_dalsegno_whole"


@contextmanager
def own_loading(engine: Any, values: Values, directory: Path) -> Iterator[None]:
    """Makes the engine's ZeRO optimizer load ``values`` by `load_groups` or `load_partition` inside.

    With tensor parallelism DeepSpeed's own loader is used, because it knows how parameters are sliced. ZeRO-3's
    optimizer also uses it if `loads_any_state` says no.

    Args:
        engine: DeepSpeed's.
        values: The checkpoint's values.
        directory: The directory that DeepSpeed is told to load.
    """
    optimizer = engine.optimizer
    theirs = getattr(optimizer, _loader(engine), None)
    if theirs is None or not whole_parameters(engine):
        yield
        return
    if int(engine.zero_optimization_stage()) == 3:
        room = _Room()

        def ours(folder: str, key: str, param: Any = None) -> Tensor:
            name = str(Path(folder).relative_to(directory / ZERO))
            if values.expert(name):
                whole: Tensor = theirs(folder, key, param=param)
                return whole
            return load_partition(optimizer, values, name, key, param, room)

    else:

        def ours(groups: str, folder: str) -> None:  # type: ignore[misc]  # each stage's own signature
            trained = int(engine.global_steps) > int(engine.skipped_steps)
            load_groups(optimizer, groups, values, load(Path(folder) / ZERO / COMMON_STATE), trained=trained)

    setattr(optimizer, _loader(engine), ours)
    own_states = loads_any_state(engine)
    if own_states:
        optimizer.load_hp_checkpoint_state_from_checkpoint_dir_stage3 = functools.partial(
            load_sub_groups, optimizer, values, lambda: int(engine.global_steps) > int(engine.skipped_steps)
        )
    try:
        with nullcontext() if int(engine.zero_optimization_stage()) == 3 else weights_from_file(engine, directory):
            yield
    finally:
        delattr(optimizer, _loader(engine))
        if own_states:
            del optimizer.load_hp_checkpoint_state_from_checkpoint_dir_stage3


@contextmanager
def model_states_once(engine: Any) -> Iterator[None]:
    """Gives DeepSpeed the model states as they were read already, mapped: it reads them twice, and so do we.

    Not at stage 0, where the optimizer keeps tensors of that file, nor where something else than torch reads. What is
    read, and DeepSpeed hands on before we see it (a scheduler's state), has NumPy's own arrays in any case.
    """
    reader = engine.checkpoint_engine
    maps = int(engine.zero_optimization_stage()) != 0 and type(reader) is TorchCheckpointEngine
    engine.checkpoint_engine = _Reader(reader, maps=maps)
    try:
        yield
    finally:
        engine.checkpoint_engine = reader


class _Reader:
    """A checkpoint engine that maps model states, if ``maps``."""

    def __init__(self, inner: Any, *, maps: bool) -> None:
        self._inner, self._maps = inner, maps

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load(self, path: str, map_location: Any = None) -> Any:
        if not (self._maps and path.endswith("_model_states.pt")):
            return as_numpys(self._inner.load(path, map_location=map_location))
        # It adds to what it gets.
        found = load(Path(path), mmap=True)
        return {key: copy.copy(value) if isinstance(value, dict) else value for key, value in found.items()}


def _loader(engine: Any) -> str:
    """The name of the method that reads universal files."""
    stage = int(engine.zero_optimization_stage())
    return "load_hp_checkpoint_state" if stage == 3 else "load_hp_checkpoint_state_from_checkpoint_dir"


def knows_universal_files(engine: Any) -> bool:
    """Whether the engine's optimizer has the method that `own_loading` replaces."""
    return hasattr(engine.optimizer, _loader(engine))


def loads_any_state(engine: Any) -> bool:
    """Whether `load_sub_groups` can take the place of ZeRO-3's own loader: nothing of the engine is on a disk."""
    optimizer = engine.optimizer
    return (
        int(engine.zero_optimization_stage()) == 3
        and hasattr(optimizer, "load_module_checkpoint_state_from_checkpoint_dir_stage3")
        and not getattr(optimizer, "swap_optimizer", False)
        and all(flat is not None for flat in optimizer.fp16_partitioned_groups_flat)
    )


def whole_parameters(engine: Any) -> bool:
    """Whether parameters are partitioned only by ZeRO: without tensor parallelism."""
    # Asked at each save, and nothing slices parameters of an engine that is made. (`hasattr` asks the module, too.)
    if _WHOLE not in vars(engine):
        sliced = any(hasattr(parameter, _TENSOR_PARALLEL) for parameter in engine.module.parameters())
        setattr(engine, _WHOLE, not sliced and getattr(engine.optimizer, "mpu", None) is None)
    return bool(getattr(engine, _WHOLE))


class _Room:
    """One buffer for all that is read in turn: memory touched for the first time costs more than the reading.

    What it returned is valid until the next call. DeepSpeed copies what it gets before that.
    """

    def __init__(self) -> None:
        self._all = torch.empty(0, device="cpu")

    def of(self, size: int, dtype: torch.dtype) -> Tensor:
        if self._all.dtype != dtype or self._all.numel() < size:
            self._all = torch.empty(size, dtype=dtype, device="cpu")
        return self._all[:size]


def load_partition(optimizer: Any, values: Values, name: str, state: str, parameter: Any, room: _Room) -> Tensor:
    """This rank's part of one state of one parameter for ZeRO-3, padded; reads only its own range.

    Args:
        optimizer: ``DeepSpeedZeroOptimizer_Stage3``.
        values: The checkpoint's values.
        name: The parameter's name.
        state: ``"fp32"``, or one of the optimizer's states.
        parameter: The model's parameter; None if an older DeepSpeed does not pass it.
        room: Buffer for the result.

    Returns:
        Shape ``(ceil(numel / ranks),)``, dtype as saved.

    Raises:
        RuntimeError: The state was not saved, or the parameter has another size.
    """
    if state not in values.states(name):
        raise RuntimeError(f"{name} has no {state} in the checkpoint")
    numel = values.size(name)
    if parameter is not None and numel != parameter.ds_numel:
        raise RuntimeError(f"{name} was saved with {numel} values, the model's parameter has {parameter.ds_numel}")
    rank, world = dist.get_rank(optimizer.dp_process_group), dist.get_world_size(optimizer.dp_process_group)
    size = slot(numel, world)
    start = min(rank * size, numel)
    own, count = room.of(size, values.dtype(name, state)), min(size, numel - start)
    values.read(name, state, start, own[:count])
    own[count:].zero_()
    return own


def load_sub_groups(optimizer: Any, values: Values, trained: Callable[[], bool], folder: str) -> None:
    """Fills this rank's partitions of ZeRO-3 with weights and the optimizer's states.

    Args:
        optimizer: ``DeepSpeedZeroOptimizer_Stage3``, whose ``load_hp_checkpoint_state`` reads one partition.
        values: The checkpoint's values.
        trained: Whether the optimizer had made steps when the checkpoint was saved.
        folder: The directory that DeepSpeed was told to load.

    Raises:
        OSError: A file cannot be read.
        RuntimeError: Something was not saved.
    """
    common = load(Path(folder) / ZERO / COMMON_STATE)
    optimizer._load_global_state_stage3(common)
    # Write both precisions.
    optimizer.load_module_checkpoint_state_from_checkpoint_dir_stage3(folder, True)
    group, made = common[NESTED]["param_groups"][0], trained()
    for parameters, flat in zip(optimizer.fp16_groups, optimizer.fp32_partitioned_groups_flat, strict=True):
        names = [optimizer.param_names[parameter] for parameter in parameters]
        _check_states(values, names, _wanted(values, names[0], group, made))
        state = optimizer.optimizer.state[flat]
        _make_states(values, names[0], flat, state, common, [slice(None)])
        for key in sorted(values.states(names[0]) - {FP32, STEP}):
            offset = 0
            for name, parameter in zip(names, parameters, strict=True):
                own = optimizer.load_hp_checkpoint_state(str(Path(folder) / ZERO / name), key, param=parameter)
                state[key].narrow(0, offset, own.numel()).copy_(own)
                offset += own.numel()


def load_groups(
    optimizer: Any, groups_name: str, values: Values, common: Mapping[str, Any], *, trained: bool = True
) -> None:
    """Fills this rank's flat partitions of ZeRO-1 and 2, reading only its own ranges.

    Args:
        optimizer: ``DeepSpeedZeroOptimizer`` or ``BF16_Optimizer``.
        groups_name: Its attribute that lists the parameters by group.
        values: The checkpoint's values.
        common: What the checkpoint says of all parameters: the content of ``optimizer_state.pt``.
        trained: Whether the optimizer had made steps when the checkpoint was saved.

    Raises:
        OSError: A file cannot be read.
        RuntimeError: Something was not saved.
        ValueError: The checkpoint's groups or sizes are not this model's.
    """
    optimizer._load_global_state(common)
    groups = getattr(optimizer, groups_name)
    if len(groups) != len(common["param_groups"]):
        raise ValueError(f"{len(common['param_groups'])} parameter groups were saved, the script makes {len(groups)}")
    for parameters, group, saved in zip(groups, optimizer.optimizer.param_groups, common["param_groups"], strict=True):
        names = [optimizer.param_names[parameter] for parameter in parameters]
        _check_states(values, names, _wanted(values, names[0], saved, trained))
        flat = group["params"][0]
        state = optimizer.optimizer.state[flat]
        own = [pair for pair in zip(names, parameters, strict=True) if pair[1]._hp_mapping is not None]
        _make_states(values, names[0], flat, state, common, _gaps(flat, [parameter for _, parameter in own]))
        load_fragments = functools.partial(_load_fragments, values, state)
        if flat.device.type == "cpu":
            shared_out(load_fragments, own)
        else:
            load_fragments(own)
        group.update({key: value for key, value in saved.items() if key != "params"})


def _wanted(values: Values, name: str, group: Mapping[str, Any], trained: bool) -> set[str]:
    """The states that a parameter must have: also Adam's moments, unless a member of its family has other states."""
    adam = "betas" in group and "eps" in group and values.states(name) <= {FP32, STEP, *ADAM_STATES}
    return {FP32, *(ADAM_STATES if trained and adam else ())}


def _check_states(values: Values, names: Sequence[str], wanted: set[str]) -> None:
    """Checks that all parameters of a group have the wanted states, and the same ones as each other."""
    wanted = wanted.union(*(values.states(name) for name in names))
    for name in names:
        missing = sorted(wanted - values.states(name))
        if missing:
            raise RuntimeError(f"{name} has no {missing[0]} in the checkpoint")


def _gaps(flat: Tensor, parameters: Sequence[Any]) -> list[slice]:
    """Where no parameter of a flat partition lies."""
    places = sorted(
        (address.start, address.start + address.numel)
        for address in (parameter._hp_mapping.get_hp_fragment_address() for parameter in parameters)
    )
    bounds = itertools.pairwise([(0, 0), *places, (flat.numel(), flat.numel())])
    return [slice(end, start) for (_, end), (start, _) in bounds if start > end]


def _make_states(
    values: Values, name: str, flat: Tensor, state: dict[str, Any], common: Mapping[str, Any], zeros: Sequence[slice]
) -> None:
    """An optimizer's states to be filled: flat like the partition, with the saved dtype.

    Memory that is new costs more than what is written to it. So what was made already stays, and zeros are written
    only to ``zeros``: the rest is filled by many threads.
    """
    saved = values.states(name)
    for key in sorted(saved - {FP32, STEP}):
        made, dtype = state.get(key), values.dtype(name, key)
        if type(made) is not Tensor or (made.shape, made.dtype, made.device) != (flat.shape, dtype, flat.device):
            made = state[key] = torch.empty_like(flat, dtype=dtype)
        for place in zeros:
            made[place].zero_()
    if STEP in saved:
        state[STEP] = values.step(name)
    elif NESTED in common:  # made by stage 3
        counted = common[NESTED]["state"].get(0, {})
        state.update({STEP: counted[STEP]} if STEP in counted else {})
    for key, number in common.get(NUMBERS, {}).get(name, {}).items():
        state[key] = number.clone() if isinstance(number, Tensor) else number


def _load_fragments(values: Values, state: Mapping[str, Any], share: Sequence[tuple[str, Any]]) -> None:
    for name, parameter in share:
        _load_fragment(parameter, values, name, state)


def _load_fragment(parameter: Any, values: Values, name: str, state: Mapping[str, Any]) -> None:
    mapping = parameter._hp_mapping
    source, target = mapping.lp_fragment_address, mapping.get_hp_fragment_address()
    mapping.optim_fragment = {}
    if values.size(name) != parameter.numel():
        raise ValueError(f"{name} was saved with {values.size(name)} values, the model's has {parameter.numel()}")
    for key in sorted(values.states(name) - {STEP}):
        if key == FP32:
            own = mapping.get_hp_fragment().data
        else:
            own = mapping.optim_fragment[key] = state[key].narrow(0, target.start, target.numel)
        values.read(name, key, source.start, own)


def torch_optimizer(engine: Any) -> Any:
    """The client's optimizer below DeepSpeed's wrappers."""
    optimizer = engine.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def repair_groups(engine: Any, directory: Path) -> None:
    """Gives each parameter group its own hyperparameters."""
    state = load(directory / ZERO / COMMON_STATE)
    optimizer = torch_optimizer(engine)
    saved = state.get(NESTED, state)["param_groups"]
    if len(saved) != len(optimizer.param_groups):
        raise ValueError(f"{len(saved)} parameter groups were saved, the script makes {len(optimizer.param_groups)}")
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})


def separate_steps(engine: Any) -> None:
    """Clones every ``step``, because a tensor shared between groups would count once per group.

    It was read on the CPU; optimizers that count on the card (``fused``, ``capturable``) get it on the card.
    """
    optimizer = torch_optimizer(engine)
    on_card = any(group.get("fused") or group.get("capturable") for group in getattr(optimizer, "param_groups", ()))
    for parameter, state in getattr(optimizer, "state", {}).items():
        if isinstance(state.get("step"), Tensor):
            own = state["step"].clone()
            state["step"] = own.to(parameter.device, torch.float32) if on_card else own


def restore_unpartitioned(engine: Any, directory: Path, *, optimizers: bool = False) -> None:
    """Copies what no optimizer knew from the model states: buffers, frozen and other parameters. Collective.

    Args:
        optimizers: Also into the optimizer's own copies, as it may be another one, which knows them.

    Raises:
        RuntimeError: The checkpoint has a parameter or a buffer that the model lacks. Or it lacks a parameter that is
            trained, because ZeRO-3 saves none that the optimizer does not know. Or one has another shape, because
            frozen parameters do not follow a change of tensor parallelism, or a buffer has grown in the training.
    """
    states = ModelStates(model_states_file(directory, int(getattr(engine, "checkpoint_mp_rank", 0))))
    state = states[0]
    module: Mapping[str, Any] = state["module"]
    partitioned = state.get("param_shapes")  # stage 0 partitions nothing, and DeepSpeed loads all of it
    owned = {name for group in partitioned or () for name in group}
    if extra := sorted(owned - {name for name, _ in engine.module.named_parameters(remove_duplicate=False)}):
        text = f"the checkpoint is another model's: this one has no {', '.join(extra[:3])}"
        raise RuntimeError(other_experts(extra) or text)
    _restore_buffers(engine, {name: module[name] for name in state.get("buffer_names") or ()})
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters() if partitioned is not None else ():
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            if name in owned or 0 in shape:
                continue
            value = unpartitioned(name, shape, states)
            if value is not None:
                copy_whole(parameter, value, optimizers=optimizers)
            elif parameter.requires_grad:
                raise RuntimeError(f"{name} requires gradients, and no optimizer knew it: the checkpoint has no value")


@torch.no_grad()
def _restore_buffers(engine: Any, saved: Mapping[str, Tensor]) -> None:
    """What came to the model, or grew in it, behind its first step a model that is new cannot take."""
    buffers = dict(engine.module.named_buffers(remove_duplicate=False))
    if extra := sorted(saved.keys() - buffers.keys()):
        raise RuntimeError(f"the checkpoint has buffers that this model lacks, {few(extra)}: make them in __init__")
    for name, value in saved.items():
        if buffers[name].shape != value.shape:
            raise RuntimeError(
                f"the buffer {name} has the shape {list(value.shape)} in the checkpoint, and"
                f" {list(buffers[name].shape)} in this model: make it as large as it becomes in __init__"
            )
        buffers[name].copy_(value)


def trained(engine: Any) -> list[str]:
    """At stage 0: names of the optimizer's parameters, in the order of its groups; empty if it has flat copies."""
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    groups = getattr(torch_optimizer(engine), "param_groups", ())
    return [names[parameter] for group in groups for parameter in group["params"] if parameter in names]


def check_groups(engine: Any, directory: Path) -> None:
    """Checks that the optimizer trains the same parameters as when this was saved, in the same order.

    Raises:
        ValueError: It does not.
    """
    state = load(model_states_file(directory, int(getattr(engine, "checkpoint_mp_rank", 0))), mmap=True)
    if int(engine.zero_optimization_stage()) == 0:
        # Earlier versions did not say.
        saved, here = list(state.get(TRAINED_NOTE) or ()), trained(engine)
        if not saved or not here:
            return
    elif state.get("param_shapes") is None:
        return
    else:
        saved = [name for group in state["param_shapes"] for name in group]
        here = [name for group in engine._get_zero_param_shapes() for name in group]
    frozen = set(state.get("frozen_param_shapes") or ())
    # Another model is detected when it is loaded, with a better message.
    if set(saved) <= {name for name, _ in engine.module.named_parameters()} and set(here) <= frozen.union(saved):
        check_parameters(saved, here)
