"""Records of version 2, written at moments of jobs' lives before their state was nested: they are read, and kept so."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dalsegno.master.brain import brain
from dalsegno.master.brain.described import to_proto
from dalsegno.master.brain.events import StreamOpened, Tick
from dalsegno.master.brain.state import (
    Budget,
    FailedShape,
    Failure,
    GoneBack,
    Job,
    MemberState,
    Milestone,
    NextWorld,
    Phase,
    Recollection,
    Run,
    Shapes,
)
from dalsegno.master.record.codec import JobCodec
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, all_join, settings

RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "recorded" / "master_states_2.json").read_text()
)
MOMENTS = sorted(RECORDED)


def rows_of(moment: str) -> dict[str, bytes]:
    """As the store had them."""
    rows = RECORDED[moment]
    return {key: row.encode() if key == "parts" else json.dumps(row).encode() for key, row in rows.items()}


def job_at(moment: str) -> Job:
    return JobCodec().decode(rows_of(moment))


def in_order(row: dict[str, Any]) -> dict[str, Any]:
    """A row, whatever order its sets were written in, and without what has come since."""
    since = {"drain": "grown", "conversion": "beside", "settings": "universal_gate", "budget": "saved_step"}
    for name, new in since.items():
        if row.get(name):
            row = {**row, name: {key: value for key, value in row[name].items() if key != new}}
    joined = row.get("joined")
    if joined is None:
        return row
    return {
        **row,
        "joined": {key: sorted(value) if isinstance(value, list) else value for key, value in joined.items()},
    }


def as_far_as(now: Any, then: Any) -> Any:
    """Of what is written now, what was written then."""
    if not isinstance(now, dict) or not isinstance(then, dict):
        return now
    return {name: as_far_as(now.get(name), value) for name, value in then.items()}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_record_is_written_as_it_was_read(moment: str) -> None:
    """Each row and each of its values, whatever the state is like inside, apart from what has come since.

    The lines for consoles have become events, with rows of their own, and that is another version.
    """
    job = job_at(moment)
    written = JobCodec.everything(job)
    assert {key for key in written if not key.startswith("event/")} == set(RECORDED[moment])
    lines = [(event.sequence, event.text, event.warning) for event in job.notices]
    assert lines == [(row["sequence"], row["text"], row["warning"]) for row in RECORDED[moment]["job"]["notices"]]
    for key, row in RECORDED[moment].items():
        if key == "parts":
            continue
        now = json.loads(written[key])
        row = {name: value for name, value in row.items() if name not in ("notices", "version")}
        assert in_order(as_far_as(now, row)) == in_order(row), key
    assert written.get("parts", b"").decode() == RECORDED[moment].get("parts", "")
    assert JobCodec().decode(written) == job


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_recorded_job_goes_on(moment: str) -> None:
    """Under a new master, which hears nobody: through the deadlines of its phase nothing has to be set aside."""
    job = job_at(moment)
    state = brain.recover(job, job.generation + 1, 1000.0)
    now = 1000.0
    for _ in range(60):
        assert not state.faults, state.faults[0]
        now = max(now + 0.5, min(state.wake or now, now + 30.0))
        state, _ = brain.handle(state, Tick(), now)


def test_what_belongs_to_a_world_comes_back() -> None:
    """Its members, how they fare, and what people were told of it."""
    job = job_at("drained")
    assert job.phase is Phase.DRAINING
    assert job.world is not None
    assert [member.node for member in job.world.members] == ["host-0", "host-1"]
    assert [job.part(member) for member in job.world.members] == [MemberState.DRAINED, MemberState.RUNNING]
    assert job.told.first_step
    waiting = job_at("waiting")
    assert waiting.world is None
    assert not waiting.parts
    assert not waiting.told.first_step


def test_what_belongs_to_a_drain_comes_back() -> None:
    """A growth, a scale-down, a leave: each with what it is for."""
    drains = {moment: job_at(moment).drain for moment in ("drained", "scaling", "leaving", "converting")}
    assert drains["drained"] is not None
    assert drains["drained"].growth
    assert drains["drained"].agreed
    assert drains["scaling"] is not None
    assert drains["scaling"].shrink
    assert drains["leaving"] is not None
    assert not drains["leaving"].optional
    assert drains["converting"] is None


def test_what_belongs_to_a_conversion_or_a_verification_comes_back() -> None:
    """The lease and who holds it; who verifies what."""
    conversion = job_at("converting").conversion
    assert conversion is not None
    assert (conversion.lease, conversion.owner) == (1, "host-0")
    verification = job_at("verifying").verification
    assert verification is not None
    assert (verification.reporter, verification.verifier) == ("host-1", "host-0")
    assert job_at("fell_back").conversion is None


def test_what_belongs_to_the_next_world_comes_back() -> None:
    """Why it comes, whom to wait for, what is behind it."""
    broken = job_at("failed_once")
    assert broken.next.causes == ("a worker failed on host-1",)
    assert not broken.next.quiet
    assert job_at("converting").next.grown
    waiting = job_at("too_few")
    assert waiting.next.causes == ("host-0 left",)
    assert waiting.next.quiet


def test_what_belongs_to_a_run_comes_back() -> None:
    """How far it came, what its failures were, how often it was taken up again."""
    broken = job_at("failed_once").run
    assert broken.budget.pending == Failure(epoch=2, node="host-1", message="exit 1", step=8)
    assert (broken.number, broken.left_step, broken.has_session, broken.ever_stepped) == (1, 8, True, True)
    assert job_at("taken_up").run.reopened == 1
    known = job_at("listening").recollection
    assert (known.listening, known.epoch, known.settings_epoch) == (True, 1, 1)


def resumed(moment: str) -> tuple[Driven, list[Node]]:
    """A master over the record, and its agents, who were connected a moment ago."""
    job = Driven(settings(min_nodes=2))
    state = job_at(moment)
    job.state = brain.recover(state, state.generation + 1, job.now)
    for node in state.nodes.values():
        job.nodes.append(Node(job, node.incarnation, node.name, node.request))
        job.event(StreamOpened(node.name, node.incarnation))
    for record in state.checkpoints:
        job.sealed.append(to_proto(state, record))
    return job, job.nodes


def test_a_recorded_growth_ends_as_one() -> None:
    """Under the next master the last node drains, all join, one converts, and the world is one that has grown."""
    job, (a, b, c) = resumed("drained")
    assert b.drained(5).code == "OK"
    assert job.phase is Phase.FORMING
    all_join([a, b, c])
    a.convert()
    a.converts(control_pb2.CONVERSION_STATE_READY)
    assert job.phase is Phase.RUNNING
    assert job.members == ["host-0", "host-1", "host-2"]
    assert job.job.world is not None
    assert job.job.world.grown
    assert job.job.world.left_step == 5


def test_a_recorded_growth_that_is_withdrawn_is_none() -> None:
    """Its save fails; then a node is lost, and the world after that has not grown by the newcomer."""
    job, (a, b, c) = resumed("growing")
    c.join()
    assert a.save_failed(4).code == "OK"
    assert job.phase is Phase.RUNNING
    b.hang_up()
    job.wait(8.0)
    all_join([a, c])
    for node in (a, c):
        if node.lease:
            node.convert()
            node.converts(control_pb2.CONVERSION_STATE_READY)
    job.wait(1.0)
    assert job.phase is Phase.RUNNING
    assert job.members == ["host-0", "host-2"]
    assert job.job.world is not None
    assert not job.job.world.grown


def test_every_value_of_a_job_is_stored() -> None:
    """Also of the objects inside it: none is at its default here, and each comes back."""
    job = job_at("converting")
    conversion, failure = job.conversion, job_at("failed_once").run.budget.pending
    shapes = Shapes((1, 2), (FailedShape(3, 2, ("k",), 4, True, "it"),))
    back = (GoneBack(8, 2, 9),)
    budget = Budget(1, 2, failure, ("i",), "x", 3)
    job.run = Run(2, True, 3, True, True, budget, 4, 5, 6.0, 7, back, shapes, (Milestone("r", "a", 1),))
    job.next = NextWorld(("a",), True, True, conversion, job_at("verifying").verification, 7)
    job.recollection = Recollection(True, 3, 2)
    for inside in (job.run, job.run.budget, shapes, job.next, job.recollection):
        plain = type(inside)()
        assert [
            field.name for field in fields(inside) if getattr(inside, field.name) == getattr(plain, field.name)
        ] == []
    assert JobCodec().decode(JobCodec.everything(job)) == job


def test_a_copy_of_a_job_stays_as_it_was() -> None:
    """Whatever becomes of the job: what changes in place is copied."""
    job = job_at("drained")
    before, stored = job.copy(), JobCodec.everything(job)
    assert job.opened is not None
    for incarnation in job.opened.parts:
        job.opened.parts[incarnation] = MemberState.LOST
    for name in list(job.nodes):
        job.nodes.drop(name)
    job.losses["a"] = job.arrivals = 7
    job.holds["a"] = 30.0
    assert JobCodec.everything(before) == stored
