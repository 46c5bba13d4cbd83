"""Seconds in which the ranks of a new world could read a state once: from shared memory into new memory of their own.

Each rank is a process of its own that has mapped the state before, and all begin together. Nothing is verified,
unpacked or built: what a change of the world costs beside this is ours, or the framework's.
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

__all__ = ["reading_once"]

SHARED_MEMORY = Path("/dev/shm")
PIECE = 1 << 20


def reading_once(size: int, ranks: int) -> float:
    """Seconds until each of so many processes, at the same time, has read `size` bytes.

    Raises:
        OSError: there is no room in shared memory.
        RuntimeError: a process has failed.
    """
    with tempfile.NamedTemporaryFile(prefix="dalsegno-benchmark-", dir=SHARED_MEMORY) as file:
        _fill(file.fileno(), size)
        command = [sys.executable, __file__, file.name]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        readers = [subprocess.Popen(command, **pipes) for _ in range(ranks)]  # type: ignore[call-overload]
        try:
            return _together(readers)
        finally:
            for reader in readers:
                reader.kill()
                reader.communicate()


def _fill(descriptor: int, size: int) -> None:
    piece = b"\x2a" * PIECE
    while size > 0:
        size -= os.write(descriptor, piece[:size])


def _together(readers: list[subprocess.Popen[str]]) -> float:
    for reader in readers:
        _hear(reader, "ready")
    for reader in readers:
        print("read", file=reader.stdin, flush=True)
    return max(float(_hear(reader)) for reader in readers)


def _hear(reader: subprocess.Popen[str], word: str = "") -> str:
    assert reader.stdout is not None
    said = reader.stdout.readline().strip()
    if not said or (word and said != word):
        raise RuntimeError(f"a process that reads the state has ended with {reader.wait(10)}")
    return said


def main() -> int:
    """One rank: maps the file, says so, and once it is told reads it and says how many seconds that took."""
    import torch

    torch.set_num_threads(1)
    with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        source = torch.frombuffer(mapped, dtype=torch.uint8)
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.perf_counter()
        torch.empty_like(source).copy_(source)
        print(time.perf_counter() - began, flush=True)
        del source
    return 0


if __name__ == "__main__":
    sys.exit(main())
