"""Universal files that are made beside a world that has re-sharded, and what waits for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dalsegno.master.brain import brain
from dalsegno.master.brain.checkpoints import in_use_digests
from dalsegno.master.brain.events import Tick
from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2
from dalsegno.protos.limits import MOST_EARLIER
from tests.support.jobs.masters import Driven, Node, settings, stored

SHARDED, UNIVERSAL = control_pb2.FORM_SHARDED, control_pb2.FORM_UNIVERSAL
WORKING = control_pb2.CONVERSION_STATE_WORKING
ENVIRONMENT = control_pb2.CONVERSION_STATE_ENVIRONMENT
SOURCE_BAD = control_pb2.CONVERSION_STATE_SOURCE_BAD
IMPOSSIBLE = control_pb2.CONVERSION_STATE_IMPOSSIBLE


def resharded(left: int = 2, **changes: object) -> tuple[Driven, list[Node]]:
    """A world of one more has committed step 3 and lost a node; the others train again, and have made step 4."""
    job = Driven(settings(**changes))
    nodes = job.start(left + 1)
    assert nodes[0].commit(job.seal(3, reshards=True)).code == "OK"
    nodes[-1].hang_up()
    job.wait(2)
    for node in nodes[:left]:
        node.join()
    assert job.phase is Phase.RUNNING
    assert nodes[0].directive.run.resume.form == SHARDED
    assert not any(node.lease for node in nodes[:left]), "the first step comes first"
    nodes[0].step(4)
    return job, nodes[:left]


def drained(job: Driven, leaver: Node, others: list[Node], step: int) -> None:
    """One leaves, all save, the others are ready for the next world."""
    leaver.leave()
    assert others[0].commit(job.seal(step, reshards=True)).code == "OK"
    for node in (leaver, *others):
        node.drained(step)
    leaver.hang_up()
    job.wait(1.5)
    for node in others:
        node.join()


# ---- who makes them, when -------------------------------------------------------------------------------------------


def test_the_world_opens_at_once_and_its_first_rank_makes_them() -> None:
    """After the first step, at low priority; meanwhile the source is in use, and its unsealed form is left alone."""
    job, (a, b) = resharded()
    assert job.epoch == 2
    assert a.directive.convert.beside
    assert a.lease
    assert not b.lease
    assert job.job.conversion is not None
    assert job.job.conversion.source in in_use_digests(job.job)
    assert a.directive.converting == b.directive.converting == "step-3.e1.1"
    a.convert()
    assert job.phase is Phase.RUNNING
    assert not a.lease
    assert not b.directive.converting
    assert job.job.conversion is None
    assert "the universal files of step-3.e1.1 are there" in job.notices


def test_nothing_is_owed_where_the_shape_is_the_same() -> None:
    """A crash of a worker: as many ranks load it as it was saved."""
    job = Driven()
    (a,) = job.start(1)
    assert a.commit(job.seal(3, reshards=True)).code == "OK"
    a.failed()
    a.join()
    a.step(4)
    assert job.job.conversion is None


@pytest.mark.parametrize(
    "changes", [{"universal_checkpoint": False}, {"universal_checkpoint": False, "universal_gate": True}]
)
def test_nothing_is_owed_where_nobody_wants_them(changes: dict[str, bool]) -> None:
    job, _ = resharded(**changes)
    assert job.job.conversion is None


def test_what_cannot_reshard_waits_at_the_gate() -> None:
    """Also where they may be made beside: there is no other way."""
    job = Driven()
    a, b = job.start(2)
    a.save(3)
    b.hang_up()
    job.wait(2)
    a.join()
    assert job.phase is Phase.FORMING
    assert a.lease
    assert not a.directive.convert.beside
    a.convert()
    assert a.directive.run.resume.form == UNIVERSAL


@pytest.mark.parametrize("way", ["leaves", "dies", "fails"])
def test_who_cannot_make_them_any_more_is_replaced(way: str) -> None:
    """The next one takes over what was begun."""
    job, (a, b, c) = resharded(3)
    lease = a.lease
    assert job.call(control_pb2.ClaimRequest(caller=a.caller(), lease=lease)).code == "OK"
    if way == "fails":
        a.converts(ENVIRONMENT, "no space")
        assert "converting on host-0 failed: no space" in job.notices
    elif way == "leaves":
        a.leave()
    else:
        a.hang_up()
        job.wait(2)
        for node in (b, c):
            node.join()
    assert b.lease > lease
    assert list(b.directive.convert.earlier) == [f"step-3.e1.1.universal.{lease}"]


def test_a_stalled_one_is_replaced() -> None:
    job, (a, b) = resharded(stall_timeout=0)
    job.wait(125)
    assert not a.lease
    assert b.lease


def test_a_new_master_goes_on_with_it() -> None:
    """The lease stands in its record."""
    job, (a, b) = resharded()
    lease = a.lease
    again = stored(job.job).conversion
    assert again is not None
    assert again.beside
    job.restart()
    for node in (a, b):
        node.beat()
    assert a.lease == lease
    a.convert()
    assert job.job.conversion is None


def test_damage_is_left_to_those_who_load_it() -> None:
    """The world has loaded it and trains: nothing is verified beside, and no checkpoint retired."""
    job, (a, b) = resharded()
    a.converts(SOURCE_BAD, "part-0.pt: checksum")
    assert job.job.verification is None
    assert b.lease
    b.converts(SOURCE_BAD, "part-0.pt: checksum")
    assert job.phase is Phase.RUNNING
    assert job.job.checkpoints[-1].name == "step-3.e1.1"


# ---- the next world waits -------------------------------------------------------------------------------------------


def test_the_next_world_waits_for_them() -> None:
    """With a line after some seconds, which says who is at work and how far; and then it opens at once."""
    job, (a, b, c) = resharded(3)
    assert a.lease
    a.converts(WORKING, files=7)
    drained(job, c, [a, b], 6)
    assert job.phase is Phase.FORMING
    assert "waiting for the universal files of step-3.e1.1" in brain.status(job.state, job.now).reason
    job.wait(6)
    assert job.phase is Phase.FORMING
    line = "it has waited for the universal files of step-3.e1.1, which host-0 makes (7 files so far)"
    assert job.notices.count(line) == 1
    job.wait(6)
    assert job.notices.count(line) == 2
    a.convert()
    assert job.phase is Phase.RUNNING
    assert a.directive.run.resume.source.step == 6
    assert a.directive.run.resume.form == SHARDED
    a.step(7)
    assert a.directive.convert.source.ref.name == "step-6.e2.1", "each change has its own"


def test_after_a_crash_before_any_commit_it_is_the_same_as_before() -> None:
    """The next world re-shards the same resume point, of which nothing is owed any more."""
    job, (a, b) = resharded()
    a.failed()
    for node in (a, b):
        node.join()
    assert job.phase is Phase.FORMING
    a.convert()
    assert job.phase is Phase.RUNNING
    assert a.directive.run.resume.form == SHARDED
    a.step(4)
    assert "resumed at step 3 (re-sharded)" in job.notices
    assert job.job.conversion is None
    assert job.notices.count("the universal files of step-3.e1.1 are there") == 1


def test_who_joins_while_they_are_made_waits_and_the_others_train() -> None:
    """A growth costs nobody the time of a conversion."""
    job, (a, b) = resharded()
    c = job.node()
    c.join()
    c.warm()
    assert job.phase is Phase.RUNNING
    job.wait(20)
    assert job.phase is Phase.RUNNING
    assert job.notices.count("host-2 joined: taken in as soon as the universal files of step-3.e1.1 are there") == 1
    for node in (a, b):
        node.step(5)
    a.convert()
    assert job.phase is Phase.DRAINING


def test_whoever_is_left_makes_them_between_two_worlds() -> None:
    """Its maker is the one that goes."""
    job, (a, b, c) = resharded(3)
    drained(job, a, [b, c], 6)
    assert job.phase is Phase.FORMING
    assert b.lease
    assert not b.directive.convert.beside, "nobody trains now"
    b.convert()
    assert job.phase is Phase.RUNNING


@pytest.mark.parametrize("moment", ["before", "while the next world waits"])
def test_a_conversion_that_fails_holds_nobody_up(moment: str) -> None:
    """Two nodes have tried: the next world opens without them, and people are told."""
    job, (a, b, c) = resharded(3)

    def fail() -> None:
        a.converts(ENVIRONMENT, "no space")
        b.converts(ENVIRONMENT, "no space")

    if moment == "before":
        fail()
        assert job.phase is Phase.RUNNING
    drained(job, c, [a, b], 6)
    if moment != "before":
        assert job.phase is Phase.FORMING
        fail()
    assert job.phase is Phase.RUNNING
    assert "the universal files of step-3.e1.1 could not be made (no space): going on without them" in job.notices


def test_a_failed_one_is_tried_again_beside_the_training() -> None:
    """After a pause; a reason that stays the same is said once."""
    job, (a, b) = resharded(stall_timeout=0)
    for node in (a, b):
        node.converts(ENVIRONMENT, "no space")
    assert not a.lease
    for _ in range(3):
        job.wait(65)
        for node in (a, b):
            node.converts(ENVIRONMENT, "no space")
    assert job.notices.count("no space") == 1
    job.wait(65)
    a.convert()
    assert job.job.conversion is None


def test_leases_that_fail_for_days_fill_no_record() -> None:
    """A volume that is read-only: of the directories that they have begun the newest are taken over, and remembered."""
    job, nodes = resharded(stall_timeout=0)
    sizes = []
    for _ in range(100):
        for node in nodes:
            lease = node.lease
            assert job.call(control_pb2.ClaimRequest(caller=node.caller(), lease=lease)).code == "OK"
            named = list(node.directive.convert.earlier)
            node.converts(ENVIRONMENT, "no space")
        job.state.live.conversion.retry_at = job.now
        job.event(Tick())
        sizes.append(sum(map(len, job.rows.values())))
    assert lease >= 200
    expected = [f"step-3.e1.1.universal.{number}" for number in range(lease - MOST_EARLIER + 1, lease + 1)]
    assert job.job.conversion is not None
    assert list(job.job.conversion.earlier) == expected
    assert named == expected[:-1]
    assert sizes[-1] < sizes[20] + 500


def test_what_has_no_universal_form_is_not_waited_for() -> None:
    """Nobody will ever make it; nor is it owed at the next change."""
    job, (a, b, c) = resharded(3)
    a.converts(IMPOSSIBLE, "Adafactor has no universal form")
    assert job.job.conversion is None
    assert "could not be made (Adafactor has no universal form): going on without them" in job.notices
    drained(job, c, [a, b], 6)
    assert job.phase is Phase.RUNNING
    a.step(7)
    assert job.job.conversion is None


def unable_to_reshard() -> tuple[Driven, Node]:
    """A world of one was to, and failed before its first step; its node has the lease, and has joined again."""
    job = Driven(settings(max_restarts=0))
    a, b = job.start(2)
    assert a.commit(job.seal(3, reshards=True)).code == "OK"
    b.hang_up()
    job.wait(2)
    a.join()
    assert job.phase is Phase.RUNNING
    a.failed()
    assert a.lease, "between the worlds nobody has to make a first step"
    lease = a.lease
    a.join()
    assert job.phase is Phase.FORMING
    assert "it is converted instead" in job.notices
    assert a.lease == lease
    return job, a


def test_what_could_not_be_resharded_is_loaded_from_them() -> None:
    """The conversion that is owed becomes the gate's: nobody begins anew."""
    job, a = unable_to_reshard()
    a.convert()
    assert job.phase is Phase.RUNNING
    assert a.directive.run.resume.form == UNIVERSAL


