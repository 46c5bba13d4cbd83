"""Milestones on the record, and nodes that are fenced by order."""

from __future__ import annotations

import pytest

from dalsegno.master.brain.orders import MOST_SHUT_OUT
from dalsegno.master.brain.published import MILESTONES_KEPT, PRUNED_KEPT
from dalsegno.master.brain.shown import status
from dalsegno.master.brain.state import Phase, Run
from dalsegno.master.brain.turn import Turn
from dalsegno.master.record.codec import JobCodec
from dalsegno.protos import control_pb2 as pb
from tests.support.jobs.masters import Driven, Node, settings


def report(job: Driven, made: pb.Checkpoint | None, revision: str = "abc", holder: pb.Caller | None = None) -> str:
    """The code of the answer; None: of a checkpoint that is not ours."""
    said = pb.Milestone(repo="me/model", revision=revision, step=7 if made is None else made.step)
    if made is not None:
        said.checkpoint.CopyFrom(made.ref)
    return job.call(pb.MilestoneRequest(job_id="job", milestone=said, holder=holder)).code


def revisions(job: Driven) -> list[str]:
    return [made.revision for made in status(job.state, job.now).milestones]


def trained(count: int = 1, **changes: int) -> tuple[Driven, list[Node]]:
    job = Driven(settings(max_nodes=1, **changes))
    nodes = job.start(1)
    nodes[0].step(1)
    for _ in range(count - 1):
        nodes.append(job.node())
        nodes[-1].join()
    return job, nodes


def test_a_milestone_outlives_the_master() -> None:
    """Once it is answered it is on the record, and a repeat changes nothing."""
    job, (node,) = trained()
    made = node.save(2)
    assert report(job, made) == "OK"
    job.restart()
    noted = job.job.sequence
    assert report(job, made) == "OK"
    assert (revisions(job), job.job.sequence) == (["abc"], noted)
    assert "step 2 is at me/model, revision abc" in job.notices


def test_what_was_never_committed_is_no_milestone() -> None:
    """Neither what a closed epoch sealed nor another manifest under a name that was committed."""
    job, (node,) = trained()
    made = node.save(2)
    fenced = job.seal(4)
    other = pb.Checkpoint()
    other.CopyFrom(made)
    other.ref.digest = "f" * 64
    assert [report(job, one) for one in (fenced, other)] == ["FAILED_PRECONDITION"] * 2
    assert report(job, pb.Checkpoint(step=2)) == "FAILED_PRECONDITION"
    assert revisions(job) == []


def test_what_was_deleted_meanwhile_is_one_all_the_same() -> None:
    """A copy of it was on its way: that it was committed outlives its files and the master."""
    job, (node,) = trained(keep_checkpoints=1)
    made = [node.save(step) for step in range(2, 8)]
    pruned = [ref for ref in node.directive.prune if ref.name == made[0].ref.name]
    assert pruned
    assert job.call(pb.PrunedRequest(caller=node.caller(), refs=pruned)).code == "OK"
    assert job.job.checkpoint(made[0].ref.digest) is None
    job.restart()
    assert report(job, made[0]) == "OK"


def test_few_of_them_are_kept() -> None:
    """The newest; and so it is with what is remembered of deleted checkpoints, in the order of their deletion."""
    job, (node,) = trained(keep_checkpoints=1)
    for step in range(2, 2 * MILESTONES_KEPT):
        assert report(job, node.save(step), f"r{step}") == "OK"
        assert job.call(pb.PrunedRequest(caller=node.caller(), refs=node.directive.prune)).code == "OK"
    assert revisions(job) == [f"r{step}" for step in range(MILESTONES_KEPT, 2 * MILESTONES_KEPT)]
    numbers = [gone.number for gone in job.job.pruned]
    assert numbers == list(range(1, len(numbers) + 1))
    assert 0 < len(numbers) <= PRUNED_KEPT
    assert JobCodec().decode(JobCodec.everything(job.job)) == job.job


