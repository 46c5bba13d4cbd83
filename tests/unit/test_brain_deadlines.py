"""Every phase has a deadline and a way out, also where nobody says another word (DESIGN 4)."""

from __future__ import annotations

import pytest

from dalsegno.agent.arguments import LEAST_NODE_TIMEOUT as LEAST_OF_AGENTS
from dalsegno.master.state import LEAST_NODE_TIMEOUT, Phase
from tests.support.masters import Driven, Node, settings

# ---- silence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [LEAST_NODE_TIMEOUT, 2.5, 6.0])
def test_a_silent_node_is_dead_however_short_the_node_timeout(timeout: float) -> None:
    """The time between two heartbeats of its peer, a second and the way, is not taken for the master's own deafness."""
    job = Driven(settings(node_timeout=timeout))
    a, b = job.start(2)
    a.step(1)
    job.silent |= {a.incarnation, b.incarnation}
    ends = job.now + timeout + 1.5
    while job.now < ends:
        job.wait(1.2)
        a.beat()
    assert not b.is_known
    assert a.is_known


@pytest.mark.parametrize("timeout", [LEAST_NODE_TIMEOUT, 6.0])
def test_when_all_are_silent_nobody_is_dead_however_short_the_node_timeout(timeout: float) -> None:
    """Deafness is seen before the first deadline passes."""
    job = Driven(settings(node_timeout=timeout))
    a, b = job.start(2)
    a.step(1)
    job.silent |= {a.incarnation, b.incarnation}
    job.wait(60)
    assert a.is_known
    assert b.is_known
    assert job.phase is Phase.RUNNING


def test_a_node_timeout_shorter_than_two_heartbeats_is_refused_at_the_door() -> None:
    """In one line that names the flag; agents know the same limit from their own command line."""
    job = Driven()
    job.start(1)
    reply = Node(job, "late").register(settings=settings(node_timeout=1.9))
    assert reply.code == "INVALID_ARGUMENT"
    assert "--node-timeout=1.9" in reply.detail
    assert LEAST_OF_AGENTS == LEAST_NODE_TIMEOUT
