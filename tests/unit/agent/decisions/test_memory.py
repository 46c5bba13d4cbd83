"""Memory checkpoints: what the master hears of them, what a leaver waits for, and how the ranks save at a drain."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from dalsegno.agent.decisions import events as ev
from dalsegno.protos import control_pb2, worker_pb2

from .test_decisions import Agent, kinds, world

REF = control_pb2.CheckpointRef(name="step-6.e1.1", digest="d6")
STEP = control_pb2.Checkpoint(ref=REF, step=6, epoch=1, in_memory=True)
SEALED = worker_pb2.Sealed(name=REF.name, digest=REF.digest, step=6, in_memory=True)
DRAINED = worker_pb2.Drained(name=REF.name, digest=REF.digest, step=6, in_memory=True)


def drained(leaving: bool = False) -> Agent:
    """Its ranks have drained into memory; what is held is not known yet."""
    agent = Agent().registered().running()
    if leaving:
        agent.hear(ev.Signalled(signal.SIGTERM))
    agent.said(draining=worker_pb2.Draining(step=6))
    agent.said(sealed=SEALED)
    agent.said(drained=DRAINED)
    agent.exits(ev.WORKER_DRAINED)
    return agent


def test_a_part_is_sent_to_its_buddies_and_nothing_is_committed() -> None:
    agent = Agent().registered().running()
    agent.said(sealed=SEALED)
    assert agent.did(ev.HoldPart) == [ev.HoldPart(REF.name, REF.digest)]
    assert not agent.did(ev.ReadManifest)


def test_what_a_drain_leaves_in_memory_is_urgent() -> None:
    """Whoever began the drain: the master, this node, or another node, of which only the ranks know yet."""
    for agent in (drained(), drained(leaving=True)):
        assert agent.did(ev.HoldPart) == [ev.HoldPart(REF.name, REF.digest, urgent=True)]
    agent = Agent().registered().running()
    agent.directed(drain=control_pb2.Drain(epoch=1, run=world(), to_memory=True))
    agent.said(sealed=SEALED)
    assert agent.did(ev.HoldPart) == [ev.HoldPart(REF.name, REF.digest, urgent=True)]


def test_what_is_held_is_told_once_and_to_each_new_master() -> None:
    agent = Agent().registered().running()
    for _ in range(2):
        agent.hear(ev.HeldChanged(STEP, (0,)))
    assert [tuple(request.parts) for request in agent.calls("ReportHeld")] == [(0,)]
    agent.hear(ev.HeldChanged(STEP, (0, 1)))
    assert agent.calls("ReportHeld")[-1].parts == [0, 1]
    agent.directed(generation=2, run=world())
    assert len(agent.calls("ReportHeld")) == 3
    agent.hear(ev.HeldChanged(STEP, ()))
    assert agent.calls("ReportHeld")[-1].parts == []
    agent.directed(generation=3, run=world())
    assert len(agent.calls("ReportHeld")) == 4


def test_who_comes_back_tells_it_before_anything_else() -> None:
    agent = Agent().registered().running()
    agent.hear(ev.HeldChanged(STEP, (0,)))
    agent.hear(ev.CallFailed("Heartbeat", "NOT_FOUND", "gone"), ev.WorkersStopped(1))
    agent.actions.clear()
    agent.hear(ev.Registered("another", control_pb2.RegisterReply(generation=1, node="me", run_id="run-0001")))
    assert kinds(agent.actions) == ["ReportHeld"]


@pytest.mark.parametrize("wanted", [False, True])
def test_what_finished_ranks_want_on_the_disk_is_told_before_their_end_is(wanted: bool) -> None:
    agent = Agent().registered().running()
    agent.said(sealed=worker_pb2.Sealed(name=REF.name, digest=REF.digest, step=6, in_memory=True, make_durable=wanted))
    agent.said(finished=worker_pb2.Finished(step=6))
    agent.exits(0)
    assert bool(agent.calls("ReportFinished")) is not wanted
    agent.hear(ev.HeldChanged(STEP, (0,)))
    assert [call.make_durable for call in agent.calls("ReportHeld")] == [wanted]
    assert len(agent.calls("ReportFinished")) == 1


def test_what_is_held_is_told_before_the_drain_is() -> None:
    agent = drained()
    assert not agent.calls("ReportDrained")
    agent.hear(ev.HeldChanged(STEP, (0,)))
    assert kinds([action for action in agent.actions if isinstance(action, ev.Call)])[-2:] == [
        "ReportHeld",
        "ReportDrained",
    ]


def test_what_buddies_left_here_is_not_the_part_of_its_ranks() -> None:
    """A drain that is reported before that part looks lost: no world goes on from it, and the leaver is let go."""
    agent = drained(leaving=True)
    agent.hear(ev.HeldChanged(STEP, (1,)))
    assert not agent.calls("ReportDrained")
    assert not agent.did(ev.MakeDurable), "only the buddy's part would be written"
    agent.hear(ev.HeldChanged(STEP, (0, 1)))
    assert kinds([action for action in agent.actions if isinstance(action, ev.Call)])[-2:] == [
        "ReportHeld",
        "ReportDrained",
    ]
    assert agent.did(ev.MakeDurable) == [ev.MakeDurable(REF)]


@pytest.mark.parametrize("parts", [(), (1,)])
def test_without_a_master_a_leaver_waits_for_its_part_too(parts: tuple[int, ...]) -> None:
    agent = drained(leaving=True)
    agent.hear(ev.LinkChanged(False))
    if parts:
        agent.hear(ev.HeldChanged(STEP, parts, copies=1))
    assert not agent.did(ev.Exit)
    agent.hear(ev.HeldChanged(STEP, (0, *parts), copies=1))
    assert agent.did(ev.MakeDurable) == [ev.MakeDurable(REF)]
    agent.hear(ev.MadeDurable(REF, "other parts are elsewhere", written=(0, *parts)))
    (left,) = agent.did(ev.Exit)
    assert left.code == ev.EXIT_LEFT


def test_who_stays_writes_its_own_part_where_no_master_is_heard() -> None:
    agent = drained()
    agent.hear(ev.LinkChanged(False), ev.HeldChanged(STEP, (1,)))
    assert not agent.did(ev.MakeDurable)
    agent.hear(ev.HeldChanged(STEP, (0, 1)))
    assert agent.did(ev.MakeDurable) == [ev.MakeDurable(REF)]


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("leaving", [True, False])
def test_who_made_no_step_has_nothing_to_wait_for(leaving: bool, held: bool) -> None:
    """A drain cuts short what comes before the first step: its ranks leave what they began with, of another world."""
    agent = Agent().registered()
    if held:  # It may have come to the disk since, and be gone from here.
        agent.hear(ev.HeldChanged(STEP, (0, 1)))
    run = world(2, rank=2, resume=6)
    run.resume.source.CopyFrom(STEP)
    agent.directed(run=run)
    agent.said(hello=worker_pb2.Hello(epoch=2))
    if leaving:
        agent.hear(ev.Signalled(signal.SIGTERM))
    agent.said(drained=DRAINED)
    agent.exits(ev.WORKER_DRAINED)
    assert agent.calls("ReportDrained")


def test_what_another_world_left_is_written_where_no_master_is_heard() -> None:
    """Its parts are not numbered as this world's nodes are."""
    agent = Agent().registered()
    agent.hear(ev.HeldChanged(STEP, (0, 1)))
    run = world(2, rank=2, resume=6)
    run.resume.source.CopyFrom(STEP)
    agent.directed(run=run)
    agent.said(hello=worker_pb2.Hello(epoch=2))
    agent.said(drained=DRAINED)
    agent.exits(ev.WORKER_DRAINED)
    agent.hear(ev.LinkChanged(False))
    assert agent.did(ev.MakeDurable) == [ev.MakeDurable(REF)]


