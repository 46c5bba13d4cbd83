"""The agent's decisions, pure: `handle(state, event, now) -> (state, actions)`.

No I/O, no clock, no randomness: the shell (`elastic_agent.py`) and the simulator (`tests/simulation`) carry out the
same actions. A directive is a view of what the agent should be doing, so every handler compares it with what the agent
*is* doing and asks for the difference; hearing the same directive twice changes nothing.

What happens on which failure:

- a worker ends with an error: the rest of this node's workers are killed, the master is told, the agent waits;
- the master is away: the workers go on; calls are kept and repeated; past the outage timeout the node drains if another
  node still reaches the master;
- the agent was declared dead ("fenced"): its workers are killed at once, and it registers anew as a new incarnation;
- SIGTERM: the flag reaches the workers at once, with or without a master; at the end of the notice they are killed.
"""

from __future__ import annotations

import copy
import signal
from dataclasses import dataclass, field
from enum import Enum

from dalsegno.protos import control_pb2, worker_pb2

from . import events as ev


class Workers(str, Enum):
    """What this node's workers are doing."""

    NONE = "none"
    RUNNING = "running"
    # Some ranks have ended well, the others are about to.
    STOPPING = "stopping"


class Outcome(str, Enum):
    """How the workers of the last started epoch ended on this node."""

    NONE = "none"
    DRAINED = "drained"
    FINISHED = "finished"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True)
class AgentSettings:
    """Durations in seconds."""

    nproc: int = 1
    drain_timeout: float = 30.0
    master_outage_timeout: float = 60.0
    # How long a leaver without a word from the master still waits for one, once its part is safe.
    release_timeout: float = 5.0


@dataclass
class AgentState:
    """Everything the agent decides on. Collections are immutable and replaced, so a shallow copy is a full one."""

    settings: AgentSettings = field(default_factory=AgentSettings)
    node: str = ""
    incarnation: str = ""
    generation: int = 0
    registering: bool = False
    run_id: str = ""
    phase: int = control_pb2.PHASE_UNSPECIFIED
    # The world whose workers this agent started last, and how they fare.
    world: control_pb2.World | None = None
    started: int = 0
    workers: Workers = Workers.NONE
    outcome: Outcome = Outcome.NONE
    exits: tuple[tuple[int, int], ...] = ()
    drained_ranks: frozenset[int] = frozenset()
    drained: control_pb2.CheckpointRef | None = None
    step: int = 0
    loss: float = 0.0
    longest: float = 0.0
    saved_bytes: int = 0
    has_session: bool = False
    agreed: bool = False
    anyone_sees_master: bool = False
    bad_reported: bool = False
    # The flags as the workers were told last.
    told: tuple[bool, bool] = (False, False)
    drain_ordered: bool = False
    drain_for_outage: bool = False
    # What this agent prepares or has sent a Join for: (round, resume digest, patient).
    joining: tuple[int, str, bool] | None = None
    gather: control_pb2.Gather | None = None
    wait: control_pb2.Wait | None = None
    wait_said: str = ""
    warm: bool = False
    # Manifests being read before their commit is sent; a drain is reported after them.
    reading: frozenset[str] = frozenset()
    lease: int = 0
    verified: int = 0
    pruning: tuple[str, ...] = ()
    head: str = ""
    notice: int = 0
    # A directive has come in before.
    directed: bool = False
    link_up: bool = True
    link_lost_at: float | None = None
    leaving: bool = False
    # Workers were running when the notice came: without their save the run goes back to its last commit.
    unsaved: bool = False
    leave_deadline: float | None = None
    release_deadline: float | None = None
    fenced: bool = False
    ended: bool = False
    wake: float | None = None


def fresh(settings: AgentSettings) -> AgentState:
    """The state of an agent that has just started."""
    return AgentState(settings=settings)


def handle(state: AgentState, event: ev.Event, now: float) -> tuple[AgentState, list[ev.Action]]:
    """One step of the agent. `now` is monotonic seconds. Returns the new state and what to do, in order."""
    turn = _Turn(copy.copy(state), now)
    if not state.ended:
        turn.take(event)
    return turn.state, turn.actions


