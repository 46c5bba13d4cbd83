"""Who is named when a world ends: who was lost or failed by itself, not who noticed it first."""

from __future__ import annotations

import pytest

from dalsegno.master.brain.announcements import NAMED_WITHIN_SECONDS
from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, all_join, settings

CLOSED = "local rank 0 exited with code 1: RuntimeError: Connection closed by peer [127.0.0.1]:1"


def lost_a_peer(node: Node) -> None:
    """Its ranks ended because a connection to another's broke."""
    request = control_pb2.FailureRequest(caller=node.caller(), kind=control_pb2.FAILURE_KIND_PEER, message=CLOSED)
    assert node.job.call(request).code == "OK"


def training(count: int) -> tuple[Driven, list[Node]]:
    job = Driven(settings(universal_checkpoint=False))
    nodes = job.start(count)
    nodes[0].step(1)
    nodes[0].commit(job.seal(1, any_size=True))
    return job, nodes


def opened(job: Driven, nodes: list[Node]) -> str:
    """The next world's line."""
    all_join(nodes)
    job.wait(2)
    nodes[0].step(2)
    (line,) = [line for line in job.notices.splitlines() if line.startswith(f"epoch {job.epoch}: ")]
    return line


def test_a_lost_node_is_named_and_no_survivor() -> None:
    """They speak first: their collective broke before the master has seen who is gone."""
    job, (a, b, c) = training(3)
    lost_a_peer(a)
    lost_a_peer(b)
    assert job.phase is Phase.FORMING
    c.hang_up()
    job.wait(2)
    line = opened(job, [a, b])
    assert f"epoch 2: {c.name} was lost (its connection closed), 2 nodes" in line
    assert "closed by peer" not in job.notices
    assert "failed" not in job.notices


@pytest.mark.parametrize("peer_first", [True, False])
def test_a_failure_of_its_own_is_named_whoever_speaks_first(peer_first: bool) -> None:
    """Its line, once, and nobody else's."""
    job, (a, b) = training(2)
    if peer_first:
        lost_a_peer(a)
    b.failed("out of memory", step=1)
    if not peer_first:
        lost_a_peer(a)
    line = opened(job, [a, b])
    assert f"epoch 2: a worker failed on {b.name}, 2 nodes" in line
    assert f"{b.name}: out of memory" in job.notices
    assert "closed by peer" not in job.notices


def test_what_nobody_explains_is_said_before_the_next_world_opens() -> None:
    """All are there: a cable, or a rank whose agent takes its error for a peer's."""
    job, (a, b) = training(2)
    lost_a_peer(a)
    lost_a_peer(b)
    line = opened(job, [a, b])
    assert f"epoch 2: the ranks of {a.name} lost a peer, 2 nodes" in line
    assert f"{a.name}: {CLOSED}; which rank ended first is not known" in job.notices
    assert job.notices.count("closed by peer") == 1
    assert job.job.run.budget.failures == 1, "it counts as any other"


def test_nobody_waits_long_for_an_explanation() -> None:
    """A silent node is not dead for a while: people hear what is known meanwhile, once."""
    job, (a, b, c) = training(3)
    c.job.silent.add(c.incarnation)
    lost_a_peer(a)
    lost_a_peer(b)
    job.wait(NAMED_WITHIN_SECONDS - 1)
    assert "closed by peer" not in job.notices
    job.wait(2)
    assert job.notices.count("which rank ended first is not known") == 1
    job.wait(10)
    assert f"{c.name} was lost" in opened(job, [a, b])
    assert job.notices.count("closed by peer") == 1


def test_a_silent_survivor_of_a_killed_node_is_not_blamed_by_the_budget_either() -> None:
    """As before: a lost node takes its world with it."""
    job, (a, b) = training(2)
    lost_a_peer(a)
    b.hang_up()
    job.wait(2)
    opened(job, [a])
    assert job.job.run.budget.failures == 0
