"""A drain's save: how long the master waits for it, what people hear of it, and who ends it without a leaver."""

from __future__ import annotations

import pytest

from dalsegno.master.brain import saves
from dalsegno.master.brain.state import MemberState, Phase
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, all_join, settings

TOGETHER, WRITE = control_pb2.ENDING_TOGETHER, control_pb2.ENDING_WRITE
WAIT, SEAL = control_pb2.ENDING_WAIT, control_pb2.ENDING_SEAL


def growing(job: Driven) -> tuple[Node, Node]:
    """Two nodes have agreed on step 2 for a newcomer, and save."""
    a, b = job.start(2)
    a.step(1)
    late = job.node()
    late.join()
    late.warm()
    a.step(2, draining=True)
    assert job.phase is Phase.DRAINING
    return a, b


def leaving(job: Driven, *leavers: int, count: int = 3, notice: float = 8.0) -> list[Node]:
    """Some of these nodes have a notice, and all have agreed on step 2 for it, and save."""
    nodes = job.start(count)
    nodes[0].step(1)
    for leaver in leavers:
        nodes[leaver].leave(notice)
    nodes[0].step(2, draining=True)
    return nodes


def test_a_leave_that_cuts_an_evaluation_short_is_agreed_at_the_step_that_was_known() -> None:
    """The ranks stood there before the notice came: its save is a drain's, and when it is over the others go on."""
    job = Driven()
    nodes = job.start(3)
    for node in nodes:
        node.step(2)
    nodes[1].leave(8.0)
    assert job.phase is Phase.DRAINING
    nodes[0].step(2, draining=True)
    assert job.state.job.drain is not None
    assert job.state.job.drain.agreed
    job.wait(9)
    assert (job.phase, endings([nodes[0], nodes[2]])) == (Phase.DRAINING, [WAIT, WRITE])
    assert "did not end in time" not in job.notices


def test_a_word_about_a_boundary_that_failed_is_not_about_the_next_drain() -> None:
    """Another node's report comes late, when a second drain has begun at the same step."""
    job = Driven()
    nodes = job.start(3)
    for node in nodes:
        node.step(2)
    nodes[1].leave(30.0)
    nodes[0].step(3, draining=True)
    nodes[0].save_failed(3)
    nodes[2].step(3, draining=True)
    assert job.state.job.drain is not None
    assert not job.state.job.drain.agreed


def endings(nodes: list[Node]) -> list[int]:
    return [node.directive.drain.ending for node in nodes]


# ---- growing and scaling down ---------------------------------------------------------------------------------------


def test_a_growth_waits_for_its_save_as_long_as_the_ranks_live() -> None:
    """Far beyond --drain-timeout, though not a byte moves."""
    job = Driven(settings(drain_timeout=8))
    a, b = growing(job)
    job.wait(35)
    assert (job.phase, a.order) == (Phase.DRAINING, "drain")
    a.save(2)
    for node in (a, b):
        node.drained(2)
    all_join(job.nodes)
    a.convert()
    a.step(3)
    assert (len(job.members), "lost 0 steps" in job.notices) == (3, True)


def test_a_save_that_is_waited_for_is_said() -> None:
    """After 5 s, then after 10, 20, ...: how much is written, for how long, how fast."""
    job = Driven(settings(drain_timeout=8))
    a, _ = growing(job)
    job.wait(4)
    assert "waits for the save" not in job.notices
    a.step(2, draining=True, written_bytes=16_400_000)
    job.wait(2)
    assert "growing waits for the save of step 2: 16.4 MB written in 5 s (3.3 MB/s)" in job.notices
    job.wait(30)
    assert job.notices.count("waits for the save") == 3


def lines_of_the_save(job: Driven) -> list[str]:
    """What is said of it, without what waits for it."""
    lines = [line for line in job.notices.splitlines() if "waits for the save of step 2: " in line]
    return [line.partition("step 2: ")[2] for line in lines]


