"""A script that fails at some numbers of nodes: a newcomer ends no healthy job, and what failed is not tried again."""

from __future__ import annotations

import pytest

from dalsegno.master.brain.shapes import LIVED_SECONDS, RETRY_SECONDS
from dalsegno.master.brain.state import Phase
from dalsegno.master.brain.views import Common
from dalsegno.protos import control_pb2
from dalsegno.protos.contract import COUNTED_BY_TORCHRUN
from tests.support.jobs.masters import Driven, Node, all_join, settings


def joins(job: Driven, among: list[Node]) -> Node:
    """A newcomer that the world is to grow by. `among`: all others."""
    late = job.node()
    late.join()
    late.warm()
    if job.job.has_session:
        step = job.state.live.epoch.top_step
        for node in among:
            if node.name in job.members:
                node.step(step + 1)
        for node in among:
            if node.name in job.members:
                node.drained(step + 1)
    else:
        job.wait(job.settings.grow_wait + 1)
    all_join([*among, late])
    job.wait(1)
    return late


def fail(job: Driven, nodes: list[Node], message: str = "4 micro-batches on 3 ranks") -> None:
    """The script's own failure, on all ranks of the world; everybody joins again."""
    for node in nodes:
        if node.name in job.members:
            node.failed(message)
    all_join(nodes)
    job.wait(1)


def pair(heard: bool = True, **changes: int | float) -> tuple[Driven, Node, Node]:
    """Two nodes that train: heard of, or without a session."""
    job = Driven(settings(**{"max_restarts": 0, "grow_wait": 5.0, "stall_timeout": 1000.0, **changes}))
    a, b = job.start(2)
    if heard:
        a.step(1)
        b.step(1)
    else:
        job.wait(40)
    return job, a, b


@pytest.mark.parametrize("heard", [True, False])
def test_a_newcomer_ends_no_healthy_job(heard: bool) -> None:
    """Two go on although three cannot, without a failure counted; the newcomer is a spare and knows why."""
    job, a, b = pair(heard)
    c = joins(job, [a, b])
    assert set(job.members) == {a.name, b.name, c.name}
    fail(job, [a, b, c])
    if not heard:
        fail(job, [a, b, c])  # Whether it had trained nobody knew, so it was tried once more.
    last = job.epoch
    assert (job.phase, set(job.members)) == (Phase.RUNNING, {a.name, b.name})
    assert job.job.run.budget.failures == 0
    (line,) = [line for line in job.notices.splitlines() if "with 3 nodes the script failed at its start" in line]
    assert "goes on with 2" in line
    assert f"{c.name} is a spare" in line
    assert "3 are tried again" in line
    assert c.order == "wait"
    assert "4 micro-batches on 3 ranks" in c.directive.wait.reason
    job.wait(2 * RETRY_SECONDS)
    assert (job.phase, job.epoch) == (Phase.RUNNING, last), "what failed is not tried again"


def test_why_it_waits_depends_on_who_else_comes() -> None:
    """So its directive is made anew when somebody does."""
    job, a, b = pair()
    c = joins(job, [a, b])
    fail(job, [a, b, c])
    before = Common(job.state)
    assert Common(job.state).says_the_same(before)
    job.node()
    assert not Common(job.state).says_the_same(before)


def test_spares_that_are_ready_first_do_not_hide_what_failed() -> None:
    """They would fill the next world at once, and the failure of this one would count as the script's own."""
    job, a, b = pair(max_nodes=3)
    spares = [job.node() for _ in range(3)]
    c = joins(job, [a, b])
    for spare in spares:
        spare.join()
    world = [node for node in (a, b, c, *spares) if node.name in job.members]
    assert len(world) == 3
    for node in world:
        node.failed("4 micro-batches on 3 ranks")
    for node in (*spares, c, a):
        node.join()
    job.wait(0.5)
    assert job.phase is Phase.FORMING
    all_join([a, b, c, *spares])
    job.wait(1)
    assert (job.phase, set(job.members)) == (Phase.RUNNING, {a.name, b.name})
    assert job.job.run.budget.failures == 0


def test_who_does_not_come_back_behind_a_failed_growth_is_not_waited_for_long() -> None:
    """The next world then shows whether it was the shape."""
    job, a, b = pair(max_nodes=3, max_restarts=3)
    spares = [job.node() for _ in range(2)]
    c = joins(job, [a, b])
    for node in (a, b, c):
        node.failed("4 micro-batches on 3 ranks")
    for node in (*spares, c, a):
        node.join()
    job.wait(job.settings.join_timeout + 1)
    assert job.phase is Phase.RUNNING
    assert b.name not in job.members


