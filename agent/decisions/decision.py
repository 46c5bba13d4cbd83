"""The handling of one event: a private copy of the state, the actions so far, and the verbs that all parts share."""

from __future__ import annotations

import math

from google.protobuf.message import Message

from dalsegno.protos import control_pb2
from dalsegno.protos.text import one_line

from . import events as ev
from .last_copy import drained_into, goes_with_it, has_sealed, is_copied, needed, outlives_it
from .state import Admission, AgentState, Errands, Leave, Outcome, Workers

# Seconds from SIGKILL until workers count as gone, whatever is heard of them. Longer than the shell takes to report it,
# even for processes stuck in the kernel, and longer than torchrun takes to end its own.
STOP_PATIENCE_SECONDS = 45.0
# Seconds without an answer, of the directory or to the first registration, after which people are told.
SILENCE_SECONDS = 5.0
# What a leaver had in memory alone, for a person.
ONLY_HERE = "nobody had said that others hold what it had in memory; the run goes on from what they have"
# It could not bring that to the disk, and no master was heard.
NOT_ON_DISK = (
    "what it had in memory is not on the disk, and who holds a copy may leave, too; the run goes on from what others"
    " have, or its last commit"
)
# What a call says for people, and the most characters of that.
_TEXTS, _LONGEST = frozenset({"failure", "file", "message", "reason", "text"}), 4000


class Decision:
    """The state as it will be, and the actions in order."""

    def __init__(self, state: AgentState, now: float) -> None:
        self.state = state
        self.now = now
        self.actions: list[ev.Action] = []

    def do(self, *actions: ev.Action) -> None:
        self.actions.extend(actions)

    def call(self, method: str, request: Message) -> None:
        """Orders a call to the master. What somebody else wrote may be megabytes long, more than it takes."""
        for name in _TEXTS & set(request.DESCRIPTOR.fields_by_name):
            text = getattr(request, name)
            if isinstance(text, str) and len(text) > _LONGEST:
                setattr(request, name, one_line(text, _LONGEST))
        self.do(ev.Call(method, request))

    def caller(self, epoch: int | None = None) -> control_pb2.Caller:
        return control_pb2.Caller(epoch=self.state.started if epoch is None else epoch)

    def wake_at(self, when: float) -> None:
        if self.state.wake is None or when < self.state.wake:
            self.state.wake = when

    def register(self, previous: str) -> None:
        """Registers under the user's name, the node's earlier name, or one that the master gives."""
        if self.state.door.moved is not None:
            self.do(ev.MoveTo(self.state.door.moved[1]))
        self.state.door.registering, self.state.door.moved = True, None
        self.state.door.answer_deadline = None
        self.state.door.look_told_at = None if previous else self.now + SILENCE_SECONDS
        self.do(ev.Register(previous, self.state.settings.node_name or self.state.node))

    def register_again(self) -> None:
        """Registers anew after having been fenced: everything of the old incarnation is void."""
        state = self.state
        nothing_made = state.epoch.counted and has_made_nothing(state)
        if had_workers(state) and not (is_saved(state) or nothing_made):
            self.exit(ev.EXIT_LEFT_UNSAVED, "left on notice; the run goes on from its last commit")
            return
        if state.leaving:
            self.exit_left()
            return
        state.world = None
        state.drain = None
        state.epoch.outcome = Outcome.STOPPED
        self.register(state.incarnation)

    def become_fenced(self, reason: str) -> None:
        """This incarnation was declared dead: stop everything, then register anew."""
        self.start_anew(f"this node was declared dead ({reason}); its workers stop and it joins again as a new one")

    def start_anew(self, why: str) -> None:
        """This incarnation cannot go on: stops everything, then registers anew. `why` is for people."""
        state = self.state
        if state.fenced or state.door.registering:
            return
        state.fenced = True
        self.do(ev.Say(why, True))
        self.stop_conversion()
        state.place, state.errands = Admission(), Errands()
        if state.workers is Workers.RUNNING:
            self.kill_workers()
        elif state.workers is Workers.NONE:
            self.register_again()

    def is_rank_zero(self) -> bool:
        """Whether this node has group rank 0 in the world that it last started."""
        world = self.state.world
        return world is not None and world.place.incarnation == self.state.incarnation and world.place.group_rank == 0

    def kill_workers(self) -> None:
        """Kills the workers without grace, because they are stuck in a collective anyway."""
        self.stop_workers(0.0)

    def stop_workers(self, grace: float, still: float = math.inf, ask: str = "", *, work: bool = False) -> None:
        """Gives this node's ranks SIGTERM and `grace` seconds; 0 kills at once. For the rest see `StopWorkers`."""
        state = self.state
        if state.workers is Workers.RUNNING:
            state.workers, state.stop_granted = Workers.STOPPING, False
            state.stop_deadline = self.now + grace + state.settings.save_timeout + STOP_PATIENCE_SECONDS
            self.do(ev.StopWorkers(state.started, grace, still, may_save(state), ask, work))

    def stop_conversion(self) -> None:
        if self.state.lease:
            self.do(ev.StopConversion(self.state.lease))
            self.state.lease = 0

    def report_progress(self) -> None:
        """Reports what this node's ranks have done so far; only the newest report matters."""
        state = self.state
        problems = [f"{why} (rank {rank})" for rank, why in sorted(state.epoch.saving.problems.items()) if why]
        self.call(
            "ReportProgress",
            control_pb2.ProgressRequest(
                caller=self.caller(),
                step=state.epoch.step,
                loss=state.epoch.loss,
                draining=state.epoch.agreed,
                has_session=state.epoch.has_session,
                longest=state.epoch.longest_seconds,
                saved_bytes=state.epoch.saved_bytes,
                training_ended=bool(state.epoch.finished_ranks),
                beats=sum(state.epoch.beats.values()),
                written_bytes=max(state.epoch.saving.written_bytes.values(), default=0),
                expects_session=state.epoch.expects_session,
                saves_nothing=state.epoch.saves_nothing,
                cold=not state.epoch.warm,
                started_seconds=state.epoch.start.session_seconds,
                loaded_seconds=state.epoch.start.loaded_seconds,
                save_problem=problems[0] if problems else "",
                flash_step=state.epoch.flash_part.step if state.epoch.flash_part is not None else None,
            ),
        )

    def notice_left(self) -> float:
        leave = self.state.leave
        return max(0.0, leave.deadline - self.now) if leave is not None else 0.0

    def exit_left(self) -> None:
        """Exits with the code that says whether everything is saved."""
        unsaved, leave = what_is_unsaved(self.state), self.state.leave
        self.say_goodbye()
        if leave is not None and leave.stop:
            # Not the code of a node that left: no supervisor is to start what somebody has stopped.
            self.exit(
                ev.EXIT_FAILED, f"the job was stopped by order; {unsaved or what_is_safe(self.state)}", final=True
            )
        elif leave is not None and leave.refused:
            why = "the master refuses this token; start this again with the present one"
            self.exit(ev.EXIT_USAGE, f"{why}; {unsaved or what_is_safe(self.state)}")
        elif unsaved:
            self.exit(ev.EXIT_LEFT_UNSAVED, f"{how_it_left(leave)}; {unsaved}")
        else:
            self.exit(ev.EXIT_LEFT, f"{how_it_left(leave)}; {what_is_safe(self.state)}")

    def say_goodbye(self) -> None:
        """Tells the master that this node is gone, so that nobody waits for a node-timeout to be sure of that."""
        state = self.state
        ours = bool(state.incarnation) and not (state.door.registering or state.fenced)
        if ours and state.contact.up and state.workers is Workers.NONE:
            self.call("Leave", control_pb2.LeaveRequest(caller=self.caller(), gone=True))

    def exit(self, code: int, message: str, *, final: bool = False) -> None:
        """The last action of this agent. `final`: see `ev.Exit`."""
        self.stop_conversion()
        self.state.ended = True
        self.do(ev.Exit(code, message, final))


