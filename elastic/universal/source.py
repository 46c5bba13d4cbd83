"""What a sharded ZeRO checkpoint of DeepSpeed holds, and where each parameter's values lie in it.

Formats as DeepSpeed 0.16 to 0.19 write them (``runtime/zero/stage_1_and_2.py``, ``stage3.py``, ``bf16_optimizer.py``,
``runtime/engine.py``):

- stages 1 and 2: ``[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt`` per rank; per parameter group a flat partition
  of fp32 weights and of each optimizer state, and ``param_slice_mappings[group][name]`` = (start, numel) in it;
- stage 3: the same file names; per sub-group one flat tensor in which every parameter has a slot of
  ``ceil(numel / ranks)`` values, padded at the end; shapes by sub-group in the model states.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

from torch import Tensor

from .errors import Disagrees, Impossible, SourceBad
from .layout import Files, find_files, refuse_layout
from .pieces import Parameter, Piece, Shapes, flattened, mapped, of_rank, partitioned, says
from .records import Extent, TorchFile
from .shards import FP32, INNER, Shard, Shards, missing_ranks, opened, stage_of

ADAM_STATES = ("exp_avg", "exp_avg_sq")
"""What DeepSpeed's loader of stage 3 reads, neither more nor less."""
COMMON_STATE = "optimizer_state.pt"
"""Name of the file beside the parameters' directories."""
_OTHER_FILES = 1024
"""Files, sockets and pipes that a training process may have open beside ours."""
OPTIMIZER_NOTE = "dalsegno_optimizer"
"""Key in the model states: it says that `elastic.deepspeed` will load them, whatever state the optimizer has."""
# Key in an optimizer file of stages 1 and 2: pads between parameters, by group (parameter_alignment).
_ALIGNMENT_PADS = "param_alignment_paddings"
_ANEW = "to go on with a new optimizer: dalsegno convert --reset-optimizer"


@dataclass(frozen=True)
class ShardedSource:
    """A sharded checkpoint, opened. Tensors stay on the disk until they are read. Use it as a context manager.

    Attributes:
        stage: The ZeRO stage, 1 to 3.
        parameters: All parameters that the optimizer knows, by name.
        shards: What each rank saved of the optimizer.
        model: Rank 0's model states, as in their file, memory-mapped.
        model_files: Names of all model-state files, rank 0's first.
        reset: The optimizer's state is left out.
        ours: `elastic.deepspeed` will load it, which accepts any optimizer's state.
        model_file: Rank 0's model states, open.
    """

    stage: int
    parameters: Mapping[str, Parameter]
    shards: Shards
    model: Mapping[str, Any]
    model_files: tuple[str, ...]
    reset: bool
    ours: bool
    model_file: TorchFile

    def __enter__(self) -> ShardedSource:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the files. Mappings last as long as tensors that use them."""
        self.shards.close()
        self.model_file.close()

    @property
    def first(self) -> Shard:
        """Rank 0's shard: what is alike on all ranks is read there."""
        return self.shards[0]

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states written for every parameter, ``"fp32"`` first; a state that no shard has is zeros."""
        gathered = tuple(self.first.flat[0])
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
        inner: Mapping[str, Any] = self.first.optimizer[INNER[self.stage]]
        return inner

    def extents(
        self, parameter: Parameter, state: str, start: int = 0, stop: int | None = None
    ) -> tuple[Extent, ...] | None:
        """Where elements ``[start, stop)`` of one state of one parameter lie, in order; ``stop`` None: to the end.

        Opens the files that have some of them, and no others. From any thread.

        Returns:
            None: they are in no file, because they are zeros.

        Raises:
            ConversionError: A file is missing or damaged.
            OSError: The file system says no.
        """
        if state not in self.first.flat[parameter.group]:
            return None
        end = parameter.numel if stop is None else stop
        found = []
        for piece, low, high in parameter.within(start, end):
            shard = self.shards[piece.rank]
            tensor = shard.flat[piece.group][state]
            found.append(shard.file.extent(tensor, piece.start + low - piece.first, high - low))
        return tuple(found)

    def model_extent(self, tensor: Tensor) -> Extent:
        """Where the bytes of a dense tensor of ``model`` lie, in storage order."""
        return self.model_file.extent(tensor)


def open_source(
    directory: Path, *, reset_optimizer: bool = False, ours: bool = False, lazy: bool = False
) -> ShardedSource:
    """Opens a sharded checkpoint and checks that it is complete.

    Args:
        directory: The checkpoint.
        reset_optimizer: Leave out the optimizer's state, or do without a state that was lost: the optimizer starts
            anew.
        ours: `elastic.deepspeed` is about to load it. False: the checkpoint's `OPTIMIZER_NOTE` says whether it will.
        lazy: Open a rank's file when something in it is first wanted, and check it then: only rank 0's must be there.
            A layout that only all files together describe is opened as a whole.

    Raises:
        SourceBad: Files, ranges or states are missing or disagree.
        Unsupported: A layout that only DeepSpeed's own converter knows.
        Impossible: A layout that no converter knows, or classes that are not on our list.
        OSError: The file system says no.
    """
    with ExitStack() as stack:
        found = find_files(directory)
        if lazy and found.model_ranks[0] != 0:
            raise SourceBad(f"rank 0's model states are missing, those of ranks {list(found.model_ranks)} are there")
        model_file = stack.enter_context(opened(directory / found.model[0]))
        model: Mapping[str, Any] = model_file.content
        refuse_layout(model)
        world = int(model["dp_world_size"])
        names = dict(zip(found.optimizer_ranks, found.optimizer, strict=True))
        _check_ranks(names, world, lazy=lazy)
        _let_open(len(names))
        shards = Shards(directory, names, world, reset=reset_optimizer)
        stack.callback(shards.close)
        stage = stage_of(shards[0].optimizer)
        shapes: Shapes = [{name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]
        parameters = _by_formula(shapes, shards) if lazy or stage == 3 else None
        if parameters is None or not lazy:
            parameters = _of_all(shapes, shards, names, found, parameters)
            lazy = False
        source = ShardedSource(
            stage=stage,
            parameters=parameters,
            shards=shards,
            model=model,
            model_files=found.model,
            reset=reset_optimizer,
            ours=ours or OPTIMIZER_NOTE in model,
            model_file=model_file,
        )
        if lazy:
            _check(source, [source.first])
            shards.check_with(partial(_check_opened, source))
        else:
            _check(source, shards.all())
        stack.pop_all()
        return source


def _let_open(files: int) -> None:
    """Raises this process's limit of open files: a shell's is usually 1024, and the hard limit is much higher."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = files + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and wanted > soft:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _check_ranks(names: Mapping[int, str], world: int, *, lazy: bool) -> None:
    enough = max(names) < world if lazy else sorted(names) == list(range(world))
    if not enough:
        raise SourceBad(missing_ranks(world, names))


