"""The failure budget where there are more nodes than a world takes: spares must not hide that the script is broken."""

from __future__ import annotations

import pytest

from dalsegno.master.brain.membership import FORGIVEN_AFTER_SECONDS, HOLD_BASE_SECONDS, LOSS_LIMIT, LOSS_WINDOW_SECONDS
from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2
from dalsegno.protos.contract import COUNTED_BY_TORCHRUN
from tests.support.jobs.masters import Driven, Node, all_join, settings


def restart(job: Driven, failing: list[Node], *, slow: Node, hangs: bool) -> None:
    """All workers of the world end with an error, or one hangs until it is stopped; that node joins last."""
    for node in failing:
        if not (hangs and node is slow):
            node.failed()
    for node in job.nodes:
        if node is not slow and job.phase is Phase.FORMING:
            node.join()
    job.wait(1)
    if not job.phase.is_terminal:
        slow.join()
        job.wait(2)  # why: restarts back off


@pytest.mark.parametrize("hangs", [False, True])
def test_a_slow_member_whose_place_a_spare_took_is_no_loss(hangs: bool) -> None:
    """Worlds of two of three nodes: each time the slowest is left out, and was there all the time."""
    job = Driven(settings(max_nodes=2, max_restarts=2))
    a, b = job.start(2)
    a.step(1)
    c = job.node()
    c.join()
    for number in range(12):
        if job.phase is Phase.FAILED:
            break
        members = [node for node in (a, b, c) if node.name in job.members]
        restart(job, members, slow=members[number % len(members)], hangs=hangs)
    assert job.phase is Phase.FAILED
    assert "3 failures without progress" in job.job.message


def test_a_member_that_was_lost_after_all_is_no_failure_of_the_script() -> None:
    """Silent when the next world opened with a spare, and declared dead only then."""
    job = Driven(settings(max_nodes=2, max_restarts=0, node_timeout=12.0))
    a, b = job.start(2)
    a.step(1)
    c = job.node()
    c.join()
    job.silent.add(b.incarnation)
    a.failed()
    a.join()
    c.join()
    job.wait(1)
    assert job.phase is Phase.RUNNING
    assert set(job.members) == {a.name, c.name}
    job.wait(20)
    c.hang_up()
    job.wait(3)
    a.failed()
    a.join()
    job.wait(3)
    assert job.phase is Phase.RUNNING, job.job.message


def test_a_failure_that_repeats_is_told_in_full_once() -> None:
    """Then in a few words, until it is another one, or until the run has come further."""
    job = Driven(settings(max_restarts=9))
    a, b = job.start(2)
    a.step(1)
    for cause in ("no data", "no data", "no room", "no room"):
        a.failed(cause, step=1)
        all_join([a, b])
        job.wait(10)
    a.step(2)
    a.save(2)
    a.failed("no room", step=2)
    told = [notice.text.removeprefix(f"{a.name}: ") for notice in job.job.notices if notice.warning]
    again = "failed as before, attempt"
    assert told == ["no data", f"{again} 2 of 10", "no room", f"{again} 4 of 10", "no room"]


def test_attempts_are_not_counted_where_another_agent_counts_them() -> None:
    """Under torchrun's own agent the budget is torchrun's."""
    job = Driven(settings(max_restarts=COUNTED_BY_TORCHRUN))
    (a,) = job.start(1)
    for _ in range(2):
        a.failed("no data")
        a.join()
        job.wait(10)
    assert job.notices.count("no data") == 1
    assert f"{a.name}: failed as before\n" in job.notices


