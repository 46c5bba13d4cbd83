"""Many nodes, many checkpoints, many losses at once: nothing in the brain depends on how many there are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from google.protobuf.message import Message

from dalsegno.master import brain, calls, phases
from dalsegno.master.codec import JobCodec
from dalsegno.master.events import Called, StreamClosed, Tick
from dalsegno.master.state import Phase
from dalsegno.master.turn import NAMED, heartbeat_of, progress_of
from dalsegno.protos import control_pb2
from tests.support.masters import Driven, Node, settings

MANY = 120


def large(count: int = MANY, **changes: object) -> tuple[Driven, list[Node]]:
    """A world of many nodes that has made a step."""
    job = Driven(settings(max_nodes=1000, **changes))
    nodes = job.start(count)
    nodes[0].step(1)
    return job, nodes


def at_once(job: Driven, messages: Sequence[Message]) -> None:
    """Calls that come in together."""
    job.state, replies = brain.handle_all(job.state, [Called(message) for message in messages], job.now)
    assert all(reply is not None and reply.code == "OK" for reply in replies)


def until_gathering(job: Driven) -> None:
    for _ in range(20):
        if job.phase is Phase.FORMING:
            return
        job.wait(1.1)
    raise AssertionError(job.phase)


@pytest.mark.parametrize("how", ["killed", "leaves", "silent"])
def test_half_of_many_nodes_go_at_once(how: str) -> None:
    """One settling sees to all of them: the survivors form the next world, and are told in one line."""
    job, nodes = large()
    gone, left = nodes[: MANY // 2], nodes[MANY // 2 :]
    if how == "leaves":
        at_once(job, [control_pb2.LeaveRequest(caller=node.caller(), notice=10.0) for node in gone])
        at_once(job, [control_pb2.DrainedRequest(caller=node.caller(), step=1) for node in nodes])
    job.silent |= {node.incarnation for node in gone}
    if how != "silent":
        closed = [StreamClosed(node.name, node.incarnation) for node in gone]
        job.state, _ = brain.handle_all(job.state, closed, job.now)
    until_gathering(job)
    for node in left:
        node.join()
    job.wait(3.0)
    assert len(job.job.nodes) == MANY // 2
    assert job.phase is Phase.RUNNING
    assert job.members == [node.name for node in left]
    assert len(job.job.notices) < 10
    assert all(len(notice.text) < 400 for notice in job.job.notices)


def test_a_power_cut_of_many_and_one_newcomer() -> None:
    """The master comes back alone: after a node-timeout all the dead fall in one move, and the newcomer goes on."""
    job, _nodes = large()
    job.restart()
    job.silent |= {node.incarnation for node in job.nodes}
    new = job.node()
    new.join()
    for _ in range(30):
        job.wait(1.0)
        if new.order == "gather":
            new.join()
    assert (job.phase, job.members) == (Phase.RUNNING, [new.name])


def test_a_restart_while_half_are_gone() -> None:
    """Those that come back form the next world; the others fall due together."""
    job, nodes = large()
    left = nodes[::2]
    job.restart()
    job.silent = {node.incarnation for node in nodes[1::2]}
    for node in left:
        node.beat()
    until_gathering(job)
    for node in left:
        node.join()
    job.wait(2.0)
    assert job.members == [node.name for node in left]


def test_a_directive_is_as_long_with_many_nodes_as_with_few() -> None:
    """It names the place of who is told, and how many there are."""
    few, many = large(3), large(150)
    sizes = [nodes[1].directive.ByteSize() for _, nodes in (few, many)]
    assert sizes[1] < 1.5 * sizes[0]
    world = many[1][125].directive.run
    assert (world.nodes, world.world_size, world.place.group_rank, world.place.first_rank) == (150, 150, 125, 125)


def test_the_more_agents_the_rarer_they_speak() -> None:
    """A second for few; for a thousand so that a few hundred words come in a second, and three in a node-timeout."""
    job, _ = large(3)
    assert (heartbeat_of(job.job), progress_of(job.job)) == (1.0, 0.1)
    job, _ = large(250, node_timeout=15.0)
    assert (heartbeat_of(job.job), progress_of(job.job)) == (1.25, 1.25)
    job, _ = large(350, node_timeout=5.0)
    assert heartbeat_of(job.job) == pytest.approx(5.0 / 3)


def test_a_silent_node_is_found_among_many_rare_voices() -> None:
    """Within its node-timeout and a beat, although all speak rarely."""
    job, nodes = large(300, node_timeout=15.0)
    job.silent.add(nodes[7].incarnation)
    job.wait(14.0)
    assert nodes[7].is_known
    job.wait(4.0)
    assert not nodes[7].is_known


def test_heartbeats_and_steps_ask_for_no_turn() -> None:
    """Only what something follows from: the first step, a session, an agreement to stop."""
    job, (a, b) = large(2)

    def noted(message: calls.Noted) -> bool:
        reply, news = brain.note(job.state, message, job.now)
        assert reply.code == "OK"
        return news

    def progress(step: int, **said: bool) -> control_pb2.ProgressRequest:
        return control_pb2.ProgressRequest(caller=a.caller(number=0), step=step, has_session=True, **said)

    assert not noted(control_pb2.HeartbeatRequest(caller=b.caller(number=0)))
    assert not noted(progress(2))
    assert not noted(progress(3))
    assert noted(progress(4, draining=True))
    assert not noted(progress(5, draining=True))
    assert noted(progress(6, draining=True, training_ended=True))


def test_thousands_of_checkpoints_cost_a_turn_nothing() -> None:
    """With all of them kept: one commit stores two rows, and the newest is known without a search."""
    job = Driven(settings(keep_checkpoints=0))
    (a,) = job.start(1)
    codec = JobCodec()
    for step in range(1, 3_001):
        made = job.seal(step)
        job.sealed.clear()
        assert a.commit(made).code == "OK"
    codec.changes(job.job)
    a.save(3_001)
    assert {key.partition("/")[0] for key in codec.changes(job.job)} <= {"job", "node", "checkpoint"}
    head = job.job.checkpoints.head
    assert head is not None
    assert head.step == 3_001
    assert len(job.job.checkpoints) == 3_001
    assert a.directive.ByteSize() < 10_000


# ---- the unit, and a start that somebody holds up -------------------------------------------------------------------


def test_a_unit_that_fits_no_world_is_refused() -> None:
    """--nnodes=3:3 --node-unit=2 waited for ever."""
    job = Driven(settings(min_nodes=3, max_nodes=3, node_unit=2))
    node = Node(job, "x")
    reply = node.register()
    assert reply.code == "INVALID_ARGUMENT"
    assert "--node-unit=2 does not fit --nnodes=3:3" in reply.detail


def test_what_is_missing_names_the_unit() -> None:
    """Three at least, in a multiple of two: four."""
    job = Driven(settings(min_nodes=3, max_nodes=5, node_unit=2))
    for _ in range(3):
        node = job.node()
        node.join()
    job.wait(3.0)
    assert job.phase is Phase.WAITING
    assert "3 here, at least 4 in a multiple of 2 (--node-unit) needed" in node.directive.gather.missing


@pytest.mark.parametrize("name", ["", "flaky"])
def test_a_newcomer_that_crashes_again_and_again_does_not_hold_the_start_up(name: str) -> None:
    """It registers, opens its stream and dies, several times a second, before the first world."""
    job = Driven(settings(min_nodes=1, max_nodes=3))
    a, b = job.node(), job.node()
    a.join()
    b.join()
    for _ in range(100):
        flaky = job.node(node=name)
        job.wait(0.2)
        flaky.hang_up()
        job.wait(0.2)
        a.beat()
        b.beat()
        if job.phase is Phase.RUNNING:
            break
    assert job.phase is Phase.RUNNING
    assert job.members[:2] == [a.name, b.name]


def test_what_one_change_names_is_bounded() -> None:
    """Of sixty nodes that left or were lost a few are named."""
    job, nodes = large()
    for node in nodes[:60]:
        node.hang_up()
    job.wait(3.0)
    assert len(job.job.causes) <= 8
    assert all(cause.count(",") <= NAMED for cause in job.job.causes)


# ---- a bug in the brain ---------------------------------------------------------------------------------------------


def test_an_event_that_breaks_an_assertion_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no effect, the caller is told, people are told once, and the job goes on."""
    job, nodes = large(3)
    warm = calls.HANDLERS[control_pb2.WarmRequest]

    def breaks(turn: object, node: object, message: object) -> object:
        warm(turn, node, message)
        raise AssertionError("a bug")

    monkeypatch.setitem(calls.HANDLERS, control_pb2.WarmRequest, breaks)
    before = job.job.copy()
    for _ in range(5):
        assert nodes[0].warm().code == "INTERNAL"
    assert job.job.nodes == before.nodes
    assert job.notices.count("internal error") == 1
    assert len(job.state.faults) == 5
    assert "AssertionError: a bug" in job.state.faults[0]
    assert nodes[1].save(2)
    assert job.job.checkpoints.head is not None


