"""A disk without room for the next checkpoint: what goes, and what stays whatever anybody says."""

from __future__ import annotations

import pytest

from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2 as pb
from tests.support.jobs.masters import Driven, Node, all_join, settings

SIZE = 1000


def saved(keep: int, steps: int = 6, nodes: int = 1) -> tuple[Driven, list[Node]]:
    """A world whose checkpoints of `SIZE` bytes all stay so far."""
    job = Driven(settings(keep_checkpoints=keep))
    members = job.start(nodes)
    for step in range(1, steps + 1):
        save(job, members, step)
    return job, list(members)


def save(job: Driven, members: list[Node], step: int) -> None:
    made = job.seal(step, size=SIZE)
    assert members[0].commit(made).code == "OK"
    for other in members[1:]:
        other.sights()


def kept(job: Driven) -> list[int]:
    return [record.step for record in job.job.checkpoints if not record.retired]


def lacks(node: Node, missing: int) -> None:
    assert node.job.call(pb.ShortageRequest(caller=node.caller(), missing_bytes=missing)).code == "OK"


def prune(node: Node) -> None:
    assert node.job.call(pb.PrunedRequest(caller=node.caller(), refs=node.directive.prune)).code == "OK"


@pytest.mark.parametrize(
    ("missing", "left"), [(0, [1, 2, 3, 4, 5, 6]), (1, [2, 3, 4, 5, 6]), (1001, [3, 4, 5, 6]), (1 << 60, [5, 6])]
)
def test_as_many_of_the_oldest_go_as_are_needed(missing: int, left: list[int]) -> None:
    """The last two stay, whatever is missing. The line names those that go."""
    job, (a,) = saved(keep=6)
    lacks(a, missing)
    assert kept(job) == left
    assert sorted(ref.name for ref in a.directive.prune) == [f"step-{step}.e1.1" for step in range(1, 7 - len(left))]
    said = [event.text for event in job.job.events if "lacks" in event.text]
    assert len(said) == (len(left) < 6)
    assert all("step-1.e1.1" in line and "although 6 were to stay" in line for line in said)


def test_nothing_more_goes_while_files_are_deleted() -> None:
    """They may be enough; what was measured before they were gone says nothing."""
    job, (a,) = saved(keep=6)
    lacks(a, 1)
    lacks(a, 1)
    assert kept(job) == [2, 3, 4, 5, 6]
    prune(a)
    lacks(a, 1)
    assert kept(job) == [3, 4, 5, 6]


def test_what_is_needed_stays() -> None:
    """What the world started from, and the best."""
    job, (a, b) = saved(keep=9, steps=2, nodes=2)
    b.failed(step=2)
    all_join([a, b])
    assert (job.phase, job.epoch) == (Phase.RUNNING, 2)
    for step in range(3, 8):
        made = job.seal(step, size=SIZE)
        made.best = "step-4.e2.1"
        assert a.commit(made).code == "OK"
        b.sights()
    lacks(a, 1 << 60)
    assert kept(job) == [2, 4, 6, 7]


@pytest.mark.parametrize(("keep", "left"), [(0, [1, 2, 3, 4]), (1, [4]), (2, [3, 4])])
def test_where_nothing_may_go_it_is_said_once(keep: int, left: list[int]) -> None:
    """All are to stay, or no more than two anyway; who wants one keeps one."""
    job, (a,) = saved(keep, steps=4)
    prune(a)
    for _ in range(3):
        lacks(a, 5000)
    assert kept(job) == left
    (said,) = [event.text for event in job.job.events if "lacks" in event.text]
    assert said.startswith("the checkpoint directory lacks 5.0 kB for the next checkpoint, and none is deleted for it")
    assert said.endswith("make room")


def test_where_the_retired_stay_it_is_said_once() -> None:
    """A mount that lets nothing be deleted: nothing more is given up, and people hear that they must make room."""
    job, (a,) = saved(keep=6)
    for _ in range(2):
        lacks(a, 5000)
    assert "none is deleted" not in job.job.events[-1].text, "they are being deleted"
    retired = kept(job)
    for _ in range(2):
        assert job.call(pb.PrunedRequest(caller=a.caller())).code == "OK"
        lacks(a, 5000)
    assert "none is deleted" not in job.job.events[-1].text, "they may go at the next try"
    assert job.call(pb.PrunedRequest(caller=a.caller())).code == "OK"
    for _ in range(3):
        lacks(a, 5000)
    (said,) = [event.text for event in job.job.events if "none is deleted for it" in event.text]
    assert said.endswith("because what was to go cannot be deleted: make room")
    assert kept(job) == retired


def test_a_deletion_that_succeeds_makes_up_for_those_that_did_not() -> None:
    """An open file on NFS, or a server that was started again, and what else was to go is gone."""
    job, (a,) = saved(keep=6)
    lacks(a, 1500)
    for refs in ([], [], a.directive.prune[:1], [], []):
        assert job.call(pb.PrunedRequest(caller=a.caller(), refs=refs)).code == "OK"
    lacks(a, 5000)
    assert not [event.text for event in job.job.events if "none is deleted" in event.text]


def test_a_deletion_that_is_not_tried_again_is_told_of_in_the_end() -> None:
    """Without a commit an agent hears nothing new, and a full disk lets nothing be committed."""
    job, (a,) = saved(keep=6)
    lacks(a, 1500)
    assert job.call(pb.PrunedRequest(caller=a.caller())).code == "OK"
    job.wait(55.0)
    lacks(a, 5000)
    assert not [event.text for event in job.job.events if "none is deleted" in event.text]
    job.wait(6.0)
    lacks(a, 5000)
    assert job.job.events[-1].text.endswith("because what was to go cannot be deleted: make room")


def test_only_the_first_node_counts() -> None:
    """Of several nodes each would have it retired once more."""
    job, (_, b) = saved(keep=6, nodes=2)
    lacks(b, 1 << 60)
    assert kept(job) == [1, 2, 3, 4, 5, 6]


def test_what_only_its_committer_has_seen_makes_nothing_go() -> None:
    """It may not exist. Two others stay."""
    job, (a, _) = saved(keep=6, nodes=2)
    made = job.seal(7, size=SIZE)
    assert a.commit(made).code == "OK"
    lacks(a, 1 << 60)
    assert kept(job) == [5, 6, 7]
