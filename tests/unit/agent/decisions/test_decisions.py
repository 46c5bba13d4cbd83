"""What an agent does on each event: its decisions, one rule per test (docs/contracts.md)."""

from __future__ import annotations

import copy
import math
import signal
from typing import Any, TypeVar

import pytest

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions import handling, leaving
from dalsegno.agent.decisions.decision import STOP_PATIENCE_SECONDS
from dalsegno.agent.decisions.ranks import TOLD_AFTER_SECONDS
from dalsegno.agent.decisions.state import Epoch, Outcome, Start
from dalsegno.protos import control_pb2, worker_pb2

A = TypeVar("A")
ME = "me.1"


class Agent:
    """The decisions with a clock and the actions so far."""

    def __init__(self, nproc: int = 1, *, reads: bool = True, **settings: Any) -> None:
        self.now, self.reads = 500.0, reads
        self.state = handling.fresh(handling.AgentSettings(nproc=nproc, drain_timeout=10.0, **settings))
        self.actions: list[ev.Action] = []
        # Lines that the master is told; not among the actions.
        self.quotes: list[control_pb2.RemarkRequest] = []

    def hear(self, *events: ev.Event) -> list[ev.Action]:
        """What the last of the events asks for."""
        new: list[ev.Action] = []
        for event in events:
            self.state, done = handling.handle(self.state, event, self.now)
            quotes = [action for action in done if isinstance(action, ev.Call) and action.method == "ReportRemark"]
            self.quotes += [quote.request for quote in quotes]
            new = [action for action in done if action not in quotes]
            self.actions += new
            registers = [one for one in new if isinstance(one, ev.Register) and not one.previous_incarnation]
            if self.reads and registers:
                self.state, _ = handling.handle(self.state, ev.Asked(), self.now)
        return new

    def registered(self, generation: int = 1, incarnation: str = ME) -> Agent:
        reply = control_pb2.RegisterReply(generation=generation, node="me", run_id="run-0001")
        self.hear(ev.Started(), ev.Registered(incarnation, reply))
        return self

    def directed(self, generation: int = 1, **order: Any) -> list[ev.Action]:
        return self.hear(ev.Directed(control_pb2.Directive(generation=generation, run_id="run-0001", **order)))

    def running(self, epoch: int = 1, rank: int = 0, resume: int = 0, session: bool = True) -> Agent:
        """Its workers run in a world of two nodes, and have said hello."""
        self.directed(run=world(epoch, rank, resume, self.state.settings.nproc))
        if session:
            self.said(hello=worker_pb2.Hello(epoch=epoch))
        return self

    def said(self, rank: int = 0, epoch: int | None = None, **body: Any) -> list[ev.Action]:
        message = worker_pb2.ToAgent(**body)
        return self.hear(ev.WorkerSaid(self.state.started if epoch is None else epoch, rank, message))

    def exits(self, *codes: int) -> list[ev.Action]:
        return self.hear(*(ev.WorkerExited(self.state.started, rank, code) for rank, code in enumerate(codes)))

    def waits(self, seconds: float) -> list[ev.Action]:
        """What it does in that time, in which it wakes whenever it wants to."""
        until, done = self.now + seconds, list[ev.Action]()
        while not self.state.ended and self.state.wake is not None and self.state.wake < until:
            self.now = max(self.now, self.state.wake)
            done += self.hear(ev.Tick())
        return done + self.stands_still(until - self.now)

    def stands_still(self, seconds: float) -> list[ev.Action]:
        """What it does when that time is over, in which it was stopped."""
        self.now += seconds
        return self.hear(ev.Tick())

    def hurried(self, number: signal.Signals = signal.SIGTERM) -> list[ev.Action]:
        """A second notice, too late to belong to the first."""
        self.now += leaving.SAME_NOTICE_SECONDS + 0.1
        return self.hear(ev.Signalled(number))

    def calls(self, method: str) -> list[Any]:
        return [action.request for action in self.actions if isinstance(action, ev.Call) and action.method == method]

    def did(self, kind: type[A]) -> list[A]:
        return [action for action in self.actions if isinstance(action, kind)]


def world(epoch: int = 1, rank: int = 0, resume: int = 0, nproc: int = 1) -> control_pb2.World:
    """Two nodes; this agent has group rank `rank`."""
    made = control_pb2.World(
        epoch=epoch, run_id="run-0001", store_host="h", store_port=1, nodes=2, world_size=2 * nproc
    )
    made.place.MergeFrom(
        control_pb2.Place(node=f"n{rank}", incarnation=ME, group_rank=rank, first_rank=rank * nproc, nproc=nproc)
    )
    if resume:
        made.resume.source.step = resume
        made.resume.source.ref.digest = f"digest {resume}"
    return made


def kinds(actions: list[ev.Action]) -> list[str]:
    return [action.method if isinstance(action, ev.Call) else type(action).__name__ for action in actions]


GATHER = control_pb2.Gather(round=2, resume=control_pb2.CheckpointRef(name="step-3", digest="d3"))
SEALED = worker_pb2.Sealed(name="step-4.e1.1", digest="d4", step=4)
DRAINED = worker_pb2.Drained(name="step-4.e1.1", digest="d4", step=4)
MANIFEST = ev.ManifestRead("step-4.e1.1", control_pb2.Checkpoint(epoch=1, step=4))


# ---- registration and directives ------------------------------------------------------------------------------------


def test_it_registers_when_it_starts_and_says_later_that_it_is_warm() -> None:
    """Warm before it is registered: said with the registration."""
    agent = Agent()
    assert kinds(agent.hear(ev.Started())) == ["Register"]
    assert agent.hear(ev.StandbyWarm()) == []
    agent.hear(ev.Registered(ME, control_pb2.RegisterReply(node="me")))
    assert len(agent.calls("ReportWarm")) == 1


def test_the_master_hears_whether_the_next_standby_workers_are_ready() -> None:
    """Of each epoch anew: a word about the successors of an earlier one does not count."""
    agent = Agent()
    agent.hear(ev.Started(), ev.Registered(ME, control_pb2.RegisterReply(node="me")))
    agent.running(epoch=3)
    assert agent.calls("ReportProgress")[-1].cold
    assert kinds(agent.hear(ev.StandbyWarm(2))) == ["ReportWarm"], "the first of all, and not of this epoch"
    agent.said(progress=worker_pb2.Progress(step=1))
    assert agent.calls("ReportProgress")[-1].cold
    assert kinds(agent.hear(ev.StandbyWarm(3))) == ["ReportProgress"]
    assert not agent.calls("ReportProgress")[-1].cold
    assert agent.hear(ev.StandbyWarm(3)) == []
    agent.exits(1)
    agent.hear(ev.WorkersStopped(3))
    agent.running(epoch=4)
    assert agent.calls("ReportProgress")[-1].cold


def test_a_loss_that_nobody_told_is_no_number() -> None:
    """It would be shown as 0.0000, the best that there is."""
    agent = Agent().registered().running()
    agent.hear(ev.StandbyWarm())
    assert math.isnan(agent.calls("ReportProgress")[-1].loss)


@pytest.mark.parametrize("code", ["ALREADY_EXISTS", "INVALID_ARGUMENT"])
def test_a_refused_registration_ends_it_with_the_reason(code: str) -> None:
    """Exit code 2."""
    agent = Agent()
    (exit_,) = agent.hear(ev.Started(), ev.Refused(code, "choose another --node-name"))
    assert exit_ == ev.Exit(ev.EXIT_USAGE, "choose another --node-name")


@pytest.mark.parametrize("detail", ["Method not found!", "unknown service dalsegno.control.v1.Control", ""])
def test_another_programs_server_is_told_as_such(detail: str) -> None:
    """Each library of gRPC has its own words for it, and none says what to do; a master of ours says what it lacks."""
    settings = {"addresses": "h:1", "hint": "; so and so"}
    (exit_,) = Agent(**settings).hear(ev.Started(), ev.Refused("UNIMPLEMENTED", detail))
    what = "what answers at h:1 is not Dal Segno's dlrover-master; so and so"
    assert exit_ == ev.Exit(ev.EXIT_USAGE, what)
    line = "the client speaks protocol 9, this master only 8: upgrade dalsegno on the master"
    assert Agent(**settings).hear(ev.Started(), ev.Refused("UNIMPLEMENTED", line)) == [ev.Exit(ev.EXIT_USAGE, line)]


def test_the_same_directive_twice_changes_nothing() -> None:
    """A directive is a view."""
    agent = Agent().registered()
    assert "StartWorkers" in kinds(agent.directed(run=world()))
    assert kinds(agent.directed(run=world())) == []


def test_a_master_of_a_lower_generation_is_not_listened_to() -> None:
    """It was superseded."""
    agent = Agent().registered(generation=5)
    assert agent.directed(generation=4, run=world()) == []
    assert agent.did(ev.StartWorkers) == []


