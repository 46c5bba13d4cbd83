"""Jobs whose nodes each have a small shared memory of their own, which others can fill."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .cluster import Cluster

_MOUNT = 'mount -t tmpfs -o size="$1",mode=1777 tmpfs /dev/shm && echo ready && exec cat'


class SmallMemory:
    """A process that has its own `/dev/shm`, of so many bytes."""

    def __init__(self, size: int) -> None:
        command = ["unshare", "--mount", "--propagation=private", "sh", "-c", _MOUNT, "sh", str(size)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"
        self.pid = self._process.pid
        self.root = Path("/proc") / str(self.pid) / "root" / "dev" / "shm"

    def fill(self, but: int = 0) -> None:
        """Somebody takes all that is left, but for so many bytes."""
        with open(self.root / "others", "ab", buffering=0) as file, contextlib.suppress(OSError):
            while os.statvfs(self.root).f_bavail * os.statvfs(self.root).f_frsize > but + (1 << 20) or not but:
                if not file.write(bytes(1 << 20)):
                    break

    def empty(self) -> None:
        """They give it back."""
        (self.root / "others").unlink()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=30)


@dataclass
class SmallMemoryJob(Cluster):
    """A job of which some nodes have a small memory, by name."""

    memories: Mapping[str, SmallMemory] = field(default_factory=dict)

    def host_of(self, name: str) -> int | None:
        found = self.memories.get(name)
        return None if found is None else found.pid


@contextlib.contextmanager
def small_memories(size: int, *names: str) -> Iterator[dict[str, SmallMemory]]:
    """For nodes of these names, so many bytes each. Skips the test where nobody may mount."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount")
    made: dict[str, SmallMemory] = {}
    try:
        for name in names:
            made[name] = SmallMemory(size)
        yield made
    finally:
        for one in made.values():
            one.close()
