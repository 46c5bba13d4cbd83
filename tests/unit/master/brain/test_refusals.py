"""What ranks refuse: no restart mends it, and one node's mistake does not end what others train."""

from __future__ import annotations

import pytest

from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, all_join, settings, stored

WHY = "the checkpoint has another optimizer: make the one that was saved"


def refuses(node: Node, why: str = WHY) -> None:
    """Its ranks say that no rank may train this, and end."""
    kind = control_pb2.FAILURE_KIND_REFUSED
    request = control_pb2.FailureRequest(caller=node.caller(), kind=kind, exit_code=1, message=why)
    assert node.job.call(request).code == "OK"


def lines(job: Driven, text: str = WHY) -> int:
    return job.notices.count(text)


def test_a_refusal_ends_the_job_with_one_line_and_one_start() -> None:
    """After any number of steps, and without waiting for the other nodes' word."""
    job = Driven(settings(max_restarts=3))
    a, b = job.start(2)
    a.step(5)
    a.save(5)
    b.failed("killed")
    all_join([a, b])
    epoch = job.epoch
    refuses(b)
    assert job.phase is Phase.FAILED
    assert job.epoch == epoch
    assert job.job.message == f"the training was refused: {WHY}"
    refuses(a)
    assert lines(job) == 0, "each agent's last line says it"


def test_a_refusal_outweighs_a_failure_that_comes_before_it() -> None:
    """One rank's agent only sees a connection that broke; the report of the refusal comes when all gather already."""
    job = Driven(settings(max_restarts=3))
    a, b = job.start(2)
    a.step(1)
    a.failed("connection reset by peer")
    assert job.phase is Phase.FORMING
    refuses(b)
    assert job.phase is Phase.FAILED
    assert WHY in job.job.message


def test_a_first_start_that_is_refused_ends_at_once() -> None:
    """Nothing was trained: there is nobody who could go on."""
    job = Driven(settings(max_restarts=3))
    _, b = job.start(2)
    refuses(b)
    assert job.phase is Phase.FAILED
    assert WHY in job.job.message


def test_a_node_alone_whose_first_start_is_refused_says_it_once() -> None:
    """In its last line, as every other node does."""
    job = Driven()
    (a,) = job.start(1)
    refuses(a)
    assert (job.phase, lines(job)) == (Phase.FAILED, 0)
    assert job.job.message == f"the training was refused: {WHY}"


def grown(**changes: int) -> tuple[Driven, Node, Node, Node]:
    """Two nodes have trained, a third one has joined them."""
    job = Driven(settings(**changes))
    a, b = job.start(2)
    a.step(1)
    c = job.node()
    c.join()
    c.warm()
    a.commit(job.seal(2, any_size=True))
    for node in (a, b):
        node.drained(2)
    all_join([a, b, c])
    assert len(job.members) == 3
    return job, a, b, c


@pytest.mark.parametrize("who", ["the newcomer", "a survivor"])
def test_a_newcomer_that_does_not_fit_is_put_aside(who: str) -> None:
    """Whoever tells of it first. The others go on from the same save, and their budget is untouched."""
    job, a, b, c = grown(max_restarts=0)
    refuses(c if who == "the newcomer" else b)
    assert job.phase is Phase.FORMING
    all_join([a, b])
    assert job.phase is Phase.RUNNING
    assert job.members == [a.name, b.name]
    assert job.job.world is not None
    assert job.job.world.resumed_step == 2
    assert job.job.run.budget.failures == 0
    assert lines(job) == 1
    assert f"{c.name} cannot take part, and stays a spare: {WHY}" == c.directive.wait.reason
    a.step(3)
    c.warm()
    job.wait(30)
    assert job.phase is Phase.RUNNING, "the same node is not tried again"


def test_all_nodes_tell_of_a_refusal_and_people_hear_it_once() -> None:
    """Each report is of the same one, also those that come when the newcomer is put aside already."""
    job, a, b, c = grown()
    for node in (c, b, a):
        refuses(node)
    assert (job.phase, lines(job)) == (Phase.FORMING, 1)
    all_join([a, b])
    assert job.members == [a.name, b.name]


