"""Of the checkpoint directory: what the agent's decisions receive, and what they ask for. Plain values, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from dalsegno.protos import control_pb2

__all__ = [
    "Look",
    "ManifestRead",
    "MarkFinished",
    "Prune",
    "Pruned",
    "ReadManifest",
    "RoomMissing",
    "Sighted",
    "Sweep",
    "VerificationDone",
    "VerificationMoved",
    "Verify",
    "WriteLatest",
]


@dataclass(frozen=True)
class ManifestRead:
    """A sealed checkpoint as its manifest describes it; None if it cannot be read. `gone`: nothing of it is there."""

    name: str
    checkpoint: control_pb2.Checkpoint | None
    message: str = ""
    gone: bool = False


@dataclass(frozen=True)
class VerificationMoved:
    """A verification goes on: `bytes_done` bytes are read, including tries that the file system spoiled."""

    number: int
    bytes_done: int


@dataclass(frozen=True)
class VerificationDone:
    """The verdict. `inconclusive`: this node's file system failed, so nothing is known about the checkpoint."""

    number: int
    intact: bool
    message: str
    inconclusive: bool = False


@dataclass(frozen=True)
class Pruned:
    refs: tuple[control_pb2.CheckpointRef, ...]


@dataclass(frozen=True)
class RoomMissing:
    """The checkpoint directory lacks so much for the next checkpoint."""

    missing_bytes: int


@dataclass(frozen=True)
class Sighted:
    """The checkpoint that `Look` names is in sight."""

    ref: control_pb2.CheckpointRef


@dataclass(frozen=True)
class ReadManifest:
    name: str
    digest: str


@dataclass(frozen=True)
class Verify:
    verification: control_pb2.Verification


@dataclass(frozen=True)
class Look:
    """Look for a checkpoint that another node has committed, for a bounded time; answer `Sighted` if it is there."""

    ref: control_pb2.CheckpointRef


@dataclass(frozen=True)
class Prune:
    refs: tuple[control_pb2.CheckpointRef, ...]


@dataclass(frozen=True)
class WriteLatest:
    """Copy the newest commit to `latest.json` for people and foreign tools."""

    head: control_pb2.Checkpoint


@dataclass(frozen=True)
class Sweep:
    """Delete what was begun to be saved before this step of `epoch` and never sealed: nobody will read it.

    But of `converting`, a checkpoint's name, some node makes a later form now.
    """

    epoch: int
    step: int
    converting: str = ""


@dataclass(frozen=True)
class MarkFinished:
    """Write `FINISHED.json` into the run's directory."""

    run_id: str