def test_an_ended_epoch_is_not_started_again() -> None:
    """A late `run` of an epoch whose workers have ended."""
    agent = Agent().registered().running()
    agent.exits(1)
    agent.hear(ev.WorkersStopped(1))
    assert "StartWorkers" not in kinds(agent.directed(run=world()))


def test_gather_stops_the_workers_first_and_then_joins_once() -> None:
    """One PrepareJoin for each round and resume point."""
    agent = Agent().registered().running()
    assert kinds(agent.directed(gather=GATHER)) == ["StopWorkers"]
    assert kinds(agent.hear(ev.WorkersStopped(1))) == ["PrepareJoin"]
    assert agent.directed(gather=GATHER) == []
    prepared = ev.JoinPrepared(2, "d3", "h", 7, "probe", ())
    assert kinds(agent.hear(prepared)) == ["Join"]
    assert agent.calls("Join")[0].resume.digest == "d3"


def test_a_join_that_was_prepared_for_an_older_gather_is_not_sent() -> None:
    """The resume point has changed meanwhile."""
    agent = Agent().registered()
    agent.directed(gather=GATHER)
    newer = control_pb2.Gather(round=2, resume=control_pb2.CheckpointRef(digest="d9"))
    assert kinds(agent.directed(gather=newer)) == ["PrepareJoin"]
    assert agent.hear(ev.JoinPrepared(2, "d3", "h", 7, "probe", ())) == []


def test_who_is_to_look_for_a_checkpoint_answers_first_and_then_is_patient() -> None:
    """The master must hear that it is not in sight; from then on the next Join comes when it is, and only one."""
    agent = Agent().registered()
    wait = control_pb2.Wait(round=2, look_for=control_pb2.CheckpointRef(digest="d3"))
    agent.directed(wait=wait)
    assert kinds(agent.hear(ev.JoinPrepared(2, "d3", "h", 7, "probe", ()))) == ["Join", "PrepareJoin"]
    assert [prepare.patient for prepare in agent.did(ev.PrepareJoin)] == [False, True]
    seen = control_pb2.Checkpoint(ref=control_pb2.CheckpointRef(digest="d3"))
    assert kinds(agent.hear(ev.JoinPrepared(2, "d3", "h", 7, "probe", (seen,)))) == ["Join"]
    assert agent.directed(wait=wait) == []


def test_what_was_not_in_sight_of_a_gather_is_looked_for_patiently() -> None:
    """The spare that it becomes has answered already; for another checkpoint it answers first."""
    agent = Agent().registered()
    agent.directed(gather=GATHER)
    assert kinds(agent.hear(ev.JoinPrepared(2, "d3", "h", 7, "probe", ()))) == ["Join"]
    agent.directed(wait=control_pb2.Wait(round=2, look_for=GATHER.resume, reason="it does not see it"))
    other = control_pb2.CheckpointRef(name="step-9", digest="d9")
    agent.directed(wait=control_pb2.Wait(round=3, look_for=other))
    assert [prepare.patient for prepare in agent.did(ev.PrepareJoin)] == [False, True, False]


def test_a_spare_that_has_joined_and_sees_what_to_look_for_does_not_join_again() -> None:
    """A world opened without it: its answer to the round still stands."""
    agent = Agent().registered()
    agent.directed(gather=GATHER)
    seen = control_pb2.Checkpoint(ref=GATHER.resume)
    agent.hear(ev.JoinPrepared(2, "d3", "h", 7, "probe", (seen,)))
    assert kinds(agent.directed(wait=control_pb2.Wait(round=2, look_for=GATHER.resume, reason="a spare"))) == ["Say"]


def test_notices_are_said_once() -> None:
    """By their sequence numbers."""
    agent = Agent().registered()
    notice = control_pb2.Notice(sequence=agent.state.notice + 1, text="hello")
    agent.directed(notices=[notice], wait=control_pb2.Wait())
    agent.directed(notices=[notice], wait=control_pb2.Wait())
    assert sum(say.text == "hello" for say in agent.did(ev.Say)) <= 1


# ---- fenced ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["call", "directive"])
def test_fenced_stops_everything_and_registers_anew(how: str) -> None:
    """Under its former incarnation's name, once its workers are gone."""
    agent = Agent().registered().running()
    if how == "call":
        actions = agent.hear(ev.CallFailed("Heartbeat", "NOT_FOUND", "declared dead"))
    else:
        actions = agent.directed(fenced=control_pb2.Fenced(reason="declared dead"))
    assert "StopWorkers" in kinds(actions)
    assert agent.did(ev.Register)[1:] == []
    agent.hear(ev.WorkersStopped(1))
    assert agent.did(ev.Register)[-1] == ev.Register(ME, "me")


def test_a_closed_epoch_is_no_fence() -> None:
    """The next directive says what is wanted instead."""
    agent = Agent().registered().running()
    assert agent.hear(ev.CallFailed("CommitCheckpoint", "FAILED_PRECONDITION", "epoch 1 is closed")) == []


def test_a_fenced_leaver_goes() -> None:
    """Nothing of it can be saved any more: 76."""
    agent = Agent().registered().running()
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.directed(fenced=control_pb2.Fenced(reason="declared dead"))
    (exit_,) = agent.hear(ev.WorkersStopped(1))[-1:]
    assert isinstance(exit_, ev.Exit)
    assert exit_.code == ev.EXIT_LEFT_UNSAVED


@pytest.mark.parametrize(("step", "code"), [(4, ev.EXIT_LEFT), (5, ev.EXIT_LEFT_UNSAVED)])
def test_a_fenced_leaver_that_has_made_no_step_has_lost_none(step: int, code: int) -> None:
    """Once the steps are counted behind its ranks' end; the world began at step 4."""
    agent = Agent().registered().running(resume=4)
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.directed(fenced=control_pb2.Fenced(reason="declared dead"))
    agent.hear(ev.StepsCounted(1, step), ev.WorkersStopped(1))
    assert agent.did(ev.Exit)[0].code == code


# ---- workers --------------------------------------------------------------------------------------------------------


def test_a_drain_order_raises_the_flag_and_a_withdrawn_one_lowers_it() -> None:
    """The workers are told each change once."""
    agent = Agent().registered().running()
    agent.directed(drain=control_pb2.Drain(epoch=1, run=world()))
    agent.directed(drain=control_pb2.Drain(epoch=1, run=world()))
    agent.directed(run=world())
    assert [tell.drain for tell in agent.did(ev.TellWorkers)] == [False, True, False]


def test_an_agreed_boundary_is_reported() -> None:
    """So that the master does not withdraw the drain any more."""
    agent = Agent().registered().running()
    agent.said(draining=worker_pb2.Draining(step=4))
    report = agent.calls("ReportProgress")[-1]
    # The report of the step itself may have been dropped.
    assert (report.draining, report.step) == (True, 4)


def test_what_the_master_remarks_on_a_registration_is_said() -> None:
    """A run that is taken up again, a --new-run without effect: the newcomer's own person hears it."""
    agent = Agent()
    agent.hear(ev.Started())
    reply = control_pb2.RegisterReply(generation=1, node="a", run_id="run-0001", remark="it had failed")
    actions = agent.hear(ev.Registered("i", reply))
    assert ev.Say("it had failed", True, quoted=False) in actions


def test_the_end_of_the_training_is_reported_before_the_ranks_exit() -> None:
    """What the script does after it makes no steps, and is no stall."""
    agent = Agent().registered().running()
    agent.said(progress=worker_pb2.Progress(step=4))
    assert not agent.calls("ReportProgress")[-1].training_ended
    agent.said(finished=worker_pb2.Finished(step=4))
    assert agent.calls("ReportProgress")[-1].training_ended
    agent.exits(0)
    agent.running(epoch=2)
    agent.said(epoch=2, progress=worker_pb2.Progress(step=5))
    assert not agent.calls("ReportProgress")[-1].training_ended


def test_drained_ranks_are_reported_after_the_commit() -> None:
    """First the checkpoint, then the drain."""
    agent = Agent(nproc=2).registered().running()
    agent.said(sealed=SEALED)
    agent.said(rank=0, drained=DRAINED)
    agent.said(rank=1, drained=DRAINED)
    assert agent.exits(ev.WORKER_DRAINED, ev.WORKER_DRAINED) == []
    assert kinds(agent.hear(MANIFEST)) == ["CommitCheckpoint", "ReportDrained"]
    assert agent.calls("ReportDrained")[0].checkpoint.digest == "d4"


def test_a_script_that_exits_0_after_draining_has_drained() -> None:
    """Whatever the script returns, a drain is not taken for success."""
    agent = Agent().registered().running()
    agent.said(drained=DRAINED)
    assert kinds(agent.exits(0)) == ["ReportDrained"]