def test_what_is_written_never_counts_backwards() -> None:
    """A part is over, and the next one begins: what the files hold is still there while a directory is synced."""
    job = Driven(settings(drain_timeout=8))
    a, b = growing(job)
    a.step(2, draining=True, written_bytes=16_000_000)
    b.step(2, draining=True, written_bytes=1)
    job.wait(6)
    a.step(2, draining=True, written_bytes=0)
    b.step(2, draining=True, written_bytes=0)
    job.wait(5)
    assert lines_of_the_save(job) == ["16.0 MB written in 5 s (3.2 MB/s)", "16.0 MB written in 10 s (1.6 MB/s)"]


@pytest.mark.parametrize("written", [0, 1])
def test_a_save_without_a_byte_is_said_to_have_none(written: int) -> None:
    """Ranks say at least 1 while they are at it, whatever there is; before, nothing."""
    job = Driven(settings(drain_timeout=8))
    a, _ = growing(job)
    a.step(2, draining=True, written_bytes=written)
    job.wait(6)
    assert lines_of_the_save(job) == ["nothing is written after 5 s"]


def test_that_nobody_tells_of_bytes_is_not_that_none_are_written() -> None:
    """A node whose agent was stopped behind the agreement (Ctrl-Z): its ranks write, and nobody says how much."""
    job = Driven(settings(drain_timeout=8, node_timeout=60.0))
    a, b = growing(job)
    job.silent |= {a.incarnation, b.incarnation}
    job.wait(12)
    lines = lines_of_the_save(job)
    assert lines == [f"nothing was heard of {a.name}, {b.name} for {seconds} s" for seconds in (5, 10)], lines


def test_another_try_begins_with_nothing() -> None:
    """What a save that failed had written is gone."""
    job = Driven(settings(drain_timeout=60))
    nodes = a, b, c = leaving(job, 2, notice=60.0)
    a.step(2, draining=True, written_bytes=16_000_000)
    job.wait(6)
    for node in nodes:
        node.save_failed(2)
        node.step(3, written_bytes=0)
    a.step(4, draining=True, written_bytes=2000)
    job.wait(6)
    assert "step 4: 2.0 kB written in 5 s (400 bytes/s)" in job.notices
    assert (b.order, c.order) == ("drain", "drain")


@pytest.mark.parametrize(
    ("count", "said"), [(0, "0 bytes"), (1, "1 byte"), (999, "999 bytes"), (1000, "1.0 kB"), (123e9, "123 GB")]
)
def test_amounts_are_for_people(count: float, said: str) -> None:
    """Three digits and a unit."""
    assert saves.amount(count) == said


def test_a_save_that_stands_still_for_a_stall_is_withdrawn() -> None:
    """The ranks live: they train on, and it is tried again later, not with each of their saves."""
    job = Driven(settings(drain_timeout=8, stall_timeout=40))
    a, _ = growing(job)
    job.wait(41)
    assert (job.phase, a.order) == (Phase.RUNNING, "run")
    assert "growing is put off: its save stood still for 40 s (--stall-timeout)" in job.notices
    a.save(2)
    a.step(3)
    assert job.phase is Phase.RUNNING
    job.wait(41)
    a.step(4)
    assert job.phase is Phase.DRAINING


def test_without_a_stall_timeout_a_save_that_stands_still_is_waited_for() -> None:
    """--stall-timeout=0, also of a leaver whose notice is over: the others save without it."""
    job = Driven(settings(drain_timeout=8, stall_timeout=0.0))
    growing(job)
    job.wait(700)
    assert job.phase is Phase.DRAINING
    assert "put off" not in job.notices
    job = Driven(settings(drain_timeout=8, stall_timeout=0.0))
    a, b, _ = leaving(job, 2)
    job.wait(700)
    assert (job.phase, endings([a, b])) == (Phase.DRAINING, [WAIT, WRITE])


def test_a_save_that_moves_is_not_withdrawn() -> None:
    """However long it takes in all."""
    job = Driven(settings(drain_timeout=8, stall_timeout=40))
    a, _ = growing(job)
    for moved in range(1, 5):
        job.wait(30)
        a.step(2, draining=True, saved_bytes=1000 * moved)
    assert job.phase is Phase.DRAINING


