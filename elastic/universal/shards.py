"""The optimizer files of the ranks that saved a sharded ZeRO checkpoint, each opened when it is first asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from torch import Tensor

from .errors import Impossible, SourceBad
from .layout import Unsupported
from .loading import describe_refusal
from .records import NotInPieces, TorchFile

FP32 = "fp32"
INNER = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}
"""By stage, the key of the ``state_dict`` of the optimizer that DeepSpeed's wraps."""
_FLAT = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}


@dataclass(frozen=True)
class Shard:
    """What one rank saved of the optimizer.

    Attributes:
        rank: The rank that saved it.
        file: Its file, open.
        optimizer: The optimizer's dictionary, as in the file.
        flat: ``flat[group][state]``: 1-D tensors, memory-mapped; ``state`` is ``"fp32"`` or an optimizer state's name.
        steps: ``steps[group]``: the optimizer's step, None if it counts none.
        numbers: ``numbers[group]``: what the optimizer counts besides its step, by name.
    """

    rank: int
    file: TorchFile
    optimizer: Mapping[str, Any]
    flat: Sequence[Mapping[str, Tensor]]
    steps: Sequence[Any]
    numbers: Sequence[Mapping[str, Any]]


class Shards:
    """The ranks' shards, by rank; from any thread.

    Args:
        directory: The checkpoint.
        names: The optimizer files that are there, by rank.
        ranks: How many ranks saved.
        reset: Leave out the optimizer's state.
    """

    def __init__(self, directory: Path, names: Mapping[int, str], ranks: int, *, reset: bool) -> None:
        self._directory, self._names, self._ranks, self._reset = directory, names, ranks, reset
        self._open: dict[int, Shard] = {}
        # The check of one shard may ask for another.
        self._lock = threading.RLock()
        self._check: Callable[[Shard], None] = lambda shard: None

    def __len__(self) -> int:
        return self._ranks

    def __getitem__(self, rank: int) -> Shard:
        """A rank's shard, checked.

        Raises:
            ConversionError: It is missing, cannot be read, or is not what it has to be.
            OSError: The file system says no.
        """
        found = self._open.get(rank)
        if found is not None:
            return found
        with self._lock:
            return self._open.get(rank) or self._opened(rank)

    def all(self) -> list[Shard]:
        """Every rank's shard, in order: opens those that nobody has asked for."""
        return [self[rank] for rank in range(self._ranks)]

    @property
    def held(self) -> Mapping[int, Shard]:
        """Those that are open."""
        return self._open

    def check_with(self, check: Callable[[Shard], None]) -> None:
        """From now on each is checked when it is opened; what ``check`` raises, whoever asked for it gets."""
        self._check = check

    def close(self) -> None:
        """Closes the files. Mappings last as long as tensors that use them."""
        for shard in self._open.values():
            shard.file.close()

    def _opened(self, rank: int) -> Shard:
        if rank not in self._names:
            raise SourceBad(missing_ranks(self._ranks, self._names) + f", and rank {rank}'s is needed")
        file = opened(self._directory / self._names[rank])
        try:
            shard = _shard(rank, file, self._reset)
            self._check(shard)
        except BaseException:
            file.close()
            raise
        self._open[rank] = shard
        return shard


def missing_ranks(ranks: int, there: Mapping[int, str]) -> str:
    """What is said where not every rank's file is there."""
    return f"{ranks} ranks saved, optimizer files are there of ranks {sorted(there)}"


def stage_of(optimizer: Mapping[str, Any]) -> int:
    """The ZeRO stage that saved an optimizer's dictionary."""
    # DeepSpeed uses its BF16_Optimizer for stage 1 with gradients accumulated in fp32. That one does not say its stage.
    return int(optimizer.get("zero_stage", 1))


def opened(path: Path) -> TorchFile:
    """A file of the checkpoint, open.

    Raises:
        ConversionError: It is missing, or cannot be read; the type says what that means for the checkpoint.
        OSError: The file system says no.
    """
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


def _shard(rank: int, file: TorchFile, reset: bool) -> Shard:
    state = file.content["optimizer_state_dict"]
    stage = stage_of(state)
    weights: Sequence[Tensor] = state[_FLAT[stage]]
    gathered: Mapping[int, Mapping[str, Any]] = {} if reset else state[INNER[stage]]["state"]
    groups = [gathered.get(group, {}) for group in range(len(weights))]
    return Shard(
        rank=rank,
        file=file,
        optimizer=state,
        flat=[{FP32: own, **_tensors(group)} for own, group in zip(weights, groups, strict=True)],
        steps=[group.get("step") for group in groups],
        numbers=[{key: one for key, one in group.items() if key != "step" and _is_number(one)} for group in groups],
    )


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and value.dim() > 0}


def _is_number(value: Any) -> bool:
    return value.dim() == 0 if isinstance(value, Tensor) else isinstance(value, float)


__all__ = ("FP32", "INNER", "Shard", "Shards", "missing_ranks", "opened", "stage_of")
