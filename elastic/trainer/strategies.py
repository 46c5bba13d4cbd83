"""How a `Trainer` trains its model: wrap, step, save, load. DDP here; FSDP and DeepSpeed in modules of their own.

Order of a resume: weights before they are wrapped (FSDP: the shards, so that a rank reads only its own), then optimizer
and scheduler; the session restores the random generators and `Batches` the position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from dalsegno.protos.reads import Reads

from ..data.plan import BatchPlan
from ..rank.process_group import init_process_group, send_rank_0s
from ..saving.replicas import check_whole, loadable
from ..saving.writing import write_files
from ..training.reading_state import load_part
from ..training.session import BareSession
from ..training.staying import Wrappers
from ..training.training_state import TrainingState
from ..training.unchanged import UnclearError
from .loss_scale import LossScale
from .made import steps_on_metric

MakeOptimizer = Callable[[nn.Module], Optimizer]
MakeScheduler = Callable[[Optimizer], Any]
TRAINERS_STATE = "the state of the scheduler, of a callback or of the script's own"


@dataclass(frozen=True)
class Setting:
    """What a strategy is told of its surroundings.

    Attributes:
        session: This process's session; its ranks are the data-parallel group.
        device: This rank's device.
        plan: How the global batch is divided.
        max_grad_norm: Gradients are clipped to this norm; None: not clipped.
        scaler: For fp16: scales the loss; None: nothing does.
    """

    session: BareSession
    device: torch.device
    plan: BatchPlan
    max_grad_norm: float | None
    scaler: GradScaler | None = None


class Strategy(ABC):
    """One way of training. Use an instance for one `Trainer`.

    Attributes:
        scale: What the factors of micro-batches are made for, see ``BatchPlan.loss_scale``.
        any_world_size: Its checkpoints load at any world size; None: what the session knows of `name`.
        asks_all_ranks: At a save every rank is asked for the `Trainer`'s state, including that of callbacks; otherwise
            only rank 0, which writes it.
        loss_scale: What it does with a `Setting`'s scaler; None: it takes none.
        model: The model to call in training, once `setup` is done.
        optimizer, scheduler: Those that step, once `setup` is done; the scheduler may be None.
    """

    scale = "ddp"
    any_world_size: bool | None = True
    asks_all_ranks = True
    loss_scale: LossScale | None = None
    model: nn.Module
    optimizer: Optimizer
    scheduler: Any = None

    @property
    @abstractmethod
    def name(self) -> str:
        """The strategy's name in manifests; a run that resumes must have the same."""

    @abstractmethod
    def start(self, world_size: int, local_rank: int, device: torch.device | None) -> torch.device:
        """Initialises ``torch.distributed`` if it is needed. Returns where this rank computes."""

    @abstractmethod
    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler | None, setting: Setting
    ) -> dict[str, Any]:
        """Wraps the model, makes optimizer and scheduler, and loads all three from the resume point. Collective.

        Returns:
            The ``state`` that `write` was given; empty at step 0.

        Raises:
            ValueError: The checkpoint is another model's, or another optimizer's.
        """

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """The backward pass of one micro-batch."""

    @abstractmethod
    def step(self) -> Tensor | float | None:
        """Called after the last micro-batch: clips, steps, clears the gradients. All ranks step, or none does.

        Returns:
            The norm of the whole gradient before clipping, if it was computed.
        """

    def clear(self) -> None:
        """Clears the gradients of what its optimizer does not have, behind the callbacks, of which one may step it.

        Left alone they would pile up, and be in no checkpoint.
        """
        return

    @property
    def reshards(self) -> bool:
        """Whether what it writes loads at any world size without a conversion. Valid once `setup` is done."""
        return False

    @property
    def by_place(self) -> bool:
        """Whether each rank reads its own node's files and the first node's only, see ``Shape``."""
        return False

    @property
    def reads(self) -> Reads | None:
        """What each rank of a world of another size reads, see ``Shape``; None: perhaps everything."""
        return None

    def _writes_as(self, kind: type[Strategy]) -> bool:
        """Whether a class of the script's own neither writes nor loads anything besides."""
        own = type(self)
        return own.files is kind.files and own.write is kind.write and own.setup is kind.setup

    def files(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's files of a checkpoint: path, and what ``torch.save`` writes there, or bytes.

        Args:
            state: Plain values and tensors of the `Trainer`, which `setup` returns.

        Raises:
            NotImplementedError: See `why_no_files`.
        """
        raise NotImplementedError(self.why_no_files)

    @property
    def why_no_files(self) -> str | None:
        """Why nobody but the framework can write its files; None: `files` has them. Valid once `setup` is done."""
        return f"strategy {self.name} writes by itself" if type(self).files is Strategy.files else None

    def rehearse(self, state: Mapping[str, Any]) -> None:
        """Checks that a save with this state can be loaded again, without writing it. Valid once `setup` is done.

        Raises:
            TypeError, ValueError: It cannot.
        """
        loadable(dict(state), TRAINERS_STATE)

    def watched(self, state: Callable[[], Mapping[str, Any]]) -> TrainingState | None:
        """What each rank has all of; None: the state is not replicated. Valid once `setup` is done.

        Args:
            state: Returns the `Trainer`'s own at any moment.
        """
        return None

    # For processes that stay for another world. Not called unless `stays`.

    @property
    def stays(self) -> bool:
        """Whether what `setup` has built can go on in another world."""
        return False

    def leave(self) -> bool:
        """Lets go of what belongs to the present world. Returns whether nothing else does, so that the rest may stay.

        The process ends if not.
        """
        return False

    def unloaded(self) -> str:
        """A checksum of what `enter` goes on with without loading it."""
        return ""

    def unread(self) -> list[str]:
        """Names of files of the resume point that `enter` does not read."""
        return []

    def enter(self, setting: Setting) -> dict[str, Any]:
        """In another world, which resumes from what is here: what `setup` does of a load, and of a wrapper. Collective.

        Returns, raises:
            As `setup`.
        """
        raise NotImplementedError(f"strategy {self.name} stays in no other world")

    def write(self, path: Path, state: Mapping[str, Any]) -> None:
        """Writes this rank's files below ``path``."""
        write_files(path, self.files(state))

    @contextmanager
    def evaluated(self) -> Iterator[nn.Module]:
        """The model for an evaluation, the same on every rank. Collective."""
        yield self.model


class StrategyWrite:
    """What a session saves with: called with a path, or as ``background(write)``.

    Args:
        strategy: It is set up.
        state: Returns the `Trainer`'s own state; called at each save.
        rank: The session's.

    Attributes:
        reshards, by_place, reads: See ``BareSession.save``.
    """

    def __init__(self, strategy: Strategy, state: Callable[[], Mapping[str, Any]], rank: int) -> None:
        self._strategy, self._state, self._rank = strategy, state, rank
        self.reshards, self.by_place, self.reads = strategy.reshards, strategy.by_place, strategy.reads

    def __call__(self, path: Path) -> None:
        self._strategy.write(path, self._given())

    def files(self) -> dict[str, Any]:
        """This rank's files."""
        return self._strategy.files(self._given())

    @property
    def why_no_files(self) -> str | None:
        """See `Strategy`."""
        return self._strategy.why_no_files

    def rehearse(self) -> None:
        """See ``rehearsal.rehearse``."""
        self._strategy.rehearse(self._given())

    def watched(self) -> TrainingState | None:
        """See ``held_state.held_by``."""
        return self._strategy.watched(self._state if self._rank == 0 else self._own)

    def _own(self) -> Mapping[str, Any]:
        """Of a rank that does not write it: its callbacks may keep less, or nothing.

        Raises:
            UnclearError: They have no state here.
        """
        try:
            return self._state()
        except Exception as error:
            raise UnclearError(f"rank {self._rank} has no state of its own: {error}") from error

    def _given(self) -> Mapping[str, Any]:
        return self._state() if self._strategy.asks_all_ranks or self._rank == 0 else {}


class DDP(Strategy):
    """Every rank has the whole model: ``DistributedDataParallel``; in a world of one the model as it is.

    Args:
        cast: Convert weights that were saved with another dtype.
        options: For ``DistributedDataParallel``: ``find_unused_parameters``, ``bucket_cap_mb``, ….
    """

    asks_all_ranks = False
    loss_scale: LossScale

    def __init__(self, *, cast: bool = False, **options: Any) -> None:
        self._cast, self._options = cast, options
        self._max_grad_norm: float | None = None
        self.loss_scale = LossScale(None)

    @property
    def name(self) -> str:
        return "ddp"

    @property
    def by_place(self) -> bool:
        return self._writes_as(DDP)

    @property
    def reads(self) -> Reads | None:
        return Reads() if self.by_place else None

    def start(self, world_size: int, local_rank: int, device: torch.device | None) -> torch.device:
        where = own_device(local_rank, device)
        if world_size > 1:
            init_process_group(where)
        return where

    def setup(
        self, model: nn.Module, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler | None, setting: Setting
    ) -> dict[str, Any]:
        self._max_grad_norm, self.loss_scale = setting.max_grad_norm, LossScale(setting.scaler)
        # No rank goes on to the wrapper, where ranks wait for one another, before all have come through this.
        with setting.session.meetings.together():
            state = self._load(model, make_optimizer, make_scheduler, setting)
        self._wrappers = Wrappers(
            model,
            "something holds the DistributedDataParallel that the Trainer has made, or a loss function is still at "
            "work on another thread: take trainer.model instead, and wait for it",
        )
        self._wrap(setting)
        return state

    def _wrap(self, setting: Setting) -> None:
        if setting.session.world_size > 1:
            self.model = DistributedDataParallel(self._bare, **self._options)
            self._wrappers.note(self.model)

    @property
    def stays(self) -> bool:
        return True

    def leave(self) -> bool:
        if not self._wrappers.alone:
            return False
        self.model = self._bare
        return self._wrappers.are_gone()

    def unloaded(self) -> str:
        return self._training.unloaded()

    def unread(self) -> list[str]:
        return self._training.unread()

    def enter(self, setting: Setting) -> dict[str, Any]:
        # Its own state is loaded, too: what callbacks keep may be each rank's own until rank 0's is saved.
        self._held.source = None
        with setting.session.meetings.together():
            self._training.go_on()
        self._wrap(setting)
        return self._held.state_dict()

    def _load(
        self, model: nn.Module, make_optimizer: MakeOptimizer, make_scheduler: MakeScheduler | None, setting: Setting
    ) -> dict[str, Any]:
        check_whole(model)
        model.to(setting.device)
        self._bare = self.model = model
        self._parameters = tuple(model.parameters())
        self.optimizer = make_optimizer(model)
        # Made before the optimizer's state is loaded, because making a scheduler sets the learning rate of step 0.
        self.scheduler = None if make_scheduler is None else make_scheduler(self.optimizer)
        self._stepped = None if steps_on_metric(self.scheduler) else self.scheduler
        parts: dict[str, Any] = {} if self.scheduler is None else {"scheduler": self.scheduler}
        if setting.scaler is not None:
            parts["scaler"] = self.loss_scale
        self._held = TrainerState()
        self._training = TrainingState(
            setting.session, model=model, optimizer=self.optimizer, **parts, trainer=self._held
        )
        # The Trainer compares the schedule itself, for every strategy.
        self._training.load(cast=self._cast, other_schedule=True)
        return self._held.state_dict()

    def backward(self, loss: Tensor) -> None:
        self.loss_scale.scale(loss).backward()  # type: ignore[no-untyped-call]

    def step(self) -> Tensor | float | None:
        return step_and_clear(self._bare, self.optimizer, self._stepped, self._max_grad_norm, self.loss_scale)

    def clear(self) -> None:
        clear_left(self._bare, self._parameters)

    def files(self, state: Mapping[str, Any]) -> dict[str, Any]:
        self._held.load_state_dict(state)
        return self._training.files()

    def rehearse(self, state: Mapping[str, Any]) -> None:
        self._held.load_state_dict(state)
        self._training.rehearse()

    def watched(self, state: Callable[[], Mapping[str, Any]]) -> TrainingState | None:
        self._held.source = state
        return self._training

    @contextmanager
    def evaluated(self) -> Iterator[nn.Module]:
        # BatchNorm's statistics differ between ranks; rank 0's are the ones that are saved.
        if isinstance(self.model, DistributedDataParallel) and self.model.broadcast_buffers:
            for buffer in self._bare.buffers():
                send_rank_0s(buffer)
        yield self._bare


class TrainerState:
    """The `Trainer`'s own state as a part of a `TrainingState`.

    Attributes:
        source: Returns the state of this moment; None: it is that of the last save.
    """

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self.source: Callable[[], Mapping[str, Any]] | None = None

    @property
    def stepped_alike(self) -> bool:
        """All ranks have the same. Callbacks are told things on rank 0 that others are not."""
        try:
            return not any(dict(self.state_dict()["callbacks"]).values())
        except UnclearError:
            return False

    def state_dict(self) -> dict[str, Any]:
        return dict(self._state if self.source is None else self.source())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)