def test_a_new_run_has_none() -> None:
    """They belong to the run, and so does what was deleted of it."""
    job, (node,) = trained()
    assert report(job, node.save(2)) == "OK"
    Turn(job.state, job.now).begin_run(Run(2))
    assert (revisions(job), job.job.pruned) == ([], ())


def test_an_old_record_has_none() -> None:
    """A record that was written before there were milestones is read."""
    job, _ = trained()
    rows = JobCodec.everything(job.job)
    assert b'"milestones":[]' in rows["job"]
    rows["job"] = rows["job"].replace(b',"milestones":[]', b"").replace(b'"milestones":[],', b"")
    assert JobCodec().decode(rows) == job.job


def test_a_holder_publishes_what_is_not_ours() -> None:
    """Only from the open world, and only by whoever has registered the node."""
    job, nodes = trained(2)
    assert report(job, None, holder=nodes[0].caller()) == "OK"
    assert report(job, None, "b", nodes[1].caller()) == "FAILED_PRECONDITION"
    wrong = nodes[0].caller()
    wrong.secret = b"x" * 32
    assert report(job, None, "c", wrong) == "FAILED_PRECONDITION"
    assert revisions(job) == ["abc"]


def test_what_a_holder_says_again_is_one_milestone() -> None:
    """It names its last one with every report, which is of a later step each time."""
    job, (node,) = trained()
    for step in (100, 101):
        said = pb.Milestone(repo="me/model", revision="8d21", step=step)
        assert job.call(pb.MilestoneRequest(job_id="job", milestone=said, holder=node.caller())).code == "OK"
    assert [(made.revision, made.step) for made in status(job.state, job.now).milestones] == [("8d21", 100)]
    assert "step 101 is at me/model, revision 8d21" not in job.notices


def said(job: Driven, node: Node, revision: str, step: int) -> list[str]:
    """A holder's report; returns the milestones' revisions, the last one last."""
    made = pb.Milestone(repo="me/model", revision=revision, step=step)
    assert job.call(pb.MilestoneRequest(job_id="job", milestone=made, holder=node.caller())).code == "OK"
    return revisions(job)


def next_holder(job: Driven, node: Node) -> Node:
    """The lease of this one is over, and another one has it."""
    order = pb.FenceNodeRequest(job_id="job", node=node.name, incarnation=node.incarnation)
    assert job.call(order).code == "OK"
    other = job.node()
    other.join()
    assert job.members == [other.name]
    return other


def test_a_holder_that_goes_on_from_an_earlier_one_is_believed() -> None:
    """The one that it names is the run's last one from then on, and no news."""
    job, (node,) = trained()
    said(job, node, "a", 100)
    assert said(job, node, "b", 200) == ["a", "b"]
    other = next_holder(job, node)
    noted = job.job.sequence
    assert said(job, other, "a", 110) == ["b", "a"]
    assert said(job, other, "a", 111) == ["b", "a"]
    assert [(made.revision, made.step) for made in status(job.state, job.now).milestones] == [("b", 200), ("a", 100)]
    assert job.job.sequence == noted
    job.restart()
    assert revisions(job) == ["b", "a"]
    assert said(job, other, "c", 120) == ["b", "a", "c"]


def test_a_late_report_of_a_holder_brings_no_earlier_one_back() -> None:
    """It was sent before the one that names the last one, and so is of no later step. Another report is believed."""
    job, (node,) = trained()
    said(job, node, "a", 100)
    said(job, node, "b", 200)
    for late in (101, 199, 200):
        assert said(job, node, "a", late) == ["a", "b"]
    said(job, node, "b", 201)
    assert said(job, node, "a", 200) == ["a", "b"]
    assert said(job, node, "a", 202) == ["b", "a"]
    assert said(job, node, "b", 201) == ["b", "a"]
    assert said(job, node, "b", 203) == ["a", "b"]
    other = next_holder(job, node)
    # From its own first report on it has named one, too.
    assert said(job, other, "b", 210) == ["a", "b"]
    assert said(job, other, "a", 205) == ["a", "b"]


