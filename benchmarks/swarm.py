"""A process full of simulated nodes, which `benchmarks.cluster` starts: orders and events are JSON lines.

It ends when its standard input is closed. If a signal stops it, its nodes are silent while their connections stay open;
if it is killed, all their connections close at once. So nodes die as real ones do.

Events carry times of the machine's monotonic clock, which all of its processes share:

- ``registered``: all nodes have registered for the first time;
- ``running``: all nodes were told of the world ``epoch``; ``joined``: when the last of them had asked for a place;
- ``left``: the first of the nodes was told that the world ``epoch`` is over;
- ``done``: the answer to an order, with counts, waits and sizes since the last one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections import Counter
from typing import Any

from google.protobuf import json_format

from benchmarks.swarm_node import Node
from dalsegno.protos import control_pb2 as pb

# Seconds between two commits, and between two extra heartbeats, of the node that measures how long calls wait.
COMMIT_EVERY, PROBE_EVERY = 2.0, 0.05


class Swarm:
    """The nodes of this process, and what they saw."""

    def __init__(self, address: str, job_id: str, settings: pb.Settings, prefix: str, count: int) -> None:
        self.address, self.job_id, self.settings = address, job_id, settings
        self.nodes = [Node(self, f"{prefix}-{number}", number, reports=number == 0) for number in range(count)]
        self._registered = 0
        self._running: Counter[int] = Counter()
        self._left: set[int] = set()
        self._joined_at = 0.0
        # The last step that a node has tried to commit.
        self.step = 0
        self.clear()

    def clear(self) -> None:
        """Begins a new count."""
        self.waits: dict[str, list[float]] = {}
        self.failures: Counter[str] = Counter()
        self.sizes: dict[str, int] = {}
        self.directives = 0

    # ---- what the nodes say -----------------------------------------------------------------------------------------

    def registered(self) -> None:
        self._registered += 1
        if self._registered == len(self.nodes):
            say("registered")

    def joined(self, round_: int) -> None:
        self._joined_at = time.monotonic()

    def directed(self, order: str, size: int) -> None:
        self.directives += 1
        self.sizes[order] = max(self.sizes.get(order, 0), size)

    def running(self, epoch: int, nodes: int) -> None:
        self._running[epoch] += 1
        if self._running[epoch] == len(self.nodes):
            say("running", epoch=epoch, nodes=nodes, joined=self._joined_at)

    def left(self, epoch: int) -> None:
        if epoch not in self._left:
            self._left.add(epoch)
            say("left", epoch=epoch)

    def answered(self, method: str, seconds: float) -> None:
        self.waits.setdefault(method, []).append(seconds)

    def failed(self, method: str, code: str) -> None:
        self.failures[f"{method} {code}"] += 1

    # ---- orders -----------------------------------------------------------------------------------------------------

    async def obey(self) -> None:
        """Carries out orders until standard input is closed."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            order = json.loads(line)
            if order["do"] != "report":
                self.clear()
            await getattr(self, f"do_{order.pop('do')}")(**order)
            say("done", **self.report())
            self.clear()

    async def do_report(self) -> None:
        """Only answers."""

    async def do_progress(self, nodes: int, every: float, seconds: float) -> None:
        """`nodes` of the nodes report steps, each at that pace, or as often as the master lets them."""
        end = time.monotonic() + seconds

        async def report(node: Node, first: float) -> None:
            due = first
            while due < end:
                await asyncio.sleep(due - time.monotonic())
                await node.progress()
                due = max(due + max(every, node.pace), time.monotonic())

        chosen = self.nodes[:nodes]
        now = time.monotonic()
        await asyncio.gather(*(report(node, now + every * n / len(chosen)) for n, node in enumerate(chosen)))

    async def do_probe(self, seconds: float) -> None:
        """The first node calls again and again, and commits sometimes, to measure how long a good agent waits."""
        node = self.nodes[0]
        end = time.monotonic() + seconds
        commit_at = time.monotonic() + COMMIT_EVERY / 2
        while (now := time.monotonic()) < end:
            if now >= commit_at:
                await node.commit(1 + node.newest)
                commit_at = now + COMMIT_EVERY
            await node.beat()
            await asyncio.sleep(PROBE_EVERY)

    async def do_calls(self, commits: bool, count: int, seconds: float, above: int) -> None:
        """All nodes side by side make `count` commits above a step, or send heartbeats, as far as the time goes."""
        end = time.monotonic() + seconds
        left = count
        self.step = max(self.step, above)

        async def repeat(node: Node) -> None:
            nonlocal left
            while left > 0 and time.monotonic() < end:
                left -= 1
                if commits:
                    self.step = 1 + max(self.step, node.newest)
                if not await (node.commit(self.step) if commits else node.beat()):
                    # A newer commit was faster, so this one is refused.
                    left += 1
                    await asyncio.sleep(PROBE_EVERY)

        await asyncio.gather(*(repeat(node) for node in self.nodes))

    async def do_fails(self) -> None:
        """The ranks of one node fail, behind a step: before one the shape of the world might be to blame."""
        await self.nodes[0].progress()
        self.nodes[0].fail()

    async def do_saves(self, every: float, seconds: float, loads: str) -> None:
        """All nodes save to memory again and again, all processes at the same moments."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            count = int(now / every) + 1
            await asyncio.sleep(count * every - now)
            for node in self.nodes:
                node.save(count, loads)

    def report(self) -> dict[str, Any]:
        return {
            "waits": {method: spread(waits) for method, waits in self.waits.items()},
            "failures": dict(self.failures),
            "sizes": self.sizes,
            "directives": self.directives,
            "step": self.step,
        }


def spread(waits: list[float]) -> dict[str, float]:
    """Waits in seconds: median, 99th percentile, the longest; and how many."""
    ordered = sorted(waits)
    return {
        "count": len(ordered),
        "p50": ordered[len(ordered) // 2],
        "p99": ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))],
        "max": ordered[-1],
    }


def say(event: str, **fields: Any) -> None:
    """Prints one line for the process that started this one."""
    print(json.dumps({"event": event, "at": time.monotonic(), **fields}), flush=True)


async def live(swarm: Swarm) -> None:
    """Runs all nodes until there are no more orders."""
    tasks = [asyncio.create_task(node.run()) for node in swarm.nodes]
    for task in tasks:
        task.add_done_callback(_complain)
    await swarm.obey()
    for task in tasks:
        task.cancel()


def _complain(task: asyncio.Task[None]) -> None:
    """Reports a node that ended by itself, which must not happen unseen."""
    if not task.cancelled():
        say("broken", error=repr(task.exception()))


def main() -> int:
    flags = argparse.ArgumentParser(prog="python -m benchmarks.swarm", description=__doc__)
    flags.add_argument("address")
    flags.add_argument("job_id")
    flags.add_argument("settings", help="as JSON of the protocol's Settings")
    flags.add_argument("prefix", help="of the nodes' names")
    flags.add_argument("count", type=int)
    options = flags.parse_args()
    # One descriptor for each node at least.
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    settings = json_format.Parse(options.settings, pb.Settings())

    async def run() -> None:
        await live(Swarm(options.address, options.job_id, settings, options.prefix, options.count))

    asyncio.run(run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