def test_finished_ranks_are_reported_after_the_commit() -> None:
    """Otherwise the job could end without its last checkpoint."""
    agent = Agent().registered().running()
    agent.said(sealed=SEALED)
    agent.said(finished=worker_pb2.Finished(step=4))
    assert agent.exits(0) == []
    assert kinds(agent.hear(MANIFEST)) == ["CommitCheckpoint", "ReportFinished"]
    assert not agent.did(ev.Exit)


@pytest.mark.parametrize("code", [1, 0, -6])
def test_a_refusal_is_told_as_one_however_the_rank_ends(code: int) -> None:
    """Not by the wording of its last line: what it said before counts, until it makes a step all the same."""
    refused = worker_pb2.Refused(message="another optimizer")
    agent = Agent().registered().running()
    agent.said(refused=refused)
    assert kinds(agent.exits(code)) == ["ReportFailure", "StopWorkers"]
    (report,) = agent.calls("ReportFailure")
    assert (report.kind, report.message) == (control_pb2.FAILURE_KIND_REFUSED, "another optimizer")
    agent = Agent().registered().running()
    agent.said(refused=refused)
    agent.said(progress=worker_pb2.Progress(step=1))
    agent.exits(1)
    (report,) = agent.calls("ReportFailure")
    assert report.kind == control_pb2.FAILURE_KIND_WORKER
    agent = Agent().registered().running()
    agent.said(refused=refused)
    agent.directed(gather=GATHER)
    agent.hear(ev.WorkersStopped(1))
    agent.running(epoch=2)
    agent.exits(1)
    (report,) = agent.calls("ReportFailure")
    assert report.kind == control_pb2.FAILURE_KIND_WORKER, "what an earlier start said"


def test_a_script_with_a_session_finishes_only_by_saying_so() -> None:
    """A `break` or an early sys.exit(0) must not end the run as a success: one line says what to call."""
    agent = Agent(nproc=2).registered().running(rank=1)
    agent.said(rank=2, progress=worker_pb2.Progress(step=7))
    agent.said(rank=2, finished=worker_pb2.Finished(step=7))
    assert agent.exits(0) == []
    assert kinds(agent.hear(ev.WorkerExited(1, 1, 0))) == ["ReportFailure", "StopWorkers"]
    (report,) = agent.calls("ReportFailure")
    assert "step 7" in report.message
    assert "session.finish()" in report.message
    assert agent.calls("ReportFinished") == []


def test_a_rank_that_exits_with_0_before_a_session_that_others_open_gave_up() -> None:
    """They would wait for it there, until something else was named as the reason."""
    agent = Agent(nproc=2).registered().running(session=False)
    assert "ReportFailure" not in kinds(agent.hear(ev.WorkerExited(1, 1, 0)))
    # Its own, which was read late, says the contrary.
    assert "ReportFailure" not in kinds(agent.said(1, hello=worker_pb2.Hello(epoch=1)))
    agent = Agent(nproc=2).registered().running(session=False)
    agent.hear(ev.WorkerExited(1, 1, 0))
    assert kinds(agent.said(0, hello=worker_pb2.Hello(epoch=1)))[-2:] == ["ReportFailure", "StopWorkers"]
    (failure,) = agent.calls("ReportFailure")
    assert failure.message.startswith("local rank 1 exited with code 0 without session(), which rank 0 calls: all ")
    assert agent.state.epoch.outcome is Outcome.FAILED
    agent.said(0, hello=worker_pb2.Hello(epoch=1))
    assert len(agent.calls("ReportFailure")) == 1


def test_every_rank_of_every_node_that_said_so_has_finished() -> None:
    """Ranks are counted over all nodes; an epoch later nobody has finished yet."""
    agent = Agent(nproc=2).registered().running(rank=1)
    for rank in (2, 3):
        agent.said(rank=rank, finished=worker_pb2.Finished(step=7))
    assert kinds(agent.exits(0, 0)) == ["ReportFinished"]
    agent.running(epoch=2, rank=1)
    assert "ReportFailure" in kinds(agent.exits(0))


def test_a_script_without_a_session_finishes_with_code_0() -> None:
    """It has no other way to say so."""
    agent = Agent().registered().running(session=False)
    assert kinds(agent.exits(0)) == ["ReportFinished"]


def test_a_manifest_that_cannot_be_read_holds_nothing_up() -> None:
    """It is said, and the end is reported."""
    agent = Agent().registered().running()
    agent.said(sealed=SEALED)
    agent.said(finished=worker_pb2.Finished(step=4))
    agent.exits(0)
    assert kinds(agent.hear(ev.ManifestRead("step-4.e1.1", None, "gone"))) == ["Say", "ReportFinished"]


def test_checkpoints_that_are_gone_are_said_in_one_line() -> None:
    """Behind a Ctrl-Z others have recorded and removed what was sealed meanwhile; a console says equal lines once."""
    agent = Agent().registered().running()
    names = ("step-4.e1.1", "step-8.e1.1")
    said = [agent.hear(ev.ManifestRead(name, None, f"{name}: not there", gone=True)) for name in names]
    assert said[0] == said[1]
    assert kinds(said[0]) == ["Say"]


def test_what_a_script_does_wrong_is_said() -> None:
    """As it is, and as a warning."""
    agent = Agent().registered().running()
    assert agent.hear(ev.Remark("saves nothing")) == [ev.Say("saves nothing", True)]


def test_a_crash_is_reported_and_the_rest_is_killed() -> None:
    """With exit code and step; once for all ranks."""
    agent = Agent(nproc=2).registered().running()
    agent.said(progress=worker_pb2.Progress(step=7, seconds=0.1))
    agent.exits(-9, 1)
    assert len(agent.calls("ReportFailure")) == 1
    assert agent.calls("ReportFailure")[0].step == 7
    assert "signal 9" in agent.calls("ReportFailure")[0].message
    assert len(agent.did(ev.StopWorkers)) == 1


@pytest.mark.parametrize("session", [False, True])
def test_the_master_hears_of_an_end_before_the_last_save_is_taken(session: bool) -> None:
    """Else a growth that waits for a commit would start the finished script again. A session says it itself."""
    agent = Agent(nproc=2).registered().running(session=session)
    agent.hear(ev.EndedWell(7, 0), ev.EndedWell(1, 0))
    assert not any(report.training_ended for report in agent.calls("ReportProgress")), "another rank may train on"
    agent.hear(ev.EndedWell(1, 1))
    assert any(report.training_ended for report in agent.calls("ReportProgress")) is not session


@pytest.mark.parametrize("answers", [False, True])
def test_a_failure_that_the_master_does_not_tell_is_told_here(answers: bool) -> None:
    """Its disk may be full, as the script's is: nobody would know for half a minute why nothing goes on."""
    agent = Agent().registered().running(session=False)
    agent.hear(ev.WorkerExited(1, 0, 1, "OSError: no space"), ev.WorkersStopped(1))
    if answers:
        agent.directed(phase=control_pb2.PHASE_FORMING, epoch=1)
    said = [action.text for action in agent.waits(TOLD_AFTER_SECONDS) if isinstance(action, ev.Say)]
    assert [text for text in said if "OSError: no space; the master" in text] == said[:1]
    assert bool(said) is not answers
    assert not [action for action in agent.waits(60) if isinstance(action, ev.Say) and "no space" in action.text]


def test_workers_that_cannot_start_are_a_failure() -> None:
    """The master hears the reason."""
    agent = Agent().registered().running()
    agent.hear(ev.StartFailed(1, "no such script"))
    assert agent.calls("ReportFailure")[0].message == "no such script"


def test_a_node_that_can_start_no_workers_leaves_the_job_to_the_others() -> None:
    """Its failures were the run's: after four of them the job failed, on healthy nodes too."""
    agent = Agent().registered().running()
    actions = agent.hear(ev.StartFailed(1, "the working directory /x is gone", unfit=True))
    assert [action.text for action in actions if isinstance(action, ev.Say)] == ["the working directory /x is gone"]
    assert agent.calls("ReportFailure") == []
    assert agent.calls("Leave")[-1].gone
    (exit_,) = agent.did(ev.Exit)
    assert (exit_.code, exit_.message.partition(";")[0]) == (ev.EXIT_LEFT, "left, as no workers can be started here")


def test_a_bad_checkpoint_is_reported_once_and_is_no_failure() -> None:
    """Exit code 84 after its report."""
    agent = Agent().registered().running()
    bad = worker_pb2.BadCheckpoint(name="step-3", digest="d3", form=2, file="f", message="checksum")
    agent.said(bad_checkpoint=bad)
    agent.said(bad_checkpoint=bad)
    agent.exits(ev.WORKER_BAD_CHECKPOINT)
    (report,) = agent.calls("ReportBadCheckpoint")
    assert report.form == control_pb2.FORM_UNIVERSAL
    assert agent.calls("ReportFailure") == []