def test_a_part_that_never_shows_itself_holds_nobody_up_for_ever() -> None:
    agent = drained()
    assert agent.state.wake is not None
    agent.waits(11)
    assert agent.calls("ReportDrained")


def test_a_leaver_waits_until_others_have_what_it_alone_holds() -> None:
    agent = drained(leaving=True)
    agent.hear(ev.HeldChanged(STEP, (0,)))
    agent.waits(7)  # As long as a leaver whose part is on the disk would not.
    assert not agent.did(ev.Exit)
    agent.directed(release=control_pb2.Release(), phase=control_pb2.PHASE_DRAINING)
    (left,) = agent.did(ev.Exit)
    assert (left.code, left.message) == (ev.EXIT_LEFT, "left on notice; everything is saved")


@pytest.mark.parametrize("recorded", [True, False])
def test_behind_its_drain_a_leaver_hears_whether_that_counts(recorded: bool) -> None:
    """Another node that had a part of it may have been lost meanwhile."""
    agent = drained(leaving=True)
    agent.hear(ev.HeldChanged(STEP, (0,)))
    head = STEP if recorded else control_pb2.Checkpoint(ref=control_pb2.CheckpointRef(digest="d4"), step=4, epoch=1)
    agent.directed(release=control_pb2.Release(), phase=control_pb2.PHASE_FORMING, head=head)
    (left,) = agent.did(ev.Exit)
    assert left.code == (ev.EXIT_LEFT if recorded else ev.EXIT_LEFT_UNSAVED)


@pytest.mark.parametrize(("epoch", "step", "code"), [(1, 6, ev.EXIT_LEFT), (1, 4, ev.EXIT_LEFT_UNSAVED)])
def test_it_hears_so_when_the_next_world_has_commits_already(epoch: int, step: int, code: int) -> None:
    """Its agent stood still for a while: the newest commit is another world's, and tells nothing of this one."""
    agent = drained(leaving=True)
    agent.hear(ev.HeldChanged(STEP, (0,)))
    newer = control_pb2.Checkpoint(ref=control_pb2.CheckpointRef(digest="d9"), step=9, epoch=2)
    release = control_pb2.Release(resumed_epoch=epoch, resumed_step=step)
    agent.directed(release=release, phase=control_pb2.PHASE_RUNNING, epoch=2, head=newer)
    (left,) = agent.did(ev.Exit)
    assert left.code == code


@pytest.mark.parametrize(("in_memory", "code"), [(False, ev.EXIT_LEFT), (True, ev.EXIT_LEFT_UNSAVED)])
def test_what_is_recorded_on_the_disk_is_saved_whoever_lets_it_go(in_memory: bool, code: int) -> None:
    """A leaver may stay for something else, and its notice end: another node has written its step meanwhile."""
    agent = drained(leaving=True)
    agent.hear(ev.HeldChanged(STEP, (0,)), ev.MadeDurable(REF, "other parts are elsewhere"))
    head = control_pb2.Checkpoint(ref=REF, step=6, epoch=1, in_memory=in_memory)
    wait = control_pb2.Wait(reason="stays until another node has what it alone holds in memory")
    agent.directed(wait=wait, phase=control_pb2.PHASE_RUNNING, epoch=2, head=head)
    agent.waits(11)
    (left,) = agent.did(ev.Exit)
    assert left.code == code


def test_a_leaver_whose_part_nobody_took_does_not_say_that_it_is_saved() -> None:
    agent = drained(leaving=True)
    agent.hear(ev.HeldChanged(STEP, (0,)))
    agent.waits(11)
    (left,) = agent.did(ev.Exit)
    assert left.code == ev.EXIT_LEFT_UNSAVED
    assert "nobody had said that others hold what it had in memory" in left.message


def how_it_goes(agent: Agent, again: bool) -> ev.Exit:
    """The end of a leaver that has had its notice: by a second one (`again`), or as it is over and nobody says more."""
    if again:
        agent.hurried(signal.SIGINT)
    else:
        agent.waits(11)
        agent.waits(11)  # for the master to say that others have it
    (left,) = agent.did(ev.Exit)
    return left


