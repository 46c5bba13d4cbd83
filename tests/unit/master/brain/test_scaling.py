"""Scaling: the world drains to fewer nodes, the others stay as spares, and come back when the limit is lifted."""

from __future__ import annotations

import pytest

from dalsegno.master.brain import brain
from dalsegno.master.brain.announcements import SESSION_WITHIN_SECONDS
from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, all_join, settings


def scaled(job: Driven, nodes: list[Node], count: int) -> None:
    """The drain of a scale-down to `count`, from its beginning until the next world trains."""
    assert job.scale(count).code == "OK"
    assert (job.phase, nodes[0].order) == (Phase.DRAINING, "drain")
    step = max(job.state.live.epoch.steps.values()) + 1
    nodes[0].step(step, draining=True)
    nodes[0].save(step)
    for node in nodes:
        node.drained(step)
    all_join(job.nodes)
    next((node for node in job.nodes if node.lease), nodes[0]).convert()
    assert job.phase is Phase.RUNNING
    nodes[0].step(step + 1)


def test_a_scale_down_drains_and_loses_nothing() -> None:
    """The first ranks go on, the others are spares and say why; the line names the cause."""
    job = Driven()
    nodes = job.start(4)
    nodes[0].step(1)
    scaled(job, nodes, 2)
    assert job.members == [node.name for node in nodes[:2]]
    assert [node.order for node in nodes] == ["run", "run", "wait", "wait"]
    assert "the job was scaled to 2 nodes" in nodes[3].directive.wait.reason
    assert "epoch 2: scaled to 2 nodes, 2 nodes, resumed at step 2" in job.notices
    assert "lost 0 steps" in job.notices
    status = brain.status(job.state, job.now)
    assert (status.limit, status.settings.max_nodes) == (2, 4)
    told = ["", "", *(node.directive.wait.reason for node in nodes[2:])]
    assert [node.reason for node in status.nodes] == told


def test_spares_replace_lost_nodes_up_to_the_limit_and_grow_beyond_it_only_when_it_is_lifted() -> None:
    """Four nodes are there, two may take part."""
    job = Driven()
    nodes = job.start(4)
    nodes[0].step(1)
    scaled(job, nodes, 2)
    for node in nodes[2:]:
        all_join([node])
        node.warm()
    job.wait(5)
    assert job.phase is Phase.RUNNING
    nodes[1].hang_up()
    job.wait(2)
    all_join([nodes[0], nodes[2], nodes[3]])
    job.wait(1)
    assert job.members == [nodes[0].name, nodes[2].name]
    nodes[0].step(job.job.run.left_step + 2)
    all_join([nodes[3]])
    assert job.phase is Phase.RUNNING
    reply = job.scale(4)
    assert isinstance(reply.message, control_pb2.ScaleReply)
    assert (reply.message.limit, reply.message.nodes) == (4, 2)
    assert job.phase is Phase.DRAINING
    assert job.job.drain is not None
    assert job.job.drain.growth


def test_a_scale_down_waits_for_the_first_step_of_its_epoch() -> None:
    """Before it there is nothing to save."""
    job = Driven()
    nodes = job.start(3)
    nodes[0].step(0)
    job.scale(2)
    job.wait(5)
    assert job.phase is Phase.RUNNING
    nodes[0].step(1)
    assert job.phase is Phase.DRAINING


def test_a_scale_down_without_agreement_is_put_off_to_the_next_commit() -> None:
    """As a growth is: nobody loses a step for it."""
    job = Driven(settings(drain_timeout=10))
    nodes = job.start(3)
    nodes[0].step(1)
    job.scale(2)
    job.wait(11)
    assert job.phase is Phase.RUNNING
    assert "scaling down is put off: the ranks did not agree" in job.notices
    nodes[0].step(2)
    assert job.phase is Phase.RUNNING
    nodes[0].save(2)
    assert job.phase is Phase.DRAINING


def test_a_failed_save_puts_a_scale_down_off() -> None:
    """All ranks train on."""
    job = Driven()
    nodes = job.start(3)
    nodes[0].step(1)
    job.scale(2)
    nodes[0].save_failed()
    assert job.phase is Phase.RUNNING
    assert "scaling down is put off: its save failed" in job.notices


def test_a_scale_down_that_is_taken_back_is_withdrawn() -> None:
    """As long as no boundary is agreed."""
    job = Driven()
    nodes = job.start(3)
    nodes[0].step(1)
    job.scale(2)
    job.scale(3)
    assert (job.phase, nodes[0].order) == (Phase.RUNNING, "run")


def test_a_leave_turns_a_scale_down_into_a_drain_that_is_not_withdrawn() -> None:
    """The leaver goes, and then there are as many as were wanted."""
    job = Driven(settings(drain_timeout=10))
    nodes = job.start(3)
    nodes[0].step(1)
    job.scale(2)
    nodes[1].leave()
    job.scale(3)
    assert job.phase is Phase.DRAINING


