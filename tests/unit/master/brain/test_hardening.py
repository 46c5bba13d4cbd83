"""What a sceptic found: each of these once went wrong."""

from __future__ import annotations

import pytest

from dalsegno.master.brain import registration
from dalsegno.master.brain.events import StreamClosed, StreamOpened
from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, all_join, settings


def trained(job: Driven, nodes: list[Node], steps: int = 4) -> control_pb2.Checkpoint:
    """Some steps and a commit."""
    for step in range(1, steps + 1):
        for node in nodes:
            node.step(step)
    return nodes[0].save(steps)


def test_damage_reported_after_a_peers_exit_is_no_failure_of_the_script() -> None:
    """The rank that found the damage may be heard last; the checkpoint is verified, the budget untouched."""
    job = Driven(settings(max_restarts=0))
    a, b = job.start(2)
    saved = trained(job, [a, b])
    b.failed("exit 84")
    assert job.phase is Phase.FORMING
    assert a.bad(saved.ref).code == "OK"
    all_join([a, b])
    assert job.job.verification is not None
    verifier = a if a.directive.verify.number else b
    verifier.verified(intact=False)
    all_join([a, b])
    assert job.phase is Phase.RUNNING
    assert not a.directive.run.HasField("resume")
    assert job.job.run.budget.failures == 0


def test_a_blamed_peer_that_reports_no_damage_is_a_failure() -> None:
    """Otherwise a script that always exits with that code would be started for ever."""
    job = Driven(settings(max_restarts=0))
    (a,) = job.start(1)
    trained(job, [a])
    request = control_pb2.FailureRequest(caller=a.caller(), kind=control_pb2.FAILURE_KIND_PEER, message="exit 84")
    job.call(request)
    all_join([a])
    job.wait(1)
    assert job.phase is Phase.FAILED


def test_a_save_of_any_node_is_motion() -> None:
    """Each node counts its own bytes."""
    job = Driven(settings(stall_timeout=40))
    a, b = job.start(2)
    for node, size in ((a, 1000), (b, 1), (b, 2), (b, 3)):
        request = control_pb2.ProgressRequest(caller=node.caller(number=0), has_session=True, saved_bytes=size)
        job.call(request)
        job.wait(30)
    assert job.phase is Phase.RUNNING


def test_a_silent_node_is_what_broke_its_world() -> None:
    """A node that lost power is not declared dead yet when the others have gathered: still no script failure."""
    job = Driven(settings(max_restarts=0, node_timeout=12.0))
    a, b = job.start(2)
    saved = trained(job, [a, b])
    job.silent.add(b.incarnation)
    job.wait(0.5)
    a.failed("collective broke", 4)
    a.join()
    job.wait(5)
    assert a.lease, "the smaller world needs the universal form"
    a.convert()
    assert job.phase is Phase.RUNNING
    assert job.members == [a.name]
    assert a.directive.run.resume.source.ref == saved.ref


def test_a_newcomer_that_does_not_see_the_checkpoints_starts_no_drain() -> None:
    """It would only make the world stop for nothing, again and again."""
    job = Driven()
    (a,) = job.start(1)
    trained(job, [a])
    late = job.node()
    late.join(sees=[])
    late.warm()
    a.failed("exit 1", 4)
    a.join()
    late.join(sees=[])
    job.wait(1)
    assert job.members == [a.name]
    late.join(sees=[])
    late.warm()
    a.step(5)
    job.wait(20)
    assert job.phase is Phase.RUNNING
    assert late.directive.wait.look_for.digest
    late.join()
    job.wait(1)
    assert job.phase is Phase.DRAINING


def test_a_damaged_form_is_never_adopted_again() -> None:
    """Its manifest is intact, so every inventory goes on listing it."""
    job = Driven()
    a, b = job.start(2)
    trained(job, [a, b])
    b.hang_up()
    job.wait(2)
    a.join()
    form = a.convert()
    assert job.phase is Phase.RUNNING
    a.bad(form.ref, control_pb2.FORM_UNIVERSAL)
    a.join()
    a.verified(intact=False)
    a.join()
    record = job.job.checkpoints[-1]
    assert record.universal_digest == ""
    assert a.lease > 1
    assert a.convert().ref != form.ref
    assert job.phase is Phase.RUNNING


def test_a_stream_that_breaks_for_an_instant_in_troubled_times_kills_nobody() -> None:
    """After a failure report a closed stream counts at once, but not of those who have joined again since."""
    job = Driven()
    a, b = job.start(2)
    trained(job, [a, b])
    a.failed("exit 1", 4)
    b.join()
    job.event(StreamClosed(b.name, b.incarnation))
    job.event(StreamOpened(b.name, b.incarnation))
    assert b.is_known
    job.event(StreamClosed(a.name, a.incarnation))
    assert not a.is_known