def test_one_crash_that_nobody_heard_a_step_before_makes_no_spare() -> None:
    """A worker of a script without a session crashes soon after a growth: all start again, and no failure counts."""
    job, a, b = pair(heard=False)
    c = joins(job, [a, b])
    fail(job, [a, b, c], "connection reset")
    assert (job.phase, set(job.members)) == (Phase.RUNNING, {a.name, b.name, c.name})
    assert job.job.run.budget.failures == 0
    (line,) = [line for line in job.notices.splitlines() if "it is tried once more" in line]
    assert "no steps are heard" in line
    assert "spare" not in line
    assert "tried once more, 3 nodes" in job.notices
    job.restart()
    for node in (a, b, c):
        node.beat()
    job.wait(LIVED_SECONDS + 20)
    fail(job, [a, b, c], "connection reset")
    assert job.phase is Phase.FAILED, "it had worked: this is the script's own"


def test_the_second_crash_of_a_number_is_its_own_also_for_another_newcomer() -> None:
    """What is tried once more is the number of workers, not every node that comes."""
    job, a, b = pair(heard=False)
    c = joins(job, [a, b])
    fail(job, [a, b, c])
    c.hang_up()
    job.wait(3)
    all_join([a, b])
    job.wait(1)
    d = joins(job, [a, b])
    assert set(job.members) == {a.name, b.name, d.name}
    fail(job, [a, b, d])
    assert (job.phase, set(job.members)) == (Phase.RUNNING, {a.name, b.name})


def test_another_number_of_nodes_is_tried_at_once() -> None:
    """Four divides, and takes in the spare that made three."""
    job, a, b = pair()
    c = joins(job, [a, b])
    fail(job, [a, b, c])
    a.step(5)
    d = joins(job, [a, b, c])
    assert set(job.members) == {node.name for node in (a, b, c, d)}


def test_a_loss_does_not_lead_to_what_failed() -> None:
    """Four train, one dies: two go on, as three had failed before."""
    job, a, b = pair()
    c = joins(job, [a, b])
    fail(job, [a, b, c])
    d = joins(job, [a, b, c])
    for node in (a, b, c, d):
        node.step(9)
    d.hang_up()
    job.wait(2)
    all_join([a, b, c])
    job.wait(1)
    assert (job.phase, set(job.members)) == (Phase.RUNNING, {a.name, b.name})
    assert c.name in "".join(c.directive.wait.reason)


def test_what_is_left_after_a_loss_may_be_too_few_for_the_script() -> None:
    """Three never worked, and four did: that is tried twice, and not counted; then two are tried, and one."""
    job = Driven(settings(max_restarts=0))
    nodes = job.start(4)
    for node in nodes:
        node.step(1)
    nodes[3].hang_up()
    job.wait(2)
    all_join(nodes[:3])
    job.wait(1)
    for size in (3, 3, 2, 2, 1):
        assert (job.phase, len(job.members)) == (Phase.RUNNING, size)
        fail(job, nodes[:3], "bad data")
    fail(job, nodes[:3], "bad data")
    assert job.phase is Phase.FAILED, "nothing is left to try"
    assert job.notices.count("has never worked with so many: it is tried once more") == 3


def test_a_failure_of_what_worked_counts() -> None:
    """Back at two nodes the script fails, too: that is no newcomer's doing."""
    job, a, b = pair()
    c = joins(job, [a, b])
    fail(job, [a, b, c])
    fail(job, [a, b, c], "bad data")
    assert job.phase is Phase.FAILED
    assert "bad data" in job.job.message


def test_a_failure_after_a_step_counts() -> None:
    """Three nodes have worked, so their number is not what is wrong."""
    job, a, b = pair()
    c = joins(job, [a, b])
    for node in (a, b, c):
        node.step(7)
    fail(job, [a, b, c])
    assert job.phase is Phase.FAILED


def test_a_long_life_without_a_session_counts_as_work() -> None:
    """Nobody hears of steps; a world that fails after hours did not fail because of its number."""
    job, a, b = pair(heard=False)
    c = joins(job, [a, b])
    job.wait(LIVED_SECONDS + 10)
    fail(job, [a, b, c])
    assert job.phase is Phase.FAILED


def test_who_was_lost_is_not_the_shapes_fault() -> None:
    """The newcomer dies in the middle of its first start: three are tried again with the next one."""
    job, a, b = pair()
    c = joins(job, [a, b])
    a.failed("connection closed")
    c.hang_up()
    job.wait(2)
    all_join([a, b])
    job.wait(8)
    assert (job.phase, len(job.members)) == (Phase.RUNNING, 2)
    assert not job.job.run.shapes.failed


