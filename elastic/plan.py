"""Who computes which samples of a global batch: the same G samples per step at every world size."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Slice:
    """One micro-batch of one rank, as positions in the global batch.

    Attributes:
        number: Number of the micro-batch in the global batch; slices are numbered over all ranks.
        start: First position.
        stop: One past the last. A filler has exactly one position, which another slice owns.
        filler: No sample was left for it: it computes one real sample again, with factor 0.
    """

    number: int
    start: int
    stop: int
    filler: bool = False

    @property
    def n(self) -> int:
        """Real samples of its own."""
        return 0 if self.filler else self.stop - self.start


@dataclass(frozen=True)
class BatchPlan:
    """Cuts global batches of ``global_batch_size`` (G) samples for ``world_size`` (W) ranks.

    Every rank makes the same number of micro-steps, the fewest that keep a slice at or below ``max_micro_batch_size``
    (m) samples: ``a = ceil(G / (W m))``, ``b = ceil(G / (a W))``. The samples are dealt in slices that differ by at
    most one, so no row is padded. With ``fixed_micro_batch`` the cut is the same at every world size (``ceil(G / m)``
    micro-batches) and the world decides only who computes which.

    Raises:
        ValueError: A size below 1.
    """

    global_batch_size: int
    world_size: int
    max_micro_batch_size: int
    fixed_micro_batch: bool = False

    def __post_init__(self) -> None:
        if min(self.global_batch_size, self.world_size, self.max_micro_batch_size) < 1:
            raise ValueError(f"global batch, world and micro-batch size must be at least 1: {self}")

    @property
    def accumulation(self) -> int:
        """a: micro-batches of every rank in every step, short last batches included."""
        return -(-self.global_batch_size // (self.world_size * self.max_micro_batch_size))

    @property
    def micro_batch_size(self) -> int:
        """b: the largest slice of a whole global batch."""
        return -(-self.global_batch_size // self._slices)

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
        short, longer = divmod(total, self._slices)
        found = []
        for number in range(rank, self.accumulation * self.world_size, self.world_size):
            start = number * short + min(number, longer)
            stop = start + short + (number < longer)
            if number >= self._slices or start == stop:
                found.append(Slice(number, 0, 1, filler=True))
            else:
                found.append(Slice(number, start, stop))
        return tuple(found)

    def loss_scale(self, n: float, total: float, scale: str = "ddp") -> float:
        """The factor of a slice's mean loss that makes the ranks' averaged gradients the mean over the global batch.

        Args:
            n: Real samples (or tokens) of the slice.
            total: Those of the whole global batch.
            scale: ``"ddp"`` averages over W ranks; ``"deepspeed"`` divides by the micro-steps as well.

        Raises:
            ValueError: Another ``scale``.
        """
        if scale not in ("ddp", "deepspeed"):
            raise ValueError(f"scale is 'ddp' or 'deepspeed', not {scale!r}")
        return n * self.world_size * (self.accumulation if scale == "deepspeed" else 1) / total