def test_a_bad_checkpoint_that_another_node_found_is_no_failure_of_this_one() -> None:
    """Exit 84 without a report: its peer's agent reports the damage. A script without a session may mean anything."""
    agent = Agent().registered().running()
    assert kinds(agent.exits(84)) == ["ReportFailure", "StopWorkers"]
    assert agent.calls("ReportFailure")[0].kind == control_pb2.FAILURE_KIND_PEER
    agent = Agent().registered().running(session=False)
    agent.exits(84)
    assert agent.calls("ReportFailure")[0].kind == control_pb2.FAILURE_KIND_WORKER


def test_every_save_of_an_epoch_is_seen_to_grow() -> None:
    """What is reported only grows, by what each rank's part of each save grew; nothing is counted twice."""
    agent = Agent(nproc=2).registered().running()

    def saves(name: str, rank: int, size: int) -> int:
        agent.said(rank, saving=worker_pb2.Saving(name=name, bytes=size))
        return int(agent.calls("ReportProgress")[-1].saved_bytes)

    assert [saves("step-2.e1.1", 0, size) for size in (0, 100, 100, 300)] == [0, 100, 100, 300]
    assert [saves("step-2.e1.1", 1, size) for size in (50, 250)] == [350, 550]
    agent.said(sealed=worker_pb2.Sealed(name="step-2.e1.1", digest="d2", step=2))
    assert saves("step-4.e1.1", 0, 20) == 570
    agent.said(save_failed=worker_pb2.SaveFailed(name="step-4.e1.1", reason="disk full"))
    assert [saves("step-4.e1.1", 0, 10), saves("step-4.e1.2", 0, 5)] == [580, 585]


def test_a_script_that_boasts_of_its_saves_ends_nothing() -> None:
    """The count of bytes stays within the 64 bits of a report, whatever a script says of however many saves."""
    agent = Agent().registered().running()
    for number in range(3000):
        agent.said(saving=worker_pb2.Saving(name=f"step-{number}.e1.1", bytes=1 << 53))
    assert agent.calls("ReportProgress")[-1].saved_bytes == 1 << 53


def test_a_script_that_seals_without_end_fills_nothing() -> None:
    """So many manifests are read at the same time, no more; the next one is, once one of them was."""
    agent = Agent().registered().running()

    def seals(number: int) -> list[str]:
        return kinds(agent.said(sealed=worker_pb2.Sealed(name=f"step-{number}.e1.1", digest="d", step=number)))

    assert sum(seals(number) == ["ReadManifest"] for number in range(1000)) == 64
    agent.hear(ev.ManifestRead("step-0.e1.1", None, "not there"))
    assert seals(1000) == ["ReadManifest"]


def test_signs_of_life_of_all_ranks_are_told() -> None:
    """Each one that is new makes the node's count grow; the next epoch's begin anew."""
    agent = Agent(nproc=2).registered().running()

    def beats(rank: int, count: int) -> int:
        agent.said(rank, progress=worker_pb2.Progress(step=1, beats=count))
        return int(agent.calls("ReportProgress")[-1].beats)

    assert [beats(rank, count) for rank, count in ((0, 3), (1, 1), (1, 2), (0, 3), (0, 9))] == [3, 4, 5, 5, 11]
    agent.exits(1)
    agent.hear(ev.WorkersStopped(1))
    agent.running(epoch=2)
    agent.said(0, epoch=2, progress=worker_pb2.Progress(step=1, beats=1))
    assert agent.calls("ReportProgress")[-1].beats == 1


def test_what_an_older_epochs_workers_say_is_not_heard() -> None:
    """Except a sealed checkpoint: the master judges that."""
    agent = Agent().registered().running(epoch=1)
    agent.exits(1)
    agent.hear(ev.WorkersStopped(1))
    agent.running(epoch=2, resume=3)
    assert agent.said(epoch=1, progress=worker_pb2.Progress(step=99)) == []
    assert agent.state.epoch.step == 3
    assert kinds(agent.said(epoch=1, sealed=SEALED)) == ["ReadManifest"]


def test_what_was_in_memory_is_copied_for_people_once_it_is_on_the_disk() -> None:
    """Before that there is no manifest of it to be copied."""
    head = control_pb2.Checkpoint(ref=control_pb2.CheckpointRef(name="step-4", digest="d4"), in_memory=True)
    agent = Agent().registered().running()
    agent.directed(run=world(), head=head)
    assert (len(agent.did(ev.WriteLatest)), len(agent.did(ev.Sweep))) == (0, 1)
    head.in_memory = False
    for _ in range(2):
        agent.directed(run=world(), head=head)
    assert (len(agent.did(ev.WriteLatest)), len(agent.did(ev.Sweep))) == (1, 1)


def test_only_rank_zeros_node_copies_the_head_for_people() -> None:
    """`latest.json`."""
    head = control_pb2.Checkpoint(ref=control_pb2.CheckpointRef(name="step-4", digest="d4"))
    for rank, copies in ((0, 1), (1, 0)):
        agent = Agent().registered().running(rank=rank)
        agent.directed(run=world(rank=rank), head=head)
        assert len(agent.did(ev.WriteLatest)) == copies


def test_whoever_comes_to_lead_copies_the_head_for_people() -> None:
    """At a restart, and where the node that led was lost just behind a commit. The copy was one commit behind."""
    head = control_pb2.Checkpoint(ref=control_pb2.CheckpointRef(name="step-4", digest="d4"))
    began = Agent().registered()
    began.directed(gather=control_pb2.Gather(round=1, resume=head.ref), head=head)
    assert not began.did(ev.WriteLatest)
    for _ in range(2):
        began.directed(run=world(resume=4), head=head)
    assert len(began.did(ev.WriteLatest)) == 1
    follower = Agent().registered().running(rank=1)
    follower.directed(run=world(rank=1), head=head)
    follower.exits(1)
    follower.hear(ev.WorkersStopped(1))
    assert not follower.did(ev.WriteLatest)
    follower.directed(run=world(epoch=2, resume=4), head=head)
    assert len(follower.did(ev.WriteLatest)) == 1


def test_a_failed_drain_save_is_reported_and_training_goes_on() -> None:
    """Nobody exits."""
    agent = Agent().registered().running()
    agent.said(draining=worker_pb2.Draining(step=4))
    agent.said(save_failed=worker_pb2.SaveFailed(name="step-4", reason="disk full", drain=True, step=4))
    assert [report.step for report in agent.calls("ReportSaveFailed")] == [4]
    assert agent.did(ev.StopWorkers) == []
    assert not agent.state.epoch.agreed


@pytest.mark.parametrize(("rank", "told"), [(0, 1), (1, 0)])
def test_the_master_hears_once_of_a_failed_save(rank: int, told: int) -> None:
    """All ranks know it; the node of the first one says so, and that it was no drain's."""
    agent = Agent().registered().running(rank=rank)
    agent.said(save_failed=worker_pb2.SaveFailed(name="step-4", reason="disk full", step=4))
    reports = agent.calls("ReportSaveFailed")
    assert [(report.name, report.reason, report.regular) for report in reports] == [
        ("step-4", "disk full", True)
    ] * told


@pytest.mark.parametrize(("name", "what"), [("step-4.e1.1", "step-4.e1.1"), ("", "step 4")])
def test_a_failed_save_is_told_by_its_step_where_it_has_no_name(name: str, what: str) -> None:
    """Its directory could not be made, so nobody knows how it would have been called."""
    agent = Agent().registered().running()
    (said, *_) = agent.said(save_failed=worker_pb2.SaveFailed(name=name, reason="disk full", step=4))
    assert said == ev.Say(f"saving {what} failed (disk full): the next save tries again, commits stand", True)


@pytest.mark.parametrize("place", [0, 1])
def test_a_last_save_that_fails_again_and_again_is_what_a_leaver_waits_for(place: int) -> None:
    """No boundary comes any more. All ranks of the node tell of each try, and the master hears once of it."""
    agent = Agent(nproc=2).registered().running(rank=place)
    first = 2 * place
    failed = worker_pb2.SaveFailed(name="step-9.e1.1", reason="disk full", step=9)
    again = copy.deepcopy(agent)
    for one, tries in ((agent, 1), (again, 2)):
        for number in range(tries):
            one.said(first, progress=worker_pb2.Progress(step=9))
            one.said(first + 1, save_failed=failed)
            one.said(first, save_failed=failed)
            assert len(one.calls("ReportSaveFailed")) == (0 if place else number + 1)
        one.hear(ev.Signalled(signal.SIGINT))
    lines = [one.did(ev.Say)[-1].text for one in (agent, again)]
    assert lines == [
        "SIGINT: saving at the next step boundary, then leaving",
        "SIGINT: leaving when step 9, the last one, is saved, which is tried again and again",
    ]


