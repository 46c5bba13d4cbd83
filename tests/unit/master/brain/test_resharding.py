"""When a world of another size loads the shards as they lie, and when they are converted after all."""

from __future__ import annotations

from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, settings, stored

AUTO = settings(universal_checkpoint=False)
SHARDED, UNIVERSAL = control_pb2.FORM_SHARDED, control_pb2.FORM_UNIVERSAL


def shrunk(job: Driven) -> Node:
    """A world of two has committed step 3, which others can load; one of its nodes died, and the other is back."""
    a, b = job.start(2)
    assert a.commit(job.seal(3, reshards=True)).code == "OK"
    b.hang_up()
    job.wait(2)
    a.join()
    return a


def test_another_size_needs_no_conversion() -> None:
    job = Driven(AUTO)
    a = shrunk(job)
    assert job.phase is Phase.RUNNING
    assert a.directive.run.resume.form == SHARDED
    assert a.directive.run.resume.source.shape.reshards
    a.step(4)
    assert "resumed at step 3 (re-sharded)" in job.notices


def test_universal_files_come_first_where_that_is_asked_for() -> None:
    job = Driven(settings(universal_checkpoint=True, universal_gate=True))
    a = shrunk(job)
    assert job.phase is Phase.FORMING
    assert a.lease
    a.convert()
    assert a.directive.run.resume.form == UNIVERSAL
    a.step(4)
    assert "resumed at step 3 (universal)" in job.notices


def test_the_same_size_is_no_resharding() -> None:
    job = Driven(AUTO)
    (a,) = job.start(1)
    assert a.commit(job.seal(3, reshards=True)).code == "OK"
    a.failed()
    a.join()
    a.step(4)
    assert "resumed at step 3, paused" in job.notices


def test_what_cannot_be_loaded_so_is_converted() -> None:
    """Nobody asks why: another version of DeepSpeed, another layout. Also a master that is restarted knows it."""
    job = Driven(settings(universal_checkpoint=False, max_restarts=0))
    a = shrunk(job)
    a.failed()
    a.join()
    assert job.phase is Phase.FORMING
    assert a.lease
    assert "it is converted instead" in job.notices
    assert not stored(job.job).checkpoints[-1].reshards
    a.convert()
    assert a.directive.run.resume.form == UNIVERSAL


def test_a_failure_after_the_first_step_says_nothing_about_it() -> None:
    job = Driven(AUTO)
    a = shrunk(job)
    a.step(4)
    a.failed()
    a.join()
    assert job.phase is Phase.RUNNING
    assert a.directive.run.resume.form == SHARDED


def test_universal_files_that_are_there_come_first() -> None:
    """A master that lost its record does not know that re-sharding failed; what was made because of that is there."""
    job = Driven(AUTO)
    a = shrunk(job)
    a.failed()
    a.join()
    universal = a.convert()
    assert a.directive.run.resume.form == UNIVERSAL
    everything = [*job.sealed, universal]
    job.restart(keep_store=False)
    again = job.node(inventory=everything)
    again.join(everything)
    job.wait(20)
    again.join(everything)
    job.wait(2)
    assert again.directive.run.resume.form == UNIVERSAL


def test_a_silent_node_may_be_why_the_ranks_failed() -> None:
    """Nobody has noticed yet that it is gone: that is no reason to convert from now on."""
    job = Driven(settings(universal_checkpoint=False, node_timeout=15))
    a, b = job.start(2)
    c = job.node()
    c.join()
    c.warm()
    a.step(1)
    assert a.commit(job.seal(2, reshards=True)).code == "OK"
    for node in (a, b):
        node.drained(2)
    for node in (a, b, c):
        node.join()
    assert (len(job.members), job.phase) == (3, Phase.RUNNING)
    job.silent.add(c.incarnation)
    job.wait(5.5)
    a.failed()
    for node in (a, b):
        node.join()
    assert c.is_known
    assert job.phase is Phase.RUNNING
    assert stored(job.job).checkpoints[-1].reshards


def test_a_refusal_of_what_was_resharded_is_a_cause() -> None:
    """Otherwise the next world would be said to open for the newcomer alone."""
    job = Driven(AUTO)
    a = shrunk(job)
    refusal = control_pb2.FailureRequest(
        caller=a.caller(), kind=control_pb2.FAILURE_KIND_REFUSED, exit_code=1, message="other data"
    )
    assert job.call(refusal).code == "OK"
    late = job.node()
    late.join()
    a.join()
    assert len(job.members) == 2
    a.step(4)
    assert "the ranks refused what they re-sharded, host-1 joined, 2 nodes" in job.notices
