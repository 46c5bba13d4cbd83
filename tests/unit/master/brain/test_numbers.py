"""Many nodes, many checkpoints, many losses at once: nothing in the brain depends on how many there are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
from google.protobuf.message import Message

from dalsegno.master.brain import brain, calls, checkpoints, running
from dalsegno.master.brain.events import Called, Event, StreamClosed, Tick
from dalsegno.master.brain.gathering import CRASH_LOOP_SECONDS, Gathering
from dalsegno.master.brain.state import Phase
from dalsegno.master.brain.turn import NAMED, heartbeat_of, progress_of
from dalsegno.master.brain.views import Common
from dalsegno.master.record import codec as codecs
from dalsegno.master.record.codec import JobCodec
from dalsegno.master.server.job_brain import JobBrain
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, settings

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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_directive_is_as_long_with_many_nodes_as_with_few() -> None:
    """It names the place of who is told, and how many there are."""
    few, many = large(3), large(150)
    sizes = [nodes[1].directive.ByteSize() for _, nodes in (few, many)]
    assert sizes[1] < 1.5 * sizes[0]
    world = many[1][125].directive.run
    assert (world.nodes, world.world_size, world.place.group_rank, world.place.first_rank) == (150, 150, 125, 125)


@pytest.mark.slow
def test_the_more_agents_the_rarer_they_speak() -> None:
    """A second for few; for more so that 150 words come in a second, as long as several fit into a node-timeout."""
    job, _ = large(3)
    assert (heartbeat_of(job.job), progress_of(job.job)) == (1.0, 0.1)
    job, _ = large(250, node_timeout=15.0)
    assert (heartbeat_of(job.job), progress_of(job.job)) == pytest.approx((250 / 150, 250 / 150))
    job, _ = large(350, node_timeout=5.0)
    assert heartbeat_of(job.job) == pytest.approx(5 / 2.25)


@pytest.mark.slow
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


@pytest.mark.slow
def test_thousands_of_checkpoints_cost_a_turn_nothing() -> None:
    """With all of them kept: one commit stores few rows, and the newest is known without a search."""
    job = Driven(settings(keep_checkpoints=0))
    (a,) = job.start(1)
    for step in range(1, 3_001):
        made = job.seal(step)
        job.sealed.clear()
        assert a.commit(made).code == "OK"
    a.save(3_001)
    assert "job" in job.changes
    assert {key.partition("/")[0] for key in job.changes} <= {"job", "node", "checkpoint", "event"}
    head = job.job.checkpoints.head
    assert head is not None
    assert head.step == 3_001
    assert len(job.job.checkpoints) == 3_001
    assert a.directive.ByteSize() < 10_000


def seconds_of_a_turn(count: int) -> tuple[float, float]:
    """The fastest of some commits, and of some turns without news, with so many checkpoints; rows and views too."""
    job = Driven(settings(keep_checkpoints=0))
    (a,) = job.start(1)
    for step in range(1, count + 1):
        job.job.checkpoints.put(checkpoints.from_proto(job.seal(step)))
    job.keep()
    commits, ticks = [], []
    for step in range(count + 1, count + 20):
        made = job.seal(step)
        for times, event in ((commits, control_pb2.CommitRequest(caller=a.caller(), checkpoint=made)), (ticks, None)):
            begun = time.perf_counter()
            job.event(Tick() if event is None else Called(event))
            Common(job.state)
            times.append(time.perf_counter() - begun)
    return min(commits), min(ticks)


@pytest.mark.slow
@pytest.mark.parametrize("count", [10_000, pytest.param(20_000, marks=pytest.mark.full)])
def test_a_turn_costs_with_thousands_of_checkpoints_what_it_costs_with_a_hundred(count: int) -> None:
    """10,000 cost 566 ms a turn, thousands of times as much. (A few pointers are copied for each, in microseconds.)"""
    few, many = seconds_of_a_turn(100), seconds_of_a_turn(count)
    assert many[0] < 20 * few[0]
    assert many[1] < 20 * few[1]


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


def test_a_held_node_is_taken_in_where_the_unit_needs_it() -> None:
    """One is enough for MIN, and no world has fewer than two: a spare for now is better than none."""
    job = Driven(settings(min_nodes=1, max_nodes=4, node_unit=2))
    nodes = [job.node(), job.node(node="flaky")]
    for node in nodes:
        node.join()
    job.wait(1.1)
    for step in range(1, 6, 2):
        nodes[0].step(step)
        nodes[0].save(step, any_size=True)
        nodes[1].hang_up()
        job.wait(2)
        nodes[1] = job.node(node="flaky")
        for node in nodes:
            node.join()
        job.wait(2)
    assert "flaky was lost 3 times" in job.notices
    assert job.state.live.held_until
    assert (job.phase, job.members) == (Phase.RUNNING, [node.name for node in nodes])


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


def test_spares_that_come_and_die_under_new_names_leave_nothing_behind() -> None:
    """A supervisor that starts them again and again, beside a world that trains for weeks."""
    job = Driven(settings(max_nodes=2))
    job.start(2)
    for number in range(100):
        spare = job.node(node=f"spare-{number}")
        job.wait(0.1)
        spare.hang_up()
        job.wait(1.9)
        assert not spare.is_known
    assert len(job.state.live.gathering.lost) <= CRASH_LOOP_SECONDS / 2 + 1
    assert len(job.state.live.nodes) == 2
    gathering = Gathering()
    for number in range(10_000):
        gathering.note_loss(f"spare-{number}", 0.1 * number)
    assert len(gathering.lost) <= 10 * CRASH_LOOP_SECONDS + 1


@pytest.mark.slow
def test_what_one_change_names_is_bounded() -> None:
    """Of sixty nodes that left or were lost a few are named."""
    job, nodes = large()
    for node in nodes[:60]:
        node.hang_up()
    job.wait(3.0)
    assert len(job.job.next.causes) <= 8
    assert all(cause.count(",") <= NAMED for cause in job.job.next.causes)


# ---- a bug in the brain ---------------------------------------------------------------------------------------------


def test_an_event_that_breaks_an_assertion_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no effect, the caller is told, people are told once, and the job goes on."""
    job, nodes = large(3)
    job.expects_faults = True
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
    job.expects_faults = True

    def breaks(turn: object) -> bool:
        raise AssertionError("nobody thought of this")

    with monkeypatch.context() as patch:
        patch.setattr(running, "stalled", breaks)
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