@pytest.mark.parametrize("then", [{"progress": worker_pb2.Progress(step=10)}, {"sealed": True}])
def test_a_save_that_was_tried_again_is_over_with_the_next_step_or_a_seal(then: dict[str, Any]) -> None:
    """A leaver waits for a boundary again."""
    agent = Agent().registered().running()
    for _ in range(2):
        agent.said(save_failed=worker_pb2.SaveFailed(name="step-9.e1.1", reason="disk full", step=9))
    if "sealed" in then:
        then = {"sealed": worker_pb2.Sealed(name="step-9.e1.1", digest="d", step=9)}
    agent.said(**then)
    agent.hear(ev.Signalled(signal.SIGINT))
    assert agent.did(ev.Say)[-1].text == "SIGINT: saving at the next step boundary, then leaving"


def test_a_drain_that_was_withdrawn_is_not_agreed_any_more() -> None:
    """The ranks have saved, and made another step: what they say of it does not speak of the next drain."""
    agent = Agent().registered().running()
    agent.said(progress=worker_pb2.Progress(step=4))
    agent.said(draining=worker_pb2.Draining(step=4))
    assert agent.calls("ReportProgress")[-1].draining
    agent.said(progress=worker_pb2.Progress(step=5))
    assert not agent.calls("ReportProgress")[-1].draining
    # The queue may have put the newest progress in the place of an older one.
    agent.said(draining=worker_pb2.Draining(step=4))
    assert not agent.calls("ReportProgress")[-1].draining


def test_how_a_drain_ends_reaches_the_workers() -> None:
    """A leaver is gone: they are told, once, how they go on."""
    agent = Agent().registered().running()
    for ending in (control_pb2.ENDING_TOGETHER, control_pb2.ENDING_WAIT, control_pb2.ENDING_SEAL):
        drain = control_pb2.Drain(epoch=1, run=world(), ending=ending)
        for _ in range(2):
            agent.directed(drain=drain)
    agent.directed(run=world())
    told = [(tell.drain, tell.ending) for tell in agent.did(ev.TellWorkers)]
    assert told[-4:] == [(True, 0), (True, control_pb2.ENDING_WAIT), (True, control_pb2.ENDING_SEAL), (False, 0)]


def test_a_save_that_goes_on_is_told_with_what_it_has_written() -> None:
    """The most that a rank sees, until its part is over or a step is made."""
    agent = Agent(nproc=2).registered().running()

    def writes(rank: int, written: int) -> int:
        agent.said(rank=rank, saving=worker_pb2.Saving(name="step-4.e1.1", written=written))
        return int(agent.calls("ReportProgress")[-1].written_bytes)

    assert [writes(0, 5000), writes(1, 1), writes(0, 0), writes(1, 0)] == [5000, 5000, 1, 0]
    assert writes(0, 7000) == 7000
    agent.said(progress=worker_pb2.Progress(step=5))
    assert agent.calls("ReportProgress")[-1].written_bytes == 0


def test_why_a_rank_cannot_save_its_part_is_told_while_it_waits() -> None:
    """The master, which ends the world for it, says why."""
    agent = Agent(nproc=2).registered().running()

    def told(rank: int, problem: str, written: int = 1) -> str:
        saving = worker_pb2.Saving(name="step-4.e1.1", written=written, problem=problem)
        agent.said(rank=rank, saving=saving)
        return str(agent.calls("ReportProgress")[-1].save_problem)

    assert [told(0, ""), told(1, "it is full"), told(0, "")] == ["", "it is full (rank 1)", "it is full (rank 1)"]
    assert told(1, "", 0) == ""
    assert told(1, "it is full") == "it is full (rank 1)"
    agent.said(progress=worker_pb2.Progress(step=5))
    assert agent.calls("ReportProgress")[-1].save_problem == ""


def test_a_commit_says_how_long_the_save_took() -> None:
    """The master compares it with a notice."""
    agent = Agent().registered().running()
    agent.said(sealed=worker_pb2.Sealed(name="step-4.e1.1", digest="d", step=4, seconds=26.0))
    made = control_pb2.Checkpoint(ref=control_pb2.CheckpointRef(name="step-4.e1.1", digest="d"), epoch=1)
    agent.hear(ev.ManifestRead("step-4.e1.1", made, ""))
    assert agent.calls("CommitCheckpoint")[0].seconds == 26.0
    assert not agent.state.took_seconds


# ---- conversion, verification, pruning ------------------------------------------------------------------------------


def test_a_lease_is_claimed_converted_committed_and_reported() -> None:
    """The commit of the form goes before "ready"."""
    agent = Agent().registered()
    agent.directed(gather=GATHER, convert=control_pb2.Conversion(lease=3))
    assert agent.calls("ClaimConversion")[0].lease == 3
    made = control_pb2.Checkpoint(form=control_pb2.FORM_UNIVERSAL)
    ready = ev.ConversionUpdate(3, control_pb2.CONVERSION_STATE_READY, 1, 1, "", made)
    assert kinds(agent.hear(ready)) == ["CommitCheckpoint", "ReportConversion"]


def test_a_lease_that_was_taken_away_stops_the_conversion() -> None:
    """And what it still says is not passed on."""
    agent = Agent().registered()
    agent.directed(gather=GATHER, convert=control_pb2.Conversion(lease=3))
    agent.directed(gather=GATHER)
    assert agent.did(ev.StopConversion) == [ev.StopConversion(3)]
    assert agent.hear(ev.ConversionUpdate(3, control_pb2.CONVERSION_STATE_WORKING, 1, 2)) == []


def test_a_verification_is_done_once() -> None:
    """By its number."""
    agent = Agent().registered()
    order = control_pb2.Verification(number=4)
    agent.directed(wait=control_pb2.Wait(), verify=order)
    agent.directed(wait=control_pb2.Wait(), verify=order)
    assert len(agent.did(ev.Verify)) == 1
    agent.hear(ev.VerificationDone(4, False, "part-0.pt"))
    assert agent.calls("ReportVerification")[0].number == 4
    assert not agent.calls("ReportVerification")[0].inconclusive
    assert not agent.calls("ReportVerification")[0].working
    agent.hear(ev.VerificationDone(4, False, "stale", inconclusive=True))
    assert agent.calls("ReportVerification")[1].inconclusive


def test_a_verification_that_moves_is_no_verdict() -> None:
    """A master that knows no progress takes it for inconclusive; of an older verification nothing is said."""
    agent = Agent().registered()
    agent.directed(verify=control_pb2.Verification(number=4), wait=control_pb2.Wait())
    agent.hear(ev.VerificationMoved(3, 5000), ev.VerificationMoved(4, 7000))
    (report,) = agent.calls("ReportVerification")
    assert (report.number, report.bytes_done, report.working, report.inconclusive) == (4, 7000, True, True)


def test_pruning_is_one_at_a_time_and_reported() -> None:
    """A directive that comes meanwhile does not start it twice."""
    agent = Agent().registered().running()
    refs = [control_pb2.CheckpointRef(name="step-1", digest="d1")]
    agent.directed(run=world(), prune=refs)
    agent.directed(run=world(), prune=refs)
    assert len(agent.did(ev.Prune)) == 1
    agent.hear(ev.Pruned(tuple(refs)))
    assert len(agent.calls("ReportPruned")) == 1


@pytest.mark.parametrize("group_rank", [0, 1])
def test_the_first_node_tells_of_a_disk_without_room(group_rank: int) -> None:
    """All nodes have the same disk."""
    agent = Agent().registered().running(rank=group_rank)
    agent.hear(ev.RoomMissing(5000))
    assert [call.missing_bytes for call in agent.calls("ReportShortage")] == ([5000] if group_rank == 0 else [])


# ---- whose failure it was -------------------------------------------------------------------------------------------


GLOO = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:1 (see stderr.log)"
WORKER, PEER = control_pb2.FAILURE_KIND_WORKER, control_pb2.FAILURE_KIND_PEER


@pytest.mark.parametrize(
    ("session", "lost", "again", "text", "kind"),
    [
        (True, True, False, False, PEER),
        # A step since: it did not end of that.
        (True, True, True, False, WORKER),
        # With a session it says so itself: a text is anybody's.
        (True, False, False, True, WORKER),
        (False, False, False, True, PEER),
        (False, False, False, False, WORKER),
    ],
)
def test_a_rank_whose_peer_is_gone_is_not_the_cause(
    session: bool, lost: bool, again: bool, text: bool, kind: int
) -> None:
    """The kind of the report says so; the line stays what its errors say."""
    agent = Agent().registered().running(session=session)
    if lost:
        agent.said(peer_lost=worker_pb2.PeerLost())
    if again:
        agent.said(progress=worker_pb2.Progress(step=3))
    agent.hear(ev.WorkerExited(1, 0, 1, GLOO, tells_of_a_peer=text))
    (report,) = agent.calls("ReportFailure")
    assert (report.kind, report.message) == (kind, f"local rank 0 exited with code 1: {GLOO}")


