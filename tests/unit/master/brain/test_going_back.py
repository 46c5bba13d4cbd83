"""`--resume-step`: once, by the record; later checkpoints are kept aside and never chosen again."""

from __future__ import annotations

import pytest

from dalsegno.master.brain import brain
from dalsegno.master.brain.checkpoints import prunable, resume_point, retire
from dalsegno.master.brain.state import Budget, Phase
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, settings


def trained(*steps: int, **changes: object) -> Driven:
    """A run of one node that saved these steps, and left."""
    job = Driven(settings(keep_checkpoints=0, **changes))
    go_on(job, job.node(), *steps)
    return job


def go_on(job: Driven, node: Node, *steps: int) -> None:
    """It trains these steps, each saved, and is gone."""
    run(job, node)
    for step in steps:
        node.step(step)
        node.save(step)
    gone(job, node)


def run(job: Driven, *nodes: Node) -> None:
    """These make the next world; those that were there before are given up by then."""
    for _ in range(20):
        for node in nodes:
            if node.directive.HasField("gather") or node.directive.wait.round:
                node.join()
        job.wait(1)
        if job.phase is Phase.RUNNING and nodes[0].directive.HasField("run"):
            return
    raise AssertionError(job.phase)


def gone(job: Driven, node: Node) -> None:
    """Its process is gone, and nobody is left."""
    node.hang_up()
    job.wait(8)


def refusal(job: Driven, **fields: object) -> tuple[str, str]:
    """What a new agent is answered that is not let in."""
    late = Node(job, f"refused-{len(job.nodes)}")
    reply = late.register(**fields)
    return reply.code, reply.detail


def let_in(job: Driven, **fields: object) -> Node:
    """A new agent that asks again and again, until a new master has given up the nodes of its record."""
    late = Node(job, f"late-{len(job.nodes)}")
    job.nodes.append(late)
    for _ in range(15):
        if late.register(**fields).code == "OK":
            return late
        job.wait(1)
    raise AssertionError("it is not let in")


def remark(node: Node) -> str:
    message = node.register().message
    assert isinstance(message, control_pb2.RegisterReply)
    return message.remark


def resumed(job: Driven, node: Node) -> int:
    """The step that its next world starts from."""
    run(job, node)
    return int(node.directive.run.resume.source.step)


def test_step_0_is_the_beginning() -> None:
    """Every checkpoint is kept aside, also where another directory is the job's from now on; once, by the record."""
    job = trained(10, 20)
    late = job.node(resume_step=0, probe="another directory")
    said = "run-0001 goes back to its beginning, as --resume-step says: 2 later checkpoints are kept aside"
    assert remark(late).startswith(said)
    run(job, late)
    assert not late.directive.run.HasField("resume")
    assert [(one.step, one.aside) for one in job.job.checkpoints] == [(10, True), (20, True)]
    late.step(5)
    late.save(5)
    gone(job, late)
    job.restart()
    again = job.node(resume_step=0, probe="another directory")
    assert "has been followed" in remark(again)
    assert resumed(job, again) == 5


def test_a_start_goes_back_and_what_came_after_stays() -> None:
    """One line; a newer world starts from there; nothing of what came after is ever chosen or deleted."""
    job = trained(10, 20, 30, 40)
    late = job.node(resume_step=20)
    said = remark(late)
    assert said.startswith("run-0001 goes back to step 20 (step-20.e1.")
    assert said.endswith("as --resume-step says: 2 later checkpoints are kept aside, and not deleted")
    assert said in job.notices
    assert resumed(job, late) == 20
    late.save(30)  # a step that was made before is made again
    job.restart()
    assert [(one.step, one.epoch) for one in job.job.checkpoints.usable] == [(10, 1), (20, 1), (30, 2)]
    assert [one.step for one in job.job.checkpoints if one.aside] == [30, 40]
    assert not [one for one in prunable(job.job) if one.aside]