@pytest.mark.parametrize("again", [False, True])
def test_nor_does_one_whose_notice_comes_behind_its_drain(again: bool) -> None:
    """No workers were running then, and what they have left is in its memory."""
    agent = drained(leaving=False)
    agent.hear(ev.HeldChanged(STEP, (0,)), ev.Signalled(signal.SIGTERM))
    assert not agent.did(ev.Exit)
    assert how_it_goes(agent, again).code == ev.EXIT_LEFT_UNSAVED


def test_without_a_master_a_copy_is_enough() -> None:
    """The buddy tells the next master."""
    agent = drained(leaving=True)
    agent.hear(ev.HeldChanged(STEP, (0,)), ev.LinkChanged(False))
    assert not agent.did(ev.Exit)
    agent.hear(ev.HeldChanged(STEP, (0,), copies=1))
    assert not agent.did(ev.Exit)  # What it has goes to the disk first.
    agent.hear(ev.MadeDurable(REF, "other parts are elsewhere", written=(0,)))
    (left,) = agent.did(ev.Exit)
    assert (left.code, left.message) == (ev.EXIT_LEFT, "left on notice; everything is saved")
    assert not any(call.failure for call in agent.calls("ReportDurable"))


FULL = "no space left on device in /run: make room there, it is tried again"


def copied() -> Agent:
    """A leaver whose part another node has, too. No master is heard that would say whether that one stays."""
    agent = drained(leaving=True)
    agent.hear(ev.HeldChanged(STEP, (0,), copies=1), ev.LinkChanged(False))
    return agent


@pytest.mark.parametrize("again", [False, True])
def test_a_copy_is_not_enough_for_who_could_not_write_its_part(again: bool) -> None:
    """Who has it may leave, too, and count on the copy that is here."""
    agent = copied()
    agent.hear(ev.MadeDurable(REF, FULL))
    assert not agent.did(ev.Exit)
    left = how_it_goes(agent, again)
    assert left.code == ev.EXIT_LEFT_UNSAVED
    assert again or "what it had in memory is not on the disk, and who holds a copy may leave, too" in left.message


def test_nor_is_the_part_of_another_node_that_was_written() -> None:
    agent = copied()
    agent.hear(ev.MadeDurable(REF, "other parts are elsewhere", written=(1,)))
    assert how_it_goes(agent, False).code == ev.EXIT_LEFT_UNSAVED


def test_what_cannot_be_written_is_said_once_and_tried_until_it_can() -> None:
    """The disk may get room again before the notice is over."""
    agent = copied()
    for tries in (2, 3):
        agent.hear(ev.MadeDurable(REF, FULL))
        agent.waits(0.5)
        assert len(agent.did(ev.MakeDurable)) == tries - 1
        agent.waits(0.6)
        assert agent.did(ev.MakeDurable) == [ev.MakeDurable(REF)] * tries
        assert not agent.did(ev.Exit)
    warned = [said.text for said in agent.did(ev.Say) if said.warning]
    assert [text for text in warned if FULL in text] == [
        "this node stays, at most until its notice is over: step-6.e1.1 cannot be written to the disk, and no master is"
        f" heard ({FULL})"
    ]
    agent.hear(ev.MadeDurable(REF, "other parts are elsewhere", written=(0,)))
    (left,) = agent.did(ev.Exit)
    assert (left.code, left.message) == (ev.EXIT_LEFT, "left on notice; everything is saved")


def test_what_failed_while_a_master_was_heard_is_tried_once_it_is_away() -> None:
    """Until then the master orders it: a full disk ends an embedded master only after a while."""
    agent = drained(leaving=True)
    agent.hear(ev.HeldChanged(STEP, (0,), copies=1), ev.MadeDurable(REF, FULL))
    agent.waits(2)
    assert agent.did(ev.MakeDurable) == [ev.MakeDurable(REF)]
    assert not any(FULL in said.text for said in agent.did(ev.Say))
    agent.hear(ev.LinkChanged(False))
    assert agent.did(ev.MakeDurable) == [ev.MakeDurable(REF)] * 2


@pytest.mark.parametrize(
    ("heard", "all_leave", "nodes", "code"),
    [
        (True, False, 2, ev.EXIT_LEFT),
        (True, True, 2, ev.EXIT_LEFT_UNSAVED),
        # The master may have meant this node itself: it knew of no notice.
        (False, False, 2, ev.EXIT_LEFT_UNSAVED),
        # One stays, and it may be the one that has no copy.
        (True, False, 3, ev.EXIT_LEFT_UNSAVED),
    ],
)
def test_a_copy_is_enough_where_its_holder_is_known_to_stay(
    heard: bool, all_leave: bool, nodes: int, code: int
) -> None:
    agent = Agent().registered().running()
    run = world()
    run.nodes = nodes
    agent.hear(ev.Signalled(signal.SIGTERM))
    drain = control_pb2.Drain(epoch=1, run=run, to_memory=True, all_leave=all_leave)
    agent.directed(drain=drain, **({"leave": control_pb2.LeaveOrder()} if heard else {}))
    assert agent.state.world is not None
    agent.state.world.nodes = nodes
    agent.said(draining=worker_pb2.Draining(step=6))
    agent.said(sealed=SEALED)
    agent.said(drained=DRAINED)
    agent.exits(ev.WORKER_DRAINED)
    agent.hear(ev.HeldChanged(STEP, (0,), copies=1), ev.LinkChanged(False))
    assert not agent.did(ev.Exit)
    agent.hear(ev.MadeDurable(REF, FULL))
    assert bool(agent.did(ev.Exit)) is (code == ev.EXIT_LEFT)
    assert any(FULL in said.text for said in agent.did(ev.Say)) is (code != ev.EXIT_LEFT)
    if code != ev.EXIT_LEFT:
        how_it_goes(agent, False)
    (left,) = agent.did(ev.Exit)
    assert left.code == code


