"""Nodes that leave with notice, at any moment and several at once, lose no step: what only they have is taken over."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time

import pytest

from tests.integration.test_bring_your_script import WORKERS, Worker
from tests.integration.test_memory import Clusters, end, jobs
from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import LEFT, LEFT_UNSAVED, PATIENCE, Cluster, Node, Undisturbed

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

__all__ = ["jobs"]

SIZE, ROUNDS = 4, 4


class Leaves:
    """What happens, to whom and when follows from a seed."""

    def __init__(self, job: Cluster, seed: int) -> None:
        self._job, self._random, self._made = job, random.Random(seed), 0
        self.said: list[str] = []

    def begin(self) -> None:
        self._add()
        self._job.wait_world(SIZE)

    def round(self) -> None:
        """Some or all leave; others come in their places. No step is lost, whatever becomes of the master meanwhile."""
        before, chance = self._job.epoch(), self._random
        time.sleep(chance.uniform(0.0, 0.5))
        leavers = chance.sample(self._job.alive(), chance.randint(1, SIZE))
        self._say(f"{', '.join(node.name for node in leavers)} leave")
        for node in leavers:
            node.expected = LEFT
            node.process.send_signal(signal.SIGTERM)
            time.sleep(chance.choice([0.0, 0.0, 0.2, 0.6]))
        if chance.random() < 0.3:
            self._stop(chance.choice(leavers))
        time.sleep(chance.uniform(0.0, 1.5))
        chance.choice([self._leave_alone, self._kill, self._freeze])()
        for node in leavers:
            code = node.process.wait(PATIENCE)
            self._say(f"{node.name} ended with {code}")
            # Without a master it may not know whether what it had is elsewhere.
            node.expected = code if code in (LEFT, LEFT_UNSAVED) else LEFT
        self._add()
        self._job.wait_world(SIZE, after=before)

    def _stop(self, node: Node) -> None:
        """Its agent stands still for a moment."""
        self._say(f"{node.name} stands still")
        os.kill(node.pid, signal.SIGSTOP)
        time.sleep(self._random.uniform(0.1, 1.0))
        os.kill(node.pid, signal.SIGCONT)

    def _leave_alone(self) -> None:
        """Nothing becomes of the master."""

    def _kill(self) -> None:
        self._say("the master is killed")
        master = self._job.master_pid()
        processes.send([] if master is None else [master])

    def _freeze(self) -> None:
        """Nobody hears the master, perhaps until all leavers are gone."""
        master, seconds = self._job.master_pid(), self._random.choice([2.0, 8.0, 16.0])
        if master is None:
            return
        self._say(f"the master stands still for {seconds} s")
        os.kill(master, signal.SIGSTOP)
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(master, signal.SIGCONT)

    def _add(self) -> None:
        while len(self._job.alive()) < SIZE:
            self._made += 1
            self._job.start(f"n{self._made}")

    def _say(self, what: str) -> None:
        self.said.append(f"{time.time():.3f} {what}")


@pytest.mark.parametrize("seed", range(4))
def test_some_leave_at_any_moment(jobs: Clusters, undisturbed: Undisturbed, seed: int) -> None:
    """Each has only its own shards, and those of one or two others."""
    training = Worker(WORKERS / "dcp_worker.py", 300, 1000)
    flags = ("--quiet-time=15", f"--memory-replicas={1 + seed % 2}")
    job = jobs(nnodes=f"1:{SIZE}", agent_flags=flags, training=training, step_time=0.1, agent_environment={})
    leaves = Leaves(job, seed)
    try:
        leaves.begin()
        for _ in range(ROUNDS):
            leaves.round()
        end(job, undisturbed)
        job.assert_lost({})
    finally:
        print("\n".join(leaves.said))