def test_a_script_without_a_session_restarts_with_fewer_nodes_and_a_warning() -> None:
    """It cannot be drained, and a person asked for it."""
    job = Driven()
    nodes = job.start(3)
    job.scale(2)
    job.wait(SESSION_WITHIN_SECONDS - 2)
    assert job.phase is Phase.RUNNING, "its session may be on its way"
    job.wait(3)
    assert job.phase is Phase.FORMING
    all_join(nodes)
    assert job.members == [node.name for node in nodes[:2]]
    assert "all workers restart, scaled to 2 nodes" in job.notices
    assert "epoch 2: scaled to 2 nodes, 2 nodes" in job.notices


def test_a_limit_holds_for_worlds_that_form_anyway() -> None:
    """Before the first one, too, and over a restart of the master."""
    job = Driven()
    nodes = [job.node() for _ in range(3)]
    job.scale(1)
    job.restart()
    for node in nodes:
        node.beat()
    all_join(nodes)
    job.wait(2)
    assert len(job.members) == 1
    assert job.job.limit == 1


@pytest.mark.parametrize(
    ("wanted", "bounds", "said"),
    [
        (0, {"min_nodes": 2}, "--nnodes=2:4 allows"),
        (1, {"min_nodes": 2}, "--nnodes=2:4 allows"),
        (5, {"min_nodes": 2}, "--nnodes=2:4 allows"),
        (3, {"min_nodes": 3, "node_unit": 2}, "--nnodes=3:4 in steps of --node-unit=2 allows"),
    ],
)
def test_what_nnodes_does_not_allow_is_refused_in_one_line(wanted: int, bounds: dict[str, int], said: str) -> None:
    """With the bounds in it."""
    job = Driven(settings(**bounds))
    job.start(4)
    reply = job.scale(wanted)
    assert reply.code == "INVALID_ARGUMENT"
    assert f"cannot scale to {wanted} nodes: {said}" in reply.detail
    assert job.job.limit == 0


def test_a_limit_that_the_unit_cuts() -> None:
    """Three of four with a unit of two are two; that is said once, and repeated without effect."""
    job = Driven(settings(min_nodes=2, max_nodes=4, node_unit=2))
    nodes = job.start(4)
    nodes[0].step(1)
    scaled(job, nodes, 3)
    assert len(job.members) == 2
    assert "epoch 2: scaled to 3 nodes, 2 nodes" in job.notices
    count = job.job.noticed
    assert job.scale(3).code == "OK"
    assert job.job.noticed == count


def test_an_ended_job_and_one_without_agents_are_not_scaled() -> None:
    """There is nothing yet, or nothing any more."""
    job = Driven()
    assert job.scale(1).code == "FAILED_PRECONDITION"
    (a,) = job.start(1)
    a.save(3)
    a.finished(3)
    reply = job.scale(2)
    assert reply.code == "FAILED_PRECONDITION"
    assert "ended" in reply.detail


def test_a_run_that_is_taken_up_again_has_no_limit() -> None:
    """Its agents' --nnodes count."""
    job = Driven(settings(max_restarts=0))
    (a,) = job.start(1)
    job.scale(2)
    a.save(3)
    a.failed(step=3)
    a.join()
    assert job.phase is Phase.FAILED
    a.hang_up()
    job.node()
    assert job.job.limit == 0


def test_a_new_run_begins_without_the_limit_of_the_last_one() -> None:
    """Whoever scaled that has said nothing about this one: all of its nodes train."""
    job = Driven(settings(max_nodes=3))
    nodes = job.start(3)
    nodes[0].step(1)
    scaled(job, nodes, 2)
    for node in nodes[:2]:
        node.finished(3)
    assert job.phase is Phase.SUCCEEDED
    for node in nodes:
        node.hang_up()
    job.wait(10)
    new = [job.node(new_run=True) for _ in range(3)]
    for node in new:
        node.join(sees=[])
    job.wait(2)
    assert (job.job.run_id, job.job.limit, len(job.members)) == ("run-0002", 0, 3)


def test_a_stopped_run_goes_on_with_its_limit() -> None:
    """It is the same run."""
    job = Driven(settings(max_nodes=3), embedded=True)
    nodes = job.start(3)
    nodes[0].step(1)
    scaled(job, nodes, 2)
    job.call(control_pb2.StopRequest(job_id="job"))
    nodes[0].save(4)
    for node in nodes:
        if node.order == "drain":
            node.drained(4)
    job.wait(1)
    for node in nodes:
        node.goodbye()
    assert job.phase is Phase.STOPPED
    job.node()
    assert (job.phase.is_terminal, job.job.limit) == (False, 2)
