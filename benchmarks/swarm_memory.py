"""What a simulated node says of its memory: parts of checkpoints that are saved, copied and gathered in no time. Pure.

All nodes of all processes number the steps of an epoch in the same way, so that what they say fits together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from dalsegno.protos import control_pb2 as pb

__all__ = ("NodeMemory",)

# So many steps an epoch may have; the last of them is its drain's.
STEPS = 1_000_000


class NodeMemory:
    """What one node holds.

    Args:
        number: of the node, from which its address is made; nobody calls there.
    """

    def __init__(self, number: int) -> None:
        self.address = f"127.0.0.1:{10_000 + number % 50_000}"
        self.run_id = ""
        self._epoch = self._group_rank = self._nodes = 0
        self._min, self._max = 1, 1
        self._steps: dict[str, tuple[pb.Checkpoint, set[int]]] = {}

    def opened(self, world: pb.World, nodes: int, settings: pb.Settings) -> None:
        """A world has opened, with a place for this node."""
        self.run_id, self._epoch, self._group_rank, self._nodes = (
            world.run_id,
            world.epoch,
            world.place.group_rank,
            nodes,
        )
        self._min, self._max = settings.min_nodes, settings.max_nodes

    def save(self, count: int) -> tuple[pb.Checkpoint, list[pb.HeldRequest]]:
        """The nth save of this epoch: the checkpoint, and what is said of it: of the own part, then of a buddy's, too.

        A negative number counts from the epoch's last step.
        """
        step = self._epoch * STEPS + count % STEPS
        digest = hashlib.sha256(f"{self.run_id} {step}".encode()).hexdigest()
        checkpoint = pb.Checkpoint(
            ref=pb.CheckpointRef(name=f"step-{step}.e{self._epoch}.1", digest=digest),
            run_id=self.run_id,
            step=step,
            epoch=self._epoch,
            form=pb.FORM_SHARDED,
            shape=pb.Shape(world_size=self._nodes, strategy="ddp", any_world_size=True),
            position=pb.Position(samples=step * 256),
            bytes=1 << 30,
            min_nodes=self._min,
            max_nodes=self._max,
            in_memory=True,
        )
        return checkpoint, self._bring(checkpoint, (self._group_rank, (self._group_rank - 1) % self._nodes))

    def gather(self, checkpoint: pb.Checkpoint, told: Iterable[pb.HeldPart]) -> list[pb.HeldRequest]:
        """Brings all parts here that somebody has. Agents tell of the first at once, and of others now and then."""
        held = self._held(checkpoint)
        missing = [part.group_rank for part in told if part.addresses and part.group_rank not in held]
        said = self._bring(checkpoint, missing[:1])
        held.update(missing[1:-1])
        return said + self._bring(checkpoint, missing[1:][-1:])

    def has(self, digest: str, parts: int) -> bool:
        """Whether all parts of a step are here."""
        return digest in self._steps and len(self._steps[digest][1]) == parts

    def _bring(self, checkpoint: pb.Checkpoint, parts: Iterable[int]) -> list[pb.HeldRequest]:
        held, said = self._held(checkpoint), []
        for part in parts:
            if part not in held:
                held.add(part)
                said.append(pb.HeldRequest(checkpoint=checkpoint, parts=sorted(held)))
        return said

    def _held(self, checkpoint: pb.Checkpoint) -> set[int]:
        """The parts of a step that are here; older steps go."""
        held = self._steps.setdefault(checkpoint.ref.digest, (checkpoint, set()))[1]
        for digest in list(self._steps)[:-3]:
            del self._steps[digest]
        return held