def test_a_part_that_was_written_counts_although_a_later_order_failed() -> None:
    agent = copied()
    agent.hear(ev.LinkChanged(True), ev.MadeDurable(REF, "other parts are elsewhere", written=(0,)))
    agent.hear(ev.MadeDurable(REF, "it cannot be sealed there: model.pt is missing"))
    agent.hear(ev.LinkChanged(False))
    (left,) = agent.did(ev.Exit)
    assert left.code == ev.EXIT_LEFT


def test_a_leaver_says_which_parts_it_has_written() -> None:
    """Who stays may have no time to fetch them, and seals what it finds. A new master hears of it again."""
    agent = drained(leaving=True)
    agent.hear(ev.HeldChanged(STEP, (0, 1)), ev.MadeDurable(REF, "other parts are elsewhere", written=(0, 1)))
    (said,) = agent.calls("ReportDurable")
    assert (said.ref, list(said.parts), said.failure) == (REF, [0, 1], "")
    wait = control_pb2.Wait(reason="stays until another node has what it alone holds in memory")
    agent.directed(generation=2, wait=wait, phase=control_pb2.PHASE_FORMING)
    assert [list(said.parts) for said in agent.calls("ReportDurable")] == [[0, 1], [0, 1]]


def gathering(*parts: int) -> Agent:
    """It brings a step of five parts here; it has these."""
    agent = Agent().registered()
    told = [control_pb2.HeldPart(group_rank=part, addresses=["10.0.0.2:7"]) for part in range(5)]
    agent.directed(gather=control_pb2.Gather(round=3, resume=REF, parts=told), phase=control_pb2.PHASE_FORMING)
    for count in range(len(parts)):
        agent.hear(ev.HeldChanged(STEP, parts[: count + 1]))
    return agent


def answered(agent: Agent) -> None:
    """The master has answered what it was told of this step."""
    agent.hear(ev.Replication(REF.digest, 1, control_pb2.Replication()))


def test_parts_that_are_gathered_are_told_now_and_then() -> None:
    """A thousand nodes gather a thousand parts each. The last one is told at once."""
    agent = gathering(0, 1, 2)
    assert [list(said.parts) for said in agent.calls("ReportHeld")] == [[0]]
    answered(agent)
    agent.waits(0.4)
    assert len(agent.calls("ReportHeld")) == 1
    agent.waits(0.2)
    assert list(agent.calls("ReportHeld")[-1].parts) == [0, 1, 2]
    agent.hear(ev.HeldChanged(STEP, (0, 1, 2, 3, 4)))
    assert [len(said.parts) for said in agent.calls("ReportHeld")] == [1, 3, 5]


def test_a_part_that_is_lost_meanwhile_is_told_at_once() -> None:
    agent = gathering(0, 1, 2)
    agent.hear(ev.HeldChanged(STEP, (0, 2)))
    assert [list(said.parts) for said in agent.calls("ReportHeld")] == [[0], [0, 2]]


def test_a_master_that_does_not_answer_is_told_no_more_of_them() -> None:
    agent = gathering(0, 1)
    agent.waits(2)
    assert len(agent.calls("ReportHeld")) == 1
    answered(agent)
    assert [len(said.parts) for said in agent.calls("ReportHeld")] == [1, 2]


def test_a_report_that_is_refused_is_answered_by_that() -> None:
    """What comes later is told all the same."""
    agent = gathering(0, 1)
    agent.hear(ev.CallFailed("ReportHeld", "INVALID_ARGUMENT", "no such thing"))
    agent.waits(1)
    assert [len(said.parts) for said in agent.calls("ReportHeld")] == [1, 2]


def test_another_gathering_forgets_nothing_that_has_come_for_the_last_one() -> None:
    """Leavers may wait until it is told."""
    agent = gathering(0, 1)
    other = control_pb2.CheckpointRef(name="step-8.e1.1", digest="d8")
    told = [control_pb2.HeldPart(group_rank=part, addresses=["10.0.0.2:7"]) for part in range(5)]
    agent.directed(gather=control_pb2.Gather(round=4, resume=other, parts=told), phase=control_pb2.PHASE_FORMING)
    step = control_pb2.Checkpoint(ref=other, step=8, epoch=1, in_memory=True)
    agent.hear(ev.HeldChanged(step, (0,)), ev.HeldChanged(step, (0, 1)))
    said = [(held.checkpoint.step, list(held.parts)) for held in agent.calls("ReportHeld")]
    assert (6, [0, 1]) in said


def test_a_gathering_that_takes_long_is_told() -> None:
    agent = gathering()
    agent.waits(4)
    assert not agent.calls("ReportHeld")
    agent.waits(1.5)
    agent.waits(5.5)
    assert [said.gathering for said in agent.calls("ReportHeld")] == [REF.digest] * 2
    agent.hear(ev.HeldChanged(STEP, (0, 1, 2, 3, 4)))
    agent.hear(ev.JoinPrepared(3, REF.digest, "host", 1, "probe", (STEP,)))
    assert agent.calls("Join")
    agent.waits(30)
    assert len([said for said in agent.calls("ReportHeld") if said.gathering]) == 2


def test_who_cannot_prepare_its_join_does_not_say_that_it_gathers() -> None:
    """A store that cannot be opened, for instance."""
    agent = gathering()
    for _ in range(60):
        agent.hear(ev.JoinFailed(3, REF.digest, "no store can be served"))
        agent.waits(1.5)
    assert not agent.calls("ReportHeld")


