"""Scripts without a session: nobody hears of their steps, and yet people are told what happens to them."""

from __future__ import annotations

import pytest

from dalsegno.master.brain.announcements import SESSION_WITHIN_SECONDS
from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, all_join, settings, stored


def lines(job: Driven, word: str) -> list[str]:
    """The console's lines with this word in them."""
    return [line for line in job.notices.splitlines() if word in line]


def test_a_world_that_is_not_heard_of_is_presented_once() -> None:
    """Its nodes, its cause, where it starts, and why nothing more is known."""
    job = Driven()
    a, b = job.start(2)
    job.wait(SESSION_WITHIN_SECONDS - 2)
    assert not lines(job, "epoch 1")
    job.wait(300)
    (line,) = lines(job, "epoch 1")
    assert f"{a.name}, {b.name} joined, 2 nodes; no steps" in line
    assert "has not called session()" in line
    assert [(record.epoch, record.nodes, record.stepped_at) for record in job.job.history] == [(1, 2, 0)]


def test_a_script_with_a_session_is_not_presented_before_its_first_step() -> None:
    """However long that takes: it has said hello."""
    job = Driven(settings(stall_timeout=600))
    (a,) = job.start(1)
    a.step(0)
    job.wait(SESSION_WITHIN_SECONDS + 100)
    assert not lines(job, "epoch 1")


def test_a_late_session_is_announced_with_its_first_step() -> None:
    """What was said before is not the last word, and the history has the world once."""
    job = Driven()
    (a,) = job.start(1)
    job.wait(SESSION_WITHIN_SECONDS + 1)
    a.step(1)
    assert len(lines(job, "epoch 1")) == 2
    assert "session()" not in lines(job, "epoch 1")[1]
    assert [record.epoch for record in job.job.history] == [1]


def test_the_worlds_after_a_silent_one_are_presented_when_they_open() -> None:
    """A node is killed: who goes on, and that it starts over, is said at once."""
    job = Driven()
    a, b = job.start(2)
    job.wait(SESSION_WITHIN_SECONDS + 1)
    b.hang_up()
    job.wait(2)
    a.join()
    (line,) = lines(job, "epoch 2")
    assert f"{b.name} was lost (its connection closed), 1 node; no steps" in line
    assert [record.epoch for record in job.job.history] == [1, 2]


def test_a_restart_for_a_newcomer_is_announced_before_and_when_it_comes() -> None:
    """When it will be, once; then that it is now, and the world it made."""
    job = Driven(settings(grow_wait=100))
    (a,) = job.start(1)
    job.wait(SESSION_WITHIN_SECONDS + 1)
    late = job.node()
    late.join()
    job.wait(50)
    (line,) = lines(job, f"{late.name} joined:")
    assert "in 100 s (--grow-wait)" in line
    job.wait(51)
    assert job.phase is Phase.FORMING
    (notice,) = [notice for notice in job.job.notices if "all workers restart to take" in notice.text]
    assert notice.warning
    assert "--grow-wait" in notice.text
    all_join([a, late])
    (line,) = lines(job, "epoch 2")
    assert f"{late.name} joined, 2 nodes; no steps" in line


def test_an_early_restart_for_a_newcomer_is_announced_too() -> None:
    """Also where the grow-wait is so short that the world before was never presented."""
    job = Driven(settings(grow_wait=5))
    (a,) = job.start(1)
    late = job.node()
    late.join()
    job.wait(6)
    assert lines(job, "all workers restart to take")
    all_join([a, late])
    assert lines(job, "epoch 2")


def test_a_restart_after_a_commit_says_so() -> None:
    """It is what was waited for, and no warning."""
    job = Driven(settings(grow_wait=100))
    (a,) = job.start(1)
    job.wait(7)
    job.node().join()
    job.wait(1)
    a.save(4)
    (notice,) = [notice for notice in job.job.notices if "all workers restart to take" in notice.text]
    assert "commit" in notice.text
    assert not notice.warning


