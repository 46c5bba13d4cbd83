"""Processes that stay through planned changes: the same ones train on in the next world, and the curve is the same."""

from __future__ import annotations

import signal

import pytest

from dalsegno.protos import control_pb2
from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import Cluster, Node, Training, Undisturbed

from .test_membership import Clusters, any_number, end, scaled, together

pytestmark = [pytest.mark.timeout(400), pytest.mark.executed]

STAYS = Training(extra=("--stay",))


def worker(job: Cluster, node: Node) -> int:
    """The process that trains on this node now."""
    return job.worker_pid(node)


def workers(job: Cluster, node: Node) -> set[int]:
    """The processes of this node that write step logs of the newest epoch."""
    suffix = f"-epoch-{job.epoch()}.jsonl"
    return {
        pid
        for pid in job.processes(node)
        if any(path.parent == job.step_log and path.name.endswith(suffix) for path in processes.open_files(pid))
    }


def two_of_three(clusters: Clusters, **options: object) -> tuple[Cluster, int]:
    """A job of two or three nodes, of which two are there; and its epoch."""
    job = clusters(**{"training": STAYS, "nnodes": "2:3", **options})
    return job, job.open("a", "b")


def left_alone(clusters: Clusters, **options: object) -> tuple[Cluster, Node, int, int]:
    """A job of at least two nodes that one of two has left: its other node and process, which waits; and the epoch."""
    job, first = two_of_three(clusters, **options)
    a, b = job.nodes
    pid = worker(job, a)
    job.leave(b)
    job.wait_exit(b)
    job.wait_status(lambda status: status.phase == control_pb2.PHASE_WAITING, "a waits for somebody")
    assert processes.is_alive(pid)
    return job, a, pid, first


def join_and_leave(job: Cluster) -> None:
    """1 to 2 to 3 nodes and back to 2: the processes of those who stay are the same."""
    job.open("a")
    (a,) = job.nodes
    first = worker(job, a)
    job.start("b")
    second = job.wait_world(2, steps=3)
    b = job.node("b")
    other = worker(job, b)
    assert worker(job, a) == first
    job.start("c")
    third = job.wait_world(3, steps=3, after=second)
    assert (worker(job, a), worker(job, b)) == (first, other)
    job.leave(job.node("c"))
    job.wait_exit(job.node("c"))
    job.wait_world(2, steps=3, after=third)
    assert (worker(job, a), worker(job, b)) == (first, other)


def a_third_comes_and_goes(job: Cluster, first: int) -> None:
    """2 to 3 nodes and back to 2: the processes of those who stay are the same."""
    pids = {node.name: worker(job, node) for node in job.nodes}
    job.start("c")
    second = job.wait_world(3, steps=3, after=first)
    assert {node.name: worker(job, node) for node in job.nodes if node.name in pids} == pids
    job.leave(job.node("c"))
    job.wait_exit(job.node("c"))
    job.wait_world(2, steps=3, after=second)
    assert {node.name: worker(job, node) for node in job.nodes if node.name in pids} == pids


def the_first_of_two_leaves(job: Cluster, first: int) -> None:
    """And another one comes: who was rank 1 is rank 0, in the same process."""
    a = next(node for node in job.nodes if job.group_ranks()[node.name] == 0)
    b = next(node for node in job.alive() if node is not a)
    pid = worker(job, b)
    job.leave(a)
    job.wait_exit(a)
    second = job.wait_world(1, steps=3, after=first)
    assert worker(job, b) == pid
    job.start("d")
    job.wait_world(2, steps=3, after=second)
    assert worker(job, b) == pid


def leave_with_the_first_ranks(job: Cluster) -> None:
    """Two ranks on each of two nodes: that with the first two leaves, and the other's processes are the same."""
    job.start("a")
    first = job.wait_world(2, steps=2)
    job.start("b")
    second = job.wait_world(4, steps=2, after=first)
    leaver = job.member(0)
    stays = next(node for node in job.nodes if node is not leaver)
    pids = workers(job, stays)
    job.leave(leaver)
    job.wait_exit(leaver)
    job.wait_world(2, steps=2, after=second)
    assert workers(job, stays) == pids


def crash_and_grow(job: Cluster, first: int) -> int:
    """A killed worker starts both nodes' anew; what is started then stays as a third one joins. The crash's epoch."""
    a, b = job.nodes
    before = worker(job, a)
    processes.send([worker(job, b)], signal.SIGKILL)
    second = job.wait_world(2, steps=3, after=first)
    after = worker(job, a)
    assert after != before
    job.start("c")
    job.wait_world(3, steps=3, after=second)
    assert worker(job, a) == after
    return second


def scale_away_and_back(job: Cluster, first: int) -> None:
    """To one node of two, whose process stays, and back: the spare's has ended meanwhile."""
    pids = {node.name: worker(job, node) for node in job.nodes}
    assert scaled(job, 1).returncode == 0
    second = job.wait_world(1, steps=3, after=first)
    spare = next(node for node in job.nodes if node.name not in job.group_ranks())
    job.wait_for(lambda: not processes.is_alive(pids[spare.name]), "the spare's process ends")
    assert scaled(job, 2).returncode == 0
    job.wait_world(2, steps=3, after=second)
    stayed = next(node for node in job.nodes if node is not spare)
    assert worker(job, stayed) == pids[stayed.name]


