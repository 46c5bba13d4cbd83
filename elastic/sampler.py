"""The order of samples: a function of (seed, data epoch, length) alone, whatever the world."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from .checkpoint import Order, Position
from .permutation import Permutation


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step, over all ranks.

    Attributes:
        sample_ids: Indices into the data set, in order.
        position: Where the batch begins.
        position_after: Where the next one begins.
    """

    sample_ids: Sequence[int]
    position: Position
    position_after: Position


class ElasticSampler:
    """Deals the data set in global batches; its state is one position, and seeking is O(1).

    Global batch ``k`` of a data epoch is positions ``[k * G, (k + 1) * G)`` of the epoch's order. The last one is short
    where G does not divide the length, or left out with ``drop_last``.

    Args:
        length: Number of samples in the data set.
        global_batch_size: G, samples per optimizer step over all ranks.
        seed: Fixes the order together with the data epoch and the length.
        shuffle: False: the order of the data set.
        drop_last: Leave out a short last batch of a data epoch.

    Raises:
        ValueError: A size below 1, or no whole batch in the data set with ``drop_last``.
    """

    def __init__(
        self, length: int, global_batch_size: int, *, seed: int = 0, shuffle: bool = True, drop_last: bool = False
    ) -> None:
        if length < 1 or global_batch_size < 1:
            raise ValueError(f"length and global_batch_size must be at least 1, not {length} and {global_batch_size}")
        if drop_last and length < global_batch_size:
            raise ValueError(f"drop_last leaves nothing: {length} samples make no batch of {global_batch_size}")
        self.order = Order(seed, length, global_batch_size, shuffle)
        self.drop_last = drop_last
        self.position = Position()
        # Two, because a batch being fetched may lie in the next data epoch while the present one is still read.
        self._permutation = lru_cache(maxsize=2)(self._make_permutation)

    @property
    def batches_per_data_epoch(self) -> int:
        full, rest = divmod(self.order.length, self.order.global_batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def batch_at(self, position: Position) -> GlobalBatch:
        """The global batch that begins at ``position``; does not move the sampler.

        Raises:
            ValueError: ``position`` is not the beginning of a batch.
        """
        start, size = position.samples, self.order.global_batch_size
        if start % size or not 0 <= start // size < self.batches_per_data_epoch or position.data_epoch < 0:
            raise ValueError(f"{position} is not where a batch of {size} begins in {self.order.length} samples")
        stop = min(start + size, self.order.length)
        ids = self._permutation(position.data_epoch).slice(start, stop) if self.order.shuffle else range(start, stop)
        done = start // size + 1 == self.batches_per_data_epoch
        after = Position(position.data_epoch + 1, 0) if done else Position(position.data_epoch, stop)
        return GlobalBatch(ids, position, after)

    def __iter__(self) -> Iterator[GlobalBatch]:
        """Global batches from the present position on, without end; moves the sampler before each one is handed out."""
        while True:
            batch = self.batch_at(self.position)
            self.position = batch.position_after
            yield batch

    def seek(self, position: Position) -> None:
        """Goes to ``position``, in O(1).

        Raises:
            ValueError: It is not the beginning of a batch.
        """
        self.batch_at(position)
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""
        return {
            "data_epoch": self.position.data_epoch,
            "samples": self.position.samples,
            "seed": self.order.seed,
            "length": self.order.length,
            "global_batch_size": self.order.global_batch_size,
            "shuffle": self.order.shuffle,
            "drop_last": self.drop_last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state_dict``.

        Raises:
            ValueError: The state belongs to another order: samples would be repeated or missed.
        """
        self.check_order(Order(state["seed"], state["length"], state["global_batch_size"], state["shuffle"]))
        if state["drop_last"] != self.drop_last:
            raise ValueError(f"the state was saved with drop_last={state['drop_last']}, this is {self.drop_last}")
        self.seek(Position(state["data_epoch"], state["samples"]))

    def check_order(self, saved: Order) -> None:
        """Compares with the order that a checkpoint was written in.

        Raises:
            ValueError: They differ, with the names and values that do.
        """
        ours = self.order
        wrong = [
            f"{name} was {getattr(saved, name)} and is {getattr(ours, name)}"
            for name in ("seed", "length", "global_batch_size", "shuffle")
            if getattr(saved, name) != getattr(ours, name)
        ]
        if wrong:
            raise ValueError(
                f"the checkpoint's sample order is another one ({'; '.join(wrong)}): restore these or start a new run"
            )

    def _make_permutation(self, data_epoch: int) -> Permutation:
        return Permutation(self.order.length, self.order.seed, data_epoch)
