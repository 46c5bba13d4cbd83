"""When the world has broken: ranks that may still hold the last boundary get a moment to save it. Pure.

Ranks say with their progress whether they may. Where none may, all end at once, as ever. What they save is a memory
checkpoint like others, of which this node holds all parts; it is told before the node joins the next world.
"""

from __future__ import annotations

from dataclasses import replace

from .decision import Decision
from .state import SealedInMemory, Workers

__all__ = ["awaits_word", "check", "end_workers", "kept", "may_keep", "writes"]

# Seconds that ranks have until one says that it writes. Most know at once; one that is behind its optimizer's step ends
# the step first.
ANSWER_SECONDS = 1.0
# Seconds that writing may take, from the word that it begins.
WRITE_SECONDS = 10.0
# Seconds that a process that stays for the next world has to leave this one, once it has sealed.
STAY_SECONDS = 5.0
# Seconds in which what was sealed in memory shows itself as held.
WORD_SECONDS = 2.0


def may_keep(decision: Decision, rank: int, may: bool) -> None:
    """A rank has said whether it may be able to save by itself."""
    epoch = decision.state.epoch
    keepers = epoch.own_save.keepers
    if (rank in keepers) is not may:
        epoch.own_save = replace(epoch.own_save, keepers=keepers | {rank} if may else keepers - {rank})


def end_workers(decision: Decision) -> None:
    """The world has broken: its ranks end, at once or after they have saved what they can."""
    state, epoch = decision.state, decision.state.epoch
    if state.workers is not Workers.RUNNING or epoch.own_save.until is not None:
        return
    if not _left(decision):
        decision.kill_workers()
        return
    until = decision.now + (WRITE_SECONDS if epoch.own_save.writers else ANSWER_SECONDS)
    epoch.own_save = replace(epoch.own_save, until=until)
    decision.wake_at(until)


def writes(decision: Decision, rank: int, *, stays: bool) -> None:
    """A rank saves what it holds; ``stays``: its process then waits for a place in the next world.

    Only its first word gives it time: one that is refused, as where there is no room, begins again and again.
    """
    epoch = decision.state.epoch
    if stays:
        epoch.own_save = replace(epoch.own_save, stayers=epoch.own_save.stayers | {rank})
    until = epoch.own_save.until
    if until is not None and rank not in epoch.own_save.writers:
        until = max(until, decision.now + WRITE_SECONDS)
    epoch.own_save = replace(epoch.own_save, writers=epoch.own_save.writers | {rank}, until=until)


def check(decision: Decision) -> None:
    """Ends the ranks when all have gone that might save something, or when their time is over."""
    state, until = decision.state, decision.state.epoch.own_save.until
    if until is None or state.workers is not Workers.RUNNING:
        return
    if decision.now >= until or not _left(decision):
        decision.kill_workers()
    else:
        decision.wake_at(until)


def kept(decision: Decision, rank: int, digest: str) -> None:
    """A rank has sealed something in this node's memory, which is looked at before it counts as held."""
    epoch = decision.state.epoch
    epoch.sealed_in_memory = SealedInMemory(digest)
    own = epoch.own_save
    if rank in own.stayers:
        until = None if own.until is None else max(own.until, decision.now + STAY_SECONDS)
        epoch.own_save = replace(own, keepers=own.keepers | {rank}, until=until)
    elif rank in own.writers:  # It has nothing more to save.
        epoch.own_save = replace(own, keepers=own.keepers - {rank})


def awaits_word(decision: Decision) -> bool:
    """What was sealed here last is not known to be held yet: the master hears of that before this node joins."""
    state, epoch = decision.state, decision.state.epoch
    sealed = epoch.sealed_in_memory
    if sealed is None or not sealed.digest or sealed.digest in state.memory.held:
        return False
    until = decision.now + WORD_SECONDS if sealed.until is None else sealed.until
    epoch.sealed_in_memory = replace(sealed, until=until)
    if decision.now >= until:
        return False
    decision.wake_at(until)
    return True


def _left(decision: Decision) -> frozenset[int]:
    """Ranks that run, and may save something or leave by themselves."""
    state, epoch = decision.state, decision.state.epoch
    world = state.world
    if world is None:
        return frozenset()
    ended = {int(world.place.first_rank) + local_rank for local_rank, _ in epoch.exits}
    return epoch.own_save.keepers - ended