def test_a_leaver_writes_what_it_holds_to_the_disk() -> None:
    """All others may leave, too: whoever comes last finds all of it there, and seals it."""
    agent = drained(leaving=True)
    agent.hear(ev.HeldChanged(STEP, (0,)))
    assert agent.did(ev.MakeDurable) == [ev.MakeDurable(REF)]
    agent.hear(ev.MadeDurable(REF), ev.Tick())
    assert agent.calls("ReportDurable")
    agent.waits(6)
    (left,) = agent.did(ev.Exit)
    assert (left.code, left.message) == (ev.EXIT_LEFT, "left on notice; everything is saved")


def test_so_does_one_whose_workers_had_drained_before() -> None:
    agent = drained()
    agent.hear(ev.HeldChanged(STEP, (0,)))
    agent.directed(gather=control_pb2.Gather(round=2, resume=REF), head=STEP)
    agent.hear(ev.Signalled(signal.SIGTERM))
    assert agent.did(ev.MakeDurable) == [ev.MakeDurable(REF)]
    assert not agent.did(ev.Exit)


@pytest.mark.parametrize("said", [True, False])
def test_ranks_save_where_the_master_says(said: bool) -> None:
    agent = Agent().registered().running()
    agent.directed(drain=control_pb2.Drain(epoch=1, run=world(), to_memory=said))
    assert agent.did(ev.TellWorkers)[-1].to_memory is said


@pytest.mark.parametrize("buddies", [[], ["10.0.0.2:7"]])
def test_a_leaver_does_not_wait_for_that_word(buddies: list[str]) -> None:
    agent = Agent().registered()
    place = world()
    place.place.buddies.extend(buddies)
    agent.directed(run=place)
    agent.said(hello=worker_pb2.Hello(epoch=1))
    agent.hear(ev.Signalled(signal.SIGTERM))
    assert agent.did(ev.TellWorkers)[-1].drain
    assert agent.did(ev.TellWorkers)[-1].to_memory is bool(buddies)
    agent.directed(drain=control_pb2.Drain(epoch=1, run=place, to_memory=False))
    assert not agent.did(ev.TellWorkers)[-1].to_memory


def test_a_step_is_fetched_from_where_the_order_says() -> None:
    agent = Agent().registered()
    parts = [control_pb2.HeldPart(group_rank=1, addresses=["10.0.0.2:7"])]
    agent.directed(gather=control_pb2.Gather(round=2, resume=REF, parts=parts))
    assert agent.did(ev.PrepareJoin)[-1].parts == tuple(parts)


def test_what_is_fetched_for_a_join_is_kept_although_it_has_come_to_the_disk() -> None:
    agent = Agent().registered()
    parts = [control_pb2.HeldPart(group_rank=0, addresses=["10.0.0.2:7"])]
    agent.directed(gather=control_pb2.Gather(round=2, resume=REF, parts=parts), head=STEP)
    on_disk = control_pb2.Checkpoint(ref=REF, step=6, epoch=1)
    agent.directed(gather=control_pb2.Gather(round=2, resume=REF), head=on_disk)
    assert agent.did(ev.KeepInMemory)[-1].digests == {REF.digest}
    agent.hear(ev.JoinPrepared(2, REF.digest, "host", 1, "probe", (STEP,)))
    agent.directed(gather=control_pb2.Gather(round=2, resume=REF), head=on_disk)
    assert not agent.did(ev.KeepInMemory)[-1].digests


def test_what_the_run_may_go_on_from_is_kept() -> None:
    agent = Agent().registered().running()
    agent.directed(run=world(), head=STEP)
    assert agent.did(ev.KeepInMemory)[-1] == ev.KeepInMemory(1, frozenset({REF.digest}))
    agent.directed(run=world(), head=STEP, make_durable=control_pb2.MakeDurable(ref=REF))
    agent.directed(run=world(), head=STEP, make_durable=control_pb2.MakeDurable(ref=REF))
    assert agent.did(ev.MakeDurable) == [ev.MakeDurable(REF)]
    agent.hear(ev.MadeDurable(REF))
    assert agent.calls("ReportDurable")[-1].ref == REF
    on_disk = control_pb2.Checkpoint(ref=REF, step=6, epoch=1)
    agent.directed(run=world(), head=on_disk)
    assert agent.did(ev.KeepInMemory)[-1] == ev.KeepInMemory(1, frozenset())


@pytest.mark.parametrize("had_a_place", [False, True])
def test_who_stands_by_forgets_what_older_worlds_left(had_a_place: bool) -> None:
    """It fetches something with each change, and none of the worlds is its own."""
    agent = Agent().registered()
    if had_a_place:
        agent.running()
        agent.directed(epoch=1, gather=control_pb2.Gather(round=2, resume=REF), head=STEP)
        agent.hear(ev.WorkersStopped(1))
    parts = [control_pb2.HeldPart(group_rank=0, addresses=["10.0.0.2:7"])]
    agent.directed(epoch=1, gather=control_pb2.Gather(round=2, resume=REF, parts=parts), head=STEP)
    agent.hear(ev.HeldChanged(STEP, (0,)))
    agent.directed(epoch=2, wait=control_pb2.Wait(round=3), head=STEP)
    assert agent.did(ev.KeepInMemory)[-1] == ev.KeepInMemory(2, frozenset({REF.digest}))
    on_disk = control_pb2.Checkpoint(ref=REF, step=6, epoch=1)
    agent.directed(epoch=2, wait=control_pb2.Wait(round=3), head=on_disk)
    assert agent.did(ev.KeepInMemory)[-1] == ev.KeepInMemory(2, frozenset())


def test_a_leaver_keeps_what_its_world_left() -> None:
    agent = drained(leaving=True)
    agent.hear(ev.HeldChanged(STEP, (0,)))
    agent.directed(epoch=2, wait=control_pb2.Wait(reason="until another node has it"))
    assert agent.did(ev.KeepInMemory)[-1].epoch == 1