def test_how_many_more_failures_are_survived_is_said() -> None:
    """With each pause; and at the end how many there were."""
    job = Driven(settings(max_restarts=4))
    (a,) = job.start(1)
    a.step(1)
    for _ in range(5):
        a.failed("no data", step=1)
        a.join()
        job.wait(10)
    said = [line.partition("; ")[2] for line in job.notices.splitlines() if "start again in" in line]
    left = [f"{many} survived (--max-restarts)" for many in ("2 more are", "1 more is", "no more are")]
    assert said == left
    assert "no data; 5 failures without progress (--max-restarts 4)" in job.job.message
    job = Driven(settings(max_restarts=0))
    (a,) = job.start(1)
    a.step(1)
    a.failed("no data", step=1)
    a.join()
    assert "no data; 1 failure without progress (--max-restarts 0)" in job.job.message


@pytest.mark.parametrize(("epoch", "saved"), [(None, 50), (None, 0), (1, 60)])
def test_what_flash_checkpoint_has_saved_is_progress(epoch: int | None, saved: int) -> None:
    """The run has no checkpoint on its record. The same step again is none, nor what is of an older world."""
    job = Driven(settings(max_restarts=1))
    (a,) = job.start(1)
    for step in range(10, 60, 10):
        a.failed("killed", step=step - 1)  # steps are heard late
        a.join(flash_saved=step)
        job.wait(10)
        assert job.phase is Phase.RUNNING
    a.failed("killed", step=49)
    a.join(epoch=epoch, flash_saved=saved)
    assert job.phase is Phase.FAILED
    assert "2 failures without progress (--max-restarts 1)" in job.job.message


def test_what_flash_checkpoint_has_saved_later_than_before_is_progress() -> None:
    """It need not be beyond the failure before: each process is killed with its second save."""
    job = Driven(settings(max_restarts=1))
    (a,) = job.start(1)
    for saved in range(25, 150, 25):
        a.failed("killed", step=saved + 25)
        a.join(flash_saved=saved)
        job.wait(10)
        assert job.phase is Phase.RUNNING


def one_further(job: Driven, node: Node, *, times: int) -> None:
    """Each time it saves once, and fails with the next save: that commit is not beyond the failure before."""
    for begins in range(0, 25 * times, 25):
        node.step(begins + 25)
        node.save(begins + 25)
        node.step(begins + 50)
        node.failed("killed", step=begins + 50)
        node.join()
        job.wait(10)


def test_one_more_save_is_progress_although_it_is_not_beyond_the_failure() -> None:
    """Out of memory with the second save of each process: the run gets one commit further with each failure."""
    job = Driven(settings(max_restarts=1))
    (a,) = job.start(1)
    one_further(job, a, times=6)
    assert job.phase is Phase.RUNNING
    assert a.directive.run.resume.source.step == 150
    # It is told as what it is, each time: no attempt was in vain.
    assert "failed as before" not in job.notices
    assert job.notices.count("host-0: killed") == 6
    # It now comes no further: one more has been in vain.
    a.failed("killed", step=175)
    a.join()
    assert job.phase is Phase.FAILED
    assert "2 failures without progress (--max-restarts 1)" in job.job.message


def test_a_failure_at_one_step_ends_the_job_whatever_is_saved_before() -> None:
    """The resume point comes as close as it can, and no further."""
    job = Driven(settings(max_restarts=2))
    (a,) = job.start(1)
    for failures in range(30):
        if job.phase is Phase.FAILED:
            break
        a.step(min(7, 2 + failures))
        if failures < 5:
            a.save(3 + failures)
        a.failed("at step 8", step=8)
        a.join()
        job.wait(10)
    assert (job.phase, failures) == (Phase.FAILED, 7)
    assert "3 failures without progress (--max-restarts 2)" in job.job.message


def test_a_run_that_goes_back_and_comes_as_far_again_has_made_no_progress() -> None:
    """What it had saved is damaged each time; else that would go on for ever."""
    job = Driven(settings(max_restarts=3))
    (a,) = job.start(1)
    a.step(3)
    first = a.save(3)
    for failures in range(30):
        if failures % 2 == 0:
            assert a.directive.run.resume.source.step == (first.step if failures else 0)
            a.step(6)
            saved = a.save(6)
        a.failed("at step 8", step=8)
        a.join()
        job.wait(10)
        if job.phase is Phase.FAILED:
            break
        assert a.directive.run.resume.source.step == 6
        if failures % 2:
            a.bad(saved.ref)
            a.verified(intact=False)
            a.join()
            job.wait(10)
    assert job.phase is Phase.FAILED
    assert failures == 3