def test_a_late_crash_of_a_script_that_is_not_heard_of_counts_as_a_failure() -> None:
    """It may have made many steps, so it is tried again, --max-restarts times."""
    job = Driven(settings(max_restarts=1))
    (a,) = job.start(1)
    job.wait(SESSION_WITHIN_SECONDS + 1)
    a.failed("out of memory")
    assert job.phase is Phase.FORMING
    a.join()
    assert job.epoch == 2
    a.failed("out of memory")
    a.join()
    assert job.phase is Phase.FAILED
    assert "--max-restarts" in job.job.message


def test_a_node_that_keeps_coming_and_dying_is_held_although_no_step_is_heard() -> None:
    """Each time everybody has to start over."""
    job = Driven(settings(grow_wait=2))
    (a,) = job.start(1)
    job.wait(SESSION_WITHIN_SECONDS + 1)
    for _ in range(3):
        flaky = job.node(node="flaky")
        flaky.join()
        job.wait(3)
        all_join([a, flaky])
        assert job.members == [a.name, "flaky"]
        flaky.hang_up()
        job.wait(2)
        a.join()
    assert "flaky was lost 3 times" in job.notices


def test_time_alone_restarts_nobody_whose_session_may_still_come() -> None:
    """A start of minutes: it is said how long so far, and a growth waits for the session, however late."""
    job = Driven(settings(grow_wait=20))
    a = job.node(expects_session=True)
    a.join()
    job.wait(SESSION_WITHIN_SECONDS + 3)
    (line,) = lines(job, "epoch 1")
    assert "the script has not called session() yet, 30 s after its start" in line
    late = job.node()
    late.join()
    late.warm()
    job.wait(400)
    said = lines(job, f"{late.name} joined:")
    # At once, then each time the wait has doubled: what is waited for, for how long by now, and what helps.
    seconds = [int(line.partition(" s after its start")[0].rpartition(" ")[2]) for line in said]
    assert seconds == [seconds[0] * 2**time for time in range(4)]
    for line in said:
        assert "has not called session() yet" in line
        assert "its first step is waited for, or a checkpoint that it saves below ${save_dir}" in line
        assert "end all agents and start them together" in line
        assert "--grow-wait" not in line
    assert (job.phase, job.epoch) == (Phase.RUNNING, 1)
    a.step(0)
    job.wait(10)
    assert job.phase is Phase.RUNNING
    a.step(1)
    assert job.phase is Phase.DRAINING


def test_an_import_that_comes_to_light_late_undoes_what_was_concluded() -> None:
    """Said before, that all workers restart in so many seconds, it is said otherwise, and they do not."""
    job = Driven(settings(grow_wait=50))
    a, late = job.start(1)[0], job.node()
    job.wait(SESSION_WITHIN_SECONDS + 1)
    late.join()
    job.wait(5)
    assert "in 50 s (--grow-wait)" in lines(job, f"{late.name} joined:")[0]
    job.note(control_pb2.ProgressRequest(caller=a.caller(number=0), expects_session=True))
    job.wait(1)
    assert "--grow-wait" not in lines(job, f"{late.name} joined:")[1]
    job.state.job = stored(job.job)
    job.wait(100)
    assert (job.phase, job.epoch) == (Phase.RUNNING, 1)
    a.failed("no such data")
    assert job.phase is Phase.FAILED, "no step can have been made: trying again would not help"


def test_a_commit_still_lets_a_newcomer_in() -> None:
    """A script that imports a session, does not call it and saves by itself trains without one."""
    job = Driven(settings(grow_wait=20))
    a = job.node(expects_session=True)
    a.join()
    job.wait(10)
    job.node().join()
    job.wait(30)
    assert job.phase is Phase.RUNNING
    a.save(4)
    assert job.phase is Phase.FORMING


def test_a_node_that_leaves_during_a_slow_start_is_not_waited_for() -> None:
    """There is nothing to save, and the next world is not taken for one of a script without a session."""
    job = Driven()
    a, b = job.node(expects_session=True), job.node(expects_session=True)
    all_join([a, b])
    job.wait(10)
    b.leave()
    assert job.phase is Phase.FORMING
    a.join()
    job.wait(2)
    assert not lines(job, "epoch 2")
    a.failed("no such data")
    assert job.phase is Phase.FAILED


