"""What a sharded ZeRO checkpoint of DeepSpeed holds, and where each parameter's values lie in it.

Formats as DeepSpeed 0.16 to 0.19 write them (``runtime/zero/stage_1_and_2.py``, ``stage3.py``, ``runtime/engine.py``):

- stages 1 and 2: ``[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt`` per rank; per parameter group a flat partition
  of fp32 weights and of each optimizer state, and ``param_slice_mappings[group][name]`` = (start, numel) in it;
- stage 3: the same file names; per sub-group one flat tensor in which every parameter has a slot of
  ``ceil(numel / ranks)`` values, padded at the end; shapes by sub-group in the model states.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from torch import Tensor

from .errors import EnvironmentFailed, SourceBad
from .loading import load

FP32 = "fp32"
STAGE_3_STATES = ("exp_avg", "exp_avg_sq")
"""What DeepSpeed's loader of stage 3 reads, no more and no less."""
_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")


@dataclass(frozen=True)
class Piece:
    """A run of one parameter's values: elements ``[start, start + numel)`` of a flat tensor of ``rank``'s file."""

    rank: int
    group: int
    start: int
    numel: int


@dataclass(frozen=True)
class Parameter:
    """One parameter: its full shape, and the pieces that make it up in order."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Source:
    """A sharded checkpoint, opened. Tensors stay on the disk (memory-mapped) until they are read.

    Attributes:
        stage: The ZeRO stage, 1 to 3.
        parameters: All parameters that the optimizer knows, by name.
        flat: ``flat[rank][group][state]``: 1-D tensors; ``state`` is ``"fp32"`` or an optimizer state's name.
        steps: Per (sub-)group the optimizer's step, None where it counts none.
        optimizer: Rank 0's optimizer dictionary, as in its file.
        model: Rank 0's model states, as in their file.
        model_files: Names of all model-state files.
    """

    stage: int
    parameters: Mapping[str, Parameter]
    flat: Sequence[Sequence[Mapping[str, Tensor]]]
    steps: Sequence[Any]
    optimizer: Mapping[str, Any]
    model: Mapping[str, Any]
    model_files: tuple[str, ...]

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states that are written for every parameter, ``"fp32"`` first."""
        return (FP32, *STAGE_3_STATES) if self.stage == 3 else tuple(self.flat[0][0])


class Unsupported(EnvironmentFailed):
    """A layout that only DeepSpeed's own converter knows: tensor or pipeline parallelism, experts."""


def needs_conversion(strategy: str) -> bool:
    """Whether a checkpoint of this strategy loads only at the world size that wrote it (``Shape.strategy``)."""
    return strategy in ("deepspeed-zero-1", "deepspeed-zero-2", "deepspeed-zero-3")


def open_source(directory: Path) -> Source:
    """Opens a sharded checkpoint and checks that it is complete.

    Raises:
        SourceBad: Files, ranges or states are missing or disagree.
        Unsupported: A layout beyond data parallelism.
        EnvironmentFailed: It was saved with ``round_robin_gradients`` or holds classes that are not on our list.
        OSError: The file system says no.
    """
    optimizer_files, model_files = _files(directory)
    model = _load(directory / model_files[0])
    _refuse(model)
    world = int(model["dp_world_size"])
    if sorted(optimizer_files) != list(range(world)):
        raise SourceBad(f"{world} ranks saved, optimizer files are there of ranks {sorted(optimizer_files)}")
    loaded = [_load(directory / optimizer_files[rank], mmap=True)["optimizer_state_dict"] for rank in range(world)]
    stage = int(loaded[0]["zero_stage"])
    if stage == 3 and len(model_files) != world:
        raise SourceBad(f"{world} ranks saved, {len(model_files)} files of model states are there")
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]
    if stage == 3:
        flat, steps = [_flat_stage_3(state) for state in loaded], _steps_stage_3(loaded[0])
        parameters = _parameters_stage_3(shapes, world)
    else:
        flat, steps = [_flat_stage_1_2(state) for state in loaded], _steps_stage_1_2(loaded[0])
        parameters = _parameters_stage_1_2(shapes, [state["param_slice_mappings"] for state in loaded])
    source = Source(stage, parameters, flat, steps, loaded[0], model, tuple(model_files))
    _check(source)
    return source


def _files(directory: Path) -> tuple[dict[int, str], list[str]]:
    optimizer: dict[int, str] = {}
    model: list[tuple[int, str]] = []
    for name in sorted(path.name for path in directory.iterdir() if path.is_file()):
        if match := _OPTIMIZER_FILE.fullmatch(name):
            if int(match[2]) != 0:
                raise Unsupported(f"{name}: tensor parallelism")
            optimizer[int(match[1])] = name
        elif match := _MODEL_FILE.fullmatch(name):
            if int(match[2]) != 0:
                raise Unsupported(f"{name}: tensor parallelism")
            model.append((int(match[1] or 0), name))
        elif name.endswith(("_model_states.pt", "_optim_states.pt")):
            raise Unsupported(f"{name}: pipeline stages or experts")
    if not model:
        raise SourceBad("no file of model states")
    if not optimizer:
        raise SourceBad("no optimizer files: nothing was partitioned here, or they are lost")
    return optimizer, [name for _, name in sorted(model)]