def test_what_was_put_aside_comes_back_when_it_was_started_anew() -> None:
    """Its person has mended it: another incarnation."""
    job, a, b, c = grown()
    refuses(c)
    all_join([a, b])
    a.step(3)
    c.hang_up()
    job.wait(3)
    again = job.node(node=c.name)
    again.join()
    again.warm()
    assert job.phase is Phase.DRAINING


def test_those_who_trained_before_are_known_after_a_restart_of_the_master() -> None:
    """The record says so."""
    job, a, b, c = grown()
    refuses(c)
    all_join([a, b])
    world = stored(job.job).world
    assert world is not None
    assert [member.proven for member in world.members] == [True, True]
    assert stored(job.job).nodes[c.name].refused == WHY


def test_survivors_who_refuse_without_the_newcomer_too_end_the_job() -> None:
    """Somebody changed their script: nobody is left who could go on."""
    job, a, b, c = grown()
    refuses(c)
    all_join([a, b])
    refuses(a, "another order")
    assert job.phase is Phase.FAILED
    assert job.job.message == "the training was refused: another order"


def test_too_few_without_the_newcomer_wait_and_say_why() -> None:
    """The job does not end for one node's mistake: another node may come."""
    job = Driven(settings(min_nodes=2, max_nodes=2))
    a, b = job.start(2)
    a.step(1)
    b.hang_up()
    job.wait(3)
    c = job.node()
    all_join([a, c])
    assert job.phase is Phase.RUNNING
    refuses(c)
    all_join([a])
    job.wait(3)
    assert job.phase is Phase.WAITING
    assert f"{c.name} cannot take part ({WHY})" in a.directive.gather.missing
    job.node().join()
    job.wait(2)
    assert job.phase is Phase.RUNNING


# ---- what can never be converted ------------------------------------------------------------------------------------

IMPOSSIBLE = control_pb2.CONVERSION_STATE_IMPOSSIBLE
ODD = "the optimizer gathers basis, not Adam's moments: nobody can convert them"


def saved_by_two(*, known: bool, **changes: int) -> tuple[Driven, Node, Node]:
    """Two nodes have saved step 1 in a way that nobody converts; `known`: as its files' names tell."""
    job = Driven(settings(**changes))
    a, b = job.start(2)
    a.step(1)
    made = job.seal(1)
    made.no_universal_form = known
    assert a.commit(made).code == "OK"
    return job, a, b


def test_a_growth_that_nobody_can_convert_does_not_begin() -> None:
    """No restart: the newcomer is a spare, and is told why."""
    job, a, _ = saved_by_two(known=True)
    c = job.node()
    c.join()
    c.warm()
    job.wait(30)
    a.step(9)
    assert (job.phase, job.epoch) == (Phase.RUNNING, 1)
    assert "loads with 2 workers only" in c.directive.wait.reason


def test_a_conversion_that_turns_out_to_be_impossible_is_tried_once() -> None:
    """Then the old world goes on, and growths do not begin any more: also not after the next save."""
    job, a, b = saved_by_two(known=False)
    c = job.node()
    c.join()
    c.warm()
    assert job.phase is Phase.DRAINING
    a.save(2)
    for node in (a, b):
        node.drained(2)
    all_join([a, b, c])
    a.converts(IMPOSSIBLE, ODD)
    assert job.phase is Phase.RUNNING
    assert job.members == [a.name, b.name]
    a.step(3)
    a.save(3)
    job.wait(30)
    assert (job.phase, job.epoch) == (Phase.RUNNING, 2)
    assert ODD in c.directive.wait.reason
    assert ODD not in job.notices, "the spare's own line says it"


