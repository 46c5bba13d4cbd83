"""DLRover's sampler and torch's loader, with this project's order and cut."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from dalsegno.protos.contract import Variable

from ..checkpoint import Position
from ..data.sampler import ElasticSampler
from .passes import Pass

__all__ = ["Slices", "attach", "change", "handed_last", "largest_world", "put"]

# The key of a state that says whose order it counts in; DLRover's own class ignores it.
_OURS = "dalsegno_order"


def largest_world() -> int:
    """Ranks of the largest world, by which DLRover's trainer accumulates.

    Raises:
        RuntimeError: nodes of this world have different numbers of ranks.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    nodes, ranks = int(os.environ.get("NODE_NUM", "1")), int(os.environ.get("WORLD_SIZE", "1"))
    if local * nodes != ranks:
        raise RuntimeError(
            f"--dlrover-fixes: {ranks} ranks on {nodes} nodes, {local} of them here: DLRover's global batch is a number"
            " of ranks for each node, so all nodes need the same --nproc-per-node"
        )
    return int(os.environ.get("WORKER_NUM", "1")) * local


def change(theirs: type[Any]) -> None:
    """Changes `ElasticDistributedSampler`.

    The order is `ElasticSampler`'s; a data epoch that was begun in theirs goes on in theirs. The state counts from the
    start of the data epoch, not from the last resume.
    """
    put(_Sampler, theirs)


def put(ours: type[Any], theirs: type[Any]) -> None:
    """Gives a class the methods of another one, and keeps its own in `_plain`, by name."""
    theirs._plain = {}
    for name, value in vars(ours).items():
        if callable(value):
            theirs._plain[name] = getattr(theirs, name, None)
            setattr(theirs, name, value)


