"""What a sharded ZeRO checkpoint of DeepSpeed holds, and where each parameter's values lie in it.

Formats as DeepSpeed 0.16 to 0.19 write them (``runtime/zero/stage_1_and_2.py``, ``stage3.py``, ``bf16_optimizer.py``,
``runtime/engine.py``):

- stages 1 and 2: ``[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt`` per rank; per parameter group a flat partition
  of fp32 weights and of each optimizer state, and ``param_slice_mappings[group][name]`` = (start, numel) in it;
- stage 3: the same file names; per sub-group one flat tensor in which every parameter has a slot of
  ``ceil(numel / ranks)`` values, padded at the end; shapes by sub-group in the model states.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from pickle import UnpicklingError
from types import TracebackType
from typing import Any

from torch import Tensor

from .errors import Impossible, SourceBad
from .layout import Files, Unsupported, find_files, refuse_layout
from .loading import describe_refusal
from .records import Extent, NotInPieces, TorchFile

FP32 = "fp32"
ADAM_STATES = ("exp_avg", "exp_avg_sq")
"""What DeepSpeed's loader of stage 3 reads, neither more nor less."""
COMMON_STATE = "optimizer_state.pt"
"""Name of the file beside the parameters' directories."""
_OTHER_FILES = 1024
"""Files, sockets and pipes that a training process may have open beside ours."""
OPTIMIZER_NOTE = "dalsegno_optimizer"
"""Key in the model states: it says that `elastic.deepspeed` will load them, whatever state the optimizer has."""
_ANEW = "to go on with a new optimizer: dalsegno convert --reset-optimizer"


@dataclass(frozen=True)
class Piece:
    """A run of one parameter's values: elements ``[start, start + numel)`` of a flat tensor of ``rank``'s file."""

    rank: int
    group: int
    start: int
    numel: int


@dataclass(frozen=True)
class Parameter:
    """One parameter: its full shape, its (sub-)group, and the pieces that make it up in order."""

    name: str
    shape: tuple[int, ...]
    group: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ShardedSource:
    """A sharded checkpoint, opened. Tensors stay on the disk until they are read. Use it as a context manager.

    Attributes:
        stage: The ZeRO stage, 1 to 3.
        parameters: All parameters that the optimizer knows, by name.
        flat: ``flat[rank][group][state]``: 1-D tensors, memory-mapped; ``state`` is ``"fp32"`` or an optimizer state's
            name.
        steps: ``steps[rank][group]``: the optimizer's step, None if it counts none.
        numbers: ``numbers[rank][group]``: what the optimizer counts besides its step, by name.
        optimizer: Rank 0's optimizer dictionary, as in its file.
        model: Rank 0's model states, as in their file, memory-mapped.
        model_files: Names of all model-state files, rank 0's first.
        reset: The optimizer's state is left out.
        ours: `elastic.deepspeed` will load it, which accepts any optimizer's state.
        files: The ranks' optimizer files and rank 0's model states, open.
    """

    stage: int
    parameters: Mapping[str, Parameter]
    flat: Sequence[Sequence[Mapping[str, Tensor]]]
    steps: Sequence[Sequence[Any]]
    numbers: Sequence[Sequence[Mapping[str, Any]]]
    optimizer: Mapping[str, Any]
    model: Mapping[str, Any]
    model_files: tuple[str, ...]
    reset: bool
    ours: bool
    files: tuple[TorchFile, ...]

    def __enter__(self) -> ShardedSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files. Mappings last as long as tensors that use them."""
        for file in self.files:
            file.close()

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states written for every parameter, ``"fp32"`` first; a state that `flat` lacks is zeros."""
        gathered = tuple(self.flat[0][0])
        # A stock DeepSpeed's loader of stage 3 wants Adam's moments for any optimizer.
        wants_moments = self.stage == 3 and gathered == (FP32,) and (self.adam or not self.ours)
        return (FP32, *ADAM_STATES) if wants_moments or (self.reset and self.adam) else gathered

    @property
    def adam(self) -> bool:
        """Whether the optimizer is one of Adam's family, with a first and a second moment."""
        return any("betas" in group and "eps" in group for group in self.parameter_groups)

    @property
    def parameter_groups(self) -> Sequence[Mapping[str, Any]]:
        """Hyperparameters by parameter group."""
        groups: Sequence[Mapping[str, Any]] = self.inner["param_groups"]
        return groups

    @property
    def inner(self) -> Mapping[str, Any]:
        """Rank 0's ``state_dict`` of the optimizer that DeepSpeed's wraps."""
        inner: Mapping[str, Any] = self.optimizer[_INNER[self.stage]]
        return inner

    def extents(self, parameter: Parameter, state: str) -> tuple[Extent, ...] | None:
        """Where the values of one state of one parameter lie, in order; None: in no file, because they are zeros."""
        if state not in self.flat[0][parameter.group]:
            return None
        return tuple(
            self.files[piece.rank].extent(self.flat[piece.rank][piece.group][state], piece.start, piece.numel)
            for piece in parameter.pieces
        )

    def model_extent(self, tensor: Tensor) -> Extent:
        """Where the bytes of a dense tensor of ``model`` lie, in storage order."""
        return self.files[-1].extent(tensor)