# ---- steps that were counted ----------------------------------------------------------------------------------------


JOIN = ev.JoinPrepared(2, "d3", "h", 1, "probe", ())


@pytest.mark.parametrize(("counted", "joined"), [((), None), ((9, 8), 9), ((2,), 3)])
def test_a_join_has_the_last_step_of_the_world_before(counted: tuple[int, ...], joined: int | None) -> None:
    """As its ranks counted it, of which the last steps may not have been told; not where nobody has."""
    agent = Agent(nproc=2).registered().running()
    agent.said(progress=worker_pb2.Progress(step=3))
    agent.directed(gather=GATHER)
    agent.hear(*(ev.StepsCounted(1, step) for step in counted), ev.WorkersStopped(1), JOIN)
    (join,) = agent.calls("Join")
    assert (join.caller.epoch, join.last_step if join.HasField("last_step") else None) == (1, joined)


def test_a_newcomer_has_counted_nothing() -> None:
    """It was in no world."""
    agent = Agent().registered()
    agent.directed(gather=GATHER)
    agent.hear(JOIN)
    assert not agent.calls("Join")[0].HasField("last_step")


def test_a_count_of_another_epoch_is_late() -> None:
    """Its workers were given up."""
    agent = Agent().registered().running()
    agent.hear(ev.StepsCounted(7, 99))
    assert (agent.state.epoch.step, agent.state.epoch.counted) == (0, False)


# ---- leaving --------------------------------------------------------------------------------------------------------


def test_sigterm_raises_the_flag_at_once_and_tells_the_master() -> None:
    """With or without a master: the workers hear it from their own agent."""
    agent = Agent().registered().running()
    agent.hear(ev.LinkChanged(False))
    assert kinds(agent.hear(ev.Signalled(signal.SIGTERM))) == ["Say", "Leave", "TellWorkers"]
    assert agent.did(ev.TellWorkers)[-1].drain


def test_workers_without_a_session_get_the_signal_themselves() -> None:
    """Nothing of ours can save them: they have the notice to end as long as they write, and else some seconds."""
    agent = Agent().registered().running(session=False)
    agent.hear(ev.Signalled(signal.SIGTERM))
    assert agent.did(ev.StopWorkers) == [ev.StopWorkers(1, grace=10.0, still=leaving.STILL_SECONDS)]
    assert "5 s, or 10 s (--drain-timeout) while they write" in agent.did(ev.Say)[-1].text


@pytest.mark.parametrize("nodes", [1, 2])
def test_workers_whose_saves_are_adopted_may_end_their_step_where_nobody_waits(nodes: int) -> None:
    """Their script may catch the signal, and save behind it. With other nodes the step cannot end without those."""
    agent = Agent(adopts=True).registered()
    run = world()
    run.nodes = nodes
    agent.directed(run=run)
    agent.hear(ev.Signalled(signal.SIGTERM))
    stop = ev.StopWorkers(1, grace=10.0, still=leaving.STILL_SECONDS, work=nodes == 1)
    assert agent.did(ev.StopWorkers) == [stop]
    how = "while they write or compute" if nodes == 1 else "while they write"
    assert agent.did(ev.Say)[-1].text.endswith(f"5 s, or 10 s (--drain-timeout) {how}")


@pytest.mark.parametrize("order", ["release", "gather", "wait", "finish", "failed", "run", "fenced"])
def test_nothing_the_master_says_cuts_the_notice_of_workers_without_a_session(order: str) -> None:
    """Their script may catch the signal and save by itself; the others go on without it, or the job even ends."""
    orders: dict[str, dict[str, Any]] = {
        "release": {"release": control_pb2.Release()},
        "gather": {"gather": GATHER},
        "wait": {"wait": control_pb2.Wait(round=1)},
        "finish": {"finish": control_pb2.Finish(success=True)},
        "failed": {"finish": control_pb2.Finish(message="waiting for nodes: 0 here")},
        "run": {"run": world(2)},
        "fenced": {"fenced": control_pb2.Fenced(reason="declared dead")},
    }
    agent = Agent().registered().running(session=False)
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.directed(**orders[order])
    agent.waits(9.0)
    assert agent.did(ev.StopWorkers) == [ev.StopWorkers(1, grace=10.0, still=leaving.STILL_SECONDS)]
    assert not agent.did(ev.Exit)
    agent.hear(ev.WorkersStopped(1))
    (exit_,) = agent.did(ev.Exit)
    assert exit_.code == ev.EXIT_LEFT_UNSAVED


def test_a_leaver_goes_with_75_once_drained_and_released() -> None:
    """Or after a short while without a word from the master."""
    agent = Agent(release_timeout=5.0).registered().running()
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.said(drained=DRAINED)
    agent.exits(ev.WORKER_DRAINED)
    assert not agent.did(ev.Exit)
    agent.directed(release=control_pb2.Release())
    assert agent.did(ev.Exit)[0].code == ev.EXIT_LEFT
    alone = Agent(release_timeout=5.0).registered().running()
    alone.hear(ev.Signalled(signal.SIGTERM))
    alone.said(drained=DRAINED)
    alone.exits(ev.WORKER_DRAINED)
    alone.waits(5.1)
    assert alone.did(ev.Exit)[0].code == ev.EXIT_LEFT


def test_a_leaver_without_a_master_goes_once_its_part_is_sealed() -> None:
    """The master reads it back from an inventory."""
    agent = Agent().registered().running()
    agent.hear(ev.LinkChanged(False), ev.Signalled(signal.SIGTERM))
    agent.said(drained=DRAINED)
    agent.exits(ev.WORKER_DRAINED)
    assert agent.did(ev.Exit)[0].code == ev.EXIT_LEFT


def test_a_leaver_whose_save_came_too_late_goes_with_76() -> None:
    """A newer epoch was open before it was recorded: not everything is saved, and it says so."""
    agent = Agent().registered().running()
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.said(progress=worker_pb2.Progress(step=3))
    agent.said(drained=DRAINED)
    agent.exits(ev.WORKER_DRAINED)
    assert not agent.did(ev.Exit)
    agent.hear(ev.CallFailed("ReportDrained", "FAILED_PRECONDITION", "epoch 1 is closed"))
    (exit_,) = agent.did(ev.Exit)
    assert (exit_.code, "last commit" in exit_.message) == (ev.EXIT_LEFT_UNSAVED, True)


def test_a_notice_that_runs_out_is_76() -> None:
    """The workers are killed; the run goes on from its last commit."""
    agent = Agent().registered().running()
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.said(progress=worker_pb2.Progress(step=3))
    assert "StopWorkers" in kinds(agent.waits(10.1))
    agent.hear(ev.WorkersStopped(1))
    agent.waits(6)
    (exit_,) = agent.did(ev.Exit)
    assert exit_.code == ev.EXIT_LEFT_UNSAVED
    assert exit_.message.endswith("nothing was saved in time; the run goes on from its last commit, if it has one")


@pytest.mark.parametrize(
    ("resumed", "head", "sealed", "said"),
    [
        (0, {"epoch": 1, "step": 60}, 0, "of step 60"),
        (40, {}, 0, "of step 40"),
        (40, {"epoch": 1, "step": 60}, 0, "of step 60"),
        # What is in memory may go with this node, and a sealed one may be recorded by now.
        (40, {"epoch": 1, "step": 60, "in_memory": True}, 0, "if it has one"),
        (40, {"epoch": 1, "step": 60}, 80, "if it has one"),
    ],
)
def test_a_leaver_names_the_last_commit_that_it_knows(
    resumed: int, head: dict[str, Any], sealed: int, said: str
) -> None:
    """So that people see what was lost: all steps may have been made, and only their save failed."""
    agent = Agent().registered().running()
    assert agent.state.world is not None
    agent.state.world.resume.source.step = resumed
    if head:
        agent.directed(head=control_pb2.Checkpoint(**head))
    agent.state.epoch.sealed_step = sealed
    agent.said(progress=worker_pb2.Progress(step=200))
    agent.hear(ev.Signalled(signal.SIGINT))
    agent.waits(10.1)
    agent.hear(ev.WorkersStopped(1))
    agent.waits(6)
    (exit_,) = agent.did(ev.Exit)
    assert exit_.message.endswith(f"nothing was saved in time; the run goes on from its last commit, {said}")