class _Sampler:
    """The methods of `ElasticDistributedSampler` that are changed in place, because its own ones name the class."""

    # What theirs has; `_plain` are its own methods.
    _plain: dict[str, Any]
    dataset: Any
    seed: int
    epoch: int
    shuffle: bool
    drop_last: bool
    rank: int
    num_replicas: int
    num_samples: int
    _epoch_checkpoint: dict[int, int]

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._plain["__init__"](self, *arguments, **named)
        self._order = ElasticSampler(len(self.dataset), 1, seed=self.seed, shuffle=self.shuffle)
        # Data epochs that a checkpoint of their class has begun.
        self._theirs: set[int] = set()
        self._pass: Pass | None = None

    def begin(self, slices: Slices) -> Pass:
        """Begins a pass over the present data epoch."""
        self._pass = self.cut(slices)
        return self._pass

    def cut(self, slices: Slices) -> Pass:
        """A pass over the present data epoch, as a loader wants it."""
        epoch = self.epoch
        drop_last = self.drop_last or slices.drop_last
        world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        # A loader that ranks do not share has a batch of its own.
        shared = self.num_replicas == world and os.environ.get(Variable.DLROVER_FIXES) != "each"
        most = largest_world() if shared else self.num_replicas
        return Pass(
            self._positions(epoch),
            epoch,
            self._epoch_checkpoint.get(epoch, 0),
            len(self.dataset),
            lambda: slices.batch_size,
            self.rank,
            self.num_replicas,
            most,
            drop_last,
        )

    def ended(self, one: Pass) -> None:
        """All of a pass was handed out: another one over the same data epoch begins at its start."""
        self._epoch_checkpoint.pop(one.data_epoch, None)

    def _positions(self, epoch: int) -> Any:
        if epoch in self._theirs and self.shuffle:
            generator = torch.Generator().manual_seed(self.seed + epoch)
            order = torch.randperm(len(self.dataset), generator=generator)
            return lambda start, stop: order[start:stop].tolist()
        return functools.partial(self._order.ids, epoch)

    def __iter__(self) -> Iterator[int]:
        """For who cuts batches otherwise: as many samples on each rank, so some may come twice at the end."""
        start, length = self._epoch_checkpoint.get(self.epoch, 0), len(self.dataset)
        rest = length - start
        self.num_samples = rest // self.num_replicas if self.drop_last else -(-rest // self.num_replicas)
        ids = self._positions(self.epoch)
        for number in range(self.rank, self.num_samples * self.num_replicas, self.num_replicas):
            position = start + number % max(1, rest)
            yield ids(position, position + 1)[0]

    def state_dict(self, iter_step: int, micro_batch_size: int) -> dict[str, Any]:
        """What is done of this data epoch, from its start on; theirs counts from the last resume."""
        begun, one = self._epoch_checkpoint.get(self.epoch, 0), self._pass
        if one is not None and one.data_epoch == self.epoch:
            done = one.done(iter_step)
        elif one is None:
            # Numbers above the length count over several data epochs.
            done = begun + iter_step * micro_batch_size * self.num_replicas
            done = done if done <= len(self.dataset) else done % len(self.dataset)
        else:
            done = begun
        state: dict[str, Any] = {"completed_num": done, "epoch": self.epoch}
        if self.epoch not in self._theirs:
            self._order.seek(Position(self.epoch, 0))
            state[_OURS] = self._order.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes where a state says, of this class or of theirs.

        Raises:
            ValueError: the state's order is another one.
        """
        self._epoch_checkpoint.clear()
        self._pass = None
        self._plain["load_state_dict"](self, state)
        self._theirs.discard(self.epoch)
        if _OURS not in state:
            if self._epoch_checkpoint.get(self.epoch, 0):
                self._theirs.add(self.epoch)
            return
        self._order.load_state_dict(state[_OURS])


class Slices:
    """In place of torch's `BatchSampler`: each micro-batch is a slice of a global batch.

    Attributes:
        batch_size: m, the most samples of a micro-batch. A change counts from the next global batch on.
        drop_last: leave out a short last global batch.
        newest: the last pass that has begun.
    """

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        self.sampler, self.batch_size, self.drop_last = sampler, batch_size, drop_last
        self.newest: Pass | None = None

    def __iter__(self) -> Iterator[list[int]]:
        self.newest = self.sampler.begin(self)
        return self.newest

    def __len__(self) -> int:
        return len(self.sampler.cut(self))


_last: Pass | None = None


def handed_last() -> Pass | None:
    """The pass whose micro-batch a script got last, from any loader."""
    return _last


class _Handing:
    """A loader's iterator that notes which micro-batch the script has."""

    def __init__(self, plain: Iterator[Any], slices: Slices) -> None:
        self._plain, self._slices = plain, slices
        assert slices.newest is not None
        self._pass = slices.newest

    def __iter__(self) -> _Handing:
        return self

    def __len__(self) -> int:
        return len(self._pass)

    def __next__(self) -> Any:
        global _last
        try:
            data = next(self._plain)
        except StopIteration:
            self._slices.sampler.ended(self._pass)
            raise
        self._pass.hand()
        _last = self._pass
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def attach(sampler: type[Any]) -> None:
    """Has torch's loaders cut the batches of this class's samplers so."""
    plain_init, plain_iter = DataLoader.__init__, DataLoader.__iter__

    @functools.wraps(plain_init)
    def initialize(self: Any, *arguments: Any, **named: Any) -> None:
        plain_init(self, *arguments, **named)
        if isinstance(self.sampler, sampler) and self.batch_size is not None:
            # An attribute that a loader protects; what it protects from is a change while it is read.
            self.__dict__["batch_sampler"] = Slices(self.sampler, self.batch_size, self.drop_last)

    @functools.wraps(plain_iter)
    def iterate(self: Any) -> Any:
        plain = plain_iter(self)
        return _Handing(plain, self.batch_sampler) if isinstance(self.batch_sampler, Slices) else plain

    DataLoader.__init__, DataLoader.__iter__ = initialize, iterate  # type: ignore[method-assign]