def how_it_left(leave: Leave | None) -> str:
    """Whether a signal, somebody's order or this node itself made it go, for a person."""
    if leave is not None and leave.unfit:
        return "left, as no workers can be started here"
    return "left on notice" if leave is None or leave.signalled else "left by order"


def may_save(state: AgentState) -> bool:
    """Whether what the workers leave in memory is still the newest of the run: nobody has gone on without this node."""
    alone = state.world is not None and state.world.nodes == 1
    return not state.fenced and state.open_epoch <= state.started and (state.contact.up or alone)


def is_saved(state: AgentState) -> bool:
    """Whether the ranks that this node ran last left everything saved, or finished.

    A rank names the checkpoint of its drain only once that is sealed, even if its exit was not seen; a rank that
    drained without a name had nothing that saves. If no rank could say so in time, the commit of the boundary counts,
    or a sealed checkpoint that waits for a master.
    """
    epoch = state.epoch
    if epoch.refused:
        return False
    if epoch.drained is not None and 0 < epoch.step <= epoch.durable_step:
        return True
    if epoch.drained is not None and epoch.drained_in_memory:
        leave = state.leave
        # Released behind its drain, and not recorded: some other part of it was lost.
        counts = state.phase == control_pb2.PHASE_DRAINING or epoch.committed_step >= epoch.step
        if outlives_it(state, epoch.drained.digest):
            return True
        return leave is not None and ((leave.released and counts) or has_sealed(leave, epoch.drained))
    if epoch.drained is not None:
        return True
    if epoch.outcome is Outcome.FINISHED:
        # They may have left their loop right behind a save, which is still on its way from memory to the disk.
        return not goes_with_it(state)
    return epoch.agreed and 0 < epoch.step <= max(epoch.committed_step, 0 if state.contact.up else epoch.sealed_step)


def leaves_it_to_others(state: AgentState) -> bool:
    """Whether the ranks have written their part and gone, as they were told, and another node is to seal the save."""
    epoch = state.epoch
    return (
        epoch.outcome is Outcome.DRAINED
        and epoch.drained is None
        and epoch.told[2] == control_pb2.ENDING_WRITE
        and not is_saved(state)
    )