def test_what_could_not_be_written_is_said_and_tried_again_when_told() -> None:
    agent = Agent().registered().running()
    agent.directed(run=world(), head=STEP, make_durable=control_pb2.MakeDurable(ref=REF))
    agent.hear(ev.MadeDurable(REF, "no space left on the device"))
    assert agent.calls("ReportDurable")[-1].failure == "no space left on the device"
    agent.directed(run=world(), head=STEP)
    agent.directed(run=world(), head=STEP, make_durable=control_pb2.MakeDurable(ref=REF))
    assert len(agent.did(ev.MakeDurable)) == 2


def test_a_copy_that_cannot_be_loaded_is_looked_at_before_it_is_used_again() -> None:
    agent = Agent().registered()
    place = world(2, resume=6)
    place.resume.source.ref.CopyFrom(REF)
    place.resume.source.in_memory = True
    agent.directed(run=place)
    agent.hear(ev.HeldChanged(STEP, (0, 1)))
    agent.said(hello=worker_pb2.Hello(epoch=2))
    agent.said(bad_checkpoint=worker_pb2.BadCheckpoint(name=REF.name, digest=REF.digest, form=1, file="model.pt"))
    assert agent.did(ev.Doubt) == [ev.Doubt(REF)]
    agent.exits(ev.WORKER_BAD_CHECKPOINT)
    agent.hear(ev.WorkersStopped(2))
    agent.directed(gather=control_pb2.Gather(round=3, resume=REF), head=STEP)
    assert not agent.did(ev.PrepareJoin)
    told = len(agent.calls("ReportHeld"))
    agent.hear(ev.Doubted(REF))
    assert len(agent.calls("ReportHeld")) == told + 1
    assert agent.did(ev.PrepareJoin)[-1].resume == REF


# ---- what the ranks want on the disk ----


def wanted(step: int) -> worker_pb2.Sealed:
    name = f"step-{step}.e1.1"
    return worker_pb2.Sealed(name=name, digest=f"d{step}", step=step, in_memory=True, make_durable=True)


def step_of(number: int, epoch: int = 1) -> control_pb2.Checkpoint:
    ref = control_pb2.CheckpointRef(name=f"step-{number}.e{epoch}.1", digest=f"d{number}")
    return control_pb2.Checkpoint(ref=ref, step=number, epoch=epoch, in_memory=True)


def ordered(*write: int, seal: bool = False, step: int = 6) -> control_pb2.MakeDurable:
    return control_pb2.MakeDurable(ref=step_of(step).ref, write=write, seal=seal)


def kept(agent: Agent) -> frozenset[str]:
    """What stays in memory, besides the newest."""
    return agent.did(ev.KeepInMemory)[-1].digests


def test_what_the_ranks_want_on_the_disk_is_told_and_kept() -> None:
    """The newest one, until something as new is on the disk. Older ones are kept as long as they are written."""
    agent = Agent().registered().running()
    for number in (6, 8):
        agent.said(sealed=wanted(number))
        agent.hear(ev.HeldChanged(step_of(number), (0,)))
        assert agent.calls("ReportHeld")[-1].make_durable
        agent.hear(ev.Replication(f"d{number}", 1, None))
    assert kept(agent) == {"d8"}
    agent.said(sealed=worker_pb2.Sealed(name="step-9.e1.1", digest="d9", step=9, in_memory=True))
    agent.hear(ev.HeldChanged(step_of(9), (0,)), ev.Replication("d9", 1, None))
    assert not agent.calls("ReportHeld")[-1].make_durable
    agent.directed(run=world(), make_durable=ordered(0))
    assert kept(agent) == {"d6", "d8"}
    agent.hear(ev.MadeDurable(REF, write=(0,)))
    agent.directed(run=world())
    assert kept(agent) == {"d8"}
    on_disk = step_of(8)
    on_disk.in_memory = False
    agent.directed(run=world(), head=on_disk)
    assert kept(agent) == frozenset()


def test_what_cannot_be_fetched_is_told_and_fetched_again() -> None:
    """Said once; the master hears of it when a second try has failed, too, and at once when it is on the disk."""
    agent = Agent().registered()
    parts = [control_pb2.HeldPart(group_rank=1, addresses=["10.0.0.2:7"])]
    gather = control_pb2.Gather(round=1, resume=REF, parts=parts)
    agent.directed(gather=gather, head=STEP)
    assert [action.anyway for action in agent.did(ev.PrepareJoin)] == [False]
    agent.hear(ev.JoinFailed(1, REF.digest, "nobody answers"))
    agent.waits(1.5)
    assert [action.anyway for action in agent.did(ev.PrepareJoin)] == [False, True]
    lacking = ev.JoinPrepared(1, REF.digest, "here", 1, "probe", (), lacks=True)
    agent.hear(lacking)
    (join,) = agent.calls("Join")
    assert not join.inventory
    agent.waits(2)
    assert len(agent.did(ev.PrepareJoin)) == 2
    agent.waits(4)
    assert [action.anyway for action in agent.did(ev.PrepareJoin)] == [False, True, True]
    agent.hear(lacking)
    assert len(agent.calls("Join")) == 2
    gather.ClearField("parts")
    agent.directed(gather=gather)
    assert [(bool(action.parts), action.anyway) for action in agent.did(ev.PrepareJoin)][3:] == [(False, False)]
    assert [action.text for action in agent.did(ev.Say)].count("nobody answers") == 1


def own_best(number: int, epoch: int = 1) -> control_pb2.Checkpoint:
    made = step_of(number, epoch)
    made.best = made.ref.name
    return made


def test_the_best_is_kept_until_a_commit_names_it_as_that() -> None:
    """However many newer ones are wanted, and on the disk; a better one takes its place."""
    agent = Agent().registered().running()
    agent.said(sealed=wanted(6))
    agent.hear(ev.HeldChanged(own_best(6), (0,)))
    for number in range(7, 20):
        agent.said(sealed=wanted(number))
        agent.hear(ev.HeldChanged(step_of(number), (0,)))
    assert kept(agent) == {"d6", "d19"}
    head = step_of(19)
    head.in_memory, head.candidate = False, REF.name
    agent.directed(run=world(), head=head)
    assert kept(agent) == {"d6"}
    agent.said(sealed=wanted(21))
    agent.hear(ev.HeldChanged(own_best(21), (0,)))
    assert kept(agent) == {"d6", "d21"}  # The newest commit still names the other one.
    head.best, head.candidate = own_best(21).ref.name, ""
    agent.directed(run=world(), head=head)
    assert kept(agent) == {"d21"}, "it is wanted on the disk, where nothing newer is"
    head.step = 21
    agent.directed(run=world(), head=head)
    assert kept(agent) == frozenset()