def test_what_could_not_be_resharded_does_not_go_on_without_them() -> None:
    """There is no other way to load it: where nobody can make them the job waits, as at the gate."""
    job, a = unable_to_reshard()
    a.converts(ENVIRONMENT, "no space")
    assert job.phase is Phase.WAITING
    assert "nobody can convert the checkpoint for this shape (no space)" in brain.status(job.state, job.now).reason
    assert "going on without them" not in job.notices
    job.wait(6)
    a.convert()
    assert a.directive.run.resume.form == UNIVERSAL


# ---- the end waits --------------------------------------------------------------------------------------------------


def finished(job: Driven, nodes: list[Node], step: int = 9) -> None:
    nodes[0].step(step)
    assert nodes[0].commit(job.seal(step, reshards=True)).code == "OK"
    for node in nodes:
        node.finished(step)


def test_the_end_waits_for_them() -> None:
    """Longer than a stall of the training may last: it is over. Every node stays until then."""
    job, (a, b) = resharded()
    finished(job, [a, b])
    for _ in range(10):
        job.wait(10)
        a.converts(WORKING, moved=int(job.now))
    assert job.phase is Phase.RUNNING
    assert a.order == "run"
    assert "the training has ended; for 5 s it has waited for the universal files of step-3.e1.1" in job.notices
    a.convert()
    assert job.phase is Phase.SUCCEEDED
    assert a.order == "finish"


