"""The end of a job that has failed: what it has in memory alone comes to the disk first, since it goes with the agents.

Each node writes the part that it has, as it does for a save. Who starts the job again goes on from there.
"""

from __future__ import annotations

from . import durable, memory, waits
from .checkpoints import in_memory_alone, resume_point
from .live import Ending
from .turn import Turn

__all__ = ("awaits", "is_under_way", "put_off")

# A step that nobody can write is tried again for so long, as the ranks do with the last one of all.
GIVEN_UP_AFTER_SECONDS = 600.0


def put_off(turn: Turn, message: str, *, notice: bool) -> bool:
    """Whether the job ends only when something is on the disk that is in memory alone. It is over all the same."""
    if turn.live.ending is not None:
        return False
    record = memory.would_go_on_from(turn.state) or in_memory_alone(turn.job)
    if record is None:
        return False
    turn.live.ending = Ending(message, notice)
    turn.notice(f"the job ends when {record.name}, which is in memory only, is on the disk")
    return True


def is_under_way(turn: Turn) -> bool:
    """Whether no world opens any more."""
    return turn.job.phase.is_terminal or turn.live.ending is not None


def awaits(turn: Turn, ending: Ending) -> bool:
    """Whether what the job would go on from is still being written to the disk, or may be."""
    memory.adopt(turn)
    while memory.lost(turn, resume_point(turn.job)):
        pass  # An older one may be there.
    record = in_memory_alone(turn.job)
    if record is None:
        return False
    durable.want_by_parts(turn, record)
    stuck = durable.is_stuck(turn.job, turn.live.held.step(record))
    if stuck and ending.stuck_since is None:
        ending.stuck_since = turn.heard
    left = None
    if ending.stuck_since is not None:
        left = ending.stuck_since + GIVEN_UP_AFTER_SECONDS - turn.heard
        if turn.overdue(ending.stuck_since + GIVEN_UP_AFTER_SECONDS):
            memory.give_up(turn, record, "no node could write it to the disk")
            return False
    waits.say(turn, "end", f"waiting for {record.name} to be written from memory to the disk before the job ends", left)
    return True