def _by_formula(shapes: Shapes, shards: Shards) -> dict[str, Parameter] | None:
    """Where values lie, from the shapes and the number of ranks alone; None: rank 0's file says something else."""
    state = shards[0].optimizer
    if stage_of(state) == 3:
        return partitioned(shapes, len(shards))
    if any(map(any, state.get(_ALIGNMENT_PADS) or ())):
        return None
    found = flattened(shapes, len(shards))
    return found if says(state["param_slice_mappings"], of_rank(found, 0)) else None


def _of_all(
    shapes: Shapes, shards: Shards, names: Mapping[int, str], found: Files, parameters: dict[str, Parameter] | None
) -> dict[str, Parameter]:
    """Opens all files, and says where values lie: where ``parameters`` do, or else as the files say."""
    _check_ranks(names, len(shards), lazy=False)
    every = shards.all()
    if parameters is None:
        return mapped(shapes, [shard.optimizer["param_slice_mappings"] for shard in every])
    if len(found.model) != len(every):
        raise SourceBad(f"{len(every)} ranks saved, {len(found.model)} files of model states are there")
    return parameters


def _check_opened(source: ShardedSource, shard: Shard) -> None:
    """Checks a shard that was opened later than rank 0's: as `_check` does, and that its pieces are the formula's."""
    name, pieces = shard.file.path.name, of_rank(source.parameters, shard.rank)
    if stage_of(shard.optimizer) != source.stage or len(shard.flat) != len(source.first.flat):
        raise Disagrees(f"{name} is of another stage or number of groups than rank 0's")
    if source.stage < 3 and not says(shard.optimizer["param_slice_mappings"], pieces):
        raise Disagrees(f"{name}: values do not lie where rank 0's file and the number of ranks say")
    _check_sizes(shard, pieces)
    if not source.reset:
        _check_numbers(source, [shard])
        _check_alike(source, shard, [source.first, shard])


def _check(source: ShardedSource, shards: Sequence[Shard]) -> None:
    """Checks all of a source, with those ``shards`` of it that are open, rank 0's first."""
    for parameter in source.parameters.values():
        check_name(parameter.name)
        have = sum(piece.numel for piece in parameter.pieces)
        if have != parameter.numel:
            raise Disagrees(f"{parameter.name}: {have} of {parameter.numel} values are in the files")
    for shard in shards:
        _check_sizes(shard, of_rank(source.parameters, shard.rank))
    if not source.reset:
        _check_states(source, shards)


