"""The order of samples: a function of (seed, data epoch, length) alone, whatever the world."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any

from ..checkpoint import Cut, Order, Position
from .permutation import VERSION as NEWEST_ORDER
from .permutation import Permutation, version_for

STATE_VERSION = 2
# Defaults of keys that a state of version 1 does not have.
_SINCE_VERSION_2 = {"version": 1, "order_version": 1}
_COMPARED = ("seed", "length", "global_batch_size", "shuffle")


def check_order(saved: Order, ours: Order) -> None:
    """Compares a checkpoint's order of samples with this run's.

    Raises:
        ValueError: They differ; the message names the fields and their values.
    """
    wrong = [
        f"{name} was {getattr(saved, name)} and is {getattr(ours, name)}"
        for name in _COMPARED
        if getattr(saved, name) != getattr(ours, name)
    ]
    if wrong:
        raise ValueError(
            f"the checkpoint's sample order is another one ({'; '.join(wrong)}): restore these or start a new run"
        )


def check_cut(saved: Cut | None, ours: Cut) -> None:
    """Compares how a checkpoint's run turned batches into gradients with how this run does.

    Without fixed micro-batches the world decides the cut. That changes only the rounding, so it is not compared.

    Raises:
        ValueError: The curve would be another one; the message names the fields and their values.
    """
    if saved is None:  # an older manifest
        return
    pairs: list[tuple[str, Any, Any]] = [
        ("the mean is over tokens", saved.tokens, ours.tokens),
        ("drop_last", saved.drop_last, ours.drop_last),
    ]
    if saved.micro_batch_size is not None:
        pairs.append(("size of fixed micro-batches", saved.micro_batch_size, ours.micro_batch_size))
        pairs.append(("pad", saved.pad, ours.pad))
        if saved.seed is not None:
            pairs.append(("seed of Batches", saved.seed, ours.seed))
    wrong = [f"{name}: was {was} and is {now}" for name, was, now in pairs if was != now]
    if wrong:
        raise ValueError(
            f"the checkpoint's batches became gradients in another way ({'; '.join(wrong)}), so the loss curve would "
            "move: restore these or start a new run"
        )


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of one optimizer step, over all ranks.

    Attributes:
        sample_ids: Indices into the data set, in order; computed when asked for.
        position: Where the batch begins.
        position_after: Where the next batch begins.
    """

    sample_ids: Sequence[int]
    position: Position
    position_after: Position


