"""Who takes what a script without a session saved last, where the first node of its world is gone."""

from __future__ import annotations

import pytest

from dalsegno.master.brain.state import Phase
from dalsegno.master.brain.views import Common
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, all_join, settings


def opened(count: int, job: Driven | None = None, **fields: bool) -> tuple[Driven, list[Node]]:
    job = job or Driven()
    return job, job.start(count, **{"adopts": True, **fields})


def asked(node: Node) -> int:
    """In which epoch it is asked to look; 0: it is not."""
    return node.directive.gather.take.epoch


def takes(node: Node, *found: control_pb2.Checkpoint) -> None:
    """It has looked, and sealed what it found."""
    message = node.joining([*node.job.sealed, *found])
    message.took = asked(node)
    assert node.job.call(message).code == "OK"


def lost(*nodes: Node) -> None:
    for node in nodes:
        node.hang_up()
    nodes[0].job.wait(3)


def test_the_next_in_rank_order_looks_and_the_world_waits_for_it() -> None:
    """What it found is the resume point of all."""
    job, (a, b, c) = opened(3)
    a.save(10, any_size=True)
    lost(a)
    b.join()
    c.join()
    assert (asked(b), asked(c), job.phase) == (1, 0, Phase.FORMING)
    take = b.directive.gather.take
    assert (take.run_id, take.world_size, take.HasField("resume")) == ("run-0001", 3, False)
    assert (take.store_host, take.store_port) == ("", 0)
    takes(b, job.seal(20, any_size=True))
    assert (asked(b), job.phase) == (0, Phase.FORMING), "all see it now"
    all_join([b, c])
    assert (job.phase, job.epoch) == (Phase.RUNNING, 2)
    assert b.directive.run.resume.source.step == 20
    assert f"was saved just before a node was lost, and {b.name} has taken it: it counts" in job.notices


def test_nothing_found_holds_nobody_up() -> None:
    """The world opens with its Join."""
    job, (a, b) = opened(2)
    lost(a)
    b.join()
    assert (asked(b), job.epoch) == (1, 1)
    takes(b)
    assert (job.phase, job.epoch) == (Phase.RUNNING, 2)


def test_a_first_node_that_is_there_has_looked_itself() -> None:
    """Another one is lost: nobody else looks."""
    job, (a, b, c) = opened(3)
    lost(c)
    a.join()
    b.join()
    assert (job.phase, job.epoch) == (Phase.RUNNING, 2)


def test_the_first_nodes_join_is_waited_for_though_others_make_the_world_full() -> None:
    """With a spare there are enough nodes without it; but what it takes last comes with its Join."""
    job, (a, b) = opened(2, Driven(settings(max_nodes=2)))
    spare = job.node(adopts=True)
    spare.join()
    b.failed()
    b.join()
    spare.join()
    assert (job.phase, asked(b)) == (Phase.FORMING, 0)
    a.join()
    assert (job.phase, job.epoch) == (Phase.RUNNING, 2)


def test_the_next_one_looks_where_the_one_that_looked_is_lost_too() -> None:
    job, (a, b, c) = opened(3)
    lost(a)
    b.join()
    c.join()
    assert (asked(b), asked(c)) == (1, 0)
    lost(b)
    assert asked(c) == 1
    takes(c)
    assert (job.phase, job.members) == (Phase.RUNNING, [c.name])


def test_who_comes_first_looks_where_nobody_is_left() -> None:
    """The same command after a kill of the only node: its report counts."""
    job, (a,) = opened(1)
    lost(a)
    again = job.node(adopts=True)
    while job.phase is Phase.RUNNING:
        job.wait(1.0)
    assert (asked(again), job.phase) == (1, Phase.FORMING)
    takes(again, job.seal(20))
    all_join([again])
    job.wait(2)
    assert (job.phase, again.directive.run.resume.source.step) == (Phase.RUNNING, 20)


def test_one_that_does_not_answer_is_waited_for_no_longer_than_others() -> None:
    """It has joined before, and hangs in a file system: said after a while, and again at the end."""
    job, (a, b) = opened(2, Driven(settings(join_timeout=30)))
    lost(a)
    b.join()
    job.wait(10)
    assert f"waiting for {b.name}, which takes what the script saved last" in job.notices
    assert job.phase is Phase.FORMING
    job.wait(25)
    assert f"{b.name} has not taken what the script saved last within 30 s" in job.notices
    assert job.phase is Phase.RUNNING


@pytest.mark.parametrize("why", ["nobody adopts", "a session"])
def test_nobody_is_asked_where_nothing_can_be_taken(why: str) -> None:
    """Then a loss costs no further question."""
    job, (a, b) = opened(2, adopts=why == "a session")
    if why == "a session":
        a.step(1)
        b.step(1)
    lost(a)
    b.join()
    assert (job.phase, job.epoch) == (Phase.RUNNING, 2)


def test_the_word_of_an_earlier_epoch_does_not_count() -> None:
    """A Join that was on its way when the world changed again."""
    job, (a, b, c) = opened(3)
    lost(a)
    b.join()
    c.join()
    message = b.joining()
    message.took = job.epoch + 7
    job.call(message)
    assert asked(b) == 1
    message = c.joining()
    message.took = 1
    job.call(message)
    assert asked(b) == 1, "somebody else's word"


def test_scripts_that_save_elsewhere_do_not_wait_for_the_first_node() -> None:
    """Nothing comes with its Join, and there are enough nodes without it."""
    job, (a, b) = opened(2, Driven(settings(max_nodes=2)), adopts=False)
    spare = job.node()
    spare.join()
    b.failed()
    b.join()
    spare.join()
    assert (job.phase, job.epoch) == (Phase.RUNNING, 2)
    assert a.name not in job.members


def test_nobody_looks_once_the_run_went_back() -> None:
    """What that world saved last does not count any more, by order."""
    job, (a, b) = opened(2)
    a.save(10, any_size=True)
    a.save(20, any_size=True)
    lost(a, b)
    again = job.node(adopts=True, resume_step=10)
    while job.phase is Phase.RUNNING:
        job.wait(1.0)
    again.join()
    job.wait(2)
    assert (asked(again), job.phase) == (0, Phase.RUNNING)
    assert again.directive.run.resume.source.step == 10


def test_one_that_leaves_is_not_asked() -> None:
    """It would be gone before it had looked."""
    _, (a, b, c) = opened(3)
    lost(a)
    b.join()
    c.join()
    b.leave()
    assert (asked(b), asked(c)) == (0, 1)


def test_one_that_does_not_even_join_is_asked_no_longer() -> None:
    """Its agent lives and does not answer; another one can look."""
    job, (a, b, c) = opened(3, Driven(settings(join_timeout=5)))
    lost(a)
    c.join()
    assert (asked(b), asked(c)) == (1, 0)
    job.wait(6)
    assert (asked(b), asked(c)) == (0, 1)


def test_who_is_asked_hears_it_at_once() -> None:
    """The directives change with it."""
    job, (a, _) = opened(2)
    lost(a)
    before = Common(job.state)
    assert Common(job.state).says_the_same(before)
    job.state.live.gathering.taker = "another"
    assert not Common(job.state).says_the_same(before)