@pytest.mark.parametrize("replicas", [0, 1])
def test_the_count_of_a_new_master_is_that_of_the_old_one(replicas: int) -> None:
    """What has counted as progress is on the record, too."""
    job = Driven(settings(max_restarts=1, memory_replicas=replicas))
    (a,) = job.start(1)
    one_further(job, a, times=3)
    a.failed("killed", step=100)
    budget = job.job.run.budget
    job.restart()
    assert job.job.run.budget == budget
    assert budget.saved_step == 75


# ---- whose failure it was --------------------------------------------------------------------------------------------


def stopped_by_a_peer(node: Node) -> None:
    """Its ranks ended because another node's could not load the resume point."""
    request = control_pb2.FailureRequest(caller=node.caller(), kind=control_pb2.FAILURE_KIND_PEER, message="a peer")
    assert node.job.call(request).code == "OK"


@pytest.mark.parametrize("peer_first", [True, False])
def test_who_had_the_failure_is_blamed_not_who_tells_of_it(peer_first: bool) -> None:
    """Whichever word comes first."""
    job = Driven(settings(max_restarts=0))
    a, b = job.start(2)
    a.step(1)
    for turn in (1, 2):
        if peer_first == (turn == 1):
            stopped_by_a_peer(a)
        else:
            b.failed("out of memory", 1)
    all_join([a, b])
    assert job.phase is Phase.FAILED
    assert f"{b.name}: out of memory" in job.job.message


@pytest.mark.parametrize("how", ["damage", "loss"])
def test_a_failure_whose_cause_is_elsewhere_counts_for_nobody(how: str) -> None:
    """The peer reports damage, or is lost: the budget of none is untouched."""
    job = Driven(settings(max_restarts=0))
    a, b = job.start(2)
    a.step(1)
    made = job.seal(1, any_size=True)
    a.commit(made)
    stopped_by_a_peer(a)
    if how == "damage":
        b.bad(made.ref)
        all_join([a, b])
        (verifier,) = [node for node in (a, b) if node.directive.verify.number]
        verifier.verified(intact=False)
    else:
        b.hang_up()
        job.wait(2.0)
    all_join([a, b] if how == "damage" else [a])
    job.wait(2.0)
    assert job.phase is Phase.RUNNING
    assert job.job.run.budget.failures == 0
    assert job.job.run.budget.pending is None


# ---- nodes that are lost again and again -----------------------------------------------------------------------------


def lose(job: Driven, a: Node, times: int) -> float:
    """`flaky` trains and is killed, so often. Returns for how long it is a spare now."""
    for _ in range(times):
        flaky = job.node(node="flaky")
        flaky.join()
        flaky.warm()
        a.step(1000 * job.epoch)
        job.wait(1.0)
        for node in (a, flaky):
            node.drained(1000 * job.epoch)
        all_join([a, flaky])
        job.wait(2.0)
        assert "flaky" in job.members, job.notices
        a.step(1000 * job.epoch)
        flaky.hang_up()
        job.wait(8.0)
        all_join([a])
        job.wait(2.0)
    return job.job.holds["flaky"]


