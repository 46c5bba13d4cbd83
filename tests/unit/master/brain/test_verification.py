"""A verification that tells nothing, because the verifier's file system failed: nothing is concluded from it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, all_join


def reloading(count: int) -> tuple[Driven, list[Node], control_pb2.Checkpoint]:
    """A world that was reopened from step 4 after a failure; step 2 is committed too."""
    job = Driven()
    nodes = job.start(count)
    nodes[0].save(2)
    made = nodes[0].save(4)
    nodes[0].failed()
    all_join(nodes)
    assert job.phase is Phase.RUNNING
    return job, nodes, made


def asked(nodes: list[Node]) -> Node | None:
    return next((node for node in nodes if node.directive.verify.number), None)


def cannot_tell(node: Node) -> None:
    number = node.directive.verify.number
    report = control_pb2.VerificationReport(caller=node.caller(), number=number, inconclusive=True, message="stale")
    assert node.job.call(report).code == "OK"


def test_another_node_is_asked_after_an_inconclusive_verification() -> None:
    """The checkpoint stays; the reporter is asked last of all; a verdict then counts."""
    job, nodes, made = reloading(3)
    nodes[0].bad(made.ref)
    first = asked(nodes)
    assert first is not None
    cannot_tell(first)
    assert asked(nodes) is None, "not at once"
    job.wait(6)
    second = asked(nodes)
    assert second not in (None, first, nodes[0])
    assert second is not None
    second.verified(intact=True)
    record = job.job.checkpoint(made.ref.digest)
    assert record is not None
    assert not record.retired
    assert job.job.verification is None


def test_who_crashes_in_a_loop_is_not_asked_over_and_over() -> None:
    """A fresh newcomer is no better verifier than one that could not tell yet: with it the run waited for ever."""
    job, (a,), made = reloading(1)
    a.bad(made.ref)
    cannot_tell(a)
    job.wait(1)
    there = job.node(node="loop-0")
    for number in range(1, 15):
        # The next one comes before the last one is missed.
        after = job.node(node=f"loop-{number % 2}")
        after.join()
        job.wait(1)
        there.hang_up()
        job.wait(2)
        there = after
    assert asked([a]) is a


def test_a_lone_node_is_asked_again() -> None:
    """There is nobody else; the notice comes once; the job does not fall back meanwhile."""
    job, (a,), made = reloading(1)
    a.bad(made.ref)
    for pause in (5, 10, 20):
        cannot_tell(a)
        job.wait(pause - 1)
        assert asked([a]) is None
        assert job.phase is not Phase.RUNNING
        job.wait(2)
        assert asked([a]) is a
    assert len([notice for notice in job.job.notices if "tried again" in notice.text]) == 1
    a.verified(intact=False)
    a.join()
    assert a.directive.run.resume.source.step == 2


def test_verifications_that_tell_nothing_end_in_waiting_with_that_reason() -> None:
    """After two of them nobody forms a world behind closed doors; a verdict, or a node that joins, is the way on."""
    job, nodes, made = reloading(2)
    nodes[0].bad(made.ref)
    nodes[1].failed()
    all_join(nodes)
    first = asked(nodes)
    assert first is not None
    cannot_tell(first)
    assert job.phase is Phase.FORMING
    job.wait(6)
    second = asked(nodes)
    assert second is not None
    cannot_tell(second)
    assert job.phase is Phase.WAITING
    assert "nobody can verify" in nodes[0].directive.gather.missing
    assert "(stale): trying again" in nodes[0].directive.gather.missing
    late = job.node()
    late.join()
    assert asked([*nodes, late]) is late, "at once"
    late.verified(intact=True)
    all_join([*nodes, late])
    job.wait(2)
    assert job.members == [nodes[1].name, late.name]


def test_a_wait_for_a_verification_can_be_limited() -> None:
    """--wait-for-nodes ends it as any other WAITING, with its reason."""
    job, (a,), made = reloading(1)
    job.job.settings = replace(job.job.settings, wait_for_nodes=100.0)
    a.bad(made.ref)
    cannot_tell(a)
    for _ in range(20):
        job.wait(6)
        if asked([a]):
            cannot_tell(a)
    assert job.phase is Phase.FAILED
    assert "nobody can verify" in job.job.message


@pytest.mark.slow
def test_a_verifier_that_reads_nothing_counts_as_one_that_cannot_tell() -> None:
    """Ten minutes each, and the job waits, with the reason."""
    job, nodes, made = reloading(2)
    nodes[0].bad(made.ref)
    nodes[1].failed()
    all_join(nodes)
    job.wait(599)
    assert job.phase is Phase.FORMING
    job.wait(602)
    assert job.phase is Phase.WAITING
    assert "nothing read for 600 s" in nodes[0].directive.gather.missing


@pytest.mark.slow
def test_a_verification_that_moves_may_take_its_time() -> None:
    """Hours are no stall while bytes are read, and conclude nothing; ten minutes without one are."""
    job, nodes, made = reloading(3)
    nodes[0].bad(made.ref)
    first = asked(nodes)
    assert first is not None
    for part in range(1, 13):
        job.wait(590)
        assert first.verifies(part * 10**9).code == "OK"
    assert asked(nodes) is first
    record = job.job.checkpoint(made.ref.digest)
    assert record is not None
    assert not record.retired
    job.wait(400)
    first.verifies(12 * 10**9)  # Nothing new.
    job.wait(198)
    assert asked(nodes) is first
    job.wait(4)
    second = asked(nodes)
    assert second not in (None, first)
    assert second is not None
    second.verifies(1)
    job.wait(598)
    assert asked(nodes) is second, "its own count began at 0"


def test_an_old_answer_is_not_taken_for_the_new_one() -> None:
    """Each request has a number of its own."""
    job, (a,), made = reloading(1)
    a.bad(made.ref)
    number = a.directive.verify.number
    cannot_tell(a)
    late = control_pb2.VerificationReport(caller=a.caller(), number=number, intact=False)
    assert job.call(late).code == "FAILED_PRECONDITION"
    zero = control_pb2.VerificationReport(caller=a.caller(), number=0, intact=False)
    assert job.call(zero).code == "FAILED_PRECONDITION"


@pytest.mark.parametrize("how", ["it registers anew", "its connection closed"])
def test_a_verifier_that_comes_back_under_its_name_is_asked_anew(how: str) -> None:
    """It was declared dead and knows nothing of the order: the job waited ten minutes for its answer."""
    job, (a,), made = reloading(1)
    a.bad(made.ref)
    first = a.directive.verify.number
    assert first
    if how == "its connection closed":
        a.hang_up()
        job.wait(2)
        assert not a.is_known
    again = Node(job, "again", secret=a.secret)
    job.nodes.append(again)
    assert again.register(node=a.name, previous_incarnation=a.incarnation).code == "OK"
    assert again.name == a.name
    assert again.directive.verify.number > first
    again.verified(intact=True)
    again.join()
    job.wait(2)
    assert job.phase is Phase.RUNNING