def test_a_death_while_a_growth_saves_is_unplanned() -> None:
    """Nobody could complete it."""
    job = Driven(settings(drain_timeout=8))
    a, b = growing(job)
    b.failed()
    assert (job.phase, a.order) == (Phase.FORMING, "gather")


def test_a_withdrawn_drain_leaves_nothing_behind() -> None:
    """A death after it is noticed as soon as any, and the next drain's save is timed anew."""
    job = Driven(settings(drain_timeout=8, stall_timeout=40))
    growing(job)
    job.wait(41)
    assert not job.state.live.epoch.stopping
    assert job.state.live.epoch.drain is None


def test_ranks_that_train_on_by_themselves_stop_no_more() -> None:
    """A node cut off from its master wanted a drain, and was back before the save was done."""
    job = Driven()
    a, b = job.start(2)
    a.step(1)
    a.step(2, draining=True)
    b.step(1)
    assert job.state.live.epoch.stopping
    a.step(3)
    assert not job.state.live.epoch.stopping


def test_a_slow_save_between_drains_is_no_stall() -> None:
    """Its ranks say that it goes on: they have all of --stall-timeout, as steps that never come have not."""
    patient, hasty = (Driven(settings(stall_timeout=600.0)) for _ in range(2))
    for job, written in ((patient, 1000), (hasty, 0)):
        (a,) = job.start(1)
        a.step(1, written_bytes=written)
        job.wait(90)
    assert (patient.phase, hasty.phase is not Phase.RUNNING) == (Phase.RUNNING, True)
    patient.wait(520)
    assert patient.phase is not Phase.RUNNING


def test_a_stall_beside_a_failed_part_says_why_it_failed() -> None:
    """Other nodes' ranks stand in a barrier: on their consoles nothing else told that a disk was full."""
    full = "OSError: the disk is full (rank 1)"
    for cured in (False, True):
        job = Driven(settings(stall_timeout=600.0))
        a, b = job.start(2)
        a.step(1, written_bytes=1)
        b.step(1, written_bytes=1, save_problem=full)
        if cured:
            b.step(1, written_bytes=1)
        job.wait(620)
        assert job.phase is not Phase.RUNNING
        said = "no rank made a step for 600 s (--stall-timeout)"
        assert said in job.notices
        assert (f"{said}; a rank's part of a save failed: {full}" in job.notices) is not cured


# ---- leaving --------------------------------------------------------------------------------------------------------


def test_what_outlasts_a_notice_is_sealed_by_those_who_stay() -> None:
    """They write what is theirs, and go; the first of them seals when the others have gone. No step is lost."""
    job = Driven(settings(drain_timeout=30))
    nodes = a, b, c = leaving(job, 2)
    assert endings(nodes) == [TOGETHER] * 3
    job.wait(9)
    assert (job.phase, c.order) == (Phase.DRAINING, "release")
    assert endings([a, b]) == [WAIT, WRITE]
    c.hang_up()
    b.drained(2)
    assert endings([a]) == [SEAL]
    job.wait(30)
    a.save(2)
    a.drained(2)
    assert job.phase is Phase.FORMING
    all_join([a, b])
    if a.lease:
        a.convert()
    a.step(3)
    assert job.members == [a.name, b.name]
    assert "epoch 2: " + c.name + " left, 2 nodes, resumed at step 2" in job.notices
    assert "lost 0 steps" in job.notices


@pytest.mark.parametrize("restarted", [False, True])
def test_rank_0_may_be_the_leaver(restarted: bool) -> None:
    """Then the next one seals, also under another master."""
    job = Driven(settings(drain_timeout=8))
    a, b, c = leaving(job, 0)
    job.wait(9)
    if restarted:
        job.restart()
        for node in (a, b, c):
            node.beat()
    assert endings([b, c]) == [WAIT, WRITE]
    assert a.order == "release"


def test_who_has_a_notice_of_its_own_seals_last() -> None:
    """It may be gone before the others have written their parts."""
    job = Driven(settings(drain_timeout=60))
    a, b, _ = leaving(job, 2)
    a.leave(notice=50.0)
    job.wait(9)
    assert endings([a, b]) == [WRITE, WAIT]


