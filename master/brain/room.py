"""What goes when the disk has no room for the next checkpoint."""

from __future__ import annotations

from .checkpoints import beyond, prunable, retire, wanted
from .saves import amount
from .state import Checkpoint
from .turn import Turn

# The newest commit, and one to go back to if that is damaged.
LEAST_KEPT = 2


def make_room(turn: Turn, missing_bytes: int) -> None:
    """Retires the oldest commits until they hold as much as is missing, but neither the last two nor what must stay.

    While retired ones are still being deleted nothing more is retired: they may be enough.
    """
    job = turn.job
    keep = wanted(job)
    if missing_bytes <= 0 or prunable(job):
        return
    gone: list[Checkpoint] = []
    for record in reversed(beyond(job, min(keep, LEAST_KEPT)) if keep else []):
        if sum(one.bytes for one in gone) < missing_bytes and not record.parts:
            gone.append(record)
    for record in gone:
        retire(job, record, damaged=False)
    _tell(turn, missing_bytes, gone, keep)


def _tell(turn: Turn, missing_bytes: int, gone: list[Checkpoint], keep: int) -> None:
    missing = f"the checkpoint directory lacks {amount(missing_bytes)} for the next checkpoint"
    if gone:
        names = ", ".join(record.name for record in gone)
        turn.notice(f"{missing}: {names} {'goes' if len(gone) == 1 else 'go'}, although {keep} were to stay", True)
    elif not turn.open.shortage_told:
        turn.open.shortage_told = True
        why = "what is left is needed" if keep else "all are to stay (--keep-checkpoints=0)"
        turn.notice(f"{missing}, and none is deleted for it, because {why}: make room", True)