def test_the_candidate_of_the_resume_point_is_kept_in_the_next_world() -> None:
    agent = Agent().registered().running()
    agent.said(sealed=wanted(6))
    agent.hear(ev.HeldChanged(own_best(6), (0,)))
    agent.exits(1)
    agent.hear(ev.WorkersStopped(1))
    head = step_of(8)
    head.candidate = REF.name
    agent.running(epoch=2)
    agent.directed(run=world(2), head=head)
    assert "d6" in kept(agent)
    agent.hear(ev.HeldChanged(step_of(9, 2), (0,)))
    assert "d6" in kept(agent)


def test_another_worlds_wishes_are_forgotten() -> None:
    agent = Agent().registered().running()
    agent.said(sealed=wanted(6))
    agent.exits(1)
    agent.hear(ev.WorkersStopped(1))
    agent.running(epoch=2)
    agent.said(sealed=wanted(7), epoch=1)
    agent.hear(ev.HeldChanged(step_of(7), (0,)))
    assert not agent.calls("ReportHeld")[-1].make_durable


def test_parts_are_written_once_and_said_again() -> None:
    """An order is a view: repeated, it has no second effect, and what was done is said once more."""
    agent = Agent().registered().running()
    agent.hear(ev.HeldChanged(STEP, (0, 1)))
    for order in (ordered(0, 1), ordered(0, 1), ordered(1)):
        agent.directed(run=world(), make_durable=order)
    assert agent.did(ev.MakeDurable) == [ev.MakeDurable(REF, write=(0, 1))]
    agent.hear(ev.MadeDurable(REF, write=(0, 1)))
    assert [tuple(said.parts) for said in agent.calls("ReportDurable")] == [(0, 1)]
    agent.directed(run=world(), make_durable=ordered(0, 1))
    assert len(agent.did(ev.MakeDurable)) == 1
    assert [tuple(said.parts) for said in agent.calls("ReportDurable")] == [(0, 1)] * 2
    agent.directed(run=world(), make_durable=ordered(seal=True))
    assert agent.did(ev.MakeDurable)[1:] == [ev.MakeDurable(REF, seal=True)]
    agent.hear(ev.MadeDurable(REF))
    assert not agent.calls("ReportDurable")[-1].parts
    # Once it was not asked for, or by a new master, it is looked at anew.
    agent.directed(run=world())
    agent.directed(run=world(), make_durable=ordered(seal=True))
    assert len(agent.did(ev.MakeDurable)) == 3
    agent.hear(ev.MadeDurable(REF))
    agent.directed(generation=2, run=world(), make_durable=ordered(seal=True))
    assert len(agent.did(ev.MakeDurable)) == 4


def test_what_is_looked_for_is_told_as_it_is() -> None:
    """Each time anew: it may have gone, or come, since."""
    agent = Agent().registered().running()
    agent.hear(ev.HeldChanged(STEP, (0,)))
    order = control_pb2.MakeDurable(ref=REF, write=[1], look=True)
    agent.directed(run=world(), make_durable=order)
    assert agent.did(ev.MakeDurable)[-1].look
    agent.hear(ev.MadeDurable(REF, "it is not there", write=(1,), absent=True))
    said = agent.calls("ReportDurable")[-1]
    assert (said.absent, list(said.parts), said.failure) == (True, [1], "it is not there")
    for number in (2, 3):
        agent.directed(run=world(), make_durable=order)
        assert len(agent.did(ev.MakeDurable)) == number
        agent.hear(ev.MadeDurable(REF, write=(1,)))
        said = agent.calls("ReportDurable")[-1]
        assert (said.absent, list(said.parts), said.failure) == (False, [1], "")


def test_what_fails_is_not_done() -> None:
    agent = Agent().registered().running()
    agent.hear(ev.HeldChanged(STEP, (0,)))
    agent.directed(run=world(), make_durable=ordered(0))
    agent.hear(ev.MadeDurable(REF, "no space left on the device", write=(0,)))
    said = agent.calls("ReportDurable")[-1]
    assert (said.failure, list(said.parts)) == ("no space left on the device", [0])
    agent.directed(run=world(), make_durable=ordered(0))
    assert len(agent.did(ev.MakeDurable)) == 2


def test_what_a_newer_commit_overtakes_is_given_up() -> None:
    """But not what is the best: later checkpoints name it."""
    agent = Agent().registered().running()
    agent.hear(ev.HeldChanged(STEP, (0,)))
    agent.directed(run=world(), make_durable=ordered(0))
    agent.directed(run=world(), head=step_of(5))
    newer = step_of(7)
    newer.best = STEP.ref.name
    agent.directed(run=world(), head=newer)
    assert not agent.did(ev.StopWriting)
    newer.best, newer.candidate = "", STEP.ref.name
    agent.directed(run=world(), head=newer)
    assert not agent.did(ev.StopWriting)
    newer.candidate = ""
    for _ in range(2):
        agent.directed(run=world(), head=newer)
    assert agent.did(ev.StopWriting) == [ev.StopWriting(REF)]


def test_a_part_that_is_written_does_not_make_a_leaver_safe() -> None:
    """Its spill is all that it holds of the drain's step; the part of it that the master wanted is not that."""
    agent = drained(leaving=True)
    agent.hear(ev.HeldChanged(STEP, (0,)), ev.LinkChanged(False))
    assert agent.did(ev.MakeDurable) == [ev.MakeDurable(REF)]
    agent.hear(ev.MadeDurable(REF, write=(0,)), ev.Tick())
    assert agent.state.leave is not None
    assert agent.state.leave.spill is not None
    assert not agent.state.leave.spill.over