def test_where_nothing_could_be_resumed_nobody_is_restarted() -> None:
    """Its saves are adopted, and there is none yet: the first one is waited for, however long, and that is said."""
    job = Driven(settings(grow_wait=-1))
    a, late = job.start(1, adopts=True)[0], job.node()
    job.wait(SESSION_WITHIN_SECONDS + 1)
    late.join()
    job.wait(1000)
    assert (job.phase, job.epoch) == (Phase.RUNNING, 1)
    said = lines(job, f"{late.name} joined:")
    assert len(said) >= 4
    for line in said:
        assert "nothing of it could be resumed" in line
        assert line.endswith("--grow-wait=SECONDS restarts them without one, too, and `dalsegno scale 4` now")
    a.save(4)
    assert job.phase is Phase.FORMING


@pytest.mark.parametrize("steps", [False, True])
def test_steps_that_are_heard_are_not_lost_for_a_newcomer(steps: bool) -> None:
    """Nothing is adopted, and nobody has set a time: without a step there is nothing to lose, and a few seconds do."""
    job = Driven(settings(grow_wait=-1))
    a = job.start(1, dlrover=True)[0]
    job.wait(7)
    if steps:
        heard(job, a, 1)
    late = job.node(dlrover=True)
    late.join()
    (line,) = lines(job, f"{late.name} joined:")
    job.wait(6)
    assert ("all workers restart in 5 s (--grow-wait)" in line) is not steps
    assert ("nothing of it could be resumed: all workers restart with the first checkpoint" in line) is steps
    assert job.phase is (Phase.RUNNING if steps else Phase.FORMING)
    if steps:
        job.wait(600)
        assert (job.phase, job.epoch) == (Phase.RUNNING, 1)
        assert scaled(job, 2) == "OK"
        assert lines(
            job, "all workers restart to take host-1 in; a number of nodes was asked for, and nothing could be"
        )
        assert job.phase is Phase.FORMING


@pytest.mark.parametrize("when", ["before", "after", "behind a commit"])
def test_an_order_takes_those_in_that_have_joined_before_it(when: str) -> None:
    """Not those that come later, as it was about others. Where something can be resumed, no steps are lost for it."""
    job = Driven(settings(grow_wait=-1))
    a = job.start(1, adopts=True)[0]
    job.wait(SESSION_WITHIN_SECONDS + 1)
    if when == "behind a commit":
        a.save(4)
        job.wait(10)
    if when == "before":
        assert scaled(job, 2) == "OK"
        job.wait(1)
    job.node().join()
    job.wait(50)
    assert job.phase is Phase.RUNNING
    if when != "before":
        assert scaled(job, 2) == "OK"
    assert job.phase is (Phase.FORMING if when == "after" else Phase.RUNNING)


def scaled(job: Driven, nodes: int) -> str:
    return job.call(control_pb2.ScaleRequest(nodes=nodes)).code


def test_what_can_be_resumed_is_waited_for_five_minutes() -> None:
    """There is a commit, and the next one may be far away."""
    job = Driven(settings(grow_wait=-1))
    a, late = job.start(1)[0], job.node()
    job.wait(SESSION_WITHIN_SECONDS + 1)
    a.save(4)
    job.wait(10)
    late.join()
    job.wait(290)
    assert job.phase is Phase.RUNNING
    (line,) = lines(job, f"{late.name} joined:")
    assert "with its next checkpoint, or from that of step 4 in 300 s (--grow-wait)" in line
    job.wait(11)
    assert job.phase is Phase.FORMING
    assert lines(job, f"all workers restart to take {late.name} in; no other commit came (--grow-wait)")


