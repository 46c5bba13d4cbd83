"""Events, the parts of a change, and goodput: what consoles, page and tools are told of."""

from __future__ import annotations

import pytest

from dalsegno.master.brain import brain
from dalsegno.master.brain.chronicle import EVENTS, NOTICES, EpochRecord, Kind, goodput, parts_of
from dalsegno.master.brain.events import StreamOpened
from dalsegno.master.brain.shown import event_proto
from dalsegno.master.brain.state import Phase
from dalsegno.master.record.codec import JobCodec
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, all_join, settings, stored


def kinds(job: Driven) -> list[Kind]:
    return [event.kind for event in job.job.events]


def test_a_life_is_told_in_events() -> None:
    """Who came, the world, its first step, each commit, who is lost: numbered without a gap, with epoch and time."""
    job = Driven()
    job.state.live.unix_offset = 1_700_000_000.0
    nodes = job.start(2)
    nodes[0].step(1)
    nodes[0].save(2)
    nodes[1].hang_up()
    job.wait(2)
    events = job.job.events
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))
    seen = [kind for kind in kinds(job) if kind is not Kind.REMARK]
    expected = [Kind.REGISTERED, Kind.REGISTERED, Kind.FORMED, Kind.STEPPED, Kind.COMMITTED, Kind.LOST]
    assert seen[: len(expected)] == expected
    (commit,) = [event for event in events if event.kind is Kind.COMMITTED]
    assert (commit.step, commit.checkpoint, commit.epoch, commit.said) == (2, "step-2.e1.1", 1, False)
    (lost,) = [event for event in events if event.kind is Kind.LOST]
    assert lost.nodes == (nodes[1].name,)
    assert all(1_700_000_000 < event.at < 1_700_010_000 for event in events)
    assert event_proto(commit).kind == "committed"


def test_consoles_are_told_of_some() -> None:
    """What every commit says would drown the rest; the last lines are kept for agents that come later."""
    job = Driven()
    (node,) = job.start(1)
    node.step(1)
    before = len(node.directive.notices)
    node.save(2)
    assert len(node.directive.notices) == before
    for number in range(NOTICES + 5):
        brain.Turn(job.state, job.now).notice(f"line {number}")
    assert job.job.notices[0].text == "line 5"
    assert len(job.job.notices) == NOTICES


@pytest.mark.slow
def test_old_events_are_dropped_and_numbers_go_on() -> None:
    """Over a new master, too: what is stored is what was seen."""
    job = Driven()
    (node,) = job.start(1)
    node.step(1)
    for step in range(2, EVENTS + 10):
        node.save(step)
    assert len(job.job.events) == EVENTS
    last = job.job.events[-1]
    again = stored(job.job)
    assert again.events == job.job.events
    assert again.sequence == last.sequence == job.job.sequence
    job.restart()
    node.beat()
    assert job.job.events[-1].sequence >= last.sequence


def test_the_parts_of_a_planned_change_sum_up_to_its_pause() -> None:
    """From the last step to the next one: saved, stopped, formed, and what agents say of their ranks' start."""
    job = Driven()
    nodes = job.start(2)
    nodes[0].step(1)
    nodes[1].leave()
    job.now += 1.0
    nodes[0].step(2, draining=True)
    job.now += 0.5
    nodes[0].save(2)
    for node in nodes:
        job.now += 0.25
        node.drained(2)
    nodes[1].hang_up()
    job.wait(1.5)
    all_join(nodes[:1])
    if nodes[0].lease:
        nodes[0].convert()
    job.now += 3.0
    nodes[0].step(3, started_seconds=1, loaded_seconds=2)
    (event,) = [event for event in job.job.events if event.kind is Kind.STEPPED and event.epoch == 2]
    parts = {part.name: part.seconds for part in event.parts}
    assert sum(parts.values()) == pytest.approx(event.seconds, abs=0.01)
    assert (parts["started"], parts["loaded"], parts["first step"]) == (1.0, 1.0, 1.0)
    assert parts["saved"] == pytest.approx(0.75)
    assert {"saved", "stopped", "formed"} <= set(parts)
    status = brain.status(job.state, job.now)
    assert [part.name for part in status.history[-1].parts] == list(parts)
    assert status.history[-1].paused == pytest.approx(event.seconds)


def test_a_crash_has_the_time_until_it_was_noticed() -> None:
    """A killed node, whose stream closed a second ago."""
    job = Driven()
    nodes = job.start(2)
    nodes[0].step(1)
    nodes[0].save(1)
    job.now += 2.0
    nodes[1].hang_up()
    job.wait(2)
    all_join(nodes[:1])
    if nodes[0].lease:
        nodes[0].convert()
    nodes[0].step(2)
    (event,) = [event for event in job.job.events if event.kind is Kind.STEPPED and event.epoch == 2]
    assert event.parts[0].name == "noticed"
    assert event.parts[0].seconds >= 2.0
    assert sum(part.seconds for part in event.parts) == pytest.approx(event.seconds, abs=0.01)