def _check_sizes(shard: Shard, pieces: Sequence[tuple[str, Piece]]) -> None:
    for name, piece in pieces:
        for state, flat in shard.flat[piece.group].items():
            if flat.dim() == 1 and flat.stride() == (1,) and piece.start + piece.numel <= flat.numel():
                continue
            if state == FP32:
                raise Disagrees(f"{name}: rank {shard.rank} has too few values of {state}")
            # Nothing is missing: an 8-bit optimizer has one scale for a whole block.
            raise Impossible(
                f"the optimizer's {state} is not one value for each weight: it loads at no other number of ranks"
            )


def _check_states(source: ShardedSource, shards: Sequence[Shard]) -> None:
    wanted = set(source.first.flat[0])
    if source.stage == 3 and not source.ours and wanted - {FP32, *ADAM_STATES}:
        others = sorted(wanted - {FP32, *ADAM_STATES})
        raise Impossible(
            f"optimizer states {others}: DeepSpeed's universal loading of ZeRO-3 knows only Adam's moments; use ZeRO-2,"
            " or save and load with elastic.deepspeed"
        )
    _check_numbers(source, shards)
    trained = int(source.model["global_steps"]) > int(source.model.get("skipped_steps") or 0)
    if source.adam and trained and not wanted.issuperset(ADAM_STATES):
        unknown = wanted - {FP32}
        if unknown and not (source.ours and unknown - set(ADAM_STATES)):
            raise Impossible(
                f"the optimizer gathers {', '.join(sorted(unknown))}, not Adam's moments: nobody can convert them; "
                f"{_ANEW}"
            )
        if not unknown:
            raise Disagrees(f"Adam's moments are not there: training would go on as if at its first step; {_ANEW}")
    for shard in shards:
        _check_alike(source, shard, shards)


def _check_alike(source: ShardedSource, shard: Shard, shards: Sequence[Shard]) -> None:
    """Checks that a shard has the states and the step that rank 0's has; ``shards``: those that are open."""
    wanted, rank = set(source.first.flat[0]), shard.rank
    for group, states in enumerate(shard.flat):
        if set(states) != wanted and all(set(other.flat[group]) == set(states) for other in shards):
            raise Impossible(
                f"the optimizer gathers other states for group {group} than for group 0, which nobody can convert; "
                f"{_ANEW}"
            )
        if set(states) != wanted:
            missing = sorted(wanted ^ set(states))
            raise Disagrees(
                f"optimizer states {missing} are not there for every group (rank {rank}, group {group}); {_ANEW}"
            )
        for state, flat in states.items():
            if flat.dtype != source.first.flat[group][state].dtype:
                raise Disagrees(f"{state} of group {group} is {flat.dtype} on rank {rank} and another type on rank 0")
    if list(map(_number, shard.steps)) != list(map(_number, source.first.steps)):
        raise Disagrees(f"ranks 0 and {rank} have made different numbers of optimizer steps")


def _check_numbers(source: ShardedSource, shards: Sequence[Shard]) -> None:
    """Checks that what the optimizer counts besides its step is alike on all ranks, and has a place in the files."""
    counted = sorted({key for shard in shards for numbers in shard.numbers for key in numbers})
    if counted and not source.ours:
        raise Impossible(
            f"the optimizer counts {', '.join(counted)} besides its step: universal files have no place for it; {_ANEW}"
        )
    for shard in shards:
        for ours, others in zip(shard.numbers, source.first.numbers, strict=True):
            for key in sorted({*ours, *others}):
                if _number(ours.get(key)) != _number(others.get(key)):
                    raise Impossible(
                        f"the optimizer's {key} is another number on rank {shard.rank} than on rank 0: it is of that "
                        f"rank's part of the model, which nobody can convert; {_ANEW}"
                    )


def check_name(name: str) -> None:
    """Checks the name of a parameter or a buffer, which becomes a directory below ``zero/``.

    Raises:
        Impossible: It cannot be one.
    """
    path = PurePosixPath(name)
    if str(path) != name or path.is_absolute() or path.parts[:1] in ((), (COMMON_STATE,)) or ".." in path.parts:
        raise Impossible(f"the name {name!r} cannot be a directory's; rename it in the model")


def _number(step: Any) -> float | None:
    return None if step is None else float(step)