def test_a_holder_names_what_a_pod_has_published() -> None:
    """It was told of it, and goes on from it: no other milestone, and no step that the revision is not of."""
    job, (node,) = trained()
    assert report(job, node.save(2), "own") == "OK"
    assert said(job, node, "own", 50) == ["own"]
    assert said(job, node, "r", 60) == ["own", "r"]
    assert said(job, node, "own", 55) == ["own", "r"], "a late report"
    other = next_holder(job, node)
    assert said(job, other, "own", 70) == ["own", "r", "own"]
    assert said(job, other, "own", 71) == ["own", "r", "own"]
    assert [made.step for made in status(job.state, job.now).milestones] == [2, 60, 2]
    assert job.notices.count("revision own") == 1


def test_a_mirror_that_tells_an_old_one_again_changes_nothing() -> None:
    """It tells all that it does not know to be heard."""
    job, (node,) = trained()
    first, second = node.save(2), node.save(4)
    for made, revision in ((first, "a"), (second, "b"), (first, "a")):
        assert report(job, made, revision) == "OK"
    assert revisions(job) == ["a", "b"]


def test_what_is_not_ours_displaces_none_that_is() -> None:
    """However many a holder reports: a pod can go on only from those of a checkpoint. The newest is last."""
    job, (node,) = trained()
    assert report(job, node.save(2), "own") == "OK"
    for number in range(MILESTONES_KEPT + 3):
        assert report(job, None, f"r{number}", node.caller()) == "OK"
    assert revisions(job) == ["own", *(f"r{number}" for number in range(3, MILESTONES_KEPT + 3))]
    assert report(job, node.save(4), "newer") == "OK"
    assert (revisions(job)[0], revisions(job)[-1]) == ("own", "newer")


@pytest.mark.parametrize("left", [False, True])
def test_a_fenced_node_is_gone_at_once(left: bool) -> None:
    """Its epoch is closed, what it says counts no more, and whoever waits has the next one."""
    job, nodes = trained(2)
    epoch, sealed = job.epoch, job.seal(5)
    order = pb.FenceNodeRequest(job_id="job", node=nodes[0].name, incarnation=nodes[0].incarnation, left=left)
    assert job.call(order).code == "OK"
    assert (nodes[0].is_known, nodes[0].commit(sealed).code) == (False, "NOT_FOUND")
    nodes[1].join()
    assert (job.phase, job.epoch, job.members) == (Phase.RUNNING, epoch + 1, [nodes[1].name])
    kinds = [event.kind.value for event in job.job.events]
    assert ("left" in kinds, "lost" in kinds) == (left, not left)


def test_a_node_that_came_back_is_not_fenced_by_an_old_order() -> None:
    """The order names the incarnation that it is about."""
    job, (node,) = trained()
    order = pb.FenceNodeRequest(job_id="job", node=node.name, incarnation="an earlier one")
    assert job.call(order).code == "NOT_FOUND"
    assert job.call(pb.FenceNodeRequest(job_id="job", node="nobody")).code == "NOT_FOUND"
    assert (node.is_known, job.phase) == (True, Phase.RUNNING)


@pytest.mark.parametrize("for_good", [False, True])
def test_who_was_fenced_for_good_is_not_let_in_again(for_good: bool) -> None:
    """Its agent would register anew and have the run again. Anybody else is let in, and its next start."""
    job, (node,) = trained()
    order = pb.FenceNodeRequest(job_id="job", node=node.name, incarnation=node.incarnation, for_good=for_good)
    assert job.call(order).code == "OK"
    again = Node(job, "incarnation-anew", probe=node.probe)
    said = again.register(previous_incarnation=node.incarnation)
    assert (said.code, "fenced for good" in said.detail) == (("PERMISSION_DENIED", True) if for_good else ("OK", False))
    assert job.node().is_known, "another one, or the same machine's next start"


