"""What each node has of a step in memory, where its ranks load what lies in their place: not more than it needs."""

from __future__ import annotations

import os
import signal

import pytest

from tests.integration.test_bring_your_script import WORKERS, Worker
from tests.integration.test_memory import EVERY, FREE, HELD, STEPS, Clusters, end, jobs, memory_of, wait_durable
from tests.integration.test_memory_shards import OF_A_TRAINER, wait_copies
from tests.support.jobs.cluster import TRAIN, Cluster, Node, Training, Undisturbed

pytestmark = [pytest.mark.timeout(300), pytest.mark.full]

__all__ = ["jobs"]

FSDP = pytest.param(OF_A_TRAINER, id="fsdp")
ZERO1 = pytest.param(Training(script=TRAIN, steps=STEPS, save_every=1000, extra=("--zero-stage=1",)), id="zero1")
KINDS = [
    FSDP,
    ZERO1,
    pytest.param(Training(steps=STEPS, save_every=1000), id="ddp"),
    pytest.param(Training(script=TRAIN, steps=STEPS, save_every=1000, extra=("--zero-stage=3",)), id="zero3"),
]
MISTAKEN = Worker(WORKERS / "dcp_worker.py", STEPS, 1000, extra=("--mistaken",))


def parts_of(job: Cluster, node: Node, step: int = HELD) -> set[int]:
    """Which parts of a step are in a node's memory."""
    return {int(note.stem) for note in memory_of(node, job).glob(f"step-{step}.e*.parts/*.json")}


def four(jobs: Clusters, training: Training = OF_A_TRAINER, **options: object) -> tuple[Cluster, int]:
    """A world of four nodes and a step in their memory: with each its own part, and that of the one before it."""
    job = jobs(**{"nnodes": "4:4", "agent_flags": ("--quiet-time=60",), "training": training, **options})
    first = job.open(*"abcd")
    wait_copies(job, 2)
    assert [parts_of(job, job.member(rank)) for rank in range(4)] == [{0, 3}, {0, 1}, {1, 2}, {2, 3}]
    return job, first


def names(job: Cluster) -> str:
    """The nodes of the world, by their group ranks."""
    return "".join(job.member(rank).name for rank in range(4))


@pytest.mark.parametrize("training", KINDS)
def test_a_rank_that_dies(jobs: Clusters, undisturbed: Undisturbed, training: Training) -> None:
    """All nodes stay: each fetches the first part besides, in which lies what is alike on all ranks."""
    job, first = four(jobs, training)
    before = names(job)
    os.kill(job.worker_pid(job.member(2)), signal.SIGKILL)
    second = job.wait_world(4, after=first)
    assert job.change(second).resumed == HELD
    assert names(job) == before
    assert [parts_of(job, job.member(rank)) for rank in range(4)] == [{0, 3}, {0, 1}, {0, 1, 2}, {0, 2, 3}]
    wait_durable(job, HELD)
    end(job, undisturbed)
    job.assert_lost({second: range(1, EVERY + FREE + 1)})


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("waits", [True, False])
def test_a_node_in_place_of_another(jobs: Clusters, undisturbed: Undisturbed, rank: int, waits: bool) -> None:
    """A spare, or one that comes later: who stays keeps its place, and has its part there."""
    job, first = four(jobs)
    before = names(job)
    if waits:
        job.start("new")
        job.wait_line("new is a spare")
    job.kill_node(job.member(rank))
    if not waits:
        job.start("new")
    second = job.wait_world(4, after=first)
    assert job.change(second).resumed == HELD
    others = before.replace(before[rank], "")
    expected = [*others[:rank], "new", *others[rank:]] if rank else [others[0], "new", *others[1:]]
    assert [job.member(place).name for place in range(4)] == expected
    assert parts_of(job, job.node("new")) == ({0, rank - 1, rank} if rank else {0, 1})
    wait_durable(job, HELD)
    end(job, undisturbed)


def test_a_spare_forgets_what_worlds_began_with(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """It fetches the first part with each change, and none of the worlds is its own: its memory would fill."""
    job, first = four(jobs)
    job.start("new")
    job.wait_line("new is a spare")
    os.kill(job.worker_pid(job.member(2)), signal.SIGKILL)
    job.wait_world(4, after=first)
    wait_durable(job, HELD)
    job.wait_for(lambda: not parts_of(job, job.node("new")), "the spare to forget it", 30)
    end(job, undisturbed)


@pytest.mark.parametrize("training", [FSDP, ZERO1])
def test_nodes_of_two_ranks(jobs: Clusters, undisturbed: Undisturbed, training: Training) -> None:
    """A part is a node's: both of its ranks find theirs there, whoever comes in place of whom."""
    job = jobs(nnodes="3:3", agent_flags=("--quiet-time=60", "--nproc-per-node=2"), training=training)
    job.start(*"abc")
    first = job.wait_world(6)
    wait_copies(job, 2)
    job.kill_node(job.member(1))
    job.start("new")
    second = job.wait_world(6, after=first)
    assert job.change(second).resumed == HELD
    assert job.member(1).name == "new"
    assert [parts_of(job, job.member(rank)) for rank in range(3)] == [{0, 2}, {0, 1}, {0, 1, 2}]
    end(job, undisturbed)


@pytest.mark.parametrize("training", KINDS)
def test_a_smaller_world(jobs: Clusters, undisturbed: Undisturbed, training: Training) -> None:
    """Its ranks load other ranges than those that saved: each node fetches the parts in which its ranges lie."""
    job, first = four(jobs, training, nnodes="1:4")
    job.kill_node(job.member(3))
    second = job.wait_world(3, after=first)
    assert job.change(second).resumed == HELD
    # Two nodes are to have each part, and what each has already stays there.
    assert [parts_of(job, job.member(rank)) for rank in range(3)] == [{0, 1, 3}, {0, 1, 2}, {0, 1, 2, 3}]
    wait_durable(job, HELD)
    end(job, undisturbed)


@pytest.mark.parametrize("training", KINDS)
def test_a_larger_world(jobs: Clusters, undisturbed: Undisturbed, training: Training) -> None:
    """Who comes fetches the parts in which its ranges lie; the others have most of theirs."""
    job = jobs(nnodes="3:4", agent_flags=("--quiet-time=60",), training=training)
    first = job.open(*"abc")
    wait_copies(job, 2)
    job.start("new")
    second = job.wait_world(4, after=first)
    step = job.change(second).resumed
    assert [parts_of(job, job.member(rank), step) for rank in range(4)] == [{0, 2}, {0, 1}, {0, 1, 2}, {0, 2}]
    end(job, undisturbed)


@pytest.mark.parametrize("smaller", [False, True])
def test_ranks_that_load_more_than_they_say(jobs: Clusters, undisturbed: Undisturbed, smaller: bool) -> None:
    """A world cannot start with the parts that its nodes have: the next one has all of them, and no step is lost."""
    job, first = four(jobs, MISTAKEN, nnodes="1:4")
    nodes = 3 if smaller else 4
    if smaller:
        job.kill_node(job.member(3))
    else:
        os.kill(job.worker_pid(job.member(2)), signal.SIGKILL)
    third = job.wait_world(nodes, after=first + 1)
    assert job.change(third).resumed == HELD
    job.wait_line("each node had only its parts of step-")
    assert [parts_of(job, job.member(rank)) for rank in range(nodes)] == [{0, 1, 2, 3}] * nodes
    end(job, undisturbed)
