"""The master's brain: `handle_all(state, events, now) -> (state, replies)`. No I/O, no clock, no randomness.

The same brain runs in the server, in the unit tests and in the simulator. It consumes the state that it gets: go on
with the state that it returns. The shell persists `state.job` before any reply or directive leaves, and sends each
watcher `view(state, node)` whenever that changed; there are no other effects.

What every node sends all the time (heartbeats, progress) is only noted (`note`), at a constant cost: it is not stored,
and mostly it has no consequence. Everything else is decided on in batches: each event changes what it is about, and
then the state and the time are looked at once (`settle`).

An event that breaks an assertion is set aside: the job goes on from the state before, and people are told once.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence

from dalsegno.protos.processes import Process
from dalsegno.protos.text import one_line

from . import beside, calls, durable, forming, growing, liveness, membership, orders, remarks, running, unfetched, waits
from .events import Called, Event, Reply, StreamClosed, StreamOpened, Tick
from .invariants import check
from .live import ConversionLife, DrainLife, EpochLife, LeaseLife, Live, Pause, State, VerificationLife
from .presences import Presence, Presences
from .recollection import lose_ahead
from .shown import status
from .state import Job, Phase, Settings
from .turn import CLOSED_GRACE_SECONDS, Turn, heartbeat_of
from .views import view

__all__ = ("Reply", "fresh", "handle", "handle_all", "held_up", "note", "recover", "status", "view")

# The most transitions within one settling; more means that two rules undo each other. It does not depend on the nodes.
MAX_MOVES = 50
# Seconds by which the next Tick is put off after a Tick was set aside: at first, and at most.
TICK_PAUSE_SECONDS = 1.0
MAX_TICK_PAUSE_SECONDS = 60.0
# The most characters, and the most internal errors, that people are told of.
LONGEST_FAULT = 300
MOST_FAULTS = 100


def fresh(job_id: str, generation: int, settings: Settings | None = None, embedded: bool = False) -> State:
    """The state of a new job. `settings` fixes min and max nodes for all agents."""
    job = Job(job_id=job_id, generation=generation, embedded=embedded)
    if settings is not None:
        job.settings = settings
        job.fixed_nnodes = True
    return State(job)


def recover(
    job: Job,
    generation: int,
    now: float,
    is_gone: Callable[[Process], bool] = lambda process: False,
    unix_offset: float = 0.0,
) -> State:
    """The state of a stored job: every deadline starts anew, every node is presumed alive for one node-timeout.

    `is_gone`: whether an agent's process is provably gone; then its node is dead at once.
    """
    job.generation = max(job.generation + 1, generation)
    if job.phase.is_terminal:
        # An agent that still asks registers anew and is told how it ended.
        for name in list(job.nodes):
            job.nodes.drop(name)
    live = Live(phase_since=now, phase_heard=now, last_arrival=now, unix_offset=unix_offset, earlier=job.sequence)
    live.held_until = {name: now + pause for name, pause in job.holds.items()}
    # No name counts as lost lately; from now on losses are counted again.
    live.lost_at = {name: [now - membership.LOSS_WINDOW_SECONDS] for name in job.losses}
    live.grow_hold_until = now + growing.growth_hold(job.conversion_failures)
    live.conversion = ConversionLife(LeaseLife(now), retry_at=now)
    live.verification = VerificationLife(now)
    if job.run.growths:
        live.run.growth_done_at = now
    if job.phase.has_workers or job.phase is Phase.FORMING:
        live.pause = Pause(now, costs_more=True)
    if len(job.nodes):
        # While none of those on the record is heard this master may be the one that is away, as after any word.
        live.clock.word(now, job.settings.node_timeout, heartbeat_of(job))
    state = State(job, live)
    fit(state, now)
    gone = [node for node in job.nodes.values() if node.process is not None and is_gone(node.process)]
    membership.lose(Turn(state, now), [(node, "its process was gone when the master came back") for node in gone])
    guarded(state, [], now)
    return state


def fit(state: State, now: float) -> None:
    """Makes the parts that are not stored match the job: exactly its nodes, its epoch and its drain."""
    job, live = state.job, state.live
    heard = live.clock.at(now)
    known, live.nodes = live.nodes, Presences()
    for name in job.nodes:
        live.nodes.add(name, known.get(name) or Presence(heard, now - live.stood_seconds))
    for name, node in job.nodes.items():
        if node.joined is not None and live.nodes[name].joined is None:
            live.nodes[name].joined = heard
    epoch = job.world.epoch if job.world is not None else 0
    if live.epoch.epoch != epoch or now == live.phase_since:
        live.epoch = EpochLife(epoch=epoch, opened=heard, is_taken_over=True, moved=heard)
    if job.drain is None:
        live.epoch.drain = None
    elif live.epoch.drain is None:
        live.epoch.drain = DrainLife(heard + job.settings.drain_timeout)


def handle(state: State, event: Event, now: float) -> tuple[State, list[Reply]]:
    """Handles one event. `now` is monotonic seconds. Returns exactly one reply for a `Called`, none otherwise."""
    state, replies = handle_all(state, [event], now)
    return state, [reply for reply in replies if reply is not None]


def handle_all(
    state: State, events: Sequence[Event], now: float, keep: Callable[[Job], None] | None = None
) -> tuple[State, list[Reply | None]]:
    """Handles a batch of events that came in until `now`. One reply for each `Called`, None for the others.

    `keep` prepares the state for storing. An exception of it counts as a fault of the event that led there.
    """
    return state, guarded(state, events, now, keep)


def note(state: State, message: calls.Noted, now: float) -> tuple[Reply, bool]:
    """Notes a heartbeat or a progress report. Returns the reply, and whether the state must be settled."""
    return calls.take_note(Turn(state, now), message)


def held_up(state: State, seconds: float, now: float) -> None:
    """Notes that the master's own loop stood still for `seconds` until now: that time does not count as listened."""
    state.live.clock.held_up(seconds, state.job.settings.node_timeout)
    state.live.stood_seconds += seconds