def test_who_stays_writes_its_part_to_the_disk_while_no_master_is_heard() -> None:
    """Leavers may rely on each other's copies; once, and that other parts are elsewhere is no news for the master."""
    agent = drained()
    agent.hear(ev.HeldChanged(STEP, (0,)))
    assert not agent.did(ev.MakeDurable)
    agent.hear(ev.LinkChanged(False))
    agent.waits(1.0)
    assert agent.did(ev.MakeDurable) == [ev.MakeDurable(REF)]
    agent.hear(ev.MadeDurable(REF, "some parts are elsewhere"))
    assert not agent.calls("ReportDurable")
    agent.hear(ev.MadeDurable(REF))
    assert agent.calls("ReportDurable")[-1].ref == REF


def test_a_node_without_the_directory_looks_again_where_the_newest_step_is_in_memory_alone() -> None:
    """It would never come into sight on the disk, and that the directory is there by now was never said."""
    agent = Agent().registered()
    wait = control_pb2.Wait(round=2, reason="me does not see the job's checkpoint directory", look_for=REF)
    agent.directed(head=STEP, wait=wait)
    agent.hear(ev.JoinPrepared(2, REF.digest, "h", 7, "another probe", ()))
    assert len(agent.calls("Join")) == 1
    agent.actions.clear()
    agent.waits(5.1)
    assert agent.did(ev.PrepareJoin) == [ev.PrepareJoin(2, REF, patient=False)]


def test_what_is_looked_for_on_the_disk_is_fetched_once_the_order_says_where_it_is() -> None:
    agent = Agent().registered()
    wait = control_pb2.Wait(round=2, reason="me does not see it", look_for=REF)
    agent.directed(wait=wait)
    agent.hear(ev.JoinPrepared(2, REF.digest, "h", 7, "probe", ()))
    agent.actions.clear()
    held = control_pb2.HeldPart(group_rank=0, addresses=["10.0.0.1:7"])
    wait.parts.append(held)
    agent.directed(head=STEP, wait=wait)
    assert [action.parts for action in agent.did(ev.PrepareJoin)] == [(held,)]


def of_places(*parts: int) -> control_pb2.Gather:
    """An order to gather these parts, of more that there are."""
    told = [control_pb2.HeldPart(group_rank=part, addresses=["10.0.0.9:7"]) for part in parts]
    return control_pb2.Gather(round=3, resume=REF, parts=told, partly=True)


def asked(agent: Agent) -> list[tuple[list[int], bool]]:
    """The parts that were asked for, and whether it joins without them, too."""
    return [([part.group_rank for part in one.parts], one.anyway) for one in agent.did(ev.PrepareJoin)]


def test_more_parts_are_fetched_as_they_are_asked_for() -> None:
    """And fewer are not fetched anew. What was prepared for other parts is not sent, nor does its failure count."""
    agent = Agent().registered()
    agent.directed(gather=of_places(0, 3), phase=control_pb2.PHASE_FORMING)
    agent.directed(gather=of_places(0, 1, 2), phase=control_pb2.PHASE_FORMING)
    assert asked(agent) == [([0, 3], False), ([0, 1, 2], False)]
    agent.hear(ev.JoinFailed(3, REF.digest, "part 3: nobody else holds it", frozenset({0, 3})))
    agent.waits(1.5)
    assert asked(agent) == [([0, 3], False), ([0, 1, 2], False)]
    ready = ev.JoinPrepared(3, REF.digest, "host", 1, "probe", (STEP,), parts=frozenset({0, 3}))
    agent.hear(ready)
    assert agent.calls("Join") == []
    agent.hear(replace(ready, parts=frozenset({0, 1, 2})))
    assert [list(join.parts) for join in agent.calls("Join")] == [[0, 1, 2]]
    agent.directed(gather=of_places(0, 2), phase=control_pb2.PHASE_FORMING)
    assert len(asked(agent)) == 2
    agent.directed(gather=of_places(0, 4), phase=control_pb2.PHASE_FORMING)
    assert asked(agent)[2:] == [([0, 4], False)]


def loaded_from_memory() -> Agent:
    """Its ranks train on from a step in memory that is on no disk."""
    agent = Agent().registered()
    agent.hear(ev.HeldChanged(STEP, (0, 1)))
    run = world(2, rank=0, resume=6)
    run.resume.source.CopyFrom(STEP)
    agent.directed(run=run, head=STEP)
    agent.said(hello=worker_pb2.Hello(epoch=2))
    return agent


def test_what_proves_damaged_behind_its_load_is_told_once() -> None:
    agent = loaded_from_memory()
    for _ in range(2):
        agent.hear(ev.HeldChanged(STEP, (1,), damaged="CHECKSUM"))
    (told,) = agent.calls("ReportBadCheckpoint")
    assert (told.ref, told.message) == (REF, "CHECKSUM")
    assert agent.did(ev.Doubt) == [ev.Doubt(REF)]


@pytest.mark.parametrize("how", ["another step", "newer commit", "gone", "stopped"])
def test_other_damage_ends_no_world(how: str) -> None:
    agent = loaded_from_memory()
    found = STEP
    if how == "another step":
        found = control_pb2.Checkpoint()
        found.CopyFrom(STEP)
        found.ref.digest = "another"
    elif how == "newer commit":
        agent.directed(run=agent.state.world, head=control_pb2.Checkpoint(ref=REF, step=9, epoch=2))
    elif how == "stopped":
        agent.exits(1)
    agent.hear(ev.HeldChanged(found, (1,), damaged="" if how == "gone" else "CHECKSUM"))
    assert not agent.calls("ReportBadCheckpoint")