def test_who_stays_trains_on_through_joins_and_leaves(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """1 to 2 to 3 nodes and back to 2: nobody who stays starts anew, nobody loads, no step is lost."""
    job = clusters(training=STAYS)
    join_and_leave(job)
    end(job, undisturbed)


@pytest.mark.full
def test_a_crash_starts_all_anew_and_then_they_stay_again(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """A killed worker breaks the world for all; what is started then stays at the next planned change."""
    job, first = two_of_three(clusters)
    second = crash_and_grow(job, first)
    end(job, undisturbed, lost={second: any_number(job)})


@pytest.mark.full
def test_who_is_left_out_does_not_wait_for_ever(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """`dalsegno scale` makes a node a spare: its process ends, and another one takes the place that it gets again."""
    job, first = together(clusters, "a", "b", training=STAYS)
    scale_away_and_back(job, first)
    end(job, undisturbed)


@pytest.mark.full
def test_who_is_killed_while_it_waits_is_replaced(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Nothing is lost with it: what it held is saved. One that is stopped is replaced, too, after a while."""
    job, a, pid, first = left_alone(clusters)
    processes.send([pid], signal.SIGKILL)
    job.start("c")
    job.wait_world(2, steps=3, after=first)
    assert worker(job, a) != pid
    end(job, undisturbed)


@pytest.mark.full
def test_who_is_stopped_while_it_waits_is_replaced(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """A process that does not take its place within 20 s is killed, and another one started."""
    job, a, pid, first = left_alone(clusters)
    processes.send([pid], signal.SIGSTOP)
    job.start("c")
    job.wait_world(2, steps=3, after=first)
    assert worker(job, a) != pid
    assert not processes.is_alive(pid)
    end(job, undisturbed)


@pytest.mark.full
def test_who_waits_ends_in_order_with_its_agent(clusters: Clusters) -> None:
    """A notice that comes later: the script's own end is reached, as that of one that has drained."""
    job, a, pid, _ = left_alone(clusters, agent_environment={"DALSEGNO_TEST_LAST_WORDS": "the script has ended"})
    job.leave(a)
    job.wait_exit(a)
    assert not processes.is_alive(pid)
    assert "the script has ended" in a.text()
    assert a.said()[-1] == "left on notice; everything is saved"


@pytest.mark.full
def test_who_stays_goes_on_from_memory(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Drains into memory: the next world resumes from there, and so from what the process holds."""
    job, first = two_of_three(clusters, agent_flags=("--memory-replicas=1",))
    pids = [worker(job, node) for node in job.nodes]
    job.start("c")
    second = job.wait_world(3, steps=3, after=first)
    assert [worker(job, node) for node in job.nodes[:2]] == pids
    job.leave(job.node("c"))
    job.wait_exit(job.node("c"))
    job.wait_world(2, steps=3, after=second)
    assert [worker(job, node) for node in job.nodes[:2]] == pids
    end(job, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("loaders", ["fork", "spawn"])
def test_the_old_world_leaves_no_loaders(clusters: Clusters, undisturbed: Undisturbed, loaders: str) -> None:
    """The processes that read the data end with their world, and the next world's begin."""
    job = clusters(training=STAYS, agent_environment={"DALSEGNO_TEST_LOADERS": loaders})
    first = job.open("a")
    (a,) = job.nodes
    pid, before = worker(job, a), len(processes.children(worker(job, a)))
    for size, name in ((2, "b"), (3, "c")):
        job.start(name)
        first = job.wait_world(size, steps=3, after=first)
    assert worker(job, a) == pid
    assert before
    assert len(processes.children(pid)) == before
    end(job, undisturbed)


@pytest.mark.full
def test_who_stays_may_get_another_rank(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Two ranks on each node: the node with the first two leaves, and the others are the first two from then on."""
    job = clusters(training=STAYS, agent_flags=["--nproc-per-node=2"])
    leave_with_the_first_ranks(job)
    end(job, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("how", ["environment", "file", "behind", "subgroup", "sum"])
def test_a_group_of_the_scripts_own(clusters: Clusters, undisturbed: Undisturbed, how: str) -> None:
    """A new process makes it before its session, and who stays does so, too. Where it cannot, a line says so."""
    job, first = two_of_three(clusters, agent_environment={"DALSEGNO_TEST_JOINS": how})
    a, _ = job.nodes
    pid = worker(job, a)
    job.start("c")
    job.wait_world(3, steps=3, after=first)
    assert (worker(job, a) == pid) is (how in ("environment", "behind"))
    why = {"file": "make the default process group with a store"}.get(
        how, "exchange data, or make other process groups"
    )
    line = f"stay=True has no effect: before s.steps() the ranks of this script {why}"
    assert any(line in node.text() for node in job.nodes) is (how in ("file", "subgroup", "sum"))
    end(job, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("how", ["environment", "behind"])
def test_who_began_alone_meets_new_ones(clusters: Clusters, undisturbed: Undisturbed, how: str) -> None:
    """What the script leaves out where it is alone, new processes do: who stays follows them."""
    job = clusters(training=STAYS, nnodes="1:3", agent_environment={"DALSEGNO_TEST_JOINS": how})
    join_and_leave(job)
    end(job, undisturbed)
