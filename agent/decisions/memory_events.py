"""Of memory checkpoints: what the agent's decisions receive, and what they ask for. Plain values, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.protos import control_pb2

__all__ = [
    "Doubt",
    "Doubted",
    "HeldChanged",
    "HoldPart",
    "KeepInMemory",
    "MadeDurable",
    "MakeDurable",
    "Replication",
    "SendPart",
    "StopWriting",
]


@dataclass(frozen=True)
class HeldChanged:
    """Which parts of a memory checkpoint are held here, each by the group rank that wrote it; none: it is gone.

    `copies`: so many other agents have said that they hold this node's own part. `unsent`: some buddy cannot be brought
    it, or has not taken the one before: nobody waits for it. `damaged`: what was found of a part that is here no more
    because of that.
    """

    checkpoint: control_pb2.Checkpoint
    parts: tuple[int, ...]
    copies: int = 0
    unsent: bool = False
    damaged: str = ""


@dataclass(frozen=True)
class Replication:
    """What the master answers to what is held here, or to a sign of life: see `control.Replication`.

    Attributes:
        answers: digest of the step that it was told of; empty: it was told of none.
        generation: of the master.
        said: None: it leaves to each node what it sends.
    """

    answers: str
    generation: int
    said: control_pb2.Replication | None


@dataclass(frozen=True)
class Doubted:
    """What `Doubt` names was looked at; what was damaged is gone. `found`: the first damage; empty: none."""

    ref: control_pb2.CheckpointRef
    found: str = ""


@dataclass(frozen=True)
class MadeDurable:
    """What `MakeDurable` names is in the run's directory; `failure`: why it is not. `write`: only these parts.

    `written`: parts that are there all the same, although it is not sealed. `absent`: the failure is that nothing of
    what was to be looked for is there.
    """

    ref: control_pb2.CheckpointRef
    failure: str = ""
    write: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    absent: bool = False


@dataclass(frozen=True)
class HoldPart:
    """The ranks of this node have written their part of a memory checkpoint. Answered by `HeldChanged`.

    Attributes:
        urgent: A drain waits for it: send it to those who hold it, too.
    """

    name: str
    digest: str
    urgent: bool = False


@dataclass(frozen=True)
class SendPart:
    """Send this node's own part of a memory checkpoint to those who hold it, too, unless that was done."""

    name: str
    digest: str


@dataclass(frozen=True)
class Doubt:
    """Sum what is here of a memory checkpoint, and drop what is damaged. Answered by `Doubted`."""

    ref: control_pb2.CheckpointRef


@dataclass(frozen=True)
class MakeDurable:
    """Write a memory checkpoint to the run's directory; fetch first what `parts` names. Answered by `MadeDurable`."""

    ref: control_pb2.CheckpointRef
    parts: tuple[control_pb2.HeldPart, ...] = ()
    # Only these parts, which are here, and without a seal; or only the seal, as all parts are written.
    write: tuple[int, ...] = ()
    seal: bool = False
    # These parts are elsewhere: look whether they are on the disk.
    look: bool = False


@dataclass(frozen=True)
class StopWriting:
    """Nobody wants a memory checkpoint on the disk any more that is being written there."""

    ref: control_pb2.CheckpointRef


@dataclass(frozen=True)
class KeepInMemory:
    """Drop memory checkpoints but for these digests and the newest of this epoch."""

    epoch: int
    digests: frozenset[str]