def test_in_a_batch_only_the_event_that_breaks_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others count, in their order."""
    job, nodes = large(3)

    def breaks(turn: object, node: object, message: object) -> object:
        raise ValueError("a bug")

    monkeypatch.setitem(calls.HANDLERS, control_pb2.WarmRequest, breaks)
    messages = [
        control_pb2.CommitRequest(caller=nodes[0].caller(), checkpoint=job.seal(2)),
        control_pb2.WarmRequest(caller=nodes[1].caller()),
        control_pb2.LeaveRequest(caller=nodes[2].caller(), notice=5.0),
    ]
    job.state, replies = brain.handle_all(job.state, [Called(message) for message in messages], job.now)
    assert [reply.code for reply in replies if reply is not None] == ["OK", "INTERNAL", "OK"]
    assert job.job.checkpoints.head is not None
    assert job.phase is Phase.DRAINING


def test_a_timer_that_breaks_is_no_crash_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is due fails again and again: it is tried at growing pauses, calls are answered, a restart is survived."""
    job, nodes = large(3)

    def breaks(turn: object) -> bool:
        raise AssertionError("nobody thought of this")

    with monkeypatch.context() as patch:
        patch.setattr(phases, "stalled", breaks)
        tries = 0
        end = job.now + 100.0
        while job.now < end:
            assert job.state.wake is not None
            job.now = max(job.state.wake, job.now + 0.001)
            job.event(Tick())
            tries += 1
        assert tries < 15
        assert brain.note(job.state, control_pb2.HeartbeatRequest(caller=nodes[0].caller()), job.now)[0].code == "OK"
        job.restart()
        assert job.phase is Phase.RUNNING
        assert "internal error" in job.notices
    for node in nodes:
        node.beat()
    job.wait(130.0)
    assert nodes[0].save(9)
