"""What goes when the disk has no room for the next checkpoint."""

from __future__ import annotations

from .checkpoints import beyond, prunable, retire, wanted
from .saves import amount
from .state import Checkpoint
from .turn import Turn

# The newest commit, and one to go back to if that is damaged.
LEAST_KEPT = 2
# What fails so many times in a row, or for so long, is told: an open file on NFS, or a stale handle, passes. Where
# nothing can be saved the agent hears nothing new, and does not try again.
FAILED_DELETIONS = 3
FAILED_DELETION_SECONDS = 60.0


def make_room(turn: Turn, missing_bytes: int) -> None:
    """Retires the oldest commits until they hold as much as is missing, but neither the last two nor what must stay.

    While retired ones are still being deleted nothing more is retired: they may be enough. Nor where they cannot be:
    what came next could not, either.
    """
    job = turn.job
    keep = wanted(job)
    if missing_bytes <= 0:
        return
    missing = f"the checkpoint directory lacks {amount(missing_bytes)} for the next checkpoint"
    if prunable(job):
        if _deletion_fails(turn):
            _tell(turn, missing, "what was to go cannot be deleted")
        return
    gone: list[Checkpoint] = []
    for record in reversed(beyond(job, min(keep, LEAST_KEPT)) if keep else []):
        if sum(one.bytes for one in gone) < missing_bytes and not record.parts:
            gone.append(record)
    for record in gone:
        retire(job, record, damaged=False)
    if gone:
        names = ", ".join(record.name for record in gone)
        turn.notice(f"{missing}: {names} {'goes' if len(gone) == 1 else 'go'}, although {keep} were to stay", True)
    else:
        _tell(turn, missing, "what is left is needed" if keep else "all are to stay (--keep-checkpoints=0)")


def note_deletion(turn: Turn, count: int) -> None:
    """So many of the retired checkpoints are gone after a deletion; 0: none could be deleted."""
    if not turn.open.failed_deletions:
        turn.open.deletion_fails_since = turn.heard
    turn.open.failed_deletions = 0 if count else turn.open.failed_deletions + 1


def _deletion_fails(turn: Turn) -> bool:
    """Whether nothing that was to go could be deleted, for longer than what passes."""
    failed, since = turn.open.failed_deletions, turn.open.deletion_fails_since
    return failed >= FAILED_DELETIONS or (failed > 0 and turn.heard - since >= FAILED_DELETION_SECONDS)


def _tell(turn: Turn, missing: str, why: str) -> None:
    if not turn.open.shortage_told:
        turn.open.shortage_told = True
        turn.notice(f"{missing}, and none is deleted for it, because {why}: make room", True)