def test_a_newcomer_that_fails_where_the_number_had_worked() -> None:
    """Its own machine lacks something: the others go on without it."""
    job, a, b = pair()
    c = joins(job, [a, b])
    for node in (a, b, c):
        node.step(7)
    c.hang_up()
    job.wait(3)
    all_join([a, b])
    job.wait(1)
    for node in (a, b):
        node.step(8)
    broken = joins(job, [a, b])
    fail(job, [a, b, broken], "no such file")
    assert (job.phase, set(job.members)) == (Phase.RUNNING, {a.name, b.name})


def test_another_newcomer_may_try_after_a_while() -> None:
    """Doubling pauses lie between two such trials, and whoever failed is left out."""
    job, a, b = pair(max_nodes=3)
    c = joins(job, [a, b])
    fail(job, [a, b, c])
    a.step(20)
    d = job.node()
    d.join()
    d.warm()
    job.wait(1)
    said = f"{d.name} joined: with 3 nodes the script failed at its start; they are tried again with {d.name}; at most"
    (line,) = [line for line in job.notices.splitlines() if said in line]
    assert "27 s" in line or "28 s" in line or "29 s" in line
    job.wait(RETRY_SECONDS - 11)
    assert job.phase is Phase.RUNNING
    job.wait(11)
    assert job.phase is Phase.DRAINING
    for node in (a, b):
        node.drained(21)
    all_join([a, b, c, d])
    job.wait(1)
    assert set(job.members) == {a.name, b.name, d.name}
    fail(job, [a, b, c, d])
    assert (job.phase, set(job.members)) == (Phase.RUNNING, {a.name, b.name})
    (shape,) = job.job.run.shapes.failed
    assert shape.failures == 2
    for node in (c, d):
        assert "is a spare" in node.directive.wait.reason


@pytest.mark.parametrize("heard", [True, False])
def test_a_newcomer_beside_who_was_new_when_it_failed_is_told_why_it_waits(heard: bool) -> None:
    """A trained node dies, and the spare takes its place: three of these would have it in them once more."""
    job, a, b = pair(heard)
    c = joins(job, [a, b])
    fail(job, [a, b, c])
    if not heard:
        fail(job, [a, b, c])
    b.hang_up()
    job.wait(2)
    all_join([a, c])
    job.wait(3 * RETRY_SECONDS)
    assert set(job.members) == {a.name, c.name}
    if heard:
        a.step(50)
        c.step(50)
    d = job.node()
    d.join()
    d.warm()
    job.wait(1)
    assert d.order == "wait"
    assert f"{d.name} is a spare: with 3 nodes the script failed at its start" in d.directive.wait.reason
    job.wait(3 * RETRY_SECONDS)
    assert set(job.members) == {a.name, c.name}


def test_a_new_master_knows_what_failed() -> None:
    """And does not try it again."""
    job, a, b = pair()
    c = joins(job, [a, b])
    fail(job, [a, b, c])
    a.step(30)
    job.restart()
    for node in (a, b, c):
        node.beat()
    all_join([c])
    job.wait(3 * RETRY_SECONDS)
    assert (job.phase, job.epoch, len(job.members)) == (Phase.RUNNING, 3, 2)


def test_all_agents_started_anew_try_it_again() -> None:
    """With other arguments, perhaps."""
    job, a, b = pair(min_nodes=2)
    c = joins(job, [a, b])
    fail(job, [a, b, c])
    for node in (a, b, c):
        node.hang_up()
    again = [job.node() for _ in range(3)]
    job.wait(12)
    all_join(again)
    job.wait(3)
    assert len(job.members) == 3


def test_a_script_that_fails_at_a_new_start_of_what_worked_counts() -> None:
    """All agents were started anew, with a mistake: the number of nodes is not what is wrong."""
    job, a, b = pair(min_nodes=1)
    for node in (a, b):
        node.hang_up()
    again = [job.node() for _ in range(2)]
    job.wait(12)
    all_join(again)
    job.wait(3)
    assert len(job.members) == 2
    fail(job, again, "no such flag")
    assert job.phase is Phase.FAILED


def test_who_scales_the_job_wants_it_tried() -> None:
    """It fails again, perhaps, and then is not tried again."""
    job, a, b = pair()
    c = joins(job, [a, b])
    fail(job, [a, b, c])
    a.step(30)
    b.step(30)
    assert job.scale(3).code == "OK"
    assert job.phase is Phase.DRAINING
    for node in (a, b):
        node.drained(31)
    all_join([a, b, c])
    job.wait(1)
    fail(job, [a, b, c])
    a.step(40)
    job.wait(RETRY_SECONDS + 15)
    assert (job.phase, len(job.members)) == (Phase.RUNNING, 2)


