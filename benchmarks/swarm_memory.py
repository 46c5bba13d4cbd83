"""What a simulated node says of its memory: parts of checkpoints that are saved, copied and gathered in no time. Pure.

All nodes of all processes number the steps of an epoch in the same way, so that what they say fits together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from dalsegno.protos import control_pb2 as pb

__all__ = ("NodeMemory", "checkpoint_of")

# So many steps an epoch may have; the last of them is its drain's.
STEPS = 1_000_000


def checkpoint_of(
    ref: pb.CheckpointRef, run_id: str, step: int, epoch: int, nodes: int, settings: pb.Settings
) -> pb.Checkpoint:
    """One that a world of so many nodes has saved, each of one rank."""
    return pb.Checkpoint(
        ref=ref,
        run_id=run_id,
        step=step,
        epoch=epoch,
        form=pb.FORM_SHARDED,
        shape=pb.Shape(world_size=nodes, strategy="ddp", any_world_size=True),
        position=pb.Position(samples=step * 256),
        bytes=1 << 30,
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
    )


# What ranks load: everything; what lies in their node's place; or, in a world of another size, their ranges of tensors.
ALL, PLACE, RANGES = "all parts", "parts of its place", "parts with its ranges"
# Of what is cut among ranks, the numbers of elements: those of a model of 8 billion parameters.
LENGTHS = (4096, 4096 * 1024, 4096 * 4096, 4096 * 14336, 4096 * 128256)


class NodeMemory:
    """What one node holds.

    Args:
        number: of the node, from which its address is made; nobody calls there.
    """

    def __init__(self, number: int) -> None:
        self.address = f"127.0.0.1:{10_000 + number % 50_000}"
        self._run_id = ""
        self._epoch = self._group_rank = self._nodes = 0
        self._settings = pb.Settings()
        self._steps: dict[str, tuple[pb.Checkpoint, set[int]]] = {}

    def opened(self, world: pb.World, nodes: int, settings: pb.Settings) -> None:
        """A world has opened, with a place for this node."""
        self._run_id, self._epoch, self._group_rank = world.run_id, world.epoch, world.place.group_rank
        self._nodes, self._settings = nodes, settings

    def save(self, count: int, loads: str = ALL) -> tuple[pb.Checkpoint, list[pb.HeldRequest]]:
        """The nth save of this epoch: the checkpoint, and what is said of it: of the own part, then of a buddy's, too.

        A negative number counts from the epoch's last step. `loads`: what ranks load of it, as it says.
        """
        step = self._epoch * STEPS + count % STEPS
        ref = pb.CheckpointRef(
            name=f"step-{step}.e{self._epoch}.1", digest=hashlib.sha256(f"{self._run_id} {step}".encode()).hexdigest()
        )
        checkpoint = checkpoint_of(ref, self._run_id, step, self._epoch, self._nodes, self._settings)
        checkpoint.in_memory = True
        checkpoint.shape.by_place = loads != ALL
        if loads == RANGES:
            checkpoint.shape.reads.CopyFrom(pb.Reads(lengths=LENGTHS, alignment=1))
        return checkpoint, self._bring(checkpoint, (self._group_rank, (self._group_rank - 1) % self._nodes))

    def gather(self, checkpoint: pb.Checkpoint, told: Iterable[pb.HeldPart]) -> list[pb.HeldRequest]:
        """Brings all parts here that somebody has. Agents tell of the first at once, and of others now and then."""
        held = self._held(checkpoint)
        missing = [part.group_rank for part in told if part.addresses and part.group_rank not in held]
        said = self._bring(checkpoint, missing[:1])
        held.update(missing[1:-1])
        return said + self._bring(checkpoint, missing[1:][-1:])

    def has(self, digest: str, parts: Iterable[int]) -> bool:
        """Whether these parts of a step are here."""
        return digest in self._steps and self._steps[digest][1].issuperset(parts)

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
