"""A node's memory in a process of its own, to be killed or stopped; ends with its standard input.

hold ROOT                       takes what others send; prints its address
send ROOT ADDRESS BYTES RATE    sends a part of so many bytes there, so many in a second; prints its address
durable ROOT RUN_DIR BATCHES    writes a step (`durable_step`) to RUN_DIR, two files at a time, and stops for good
                                once so many batches are synced; prints "halted" then
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

from dalsegno.agent.memory import durable
from dalsegno.elastic.checkpoint import Manifest
from tests.support.checkpoints.memory import RUN, Files, Node, manifest_of

SENT = "step-10.e1.1"
DURABLE = {f"folder-{number % 3}/file-{number}.pt": bytes([number]) * 10_000 for number in range(9)}


def durable_step() -> tuple[Manifest, Files]:
    return manifest_of("step-20.e1.1", {0: DURABLE}), DURABLE


def sent_step(size: int) -> tuple[Manifest, Files]:
    files = {f"file-{number}": bytes([number]) * (size // 4) for number in range(4)}
    return manifest_of(SENT, {0: files}), files


class Process:
    """Such a process, and the first line that it prints."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.jobs.memory_node", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[3],
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline().strip()
        assert self.line, self.process.poll()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


def main(mode: str, root: str, *rest: str) -> None:
    rate = float(rest[2]) if mode == "send" else None
    node = Node(Path(root), bytes_per_second=rate)
    assert not node.tier.problem, node.tier.problem
    if mode == "send":
        node.tier.open_epoch(RUN, 1, 0, [rest[0]])
        manifest, files = sent_step(int(rest[1]))
        node.writes(manifest, 0, files)
    if mode == "durable":
        node.tier.open_epoch(RUN, 1, 0, [])
        manifest, files = durable_step()
        node.writes(manifest, 0, files)
        node.holds(manifest.name, 0)
        halt_after(int(rest[1]))
        node.tier.make_durable(RUN, manifest.ref.to_proto(), Path(rest[0]), print)
    else:
        print(node.tier.address, flush=True)
    sys.stdin.read()
    node.tier.close()


def halt_after(batches: int) -> None:
    durable._BATCH_FILES = 2  # type: ignore[misc]
    sync, synced = durable._sync, []

    def halting(*arguments: object) -> None:
        sync(*arguments)  # type: ignore[arg-type]
        synced.append(1)
        if len(synced) > batches:
            print("halted", flush=True)
            threading.Event().wait()

    durable._sync = halting  # type: ignore[assignment]


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