@pytest.mark.parametrize("stored", [False, True])
def test_the_same_command_does_not_go_back_again(stored: bool) -> None:
    """Also over another master; one line says where it goes on, once there is something new."""
    job = trained(10, 20, 30)
    assert remark(job.node(resume_step=10))
    gone(job, job.nodes[-1])
    again = job.node(resume_step=10)
    assert remark(again) == "", "nothing has been trained since"
    go_on(job, again, 15)
    if stored:
        job.restart()
    third = job.node(resume_step=10)
    assert remark(third) == (
        "--resume-step has been followed: run-0001 went back to step 10 before epoch 2, and goes on from step 15; "
        "--resume-step=10:2 goes back there once more"
    )
    assert resumed(job, third) == 15


def test_once_more_on_request() -> None:
    """And to another step whenever it is asked for."""
    job = trained(10, 20)
    go_on(job, job.node(resume_step=10), 20, 30)
    second = job.node(resume_step=10, resume_time=2)
    assert "2 later checkpoints" in remark(second)
    go_on(job, second, 20)
    third = job.node(resume_step=20)
    assert resumed(job, third) == 20
    assert [one.step for one in job.job.checkpoints if one.aside] == [20, 20, 30]


def test_a_start_at_the_newest_step_is_remembered_too() -> None:
    """Nothing is aside; and later starts go on from what comes next."""
    job = trained(10, 20)
    first = job.node(resume_step=20)
    assert "0 later checkpoints are kept aside" in remark(first)
    go_on(job, first, 30)
    assert resumed(job, job.node(resume_step=20)) == 30


def test_all_nodes_of_a_start_may_ask() -> None:
    """The first goes back, and nobody else hears of it twice."""
    job = trained(10, 20)
    nodes = [job.node(resume_step=10), job.node(resume_step=10), job.node()]
    assert [bool(remark(node)) for node in nodes] == [True, False, False]
    assert [node.directive.gather.resume.name for node in nodes] == ["step-10.e1.1"] * 3


def test_a_step_without_a_checkpoint_is_refused() -> None:
    """With the steps that have one, and nothing changes."""
    code, said = refusal(trained(10, 20), resume_step=15)
    assert (code, said) == (
        "FAILED_PRECONDITION",
        "--resume-step=15: run-0001 has no checkpoint of that step; it has those of 10, 20",
    )
    _, said = refusal(trained(*range(1, 12)), resume_step=15)
    assert said.endswith("it has those of ..., 4, 5, 6, 7, 8, 9, 10, 11")
    code, said = refusal(Driven(), resume_step=15)
    assert (code, said) == (
        "FAILED_PRECONDITION",
        "--resume-step=15: run-0001 has no checkpoint to go back to: leave it out",
    )


def test_what_is_aside_is_no_step_to_go_back_to() -> None:
    job = trained(10, 20, 30)
    gone(job, job.node(resume_step=10))
    code, said = refusal(job, resume_step=30)
    assert code == "FAILED_PRECONDITION"
    assert said.endswith(
        "no checkpoint of that step (step-30.e1.1 is kept aside, since the run went back); it has those of 10"
    )


@pytest.mark.parametrize(("damaged", "why"), [(False, "about to be deleted, --keep-checkpoints"), (True, "damaged")])
def test_what_is_given_up_is_no_step_to_go_back_to(damaged: bool, why: str) -> None:
    """Its files may still be there, but a node may be deleting them: the line says so."""
    job = trained(10, 20, 30)
    (one,) = (record for record in job.job.checkpoints.usable if record.step == 10)
    retire(job.job, one, damaged=damaged)
    code, said = refusal(job, resume_step=10)
    assert code == "FAILED_PRECONDITION"
    assert said.endswith(f"no checkpoint of that step (step-10.e1.1 is {why}); it has those of 20, 30")


def test_a_run_that_trains_is_not_moved() -> None:
    job = trained(10, 20)
    run(job, job.node())
    code, said = refusal(job, resume_step=10)
    assert code == "FAILED_PRECONDITION"
    assert said.startswith("--resume-step=10 is for a start, and host-1 takes part in run-0001 already: stop all nodes")
    assert job.phase is Phase.RUNNING


