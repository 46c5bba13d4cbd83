"""The product's `MemoryTier` as an agent's shell knows it, over the simulated memory of nodes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.memory.durable import NothingThere, PartlyWritten
from dalsegno.agent.memory.tier import HeldParts
from dalsegno.protos import control_pb2

from .memory import LOOK
from .threads import Hands

if TYPE_CHECKING:
    from .real_agent import RealAgent

# In place of parts: the product's agent knows by itself which ones it looks for.
A_LOOK = (-1,)


class Tier:
    """One agent's. Every method returns at once; callbacks come on a thread of its own."""

    def __init__(self, agent: RealAgent, on_change: Callable[[HeldParts], None]) -> None:
        self.problem, self.address = "", agent.memory.address
        self.path: Path | None = None
        self._agent, self._memory, self._on_change = agent, agent.memory, on_change
        self._hands = Hands(agent.process, "memory")
        # Who hears of a step, or of some parts of it, that are being written to the disk.
        self._writing: dict[tuple[str, tuple[int, ...]], list[Callable[[str], None]]] = {}

    # ---- for the product --------------------------------------------------------------------------------------------

    def open_epoch(self, run_id: str, epoch: int, group_rank: int, buddies: Sequence[str]) -> None:
        self._memory.opened(epoch, group_rank, tuple(buddies))

    def sealed(self, run_id: str, name: str, digest: str, urgent: bool = False) -> None:
        self._memory.hold(ev.HoldPart(name, digest, urgent))

    def send(self, run_id: str, name: str, digest: str) -> None:
        self._memory.send(digest)

    def gather(
        self,
        run_id: str,
        ref: control_pb2.CheckpointRef,
        parts: Sequence[control_pb2.HeldPart],
        then: Callable[[control_pb2.Checkpoint | str], None],
        *,
        partly: bool = False,
    ) -> None:
        def fetched(failure: str) -> None:
            step = self._memory.steps.get(ref.digest)
            found = failure or ("it is gone" if step is None else step.message)
            self._hands.give(then, found)

        some = frozenset(part.group_rank for part in parts) if partly else None
        self._memory.gather(ev.PrepareJoin(0, ref, parts=tuple(parts), some=some), fetched)

    def make_durable(
        self, run_id: str, ref: control_pb2.CheckpointRef, run_dir: Path, then: Callable[[str], None]
    ) -> None:
        # What is elsewhere was fetched before, where it was asked for.
        self._write(ev.MakeDurable(ref), then)

    def write_parts(
        self,
        run_id: str,
        ref: control_pb2.CheckpointRef,
        run_dir: Path,
        parts: Collection[int],
        then: Callable[[str], None],
    ) -> None:
        self._write(ev.MakeDurable(ref, write=tuple(parts), seal=not parts), then)

    def look_for(self, run_id: str, ref: control_pb2.CheckpointRef, run_dir: Path, then: Callable[[str], None]) -> None:
        self._write(ev.MakeDurable(ref, write=A_LOOK, look=True), then)

    def stop_writing(self, ref: control_pb2.CheckpointRef) -> None:
        self._memory.unwanted = ref.digest

    def doubt(self, run_id: str, ref: control_pb2.CheckpointRef, then: Callable[[str], None]) -> None:
        sim = self._agent.sim
        sim.clock.after(sim.random.uniform(*LOOK), self._agent.run, self._hands.give, then, "")

    def keep(self, run_id: str, epoch: int, digests: Collection[str]) -> None:
        self._memory.keep(epoch, frozenset(digests))

    def close(self) -> None: ...

    # ---- for the simulation -----------------------------------------------------------------------------------------

    def changed(self, run_id: str, event: ev.HeldChanged) -> None:
        """On a thread of the agent: what is held here has changed."""
        step = self._memory.steps.get(event.checkpoint.ref.digest)
        copies = () if step is None else tuple(sorted(step.copies))
        unsent = step is not None and step.unsent
        self._hands.give(self._on_change, HeldParts(run_id, event.checkpoint, event.parts, copies, unsent))

    def made(self, event: ev.MadeDurable) -> None:
        """The oldest order to write this step is carried out, or cannot be."""
        waiting = self._writing.get((event.ref.digest, event.write))
        if waiting:
            failure = NothingThere(event.failure) if event.absent else event.failure
            if event.written:
                failure = PartlyWritten(event.failure)
                failure.parts = event.written
            self._hands.give(waiting.pop(0), failure)

    def _write(self, action: ev.MakeDurable, then: Callable[[str], None]) -> None:
        self._writing.setdefault((action.ref.digest, action.write), []).append(then)
        self._memory.make_durable(action)