def test_long_steps_give_a_broken_stream_time_to_come_back() -> None:
    """Peers that are in the middle of a long step do not stand still; a survivor's failure report counts at once."""
    job = Driven()
    a, b = job.start(2)
    trained(job, [a, b])
    job.call(control_pb2.ProgressRequest(caller=a.caller(number=0), step=5, has_session=True, longest=3.0))
    b.hang_up()
    job.wait(3)
    assert b.is_known
    job.wait(1)
    assert not b.is_known
    a.join()
    a.convert()
    c = job.node()
    assert job.phase is Phase.RUNNING
    c.hang_up()
    job.wait(1.2)
    assert not c.is_known, "nobody's steps tell of a spare"


def test_when_every_stream_closes_nobody_is_declared_dead() -> None:
    """The path to the master broke: the nodes come back and go on."""
    job = Driven()
    a, b = job.start(2)
    trained(job, [a, b])
    for node in (a, b):
        node.hang_up()
    job.wait(60)
    assert job.phase is Phase.RUNNING
    job.silent.clear()
    for node in (a, b):
        job.event(StreamOpened(node.name, node.incarnation))
        node.step(5)
    job.wait(5)
    assert (job.phase, job.epoch) == (Phase.RUNNING, 1)


def test_registering_again_does_not_raise_the_generation() -> None:
    """It would make the answers to everybody else's calls look like an older master's."""
    job = Driven()
    job.start(1)
    before = job.job.generation
    job.node(generation=before, previous_incarnation="fenced")
    assert job.job.generation == before
    job.node(generation=before + 5)
    assert job.job.generation > before + 5


def test_a_new_run_may_have_another_directory() -> None:
    """The old run's probe is not asked of the new one."""
    job = Driven(embedded=True)
    (a,) = job.start(1)
    trained(job, [a])
    a.finished(4)
    assert job.phase is Phase.SUCCEEDED
    a.hang_up()
    b = job.node(probe="another directory", new_run=True)
    b.join()
    job.wait(2)
    assert (job.phase, job.members) == (Phase.RUNNING, [b.name])


def test_two_attempts_of_one_step_count_once_after_a_lost_store() -> None:
    """A save that failed after sealing leaves both; the later one is the run's."""
    job = Driven()
    (a,) = job.start(1)
    first = trained(job, [a])
    again = control_pb2.Checkpoint()
    again.CopyFrom(first)
    again.ref.name, again.ref.digest = "step-4.e1.2", "digest of step-4.e1.2"
    job.restart(keep_store=False)
    b = job.node(epoch=1, generation=1, inventory=[first, again])
    job.wait(7)
    b.join(sees=[first, again])
    job.wait(2)
    assert job.phase is Phase.RUNNING
    assert b.directive.run.resume.source.ref == again.ref


def test_the_shortest_notice_bounds_the_drain() -> None:
    """A leaver is gone when it said, whatever the job's drain-timeout is, and a second leaver does not put that off."""
    job = Driven(settings(drain_timeout=60.0))
    a, b, c = job.start(3)
    trained(job, [a, b, c])
    b.leave(notice=5.0)
    job.wait(3)
    c.leave(notice=30.0)
    job.wait(1)
    assert job.phase is Phase.DRAINING
    job.wait(2)
    assert job.phase is Phase.FORMING


def test_an_earlier_leaver_that_lingers_does_not_shorten_a_later_notice() -> None:
    """It is no member any more: only the notices of working leavers count."""
    job = Driven(settings(drain_timeout=60.0))
    a, b, c = job.start(3)
    trained(job, [a, b, c])
    c.leave(notice=5.0)
    for node in (a, b, c):
        node.drained(4)
    all_join([a, b])
    if a.lease:
        a.convert()
    assert job.members == [a.name, b.name]
    a.step(5)
    job.wait(20)
    assert c.is_known
    b.leave(notice=10.0)
    job.wait(8)
    assert job.phase is Phase.DRAINING


def test_a_stall_makes_more_patient() -> None:
    """What looked like a stall may have been the first evaluation: the second time it may take longer."""
    job = Driven(settings(stall_timeout=600.0, max_restarts=9))
    (a,) = job.start(1)
    a.step(1)
    job.wait(61)
    assert job.phase is not Phase.RUNNING
    a.join()
    job.wait(2)
    a.step(1)
    job.wait(100)
    assert job.phase is Phase.RUNNING
    job.wait(25)
    assert job.phase is not Phase.RUNNING


def test_a_restarted_master_remembers_who_is_a_spare() -> None:
    """The hold begins anew, with its full time."""
    job = Driven()
    a, b = job.start(2)
    trained(job, [a, b])
    job.job.holds[b.name] = 30.0
    job.restart()
    assert job.state.live.held_until[b.name] == job.now + 30.0


def test_the_number_of_nodes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is told to come again; a known one that repeats its call, or starts anew, is let in."""
    monkeypatch.setattr(registration, "MOST_NODES", 2)
    job = Driven()
    a, _ = job.start(2)
    stranger = Node(job, "stranger")
    refused = stranger.register()
    assert refused.code == "RESOURCE_EXHAUSTED"
    assert "2 nodes are registered" in refused.detail
    assert a.register().code == "OK"
    assert Node(job, "a again", secret=a.secret).register(previous_incarnation=a.incarnation).code == "OK"
