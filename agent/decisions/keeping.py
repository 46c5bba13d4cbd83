"""When the world has broken: ranks that may still hold the last boundary get a moment to save it. Pure.

Ranks say with their progress whether they may. Where none may, all end at once, as ever. What they save is a memory
checkpoint like others, of which this node holds all parts; it is told before the node joins the next world.
"""

from __future__ import annotations

from .decision import Decision
from .state import Workers

__all__ = ["awaits_word", "check", "end_workers", "kept", "may_keep", "writes"]

# Seconds that ranks have until one says that it writes. Most know at once; one that is behind its optimizer's step ends
# the step first.
ANSWER_SECONDS = 1.0
# Seconds that writing may take, from the word that it begins.
WRITE_SECONDS = 10.0
# Seconds in which what was sealed in memory shows itself as held.
WORD_SECONDS = 2.0


def may_keep(decision: Decision, rank: int, may: bool) -> None:
    """A rank has said whether it may be able to save by itself."""
    epoch = decision.state.epoch
    if (rank in epoch.keepers) is not may:
        epoch.keepers = epoch.keepers | {rank} if may else epoch.keepers - {rank}


def end_workers(decision: Decision) -> None:
    """The world has broken: its ranks end, at once or after they have saved what they can."""
    state, epoch = decision.state, decision.state.epoch
    if state.workers is not Workers.RUNNING or epoch.keep_until is not None:
        return
    if not _left(decision):
        decision.kill_workers()
        return
    epoch.keep_until = decision.now + (WRITE_SECONDS if epoch.writers else ANSWER_SECONDS)
    decision.wake_at(epoch.keep_until)


def writes(decision: Decision, rank: int) -> None:
    """A rank saves what it holds."""
    epoch = decision.state.epoch
    epoch.writers = epoch.writers | {rank}
    if epoch.keep_until is not None:
        epoch.keep_until = max(epoch.keep_until, decision.now + WRITE_SECONDS)


def check(decision: Decision) -> None:
    """Ends the ranks when all have gone that might save something, or when their time is over."""
    state, until = decision.state, decision.state.epoch.keep_until
    if until is None or state.workers is not Workers.RUNNING:
        return
    if decision.now >= until or not _left(decision):
        decision.kill_workers()
    else:
        decision.wake_at(until)


def kept(decision: Decision, rank: int, digest: str) -> None:
    """A rank has sealed something in this node's memory, which is looked at before it counts as held."""
    epoch = decision.state.epoch
    epoch.kept, epoch.kept_until = digest, None
    if rank in epoch.writers:
        epoch.keepers = epoch.keepers - {rank}  # It has nothing more to save.


def awaits_word(decision: Decision) -> bool:
    """What was sealed here last is not known to be held yet: the master hears of that before this node joins."""
    state, epoch = decision.state, decision.state.epoch
    if not epoch.kept or epoch.kept in state.memory.held:
        return False
    if epoch.kept_until is None:
        epoch.kept_until = decision.now + WORD_SECONDS
    if decision.now >= epoch.kept_until:
        return False
    decision.wake_at(epoch.kept_until)
    return True


def _left(decision: Decision) -> frozenset[int]:
    """Local ranks that run and may save something."""
    state, epoch = decision.state, decision.state.epoch
    world = state.world
    if world is None:
        return frozenset()
    ended = {int(world.place.first_rank) + local_rank for local_rank, _ in epoch.exits}
    return epoch.keepers - ended
