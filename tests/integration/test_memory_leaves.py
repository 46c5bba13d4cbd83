"""Nodes that leave with notice, at any moment and several at once, lose no step: what only they have is taken over."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from tests.integration.test_bring_your_script import WORKERS, Worker
from tests.integration.test_memory import Clusters, end, jobs
from tests.support.jobs.attacks import STOPPED_SECONDS, Attacks
from tests.support.jobs.cluster import LEFT, LEFT_UNSAVED, PATIENCE, Node, Undisturbed

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

__all__ = ["jobs"]

SIZE, ROUNDS = 4, 4


class Leaves(Attacks):
    """What happens, to whom and when follows from a seed."""

    def round(self) -> None:
        """Some or all leave; others come in their places. No step is lost, whatever becomes of the master meanwhile."""
        before, chance = self.job.epoch(), self.random
        time.sleep(chance.uniform(0.0, 0.5))
        leavers = chance.sample(self.job.alive(), chance.randint(1, self.size))
        self.say(f"{', '.join(node.name for node in leavers)} leave")
        for node in leavers:
            self.job.leave(node)
            time.sleep(chance.choice([0.0, 0.0, 0.2, 0.6]))
        if chance.random() < 0.3:
            self._stop(chance.choice(leavers))
        time.sleep(chance.uniform(0.0, 1.5))
        chance.choice([self._leave_alone, self._kill, self._freeze])()
        for node in leavers:
            code = node.process.wait(PATIENCE)
            self.say(f"{node.name} ended with {code}")
            # Without a master it may not know whether what it had is elsewhere.
            node.expected = code if code in (LEFT, LEFT_UNSAVED) else LEFT
        self.refill()
        self.job.wait_world(self.size, after=before)

    def _stop(self, node: Node) -> None:
        """Its agent stands still for a moment."""
        self.say(f"{node.name} stands still")
        os.kill(node.pid, signal.SIGSTOP)
        time.sleep(self.random.uniform(*STOPPED_SECONDS))
        os.kill(node.pid, signal.SIGCONT)

    def _leave_alone(self) -> None:
        """Nothing becomes of the master."""

    def _kill(self) -> None:
        self.say("the master is killed")
        self.job.kill_master()

    def _freeze(self) -> None:
        """Nobody hears the master, perhaps until all leavers are gone."""
        master, seconds = self.job.master_pid(), self.random.choice([2.0, 8.0, 16.0])
        if master is None:
            return
        self.say(f"the master stands still for {seconds} s")
        os.kill(master, signal.SIGSTOP)
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(master, signal.SIGCONT)


@pytest.mark.parametrize("seed", range(4))
def test_some_leave_at_any_moment(jobs: Clusters, undisturbed: Undisturbed, seed: int) -> None:
    """Each has only its own shards, and those of one or two others."""
    training = Worker(WORKERS / "dcp_worker.py", 300, 1000)
    flags = ("--quiet-time=15", f"--memory-replicas={1 + seed % 2}")
    job = jobs(nnodes=f"1:{SIZE}", agent_flags=flags, training=training, step_time=0.1, agent_environment={})
    leaves = Leaves(job, seed, SIZE)
    try:
        leaves.begin()
        for _ in range(ROUNDS):
            leaves.round()
        end(job, undisturbed)
        job.assert_lost({})
    finally:
        print("\n".join(leaves.said))