def guarded(
    state: State, events: Sequence[Event], now: float, keep: Callable[[Job], None] | None = None
) -> list[Reply | None]:
    """Decides on all events at once. If that fails, on one at a time; an event that fails by itself is set aside."""
    before, wake = state.job.copy(), state.wake
    try:
        turn = Turn(state, now)
        replies = [apply(turn, event) for event in events]
        settle(turn)
        if keep is not None:
            keep(state.job)
    except Exception as error:
        state.job, state.wake = before, wake
        fit(state, now)
        if len(events) > 1:
            return [guarded(state, [event], now, keep)[0] for event in events]
        return [set_aside(state, events[0] if events else Tick(), error, now)]
    state.live.tick_pause_seconds = 0.0
    return replies


def set_aside(state: State, event: Event, error: Exception, now: float) -> Reply | None:
    """Gives up an event that broke the brain: it has no effect. People are told once; the shell logs the details."""
    live = state.live
    state.faults.append("".join(traceback.format_exception(error)))
    what = type(event.message).__name__ if isinstance(event, Called) else type(event).__name__
    why = one_line(str(error) or type(error).__name__, LONGEST_FAULT)
    text = f"the master has an internal error ({what}: {why}): it is set aside, the job goes on"
    if text not in live.said and len(live.said) < MOST_FAULTS:
        live.said.add(text)
        Turn(state, now).notice(text, True)
    # What is due is tried again, but later, because it would fail again now.
    live.tick_pause_seconds = min(MAX_TICK_PAUSE_SECONDS, 2 * live.tick_pause_seconds or TICK_PAUSE_SECONDS)
    state.wake = now + live.tick_pause_seconds
    if isinstance(event, Called):
        return Reply("INTERNAL", f"the master failed on this call: {why}", None)
    return None


def apply(turn: Turn, event: Event) -> Reply | None:
    """Applies the direct change of one event."""
    job, live = turn.job, turn.live
    if isinstance(event, Called):
        reply = calls.answer(turn, event.message)
        # Hearing an agent may have set the clock going again.
        turn.heard = live.clock.at(turn.now)
        return reply
    if isinstance(event, StreamOpened):
        node = job.node_by(event.incarnation)
        if node is not None:
            live.nodes.open(node.name)
            membership.hear(turn, node)
    elif isinstance(event, StreamClosed):
        node = job.node_by(event.incarnation)
        if node is not None:
            live.nodes.close(node.name, turn.heard)
    return None


def settle(turn: Turn) -> None:
    """Applies what the state and the time call for until nothing changes."""
    for _ in range(MAX_MOVES):
        turn.state.wake = None
        waits.begin_look(turn)
        remarks.tend(turn)
        liveness.look_at_streams(turn)
        moved = (
            lose_ahead(turn)
            or release_leavers(turn)
            or liveness.check_liveness(turn)
            or orders.look_at_stop(turn)
            or transition(turn)
        )
        if not moved:
            check(turn.state)
            forming.say_missing(turn)
            waits.end_look(turn)
            return
    raise AssertionError(f"the brain does not come to rest in phase {turn.job.phase.value}")


def transition(turn: Turn) -> bool:
    """Applies one step of what the phase, the state and the time call for. Returns whether anything changed."""
    phase = turn.job.phase
    durable.tend(turn)
    unfetched.tend(turn)
    if not phase.is_terminal:
        beside.tend(turn)
    if phase in (Phase.WAITING, Phase.FORMING):
        return forming.forming(turn)
    if phase is Phase.RUNNING:
        return running.running(turn)
    if phase is Phase.DRAINING:
        return running.draining(turn)
    return False


def release_leavers(turn: Turn) -> bool:
    """Removes leavers that have no ranks to wait for and whose streams are closed."""
    gone = []
    for node in turn.job.nodes.leavers:
        presence = turn.presence(node)
        if presence.closed is None or turn.is_working(node):
            continue
        if not liveness.spoke_since(presence) and turn.overdue(presence.closed + CLOSED_GRACE_SECONDS):
            gone.append((node, "on notice"))
    membership.lose(turn, gone)
    return bool(gone)