_INNER = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}
_FLAT = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}


def open_source(directory: Path, *, reset_optimizer: bool = False, ours: bool = False) -> ShardedSource:
    """Opens a sharded checkpoint and checks that it is complete.

    Args:
        directory: The checkpoint.
        reset_optimizer: Leave out the optimizer's state, or do without a state that was lost: the optimizer starts
            anew.
        ours: `elastic.deepspeed` is about to load it. False: the checkpoint's `OPTIMIZER_NOTE` says whether it will.

    Raises:
        SourceBad: Files, ranges or states are missing or disagree.
        Unsupported: A layout that only DeepSpeed's own converter knows.
        Impossible: A layout that no converter knows, or classes that are not on our list.
        OSError: The file system says no.
    """
    with ExitStack() as opened:
        found = find_files(directory)
        model_file = opened.enter_context(_open(directory / found.model[0]))
        model: Mapping[str, Any] = model_file.content
        refuse_layout(model)
        _check_ranks(found, model)
        _let_open(len(found.optimizer))
        ranks = [opened.enter_context(_open(directory / name)) for name in found.optimizer]
        source = _read(model, ranks, model_file, found, reset_optimizer, ours or OPTIMIZER_NOTE in model)
        _check(source)
        opened.pop_all()
        return source


def _let_open(files: int) -> None:
    """Raises this process's limit of open files: a shell's is usually 1024, and the hard limit is much higher."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and wanted > soft:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _open(path: Path) -> TorchFile:
    try:
        return TorchFile(path)
    except FileNotFoundError as error:
        raise SourceBad(f"{path.name} is missing") from error
    except NotInPieces as error:
        raise Unsupported(str(error)) from error
    except UnpicklingError as error:
        raise Impossible(describe_refusal(path.name, error)) from error
    except RuntimeError as error:
        raise SourceBad(f"{path.name} cannot be read: {str(error).splitlines()[0]}") from error


def _check_ranks(found: Files, model: Mapping[str, Any]) -> None:
    world = int(model["dp_world_size"])
    if list(found.optimizer_ranks) != list(range(world)):
        raise SourceBad(f"{world} ranks saved, optimizer files are there of ranks {list(found.optimizer_ranks)}")


def _read(
    model: Mapping[str, Any],
    ranks: Sequence[TorchFile],
    model_file: TorchFile,
    found: Files,
    reset_optimizer: bool,
    ours: bool,
) -> ShardedSource:
    loaded = [file.content["optimizer_state_dict"] for file in ranks]
    # DeepSpeed uses its BF16_Optimizer for stage 1 with gradients accumulated in fp32. That one does not say its stage.
    stage = int(loaded[0].get("zero_stage", 1))
    if stage == 3 and len(found.model) != len(ranks):
        raise SourceBad(f"{len(ranks)} ranks saved, {len(found.model)} files of model states are there")
    shapes = [{name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]
    if stage == 3:
        parameters = _parameters_stage_3(shapes, len(ranks))
    else:
        parameters = _parameters_stage_1_2(shapes, [state["param_slice_mappings"] for state in loaded])
    return ShardedSource(
        stage=stage,
        parameters=parameters,
        flat=[_flat(state, stage, reset_optimizer) for state in loaded],
        steps=[_steps(state, stage, reset_optimizer) for state in loaded],
        numbers=[_numbers(state, stage, reset_optimizer) for state in loaded],
        optimizer=loaded[0],
        model=model,
        model_files=found.model,
        reset=reset_optimizer,
        ours=ours,
        files=(*ranks, model_file),
    )


def _flat(state: Mapping[str, Any], stage: int, weights_only: bool) -> list[dict[str, Tensor]]:
    gathered = {} if weights_only else state[_INNER[stage]]["state"]
    return [{FP32: weights, **_tensors(gathered.get(group, {}))} for group, weights in enumerate(state[_FLAT[stage]])]


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}


def _steps(state: Mapping[str, Any], stage: int, weights_only: bool) -> list[Any]:
    gathered = {} if weights_only else state[_INNER[stage]]["state"]
    return [gathered.get(group, {}).get("step") for group in range(len(state[_FLAT[stage]]))]


def _numbers(state: Mapping[str, Any], stage: int, weights_only: bool) -> list[dict[str, Any]]:
    gathered = {} if weights_only else state[_INNER[stage]]["state"]
    return [
        {key: value for key, value in gathered.get(group, {}).items() if key != "step" and _is_number(value)}
        for group in range(len(state[_FLAT[stage]]))
    ]


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
            parameters[name] = Parameter(name, shape, group, pieces)
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
            parameters[name] = Parameter(name, shape, group, pieces)
            offset += slot
    return parameters


def _check(source: ShardedSource) -> None:
    for parameter in source.parameters.values():
        _check_name(parameter.name)
        have = sum(piece.numel for piece in parameter.pieces)
        if have != parameter.numel:
            raise SourceBad(f"{parameter.name}: {have} of {parameter.numel} values are in the files")
        for piece in parameter.pieces:
            for state, flat in source.flat[piece.rank][piece.group].items():
                if flat.dim() == 1 and flat.stride() == (1,) and piece.start + piece.numel <= flat.numel():
                    continue
                if state == FP32:
                    raise SourceBad(f"{parameter.name}: rank {piece.rank} has too few values of {state}")
                # Nothing is missing: an 8-bit optimizer has one scale for a whole block.
                raise Impossible(
                    f"the optimizer's {state} is not one value for each weight: it loads at no other number of ranks"
                )
    if not source.reset:
        _check_states(source)


def _check_states(source: ShardedSource) -> None:
    wanted = set(source.flat[0][0])
    if source.stage == 3 and not source.ours and wanted - {FP32, *ADAM_STATES}:
        others = sorted(wanted - {FP32, *ADAM_STATES})
        raise Impossible(
            f"optimizer states {others}: DeepSpeed's universal loading of ZeRO-3 knows only Adam's moments; use ZeRO-2,"
            " or save and load with elastic.deepspeed"
        )
    _check_numbers(source)
    trained = int(source.model["global_steps"]) > int(source.model.get("skipped_steps") or 0)
    if source.adam and trained and not wanted.issuperset(ADAM_STATES):
        unknown = wanted - {FP32}
        if unknown and not (source.ours and unknown - set(ADAM_STATES)):
            raise Impossible(
                f"the optimizer gathers {', '.join(sorted(unknown))}, not Adam's moments: nobody can convert them; "
                f"{_ANEW}"
            )
        if not unknown:
            raise SourceBad(f"Adam's moments are not there: training would go on as if at its first step; {_ANEW}")
    for rank, groups in enumerate(source.flat):
        for group, states in enumerate(groups):
            if set(states) != wanted and all(set(other[group]) == set(states) for other in source.flat):
                raise Impossible(
                    f"the optimizer gathers other states for group {group} than for group 0, which nobody can convert; "
                    f"{_ANEW}"
                )
            if set(states) != wanted:
                missing = sorted(wanted ^ set(states))
                raise SourceBad(
                    f"optimizer states {missing} are not there for every group (rank {rank}, group {group}); {_ANEW}"
                )
            for state, flat in states.items():
                if flat.dtype != source.flat[0][group][state].dtype:
                    raise SourceBad(
                        f"{state} of group {group} is {flat.dtype} on rank {rank} and another type on rank 0"
                    )
        if list(map(_number, source.steps[rank])) != list(map(_number, source.steps[0])):
            raise SourceBad(f"ranks 0 and {rank} have made different numbers of optimizer steps")


def _check_numbers(source: ShardedSource) -> None:
    """Checks that what the optimizer counts besides its step is alike on all ranks, and has a place in the files."""
    counted = sorted({key for groups in source.numbers for numbers in groups for key in numbers})
    if counted and not source.ours:
        raise Impossible(
            f"the optimizer counts {', '.join(counted)} besides its step: universal files have no place for it; {_ANEW}"
        )
    for rank, groups in enumerate(source.numbers):
        for ours, others in zip(groups, source.numbers[0], strict=True):
            for key in sorted({*ours, *others}):
                if _number(ours.get(key)) != _number(others.get(key)):
                    raise Impossible(
                        f"the optimizer's {key} is another number on rank {rank} than on rank 0: it is of that rank's "
                        f"part of the model, which nobody can convert; {_ANEW}"
                    )


def _check_name(name: str) -> None:
    """A parameter's name becomes a directory below ``zero/``."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or str(path) != name or path.parts[0] == COMMON_STATE:
        raise Impossible(f"the parameter name {name!r} cannot be a directory's; rename it in the model")


def _is_number(value: Any) -> bool:
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, float)


def _number(step: Any) -> float | None:
    return None if step is None else float(step)
