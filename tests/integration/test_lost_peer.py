"""Whose end it was: a rank whose peer is gone knows it by its connections, not by the words of an error."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint import CheckpointStore
from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import Cluster, Training, Undisturbed
from tests.support.workers import lost_early_worker
from tests.support.workers import lost_peer_worker as worker
from tests.support.workers.fake_agent import FakeAgent
from tests.support.workers.zero_runs import run_world

from .test_membership import any_number, end, together
from .test_staying import worker as worker_of
from .test_staying_trainers import Trained

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("own", [False, True], ids=["killed", "its own error"])
def test_the_first_to_end_finds_its_peers_there_and_they_do_not(tmp_path: Path, own: bool) -> None:
    """Three ranks; each of the two others was connected to the one that is gone."""
    told = {"who": 1, "step": 20, "own": own, "out": str(tmp_path)}
    ended = run_world(3, [worker.__file__, json.dumps(told)])
    assert [code for code, _ in ended] == [1, 1 if own else -signal.SIGKILL, 1], "\n".join(text for _, text in ended)
    found = {
        rank: json.loads(path.read_text()) for rank in range(3) if (path := tmp_path / f"rank-{rank}.json").exists()
    }
    expected = {0: ["RuntimeError", True, True], 2: ["RuntimeError", True, True]}
    assert found == expected | ({1: ["RuntimeError", True, False]} if own else {})


def test_a_peer_that_ends_while_they_read_manifests_is_told_of_too(tmp_path: Path) -> None:
    """Before there is a session that could know it: else the agent takes the others' ends for failures of their own."""
    with FakeAgent(tmp_path, world=2, epoch=1) as agent:
        agent.start("--steps", "9", "--step-time", "0.1")
        agent.wait_for_step(2)
        agent.drain()
        assert agent.wait() == [83, 83], agent.outputs
        made = CheckpointStore(agent.run_dir).newest()
    with FakeAgent(tmp_path, world=2, epoch=2, resume=made) as agent:
        agent.start("1", script=Path(lost_early_worker.__file__))
        assert agent.wait() == [1, -signal.SIGKILL], agent.outputs
        assert len(agent.of("peer_lost")) == 1


def test_a_killed_node_is_named_and_its_quick_steps_are_counted(clusters: Callable[..., Cluster]) -> None:
    """No line blames a survivor; of steps that take milliseconds none is left out of what the death has cost."""
    job = clusters(training=Training(steps=300, save_every=100_000), nnodes="1:3", step_time=0.001)
    first = job.open("a", "b", "c")
    job.wait_step(100)
    job.kill_node(job.member(2))
    second = job.wait_world(2, after=first)
    told = job.change(second)
    made = next(span for span in job.spans() if span.epoch == first).last_step
    # A step's line is written a moment before the step is over.
    assert made - 1 <= told.resumed + told.lost <= made, told
    assert " was lost (" in told.cause
    job.finish(*job.alive())
    lines = [line for node in job.nodes for line in node.said()]
    assert not [line for line in lines if "exited with code" in line or "at least" in line]


@pytest.mark.full
def test_a_worker_killed_while_a_trainer_resumes_costs_one_start(
    clusters: Callable[..., Cluster], undisturbed: Undisturbed
) -> None:
    """The other rank waits for it in set-up, and what it then hears from gloo is no word about the checkpoint."""
    job, first = together(clusters, "a", "b", training=Trained(save_every=1, extra=("--odd", "sleeps")))
    processes.send([worker_of(job, job.member(1))], signal.SIGKILL)
    sleeps = job.wait_for(lambda: re.search(r"process (\d+) sleeps", "".join(n.text() for n in job.nodes)), "its sleep")
    processes.send([int(sleeps[1])], signal.SIGKILL)
    second = job.wait_world(2, after=first)
    assert not any("refused" in line for node in job.nodes for line in node.said())
    end(job, undisturbed, lost={second: any_number(job)})
