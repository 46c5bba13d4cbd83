"""A job that fails for good, or lacks nodes, brings what it has in memory alone to the disk."""

from __future__ import annotations

import pytest

from dalsegno.master.brain import shown
from dalsegno.master.brain.durable import ASKED_AGAIN_SECONDS, LACKS_NODES_SECONDS
from dalsegno.master.brain.ending import GIVEN_UP_AFTER_SECONDS
from dalsegno.master.brain.events import StreamOpened
from dalsegno.master.brain.memory import LOOK_WITHIN_SECONDS, TOLD_WITHIN_SECONDS
from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2 as pb
from tests.support.jobs.masters import Driven, Node, settings

from .test_durable import NOTHING, best, orders, steps, wanted, written
from .test_memory import held, in_memory, joins, newcomer, started


def failed(**changes: int) -> tuple[Driven, list[Node], pb.Checkpoint]:
    """Two nodes hold step 20, step 10 is on the disk, and the script fails once too often at step 25."""
    job, nodes = started(2, **{"max_restarts": 0, **changes})
    nodes[0].save(10, any_size=True)
    made = held(job, nodes, 20)
    for node in nodes:
        node.step(25)
        node.failed("exit 3", step=25)
    joins(job, *nodes, sees=made)
    job.wait(1.2)
    return job, nodes, made


def in_vain(job: Driven, nodes: list[Node], made: pb.Checkpoint, meanwhile: Phase, then: Phase) -> None:
    """The disk takes nothing for ten minutes."""
    for node in nodes:
        node.durable("no space left on device")
    job.wait(GIVEN_UP_AFTER_SECONDS - ASKED_AGAIN_SECONDS - 10)
    assert job.phase is meanwhile
    job.wait(20)
    assert job.phase is meanwhile  # they try again
    for node in nodes:
        node.durable("no space left on device")
    assert job.phase is then
    assert f"{made.ref.name} was in memory only, and no node could write it to the disk: going back to step-10" in (
        job.notices
    )


def refuses(job: Driven, node: Node) -> None:
    """Its ranks agree to refuse."""
    kind = pb.FAILURE_KIND_REFUSED
    job.call(pb.FailureRequest(caller=node.caller(), kind=kind, exit_code=1, message="other data", step=25))


def test_a_job_that_fails_for_good_ends_when_what_it_holds_is_on_the_disk() -> None:
    job, nodes, made = failed()
    assert job.phase is Phase.FORMING
    assert f"the job ends when {made.ref.name}, which is in memory only, is on the disk" in job.notices
    assert orders(nodes) == [("step-20", [0], False), ("step-20", [1], False)]
    for node in (*nodes, nodes[0]):
        assert job.phase is Phase.FORMING
        node.durable()
    assert job.phase is Phase.FAILED
    assert steps(job) == [10, 20]
    assert nodes[1].directive.finish.message.startswith("host-0-0: exit 3; 1 failure without progress")


def test_where_nothing_is_in_memory_it_ends_at_once() -> None:
    job, nodes = started(2, max_restarts=0)
    nodes[0].save(10, any_size=True)
    for node in nodes:
        node.step(25)
        node.failed("exit 3", step=25)
    joins(job, *nodes)
    job.wait(1.2)
    assert job.phase is Phase.FAILED
    assert "is in memory only" not in job.notices


def test_nobody_trains_any_more_meanwhile() -> None:
    """Also where others come that fill a world."""
    job, nodes, made = failed()
    late = newcomer(job)
    for node in (*nodes, late):
        node.join(sees=[*job.sealed, made])
    job.wait(30.0)
    assert job.phase is Phase.FORMING
    assert "waiting for step-20" in job.notices
    for node in (*nodes, nodes[0]):
        node.durable()
    assert job.phase is Phase.FAILED
    assert late.order == "finish"


def test_a_disk_that_takes_nothing_is_tried_for_ten_minutes() -> None:
    job, nodes, made = failed()
    for node in nodes:
        node.durable("no space left on device")
    assert orders(nodes) == [NOTHING] * 2
    job.wait(ASKED_AGAIN_SECONDS + 1)
    assert orders(nodes) == [("step-20", [0], False), ("step-20", [1], False)]
    in_vain(job, nodes, made, Phase.FORMING, Phase.FAILED)


