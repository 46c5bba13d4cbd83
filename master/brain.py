"""The master's brain: `handle(state, event, now) -> (state, replies)`. No I/O, no clock, no randomness.

The same brain runs in the server, in the unit tests and in the simulator. The state handed in is consumed: go on with
the one that is returned. The shell persists `state.job` before any reply or directive leaves, and sends each watcher
`view(state, node)` whenever that changed; there are no other effects.
"""

from __future__ import annotations

from . import calls, forming, membership, phases
from .events import Called, Event, HeldUp, Reply, StreamClosed, StreamOpened
from .invariants import check
from .state import Job, Live, Phase, Settings, State
from .turn import CLOSED_GRACE, Turn
from .views import status, view

# A bound on transitions within one event: more means two rules undo each other.
MAX_MOVES = 50


def fresh(job_id: str, generation: int, settings: Settings | None = None, embedded: bool = False) -> State:
    """The state of a job that nobody has heard of. `settings` fixes min and max nodes for all agents."""
    job = Job(job_id=job_id, generation=generation, embedded=embedded)
    if settings is not None:
        job.settings = settings
        job.fixed_nnodes = True
    return State(job)


def recover(job: Job, generation: int, now: float) -> State:
    """Go on with a stored job: every deadline starts anew, every node is presumed alive for one node-timeout."""
    job.generation = max(job.generation + 1, generation)
    if job.phase.is_terminal:
        # Whoever still asks registers anew and is told how it ended.
        job.nodes = {}
    live = Live(phase_since=now, last_arrival=now, moved_at=now)
    live.heard = dict.fromkeys(job.nodes, now)
    live.presumed = set(job.nodes)
    live.joined_at = dict.fromkeys((name for name, node in job.nodes.items() if node.joined is not None), now)
    live.held_until = {name: now + pause for name, pause in job.holds.items()}
    live.grow_hold_until = now + forming.growth_hold(job.conversion_failures)
    live.conversion_moved = live.verify_moved = live.retry_at = now
    if job.drain is not None:
        live.drain_deadline = now + job.settings.drain_timeout
    if job.growths:
        live.growth_done_at = now
    if job.phase.has_workers or job.phase is Phase.FORMING:
        live.paused_since = now
    state = State(job, live)
    settle(Turn(state, now))
    return state


def handle(state: State, event: Event, now: float) -> tuple[State, list[Reply]]:
    """One event. `now` is monotonic seconds. Exactly one reply for a `Called`, none otherwise."""
    turn = Turn(state, now)
    replies: list[Reply] = []
    if isinstance(event, Called):
        replies.append(calls.answer(turn, event.message))
    elif isinstance(event, StreamOpened):
        node = state.job.node_by(event.incarnation)
        if node is not None:
            state.live.closed.pop(node.name, None)
            state.live.unopened.discard(node.name)
            membership.hear(turn, node)
    elif isinstance(event, StreamClosed):
        node = state.job.node_by(event.incarnation)
        if node is not None:
            state.live.closed.setdefault(node.name, now)
    elif isinstance(event, HeldUp):
        membership.forgive(turn)
    settle(turn)
    return state, replies


def settle(turn: Turn) -> None:
    """Apply what the state and the time call for until nothing moves."""
    for _ in range(MAX_MOVES):
        turn.state.wake = None
        moved = release_leavers(turn) or membership.check_liveness(turn) or transition(turn)
        check(turn.state)
        if not moved:
            return
    raise AssertionError(f"the brain does not come to rest in phase {turn.job.phase.value}")


def transition(turn: Turn) -> bool:
    """Whatever the phase, the state and the time call for, one step of it. Returns whether anything moved."""
    phase = turn.job.phase
    if phase in (Phase.WAITING, Phase.FORMING):
        return forming.forming(turn)
    if phase is Phase.RUNNING:
        return phases.running(turn)
    if phase is Phase.DRAINING:
        return phases.draining(turn)
    return False


def release_leavers(turn: Turn) -> bool:
    """A leaver without ranks to wait for, whose stream is closed, is simply gone."""
    for node in list(turn.job.nodes.values()):
        if not node.leaving or node.name not in turn.live.closed or turn.is_working(node):
            continue
        if membership.spoke_since(turn, node):
            continue
        closed = max(turn.live.closed[node.name], turn.live.forgiven_at)
        if turn.due(closed + CLOSED_GRACE):
            membership.lose(turn, node, "on notice")
            return True
    return False


__all__ = ("Reply", "fresh", "handle", "recover", "status", "view")