def test_a_notice_that_runs_out_while_all_save_says_that_the_others_go_on() -> None:
    """Whether they can complete it nobody knows here."""
    agent = Agent().registered().running()
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.said(progress=worker_pb2.Progress(step=3))
    agent.said(draining=worker_pb2.Draining(step=3))
    agent.waits(10.1)
    agent.hear(ev.WorkersStopped(1))
    agent.waits(6)
    (exit_,) = agent.did(ev.Exit)
    assert (exit_.code, "the others complete the save" in exit_.message) == (ev.EXIT_LEFT_UNSAVED, True)


@pytest.mark.parametrize("session", [True, False])
def test_a_leave_ends_at_its_deadline_whatever_its_workers_do(session: bool) -> None:
    """Nothing is heard of their end: neither of workers that were killed then, nor of those that got the signal."""
    agent = Agent().registered().running(session=session)
    agent.said(progress=worker_pb2.Progress(step=3))
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.waits(10.1)
    assert len(agent.did(ev.StopWorkers)) == 1
    assert not agent.did(ev.Exit)
    agent.waits(leaving.KILL_PATIENCE_SECONDS)
    assert agent.did(ev.Exit)[0].code == ev.EXIT_LEFT_UNSAVED


def test_a_leave_ends_although_a_stop_before_it_was_never_heard_of() -> None:
    """The world changed, the word of the stop was lost, and then SIGTERM comes."""
    agent = Agent().registered().running()
    agent.directed(gather=GATHER)
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.waits(10.0)
    assert not agent.did(ev.Exit)
    agent.waits(leaving.KILL_PATIENCE_SECONDS)
    assert agent.did(ev.Exit)[0].code == ev.EXIT_LEFT


def test_workers_of_whose_end_nothing_is_heard_are_given_up() -> None:
    """At a deadline: the node says so and joins the next world."""
    agent = Agent().registered().running()
    assert kinds(agent.directed(gather=GATHER)) == ["StopWorkers"]
    agent.waits(STOP_PATIENCE_SECONDS - 1)
    assert "PrepareJoin" not in kinds(agent.actions)
    assert agent.state.wake == agent.now + 1
    assert kinds(agent.waits(1)) == ["Say", "PrepareJoin"]
    assert agent.hear(ev.WorkersStopped(1)) == []


def test_a_fenced_node_comes_back_although_its_workers_are_never_heard_to_end() -> None:
    """It was declared dead; what it has left to stop must not keep it away for ever."""
    agent = Agent().registered().running()
    agent.directed(fenced=control_pb2.Fenced(reason="silent"))
    assert "Register" in kinds(agent.waits(STOP_PATIENCE_SECONDS))


def test_leaving_before_a_step_was_made_is_75() -> None:
    """There is nothing that was not saved."""
    agent = Agent().registered().running()
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.waits(10.1)
    agent.hear(ev.WorkersStopped(1))
    agent.waits(6)
    assert agent.did(ev.Exit)[0].code == ev.EXIT_LEFT


def left(agent: Agent) -> tuple[int, str]:
    """How it ends once its workers are gone."""
    agent.waits(10.1)
    agent.hear(ev.WorkersStopped(agent.state.started))
    agent.waits(6)
    (exit_,) = agent.did(ev.Exit)
    return exit_.code, exit_.message


def test_workers_without_a_session_are_never_called_saved() -> None:
    """None of their steps is heard, so silence is no proof that nothing was made: 76, and what that means."""
    agent = Agent().registered().running(session=False)
    agent.hear(ev.Signalled(signal.SIGTERM))
    code, message = left(agent)
    assert (code, "no session" in message, "saves by itself" in message) == (ev.EXIT_LEFT_UNSAVED, True, True)


def test_before_the_hello_of_a_script_known_to_have_a_session_nothing_was_made() -> None:
    """It opened one in an earlier epoch: 75."""
    agent = Agent().registered().running()
    agent.exits(1)
    agent.hear(ev.WorkersStopped(1))
    agent.running(epoch=2, session=False)
    agent.hear(ev.Signalled(signal.SIGTERM))
    assert left(agent)[0] == ev.EXIT_LEFT


@pytest.mark.parametrize("samples", [0, 96])
def test_before_the_hello_of_a_script_that_a_session_had_saved_nothing_was_made(samples: int) -> None:
    """Another agent's session has: the resume point has a place in the data. 75 then."""
    agent = Agent().registered()
    resumed = world(resume=22)
    resumed.resume.source.position.samples = samples
    agent.directed(run=resumed)
    agent.hear(ev.Signalled(signal.SIGTERM))
    assert left(agent)[0] == (ev.EXIT_LEFT if samples else ev.EXIT_LEFT_UNSAVED)


@pytest.mark.parametrize("step", [0, 3])
def test_a_drain_of_a_loop_without_a_save_saved_nothing(step: int) -> None:
    """It names no checkpoint: 76 with what to change, unless there was nothing to save."""
    agent = Agent().registered().running()
    if step:
        agent.said(progress=worker_pb2.Progress(step=step))
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.said(drained=worker_pb2.Drained(step=step))
    agent.exits(ev.WORKER_DRAINED)
    agent.directed(release=control_pb2.Release())
    (exit_,) = agent.did(ev.Exit)
    assert exit_.code == (ev.EXIT_LEFT_UNSAVED if step else ev.EXIT_LEFT)
    assert ("save=" in exit_.message) == bool(step)


def test_a_leaver_without_workers_leaves_nothing_unsaved() -> None:
    """What its ranks did before has ended by itself: 75, also for a script without a session."""
    agent = Agent().registered().running(session=False)
    agent.directed(gather=GATHER)
    agent.hear(ev.WorkersStopped(1), ev.Signalled(signal.SIGTERM))
    code, message = left(agent)
    assert (code, "no workers" in message) == (ev.EXIT_LEFT, True)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_goes_at_once(second: signal.Signals) -> None:
    """Without waiting for a save, if it comes later than what belongs to the first."""
    agent = Agent().registered().running()
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.hurried(second)
    assert agent.did(ev.StopWorkers)
    assert agent.did(ev.Exit)[0].code == ev.EXIT_LEFT_UNSAVED


@pytest.mark.parametrize("session", [True, False])
@pytest.mark.parametrize(
    "signals",
    [
        (signal.SIGTERM,) * 3,
        (signal.SIGINT, signal.SIGINT),
        (signal.SIGINT, signal.SIGTERM),
        (signal.SIGHUP, signal.SIGINT),
    ],
)
def test_who_says_the_same_twice_at_once_is_in_no_hurry(signals: tuple[signal.Signals, ...], session: bool) -> None:
    """As `timeout` does, which signals its child and then its group; and launchers that hear a Ctrl-C, too."""
    agent = Agent().registered().running(session=session)
    first, *more = signals
    agent.hear(ev.Signalled(first))
    stops = agent.did(ev.StopWorkers)
    for number in more:
        agent.waits(0.4)
        agent.hear(ev.Signalled(number))
    assert agent.did(ev.StopWorkers) == stops
    assert not agent.did(ev.Exit)
    agent.hurried(signal.SIGINT)
    assert agent.did(ev.Exit)[0].code == ev.EXIT_LEFT_UNSAVED


def test_signals_count_from_when_they_came() -> None:
    """An agent that is held up between two handles the second late: they are one notice all the same."""
    agent = Agent().registered().running()
    came = agent.now
    agent.hear(ev.Signalled(signal.SIGTERM, came))
    agent.waits(3.0)
    agent.hear(ev.Signalled(signal.SIGTERM, came + 0.1))
    assert not agent.did(ev.Exit)
    agent.hear(ev.Signalled(signal.SIGTERM, came + 2.5))
    assert agent.did(ev.Exit)[0].code == ev.EXIT_LEFT_UNSAVED


def test_a_closed_terminal_is_never_in_a_hurry() -> None:
    """Kernel and shell each send SIGHUP, also after somebody's SIGTERM: the save is waited for all the same."""
    agent = Agent().registered().running()
    # SIGTERM may also come second, where both were sent at once.
    agent.hear(ev.Signalled(signal.SIGHUP), ev.Signalled(signal.SIGTERM), ev.Signalled(signal.SIGHUP))
    assert agent.did(ev.StopWorkers) == []
    agent.said(drained=DRAINED)
    agent.exits(ev.WORKER_DRAINED)
    agent.directed(release=control_pb2.Release())
    assert agent.did(ev.Exit)[0].code == ev.EXIT_LEFT
    agent = Agent().registered().running()
    agent.hear(ev.Signalled(signal.SIGHUP))
    agent.hurried(signal.SIGINT)
    assert agent.did(ev.Exit)[0].code == ev.EXIT_LEFT_UNSAVED