def test_a_leaver_whose_part_is_written_stays_until_the_save_is_complete() -> None:
    """Its own notice is not over, so it can still say truly whether everything is saved."""
    job = Driven(settings(drain_timeout=60))
    a, b, c = leaving(job, 2)
    b.leave(notice=50.0)
    job.wait(9)
    assert endings([a, b]) == [WAIT, WRITE]
    b.drained(2)
    assert (c.order, b.order) == ("release", "wait")
    assert "stays until the others have completed the save" in b.directive.wait.reason
    a.save(2)
    assert b.order == "release"


def test_a_leaver_is_not_kept_where_nobody_completes_the_save() -> None:
    job = Driven(settings(drain_timeout=60))
    a, b, _ = leaving(job, 2)
    b.leave(notice=50.0)
    job.wait(9)
    b.drained(2)
    a.failed("rank 2 had to go before its part was written")
    assert (job.phase, b.order) == (Phase.FORMING, "release")


def test_a_leaver_that_dies_while_it_saves_is_not_missed_yet() -> None:
    """Its part may be written."""
    job = Driven(settings(drain_timeout=30, node_timeout=6))
    a, b, c = leaving(job, 2)
    c.hang_up()
    job.wait(7)
    assert (job.phase, endings([a, b])) == (Phase.DRAINING, [WAIT, WRITE])


def test_a_missing_part_makes_it_unplanned() -> None:
    """Who was to seal finds out, and fails; that is no failure of the script's."""
    job = Driven(settings(drain_timeout=30, max_restarts=0))
    a, b, c = leaving(job, 2)
    job.wait(9)
    c.hang_up()
    b.drained(2)
    a.failed("step-2.e1.1 is lost: rank 2 had to go before its part was written")
    assert job.phase is Phase.FORMING
    all_join([a, b])
    job.wait(2)
    a.step(1)
    assert (job.phase, job.job.run.budget.failures) == (Phase.RUNNING, 0)


def test_nobody_stays_to_seal() -> None:
    """All had the same notice. What they could seal at the last moment is heard of until they are gone."""
    job = Driven(settings(drain_timeout=8))
    a, b = leaving(job, 0, 1, count=2)
    job.wait(9)
    assert job.phase is Phase.DRAINING
    a.save(2)
    for node in (a, b):
        node.hang_up()
    job.wait(3)
    assert job.phase is Phase.WAITING
    c = job.node()
    c.join()
    job.wait(2)
    assert c.order in ("run", "gather")
    assert job.job.checkpoints.last_step(1) == 2


def test_who_completes_a_save_is_said_only_where_somebody_is_left() -> None:
    """Each leaver is told whether another node stays; and all are told so when the notice is over."""
    job = Driven(settings(drain_timeout=8))
    a, b = leaving(job, 0, count=2)
    assert not a.directive.drain.all_leave
    b.leave(notice=8.0)
    assert a.directive.drain.all_leave
    assert b.directive.drain.all_leave
    job.wait(9)
    (line,) = [line for line in job.notices.splitlines() if "is over before the save" in line]
    assert "no other node is left to complete it" in line
    assert "completed without" not in line


def test_a_notice_that_ends_behind_the_commit_costs_nothing_and_is_no_news() -> None:
    """Its ranks still write what nobody waits for, as `latest.json`: the save is not said to be incomplete."""
    job = Driven(settings(drain_timeout=8))
    a, b, c = leaving(job, 2)
    a.save(2)
    job.wait(9)
    assert "is over before the save" not in job.notices
    assert c.order == "release"
    for node in (a, b):
        node.drained(2)
    assert job.phase is Phase.FORMING


def test_leavers_that_never_go_hold_nobody_up() -> None:
    """All had the same notice, and stay."""
    job = Driven(settings(drain_timeout=8))
    leaving(job, 0, 1, count=2)
    job.wait(18)
    assert job.phase is not Phase.DRAINING


