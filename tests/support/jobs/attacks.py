"""Random disturbances of a job with memory checkpoints: what happens, to whom and when follows from a seed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from . import local_processes as processes
from .cluster import Cluster, Node
from .faults import freeze, thaw

# Seconds that a node stands still: less than its peers wait for it.
STOPPED_SECONDS = (0.05, 1.0)


@dataclass
class Attacks:
    """Disturbs a job again and again.

    Attributes:
        size: so many nodes it has between two disturbances.
        said: what was done, for whoever looks for the fault.
    """

    job: Cluster
    seed: int
    size: int
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._made = 0

    def begin(self) -> int:
        """The first world."""
        self.refill()
        return self.job.wait_world(self.size)

    def one(self, ways: list[Callable[[], None]]) -> None:
        """One disturbance, at any moment of the training; then the world is as large as before, and makes a step."""
        before = self.job.epoch()
        time.sleep(self.random.uniform(0.0, 0.6))
        way = self.random.choice(ways)
        self.say(way.__name__)
        way()
        self.refill()
        changes = way not in (self.keeper, self.stop)
        self.job.wait_world(self.size, after=before if changes else 0)

    def refill(self) -> None:
        """New nodes come for those that are gone, or go."""
        while len(self._staying()) < self.size:
            self._made += 1
            self.job.start(f"n{self._made}")

    def say(self, what: str) -> None:
        self.said.append(f"{time.time():.3f} {what}")

    def _staying(self) -> list[Node]:
        return [node for node in self.job.alive() if node.expected == 0]

    def _node(self) -> Node:
        return self.random.choice(self._staying())

    def worker(self) -> None:
        """A rank alone is killed, once its world has made some steps.

        Before that the master takes it for a script that cannot start in a world of this size, as with too little
        memory: the job goes on in a smaller one then.
        """
        self.job.wait_world(self.size, steps=3)
        processes.send([self.job.worker_pid(self._node())])

    def agent(self) -> None:
        """An agent alone is killed."""
        self.job.kill_agent(self._node())

    def node(self) -> None:
        """All of a node is killed."""
        self.job.kill_node(self._node())

    def leave(self) -> None:
        """A node gets a notice."""
        self.job.leave(self._node())

    def keeper(self) -> None:
        """A keeper alone is killed."""
        node = self._node()
        own = self.job.processes(node)
        processes.send([pid for pid in processes.children(node.pid) if pid not in own and is_keeper(pid)])

    def master(self) -> None:
        """The master and a node are killed at once."""
        self.job.kill_master()
        self.node()

    def stop(self) -> None:
        """A node stands still for a moment, and goes on."""
        stopped = freeze(self.job, self._node())
        time.sleep(self.random.uniform(*STOPPED_SECONDS))
        thaw(stopped)

    def killed_while_stopped(self) -> None:
        """A node stands still, in whatever it was at, until it is killed."""
        node = self._node()
        freeze(self.job, node)
        time.sleep(self.random.uniform(*STOPPED_SECONDS))
        self.job.kill_node(node)

    def agent_stopped(self) -> None:
        """An agent stands still while its rank trains on, and is killed with it."""
        node = self._node()
        os.kill(node.pid, signal.SIGSTOP)
        time.sleep(self.random.uniform(*STOPPED_SECONDS))
        self.job.kill_node(node)

    def pair(self) -> None:
        """Two nodes are killed at once."""
        for node in self.random.sample(self._staying(), 2):
            self.job.kill_node(node)


def is_keeper(pid: int) -> bool:
    return "keeper" in processes.command_line(pid)
