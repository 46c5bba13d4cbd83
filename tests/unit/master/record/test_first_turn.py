"""A master's first turn over a record: what goes in it is gone for the next master, too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from dalsegno.master.brain.chronicle import EpochRecord
from dalsegno.master.brain.events import Called, Event, Reply, Tick
from dalsegno.master.brain.published import Pruned
from dalsegno.master.brain.state import Checkpoint, Checkpoints, Job, Phase
from dalsegno.master.record.codec import JobCodec
from dalsegno.master.record.store import MemoryStore, StoreError
from dalsegno.master.server.job_brain import JobBrain
from dalsegno.protos import control_pb2
from dalsegno.protos.processes import Process
from tests.support.jobs.masters import PROBE, Driven, Node, all_join, settings

RECORDED = Path(__file__).parents[2] / "recorded" / "master_state_1.json"


class Master:
    """A master process over a store, as the driver runs it."""

    def __init__(self, store: MemoryStore, *, embedded: bool = False, gone: int = 0, job_id: str = "job") -> None:
        self.store = store
        self.brain = JobBrain(job_id, None, embedded=embedded, is_gone=lambda process: process.pid == gone)
        self.generation = store.raise_generation()
        self.state = self.brain.begin(store.load(), self.generation, 5000.0)

    @property
    def job(self) -> Job:
        return self.state.job

    def turn(self, event: Event) -> Reply | None:
        self.state, replies = self.brain.handle_all(self.state, [event], 5001.0)
        assert not self.state.faults
        self.store.save(self.brain.changes(self.state), self.generation)
        assert self.store.load() == JobCodec.everything(self.state.job)
        return replies[0]

    def lets_in(self, new_run: bool = False) -> None:
        """An agent of another start registers."""
        request = control_pb2.RegisterRequest(
            job_id="job", incarnation="new", secret=b"x" * 16, protocol=1, host="host"
        )
        request.nproc, request.probe, request.new_run = 1, PROBE, new_run
        request.settings.CopyFrom(settings(min_nodes=2))
        reply = self.turn(Called(request))
        assert reply is not None
        assert reply.code == "OK"


def stored(job: Job) -> MemoryStore:
    store = MemoryStore()
    store.save(dict(JobCodec.everything(job)), 0)
    return store


def trained(embedded: bool = False) -> tuple[Driven, list[Node]]:
    """Two nodes, and a commit."""
    job = Driven(settings(min_nodes=2, max_restarts=0), embedded=embedded)
    nodes = job.start(2)
    nodes[0].step(5)
    nodes[0].save(5)
    nodes[0].step(6)
    return job, nodes


def failed() -> Job:
    job, nodes = trained(embedded=True)
    for node in nodes:
        node.failed("boom", 6)
    job.wait(1.0)
    all_join(nodes)
    job.wait(2.0)
    assert job.phase is Phase.FAILED
    return job.job


def finished() -> Job:
    job, nodes = trained(embedded=True)
    for node in nodes:
        node.finished(6)
    job.wait(3.0)
    assert job.phase is Phase.SUCCEEDED
    return job.job


def test_a_failed_job_that_is_taken_up_again_can_be_started_once_more() -> None:
    """The master ends while it waits for the other node."""
    store = stored(failed())
    Master(store, embedded=True).lets_in()
    assert "world" not in store.load()
    again = Master(store, embedded=True)
    assert (again.job.phase, again.job.world, [one.step for one in again.job.checkpoints]) == (Phase.WAITING, None, [5])


def test_a_new_run_has_nothing_of_the_last_one_for_the_next_master() -> None:
    """Its checkpoints, and what is told of its worlds."""
    store = stored(finished())
    Master(store, embedded=True).lets_in(new_run=True)
    again = Master(store, embedded=True).job
    assert (again.run_id, again.phase, len(again.checkpoints), again.history) == ("run-0002", Phase.WAITING, 0, ())


def test_a_stopped_job_that_is_started_can_be_started_once_more() -> None:
    """The order to start is the first that a standing master hears."""
    job, nodes = trained()
    job.call(control_pb2.StopRequest(job_id="job"))
    for node in nodes:
        node.drained(6)
    job.wait(1.0)
    for node in nodes:
        node.goodbye()
    assert job.phase is Phase.STOPPED
    store = stored(job.job)
    Master(store).turn(Called(control_pb2.StartRequest(job_id="job")))
    assert Master(store).job.phase is Phase.WAITING


def test_a_node_that_was_gone_when_the_master_came_back_stays_so() -> None:
    """Its row goes with the first turn."""
    job = trained()[0].job
    for number, node in enumerate(list(job.nodes.values()), 1):
        job.nodes.put(node.name, replace(node, process=Process("machine", "boot", "ns", number, 1)))
    first, second = job.nodes
    store = stored(job)
    Master(store, gone=1).turn(Tick())
    assert list(Master(store).job.nodes) == [second] != [first]


def test_the_record_of_format_1_is_gone_after_the_first_turn() -> None:
    """Otherwise it would be read again, instead of all that came after it."""
    store = MemoryStore()
    store.save({"record": RECORDED.read_bytes()}, 0)
    job_id = JobCodec().decode(store.load()).job_id
    master = Master(store, job_id=job_id)
    master.turn(Tick())
    assert "record" not in store.load()
    assert Master(store, job_id=job_id).job.nodes == master.job.nodes


def _no_world(job: Job) -> None:
    job.opened, job.phase = None, Phase.WAITING


def _no_checkpoints(job: Job) -> None:
    job.checkpoints = Checkpoints()


def _no_node(job: Job) -> None:
    job.nodes.drop(next(iter(job.nodes)))


def _none_of(what: str, job: Job) -> None:
    setattr(job, what, ())


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (_no_world, "world"),
        (_no_checkpoints, "checkpoint"),
        (_no_node, "node"),
        (partial(_none_of, "late"), "late"),
        (partial(_none_of, "pruned"), "pruned"),
        (partial(_none_of, "history"), "epoch"),
        (partial(_none_of, "events"), "event"),
    ],
)
def test_each_kind_of_row_is_deleted_with_the_first_changes(change: Callable[[Job], None], kind: str) -> None:
    """Nothing was encoded yet of which the codec could know that it is there."""
    before = trained()[0].job
    before.late = (Checkpoint("step-3.e1.1", "late", 3, 1, 2),)
    before.pruned = (Pruned(1, "step-1.e1.1", "pruned"),)
    rows = JobCodec.everything(before)
    codec = JobCodec()
    job = codec.decode(rows)
    change(job)
    changes = codec.changes(job)
    deleted = {key for key, row in changes.items() if row is None}
    assert {key.partition("/")[0] for key in deleted} == {kind}
    assert {key: row for key, row in (rows | changes).items() if row is not None} == JobCodec.everything(job)
    assert codec.changes(job) == {}


def test_deletions_wait_for_changes_that_can_be_encoded() -> None:
    """A call that fails stores nothing."""
    codec = JobCodec()
    job = codec.decode(JobCodec.everything(trained()[0].job))
    _no_world(job)
    run, job.run = job.run, None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        codec.changes(job)
    job.run = run
    assert codec.changes(job)["world"] is None


def test_a_world_that_was_left_on_the_record_is_none() -> None:
    """An earlier version left it, and wrote that there are no parts: such a record is readable."""
    job = failed()
    rows = JobCodec.everything(job)
    again = JobCodec().decode(rows)
    again.opened, again.phase = None, Phase.WAITING
    left = JobCodec.everything(again) | {"world": rows["world"]}
    codec = JobCodec()
    found = codec.decode(left)
    assert (found.world, found.phase, [one.step for one in found.checkpoints]) == (None, Phase.WAITING, [5])
    assert codec.changes(found)["world"] is None


def test_a_world_at_work_has_parts() -> None:
    """Without them the record is damaged."""
    rows = JobCodec.everything(trained()[0].job)
    with pytest.raises(StoreError, match="parts"):
        JobCodec().decode(rows | {"parts": b""})


def test_checkpoints_that_were_left_of_the_run_before_do_not_count() -> None:
    """An earlier version left them when a new run was begun: without a step of its own it has committed none."""
    rows = JobCodec.everything(finished())
    store = MemoryStore()
    store.save(dict(rows), 0)
    Master(store, embedded=True).lets_in(new_run=True)
    left = {key: row for key, row in rows.items() if key.startswith(("checkpoint/", "epoch/", "world"))}
    codec = JobCodec()
    found = codec.decode(left | store.load())
    assert (found.run_id, len(found.checkpoints), found.history, found.world) == ("run-0002", 0, (), None)
    changes = codec.changes(found)
    assert {key for key, row in changes.items() if row is None} == set(left)


def test_checkpoints_of_a_run_that_has_made_steps_count() -> None:
    """Whoever began it."""
    job = failed()
    job.run = replace(job.run, number=2, begun_anew=True)
    job.history = (EpochRecord(1, 2, 2, "", 0, False, 0.0, 0, 1, 6, stepped_at=1.0),)
    assert JobCodec().decode(JobCodec.everything(job)) == job


def test_rows_of_a_kind_that_a_newer_version_writes_stay() -> None:
    """That one may come back, and reads them; what went of the kinds of this version, and of older ones, goes."""
    rows = JobCodec.everything(trained()[0].job)
    newer = {"lease/a": b"{}", "worlds": b"[]"}
    gone = dict.fromkeys(("late/gone", "record"), rows[next(key for key in rows if key.startswith("checkpoint/"))])
    codec = JobCodec()
    job = codec.decode(rows | newer | gone)
    job.late = ()
    deleted = {key for key, row in codec.changes(job).items() if row is None}
    assert deleted == set(gone)