def test_nodes_that_may_be_gone_are_waited_for() -> None:
    """A new master only presumes that the nodes of its record are there: after a power cut they are given up."""
    job = trained(10, 20)
    node = job.node()
    run(job, node)
    job.restart()
    job.silent = {node.incarnation}
    code, said = refusal(job, resume_step=10)
    assert (code, said) == (
        "UNAVAILABLE",
        "--resume-step waits until host-1, which may be gone, is given up",
    )
    for _ in range(8):  # an agent asks again and again
        refusal(job, resume_step=10)
        job.wait(1)
    assert resumed(job, job.node(resume_step=10)) == 10


def test_a_failed_run_is_taken_up_from_there() -> None:
    """After a loss that became NaN, for instance; its budget is a fresh one."""
    job = Driven(settings(max_restarts=1, keep_checkpoints=0))
    node = job.node()
    node.join()
    job.wait(2)
    node.save(10)
    node.save(20)
    for _ in range(2):
        node.failed("the loss is NaN", step=20)
        node.join()
    assert job.phase is Phase.FAILED
    node.hang_up()
    late = job.node(resume_step=10)
    assert "takes it up again from step 20; run-0001 goes back to step 10" in remark(late)
    assert job.job.run.budget == Budget(), "steps that were made before are progress"
    assert resumed(job, late) == 10


@pytest.mark.parametrize("embedded", [False, True])
def test_a_finished_run_stays_finished(embedded: bool) -> None:
    job = Driven(settings(keep_checkpoints=0), embedded=embedded)
    node = job.node()
    node.join()
    job.wait(2)
    node.save(10)
    node.save(20)
    node.finished(20)
    assert job.phase is Phase.SUCCEEDED
    node.hang_up()
    code, said = refusal(job, resume_step=10)
    assert code == "FAILED_PRECONDITION"
    assert said.startswith("run-0001 is finished, and --resume-step=10 goes back in a run that is not: leave it out")
    assert job.phase is Phase.SUCCEEDED


def test_a_finished_run_that_went_back_before_stays_finished() -> None:
    """A node that comes late, with the flag of all, is told so like any other."""
    job = trained(10, 20)
    node = job.node(resume_step=10)
    run(job, node)
    node.save(15)
    node.finished(15)
    assert job.phase is Phase.SUCCEEDED
    late = job.node(resume_step=10)
    assert late.directive.finish.success
    assert "has been followed" not in remark(late)


def test_to_start_over_and_to_go_back_is_too_much() -> None:
    job = trained(10, 20)
    code, said = refusal(job, resume_step=10, new_run=True)
    assert (code, "give one of them" in said) == ("INVALID_ARGUMENT", True)
    assert job.job.run_id == "run-0001"


def test_what_is_aside_does_not_count_as_lost() -> None:
    job = trained(10, 20)
    other = job.node()
    job.wait(8)
    assert job.job.run.left_step == 20
    gone(job, other)
    job.node(resume_step=10)
    assert job.job.run.left_step == 10


@pytest.mark.parametrize("stored", [False, True])
def test_nothing_about_a_way_back_is_unknown(stored: bool) -> None:
    """The history shows no lost step, and none that may be: a person gave them up. Also over another master."""
    job = trained(10, 20)
    if stored:
        job.restart()
        job.wait(60)
    late = let_in(job, resume_step=10)
    run(job, late)
    late.step(11)
    newest = job.job.history[-1]
    assert (newest.first_step, newest.lost_steps, newest.lost_more) == (11, 0, False)


def test_what_the_last_world_sealed_without_a_record_is_aside_too() -> None:
    """The node that joins sees it; without this it would be newer than where the run went back to."""
    job = trained(10, 20)
    late = job.node(resume_step=10)
    job.seal(25, 1)
    run(job, late)
    assert late.directive.run.resume.source.step == 10
    assert [one.step for one in job.job.checkpoints if one.aside] == [20, 25]


