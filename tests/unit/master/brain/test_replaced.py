"""A manifest that is whole, and another than the one that the run recorded: it has the name, and not the digest."""

from __future__ import annotations

from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, all_join, settings


def replaced(checkpoint: control_pb2.Checkpoint) -> control_pb2.Checkpoint:
    """The same name with another manifest."""
    other = control_pb2.Checkpoint()
    other.CopyFrom(checkpoint)
    other.ref.digest = "0" * 64
    return other


def converted(count: int) -> tuple[Driven, list[Node], control_pb2.Checkpoint]:
    """A world that lost a node, and runs on from the universal form of step 4."""
    job = Driven()
    nodes = job.start(count)
    nodes[0].save(2)
    nodes[0].save(4)
    nodes.pop().hang_up()
    job.wait(2)
    all_join(nodes)
    job.wait(1)
    (owner,) = [node for node in nodes if node.lease]
    form = owner.convert()
    assert job.phase is Phase.RUNNING
    return job, nodes, form


def seen_as(job: Driven, other: control_pb2.Checkpoint) -> list[control_pb2.Checkpoint]:
    return [other if one.ref.name == other.ref.name else one for one in job.sealed]


def asked(nodes: list[Node]) -> list[Node]:
    return [node for node in nodes if node.directive.verify.number]


def test_a_form_with_another_manifest_is_looked_at_before_a_world_loads_it() -> None:
    """It arrives under the recorded form's name; a second node verifies it, and it is made anew."""
    job, (a, b), form = converted(3)
    a.failed()
    for node in (a, b):
        node.join(sees=seen_as(job, replaced(form)))
    assert job.phase is Phase.FORMING
    (verifier,) = asked([a, b])
    assert verifier.directive.verify.ref == form.ref
    assert "is being verified" in job.notices
    verifier.verified(intact=False)
    assert f"{form.ref.name} is damaged" in job.notices


def test_a_form_that_only_one_node_sees_otherwise_makes_that_node_a_spare() -> None:
    """It verifies elsewhere, and is not verified again and again."""
    job, (a, b), form = converted(3)
    a.failed()
    a.join(sees=seen_as(job, replaced(form)))
    b.join()
    (verifier,) = asked([a, b])
    assert verifier is b
    b.verified(intact=True)
    assert not asked([a, b])
    job.wait(5)
    assert not asked([a, b])
    assert "becomes a spare" in job.notices
    assert job.members == [b.name]


def test_a_lone_node_that_looks_again_goes_on() -> None:
    """It said so of a moment in which it saw the file late: once looked into, its word is done with."""
    job, (a,), form = converted(2)
    a.failed()
    a.join(sees=seen_as(job, replaced(form)))
    assert asked([a])
    a.verified(intact=True)
    assert not asked([a])
    a.join()
    job.wait(2)
    assert job.phase is Phase.RUNNING
    assert a.directive.run.resume.form == control_pb2.FORM_UNIVERSAL


def test_a_resume_point_with_another_manifest_is_looked_at() -> None:
    """Also where the agent compares no digests."""
    job = Driven()
    nodes = job.start(2)
    a = nodes[0]
    a.save(2)
    made = a.save(4)
    a.failed()
    for node in nodes:
        node.join(sees=seen_as(job, replaced(made)))
    (verifier,) = asked(nodes)
    verifier.verified(intact=False)
    assert "going back to step-2.e1.1" in job.notices


def test_a_recorded_checkpoint_with_another_manifest_is_not_deleted() -> None:
    """Nobody has recorded that digest, in an epoch that is closed: still it is not what a closed epoch left behind."""
    job = Driven(settings(keep_checkpoints=0))
    nodes = job.start(2)
    a = nodes[0]
    old = a.save(2)
    a.save(4)
    a.failed()
    all_join(nodes)
    a.save(6)
    a.failed()
    for node in nodes:
        node.join(sees=seen_as(job, replaced(old)))
    job.wait(1)
    assert job.phase is Phase.RUNNING
    assert not job.job.late
    assert not any(node.directive.prune for node in nodes)