class ElasticSampler:
    """Deals the data set in global batches; its state is one position, and seeking is O(1).

    Global batch ``k`` of a data epoch is positions ``[k * G, (k + 1) * G)`` of the epoch's order. The last one is short
    if G does not divide the length, or is left out with ``drop_last``.

    Args:
        length: Number of samples in the data set. None: not known, for an iterable data set, which has its own order
            (``shuffle=False``) and itself says where a data epoch ends.
        global_batch_size: G, samples per optimizer step over all ranks.
        seed: Fixes the order, together with the data epoch and the length.
        shuffle: False: keep the order of the data set.
        drop_last: Leave out a short last batch of a data epoch.

    Raises:
        ValueError: A size below 1, no whole batch in the data set with ``drop_last``, or shuffling without a length.
    """

    def __init__(
        self,
        length: int | None,
        global_batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
    ) -> None:
        # numpy's numbers compare equal but print differently: the order would be another one, and JSON could not hold
        # them.
        length = None if length is None else index(length)
        global_batch_size, seed = index(global_batch_size), index(seed)
        if (length is not None and length < 1) or global_batch_size < 1:
            raise ValueError(f"length and global_batch_size must be at least 1, not {length} and {global_batch_size}")
        if drop_last and length is not None and length < global_batch_size:
            raise ValueError(f"drop_last leaves nothing: {length} samples make no batch of {global_batch_size}")
        if length is None and shuffle:
            raise ValueError("without a length there is nothing to shuffle: give the length, or shuffle=False")
        version = version_for(length) if shuffle and length is not None else 1
        self.order = Order(seed, length or 0, global_batch_size, shuffle, version)
        self.drop_last = drop_last
        self.position = Position()
        self._permutations: dict[int, Permutation] = {}

    @property
    def batches_per_data_epoch(self) -> int:
        """Number of whole batches, plus the short one unless it is dropped.

        Raises:
            ValueError: The length is not known.
        """
        if not self.order.length:
            raise ValueError("a data set without a length does not say how many batches it has")
        full, rest = divmod(self.order.length, self.order.global_batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def batch_at(self, position: Position) -> GlobalBatch:
        """The global batch that begins at ``position``; does not move the sampler.

        Raises:
            ValueError: ``position`` is not the beginning of a batch, or the length is not known.
        """
        self.check_position(position)
        batches = self.batches_per_data_epoch
        start, size = position.samples, self.order.global_batch_size
        stop = min(start + size, self.order.length)
        ids = self.ids(position.data_epoch, start, stop)
        done = start // size + 1 == batches
        after = Position(position.data_epoch + 1, 0) if done else Position(position.data_epoch, stop)
        return GlobalBatch(ids, position, after)

    def ids(self, data_epoch: int, start: int, stop: int) -> Sequence[int]:
        """Indices into the data set at positions ``start`` to ``stop - 1`` of a data epoch's order."""
        if not self.order.shuffle:
            return range(start, stop)
        return self._permutation(data_epoch).window(start, stop)

    def check_position(self, position: Position) -> None:
        """Checks that a batch begins at this position.

        Raises:
            ValueError: It is not.
        """
        start, size = position.samples, self.order.global_batch_size
        inside = not self.order.length or start // size < self.batches_per_data_epoch
        if start % size or start < 0 or position.data_epoch < 0 or not inside:
            length = self.order.length or "an unknown number of"
            raise ValueError(f"{position} is not where a batch of {size} begins in {length} samples")

    def __iter__(self) -> Iterator[GlobalBatch]:
        """Global batches from the present position on, without end; moves the sampler before each one is handed out."""
        while True:
            batch = self.batch_at(self.position)
            self.position = batch.position_after
            yield batch

    def seek(self, position: Position) -> None:
        """Goes to ``position``, in O(1).

        Raises:
            ValueError: No batch begins there.
        """
        self.check_position(position)
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        """The position, and the order to which it belongs: plain values, for JSON and ``torch.save`` alike."""
        return {
            "version": STATE_VERSION,
            "data_epoch": self.position.data_epoch,
            "samples": self.position.samples,
            "seed": self.order.seed,
            "length": self.order.length,
            "global_batch_size": self.order.global_batch_size,
            "shuffle": self.order.shuffle,
            "order_version": self.order.version,
            "drop_last": self.drop_last,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of ``state_dict``. States of every earlier version are accepted, and their order is kept.

        Raises:
            ValueError: The state belongs to another order, so samples would be repeated or missed; or a newer version
                wrote it; or it is no such state.
        """
        state = {**_SINCE_VERSION_2, **state}
        if state["version"] != 1 and state["version"] != STATE_VERSION:
            raise ValueError(
                f"the sampler's state has version {state['version']}, this program reads 1 to {STATE_VERSION}: "
                "install the dalsegno that wrote it, or a newer one"
            )
        missing = sorted(set(self.state_dict()) - set(state))
        if missing:
            raise ValueError(f"not the state of an ElasticSampler: it has no {', '.join(missing)}")
        if state["drop_last"] != self.drop_last:
            raise ValueError(
                f"the state was saved with drop_last={state['drop_last']}, this is {self.drop_last}: restore it"
            )
        saved = Order(
            state["seed"], state["length"], state["global_batch_size"], state["shuffle"], state["order_version"]
        )
        self.adopt_order(saved)
        self.seek(Position(state["data_epoch"], state["samples"]))

    def adopt_order(self, saved: Order) -> None:
        """Compares the order with the one that a checkpoint was written in, and adopts that one's version.

        Raises:
            ValueError: They differ (the message names the fields and their values), or the version is newer than ours.
        """
        check_order(saved, self.order)
        if not 1 <= saved.version <= NEWEST_ORDER:
            raise ValueError(
                f"the checkpoint's sample order is of version {saved.version}, this program knows 1 to {NEWEST_ORDER}: "
                "install the dalsegno that wrote it, or a newer one"
            )
        self.order = replace(self.order, version=saved.version)
        self._permutations.clear()

    def _permutation(self, data_epoch: int) -> Permutation:
        found = self._permutations.get(data_epoch)
        if found is None:
            found = Permutation(self.order.length, self.order.seed, data_epoch, version=self.order.version)
            # Two entries, because a batch being fetched may lie in the next data epoch while the present one is still
            # read.
            while len(self._permutations) > 1:
                self._permutations.pop(next(iter(self._permutations)))
            self._permutations[data_epoch] = found
        return found