class _Turn:
    """One event's worth of deciding: a private copy of the state, and the actions so far."""

    def __init__(self, state: AgentState, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[ev.Action] = []

    def do(self, *actions: ev.Action) -> None:
        self.actions.extend(actions)

    def call(self, method: str, request: object) -> None:
        self.do(ev.Call(method, request))  # type: ignore[arg-type]

    def caller(self, epoch: int | None = None) -> control_pb2.Caller:
        return control_pb2.Caller(epoch=self.state.started if epoch is None else epoch)

    def take(self, event: ev.Event) -> None:
        match event:
            case ev.Started():
                self.register("")
            case ev.Registered():
                self.registered(event)
            case ev.Refused():
                self.exit(ev.EXIT_USAGE, event.detail)
            case ev.Directed():
                self.directed(event.directive)
            case ev.CallFailed():
                self.call_failed(event)
            case ev.LinkChanged():
                self.link_changed(event.up)
            case ev.WorkerSaid():
                self.worker_said(event)
            case ev.WorkerExited():
                self.worker_exited(event)
            case ev.WorkersStopped():
                self.workers_stopped(event.epoch)
            case ev.StartFailed():
                self.start_failed(event)
            case ev.Signalled():
                self.signalled(event.number)
            case ev.StandbyWarm():
                self.standby_warm()
            case ev.JoinPrepared():
                self.join_prepared(event)
            case ev.ManifestRead():
                self.manifest_read(event)
            case ev.ConversionUpdate():
                self.conversion_update(event)
            case ev.VerificationDone():
                self.call(
                    "ReportVerification",
                    control_pb2.VerificationReport(
                        caller=self.caller(), number=event.number, intact=event.intact, message=event.message
                    ),
                )
            case ev.Pruned():
                self.state.pruning = ()
                self.call("ReportPruned", control_pb2.PrunedRequest(caller=self.caller(), refs=event.refs))
            case ev.Tick():
                pass
        if not self.state.ended:
            self.settle()

    # ---- registration and the link ----------------------------------------------------------------------------------

    def register(self, previous: str) -> None:
        self.state.registering = True
        self.do(ev.Register(previous))

    def registered(self, event: ev.Registered) -> None:
        state = self.state
        state.registering = False
        state.fenced = False
        state.incarnation = event.incarnation
        state.node = event.reply.node
        state.run_id = event.reply.run_id
        state.generation = max(state.generation, event.reply.generation)
        state.joining = None
        state.gather = None
        state.wait = None
        if state.warm:
            self.call("ReportWarm", control_pb2.WarmRequest(caller=self.caller()))
        if state.leaving:
            self.call("Leave", control_pb2.LeaveRequest(caller=self.caller(), notice=self.notice_left()))

    def call_failed(self, event: ev.CallFailed) -> None:
        if event.code == "FAILED_PRECONDITION" and event.detail.startswith("fenced"):
            self.become_fenced(event.detail)
        elif event.code in ("UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED"):
            self.kill_workers()
            self.exit(ev.EXIT_USAGE, event.detail)
        # Anything else speaks of a closed epoch or a lost lease: the next directive says what is wanted instead.

    def link_changed(self, up: bool) -> None:
        state = self.state
        if up == state.link_up:
            return
        state.link_up = up
        state.link_lost_at = None if up else self.now
        if up:
            state.drain_for_outage = False
            self.do(ev.Say("the master is back"))
        elif state.workers is Workers.RUNNING:
            self.do(ev.Say("the master cannot be reached; training goes on, and what it must know is kept", True))
        else:
            self.do(ev.Say("the master cannot be reached; this node waits for it", True))

    def become_fenced(self, reason: str) -> None:
        state = self.state
        if state.fenced or state.registering:
            return
        state.fenced = True
        self.do(
            ev.Say(f"this node was declared dead ({reason}); its workers stop and it joins again as a new one", True)
        )
        self.stop_conversion()
        state.joining = None
        state.gather = None
        state.wait = None
        state.reading = frozenset()
        state.pruning = ()
        if state.workers is Workers.RUNNING:
            self.kill_workers()
        elif state.workers is Workers.NONE:
            self.register_again()

    def register_again(self) -> None:
        state = self.state
        state.world = None
        state.drain_ordered = False
        state.outcome = Outcome.STOPPED
        if state.leaving:
            self.exit(ev.EXIT_LEFT_UNSAVED, "left on notice; the run goes on from its last commit")
            return
        self.register(state.incarnation)

    # ---- directives -------------------------------------------------------------------------------------------------

    def directed(self, directive: control_pb2.Directive) -> None:
        state = self.state
        if directive.generation < state.generation or state.fenced or state.registering:
            return
        state.generation = directive.generation
        state.phase = directive.phase
        state.run_id = directive.run_id or state.run_id
        for notice in directive.notices:
            # What happened before this node came is not its news.
            if notice.sequence > state.notice and state.directed:
                self.do(ev.Say(notice.text, notice.warning))
            state.notice = max(state.notice, notice.sequence)
        state.directed = True
        if directive.WhichOneof("order") == "fenced":
            self.become_fenced(directive.fenced.reason)
            return
        self.side_orders(directive)
        match directive.WhichOneof("order"):
            case "run":
                self.ordered_run(directive.run, drain=False)
            case "drain":
                self.ordered_run(directive.drain.run, drain=True)
            case "gather":
                self.ordered_gather(directive.gather)
            case "wait":
                self.ordered_wait(directive.wait)
            case "finish":
                self.ordered_finish(directive.finish)
            case "release":
                self.ordered_release()

    def side_orders(self, directive: control_pb2.Directive) -> None:
        state = self.state
        lease = directive.convert.lease if directive.HasField("convert") else 0
        if lease != state.lease:
            self.stop_conversion()
            if lease and not state.leaving:
                state.lease = lease
                self.call("ClaimConversion", control_pb2.ClaimRequest(caller=self.caller(), lease=lease))
                self.do(ev.StartConversion(directive.convert))
        if directive.HasField("verify") and directive.verify.number > state.verified:
            state.verified = directive.verify.number
            self.do(ev.Verify(directive.verify))
        if directive.prune and not state.pruning:
            state.pruning = tuple(ref.name for ref in directive.prune)
            self.do(ev.Prune(tuple(directive.prune)))
        if directive.HasField("head") and directive.head.ref.digest != state.head:
            state.head = directive.head.ref.digest
            if self.is_rank_zero():
                self.do(ev.WriteLatest(directive.head))

    def ordered_run(self, world: control_pb2.World, drain: bool) -> None:
        state = self.state
        state.gather = None
        state.wait = None
        state.drain_ordered = drain
        if world.epoch <= state.started or state.workers is not Workers.NONE:
            return  # Already running, already ended (and reported), or still stopping: see workers_stopped.
        if state.leaving:
            # The peers wait for ranks that will never start: the sooner this node is seen to go the better.
            self.exit_left()
            return
        self.start(world)

    def start(self, world: control_pb2.World) -> None:
        state = self.state
        state.world = world
        state.started = world.epoch
        state.workers = Workers.RUNNING
        state.outcome = Outcome.NONE
        state.exits = ()
        state.drained_ranks = frozenset()
        state.drained = None
        state.step = world.resume.source.step if world.HasField("resume") else 0
        state.longest = 0.0
        state.saved_bytes = 0
        state.has_session = False
        state.agreed = False
        state.anyone_sees_master = False
        state.bad_reported = False
        state.told = (False, False)
        state.joining = None
        self.do(ev.StartWorkers(world))

    def ordered_gather(self, gather: control_pb2.Gather) -> None:
        state = self.state
        state.gather = gather
        state.wait = None
        state.drain_ordered = False
        if gather.missing and gather.missing != state.wait_said:
            self.do(ev.Say(gather.missing))
        state.wait_said = gather.missing
        if state.workers is Workers.RUNNING:
            self.kill_workers()

    def ordered_wait(self, wait: control_pb2.Wait) -> None:
        state = self.state
        state.gather = None
        state.wait = wait
        state.drain_ordered = False
        if state.workers is Workers.RUNNING:
            self.kill_workers()
        if wait.reason and wait.reason != state.wait_said:
            self.do(ev.Say(wait.reason))
        state.wait_said = wait.reason

    def ordered_finish(self, finish: control_pb2.Finish) -> None:
        if self.state.workers is Workers.RUNNING:
            self.kill_workers()
        if finish.success:
            self.do(ev.MarkFinished(self.state.run_id))
        self.exit(ev.EXIT_FINISHED if finish.success else ev.EXIT_FAILED, finish.message)

    def ordered_release(self) -> None:
        state = self.state
        if state.leaving and state.workers is Workers.NONE:
            self.exit_left()

    # ---- workers ----------------------------------------------------------------------------------------------------

    def is_rank_zero(self) -> bool:
        world = self.state.world
        return world is not None and any(
            member.group_rank == 0 and member.incarnation == self.state.incarnation for member in world.members
        )

    def kill_workers(self) -> None:
        state = self.state
        if state.workers is Workers.RUNNING:
            state.workers = Workers.STOPPING
            self.do(ev.StopWorkers(state.started))

    def stop_conversion(self) -> None:
        if self.state.lease:
            self.do(ev.StopConversion(self.state.lease))
            self.state.lease = 0

    def worker_said(self, event: ev.WorkerSaid) -> None:
        state = self.state
        message = event.message
        body = message.WhichOneof("body")
        if body == "sealed":
            # Worth recording whatever became of these workers since: the master refuses what comes too late.
            state.reading = state.reading | {message.sealed.name}
            self.do(ev.ReadManifest(message.sealed.name, message.sealed.digest))
            return
        if event.epoch != state.started or state.workers is Workers.NONE:
            return
        match body:
            case "hello":
                state.has_session = True
                self.report_progress()
            case "progress":
                self.progress(message.progress)
            case "saving":
                state.saved_bytes = max(state.saved_bytes, message.saving.bytes)
                self.report_progress()
            case "draining":
                state.agreed = True
                self.report_progress()
            case "save_failed":
                self.save_failed(message.save_failed)
            case "drained":
                state.drained_ranks = state.drained_ranks | {event.rank}
                if message.drained.name:
                    state.drained = control_pb2.CheckpointRef(name=message.drained.name, digest=message.drained.digest)
                state.step = max(state.step, message.drained.step)
            case "finished":
                state.step = max(state.step, message.finished.step)
            case "bad_checkpoint":
                self.bad_checkpoint(message.bad_checkpoint)

    def progress(self, progress: worker_pb2.Progress) -> None:
        state = self.state
        if progress.step >= state.step:
            state.step = progress.step
            state.loss = progress.loss
        state.longest = max(state.longest, progress.longest, progress.seconds)
        state.anyone_sees_master = progress.anyone_sees_master
        self.report_progress()

    def report_progress(self) -> None:
        state = self.state
        self.call(
            "ReportProgress",
            control_pb2.ProgressRequest(
                caller=self.caller(),
                step=state.step,
                loss=state.loss,
                draining=state.agreed,
                has_session=state.has_session,
                longest=state.longest,
                saved_bytes=state.saved_bytes,
            ),
        )

    def save_failed(self, failed: worker_pb2.SaveFailed) -> None:
        self.state.agreed = False
        self.state.saved_bytes = 0
        if self.is_rank_zero():
            self.do(
                ev.Say(f"saving {failed.name} failed ({failed.reason}); training goes on, the last commit stands", True)
            )
        if failed.drain:
            self.call("ReportSaveFailed", control_pb2.SaveFailedRequest(caller=self.caller(), reason=failed.reason))

    def bad_checkpoint(self, bad: worker_pb2.BadCheckpoint) -> None:
        if self.state.bad_reported:
            return
        self.state.bad_reported = True
        self.do(ev.Say(f"checkpoint {bad.name} cannot be loaded: {bad.file}: {bad.message}", True))
        self.call(
            "ReportBadCheckpoint",
            control_pb2.BadCheckpointRequest(
                caller=self.caller(),
                ref=control_pb2.CheckpointRef(name=bad.name, digest=bad.digest),
                form=control_pb2.FORM_UNIVERSAL if bad.form == control_pb2.FORM_UNIVERSAL else control_pb2.FORM_SHARDED,
                file=bad.file,
                message=bad.message,
            ),
        )

    def worker_exited(self, event: ev.WorkerExited) -> None:
        state = self.state
        if event.epoch != state.started or state.workers is not Workers.RUNNING:
            return
        state.exits = (*state.exits, (event.local_rank, event.code))
        drained = event.code == ev.WORKER_DRAINED or (event.code == 0 and self.has_drained(event.local_rank))
        if event.code != 0 and not drained:
            self.worker_failed(event)
        elif len(state.exits) == state.settings.nproc:
            self.workers_ended()

    def has_drained(self, local_rank: int) -> bool:
        """Whether this rank said that it drained, whatever exit status the script made of it."""
        world = self.state.world
        if world is None:
            return False
        first = 0
        for member in sorted(world.members, key=lambda m: m.group_rank):
            if member.incarnation == self.state.incarnation:
                return first + local_rank in self.state.drained_ranks
            first += member.nproc
        return False

    def worker_failed(self, event: ev.WorkerExited) -> None:
        state = self.state
        state.outcome = Outcome.FAILED
        if event.code == ev.WORKER_BAD_CHECKPOINT and state.bad_reported:
            self.kill_workers()
            return
        how = f"was killed by signal {-event.code}" if event.code < 0 else f"exited with code {event.code}"
        text = f"local rank {event.local_rank} {how}" + (f": {event.message}" if event.message else "")
        self.report_failure(text, event.code & 0xFF)
        self.kill_workers()

    def report_failure(self, text: str, code: int) -> None:
        self.call(
            "ReportFailure",
            control_pb2.FailureRequest(
                caller=self.caller(),
                kind=control_pb2.FAILURE_KIND_WORKER,
                exit_code=code,
                message=text,
                step=self.state.step,
            ),
        )

    def start_failed(self, event: ev.StartFailed) -> None:
        state = self.state
        if event.epoch != state.started or state.workers is not Workers.RUNNING:
            return
        state.outcome = Outcome.FAILED
        self.report_failure(event.message, 1)
        self.kill_workers()

    def workers_ended(self) -> None:
        """Every rank of this node ended without an error: drained if any of them drained, else finished."""
        state = self.state
        state.workers = Workers.NONE
        codes = [code for _, code in state.exits]
        drained = ev.WORKER_DRAINED in codes or any(self.has_drained(rank) for rank, _ in state.exits)
        state.outcome = Outcome.DRAINED if drained else Outcome.FINISHED

    def workers_stopped(self, epoch: int) -> None:
        state = self.state
        if epoch != state.started or state.workers is not Workers.STOPPING:
            return
        state.workers = Workers.NONE
        if state.outcome is Outcome.NONE:
            state.outcome = Outcome.STOPPED
        if state.fenced:
            self.register_again()

    # ---- joining ----------------------------------------------------------------------------------------------------

    def standby_warm(self) -> None:
        if not self.state.warm:
            self.state.warm = True
            if self.state.incarnation and not self.state.registering:
                self.call("ReportWarm", control_pb2.WarmRequest(caller=self.caller()))

    def prepare_join(self) -> None:
        """Answers the present Gather or Wait, once, when there is nothing of ours running any more."""
        state = self.state
        if state.workers is not Workers.NONE or state.leaving or state.fenced or state.registering:
            return
        if state.outcome is Outcome.DRAINED and state.reading:
            return  # The commit goes first.
        wanted: tuple[int, str, bool] | None = None
        resume: control_pb2.CheckpointRef | None = None
        if state.gather is not None:
            resume = state.gather.resume if state.gather.HasField("resume") else None
            wanted = (state.gather.round, resume.digest if resume else "", False)
        elif state.wait is not None and (state.wait.round or state.wait.HasField("look_for")):
            resume = state.wait.look_for if state.wait.HasField("look_for") else None
            wanted = (state.wait.round, resume.digest if resume else "", resume is not None)
        if wanted is not None and wanted != state.joining:
            state.joining = wanted
            self.do(ev.PrepareJoin(wanted[0], resume, patient=wanted[2]))

    def join_prepared(self, event: ev.JoinPrepared) -> None:
        state = self.state
        if state.joining is None or (event.round, event.resume_digest) != state.joining[:2]:
            return
        if state.leaving or state.fenced or state.registering:
            return
        self.call(
            "Join",
            control_pb2.JoinRequest(
                caller=self.caller(),
                round=event.round,
                resume=control_pb2.CheckpointRef(digest=event.resume_digest),
                store_host=event.store_host,
                store_port=event.store_port,
                probe=event.probe,
                inventory=event.inventory,
            ),
        )

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def manifest_read(self, event: ev.ManifestRead) -> None:
        state = self.state
        state.reading = state.reading - {event.name}
        if event.checkpoint is None:
            self.do(ev.Say(f"checkpoint {event.name} cannot be recorded: {event.message}", True))
            return
        self.call(
            "CommitCheckpoint",
            control_pb2.CommitRequest(caller=self.caller(event.checkpoint.epoch), checkpoint=event.checkpoint),
        )

    def conversion_update(self, event: ev.ConversionUpdate) -> None:
        state = self.state
        if event.lease != state.lease:
            return
        if event.state == control_pb2.CONVERSION_STATE_READY and event.checkpoint is not None:
            self.call(
                "CommitCheckpoint",
                control_pb2.CommitRequest(caller=self.caller(), checkpoint=event.checkpoint, lease=event.lease),
            )
        self.call(
            "ReportConversion",
            control_pb2.ConversionReport(
                caller=self.caller(),
                lease=event.lease,
                state=event.state,
                files_done=event.files_done,
                files_total=event.files_total,
                message=event.message,
            ),
        )

    # ---- leaving ----------------------------------------------------------------------------------------------------

    def notice_left(self) -> float:
        deadline = self.state.leave_deadline
        return max(0.0, deadline - self.now) if deadline is not None else 0.0

    def signalled(self, number: int) -> None:
        state = self.state
        name = signal.Signals(number).name
        if state.leaving:
            self.do(ev.Say(f"{name} again: this node goes at once"))
            self.kill_workers()
            self.exit(ev.EXIT_LEFT_UNSAVED, "left without waiting for a save")
            return
        state.leaving = True
        state.leave_deadline = self.now + state.settings.drain_timeout
        state.unsaved = state.fenced or state.workers is Workers.RUNNING
        self.stop_conversion()
        if state.workers is Workers.RUNNING:
            self.do(ev.Say(f"{name}: saving at the next step boundary, then leaving"))
        else:
            self.do(ev.Say(f"{name}: leaving"))
        if state.incarnation and not state.registering and not state.fenced:
            self.call("Leave", control_pb2.LeaveRequest(caller=self.caller(), notice=state.settings.drain_timeout))
        else:
            self.exit_left()

    def exit_left(self) -> None:
        state = self.state
        nothing_made = state.world is None or state.step <= state.world.resume.source.step
        # A rank says that it drained only once everything is sealed, even if its exit was not seen any more.
        saved = state.drained is not None or state.outcome in (Outcome.DRAINED, Outcome.FINISHED)
        if not state.unsaved or nothing_made or saved:
            self.exit(ev.EXIT_LEFT, "left on notice; everything is saved")
        else:
            self.exit(ev.EXIT_LEFT_UNSAVED, "left on notice without a save; the run goes on from its last commit")

    def exit(self, code: int, message: str) -> None:
        self.stop_conversion()
        self.state.ended = True
        self.do(ev.Exit(code, message))

    # ---- what follows from the state, after every event --------------------------------------------------------------

    def settle(self) -> None:
        self.state.wake = None
        self.report_ended()
        self.prepare_join()
        self.check_outage()
        self.check_leave()
        if not self.state.ended:
            self.tell_workers()

    def wake_at(self, when: float) -> None:
        if self.state.wake is None or when < self.state.wake:
            self.state.wake = when

    def report_ended(self) -> None:
        """Says once that all ranks of this node drained or finished, after the commit of what they saved last."""
        state = self.state
        if state.workers is not Workers.NONE or state.reading or not state.exits:
            return
        if state.outcome is Outcome.FINISHED:
            self.call("ReportFinished", control_pb2.FinishedRequest(caller=self.caller(), step=state.step))
        elif state.outcome is Outcome.DRAINED:
            self.call(
                "ReportDrained",
                control_pb2.DrainedRequest(caller=self.caller(), checkpoint=state.drained, step=state.step),
            )
        state.exits = ()
        if state.outcome is Outcome.DRAINED and state.leaving and state.release_deadline is None:
            state.release_deadline = self.now + state.settings.release_timeout

    def check_outage(self) -> None:
        """A node that alone is cut off from the master drains; where nobody hears it, training goes on."""
        state = self.state
        if state.link_lost_at is None or state.workers is not Workers.RUNNING or state.drain_for_outage:
            return
        due = state.link_lost_at + state.settings.master_outage_timeout
        if self.now < due:
            self.wake_at(due)
        elif state.anyone_sees_master:
            state.drain_for_outage = True
            self.do(ev.Say("only this node is cut off from the master: it drains and waits", True))

    def check_leave(self) -> None:
        state = self.state
        if not state.leaving:
            return
        if state.workers is Workers.NONE:
            if state.reading and self.now < (state.leave_deadline or 0.0):
                self.wake_at(state.leave_deadline or self.now)
                return
            if state.release_deadline is None:
                state.release_deadline = self.now + state.settings.release_timeout
            if self.now >= state.release_deadline or not state.link_up:
                self.exit_left()
            else:
                self.wake_at(state.release_deadline)
        elif state.leave_deadline is not None:
            if self.now >= state.leave_deadline:
                self.kill_workers()
                state.outcome = Outcome.STOPPED
            else:
                self.wake_at(state.leave_deadline)

    def tell_workers(self) -> None:
        state = self.state
        if state.workers is not Workers.RUNNING:
            return
        flags = (state.leaving or state.drain_ordered or state.drain_for_outage, state.link_up)
        if flags != state.told:
            state.told = flags
            self.do(ev.TellWorkers(*flags))