def own_device(local_rank: int, wanted: torch.device | None = None) -> torch.device:
    """Where this rank computes: on a card if there are any, else on the CPU. The card becomes the current one.

    Cards are assigned by local rank. If there are fewer than ranks, some ranks share one; `init_process_group` says so.

    Args:
        local_rank: This process's local rank.
        wanted: A device with a number, or of another kind than CUDA, is used as it is; ``cuda`` alone means the rank's
            own card.
    """
    if wanted is None and not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda") if wanted is None else wanted
    if device.type != "cuda":
        return device
    if device.index is None:
        device = torch.device("cuda", local_rank % max(1, torch.cuda.device_count()))
    # The current device matters not only for tensors: NCCL and saved random generators use it, too.
    torch.cuda.set_device(device)
    return device


def resume_rates(optimizer: Optimizer, scheduler: Any) -> None:
    """Gives each parameter group the rate that a restored scheduler had set last.

    The rates are in the optimizer's own state too, but ZeRO's stages load that differently.
    """
    for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr(), strict=True):
        group["lr"] = rate


def step_and_clear(
    model: nn.Module, optimizer: Optimizer, scheduler: Any, max_grad_norm: float | None, loss_scale: LossScale
) -> Tensor | float | None:
    """Clips over all that the optimizer has (of sharded ones all ranks' parts), steps, clears it. Returns the norm.

    The norm is that before clipping. If gradients are not finite, neither the optimizer nor the scheduler steps.
    """
    norm: Tensor | None = None
    loss_scale.unscale(optimizer)
    if max_grad_norm is not None:
        parameters = list(model.parameters())
        given = [p for group in optimizer.param_groups for p in group["params"]]
        # Others have gradients, too, which nothing unscales. But an optimizer that has copies of some (in higher
        # precision) does not tell which of the model's gradients it takes. It mostly has all: sets of tensors are slow.
        if len(given) != len(parameters) and (trained := set(given)) <= set(parameters):
            parameters = [one for one in parameters if one in trained]
        norm = nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    if loss_scale.step(optimizer) and scheduler is not None:
        scheduler.step()
    optimizer.zero_grad()
    return norm


def clear_left(model: nn.Module, parameters: Iterable[Tensor]) -> None:
    """Clears the gradients that are left of a model, whose parameters these are.

    Mostly there are none. To go through the modules of a model takes twenty times longer than through its parameters.
    """
    if any(one.grad is not None for one in parameters):
        model.zero_grad()


def load_optimizer(optimizer: Optimizer, state: Mapping[str, Any], *, cast: bool = False) -> None:
    """Loads an optimizer's state, see ``training_state.load_part``.

    Raises:
        ValueError: It has other parameter groups.
    """
    try:
        load_part(optimizer, dict(state), cast=cast)
    except (ValueError, KeyError) as error:
        raise ValueError(
            f"the checkpoint's optimizer is not {type(optimizer).__name__} as made here: {error}"
        ) from error