def test_a_newcomer_hears_at_once_when_it_is_taken_in() -> None:
    """Not only half a minute after the start of the world that is there."""
    job = Driven(settings(grow_wait=5))
    a = job.start(1)[0]
    job.wait(10)
    late = job.node()
    late.join()
    (line,) = lines(job, f"{late.name} joined:")
    assert "all workers restart in 5 s (--grow-wait), and go on from what the script itself has saved" in line
    job.wait(6)
    assert job.phase is Phase.FORMING
    all_join([a, late])
    assert len(job.members) == 2


def heard(job: Driven, node: Node, step: int) -> None:
    """DLRover's saver tells of a step."""
    job.note(control_pb2.ProgressRequest(caller=node.caller(job.epoch, 0), step=step))


def test_a_world_whose_steps_were_heard_is_not_told_to_call_session() -> None:
    """Nor are its next worlds, which its first step presents like any other."""
    job = Driven(settings(grow_wait=5))
    (a,) = job.start(1, dlrover=True)
    heard(job, a, 1)
    job.wait(SESSION_WITHIN_SECONDS + 10)
    (line,) = lines(job, "epoch 1")
    assert line.endswith("1 node, from step 0")
    b = job.node(dlrover=True)
    b.join()
    heard(job, a, 2)
    assert lines(
        job, f"{b.name} joined: the script uses DLRover's classes, so it cannot be drained: all workers restart"
    )
    job.wait(6)
    all_join([a, b])
    assert not lines(job, "epoch 2")
    heard(job, a, 3)
    assert lines(job, "epoch 2")
    assert "session()" not in job.notices


def test_a_script_of_dlrovers_is_presented_as_one() -> None:
    """Its first save to memory may be minutes away, and the next world knows what this one has shown."""
    job = Driven()
    a, b = job.start(2, dlrover=True)
    job.wait(SESSION_WITHIN_SECONDS + 100)
    (line,) = lines(job, "epoch 1")
    assert "no steps are heard yet: DLRover's classes tell of them with a save to memory, or every 15 s" in line
    heard(job, a, 50)
    assert lines(job, "epoch 1")[1:] == ["epoch 1: steps are heard"]
    b.hang_up()
    job.wait(2)
    a.join()
    assert not lines(job, "epoch 2")
    heard(job, a, 51)
    (line,) = lines(job, "epoch 2")
    assert "no steps" not in line
    assert "session()" not in job.notices


def test_a_script_whose_saves_are_taken_is_not_told_to_call_session() -> None:
    """What is known of it by then: its saves."""
    job = Driven(settings(stall_timeout=60))
    (a,) = job.start(1)
    job.wait(SESSION_WITHIN_SECONDS - 10)
    a.save(4)
    job.wait(20)
    (line,) = lines(job, "epoch 1")
    assert line.endswith("1 node; no steps are heard, but what the script saves is taken: step 4")
    job.wait(25)
    assert not lines(job, "--stall-timeout"), "the save is as good as a step"
    job.wait(30)
    assert lines(job, "no step and no save was heard of for 60 s (--stall-timeout): whether")
    a.failed()
    a.join()
    (line,) = lines(job, "epoch 2")
    assert line.endswith("no steps are heard, but what the script saves is taken")
    assert "session()" not in job.notices


def test_steps_without_a_session_tell_where_a_world_went_on() -> None:
    """DLRover's saver tells of them. The script loads what it finds itself, so the record does not know the step."""
    job = Driven(settings())
    a, b = job.start(2)
    heard(job, a, 1)
    heard(job, a, 14)
    b.failed()
    all_join([a, b])
    heard(job, a, 16)
    assert "epoch 1: " in job.notices
    assert "from step 0" in job.notices.splitlines()[0]
    assert "2 nodes, from step 15 or before" in job.notices.splitlines()[-1]
    assert "lost an unknown number of steps" in job.notices.splitlines()[-1]