def test_the_end_waits_also_when_it_came_in_a_drain() -> None:
    job, (a, b) = resharded()
    b.leave()
    assert job.phase is Phase.DRAINING
    finished(job, [a, b])
    job.wait(30)
    assert job.phase is Phase.DRAINING
    a.convert()
    assert job.phase is Phase.SUCCEEDED


def test_the_end_does_not_wait_for_what_fails() -> None:
    job, (a, b) = resharded()
    finished(job, [a, b])
    for node in (a, b):
        node.converts(ENVIRONMENT, "no space")
    assert job.phase is Phase.SUCCEEDED
    assert "could not be made (no space)" in job.notices


def dies(job: Driven, node: Node) -> None:
    node.hang_up()
    job.wait(2)


def goes(job: Driven, node: Node) -> None:
    node.leave()


@pytest.mark.parametrize("way", [dies, goes])
def test_another_makes_them_at_the_end(way: Callable[[Driven, Node], None]) -> None:
    """The first one is killed, or leaves, when all have finished."""
    job, (a, b) = resharded()
    finished(job, [a, b])
    way(job, a)
    assert job.phase is Phase.RUNNING
    assert b.lease
    b.convert()
    assert job.phase is Phase.SUCCEEDED


def test_where_all_leave_the_end_does_not_wait() -> None:
    """Nobody is left to make them."""
    job, (a, b) = resharded()
    finished(job, [a, b])
    a.leave()
    assert job.phase is Phase.RUNNING
    b.leave()
    assert job.phase is Phase.SUCCEEDED
    assert "could not be made (no node is left to make them)" in job.notices
