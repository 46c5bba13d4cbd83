"""What comes to the disk behind the steps, out of the memory of nodes: only when it is there does it count."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dalsegno.master.brain.state import Job, Phase

if TYPE_CHECKING:
    from .ledger import Ledger

# Where nothing happens, it is there so much later (seconds): two steps, copies, two writes, a few messages.
WITHIN = 12.0


class Behind:
    """The part of the ledger that watches it."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        # Digests that are recorded as commits on the disk.
        self._durable: set[str] = set()
        # The first step that the ranks of the open world have wanted there since the last commit: epoch, step, when.
        self._wanted: tuple[int, int, float] | None = None

    def wanted(self, epoch: int, step: int) -> None:
        """The ranks have saved it into memory, and want it on the disk."""
        if self._wanted is None or self._wanted[0] != epoch:
            self._wanted = epoch, step, self._ledger.sim.clock.now

    def recorded(self, job: Job) -> None:
        """A commit that is not in memory alone was sealed on the disk."""
        for record in job.checkpoints:
            if not record.parts and record.digest not in self._durable:
                self._durable.add(record.digest)
                here = record.name in self._ledger.sim.disk.were_here
                self._ledger.require(here, "commits are on the disk", f"{record.name} was never sealed there")
        if self._wanted is not None:
            epoch, step, _ = self._wanted
            if job.epoch > epoch or job.phase is not Phase.RUNNING or job.checkpoints.last_step(epoch) >= step:
                self._wanted = None

    def stepped(self, epoch: int) -> None:
        """What was wanted long ago has come there, where nothing went wrong."""
        ledger, wanted = self._ledger, self._wanted
        if wanted is None or wanted[0] != epoch or ledger.is_excused(epoch) or ledger.sim.plan.kind != "planned":
            return
        late = ledger.sim.clock.now - wanted[2]
        text = f"step {wanted[1]} of epoch {epoch} is not there after {late:.1f} s"
        ledger.require(late < WITHIN, "wanted steps come to the disk", text)
