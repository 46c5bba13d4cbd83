"""The real brain behind the driver's interface: beginnings, encoding, and who is shown what."""

from __future__ import annotations

import pytest

from dalsegno.master.brain.events import Called
from dalsegno.master.brain.live import State
from dalsegno.master.brain.registration import settings_proto
from dalsegno.master.brain.state import Phase
from dalsegno.master.record.codec import JobCodec
from dalsegno.master.record.store import StoreError
from dalsegno.master.server.job_brain import JobBrain
from dalsegno.protos import control_pb2 as pb
from tests.support.jobs.master_process import settings


def registered(brain: JobBrain, incarnation: str = "1") -> dict[str, bytes]:
    """The stored rows of a job with one registered node `a`."""
    state = brain.begin({}, 1, 0.0)
    request = pb.RegisterRequest(job_id="job", node="a", incarnation=incarnation, settings=settings((2, 3)))
    state, replies = brain.handle_all(state, [Called(request)], 0.0)
    assert [reply.code if reply is not None else "" for reply in replies] == ["OK"]
    return {key: data for key, data in brain.changes(state).items() if data is not None}


def test_the_stored_job_comes_back_whole() -> None:
    """Encode, decode, encode: the same bytes but for the generation, which only grows."""
    brain = JobBrain("job", None)
    saved = registered(brain)
    again = brain.begin(saved, 2, 100.0)
    assert brain.generation(again) == 2
    again.job.generation = 1
    assert JobCodec.everything(again.job) == saved


def test_a_directive_is_only_for_the_incarnation_that_is_registered() -> None:
    """An older one of the same name, and an unknown name, are shown nothing: they are fenced."""
    brain = JobBrain("job", None)
    state = brain.begin(registered(brain, "2"), 2, 0.0)
    common = brain.look(state)
    assert brain.key(common, "a", "2") is not None
    assert brain.key(common, "a", "1") is None
    assert brain.key(common, "b", "2") is None


def test_nnodes_belong_to_the_job() -> None:
    """Given to the master they bind the agents; a restart may repeat them, not change them."""
    brain = JobBrain("job", (2, 4))
    assert (brain.begin({}, 1, 0.0).job.settings.min_nodes, brain.begin({}, 1, 0.0).job.fixed_nnodes) == (2, True)
    saved = registered(brain)
    for same in (None, (2, 4)):
        assert JobBrain("job", same).begin(saved, 2, 0.0).job.settings.max_nodes == 4
    with pytest.raises(StoreError, match="has --nnodes 2:4 in this store, not 1:4"):
        JobBrain("job", (1, 4)).begin(saved, 2, 0.0)


class Stored:
    """A job's rows, over which one master after the other begins."""

    def __init__(self) -> None:
        self.rows: dict[str, bytes] = {}

    def begin(self, nnodes: tuple[int, int] | None) -> Stored:
        self.brain = JobBrain("job", nnodes)
        self.state: State = self.brain.begin(self.rows, len(self.rows) + 1, 0.0)
        return self

    def call(self, request: object) -> pb.Settings:
        """The settings that the job has then."""
        self.state, replies = self.brain.handle_all(self.state, [Called(request)], 1.0)  # type: ignore[arg-type]
        assert [reply.code if reply is not None else "" for reply in replies] == ["OK"]
        for key, row in self.brain.changes(self.state).items():
            if row is None:
                self.rows.pop(key, None)
            else:
                self.rows[key] = row
        return settings_proto(self.state.job.settings)

    def register(self, incarnation: str, nnodes: tuple[int, int], drain_timeout: float) -> pb.Settings:
        request = pb.RegisterRequest(job_id="job", incarnation=incarnation, settings=settings(nnodes))
        request.settings.drain_timeout = drain_timeout
        return self.call(request)

    def stop(self) -> None:
        self.call(pb.StopRequest(job_id="job"))
        if self.state.job.phase is not Phase.STOPPED:
            node = next(iter(self.state.job.nodes.values()))
            self.call(pb.LeaveRequest(caller=pb.Caller(job_id="job", incarnation=node.incarnation), gone=True))
        assert self.state.job.phase is Phase.STOPPED


def test_a_masters_nnodes_hold_nothing_but_themselves_and_only_while_it_says_them() -> None:
    """A job that has ended takes its next agent's other settings, and other bounds of its next master, or none."""
    job = Stored().begin((1, 4))
    assert job.register("a", (1, 2), 10.0).drain_timeout == 10.0
    job.stop()
    job.call(pb.StartRequest(job_id="job"))
    new = job.register("b", (1, 2), 250.0)
    assert (new.drain_timeout, new.max_nodes) == (250.0, 4)
    job.stop()
    job.begin((1, 8)).call(pb.StartRequest(job_id="job"))
    assert job.register("c", (1, 2), 10.0).max_nodes == 8
    job.stop()
    job.begin(None).call(pb.StartRequest(job_id="job"))
    assert job.register("d", (1, 2), 10.0).max_nodes == 2


def test_a_stop_and_a_start_let_the_settings_change() -> None:
    """As the pages say. Nodes that have gone do not: whoever comes first after a cut is not to decide for all."""
    job = Stored().begin(None)
    job.register("a", (1, 2), 10.0)
    job.call(pb.LeaveRequest(caller=pb.Caller(job_id="job", incarnation="a"), gone=True))
    assert len(job.state.job.nodes) == 0
    assert job.register("b", (1, 8), 250.0).max_nodes == 2
    job.call(pb.LeaveRequest(caller=pb.Caller(job_id="job", incarnation="b"), gone=True))
    job.stop()
    job.call(pb.StartRequest(job_id="job"))
    new = job.register("c", (1, 8), 250.0)
    assert (new.drain_timeout, new.max_nodes) == (250.0, 8)


def test_a_master_that_stood_by_takes_the_job_over_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Its look found nothing against its other bounds: the job was stopped then, or there was none yet."""
    job = Stored()
    early, late, same = (JobBrain("job", nnodes) for nnodes in ((1, 8), (1, 8), (1, 4)))
    early.check(job.rows)
    job.begin((1, 4)).register("a", (1, 2), 10.0)
    with pytest.raises(StoreError, match="has --nnodes 1:4 in this store, not 1:8"):
        late.check(job.rows)
    job.stop()
    late.check(job.rows)
    same.check(job.rows)
    job.call(pb.StartRequest(job_id="job"))
    job.register("b", (1, 2), 10.0)
    for brain in (early, late):
        assert brain.begin(job.rows, 9, 0.0).job.settings.max_nodes == 4
        assert "the running job keeps its --nnodes 1:4, not this master's 1:8" in caplog.text
        caplog.clear()
    assert same.begin(job.rows, 9, 0.0).job.settings.max_nodes == 4
    assert not caplog.text


def test_other_bounds_end_a_limit_that_was_within_the_last_ones() -> None:
    """The same ones keep it."""
    job = Stored().begin((1, 4))
    job.register("a", (1, 2), 10.0)
    job.call(pb.ScaleRequest(job_id="job", nodes=2))
    assert job.state.job.limit == 2
    job.stop()
    assert job.begin((1, 4)).state.job.limit == 2
    assert job.begin((3, 8)).state.job.limit == 0


def test_embedded_is_said_by_each_start() -> None:
    """A job that went on under a master of its own is not embedded any more."""
    saved = registered(JobBrain("job", None, embedded=True))
    assert JobBrain("job", None, embedded=True).begin(saved, 2, 0.0).job.embedded
    assert not JobBrain("job", None).begin(saved, 2, 0.0).job.embedded