@pytest.mark.parametrize(("heard_first", "text"), [(30, "resumed at step 20 or later"), (21, "resumed at step 20")])
def test_a_step_that_is_heard_late_is_no_resume_point(heard_first: int, text: str) -> None:
    """The world was given the run's checkpoint. Steps are heard now and then: the first that is was not its first."""
    job = Driven(settings())
    a, b = job.start(2)
    heard(job, a, 14)
    a.save(20)
    b.failed()
    all_join([a, b])
    heard(job, a, heard_first)
    (line,) = lines(job, "epoch 2")
    assert f"2 nodes, {text}, paused" in line


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("grow_wait", [-1, 40])
def test_a_leavers_last_save_is_waited_for(who: int, grow_wait: int) -> None:
    """Its script may save at its notice, and its agent takes that, whatever else was set. The others wait."""
    job = Driven(settings(grow_wait=grow_wait, drain_timeout=20))
    nodes = job.start(2, adopts=True)
    leaver, stays = nodes[who], nodes[1 - who]
    job.wait(SESSION_WITHIN_SECONDS)
    leaver.leave(notice=20)
    stays.join()
    job.wait(6)
    assert job.phase is Phase.FORMING
    assert lines(job, f"waiting for {leaver.name}, which leaves: what its script saves now is the run's")
    made = leaver.save(7)
    leaver.goodbye()
    stays.join()
    message = stays.joining()
    message.took = stays.directive.gather.take.epoch  # behind the first node, it looks once more
    job.call(message)
    stays.convert()
    assert job.phase is Phase.RUNNING
    assert stays.directive.run.resume.source.ref.digest == made.ref.digest


def test_a_last_save_is_waited_for_until_the_last_notice_ends() -> None:
    """Of several leavers each has its own."""
    job = Driven(settings(grow_wait=-1, drain_timeout=20))
    a, b, c = job.start(3, adopts=True)
    job.wait(SESSION_WITHIN_SECONDS)
    a.leave(notice=20)
    job.wait(3)
    b.leave(notice=20)
    c.join()
    job.wait(10)
    assert job.phase is Phase.FORMING
    (line,) = [line for line in lines(job, "waiting for") if "which leave:" in line][:1]
    assert f"waiting for {a.name}, {b.name}, which leave: what their script saves now is the run's" in line
    job.wait(9)
    assert job.phase is Phase.FORMING
    job.wait(2)
    assert (job.phase, job.members) == (Phase.RUNNING, [c.name])


def test_a_leaver_whose_saves_nobody_takes_is_not_waited_for() -> None:
    """What its script saves in its own place is there anyway."""
    job = Driven(settings(grow_wait=-1, drain_timeout=20))
    a, b = job.start(2)
    job.wait(SESSION_WITHIN_SECONDS)
    a.leave()
    b.join()
    assert job.phase is Phase.RUNNING


def test_a_slow_start_says_nothing_of_the_worlds_after_it() -> None:
    """Its script imports a session: each world has half a minute for it, also behind one that was presented."""
    job = Driven()
    a, b = job.node(expects_session=True), job.node(expects_session=True)
    all_join([a, b])
    job.wait(SESSION_WITHIN_SECONDS + 3)
    assert lines(job, "epoch 1")
    b.hang_up()
    job.wait(2)
    a.join()
    assert job.epoch == 2
    assert not lines(job, "epoch 2")
    job.wait(SESSION_WITHIN_SECONDS + 1)
    assert lines(job, "epoch 2")


def test_a_hello_before_the_next_world_counts_for_that_one() -> None:
    """This world was presented without steps; its session was opened then, and a node was lost before a step."""
    job = Driven()
    a, b = job.start(2)
    job.wait(SESSION_WITHIN_SECONDS + 1)
    a.step(0)
    b.hang_up()
    job.wait(2)
    a.join()
    assert job.epoch == 2
    assert not lines(job, "epoch 2")


def test_the_pause_before_a_world_that_is_not_heard_of_is_recorded() -> None:
    """From what ended the last world to the start of this one."""
    job = Driven(settings(join_timeout=30))
    a, b, c = job.start(3)
    job.wait(SESSION_WITHIN_SECONDS + 1)
    b.hang_up()
    job.wait(2)
    a.join()
    job.wait(5)
    c.join()
    assert [record.epoch for record in job.job.history] == [1, 2]
    assert 5 <= job.job.history[1].paused < 8