@pytest.mark.parametrize("restarted", [False, True])
def test_old_losses_are_forgiven(restarted: bool) -> None:
    """Each hold doubles the one before; after hours without a loss it begins anew, also under a restarted master."""
    job = Driven(settings(stall_timeout=0.0, drain_timeout=1.0))
    (a,) = job.start(1)
    a.step(1)
    assert lose(job, a, LOSS_LIMIT) == HOLD_BASE_SECONDS
    job.wait(HOLD_BASE_SECONDS)
    assert lose(job, a, 1) == 2 * HOLD_BASE_SECONDS
    job.wait(2 * HOLD_BASE_SECONDS)
    if restarted:
        job.restart()
        a.beat()
        assert job.now - job.state.live.lost_at["flaky"][-1] >= LOSS_WINDOW_SECONDS, "no loss of this window"
    job.now += 2 * FORGIVEN_AFTER_SECONDS + LOSS_WINDOW_SECONDS
    a.beat()
    job.wait(1.0)
    assert lose(job, a, LOSS_LIMIT) == HOLD_BASE_SECONDS


def test_many_nodes_that_are_lost_again_together_are_one_line() -> None:
    """A rack without power: a console keeps 40 lines, and others count, too."""
    job = Driven(settings(max_nodes=60))
    nodes = job.start(60)
    nodes[0].step(1)
    job.state.live.lost_at = {node.name: [job.now - 2, job.now - 1] for node in nodes[10:]}
    for node in nodes[10:]:
        job.silent.add(node.incarnation)
    job.wait(job.settings.node_timeout + 3)
    (told,) = [line for line in job.notices.splitlines() if "times in" in line]
    assert "and 47 more were each lost 3 times in 600 s: spares for 30 s" in told
    assert len(job.job.holds) == 50


def test_what_is_remembered_of_losses_is_bounded() -> None:
    """Names that do not come back are forgotten, whichever master counted them."""
    job = Driven(settings(stall_timeout=0.0))
    a, b = job.start(2)
    a.step(1)
    job.job.losses.update({f"old-{number}": 3 for number in range(100)})
    job.restart()
    for node in (a, b):
        node.beat()
    job.now += 10 * FORGIVEN_AFTER_SECONDS
    for node in (a, b):
        node.beat()
    b.hang_up()
    job.wait(10.0)
    assert not b.is_known
    assert set(job.job.losses) <= {b.name}
    assert set(job.state.live.lost_at) <= {b.name}


def test_what_is_remembered_of_holds_is_bounded() -> None:
    """Names that never come back are forgotten when their time is over, and not earlier."""
    job = Driven(settings(max_restarts=100))
    a, b = job.start(2)
    now = job.now
    for name, until in (("gone", now - 1.0), ("held", now + 1000.0)):
        job.job.holds[name] = 60.0
        job.state.live.held_until[name] = until
    a.step(1)
    b.hang_up()
    job.wait(10)
    assert not b.is_known
    assert set(job.job.holds) == set(job.state.live.held_until) == {"held"}


# ---- scripts without a session: seconds, not the notice -------------------------------------------------------------


@pytest.mark.parametrize("why", ["leave", "drain", "scale"])
def test_a_change_of_a_script_without_a_session_takes_seconds(why: str) -> None:
    """It cannot be drained: nobody trains on in vain until --drain-timeout has passed."""
    job = Driven(settings(drain_timeout=300.0, min_nodes=1, max_nodes=2))
    a, b = job.start(2)
    job.wait(40.0)
    if why == "leave":
        b.leave(notice=300.0)
    elif why == "drain":
        # A rank that says it has drained without ever having said hello.
        b.drained(0)
    else:
        assert job.scale(1).code == "OK"
    job.wait(8.0)
    assert job.phase is not Phase.RUNNING
    if why == "leave":
        assert b.order == "release"
    all_join([a, b])
    job.wait(2.0)
    assert (job.phase, a.name in job.members) == (Phase.RUNNING, True)


def test_a_leave_right_after_the_start_waits_for_the_hello() -> None:
    """A script that opens a session says so within seconds: then it is drained as ever."""
    job = Driven(settings(drain_timeout=300.0))
    a, b = job.start(2)
    b.leave(notice=300.0)
    job.wait(2.0)
    assert job.phase is Phase.DRAINING
    a.step(0)
    job.wait(60.0)
    assert job.phase is Phase.DRAINING