def test_without_a_boundary_a_notice_is_a_hard_limit() -> None:
    """Nothing is being saved that could be completed."""
    job = Driven(settings(drain_timeout=8))
    a, b = job.start(2)
    a.step(1)
    b.leave(notice=8.0)
    job.wait(9)
    assert job.phase is Phase.FORMING


def test_who_seals_has_as_long_as_a_stall() -> None:
    """It is alone, and the disk may be gone for good."""
    job = Driven(settings(drain_timeout=8, stall_timeout=40))
    a, b = leaving(job, 1, count=2)
    job.wait(9)
    b.hang_up()
    assert endings([a]) == [SEAL]
    job.wait(30)
    assert job.phase is Phase.DRAINING
    job.wait(12)
    assert (job.phase, "did not end in time" in job.notices) == (Phase.FORMING, True)


def test_a_leaver_that_was_given_up_may_still_say_that_it_drained() -> None:
    """Its word changes nothing: the others were told to go on without."""
    job = Driven(settings(drain_timeout=8))
    a, b, c = leaving(job, 2)
    job.wait(9)
    assert c.drained(2).code == "OK"
    assert job.job.parts[c.incarnation] is MemberState.LEFT
    assert endings([a, b]) == [WAIT, WRITE]


# ---- before it is too late ------------------------------------------------------------------------------------------


def committed(job: Driven, node: Node, step: int, seconds: float) -> None:
    request = control_pb2.CommitRequest(caller=node.caller(), checkpoint=job.seal(step), seconds=seconds)
    assert job.call(request).code == "OK"


def test_the_first_save_that_takes_half_a_notice_is_said() -> None:
    """With the flag that helps, once."""
    job = Driven(settings(drain_timeout=30))
    (a,) = job.start(1)
    committed(job, a, 1, 15.0)
    assert "--drain-timeout" not in job.notices
    committed(job, a, 2, 26.4)
    committed(job, a, 3, 100.0)
    assert (
        "saving step 2 took 26 s, but a node that leaves has 30 s for it: if its notice is longer, "
        "set --drain-timeout=70" in job.notices
    )
    assert job.notices.count("--drain-timeout") == 1


def test_ranks_that_hang_behind_the_commit_are_not_waited_for_twice() -> None:
    """What they saved is recorded: to have them train on would only lead to the next stall."""
    job = Driven(settings(drain_timeout=8, stall_timeout=40))
    a, _ = growing(job)
    a.save(2)
    job.wait(6)
    named = ", ".join(node.name for node in job.nodes[:2])
    assert f"growing waits for the ranks of {named} to end: step 2 is saved, 5 s have passed" in job.notices
    job.wait(35)
    assert (job.phase, a.order) == (Phase.FORMING, "gather")
    assert "put off" not in job.notices
    all_join(job.nodes)
    a.convert()
    a.step(3)
    assert len(job.members) == 3
    assert "lost 0 steps" in job.notices


def test_what_a_world_began_from_may_be_saved_once_more() -> None:
    """With what was due there and its ranks could do only now; nothing older, and not a second time."""
    job = Driven()
    (a,) = job.start(1)
    a.step(4)
    a.save(2)
    first = a.save(4)
    a.failed("boom", step=5)
    a.join()
    job.wait(1.2)
    assert a.directive.run.resume.source.ref == first.ref
    assert a.commit(job.seal(3)).detail == "step-3.e2.1 is not newer than step 3"
    again = a.save(4)
    assert [record.name for record in job.job.checkpoints.usable][-2:] == [first.ref.name, again.ref.name]
    assert job.job.checkpoints.head.digest == again.ref.digest
    another = job.seal(4)
    another.ref.name, another.ref.digest = "step-4.e2.2", "another"
    assert a.commit(another).detail == "step-4.e2.2 is not newer than step 4"


def test_a_world_that_began_at_the_beginning_saves_no_step_0() -> None:
    job = Driven()
    (a,) = job.start(1)
    a.step(1)
    assert a.commit(job.seal(0)).detail == "step-0.e1.1 is not newer than step 0"
