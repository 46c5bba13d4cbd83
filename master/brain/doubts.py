"""Memory checkpoints that a node could not load, and those that are given up.

A copy may be damaged, so others are tried. What cannot be loaded, or is nowhere any more, does not count: the run goes
on from the one before. Nor does what a world has made that may have loaded a damaged copy.
"""

from __future__ import annotations

from . import checkpoints
from .live import HeldStep
from .state import Checkpoint, Node
from .turn import Turn

__all__ = ("doubt", "give_up", "is_looked_at", "say_given_up", "set_aside", "spoil")

# So many nodes may find that their copy of a step cannot be loaded; more are no accident.
MOST_DOUBTS = 4
# A node has so long to look at its copy, which may be hundreds of gigabytes (seconds).
LOOKED_AT_SECONDS = 120.0


def doubt(turn: Turn, record: Checkpoint, node: Node, why: str) -> None:
    """A node could not load a step in memory: what it holds does not count until it has looked at that.

    Others may have good copies, of what several nodes find damaged, too. What a node cannot load again is given up.
    """
    step = turn.live.held.step(record)
    if node.incarnation in step.doubted or len(step.doubted) >= MOST_DOUBTS:
        give_up(turn, record, f"{node.name} cannot load it ({why})")
        return
    step.doubted.add(node.incarnation)
    step.needs_all = True
    # Who has told already that it has nothing left does not look, and says no more.
    if node.incarnation in step.by_node:
        step.hold(node.incarnation, ())
        step.looking[node.incarnation] = turn.heard
    turn.notice(f"{node.name} cannot load {record.name} from its memory ({why}): other copies of it are tried", True)


def spoil(turn: Turn) -> None:
    """The open world may have loaded damaged memory: nothing of what it has made since counts."""
    steps, epoch = turn.live.held.steps, turn.job.epoch
    turn.update_next(spoilt=epoch)
    for digest in [digest for digest, step in steps.items() if step.record.epoch == epoch]:
        del steps[digest]


def is_looked_at(turn: Turn, step: HeldStep) -> bool:
    """Whether a node that is here still looks at its copy: it may say that parts of it are good. Not without an end."""
    looking = [since for incarnation, since in step.looking.items() if turn.job.node_by(incarnation) is not None]
    return bool(looking) and not turn.overdue(max(looking) + LOOKED_AT_SECONDS)


def give_up(turn: Turn, record: Checkpoint, why: str) -> None:
    """A memory checkpoint cannot be used: the run goes on from the one before."""
    set_aside(turn, record)
    say_given_up(turn, record, why)


def set_aside(turn: Turn, record: Checkpoint) -> None:
    """A memory checkpoint counts no more."""
    turn.live.held.steps.pop(record.digest, None)
    checkpoints.retire(turn.job, record, damaged=True)


def say_given_up(turn: Turn, record: Checkpoint, why: str) -> None:
    """Says what the run goes on from instead, once that is known."""
    before = checkpoints.resume_point(turn.job)
    back = f"going back to {before.name}" if before is not None else "no checkpoint is left: starting from step 0"
    turn.notice(f"{record.name} was in memory only, and {why}: {back}", True)