def awaits_its_commit(state: AgentState) -> bool:
    """Whether these ranks have sealed what they leave with, and the master has not yet said that it is recorded."""
    epoch = state.epoch
    if epoch.answered:
        return epoch.committed_step < epoch.sealed_step
    return epoch.agreed and epoch.committed_step < epoch.step <= epoch.sealed_step


def has_made_nothing(state: AgentState) -> bool:
    """Whether no step was made since the resume point. Every step is heard only if the script has a session.

    A resume point with a place in the data is a session's: before that is opened again, nothing is trained.
    """
    if state.world is None:
        return True
    resume = state.world.resume.source
    has_session = state.session_known or resume.position.ByteSize() > 0
    return has_session and state.epoch.step <= resume.step


def had_workers(state: AgentState) -> bool:
    """Whether ranks were running when the notice came."""
    return state.leave is not None and state.leave.unsaved


def had_something_to_save(state: AgentState) -> bool:
    """Whether ranks were running when the notice came, or had left in memory what perhaps nobody else has."""
    in_memory = bool(drained_into(state)) or goes_with_it(state)
    return had_workers(state) or state.epoch.refused or in_memory


def what_is_unsaved(state: AgentState) -> str:
    """What a leaver leaves unsaved behind, for a person; empty if nothing."""
    if is_saved(state):
        return ""
    if goes_with_it(state):
        return what_goes_with_it(state)
    if has_made_nothing(state) or not had_something_to_save(state):
        return ""
    if 0 < state.epoch.step <= state.epoch.flash_step:
        return ""
    if state.epoch.flash_step:
        return f"its script's Flash Checkpoint is saved as of step {state.epoch.flash_step}; later steps are not"
    if state.epoch.refused:
        return "the others had gone on from the last commit before this save was complete"
    if state.epoch.answered:
        return ""
    if spilled(state):
        return (
            "its ranks failed before they had saved; the run goes on from what was in memory here, which is on the disk"
        )
    if state.epoch.outcome is Outcome.FAILED and state.memory.in_use and not state.epoch.agreed:
        return "its ranks failed before they had saved; the run goes on from its last commit, or what others hold"
    if not state.session_known:
        return "its workers had no session open: what their script saves by itself is all that is kept"
    if state.epoch.agreed and state.epoch.outcome is Outcome.STOPPED:
        return f"its notice was over before everything was saved; {who_completes(state)}"
    if leaves_it_to_others(state):
        return f"its part of the last save is written; {who_completes(state)}"
    if state.epoch.drained is not None and state.epoch.drained_in_memory:
        return what_goes_with_it(state)
    if state.epoch.outcome is Outcome.DRAINED:
        return f"its script saved nothing (steps() has no save=); the run goes on from {last_commit(state)}"
    return f"nothing was saved in time; the run goes on from {last_commit(state)}"


def last_commit(state: AgentState) -> str:
    """The run's last commit, with its step where this node knows it, for a person.

    One that is in memory alone may go with this node, and one that was sealed here may be recorded by now or not.
    """
    source = None if state.world is None else state.world.resume.source
    began, epoch = 0 if source is None else source.step, state.epoch
    on_disk = max(epoch.durable_step, 0 if source is None or source.in_memory else began)
    # While no master is heard, others may have saved more.
    sure = state.contact.up and 0 < max(epoch.committed_step, epoch.sealed_step, began) <= on_disk
    return f"its last commit, of step {on_disk}" if sure else "its last commit, if it has one"


def what_goes_with_it(state: AgentState) -> str:
    """Why what this leaver has in memory may be lost, for a person."""
    ref = needed(state)
    return NOT_ON_DISK if ref is not None and is_copied(state, ref.digest) else ONLY_HERE


def spilled(state: AgentState) -> bool:
    """Whether this leaver has written to the disk what failed ranks had left in its memory."""
    spill = state.leave.spill if state.leave is not None else None
    return spill is not None and spill.sealed and state.epoch.drained is None


def who_completes(state: AgentState) -> str:
    """What becomes of a save that a leaver had to leave, for a person; the leaver is gone when that is decided."""
    if state.drain is None or not state.drain.all_leave:
        follows = "the others complete the save if this node's part of it is there"
    elif state.world is not None and state.world.nodes == 1:
        follows = "the run goes on from its last commit"
    else:
        follows = "all other nodes leave, too: unless one completes the save, the run goes on from its last commit"
    return f"{follows} (--drain-timeout says how long a notice is)"


def what_is_safe(state: AgentState) -> str:
    """Why a leaver leaves nothing unsaved behind, for a person."""
    if state.epoch.outcome is Outcome.FINISHED:
        return "its part of the run is finished"
    if is_saved(state):
        return "everything is saved"
    if spilled(state):
        return "what was in memory here is on the disk"
    if state.epoch.flash_step:
        return f"its script's Flash Checkpoint is saved as of step {state.epoch.flash_step}"
    if state.epoch.answered:
        return "its script was asked to save, and what it saved is taken"
    return "no step was made here that could be lost" if had_workers(state) else "no workers were running here"
