"""After the end: who takes a failed run up again, what they are told, and a --new-run that has no effect."""

from __future__ import annotations

import pytest

from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, settings


def failed(job: Driven, step: int = 4) -> Node:
    """One node's run fails for good, after a commit of this step; its agent goes."""
    node = job.node()
    node.join()
    job.wait(2)
    if step:
        node.save(step)
    fail(job, node, step)
    return node


def fail(job: Driven, node: Node, step: int = 0) -> None:
    """It fails until the budget is spent."""
    for _ in range(job.job.settings.max_restarts + 1):
        assert job.phase is Phase.RUNNING
        node.failed("boom", step=step)
        if job.phase is not Phase.FAILED:
            node.join()
            job.wait(5)
    assert job.phase is Phase.FAILED
    node.hang_up()


def remark(job: Driven, node: Node) -> str:
    """What the present registration tells its person: the same however often it is asked."""
    first = node.register()
    assert isinstance(first.message, control_pb2.RegisterReply)
    return first.message.remark


@pytest.mark.parametrize("embedded", [False, True])
def test_a_new_agent_takes_a_failed_run_up_again(embedded: bool) -> None:
    """The same run, from its last commit, with a fresh budget; everybody is told, the newcomer too."""
    job = Driven(settings(max_restarts=1), embedded=embedded)
    failed(job)
    late = job.node()
    said = remark(job, late)
    assert "run-0001 had failed (host-0: boom; 2 failures without progress" in said
    assert "host-0 takes it up again from step 4" in said
    assert said in job.notices
    late.join()
    job.wait(2)
    assert job.job.run_id == "run-0001"
    assert late.directive.run.resume.source.step == 4
    late.failed("boom", step=4)
    late.join()
    assert job.phase is Phase.RUNNING, "its budget is a fresh one"
    assert job.job.run.budget.saved_step == 4, "but what was saved before is no progress"


def test_an_agent_of_the_failed_world_does_not_take_it_up_again() -> None:
    """It was away when the run failed, comes back as a new incarnation, and is told how it ended."""
    job = Driven(settings(max_restarts=0))
    node = failed(job)
    again = Node(job, "again")
    assert again.register(previous_incarnation=node.incarnation).code == "OK"
    assert job.phase is Phase.FAILED
    assert again.order == "finish"
    assert not again.directive.finish.success


def test_a_failed_run_is_not_taken_up_while_its_agents_are_there() -> None:
    """They are told first; the newcomer asks again."""
    job = Driven(settings(max_restarts=0))
    (a,) = job.start(1)
    a.save(4)
    a.failed(step=4)
    a.join()
    assert job.phase is Phase.FAILED
    late = Node(job, "late")
    assert late.register().code == "UNAVAILABLE"
    a.hang_up()
    assert late.register().code == "OK"
    assert job.phase is not Phase.FAILED


def test_a_commit_that_is_not_beyond_the_failure_is_one_all_the_same() -> None:
    """Each attempt of a supervisor comes one commit further: none is "without a commit"."""
    job = Driven(settings(max_restarts=0))
    told = []
    for begins in range(0, 100, 25):
        node = job.node()
        if begins:
            told.append(remark(job, node))
        node.join()
        job.wait(2)
        node.step(begins + 25)
        node.save(begins + 25)
        fail(job, node, begins + 50)
    assert len(told) == 3
    assert not any("without a commit" in text for text in told)


def test_an_endless_loop_of_restarts_is_counted_aloud() -> None:
    """A supervisor starts the agent again and again; a commit begins the count anew."""
    job = Driven(settings(max_restarts=0))
    failed(job)
    told = []
    for _ in range(4):
        node = job.node()
        told.append(remark(job, node))
        node.join()
        job.wait(2)
        fail(job, node, 4)
    assert [text.partition("from step 4")[2] for text in told] == [
        "",
        ", for the 2nd time without a commit",
        ", for the 3rd time without a commit",
        ", for the 4th time without a commit",
    ]
    node = job.node()
    node.join()
    job.wait(2)
    node.save(9)
    fail(job, node, 9)
    assert remark(job, job.node()).endswith("takes it up again from step 9")


def test_a_restarted_master_lets_a_failed_run_be_taken_up_too() -> None:
    """It knows of no agent that would still be there."""
    job = Driven(settings(max_restarts=0))
    failed(job)
    job.restart()
    late = job.node()
    late.join()
    job.wait(2)
    assert late.directive.run.resume.source.step == 4


def test_new_run_after_a_failure_starts_over() -> None:
    """On request nothing of the failed run counts."""
    job = Driven(settings(max_restarts=0))
    failed(job)
    late = job.node(new_run=True)
    assert remark(job, late) == ""
    late.join()
    job.wait(2)
    assert job.job.run_id == "run-0002"
    assert not late.directive.run.HasField("resume")


def test_new_run_has_no_effect_on_a_run_that_is_not_over_and_says_so() -> None:
    """After a power cut, for example: one line, which says where it goes on, and what to do instead."""
    job = Driven(embedded=True)
    a, b = job.start(2)
    a.save(4)
    job.restart()
    job.silent = {a.incarnation, b.incarnation}
    job.wait(8)
    late = job.node(new_run=True)
    said = remark(job, late)
    assert "--new-run has no effect: run-0001 is not over, and goes on from step 4" in said
    assert "--job-id" in said
    assert job.job.run_id == "run-0001"
    assert remark(job, job.node()) == ""


def test_new_run_on_every_node_of_a_new_run_is_no_news() -> None:
    """The same command on four nodes: the first begins the run, and the others join it."""
    job = Driven(settings(max_restarts=0))
    first = job.node(new_run=True)
    assert remark(job, first) == ""
    first.join()
    job.wait(2)
    assert remark(job, job.node()) == ""
    fail(job, first)
    for node in job.nodes:
        node.hang_up()
    nodes = [job.node(new_run=True)]
    nodes[0].join()
    job.wait(2)
    assert job.phase is Phase.RUNNING
    nodes.append(job.node(new_run=True))
    assert [remark(job, node) for node in nodes] == ["", ""]
    assert job.job.run_id == "run-0002"


@pytest.mark.parametrize("embedded", [False, True])
def test_a_finished_run_stays_finished(embedded: bool) -> None:
    """The same command, or a terminal that comes late, trains nothing again: it says so, and what does."""
    job = Driven(embedded=embedded)
    (node,) = job.start(1)
    node.save(4)
    node.finished(4)
    assert job.phase is Phase.SUCCEEDED
    node.hang_up()
    said = "run-0001 is finished: nothing is left to do; --new-run trains again, from step 0"
    assert [remark(job, job.node()) for _ in range(2)] == [said, said]
    assert (job.phase, job.job.run_id) == (Phase.SUCCEEDED, "run-0001")
    job.wait(2)
    for late in job.nodes:
        late.hang_up()
    assert remark(job, job.node(new_run=True)) == ""
    assert job.job.run_id == "run-0002"
    assert remark(job, job.node()) == ""