def test_what_its_nodes_take_with_them_is_not_waited_for() -> None:
    """The next agent takes the failed job up again, as if it had ended at once."""
    job, nodes, made = failed()
    for node in nodes:
        node.hang_up()
    job.wait(30)
    late = newcomer(job)
    assert "had failed (host-0-0: exit 3" in job.notices
    job.wait(10)
    late.join()
    job.wait(2)
    assert job.phase is Phase.RUNNING
    assert late.directive.run.resume.source.step == 10
    assert f"{made.ref.name} was in memory only, and the nodes that held a part of it are gone" in job.notices


def test_one_node_that_dies_meanwhile_does_not_matter_where_the_other_has_its_part() -> None:
    job, nodes, _ = failed()
    nodes[0].hang_up()
    job.wait(10)
    assert orders(nodes[1:]) == [("step-20", [0, 1], False)]
    for _ in range(2):
        nodes[1].durable()
    assert job.phase is Phase.FAILED
    assert steps(job) == [10, 20]


def test_a_refusal_of_all_ranks_is_put_off_as_well() -> None:
    """It ends a world that is still open."""
    job, nodes = started(2)
    made = held(job, nodes, 20)
    for node in nodes:
        refuses(job, node)
    assert job.phase is Phase.FORMING
    assert orders(nodes) == [("step-20", [0], False), ("step-20", [1], False)]
    for node in (*nodes, nodes[0]):
        node.durable()
    assert job.phase is Phase.FAILED
    assert nodes[0].directive.finish.message == "the training was refused: other data"
    assert made.ref.name in [record.name for record in job.job.checkpoints.usable]


@pytest.mark.parametrize("end", [False, True])
def test_while_nodes_lack_what_is_in_memory_comes_to_the_disk(end: bool) -> None:
    job, nodes = started(3, min_nodes=3, wait_for_nodes=60.0 if end else -1.0)
    made = in_memory(job, 20)
    for rank, node in enumerate(nodes):
        node.holds(made, rank, (rank - 1) % 3)
    nodes[2].hang_up()
    job.wait(2)
    assert job.phase is Phase.WAITING
    joins(job, *nodes[:2], sees=made)
    assert orders(nodes[:2]) == [NOTHING] * 2
    job.wait(LACKS_NODES_SECONDS)
    assert orders(nodes[:2]) == [("step-20", [0, 2], False), ("step-20", [1], False)]
    for node in (*nodes[:2], nodes[0]):
        node.durable()
    assert steps(job) == [20]
    job.wait(60)
    assert job.phase is (Phase.FAILED if end else Phase.WAITING)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_job_is_finished_when_what_its_ranks_wanted_on_the_disk_is_there(count: int) -> None:
    """A script may leave its loop right behind a save."""
    job, nodes = started(2)
    nodes[0].step(20)
    wanted(job, nodes, 20)
    for node in nodes[:count]:
        node.durable()
    for node in nodes:
        node.finished(20)
    assert job.phase is Phase.RUNNING
    job.wait(12)
    assert "waiting for step-20.e1.1 to be written from memory to the disk as the ranks have finished" in job.notices
    for node in (*nodes[count:], nodes[0]):
        assert job.phase is Phase.RUNNING
        node.durable()
    assert steps(job) == [20]
    assert job.phase is Phase.SUCCEEDED
    assert nodes[1].directive.finish.message == "the run finished at step 20"


def test_what_nobody_wanted_on_the_disk_is_not_waited_for() -> None:
    job, nodes = started(2)
    nodes[0].step(22)
    held(job, nodes, 20)
    for node in nodes:
        node.finished(22)
    assert job.phase is Phase.SUCCEEDED