def test_parts_are_never_negative() -> None:
    """A mark that lies before another one took no time of its own."""
    parts = parts_of(10.0, [("saved", 12.0), ("stopped", 11.0), ("formed", 15.0)])
    assert [(part.name, part.seconds) for part in parts] == [("saved", 2.0), ("stopped", 0.0), ("formed", 3.0)]


def world(number: int, stepped: float, ended: float, first: int, last: int, lost: int = 0) -> EpochRecord:
    return EpochRecord(number, 2, 2, "", first - 1, False, 0.0, lost, first, last, stepped_at=stepped, ended_at=ended)


def test_goodput_counts_only_time_that_brought_the_run_forward() -> None:
    """Pauses and steps that were done again did not; the present pause counts as soon as it goes on."""
    first = world(1, 100.0, 110.0, 1, 10)
    assert goodput([], 5.0, over=False) is None
    assert goodput([world(1, 100.0, 0.0, 1, 1)], 150.0, over=False) == 1.0
    assert goodput([first], 120.0, over=False) == pytest.approx(0.5)
    assert goodput([first], 120.0, over=True) == 1.0
    second = world(2, 115.0, 0.0, 11, 11)
    assert goodput([first, second], 125.0, over=False) == pytest.approx(20 / 25)
    # Two of the first world's ten steps were lost.
    again = world(2, 115.0, 0.0, 9, 9, lost=2)
    assert goodput([first, again], 125.0, over=False) == pytest.approx(18 / 25)


def test_goodput_counts_steps_that_are_lost_with_more_than_one_world() -> None:
    """A checkpoint was damaged: the second world's two steps are lost, and four of the first one's ten, too."""
    first, second = world(1, 100.0, 110.0, 1, 10), world(2, 110.0, 112.0, 11, 12)
    third = world(3, 112.0, 120.0, 7, 14, lost=6)
    assert goodput([first, second, third], 120.0, over=True) == pytest.approx((6 + 0 + 8) / 20)
    # No more than all of it.
    third = world(3, 112.0, 120.0, 1, 8, lost=50)
    assert goodput([first, second, third], 120.0, over=True) == pytest.approx(8 / 20)


def test_goodput_outlives_the_master() -> None:
    """It comes from the record alone."""
    job = Driven()
    (node,) = job.start(1)
    job.state.live.unix_offset = 5000.0
    node.step(1)
    job.now += 10
    node.step(9)
    node.failed(step=9)
    job.wait(3)
    before = brain.status(job.state, job.now).goodput
    again = stored(job.job)
    state = brain.recover(again, 9, 50.0, unix_offset=job.now + 5000.0 - 50.0)
    assert brain.status(state, 50.0).goodput == pytest.approx(before)
    assert 0 < before < 1


def test_waiting_under_a_new_master_is_not_counted_as_training() -> None:
    """The world was over before that master came: its end does not move when the job is stopped hours later."""
    job = Driven(settings(min_nodes=2))
    nodes = job.start(2)
    for step in range(1, 50):
        job.wait(1)
        nodes[0].step(step)
        nodes[1].beat()
    nodes[1].hang_up()
    job.wait(2)
    (ended,) = job.job.history
    assert ended.ended_at
    job.restart()
    job.event(StreamOpened(nodes[0].name, nodes[0].incarnation))
    for _ in range(500):
        job.wait(2)
        nodes[0].beat()
    before = brain.status(job.state, job.now).goodput
    assert job.call(control_pb2.StopRequest(job_id="job")).code == "OK"
    nodes[0].hang_up()
    job.wait(3)
    assert job.phase is Phase.STOPPED
    assert job.job.history == (ended,)
    # The seconds since have brought nothing; they count only while the job goes on.
    assert before < 0.1


def test_a_new_master_deletes_what_it_drops() -> None:
    """Also with its first change: otherwise the record would keep more events with every new master."""
    job = Driven()
    job.start(1)
    for number in range(EVENTS):
        brain.Turn(job.state, job.now).notice(f"line {number}")
    rows = JobCodec.everything(job.job)
    codec = JobCodec()
    job.state.job = codec.decode(rows)
    brain.Turn(job.state, job.now).notice("one more")
    changed = {key: row for key, row in codec.changes(job.job).items() if key.startswith("event/")}
    newest = job.job.sequence
    assert changed[f"event/{newest - EVENTS}"] is None
    assert len(changed) == 2
