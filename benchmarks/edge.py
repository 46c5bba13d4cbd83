"""How long readers over HTTP hold the master's loop, which also answers agents.

Some ask all at once, and read; many more ask for everything, never read, and come back. They are another process. What
the brain takes for a look is not part of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
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
from dalsegno.master.server.garbage import collect_rarely
from dalsegno.protos import control_pb2 as pb

READERS, NODES, REPEATS = 10, 1000, 5
# Readers that never read: how many, for how many seconds, and how often they hang up and come back. While they are
# there, so many turns of the brain end in a second, each of which makes everything new.
DEAF, DEAF_SECONDS, BACK_SECONDS, TURNS = 500, 6.0, 1.0, 5
# The longest that the loop may be held at a time, in seconds: an agent's call waits for as long.
BOUND_SECONDS = 0.25
ASKED = {f"{EVENTS} events": "/api/v1/events", f"a job of {NODES} nodes": "/api/v1/job"}
STREAM = "the stream of events"


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
    collect_rarely()
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
            rows.append({"readers": f"{READERS} read {name}", **_held(held), "all have it after (s)": _middle(took)})
        for name, path in {**ASKED, STREAM: "/api/v1/events"}.items():
            turning = asyncio.create_task(_turning(shown))
            held = [
                (await _asked(edge.address, path, "stream" if name == STREAM else "deaf"))[0] for _ in range(REPEATS)
            ]
            turning.cancel()
            rows.append({"readers": f"{DEAF} ask for {name} and never read", **_held(held)})
    finally:
        await edge.close()
    return rows


def _held(held: Sequence[float]) -> dict[str, object]:
    return {"held at most (ms)": round(1000 * max(held), 1), "median (ms)": round(1000 * statistics.median(held), 1)}


def _middle(values: Sequence[float]) -> float:
    return round(statistics.median(values), 2)


async def _turning(shown: _Shown) -> None:
    while True:
        shown.turn()
        await asyncio.sleep(1 / TURNS)


async def _asked(address: str, path: str, how: str = "read") -> tuple[float, float]:
    """The longest time between two turns of the loop while readers are there, and their time; in seconds."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.edge", address, path, how),
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


def _readers(address: str, path: str, how: str) -> None:
    """The readers: says that they are there, waits for a line, and asks."""
    print("here", flush=True)
    sys.stdin.readline()
    if how == "read":
        _read(address, path)
    else:
        _never_read(address, path, "text/event-stream" if how == "stream" else "*/*")


def _read(address: str, path: str) -> None:
    def ask(_: int) -> None:
        connection = http.client.HTTPConnection(address, timeout=60)
        connection.request("GET", path)
        answer = connection.getresponse()
        if answer.status != 200 or not answer.read():
            raise RuntimeError(f"the edge answered {answer.status}")

    with ThreadPoolExecutor(READERS) as readers:
        list(readers.map(ask, range(READERS)))


def _never_read(address: str, path: str, accept: str) -> None:
    host, port = address.rsplit(":", 1)
    request = f"GET {path} HTTP/1.1\r\nhost: {address}\r\naccept: {accept}\r\n\r\n".encode()
    until = time.monotonic() + DEAF_SECONDS
    while time.monotonic() < until:
        again = time.monotonic() + BACK_SECONDS
        with contextlib.ExitStack() as stack:
            for _ in range(DEAF):
                # A master that ends a connection is what is hoped for.
                with contextlib.suppress(OSError):
                    connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=BACK_SECONDS))
                    connection.sendall(request)
            time.sleep(max(0.0, again - time.monotonic()))


if __name__ == "__main__":
    _readers(*sys.argv[1:4])