def test_what_nodes_still_hold_in_memory_does_not_undo_it() -> None:
    """They come again behind it, and say what they have."""
    job = Driven(settings(memory_replicas=1, universal_checkpoint=False))
    a, b = job.start(2, peer_address="there:1")
    a.commit(job.seal(10, any_size=True))
    made = job.seal(20, any_size=True)
    job.sealed.remove(made)
    made.in_memory = True
    for part, node in enumerate((a, b)):
        node.holds(made, part)
        node.hang_up()
    job.wait(120)
    job.node(resume_step=10)
    again = [job.node(previous_incarnation=node.incarnation, peer_address=f"there:{node.name}") for node in (a, b)]
    for part, node in enumerate(again):
        node.holds(made, part)
    head = resume_point(job.job)
    assert head is not None
    assert head.step == 10


def test_what_a_new_run_sealed_unheard_stays_aside_under_the_next_master() -> None:
    """A power cut came before its first step was heard, and the next master before the next world's first step."""
    job = Driven(settings(keep_checkpoints=1), embedded=True)
    first = job.node()
    run(job, first)
    first.step(1)
    first.save(1)
    first.finished(2)
    gone(job, first)
    second = job.node(new_run=True)
    run(job, second)
    made = job.seal(3)
    gone(job, second)
    third = job.node(resume_step=0)
    run(job, third)
    job.restart()
    assert [(one.name, one.aside) for one in job.job.checkpoints] == [(made.ref.name, True)]
    third.beat()
    third.step(1)
    third.commit(job.seal(1))
    assert not [one for one in prunable(job.job) if one.name == made.ref.name]


@pytest.mark.parametrize("is_new", [False, True])
def test_the_status_says_where_the_run_went_back_to(is_new: bool) -> None:
    """Not the last step of what is aside; so does the job's end. The history still says what was made."""
    job = trained(5, 10)
    go_on(job, job.node(), 15, 20)
    if is_new:
        job.restart(is_gone=lambda process: True)
        job.wait(100)
    late = let_in(job, resume_step=5)
    job.wait(1)
    assert (brain.status(job.state, job.now).step, job.job.run.left_step) == (5, 5)
    job.call(control_pb2.StopRequest(job_id="job"))
    gone(job, late)
    assert job.phase is Phase.STOPPED
    assert (brain.status(job.state, job.now).step, job.job.events[-1].step) == (5, 5)
    assert [(entry.first_step, entry.last_step) for entry in job.job.history] == [(1, 10), (11, 20)]


def test_who_goes_back_while_a_new_master_still_has_a_world_stands_there() -> None:
    """Its nodes are gone, and their world ends in the turn in which the run goes back."""
    job = Driven(settings(keep_checkpoints=0))
    node = job.node()
    run(job, node)
    for step in (5, 10):
        node.step(step)
        node.save(step)
    job.restart()
    job.silent = {node.incarnation}
    while refusal(job, resume_step=5)[0] == "UNAVAILABLE":
        job.wait(0.5)
    late = job.node(resume_step=5)
    job.wait(1)
    assert (brain.status(job.state, job.now).step, job.job.run.left_step) == (5, 5)
    assert job.job.history[-1].last_step == 10
    run(job, late)
    assert brain.status(job.state, job.now).step == 5
    assert job.job.history[-1].lost_steps == 0


def test_step_0_is_the_way_out_where_an_earlier_version_left_the_run_before() -> None:
    """The new run has made steps and no commit, so nobody can tell that what is on the record is not its own."""
    job = trained(10)
    node = job.node()
    run(job, node)
    node.finished(20)
    gone(job, node)
    rows = {key: row for key, row in job.rows.items() if key.startswith(("checkpoint/", "epoch/"))}
    node = job.node(new_run=True)
    run(job, node)
    node.step(1)
    gone(job, node)
    job.restart(left=rows)
    job.wait(60)
    late = let_in(job, resume_step=0)
    run(job, late)
    assert not late.directive.run.HasField("resume")
    assert [(one.step, one.aside) for one in job.job.checkpoints] == [(10, True)]
    late.step(1)
    late.save(1)
    gone(job, late)
    job.restart()
    job.wait(60)
    assert resumed(job, job.node()) == 1
