"""The job's one checkpoint directory, as several hosts see it: late, not at all, full, damaged."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from dalsegno.elastic.checkpoint import CheckpointName
from dalsegno.protos import control_pb2

from .clock import Clock

SEALED_BYTES = 1000


@dataclass
class Sealed:
    """One sealed directory. `history`: the (epoch, step) pairs that the model in it was trained with, in order."""

    message: control_pb2.Checkpoint
    history: tuple[tuple[int, int], ...]
    writer: str
    sealed_at: float
    damaged: bool = False


def digest_of(name: str) -> str:
    """Of a directory of this name: no two are alike, and none is written twice."""
    return hashlib.sha256(name.encode()).hexdigest()


class Disk:
    """Sealed directories by name; everything that was ever there is remembered by digest."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.probe = "the job's probe"
        self.sealed: dict[str, Sealed] = {}
        self.ever: dict[str, Sealed] = {}
        # Names of all that was ever sealed here, and not only in memory.
        self.were_here: set[str] = set()
        self.begun: set[str] = set()
        self.finished: list[str] = []
        # Parts of memory checkpoints that somebody has written, by name: without a manifest until all are there.
        self.spilled: dict[str, set[int]] = {}
        self.full = False
        # Hosts on which something else is mounted where the directory should be.
        self.blind: set[str] = set()
        # Seconds until a host sees what another has written.
        self.lag: dict[str, float] = {}
        self._seen: set[tuple[str, str]] = set()

    def begin(self, name: str) -> bool:
        """Creates a directory exclusively; False where the name was taken."""
        if name in self.begun:
            return False
        self.begun.add(name)
        return True

    def seal(self, message: control_pb2.Checkpoint, history: tuple[tuple[int, int], ...], writer: str) -> Sealed:
        """Writes the manifest."""
        entry = Sealed(message, history, writer, self._clock.now)
        self.sealed[message.ref.name] = entry
        self.were_here.add(message.ref.name)
        self.ever[message.ref.digest] = entry
        return entry

    def sweep(self, epoch: int, step: int) -> None:
        """Parts that were written before this step, and never sealed, go."""
        for name in [name for name in self.spilled if CheckpointName.parse(name).age[:2] < (epoch, step)]:
            if name not in self.sealed:
                del self.spilled[name]

    def delete(self, name: str) -> None:
        self.sealed.pop(name, None)

    def sees(self, host: str, entry: Sealed) -> bool:
        if host in self.blind:
            return False
        key = (host, entry.message.ref.digest)
        if entry.writer == host or self._clock.now >= entry.sealed_at + self.lag.get(host, 0.0):
            # What a host has seen once it does not lose sight of.
            self._seen.add(key)
        return key in self._seen

    def find(self, host: str, digest: str) -> Sealed | None:
        """The directory with this digest, if `host` sees it now."""
        entry = self.ever.get(digest)
        if entry is None or entry.message.ref.name not in self.sealed or not self.sees(host, entry):
            return None
        return entry

    def inventory(self, host: str) -> list[control_pb2.Checkpoint]:
        """What `host` sees sealed."""
        return [entry.message for entry in self.sealed.values() if self.sees(host, entry)]

    def read_probe(self, host: str) -> str:
        return f"the probe of {host}'s own directory" if host in self.blind else self.probe

    def finished_runs(self, host: str) -> list[str]:
        return [] if host in self.blind else list(self.finished)
