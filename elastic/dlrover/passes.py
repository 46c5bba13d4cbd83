"""One pass over a data epoch: which samples this rank gets in each micro-batch, and how far the pass has come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..data.plan import BatchPlan

__all__ = ["Dealt", "Pass"]


@dataclass(frozen=True)
class Dealt:
    """One micro-batch of this rank.

    Attributes:
        n: its real samples; 0: it repeats a sample of another slice, only so that this rank takes part.
        batch: real samples of its global batch, over all ranks.
        row: real samples of the micro-batches that all ranks compute at the same time as this one.
        is_last: it is this rank's last one of its global batch.
        after_batch, after_row: samples of the data epoch that are done with its global batch, and with its row.
    """

    n: int
    batch: int
    row: int
    is_last: bool
    after_batch: int
    after_row: int


class Pass:
    """An iterator of index lists, one for each micro-batch, that a `DataLoader` reads ahead of the training.

    Args:
        ids: (start, stop) to the samples at those positions of the data epoch's order.
        data_epoch: its number.
        start: samples of it that are done already.
        length: of the data set.
        micro_batch: m, the most samples of a micro-batch; asked at each global batch.
        rank, world: this rank among those that share the data.
        most: ranks of the largest world, whose batch every world makes (m samples for each); `world` where each world
            makes a batch of its own.
        drop_last: leave out a short last global batch.
    """

    def __init__(
        self,
        ids: Callable[[int, int], Sequence[int]],
        data_epoch: int,
        start: int,
        length: int,
        micro_batch: Callable[[], int],
        rank: int,
        world: int,
        most: int,
        drop_last: bool,
    ) -> None:
        self.data_epoch, self.world, self.most = data_epoch, world, most
        self._ids, self._start, self._length, self._micro_batch = ids, start, length, micro_batch
        self._rank, self._drop_last = rank, drop_last
        # Dealt to the loader, and not yet handed to the script.
        self._ahead: deque[Dealt] = deque()
        # The micro-batch that the script has, and the number of them so far; how many of them it has trained on.
        self.current: Dealt | None = None
        self.handed = self.trained = 0
        # Where the pass would go on, after each micro-batch that was handed out; and after the last one trained on.
        self._rows = [start]
        self._done = start
        self._deals = self._deal()

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        ids, dealt = next(self._deals)
        self._ahead.append(dealt)
        return ids

    def __len__(self) -> int:
        """Micro-batches of this rank from the start of the pass on."""
        plan = self._plan()
        whole, rest = divmod(self._length - self._start, plan.global_batch_size)
        return (whole + (1 if rest and not self._drop_last else 0)) * plan.accumulation

    def hand(self) -> None:
        """The script gets the next one of those that were dealt."""
        self.current = self._ahead.popleft()
        self.handed += 1
        self._rows.append(self.current.after_row)

    def finish(self, done: int) -> None:
        """The script has trained on all before this position of the data epoch."""
        self._done = done

    def done(self, steps: int) -> int:
        """Samples of the data epoch that are done.

        Args:
            steps: what the script says, in micro-batches, where nobody else knows. A larger number than were handed
                out counts from elsewhere: then all of them are done.
        """
        if self.trained:
            return self._done
        return self._rows[steps if 0 <= steps <= self.handed else self.handed]

    def _plan(self) -> BatchPlan:
        size = self._micro_batch()
        return BatchPlan(size * self.most, self.world, size)

    def _deal(self) -> Iterator[tuple[list[int], Dealt]]:
        start = self._start
        while start < self._length:
            plan = self._plan()
            size = min(plan.global_batch_size, self._length - start)
            if self._drop_last and size < plan.global_batch_size:
                return
            for number, mine in enumerate(plan.slices(self._rank, size)):
                # What the ranks compute at the same time lies side by side, and slices differ by at most one.
                before, after = (_up_to(row * self.world, plan, size) for row in (number, number + 1))
                last = number + 1 == plan.accumulation
                dealt = Dealt(mine.n, size, after - before, last, start + size, start + after)
                yield list(self._ids(start + mine.start, start + mine.stop)), dealt
            start += size


def _up_to(slices: int, plan: BatchPlan, size: int) -> int:
    """Samples in the first slices of a global batch of this size."""
    short, longer = divmod(size, plan.accumulation * plan.world_size)
    return slices * short + min(slices, longer)