@pytest.mark.parametrize("known", [True, False])
def test_a_shrink_that_nobody_can_convert_ends_the_job_with_what_to_do(known: bool) -> None:
    """Not before who is missing could have come back."""
    job, a, b = saved_by_two(known=known)
    b.hang_up()
    job.wait(3)
    a.join()
    if not known:
        a.converts(IMPOSSIBLE, ODD)
    assert job.phase is Phase.WAITING
    job.wait(settings().node_timeout + 1)
    assert job.phase is Phase.FAILED
    assert "step-1.e1.1 was saved by 2 workers and loads with as many only" in job.job.message
    assert "start nodes until there are 2 workers again" in job.job.message


def test_a_shrink_that_nobody_can_convert_is_no_failure_of_a_job_that_is_being_stopped() -> None:
    """Who was to come back is not let in any more; the node that is left takes its time."""
    job, a, b = saved_by_two(known=True)
    b.hang_up()
    job.wait(3)
    a.join()
    assert job.phase is Phase.WAITING
    assert job.call(control_pb2.StopRequest(job_id="job")).code == "OK"
    job.wait(settings().node_timeout + 1)
    assert (job.phase, job.job.stopping) == (Phase.WAITING, True)
    a.hang_up()
    job.wait(10)
    assert job.phase is Phase.STOPPED
    assert "it failed meanwhile" not in job.job.message


@pytest.mark.parametrize("patience", [-1.0, 60.0])
def test_who_comes_back_in_time_goes_on_with_it(patience: float) -> None:
    """A supervisor starts the lost node again: within --wait-for-nodes, or by default the node-timeout."""
    job, a, b = saved_by_two(known=True, wait_for_nodes=patience)  # type: ignore[arg-type]
    b.hang_up()
    job.wait(3)
    a.join()
    job.wait(2 if patience < 0 else 50)
    assert job.phase is Phase.WAITING
    again = job.node(node=b.name)
    all_join([a, again])
    job.wait(2)
    assert job.phase is Phase.RUNNING
    assert len(job.members) == 2


def test_a_scale_down_that_nobody_can_convert_is_refused() -> None:
    """To whoever asks for it; the ranks train on."""
    job, a, _ = saved_by_two(known=True)
    reply = job.scale(1)
    assert reply.code == "FAILED_PRECONDITION"
    assert "loads with 2 workers only" in reply.detail
    a.step(5)
    assert (job.phase, job.epoch) == (Phase.RUNNING, 1)


def test_who_is_put_aside_has_no_turn_to_convert() -> None:
    """It is asked for no Join, so the others waited for its answer for ever."""
    job, a, b, c = grown()
    d = job.node()
    d.join()
    d.warm()
    refuses(c)
    all_join([a, b])
    assert len(job.members) == 3, "with the fourth"
    a.step(3)
    a.commit(job.seal(4))
    a.hang_up()
    job.wait(2)
    assert job.phase is Phase.FORMING
    all_join([b, d])
    assert b.lease
    b.converts(control_pb2.CONVERSION_STATE_ENVIRONMENT, "disk full")
    assert d.lease
    d.converts(control_pb2.CONVERSION_STATE_ENVIRONMENT, "disk full")
    job.wait(6)
    assert b.lease, "it is tried again"


def test_who_sat_a_world_out_has_trained_before_all_the_same() -> None:
    """It is put aside with nobody: the newcomer's script is the one that is new."""
    job = Driven(settings(max_nodes=3))
    a, b, c = job.start(3)
    a.step(1)
    a.commit(job.seal(2, any_size=True))
    late = job.node()
    assert job.scale(1).code == "OK"
    for node in (a, b, c):
        node.drained(2)
    all_join([a, b, c])
    assert job.members == [a.name]
    a.step(3)
    late.join()
    late.warm()
    assert job.scale(3).code == "OK"
    for node in (b, c):
        node.warm()
    a.commit(job.seal(4, any_size=True))
    a.drained(4)
    all_join([a, b, late])
    job.wait(6)
    assert set(job.members) == {a.name, b.name, late.name}
    refuses(b)
    assert "cannot take part, the others go on without it" in job.notices
    assert not job.job.nodes[b.name].refused
    assert job.job.nodes[late.name].refused
