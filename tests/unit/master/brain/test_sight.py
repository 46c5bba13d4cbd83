"""A resume point that is damaged or gone while nodes gather: the run goes back by one, loudly, never for one node."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dalsegno.master.brain import brain, sight
from dalsegno.master.brain.state import Checkpoint, Phase
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, all_join, settings


def gathering(
    count: int, steps: tuple[int, ...] = (2, 4), any_size: bool = True, **options: int
) -> tuple[Driven, list[Node], list[control_pb2.Checkpoint]]:
    """A world that committed these steps, which everybody has seen, and then broke: all are asked to join."""
    job = Driven(settings(stall_timeout=6000.0, **options))
    nodes = job.start(count)
    nodes[0].step(1)
    made = []
    for step in steps:
        made.append(job.seal(step, any_size=any_size))
        assert nodes[0].commit(made[-1]).code == "OK"
        if count > 1:
            nodes[1].sights()
    nodes[0].failed()
    assert job.phase is Phase.FORMING
    return job, nodes, made


def record(job: Driven, made: control_pb2.Checkpoint) -> Checkpoint:
    found = job.job.checkpoint(made.ref.digest)
    assert found is not None
    return found


def verifier(nodes: list[Node]) -> Node:
    (found,) = [node for node in nodes if node.directive.verify.number]
    return found


# ---- its manifest is not the recorded one ----------------------------------------------------------------------------


def test_an_unusable_manifest_is_verified_by_another_and_the_run_goes_back() -> None:
    """One flipped bit in the newest manifest: retired only after a second look, in a line that says to where."""
    job, (a, b), (older, newest) = gathering(2)
    a.join(sees=[older], unusable=[newest.ref.name])
    b.join(sees=[older], unusable=[newest.ref.name])
    assert not record(job, newest).retired
    assert verifier([a, b]) is b
    assert b.directive.verify.ref == newest.ref
    b.verified(intact=False)
    assert record(job, newest).retired
    assert f"{newest.ref.name} is damaged" in job.notices
    assert f"going back to {older.ref.name}" in job.notices
    all_join([a, b])
    assert job.members == [a.name, b.name]
    assert a.directive.run.resume.source.ref == older.ref


def test_who_alone_reads_another_manifest_is_a_spare() -> None:
    """It verifies elsewhere: nothing is retired, and the world opens from it without the one that cannot read it."""
    job, (a, b), (older, newest) = gathering(2)
    a.join(sees=[older], unusable=[newest.ref.name])
    b.join()
    verifier([a, b]).verified(intact=True)
    assert not record(job, newest).retired
    assert "becomes a spare" in job.notices
    job.wait(2.0)
    assert job.members == [b.name]
    assert b.directive.run.resume.source.ref == newest.ref
    assert "it stays a spare" in a.directive.wait.reason


def test_a_former_member_that_has_a_place_no_more_is_shown_as_a_spare() -> None:
    """While the job waits for more nodes, which may be for long: "member 0 … stays a spare" was no answer."""
    job, (a, b), _ = gathering(2, min_nodes=2)
    a.probe = "of another mount"
    a.join()
    b.join()
    job.wait(2.0)
    assert job.phase in (Phase.FORMING, Phase.WAITING)
    shown = {node.node: node for node in brain.status(job.state, job.now).nodes}
    assert (shown[a.name].role, shown[b.name].role) == ("spare", "member")
    assert "it stays a spare" in shown[a.name].reason


def test_a_lone_node_verifies_what_it_could_not_read() -> None:
    """It has no second: its own second look decides, and one that verifies is used."""
    job, (a,), (older, newest) = gathering(1)
    a.join(sees=[older], unusable=[newest.ref.name])
    assert verifier([a]) is a
    a.verified(intact=False)
    a.join()
    assert a.directive.run.resume.source.ref == older.ref
    assert record(job, newest).damaged


def test_damage_without_a_checkpoint_before_starts_over_loudly() -> None:
    """Proven damage of the only one: there is nothing to wait for."""
    job, (a, b), (only,) = gathering(2, steps=(4,))
    a.join(sees=[], unusable=[only.ref.name])
    b.join(sees=[], unusable=[only.ref.name])
    verifier([a, b]).verified(intact=False)
    assert "no checkpoint is left: starting from step 0" in job.notices
    all_join([a, b])
    assert job.phase is Phase.RUNNING


def test_a_restart_during_the_second_look_asks_again() -> None:
    """The suspicion is in the record; so is the verdict."""
    job, (a, b), (older, newest) = gathering(2)
    for node in (a, b):
        node.join(sees=[older], unusable=[newest.ref.name])
    number = b.directive.verify.number
    job.restart()
    for node in (a, b):
        node.beat()
    asked = verifier([a, b])
    assert asked.directive.verify.number >= number
    asked.verified(intact=False)
    job.restart()
    for node in (a, b):
        node.beat()
    all_join([a, b])
    job.wait(2.0)
    assert a.directive.run.resume.source.ref == older.ref


def test_a_suspicion_that_the_store_brings_back_is_followed() -> None:
    """Both had joined, and the master died before it asked anybody to verify."""
    job, (a, b), (older, newest) = gathering(2)
    for node in (a, b):
        node.join(sees=[older], unusable=[newest.ref.name])
    job.job.next = replace(job.job.next, verification=None)
    job.restart()
    for node in (a, b):
        node.beat()
    verifier([a, b]).verified(intact=False)
    assert record(job, newest).retired


def test_a_second_look_may_take_longer_than_a_minute() -> None:
    """No manifest is the recorded one, so nobody has it in sight: the verdict is waited for."""
    job, (a, b), (older, newest) = gathering(2)
    for node in (a, b):
        node.join(sees=[older], unusable=[newest.ref.name])
    for part in range(1, 20):
        assert verifier([a, b]).verifies(part * 10**9).code == "OK"
        job.wait(10.0)
    assert not record(job, newest).retired
    verifier([a, b]).verified(intact=False)
    assert record(job, newest).retired


def test_what_was_said_in_an_earlier_round_is_asked_again() -> None:
    """A newcomer that could not use the manifest while the world trained may find it sound by now."""
    job, (a, b), (_, newest) = gathering(2)
    all_join([a, b])
    late = job.node()
    late.join(sees=[], unusable=[newest.ref.name])
    a.failed()
    assert job.job.verification is None
    all_join([a, b, late])
    job.wait(1)
    assert job.job.verification is None
    assert late.name in job.members


# ---- nobody has it in sight ------------------------------------------------------------------------------------------


def test_what_nobody_sees_for_a_minute_is_gone_back_from() -> None:
    """The directory is gone: all read the same probe, have looked, and the one before is there."""
    job, (a, b), (older, newest) = gathering(2)
    for node in (a, b):
        node.join(sees=[older])
    job.wait(sight.UNSEEN_LIMIT_SECONDS - 2.0)
    assert job.phase is Phase.WAITING
    assert newest.ref.name in a.directive.wait.reason
    assert not record(job, newest).retired
    job.wait(4.0)
    assert record(job, newest).retired
    line = next(notice for notice in job.job.notices if "nobody has had" in notice.text)
    assert line.warning
    assert newest.ref.name in line.text
    assert f"going back to {older.ref.name}" in line.text
    all_join([a, b])
    job.wait(2.0)
    assert job.members == [a.name, b.name]
    assert a.directive.run.resume.source.ref == older.ref


@pytest.mark.slow
def test_what_nobody_sees_is_waited_for_where_there_is_none_before() -> None:
    """It never starts over for that: the directory may be mounted after all."""
    job, (a, b), (only,) = gathering(2, steps=(4,))
    for node in (a, b):
        node.join(sees=[])
    job.wait(20 * sight.UNSEEN_LIMIT_SECONDS)
    assert job.phase is Phase.WAITING
    assert not record(job, only).retired
    assert f"cannot see {only.ref.name}" in job.state.live.missing.text
    for node in (a, b):
        node.join()
    job.wait(2.0)
    assert a.directive.run.resume.source.ref == only.ref


def test_who_alone_does_not_see_it_is_a_spare() -> None:
    """However long: the others go on from it."""
    job, (a, b), (older, newest) = gathering(2)
    a.join()
    b.join(sees=[older])
    job.wait(3 * sight.UNSEEN_LIMIT_SECONDS)
    assert job.members == [a.name]
    assert a.directive.run.resume.source.ref == newest.ref
    assert not record(job, newest).retired
    assert "a spare that keeps looking" in b.directive.wait.reason


def test_a_conversion_may_take_longer_than_a_minute() -> None:
    """Only one node has the source in sight, and makes another form of it."""
    job, (a, b), (older, newest) = gathering(2, any_size=False)
    a.join()
    b.join(sees=[older])
    for part in range(1, 20):
        a.converts(control_pb2.CONVERSION_STATE_WORKING, moved=part * 10**9)
        job.wait(10.0)
    assert not record(job, newest).retired
    a.convert()
    assert job.members == [a.name]


def test_one_that_comes_and_sees_it_in_time_stops_the_count() -> None:
    """What one node has in sight is there."""
    job, (a, b), (older, newest) = gathering(2)
    for node in (a, b):
        node.join(sees=[older])
    job.wait(sight.UNSEEN_LIMIT_SECONDS - 5.0)
    late = job.node()
    late.join()
    job.wait(3 * sight.UNSEEN_LIMIT_SECONDS)
    assert not record(job, newest).retired
    assert job.members == [late.name]


@pytest.mark.parametrize("why", ["a member reads another directory", "too few", "not asked long enough"])
def test_nothing_is_concluded_from_nodes_that_cannot_know(why: str) -> None:
    """A member whose mount is another now, fewer than the job needs, or one that has not answered yet."""
    job, (a, b), (older, newest) = gathering(2)
    a.join(sees=[older])
    if why == "a member reads another directory":
        b.probe = "somewhere else"
        b.join(sees=[older])
    elif why == "too few":
        b.hang_up()
        job.wait(2.0)
        job.job.settings = replace(job.job.settings, min_nodes=2)
    elif why == "not asked long enough":
        # It is back, and still looks.
        b.hang_up()
        job.wait(2.0)
        job.node()
        job.job.settings = replace(job.job.settings, join_timeout=1e6)
    job.wait(5 * sight.UNSEEN_LIMIT_SECONDS)
    assert not record(job, newest).retired


@pytest.mark.parametrize("who", ["a stranger", "a node whose disk hangs"])
def test_a_node_that_says_nothing_of_the_directory_does_not_hold_the_run_up(who: str) -> None:
    """A spare with another mount, or an agent that lives and never answers: the run goes back without it."""
    job, (a, b), (older, newest) = gathering(2)
    late = job.node(probe="somewhere else" if who == "a stranger" else a.probe)
    if who == "a stranger":
        late.join(sees=[older])
    for node in (a, b):
        node.join(sees=[older])
    job.wait(job.settings.join_timeout + sight.UNSEEN_LIMIT_SECONDS + 5.0)
    assert record(job, newest).retired
    all_join([a, b])
    job.wait(job.settings.join_timeout + 2.0)
    assert job.members == [a.name, b.name]


def test_a_node_that_the_restarted_master_has_not_heard_yet_may_see_it() -> None:
    """Until it is declared dead nothing is concluded without it."""
    job, (a, b), (older, newest) = gathering(2)
    a.join(sees=[older])
    b.join(sees=[older])
    job.job.settings = replace(job.job.settings, node_timeout=200.0)
    job.restart()
    job.silent.add(b.incarnation)
    job.wait(190.0)
    assert not record(job, newest).retired
    job.wait(20.0 + sight.UNSEEN_LIMIT_SECONDS)
    assert not b.is_known
    assert record(job, newest).retired


def test_a_checkpoint_that_goes_while_it_is_loaded_is_gone_back_from_too() -> None:
    """Whoever is to verify it finds nothing, which is no verdict; and nobody has it in sight."""
    job, (a, b), (older, newest) = gathering(2)
    all_join([a, b])
    assert a.directive.run.resume.source.ref == newest.ref
    a.bad(newest.ref)
    for node in (a, b):
        node.join(sees=[older])
    for _ in range(8):
        for node in (a, b):
            if node.directive.verify.number:
                number = node.directive.verify.number
                report = control_pb2.VerificationReport(
                    caller=node.caller(), number=number, inconclusive=True, message="no such directory"
                )
                assert job.call(report).code == "OK"
        job.wait(30.0)
    assert record(job, newest).retired
    assert job.job.verification is None
    all_join([a, b])
    job.wait(2.0)
    assert a.directive.run.resume.source.ref == older.ref


def test_a_form_that_is_gone_is_made_anew() -> None:
    """Nobody can verify what is not there; its source is, so nothing is lost."""
    job = Driven(settings(stall_timeout=6000.0))
    a, b = job.start(2)
    a.step(1)
    a.save(4)
    b.sights()
    b.hang_up()
    job.wait(2.0)
    a.join()
    form = a.convert()
    assert a.directive.run.resume.form == control_pb2.FORM_UNIVERSAL
    a.bad(form.ref, control_pb2.FORM_UNIVERSAL)
    a.join()
    for _ in range(2):
        number = a.directive.verify.number
        assert number
        report = control_pb2.VerificationReport(
            caller=a.caller(), number=number, inconclusive=True, message="no such directory"
        )
        assert job.call(report).code == "OK"
        job.wait(6.0)
    assert "can be neither loaded nor verified (no such directory): made anew" in job.notices
    again = a.convert()
    assert again.ref != form.ref
    assert job.phase is Phase.RUNNING


def test_a_silent_master_counts_no_minute() -> None:
    """The minute is one of listening: while nobody is heard nobody could have said that it came into sight."""
    job, (a, b), (older, newest) = gathering(2)
    for node in (a, b):
        node.join(sees=[older])
    job.wait(10.0)
    job.silent = {a.incarnation, b.incarnation}
    job.wait(10 * sight.UNSEEN_LIMIT_SECONDS)
    assert not record(job, newest).retired
    job.silent.clear()
    job.wait(sight.UNSEEN_LIMIT_SECONDS)
    assert record(job, newest).retired


def test_a_restarted_master_counts_the_minute_anew() -> None:
    """What the nodes saw is in the record; the time is not."""
    job, (a, b), (older, newest) = gathering(2)
    for node in (a, b):
        node.join(sees=[older])
    job.wait(sight.UNSEEN_LIMIT_SECONDS - 5.0)
    job.restart()
    for node in (a, b):
        node.beat()
    job.wait(sight.UNSEEN_LIMIT_SECONDS - 5.0)
    assert not record(job, newest).retired
    job.wait(10.0)
    assert record(job, newest).retired
    all_join([a, b])
    job.wait(2.0)
    assert a.directive.run.resume.source.ref == older.ref


def test_it_goes_back_as_far_as_it_must_one_at_a_time() -> None:
    """Three checkpoints, of which only the oldest is there: each step back takes its minute and its line."""
    job, (a, b), (oldest, older, newest) = gathering(2, steps=(2, 4, 6))
    for node in (a, b):
        node.join(sees=[oldest])
    job.wait(sight.UNSEEN_LIMIT_SECONDS + 5.0)
    assert record(job, newest).retired
    assert not record(job, older).retired
    for node in (a, b):
        node.join(sees=[oldest])
    job.wait(sight.UNSEEN_LIMIT_SECONDS + 5.0)
    assert record(job, older).retired
    for node in (a, b):
        node.join(sees=[oldest])
    job.wait(2.0)
    assert a.directive.run.resume.source.ref == oldest.ref


@pytest.mark.parametrize("why", ["it cannot read it", "it was refused"])
def test_a_spare_that_is_asked_for_no_join_does_not_hold_the_run_up(why: str) -> None:
    """It says nothing in this round, so nothing was ever concluded from what the others do not see."""
    job, (a, b, c), (older, newest) = gathering(3)
    node = job.job.nodes[c.name]
    spare = {"unreadable": newest.ref.digest} if why == "it cannot read it" else {"refused": "other data"}
    job.job.nodes.put(c.name, replace(node, **spare))
    for _ in range(2):
        for one in (a, b):
            one.join(sees=[older])
        job.wait(sight.UNSEEN_LIMIT_SECONDS / 2 + 1)
    assert c.order == "wait"
    assert f"going back to {older.ref.name}" in job.notices
