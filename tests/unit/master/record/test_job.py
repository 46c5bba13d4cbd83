"""The real brain behind the driver's interface: beginnings, encoding, and who is shown what."""

from __future__ import annotations

import pytest

from dalsegno.master.brain.events import Called
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


def test_embedded_is_said_by_each_start() -> None:
    """A job that went on under a master of its own is not embedded any more."""
    saved = registered(JobBrain("job", None, embedded=True))
    assert JobBrain("job", None, embedded=True).begin(saved, 2, 0.0).job.embedded
    assert not JobBrain("job", None).begin(saved, 2, 0.0).job.embedded
