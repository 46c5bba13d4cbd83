"""How long readers over HTTP hold the master's loop, which also answers agents: all of them ask at once.

The readers are another process. What the brain takes for a look is not part of this.
"""

from __future__ import annotations

import asyncio
import http.client
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from benchmarks.results import report
from dalsegno.master.brain.chronicle import EVENTS, JobEvent, Kind, PausePart
from dalsegno.master.brain.events import Reply
from dalsegno.master.http.edge import Edge
from dalsegno.master.server.feed import Feed
from dalsegno.protos import control_pb2 as pb

READERS, NODES, REPEATS = 10, 1000, 5
# The longest that the loop may be held at a time, in seconds: an agent's call waits for as long.
BOUND_SECONDS = 0.1
ASKED = {f"{EVENTS} events": "/api/v1/events", f"a job of {NODES} nodes": "/api/v1/job"}


class _Shown:
    """A master with a large job, and nothing to do."""

    def __init__(self) -> None:
        self.feed, self.turns = Feed(), 0

    def turn(self) -> None:
        """Everything is new."""
        self.turns += 1
        parts = tuple(PausePart(name, 0.25) for name in ("noticed", "saved", "formed", "loaded", "first step"))
        self.feed.show(
            tuple(
                JobEvent(number, f"the world of {number}", kind=Kind.FORMED, nodes=("node-1", "node-2"), parts=parts)
                for number in range(1, EVENTS + 1)
            )
        )

    async def status(self) -> Reply:
        made = pb.StatusReply(job_id="job", phase=pb.PHASE_RUNNING, step=self.turns)
        made.nodes.extend(pb.NodeStatus(node=f"node-{number}", role="member") for number in range(NODES))
        return Reply("OK", "", made)

    async def call(self, message: object) -> Reply:
        raise NotImplementedError


def main() -> int:
    """Prints the longest hold of each kind; returns 1 if one is longer than the bound."""
    rows = asyncio.run(_measured())
    report("edge", rows, title="What readers do to the master's loop", settings={"readers": READERS, "runs": REPEATS})
    return int(any(float(str(row["held at most (ms)"])) > 1000 * BOUND_SECONDS for row in rows))


async def _measured() -> list[dict[str, object]]:
    shown = _Shown()
    edge = Edge(shown, "127.0.0.1", 0, None, loopback=True)
    edge.start()
    rows: list[dict[str, object]] = []
    try:
        for name, path in ASKED.items():
            held, took = [], []
            for _ in range(REPEATS):
                shown.turn()
                longest, seconds = await _asked(edge.address, path)
                held.append(longest)
                took.append(seconds)
            columns = {"held at most (ms)": round(1000 * max(held), 1), "median (ms)": round(1000 * _middle(held), 1)}
            rows.append({"each reads": name, **columns, "all have it after (s)": round(_middle(took), 2)})
    finally:
        await edge.close()
    return rows


def _middle(values: Sequence[float]) -> float:
    return statistics.median(values)


async def _asked(address: str, path: str) -> tuple[float, float]:
    """The longest time between two turns of the loop while all readers are served, and their time; in seconds."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.edge", address, path),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdout.readline()
    process.stdin.write(b"go\n")
    done = asyncio.create_task(process.wait())
    began = then = time.perf_counter()
    longest = 0.0
    while not done.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, then = max(longest, now - then), now
    if done.result():
        raise RuntimeError("a reader was not answered")
    return longest, time.perf_counter() - began


def _read(address: str, path: str) -> None:
    """The readers: says that they are there, waits for a line, and asks."""

    def ask(_: int) -> None:
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status != 200 or not answer.read():
            raise RuntimeError(f"the edge answered {answer.status}")

    with ThreadPoolExecutor(READERS) as readers:
        print("here", flush=True)
        sys.stdin.readline()
        list(readers.map(ask, range(READERS)))


if __name__ == "__main__":
    _read(*sys.argv[1:3])
