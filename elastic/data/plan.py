"""Who computes which samples of a global batch: the same G samples per step at every world size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..checkpoint import Cut, Order


@dataclass(frozen=True)
class Slice:
    """One micro-batch of one rank, as positions in the global batch.

    Attributes:
        number: Number of the micro-batch in the global batch; slices are numbered over all ranks.
        start: First position.
        stop: One past the last.
        filler: No sample was left for it: it computes the first slice again, with factor 0. It has one sample or, with
            fixed micro-batches, as many as a slice has, because BatchNorm cannot compute a single one.
        padding: Rows beyond those positions, which repeat the first row and do not count.
    """

    number: int
    start: int
    stop: int
    filler: bool = False
    padding: int = 0

    @property
    def n(self) -> int:
        """Real samples of its own."""
        return 0 if self.filler else self.stop - self.start

    @property
    def rows(self) -> int:
        """Rows that are computed, including those that do not count."""
        return self.stop - self.start + self.padding


@dataclass(frozen=True)
class BatchPlan:
    """Cuts global batches of ``global_batch_size`` (G) samples for ``world_size`` (W) ranks.

    Every rank makes the same number of micro-steps, the fewest that keep each slice at or below
    ``max_micro_batch_size`` (m) samples: ``a = ceil(G / (W m))``, ``b = ceil(G / (a W))``. The sizes of the slices
    differ by at most one, so no row is padded.

    Attributes:
        global_batch_size: G, samples per optimizer step.
        world_size: W, data-parallel ranks.
        max_micro_batch_size: m, samples that one forward and backward pass may have.
        fixed_micro_batch: The cut is the same at every world size (``ceil(G / m)`` micro-batches, fewer for a short
            last batch), and the world only decides who computes which. Then the curve also stays the same for what
            depends on the micro-batch as a whole: dropout, BatchNorm in training, an auxiliary loss over a
            micro-batch's tokens.
        pad: Every micro-batch has b rows, for graphs of static shape: short ones repeat their first sample, in rows
            that do not count (``MicroBatch.mask``).

    Raises:
        ValueError: A size below 1.
    """

    global_batch_size: int
    world_size: int
    max_micro_batch_size: int
    fixed_micro_batch: bool = False
    pad: bool = False

    def __post_init__(self) -> None:
        if min(self.global_batch_size, self.world_size, self.max_micro_batch_size) < 1:
            raise ValueError(f"global batch, world and micro-batch size must be at least 1: {self}")

    @property
    def accumulation(self) -> int:
        """a: micro-batches of every rank in every step, also for short last batches."""
        return -(-self.global_batch_size // (self.world_size * self.max_micro_batch_size))

    @property
    def micro_batch_size(self) -> int:
        """b: the largest slice of a whole global batch."""
        return -(-self.global_batch_size // self._slices)

    @property
    def alike(self) -> dict[str, Any]:
        """What must be alike on all ranks, by name, see ``Session.compare``.

        ``max_micro_batch_size`` itself is not compared, only the cut that comes of it, because devices may differ.
        """
        return {
            "global_batch_size": self.global_batch_size,
            "ranks of the plan": self.world_size,
            "micro-batches per step (by max_micro_batch_size)": self.accumulation,
            "largest micro-batch (by max_micro_batch_size)": self.micro_batch_size,
            "fixed_micro_batch": self.fixed_micro_batch,
            "pad": self.pad,
        }

    def cut(self, order: Order, *, drop_last: bool, tokens: bool, seed: int | None) -> Cut:
        """What shapes the loss curve in all this, for manifests.

        Args:
            order: The order of the samples.
            drop_last: The sampler's.
            tokens: The loss is a mean over tokens.
            seed: The seed of what is random in fixed micro-batches.
        """
        short_last = not order.length or order.length % self.global_batch_size > 0
        if not self.fixed_micro_batch:
            return Cut(tokens, drop_last and short_last)
        short = self.global_batch_size % self._slices > 0 or (short_last and not drop_last)
        return Cut(tokens, drop_last and short_last, self.micro_batch_size, self.pad and short, seed)

    @property
    def _slices(self) -> int:
        if self.fixed_micro_batch:
            return -(-self.global_batch_size // self.max_micro_batch_size)
        return self.accumulation * self.world_size

    def slices(self, rank: int, size: int | None = None) -> tuple[Slice, ...]:
        """The micro-batches of one rank, ``accumulation`` of them.

        Args:
            rank: 0 to W - 1.
            size: Real samples of this global batch, G unless it is a short last one.

        Raises:
            ValueError: ``rank`` or ``size`` is out of range.
        """
        total = self.global_batch_size if size is None else size
        if not 0 <= rank < self.world_size or not 1 <= total <= self.global_batch_size:
            raise ValueError(f"rank {rank} of {self.world_size}, {total} of {self.global_batch_size} samples")
        # Fixed micro-batches keep their size: a short batch has fewer of them, rather than some of a single row
        # (BatchNorm).
        slices = -(-total // self.micro_batch_size) if self.fixed_micro_batch else self._slices
        short, longer = divmod(total, slices)
        rows = self.micro_batch_size if self.pad else 0
        found = []
        for number in range(rank, self.accumulation * self.world_size, self.world_size):
            start = number * short + min(number, longer)
            stop = start + short + (number < longer)
            filler = number >= slices or start == stop
            if filler:
                start, stop = 0, short + (longer > 0)
            found.append(Slice(number, start, stop, filler, max(0, rows - (stop - start))))
        return tuple(found)

    def loss_scale(self, n: float, total: float, scale: str = "ddp") -> float:
        """The factor for a slice's mean loss that makes the ranks' averaged gradients the mean over the global batch.

        Args:
            n: Real samples (or tokens) of the slice.
            total: Those of the whole global batch.
            scale: ``"ddp"`` averages over W ranks, as FSDP does; ``"deepspeed"`` divides by the micro-steps as well.

        Raises:
            ValueError: ``scale`` is something else.
        """
        if scale not in ("ddp", "deepspeed"):
            raise ValueError(f"scale is 'ddp' (also for FSDP and a single process) or 'deepspeed', not {scale!r}")
        return n * self.world_size * (self.accumulation if scale == "deepspeed" else 1) / total