def why_not_drained(job: Driven, **fields: bool) -> str:
    """What is said of the script at a join."""
    late = job.node(**fields)
    late.join()
    (line,) = lines(job, f"{late.name} joined:")
    return line.partition("joined: ")[2].partition(", so it cannot")[0]


def test_what_is_said_of_a_script_at_a_join() -> None:
    """By what was heard of it: nothing yet, a step or a save without a session, a session that may come."""
    job = Driven(settings(grow_wait=100))
    job.start(1)
    assert why_not_drained(job) == "the script has not called session() yet"
    job.wait(5)
    assert why_not_drained(job) == "the script has not called session() yet, 5 s after its start"

    job = Driven(settings(grow_wait=100))
    (a,) = job.start(1)
    heard(job, a, 1)
    assert why_not_drained(job) == "the script has no session"

    job = Driven(settings(grow_wait=100))
    (a,) = job.start(1)
    a.save(4)
    assert why_not_drained(job) == "the script has no session"

    job = Driven(settings(grow_wait=100))
    job.start(1, adopts=True)
    assert why_not_drained(job) == "the script has no session"

    job = Driven(settings(grow_wait=100))
    (a,) = job.start(1, expects_session=True, adopts=True)
    a.save(4)
    job.wait(6)
    late = job.node()
    late.join()
    job.wait(6)
    assert lines(job, f"{late.name} joined: the script has not called session() yet, ")


def test_one_node_that_sees_dlrovers_classes_is_enough() -> None:
    """The others may have an older agent, which does not say so."""
    job = Driven()
    a, b = job.node(dlrover=True), job.node()
    all_join([a, b])
    job.wait(SESSION_WITHIN_SECONDS + 3)
    assert "DLRover's classes tell of them" in lines(job, "epoch 1")[0]


@pytest.mark.parametrize("sign", ["nothing", "a step", "a save", "DLRover"])
def test_what_is_said_of_a_script_that_may_be_stuck(sign: str) -> None:
    """Where it could have been heard, that it was not; otherwise that it has no session."""
    job = Driven(settings(stall_timeout=60))
    (a,) = job.start(1, dlrover=sign == "DLRover")
    if sign == "a step":
        heard(job, a, 1)
    if sign == "a save":
        a.save(4)
    job.wait(70)
    (line,) = lines(job, "whether the script is at work or stuck cannot be told")
    heard_of = "no rank called session() for" if sign == "nothing" else "no step and no save was heard of for"
    assert line.startswith(heard_of)


def test_a_newcomer_of_a_presented_world_hears_at_once_that_no_time_is_set() -> None:
    """Its script has no session by then: nothing better is on its way."""
    job = Driven(settings(grow_wait=-1))
    job.start(1, adopts=True)
    job.wait(SESSION_WITHIN_SECONDS + 1)
    late = job.node()
    late.join()
    assert lines(job, f"{late.name} joined:")


def test_where_a_world_went_on_is_guessed_only_where_nobody_knows() -> None:
    """Not in the first one, which begins at step 0; nor with a session, whose record has the step."""
    job = Driven()
    (a,) = job.start(1)
    heard(job, a, 50)
    assert lines(job, "epoch 1")[0].endswith("1 node, from step 0")
    job = Driven()
    a, b = job.start(2)
    a.step(10)
    a.save(10, any_size=True)
    b.hang_up()
    job.wait(2)
    a.join()
    a.step(15)
    assert "1 node, resumed at step 10," in lines(job, "epoch 2")[0]


def test_a_script_that_saves_in_its_own_way_is_not_told_to_call_session() -> None:
    """It was handed a directory to save in. Before its first save that is all that can be said of it."""
    job = Driven()
    job.start(1, adopts=True)
    job.wait(SESSION_WITHIN_SECONDS + 1)
    (line,) = lines(job, "epoch 1")
    assert line.endswith("1 node; no steps are heard, and it has saved nothing yet that could be taken")
    assert "session()" not in job.notices