def test_a_notice_that_a_closed_terminal_came_before_may_come_twice_too() -> None:
    """As `timeout` sends it: the first SIGTERM behind a SIGHUP was let pass, and the one at its heels meant now."""
    agent = Agent().registered().running()
    agent.hear(ev.Signalled(signal.SIGHUP))
    agent.hurried(signal.SIGTERM)
    agent.waits(0.1)
    agent.hear(ev.Signalled(signal.SIGTERM))
    assert not agent.did(ev.StopWorkers)
    assert not agent.did(ev.Exit)
    agent.hurried(signal.SIGTERM)
    assert agent.did(ev.Exit)[0].code == ev.EXIT_LEFT_UNSAVED


def test_a_leaver_that_is_given_a_world_goes_at_once() -> None:
    """Its peers would wait for ranks that never start."""
    agent = Agent().registered()
    agent.hear(ev.Signalled(signal.SIGTERM))
    agent.directed(run=world())
    assert agent.did(ev.StartWorkers) == []
    assert agent.did(ev.Exit)[0].code == ev.EXIT_LEFT


def test_a_signal_before_registration_just_goes() -> None:
    """Nobody knows of this node."""
    agent = Agent()
    agent.hear(ev.Started(), ev.Signalled(signal.SIGINT))
    assert agent.did(ev.Exit)[0].code == ev.EXIT_LEFT


def test_after_its_exit_nothing_is_decided_any_more() -> None:
    """No action follows an Exit."""
    agent = Agent().registered()
    agent.directed(finish=control_pb2.Finish(success=True))
    assert agent.directed(run=world(5)) == []


# ---- the end, and the master's absence ------------------------------------------------------------------------------


@pytest.mark.parametrize(("success", "code"), [(True, ev.EXIT_FINISHED), (False, ev.EXIT_FAILED)])
def test_the_jobs_end_is_the_agents_exit_code(success: bool, code: int) -> None:
    """A finished run is marked in its directory."""
    agent = Agent().registered().running()
    agent.directed(finish=control_pb2.Finish(success=success, message="over"))
    assert agent.did(ev.Exit) == [ev.Exit(code, "over")]
    assert bool(agent.did(ev.MarkFinished)) is success


def test_an_absent_master_stops_nothing() -> None:
    """The workers hear of it, train on, and what the master must know is kept."""
    agent = Agent().registered().running()
    agent.hear(ev.LinkChanged(False))
    agent.waits(1000)
    assert agent.did(ev.StopWorkers) == []
    assert [tell.master_seen for tell in agent.did(ev.TellWorkers)] == [True, False]
    assert not agent.did(ev.TellWorkers)[-1].drain


@pytest.mark.parametrize(("body", "code", "word"), [("finished", 0, "finished"), ("drained", 83, "drained")])
def test_workers_that_end_while_the_master_is_away_are_told_of(body: str, code: int, word: str) -> None:
    """The console would be silent until the master is back. A leaver just goes; with a master it is no news."""
    said = {"finished": worker_pb2.Finished(step=4), "drained": DRAINED}[body]

    def ends(*before: ev.Event) -> list[str]:
        agent = Agent().registered().running()
        agent.hear(*before)
        agent.said(**{body: said})
        return [action.text for action in agent.exits(code) if isinstance(action, ev.Say)]

    (line,) = ends(ev.LinkChanged(False))
    assert word in line
    assert "waits for the master" in line
    assert ends(ev.LinkChanged(True)) == ends(ev.LinkChanged(False), ev.Signalled(signal.SIGTERM)) == []


def test_a_node_that_alone_is_cut_off_drains_after_the_outage_timeout() -> None:
    """The exchange shows that another node still reaches the master; when the link is back the flag goes."""
    agent = Agent(master_outage_timeout=60.0).registered().running()
    agent.hear(ev.LinkChanged(False))
    agent.said(progress=worker_pb2.Progress(step=1, anyone_sees_master=True))
    agent.waits(59)
    assert not agent.did(ev.TellWorkers)[-1].drain
    agent.waits(2)
    assert agent.did(ev.TellWorkers)[-1].drain
    agent.hear(ev.LinkChanged(True))
    assert not agent.did(ev.TellWorkers)[-1].drain


def test_a_call_that_nobody_may_make_ends_it() -> None:
    """Exit code 2, workers killed."""
    agent = Agent().registered().running()
    agent.hear(ev.CallFailed("Heartbeat", "PERMISSION_DENIED", "not yours"))
    assert agent.did(ev.Exit)[0].code == ev.EXIT_USAGE
    assert agent.did(ev.StopWorkers)


def test_decisions_are_pure() -> None:
    """The state handed in is not changed."""
    state = handling.fresh(handling.AgentSettings())
    before = str(state)
    handling.handle(state, ev.Started(), 1.0)
    assert str(state) == before


def test_nothing_of_the_ranks_before_is_left_at_a_start() -> None:
    """Whatever they said; the step is the resume point's, and the loss is shown until there is another."""
    agent = Agent().registered().running()
    ref = control_pb2.CheckpointRef(name="step-5.e1.1", digest="d")
    agent.said(progress=worker_pb2.Progress(step=5, loss=2.0, seconds=1.0, beats=3, anyone_sees_master=True))
    agent.said(saving=worker_pb2.Saving(name=ref.name, bytes=9, written=9))
    agent.said(refused=worker_pb2.Refused(message="not so"))
    agent.said(draining=worker_pb2.Draining(step=6))
    agent.said(drained=worker_pb2.Drained(name=ref.name, digest=ref.digest, step=6))
    agent.exits(ev.WORKER_DRAINED)
    agent.hear(ev.WorkersStopped(1))
    before = agent.state.epoch
    agent.running(epoch=2, resume=6, session=False)
    assert (
        before
        != agent.state.epoch
        == Epoch(step=6, loss=2.0, start=Start(agent.now), told=(False, True, 0, False, False, 0))
    )


def test_a_decision_leaves_the_state_before_it_as_it_was() -> None:
    """Also its parts: the shell and the simulator keep what they were given."""
    agent = Agent().registered().running()
    before = agent.state
    kept = copy.deepcopy(before)
    agent.said(progress=worker_pb2.Progress(step=5, loss=2.0))
    assert before == kept != agent.state


def test_who_is_asked_to_take_what_was_saved_last_does_it_before_it_joins() -> None:
    """It has joined already, so it joins again; the answer of the first time does not count for that."""
    agent = Agent().registered()
    agent.directed(gather=GATHER)
    asks = control_pb2.Gather()
    asks.CopyFrom(GATHER)
    asks.take.epoch = 1
    assert kinds(agent.directed(gather=asks)) == ["PrepareJoin"]
    assert agent.did(ev.PrepareJoin)[-1].take == asks.take
    assert agent.hear(ev.JoinPrepared(2, "d3", "h", 7, "probe", ())) == []
    assert kinds(agent.hear(ev.JoinPrepared(2, "d3", "h", 7, "probe", (), took=1))) == ["Join"]
    assert agent.calls("Join")[-1].took == 1
    assert agent.directed(gather=asks) == []
    assert agent.directed(gather=GATHER) == []


def test_a_script_that_ends_with_the_code_of_a_drain_has_failed() -> None:
    """If nobody wanted one: it would be started again and again, and never count as a failure."""
    agent = Agent().registered().running()
    agent.said(hello=worker_pb2.Hello(epoch=1))
    agent.exits(ev.WORKER_DRAINED)
    assert not agent.calls("ReportDrained")
    (failure,) = agent.calls("ReportFailure")
    assert failure.exit_code == ev.WORKER_DRAINED


def test_a_process_that_has_stayed_may_leave_its_place_to_a_new_one() -> None:
    """It cannot follow the others to the training, and says so itself: no failure."""
    agent = Agent().registered().running()
    asked = agent.hear(ev.WorkerExited(1, 0, ev.WORKER_DRAINED, had_stayed=True))
    assert "ReportFailure" not in kinds(asked)
    assert agent.state.epoch.outcome is Outcome.DRAINED
    behind = Agent().registered().running()
    behind.said(progress=worker_pb2.Progress(step=3))
    behind.hear(ev.WorkerExited(1, 0, ev.WORKER_DRAINED, had_stayed=True))
    assert behind.calls("ReportFailure"), "it had followed them"


@pytest.mark.parametrize("wanted", ["by the master", "by its ranks", "by a signal"])
def test_a_drain_that_somebody_wanted_is_one_without_a_report(wanted: str) -> None:
    agent = Agent().registered().running()
    agent.said(hello=worker_pb2.Hello(epoch=1))
    if wanted == "by the master":
        agent.directed(drain=control_pb2.Drain(epoch=1, run=world()))
    elif wanted == "by its ranks":
        agent.said(draining=worker_pb2.Draining(step=6))
    else:
        agent.hear(ev.Signalled(signal.SIGTERM))
    agent.exits(ev.WORKER_DRAINED)
    assert agent.calls("ReportDrained")