def test_a_stall_at_the_start_of_a_grown_world_is_one() -> None:
    """The newcomer's network does not reach the others: nobody fails, and nobody makes a step."""
    job, a, b = pair(stall_timeout=40.0)
    c = joins(job, [a, b])
    job.wait(40)
    all_join([a, b, c])
    job.wait(1)
    assert (job.phase, set(job.members)) == (Phase.RUNNING, {a.name, b.name})


# ---- pauses between restarts -----------------------------------------------------------------------------------------


def test_restarts_without_progress_take_longer_each_time() -> None:
    """At once after the first failure, then after growing pauses, each of which is said; a commit ends that."""
    job = Driven(settings(max_restarts=10, stall_timeout=1000.0))
    (a,) = job.start(1)
    a.step(1)
    pauses = []
    for _ in range(5):
        epoch, since = job.epoch, job.now
        a.failed()
        a.join()
        while job.epoch == epoch:
            job.wait(0.25)
        pauses.append(job.now - since)
    assert pauses == pytest.approx([0.0, 1.0, 2.0, 4.0, 8.0], abs=0.5)
    said = [line for line in job.notices.splitlines() if "start again in" in line]
    assert len(said) == 4
    assert "in 8 s" in said[-1]
    a.save(2)
    epoch = job.epoch
    a.failed()
    a.join()
    assert job.epoch == epoch + 1


def test_who_counts_restarts_itself_is_not_counted() -> None:
    """torchrun has a --max-restarts of its own: the job ends by no other, and no line speaks of one."""
    job = Driven(settings(max_restarts=COUNTED_BY_TORCHRUN, stall_timeout=1000.0))
    (a,) = job.start(1)
    for failures in range(1, 9):
        a.failed()
        a.join()
        job.wait(70)
        assert (job.phase, job.job.run.budget.failures) == (Phase.RUNNING, failures)
    said = [line for line in job.notices.splitlines() if "start again in" in line]
    assert said[-1].endswith("8 failures without progress, the last one on host-0: the workers start again in 60 s")


def test_a_pause_between_restarts_is_bounded_and_holds_up_nothing_planned() -> None:
    """At most a minute; a leave meanwhile goes at once."""
    job = Driven(settings(max_restarts=100, stall_timeout=1000.0))
    a, b = job.start(2)
    a.step(1)
    for _ in range(12):
        a.failed()
        all_join([a, b])
        job.wait(70)
        assert job.phase is Phase.RUNNING
    a.failed()
    all_join([a, b])
    job.wait(1)
    assert job.phase is Phase.FORMING
    b.leave()
    job.wait(1)
    assert b.order == "release"


@pytest.mark.parametrize("told", ["nothing", "of a peer", "first of a peer"])
def test_who_cannot_take_part_is_replaced_and_the_newcomer_trains(told: str) -> None:
    """Ranks that drain by themselves before the first step begin anew at once: nobody waits, or is left out."""
    job, a, b = pair()
    c = joins(job, [a, b])
    assert set(job.members) == {a.name, b.name, c.name}
    lost = control_pb2.FailureRequest(caller=c.caller(), kind=control_pb2.FAILURE_KIND_PEER, message="a peer")
    if told == "first of a peer":
        assert job.call(lost).code == "OK"
    assert job.job.world is not None
    a.drained(job.job.world.resumed_step)
    if told == "of a peer":
        job.call(lost)
    all_join([a, b, c])
    job.wait(1)
    assert (job.phase, set(job.members)) == (Phase.RUNNING, {a.name, b.name, c.name})
    assert "is a spare" not in job.notices
    a.step(5)
    if told == "nothing":
        assert f"the workers of {a.name} began anew" in job.notices


def test_what_a_lost_node_sealed_shows_that_its_number_worked() -> None:
    """It was lost before it could tell of a step: who came later ends no job whose script wants one node alone."""
    job = Driven(settings(max_restarts=0, stall_timeout=1000.0))
    (a,) = job.start(1)
    b, c = job.node(), job.node()
    all_join([b, c])
    job.seal(3, any_size=True)
    a.hang_up()
    while job.phase is Phase.RUNNING:
        job.wait(0.5)
    for _ in range(2):  # What they see the first time is what the second world begins with.
        all_join([b, c])
    job.wait(1)
    assert (job.phase, set(job.members)) == (Phase.RUNNING, {b.name, c.name})
    for _ in range(2):  # Nobody of them had trained: the number is tried once more.
        fail(job, [b, c])
    assert (job.phase, len(job.members)) == (Phase.RUNNING, 1), job.notices
    assert "the run goes on with 1, and host-2 is a spare" in job.notices
