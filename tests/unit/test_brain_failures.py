"""The failure budget where there are more nodes than a world takes: spares must not hide that the script is broken."""

from __future__ import annotations

import pytest

from dalsegno.master.state import Phase
from tests.support.masters import Driven, Node, settings


def restart(job: Driven, failing: list[Node], *, slow: Node, hangs: bool) -> None:
    """All workers of the world end with an error, or one hangs until it is stopped; that node joins last."""
    for node in failing:
        if not (hangs and node is slow):
            node.failed()
    for node in job.nodes:
        if node is not slow and job.phase is Phase.FORMING:
            node.join()
    job.wait(1)
    if not job.phase.is_terminal:
        slow.join()


@pytest.mark.parametrize("hangs", [False, True])
def test_a_slow_member_whose_place_a_spare_took_is_no_loss(hangs: bool) -> None:
    """Worlds of two of three nodes: each time the slowest is left out, and was there all the time."""
    job = Driven(settings(max_nodes=2, max_restarts=2))
    a, b = job.start(2)
    a.step(1)
    c = job.node()
    c.join()
    for number in range(8):
        if job.phase is Phase.FAILED:
            break
        members = [node for node in (a, b, c) if node.name in job.members]
        restart(job, members, slow=members[number % 2], hangs=hangs)
    assert job.phase is Phase.FAILED
    assert "3 failures without progress" in job.job.message


def test_a_member_that_was_lost_after_all_is_no_failure_of_the_script() -> None:
    """Silent when the next world opened with a spare, and declared dead only then."""
    job = Driven(settings(max_nodes=2, max_restarts=0, node_timeout=12.0))
    a, b = job.start(2)
    a.step(1)
    c = job.node()
    c.join()
    job.silent.add(b.incarnation)
    a.failed()
    a.join()
    c.join()
    job.wait(1)
    assert job.phase is Phase.RUNNING
    assert set(job.members) == {a.name, c.name}
    job.wait(20)
    c.hang_up()
    job.wait(3)
    a.failed()
    a.join()
    job.wait(3)
    assert job.phase is Phase.RUNNING, job.job.message
