"""How many nodes a world may have, how long fewer wait, and what is done about ranks that stand still."""

from __future__ import annotations

import signal
import time

import pytest

from dalsegno.protos import control_pb2
from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import Training, Undisturbed
from tests.support.jobs.programs import Programs

from .test_membership import Clusters, any_number

pytestmark = pytest.mark.timeout(300)


@pytest.mark.full
def test_worlds_are_multiples_of_the_node_unit(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Two nodes, a third one stands by, four; then one is killed, and of the other three two go on."""
    job = clusters(nnodes="2:4", agent_flags=["--node-unit=2"])
    second = job.open("a", "b", steps=2)
    job.start("c")
    job.wait_line("c is a spare", job.node("c"))
    job.start("d")
    fourth = job.wait_world(4, steps=2, after=second)
    assert fourth == second + 1
    job.kill_node(job.node("b"))
    last = job.wait_world(2, steps=2, after=fourth)
    status = job.wait_status(lambda status: len(status.nodes) == 3, "three nodes")
    assert [node.role for node in status.nodes].count("spare") == 1
    job.finish()
    job.assert_lost({last: any_number(job)})
    job.assert_undisturbed(undisturbed)


def test_fewer_than_the_minimum_wait_only_so_long(clusters: Clusters) -> None:
    job = clusters(nnodes="2:2", agent_flags=["--wait-for-nodes=6"])
    begun = time.monotonic()
    (a,) = job.start("a")
    a.expected = 1
    job.wait_exit(a)
    assert time.monotonic() - begun >= 6
    assert "1 here, at least 2 needed for 6 s (--wait-for-nodes)" in a.text()


@pytest.mark.full
def test_ranks_that_stand_still_are_started_again(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """One rank stops in the middle of a step, and the other waits for it in a collective."""
    job = clusters(training=Training(steps=80), agent_flags=["--stall-timeout=12"])
    first = job.open("a", "b", steps=12)
    processes.send([job.worker_pid(job.node("b"))], signal.SIGSTOP)
    job.wait_line(r"no rank made a step for \d+ s \(--stall-timeout\)")
    second = job.wait_world(2, steps=2, after=first)
    assert job.change(second).cause == "stalled"
    status = job.wait_status(lambda status: status.phase == control_pb2.PHASE_RUNNING, "running")
    assert status.epoch == second
    job.finish()
    job.assert_lost({second: any_number(job)})
    job.assert_undisturbed(undisturbed)


STRANDED = """
import errno, os, sys
import torch.distributed as dist
from dalsegno.elastic import session

s = session()
dist.init_process_group("gloo")

def save(path):
    if s.rank == 0:
        if not os.path.exists("was-full"):
            open("was-full", "w").close()
            raise OSError(errno.ENOSPC, "No space left on device")
        (path / "weights").write_bytes(b"1")
    dist.barrier()

for _ in s.steps([1] * 4, advanced=True, save=save, max_steps=4, save_every=2):
    pass
"""


def test_a_rank_of_several_nodes_that_cannot_save_is_ended_by_the_master(programs: Programs) -> None:
    """It does not see what other nodes write, which the master hears. It says why, and the run goes on."""
    (programs.directory / "script.py").write_text(STRANDED)
    flags = ("--nnodes=2", "--stall-timeout=16", "script.py")
    nodes = [programs.agent(name, *flags) for name in ("first", "second")]
    assert [node.wait(150) for node in nodes] == [0, 0]
    said = programs.log("first") + programs.log("second")
    waits = "rank 0 cannot save its part of step-2.e1.1, and the other ranks have not come yet: OSError: [Errno 28] No"
    assert said.count(f"dalsegno: {waits}") == 1
    assert "If they wait for it in a barrier, in 16 s without a byte from any node the master ends this world" in said
    assert "no rank made a step for 16 s (--stall-timeout)" in said
    assert "SaveError" not in said