def _load(path: Path, *, mmap: bool = False) -> Any:
    try:
        return load(path, mmap=mmap)
    except FileNotFoundError as error:
        raise SourceBad(f"{path.name} is missing") from error
    except UnpicklingError as error:
        raise EnvironmentFailed(f"{path.name} holds objects that are not loaded from checkpoints: {error}") from error
    except RuntimeError as error:
        raise SourceBad(f"{path.name} cannot be read: {str(error).splitlines()[0]}") from error


def _refuse(model: Mapping[str, Any]) -> None:
    zero = (model.get("ds_config") or {}).get("zero_optimization") or {}
    if zero.get("round_robin_gradients"):
        raise EnvironmentFailed(
            "saved with zero_optimization.round_robin_gradients, whose layout the checkpoint does not describe; "
            "set it to false to be able to change the world size"
        )
    if model.get("num_experts"):
        raise Unsupported("a model with experts")


def _flat_stage_1_2(state: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    groups = []
    inner = state["base_optimizer_state"]["state"]
    for group, weights in enumerate(state["single_partition_of_fp32_groups"]):
        groups.append({FP32: weights, **_tensors(inner.get(group, {}))})
    return groups


def _flat_stage_3(state: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    inner = state["optimizer_state_dict"]["state"]
    return [{FP32: flat, **_tensors(inner.get(group, {}))} for group, flat in enumerate(state["fp32_flat_groups"])]


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}


def _steps_stage_1_2(state: Mapping[str, Any]) -> list[Any]:
    inner = state["base_optimizer_state"]["state"]
    return [inner.get(group, {}).get("step") for group in range(len(state["single_partition_of_fp32_groups"]))]


def _steps_stage_3(state: Mapping[str, Any]) -> list[Any]:
    inner = state["optimizer_state_dict"]["state"]
    return [inner.get(group, {}).get("step") for group in range(len(state["fp32_flat_groups"]))]


def _inner(source: Source) -> Mapping[str, Any]:
    inner: Mapping[str, Any] = source.optimizer["optimizer_state_dict" if source.stage == 3 else "base_optimizer_state"]
    return inner


def _parameters_stage_1_2(
    shapes: Sequence[Mapping[str, tuple[int, ...]]], mappings: Sequence[Sequence[Mapping[str, Any]]]
) -> dict[str, Parameter]:
    parameters = {}
    for group, names in enumerate(shapes):
        for name, shape in names.items():
            pieces = tuple(
                Piece(rank, group, int(mapping[group][name].start), int(mapping[group][name].numel))
                for rank, mapping in enumerate(mappings)
                if name in mapping[group]
            )
            parameters[name] = Parameter(name, shape, pieces)
    return parameters


def _parameters_stage_3(shapes: Sequence[Mapping[str, tuple[int, ...]]], world: int) -> dict[str, Parameter]:
    parameters = {}
    for group, names in enumerate(shapes):
        offset = 0
        for name, shape in names.items():
            numel = math.prod(shape)
            slot = -(-numel // world)
            lengths = [max(0, min(slot, numel - rank * slot)) for rank in range(world)]
            pieces = tuple(Piece(rank, group, offset, length) for rank, length in enumerate(lengths) if length)
            parameters[name] = Parameter(name, shape, pieces)
            offset += slot
    return parameters


def _check(source: Source) -> None:
    wanted = set(source.flat[0][0])
    if source.stage == 3 and wanted - {FP32, *STAGE_3_STATES}:
        others = sorted(wanted - {FP32, *STAGE_3_STATES})
        raise EnvironmentFailed(
            f"optimizer states {others}: DeepSpeed's universal loading of ZeRO-3 knows only Adam's moments; use ZeRO-2"
        )
    adam = any("betas" in group for group in _inner(source)["param_groups"])
    trained = int(source.model["global_steps"]) > int(source.model.get("skipped_steps") or 0)
    if adam and trained and not wanted.issuperset(STAGE_3_STATES):
        raise SourceBad("Adam's moments are not there: training would go on as if at its first step")
    for rank, groups in enumerate(source.flat):
        for group, states in enumerate(groups):
            if set(states) != wanted:
                missing = sorted(wanted ^ set(states))
                raise SourceBad(
                    f"optimizer states {missing} are not there for every group (rank {rank}, group {group})"
                )
    for parameter in source.parameters.values():
        path = Path(parameter.name)
        if path.is_absolute() or ".." in path.parts:
            raise Unsupported(f"parameter name {parameter.name!r} is not a relative path")
        have = sum(piece.numel for piece in parameter.pieces)
        if have != parameter.numel:
            raise SourceBad(f"{parameter.name}: {have} of {parameter.numel} values are in the files")
        for piece in parameter.pieces:
            for state, flat in source.flat[piece.rank][piece.group].items():
                if flat.dim() != 1 or piece.start + piece.numel > flat.numel():
                    raise SourceBad(f"{parameter.name}: rank {piece.rank} has too few values of {state}")
