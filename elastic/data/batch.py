"""One optimizer step of one rank: its micro-batches, and whether all of them were computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..checkpoint import Position
from .fetching import PlannedMicroBatch
from .micro_batch import Computed, MicroBatch
from .plan import Slice

if TYPE_CHECKING:
    from .batches import Batches

T = TypeVar("T")


@dataclass
class Batch(Generic[T]):
    """One optimizer step of this rank.

    Attributes:
        step: The optimizer step, counted from 1.
        n: Real samples of the whole global batch.
        sample_ids: This rank's real samples.
        position: Where the global batch begins.
        position_after: The run's position once this step is done.
        handed_out: How many micro-batches ``micro_batches`` has yielded so far.
        scale: ``"ddp"`` or ``"deepspeed"``: what the factors are made for.
        abandoned: The loop over ``micro_batches`` was left before its end.
        trained: All of its micro-batches were computed, and the sampler stands behind it.
        scaled: The ``loss_scale`` of one of its micro-batches was asked for.
        computed: How far each micro-batch has come, by its number; those of which nothing shows are missing.
        trained_by: The `Accumulation` that goes through it; None: there is none.
        begun: Called with the model and the optimizers of the `Accumulation` that goes through it, before the first
            micro-batch; None: nobody asks.
        through: What ``for micro in batch`` calls, see ``Batches.given_to``; None: nothing does.
    """

    step: int
    n: int
    sample_ids: tuple[int, ...]
    position: Position
    position_after: Position
    handed_out: int = 0
    scale: str = "ddp"
    abandoned: bool = False
    trained: bool = False
    scaled: bool = False
    computed: dict[int, Computed] = field(default_factory=dict, repr=False)
    trained_by: Any = field(default=None, repr=False)
    begun: Callable[[Any, Iterable[Any]], None] | None = field(default=None, repr=False)
    through: Callable[[Any], Iterator[MicroBatch[T]]] | None = field(default=None, repr=False)
    _parts: list[tuple[PlannedMicroBatch, T]] = field(default_factory=list, repr=False)
    _owner: Batches[T] | None = field(default=None, repr=False)
    _total: Total | None = field(default=None, repr=False)

    @property
    def tokens(self) -> int:
        """Real tokens of the whole global batch, with token means; else 0, and 0 before ``micro_batches`` has begun.

        They are summed over the ranks while the first forward pass computes; asking earlier waits for the sum.
        """
        return 0 if self._total is None else self._total.value

    def __iter__(self) -> Iterator[MicroBatch[T]]:
        """The micro-batches, each for one forward and backward pass, in the loop of ``s.steps(data, state)``.

        Raises:
            RuntimeError: The loop has no state; or the step before was left half-way.
        """
        if self.through is None:
            raise RuntimeError(
                "`for micro in batch` wants the loop to know what is trained: s.steps(data, state) with "
                "state = s.state(model, optimizer) or s.engine(engine); or go through accumulate(batch)"
            )
        return self.through(self)

    @property
    def ends_data_epoch(self) -> bool:
        """Whether this step consumes the last samples of its data epoch: for what is done once in each."""
        return self.position_after.data_epoch > self.position.data_epoch

    @property
    def made_by(self) -> Batches[T] | None:
        """The `Batches` that made it."""
        return self._owner

    @property
    def accumulation(self) -> int:
        """Micro-batches of this step, alike on all ranks and in all steps."""
        return len(self._parts)

    @property
    def cut(self) -> tuple[tuple[Slice, T], ...]:
        """This rank's slices in order with their data, for code that must see a whole step before it computes."""
        return tuple((part.slice, data) for part, data in self._parts)

    @property
    def micro_batches(self) -> Iterator[MicroBatch[T]]:
        """The micro-batches in order. With token means all ranks must begin this loop in the same step.

        When the loop ends, the step counts as trained: the sampler then stands at ``position_after``.
        """
        if self._owner is None:
            raise RuntimeError("this batch was not made by Batches")
        return self._owner.micro_batches(self, self._parts)

    def check_complete(self) -> None:
        """Checks at the end of the step that all of its micro-batches were computed.

        Raises:
            RuntimeError: They were not: the gradient would be that of a part of the global batch.
        """
        missing = self.handed_out < self.accumulation
        if missing or self.abandoned:
            where = f"after {self.handed_out} of its {self.accumulation}" if missing else "in the last of its"
            raise RuntimeError(
                f"step {self.step} ended {where} micro-batches: its "
                "gradient is not the global batch's. Go through all of batch.micro_batches before the optimizer steps"
            )
        if self._owner is not None:
            self._owner.trained(self)
            self._owner.say_uncomputed(self)

    def note(self, number: int, state: Computed) -> None:
        """A micro-batch has come so far: one of several losses of it may be behind the others."""
        self.computed[number] = max(state, self.computed.get(number, state))

    def uncomputed(self) -> list[int]:
        """Numbers of the micro-batches whose gradient is missing, as far as the others show how the script computes."""
        if all(state is Computed.SILENT for state in self.computed.values()):
            return []
        missing = (None, Computed.BEGUN)
        return sorted(n for part, _ in self._parts if self.computed.get(n := part.slice.number) in missing)


def batch_in(item: Any) -> Batch[Any] | None:
    """The `Batch` that a loop got, alone or beside something else (``enumerate``, ``zip``); None: there is none."""
    return next(iter(batches_in(item)), None)


def batches_in(item: Any) -> list[Batch[Any]]:
    """Each `Batch` that a loop got at a time; the place of the first one is the run's."""
    parts = item if isinstance(item, tuple | list) else (item,)
    return [part for part in parts if isinstance(part, Batch)]


class Total:
    """A sum over the ranks that is waited for once, when it is needed."""

    def __init__(self, pending: Any) -> None:
        self._pending, self._value = pending, 0

    @property
    def value(self) -> int:
        if self._pending is not None:
            self._value, self._pending = int(self._pending.wait()[0]), None
        return self._value


def whole(counted: Any) -> int:
    """What ``count_tokens`` has returned.

    Raises:
        ValueError: It is no whole number: cut to one, it would weigh the loss wrongly.
    """
    number = float(counted)
    if not number.is_integer():
        raise ValueError(
            f"count_tokens returned {number:g}, and counts are whole numbers, whose sums are the same at any number of "
            "ranks. For a mean with weights scale the weights until they are whole, such as [37, 9] for [3.7, 0.9], "
            "and return their sum: the mean stays the same"
        )
    return int(number)