def test_a_finished_job_waits_ten_minutes_for_a_disk() -> None:
    job, nodes = started(2)
    nodes[0].save(10, any_size=True)
    nodes[0].step(20)
    made = wanted(job, nodes, 20)
    for node in nodes:
        node.finished(20)
        node.durable("no space left on device")
    job.wait(ASKED_AGAIN_SECONDS + 1)
    in_vain(job, nodes, made, Phase.RUNNING, Phase.FAILED)
    assert nodes[0].directive.finish.message == NOT_WRITTEN


NOT_WRITTEN = "the ranks have finished, but no node could write step-20.e1.1 to the disk"


def test_a_node_that_is_lost_as_the_others_write_takes_nothing_with_it() -> None:
    """It had finished; the other one has its part."""
    job, nodes = started(2)
    nodes[0].step(20)
    wanted(job, nodes, 20)
    for node in nodes:
        node.finished(20)
    nodes[1].hang_up()
    job.wait(10)
    assert orders(nodes[:1]) == [("step-20", [0, 1], False)]
    for _ in range(2):
        nodes[0].durable()
    assert steps(job) == [20]
    assert job.phase is Phase.SUCCEEDED


def finished(count: int = 2, *, copies: bool = True) -> tuple[Driven, list[Node], pb.Checkpoint]:
    """The ranks have finished, step 10 is on the disk, and step 20, which they want there, in memory alone."""
    job, nodes = started(count)
    nodes[0].save(10, any_size=True)
    nodes[0].step(20)
    made = in_memory(job, 20)
    for rank, node in enumerate(nodes):
        node.holds(made, *([rank, 1 - rank] if copies and count > 1 else [rank]), wanted=True)
    for node in nodes:
        node.finished(20)
    job.wait(1)
    assert job.phase is Phase.RUNNING
    return job, nodes, made


GONE = "step-20.e1.1 was in memory only, and the nodes that held a part of it are gone: going back to step-10.e1.1"