def test_few_of_those_are_remembered() -> None:
    """However often somebody orders that."""
    job, (node,) = trained()
    for _ in range(MOST_SHUT_OUT + 5):
        order = pb.FenceNodeRequest(job_id="job", node=node.name, incarnation=node.incarnation, for_good=True)
        assert job.call(order).code == "OK"
        node = job.node()
    assert len(job.state.live.shut_out) == MOST_SHUT_OUT
    assert "incarnation-0" not in job.state.live.shut_out


def test_silence_is_told_without_the_time_in_which_nobody_could_be_heard() -> None:
    """A master that stood still for ten seconds has not listened to anybody meanwhile."""
    job, (node,) = trained()
    node.beat()

    def silent() -> float:
        return status(job.state, job.now).nodes[0].silent_seconds

    assert silent() == 0.0
    job.now += 2.0
    assert silent() == pytest.approx(2.0)
    job.held_up(10.0)
    assert silent() == pytest.approx(2.0)
    job.restart()
    assert silent() == 0.0


def lost_volume(keep: int = 1) -> tuple[Driven, pb.Checkpoint]:
    """A milestone whose files are deleted, two later steps, and then the only node, with its volume, is gone."""
    job, (node,) = trained(keep_checkpoints=keep)
    made = node.save(2)
    assert report(job, made) == "OK"
    node.save(4)
    node.save(6)
    job.call(pb.PrunedRequest(caller=node.caller(), refs=[made.ref]))
    node.hang_up()
    job.wait(8)
    return job, made


def test_a_restored_milestone_is_gone_back_to_on_another_volume() -> None:
    """Its files had been deleted, and the new volume has another probe: a start that asks for its step has both."""
    job, made = lost_volume()
    job.sealed[:] = [made]
    late = job.node(resume_step=2, resume_time=9, inventory=[made], probe="the new volume's probe")
    late.probe = "the new volume's probe"
    for _ in range(5):
        late.join()
        job.wait(1)
    assert job.phase is Phase.RUNNING
    assert late.directive.run.resume.source.ref == made.ref


@pytest.mark.parametrize("looked_before", [False, True])
@pytest.mark.parametrize("confirmed", [False, True])
def test_a_copy_of_what_was_deleted_is_gone_back_to(confirmed: bool, looked_before: bool) -> None:
    """An export that is older than all that is kept. It is not deleted again.

    Somebody may have started a pod on it before, without a word about going back. Until it was heard that it is
    deleted, a node that is silent may still do that, so it is refused.
    """
    job, (node, *_) = trained(keep_checkpoints=1)
    made = node.save(2)
    node.save(4)
    node.hang_up()
    job.wait(8)
    second = job.node()
    for _ in range(3):
        second.join()
        job.wait(1)
    second.save(6)
    if confirmed:
        job.call(pb.PrunedRequest(caller=second.caller(), refs=[made.ref]))
    second.hang_up()
    job.wait(8)
    job.sealed[:] = [made]
    if looked_before:
        early = job.node(inventory=[made])
        for _ in range(3):
            early.join()
            job.wait(1)
        early.hang_up()
        job.wait(8)
    if not confirmed:
        said = Node(job, "late").register(resume_step=2, resume_time=9, inventory=[made])
        assert (said.code, "about to be deleted" in said.detail) == ("FAILED_PRECONDITION", True)
        return
    late = job.node(resume_step=2, resume_time=9, inventory=[made])
    for _ in range(5):
        late.join()
        job.wait(1)
    assert job.phase is Phase.RUNNING
    assert late.directive.run.resume.source.ref == made.ref
    assert made.ref.digest not in [one.digest for one in late.directive.prune]


def test_what_was_never_published_is_not_gone_back_to() -> None:
    """Deleted checkpoints stay deleted, whatever somebody has put into the directory."""
    job, made = lost_volume()
    other = pb.Checkpoint()
    other.CopyFrom(made)
    other.ref.digest = "f" * 64
    late = Node(job, "late")
    assert late.register(resume_step=2, inventory=[other]).code == "FAILED_PRECONDITION"