class Kept:
    """A job's brain as the master runs it, and what a store would hold of it."""

    def __init__(self) -> None:
        self.brain = JobBrain("job", None)
        self.state = self.brain.begin({}, 1, 1000.0)
        self.rows: dict[str, bytes] = {}
        self.said: list[str] = []

    def turn(self, *events: Event, now: float = 1001.0) -> list[str]:
        """One turn of the driver's: decides and stores. Returns the codes of the replies."""
        self.state, replies = self.brain.handle_all(self.state, list(events), now)
        for key, row in self.brain.changes(self.state).items():
            self.rows.pop(key, None)
            if row is not None:
                self.rows[key] = row
        self.said += self.state.faults
        self.state.faults.clear()
        return [reply.code for reply in replies if reply is not None]

    def registers(self, name: str) -> Called:
        request = control_pb2.RegisterRequest(
            job_id="job", incarnation=f"{name}'s", node=name, host="host", nproc=1, settings=settings()
        )
        return Called(request)


def test_what_cannot_be_stored_is_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch only the event that led there; the store holds just what the job is, also once it can be stored."""
    kept = Kept()
    encode = codecs._NODES.encode

    def breaks(node: Any) -> bytes:
        if node.name == "b":
            raise UnicodeEncodeError("utf-8", "\udc80", 0, 1, "surrogates not allowed")
        return encode(node)

    with monkeypatch.context() as patch:
        patch.setattr(codecs._NODES, "encode", breaks)
        names = ("a", "b", "c")
        assert kept.turn(*(kept.registers(name) for name in names)) == ["OK", "INTERNAL", "OK"]
        assert [kept.turn(kept.registers("b")) for _ in range(3)] == [["INTERNAL"]] * 3
        assert list(kept.state.job.nodes) == ["a", "c"]
        assert JobCodec().decode(kept.rows) == kept.state.job
        notices = [notice.text for notice in kept.state.job.notices]
        assert sum("internal error (RegisterRequest" in text for text in notices) == 1
        assert "surrogates not allowed" in kept.said[0]
    assert kept.turn(kept.registers("b")) == ["OK"]
    assert list(kept.state.job.nodes) == ["a", "c", "b"]
    assert JobCodec().decode(kept.rows) == kept.state.job


def test_a_record_that_cannot_be_stored_at_all_ends_no_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is decided meanwhile, words are heard, and what was decided before is what the store holds."""
    kept = Kept()
    assert kept.turn(kept.registers("a")) == ["OK"]

    def breaks(job: object) -> object:
        raise RuntimeError("a bug in the codec")

    with monkeypatch.context() as patch:
        patch.setattr(JobCodec, "changes", lambda codec, job: breaks(job))
        for second in range(10):
            assert kept.turn(kept.registers("b"), now=1002.0 + second) == ["INTERNAL"]
            assert kept.turn(Tick(), now=1002.5 + second) == []
    assert JobCodec().decode(kept.rows).nodes == kept.state.job.nodes
    assert kept.turn(kept.registers("b"), now=1020.0) == ["OK"]
    assert JobCodec().decode(kept.rows) == kept.state.job


def test_rows_count_only_when_all_of_them_could_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was encoded before the one that failed was stored by nobody: it comes again."""
    job, nodes = large(3)
    before = dict(job.rows)

    def breaks(record: object) -> bytes:
        raise OverflowError(record)

    with monkeypatch.context() as patch:
        patch.setattr(codecs._CHECKPOINTS, "encode", breaks)
        with pytest.raises(OverflowError):
            nodes[0].save(2)
    assert job.rows == before
    job.keep()
    assert job.rows == JobCodec.everything(job.job) != before
    job.keep()
    assert job.changes == {}