@pytest.mark.parametrize("how", ["leave", "killed", "stop"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_run_of_which_the_last_save_goes_with_its_nodes_is_not_finished(count: int, how: str) -> None:
    """The next agent makes the lost steps again, and is not told that nothing is left to do."""
    job, nodes, _ = finished(count)
    if how == "stop":
        job.call(pb.StopRequest(job_id="job"))
    for node in nodes:
        if how == "leave":
            node.leave()
        node.durable("no space left on device")
    job.wait(2)
    assert job.phase is Phase.RUNNING
    for node in nodes:
        if how == "killed":
            node.hang_up()
        else:
            node.goodbye()
    if how == "stop":
        job.wait(10)
        assert job.phase is Phase.STOPPED
        assert GONE in job.notices
        return
    late = newcomer(job)
    job.wait(20)
    assert GONE in job.notices
    joins(job, late)
    job.wait(10)
    assert job.phase is Phase.RUNNING
    assert late.directive.run.resume.source.step == 10
    late.finished(20)
    assert job.phase is Phase.SUCCEEDED


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_of_which_the_last_save_goes_with_its_master_and_its_nodes_is_not_finished(count: int) -> None:
    """A power cut: the next master hears of that save from nobody."""
    job, nodes, _ = finished(count)
    for node in nodes:
        node.hang_up()
    job.restart()
    job.wait(40)
    assert job.phase is not Phase.SUCCEEDED
    late = newcomer(job)
    job.wait(20)
    assert GONE in job.notices
    joins(job, late)
    job.wait(10)
    assert late.directive.run.resume.source.step == 10
    late.step(11)
    assert job.job.history[-1].lost_steps == 10
    late.finished(20)
    assert job.phase is Phase.SUCCEEDED


def test_what_comes_to_the_disk_behind_a_newer_step_that_is_in_memory_alone_counts() -> None:
    """That one may be lost: the run then goes back to it, and its files stay."""
    job, nodes = started(2)
    nodes[0].step(20)
    older = wanted(job, nodes, 10)
    newer = wanted(job, nodes, 20)
    for node in nodes:
        node.finished(20)
    for part, node in enumerate(nodes):
        job.call(pb.DurableRequest(caller=node.caller(), ref=older.ref, parts=[part]))
    job.call(pb.DurableRequest(caller=nodes[0].caller(), ref=older.ref))
    assert [record.step for record in job.job.checkpoints] == [10, 20]
    assert job.job.checkpoints.head.digest == newer.ref.digest
    for node in nodes:
        node.hang_up()
    late = newcomer(job)
    job.wait(40)
    older.in_memory = False
    joins(job, late, sees=older)
    job.wait(10)
    assert late.directive.run.resume.source.step == 10
    assert not job.job.late
    assert not late.directive.prune


def test_it_is_on_the_record_also_while_universal_files_are_owed() -> None:
    """The next node converts what the world began from, and makes the lost steps again."""
    job, (*nodes, lost) = started(3, universal_checkpoint=True)
    assert nodes[0].commit(job.seal(3, reshards=True)).code == "OK"
    lost.hang_up()
    job.wait(2)
    joins(job, *nodes)
    nodes[0].step(20)
    made = wanted(job, nodes, 20, any_size=False, reshards=True)
    for node in nodes:
        node.finished(20)
    assert job.job.conversion is not None
    assert job.phase is Phase.RUNNING
    assert job.job.checkpoints.head.digest == made.ref.digest
    assert orders(nodes) == [("step-20", [0], False), ("step-20", [1], False)]
    for node in nodes:
        node.hang_up()
    job.restart()
    late = newcomer(job)
    job.wait(40)
    assert "step-20.e2.1 was in memory only, and the nodes that held a part of it are gone" in job.notices
    assert job.phase is not Phase.SUCCEEDED
    late.hang_up()


def test_what_its_nodes_brought_to_the_disk_after_all_counts() -> None:
    """The last of them sealed it, and no master heard of that."""
    job, nodes, made = finished(1)
    nodes[0].hang_up()
    late = newcomer(job)
    job.wait(20)
    made.in_memory = False
    joins(job, late, sees=made)
    job.wait(10)
    assert late.directive.run.resume.source.step == 20


def test_who_is_left_makes_again_what_went_with_another_node() -> None:
    """Its copy had not come to anybody. It is looked for on the disk first."""
    job, nodes, _ = finished(copies=False)
    nodes[1].hang_up()
    job.wait(10)
    assert nodes[0].directive.make_durable.look
    assert job.phase is Phase.RUNNING
    job.wait(LOOK_WITHIN_SECONDS)
    assert GONE in job.notices
    joins(job, nodes[0])
    job.wait(2)
    assert nodes[0].directive.run.resume.source.step == 10


@pytest.mark.parametrize("gone", [True, False])
def test_who_has_all_of_the_last_save_writes_it_although_another_node_never_tells_of_its_part(gone: bool) -> None:
    """That one went as no master was there, or has it no more; and the next master hears the other one alone."""
    job, nodes, made = finished()
    returns(job, *nodes)
    nodes[0].holds(made, 0, 1, wanted=True)
    nodes[0].has_told_all()
    assert orders(nodes[:1]) == [("step-20", [0, 1], False)]
    if gone:
        nodes[1].hang_up()
        job.wait(10)
    else:
        nodes[1].has_told_all()
    assert orders(nodes[:1]) == [("step-20", [0, 1], False)]
    nodes[0].durable("no space left on device")
    job.wait(GIVEN_UP_AFTER_SECONDS + 15)
    assert job.phase is Phase.RUNNING
    nodes[0].durable("no space left on device")
    assert job.phase is Phase.FAILED
    assert nodes[0].directive.finish.message == NOT_WRITTEN


def test_a_disk_that_takes_it_in_the_end_is_waited_for() -> None:
    """It failed once, and has been at work for more than ten minutes since."""
    job, nodes, _ = finished()
    for node in nodes:
        node.durable("no space left on device")
    job.wait(GIVEN_UP_AFTER_SECONDS + 60)
    assert job.phase is Phase.RUNNING
    written(job, nodes, 20)
    assert job.phase is Phase.SUCCEEDED


def test_a_job_that_is_to_stop_meanwhile_is_stopped() -> None:
    """Not failed: that would be taken up again."""
    job, nodes, _ = finished()
    for node in nodes:
        node.durable("no space left on device")
    job.wait(GIVEN_UP_AFTER_SECONDS + 15)
    job.call(pb.StopRequest(job_id="job"))
    for node in nodes:
        node.durable("no space left on device")
    for node in nodes:
        node.goodbye()
    job.wait(2)
    assert job.phase is Phase.STOPPED


def test_a_silent_node_is_waited_for_that_may_have_the_last_save() -> None:
    """Another master has heard of it from the other one, which has only its own part."""
    job, nodes, made = finished(copies=False)
    returns(job, *nodes)
    nodes[0].holds(made, 0, wanted=True)
    nodes[0].has_told_all()
    job.wait(5)
    assert job.phase is Phase.RUNNING
    nodes[1].holds(made, 1, wanted=True)
    nodes[1].has_told_all()
    written(job, nodes, 20)
    assert job.phase is Phase.SUCCEEDED


def test_a_run_of_which_the_last_world_began_from_what_is_lost_is_not_finished() -> None:
    """It made no other save, and its only holder has finished and is gone."""
    job, nodes = started(2)
    made = in_memory(job, 20)
    nodes[0].holds(made, 0)
    nodes[1].holds(made, 0, 1)
    for node in nodes:
        node.failed("boom", step=24)
    joins(job, *nodes, sees=made)
    job.wait(1.2)
    assert nodes[0].directive.run.resume.source.step == 20
    for node in nodes:
        node.finished(22)
    assert job.phase is Phase.RUNNING
    nodes[1].hang_up()
    job.wait(45)
    assert f"{made.ref.name} was in memory only, and the nodes that held a part of it are gone" in job.notices
    joins(job, nodes[0])
    job.wait(2)
    assert job.phase is Phase.RUNNING
    assert not nodes[0].directive.run.HasField("resume")


# ---- the best checkpoint, which is not the newest ------------------------------------------------------------------


def failed_behind_best(*, newest: str) -> tuple[Driven, list[Node], pb.Checkpoint]:
    """Step 10 was the best and is still in memory, as the script fails for good behind another save, `newest`."""
    job, nodes = started(2, max_restarts=0)
    nodes[0].step(22)
    made = best(job, nodes, 10)
    if newest == "on the disk":
        later = job.seal(20, any_size=True)
        later.candidate = made.ref.name
        job.call(pb.CommitRequest(caller=nodes[0].caller(), checkpoint=later))
    else:
        later = in_memory(job, 20, any_size=True)
        later.candidate = made.ref.name
        for rank, node in enumerate(nodes):
            node.holds(later, rank, 1 - rank)
    for node in nodes:
        node.failed("exit 3", step=22)
    joins(job, *nodes, sees=later)
    job.wait(1.2)
    assert job.phase is Phase.FORMING
    return job, nodes, made


@pytest.mark.parametrize("newest", ["on the disk", "in memory"])
def test_a_job_that_fails_for_good_keeps_its_best(newest: str) -> None:
    """What it would go on from comes first."""
    job, nodes, _ = failed_behind_best(newest=newest)
    if newest == "in memory":
        written(job, nodes, 20)
        assert job.phase is Phase.FORMING
    assert orders(nodes) == [("step-10", [0], False), ("step-10", [1], False)]
    written(job, nodes, 10)
    assert job.phase is Phase.FAILED
    assert sorted(steps(job)) == [10, 20]


def test_a_best_that_cannot_be_written_is_given_up_in_the_end() -> None:
    """Nobody goes back for it: the run goes on from the newest."""
    job, nodes, made = failed_behind_best(newest="on the disk")
    for node in nodes:
        node.durable("no space left on device")
    job.wait(GIVEN_UP_AFTER_SECONDS + 20)
    for node in nodes:
        node.durable("no space left on device")
    assert job.phase is Phase.FAILED
    assert f"{made.ref.name} was the best checkpoint, in memory only, and no node could write it to the disk" in (
        job.notices
    )
    assert "going back" not in job.notices


def test_a_best_of_which_a_part_is_gone_holds_no_end_up() -> None:
    job, nodes, made = failed_behind_best(newest="on the disk")
    for node in nodes:
        node.holds(made)
    job.wait(1)
    assert job.phase is Phase.FAILED


def test_a_finished_job_has_its_best_on_the_disk() -> None:
    job, nodes = started(2)
    nodes[0].step(20)
    best(job, nodes, 10)
    job.call(pb.CommitRequest(caller=nodes[0].caller(), checkpoint=job.seal(20, any_size=True)))
    for node in nodes:
        node.finished(20)
    assert job.phase is Phase.RUNNING
    written(job, nodes, 10)
    assert job.phase is Phase.SUCCEEDED


def test_while_nodes_lack_the_best_comes_to_the_disk() -> None:
    job, nodes = started(3, min_nodes=3)
    nodes[0].step(22)
    best(job, nodes, 10)
    later = job.seal(20, any_size=True)
    job.call(pb.CommitRequest(caller=nodes[0].caller(), checkpoint=later))
    nodes[2].hang_up()
    job.wait(2)
    joins(job, *nodes[:2], sees=later)
    job.wait(1)
    assert job.phase is Phase.WAITING
    written(job, nodes[:2], 10)


# ---- a master that dies meanwhile ----------------------------------------------------------------------------------


def returns(job: Driven, *nodes: Node) -> None:
    """A new master, to which these nodes connect. They have not said yet what they hold."""
    job.restart()
    for node in nodes:
        job.event(StreamOpened(node.name, node.incarnation))


def tells(nodes: list[Node], made: pb.Checkpoint, **said: bool) -> None:
    """All that they hold."""
    for rank, node in enumerate(nodes):
        node.holds(made, rank, 1 - rank, **said)
        node.has_told_all()


def test_another_master_goes_on_ending() -> None:
    """With the same message, and with nobody at work in between."""
    job, nodes, made = failed()
    before = job.epoch
    returns(job, *nodes)
    job.wait(2)
    assert job.phase is Phase.FORMING
    tells(nodes, made)
    written(job, nodes, 20)
    assert (job.phase, job.epoch) == (Phase.FAILED, before)
    assert steps(job) == [10, 20]
    assert nodes[1].directive.finish.message.startswith("host-0-0: exit 3; 1 failure without progress")
    assert job.notices.count("host-0-0: exit 3") == 1


def test_a_refusal_is_told_by_another_master_as_it_was() -> None:
    job, nodes = started(2)
    made = held(job, nodes, 20)
    for node in nodes:
        refuses(job, node)
    returns(job, *nodes)
    tells(nodes, made)
    written(job, nodes, 20)
    assert nodes[0].directive.finish.message == "the training was refused: other data"


def test_another_master_tries_a_disk_for_ten_minutes_again() -> None:
    job, nodes, made = failed()
    for node in nodes:
        node.durable("no space left on device")
    job.wait(GIVEN_UP_AFTER_SECONDS - ASKED_AGAIN_SECONDS - 10)
    returns(job, *nodes)
    tells(nodes, made)
    in_vain(job, nodes, made, Phase.FORMING, Phase.FAILED)


def test_what_another_master_does_not_know_yet_is_not_taken_for_nothing() -> None:
    """The best checkpoint was not on the record: only its holders know of it."""
    job, nodes, made = failed_behind_best(newest="on the disk")
    returns(job, *nodes)
    job.wait(2)
    assert job.phase is Phase.FORMING
    tells(nodes, made, wanted=True)
    written(job, nodes, 10)
    assert job.phase is Phase.FAILED
    assert sorted(steps(job)) == [10, 20]


def test_a_master_that_died_before_it_had_counted_the_failure_is_no_matter() -> None:
    """The next one has not heard what is held when it counts it."""
    job, nodes = started(2, max_restarts=0)
    nodes[0].step(22)
    made = best(job, nodes, 10)
    later = job.seal(20, any_size=True)
    later.candidate = made.ref.name
    job.call(pb.CommitRequest(caller=nodes[0].caller(), checkpoint=later))
    for node in nodes:
        node.failed("exit 3", step=22)
    nodes[0].join(sees=job.sealed)
    returns(job, *nodes)
    nodes[1].join(sees=job.sealed)
    job.wait(2)
    assert job.phase is Phase.FORMING
    tells(nodes, made, wanted=True)
    written(job, nodes, 10)
    assert job.phase is Phase.FAILED


def test_a_finished_job_ends_under_another_master_when_its_save_is_on_the_disk() -> None:
    job, nodes = started(2)
    nodes[0].step(20)
    made = wanted(job, nodes, 20)
    for node in nodes:
        node.finished(20)
    returns(job, *nodes)
    job.wait(2)
    assert job.phase is Phase.RUNNING
    tells(nodes, made, wanted=True)
    written(job, nodes, 20)
    assert job.phase is Phase.SUCCEEDED


def test_nodes_that_say_nothing_hold_no_end_up() -> None:
    job, nodes, _ = failed_behind_best(newest="on the disk")
    returns(job, *nodes)
    job.wait(TOLD_WITHIN_SECONDS + 2)
    assert job.phase is Phase.FAILED


def test_where_all_are_gone_as_well_the_next_agent_takes_the_job_up() -> None:
    """After a power cut, say. It is not let in, and told that the job has failed, while they may be there."""
    job, nodes, _ = failed()
    for node in nodes:
        node.hang_up()
    job.restart()
    late = Node(job, "late")
    for _ in range(2):
        assert late.register(host="host-9", peer_address="10.0.0.9:7").code == "UNAVAILABLE"
        job.wait(1)
    for _ in range(40):
        job.wait(1)
        if late.register(host="host-9", peer_address="10.0.0.9:7").code == "OK":
            break
    assert job.phase is Phase.FORMING
    assert "had failed (host-0-0: exit 3" in job.notices
    assert job.job.ending is None


def test_a_new_run_begins_where_all_are_gone() -> None:
    job, nodes, _ = failed()
    for node in nodes:
        node.hang_up()
    job.wait(30)
    late = Node(job, "late")
    assert late.register(host="host-9", peer_address="10.0.0.9:7", new_run=True).code == "OK"
    assert job.job.run.number == 2
    assert job.job.ending is None


def test_an_agent_that_does_not_fit_is_refused_where_all_are_gone() -> None:
    """As by any job that takes its next agent's settings; the next one that fits takes it up."""
    job, nodes, _ = failed()
    job.job.fixed_nnodes = True
    for node in nodes:
        node.hang_up()
    job.wait(30)
    odd = Node(job, "odd")
    refused = odd.register(host="host-9", peer_address="10.0.0.9:7", settings=settings(node_unit=8, max_nodes=8))
    assert refused.code == "INVALID_ARGUMENT"
    assert "--node-unit=8 does not fit --nnodes" in refused.detail
    assert (job.phase, job.job.run.reopened) == (Phase.FAILED, 0)
    late = Node(job, "late")
    assert late.register(host="host-9", peer_address="10.0.0.9:7").code == "OK"
    assert job.job.settled


def test_an_order_to_stop_counts_for_a_job_that_is_over() -> None:
    """Where the nodes go before what they have is on the disk, and with another master in between."""
    job, nodes, _ = failed()
    job.call(pb.StopRequest(job_id="job"))
    returns(job, *nodes)
    for node in nodes:
        node.hang_up()
    job.wait(15)
    assert job.phase is Phase.STOPPED
    assert job.job.ending is None
    assert "(it failed meanwhile: host-0-0: exit 3" in job.job.message


def test_a_job_that_fails_and_is_stopped_while_it_still_writes_is_stopped() -> None:
    """What is in memory alone comes to the disk first, as with each end."""
    job, nodes, _ = failed()
    reason = shown.status(job.state, job.now).reason
    assert reason.startswith("the job ends when what it has in memory only is on the disk: host-0-0: exit 3")
    assert job.call(pb.StopRequest(job_id="job")).code == "OK"
    for node in (*nodes, nodes[0]):
        node.durable()
    for node in nodes:
        node.hang_up()
    job.wait(10)
    assert (job.phase, job.job.stopping) == (Phase.STOPPED, False)
    assert "(it failed meanwhile: host-0-0: exit 3" in job.job.message
    assert "goes on from step 20" in job.job.message
