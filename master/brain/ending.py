"""The end of a job: what is in memory alone comes to the disk first, since it goes with the agents.

Where the job has failed that is what it would go on from, and each node writes the part that it has, as for a save.
Where the ranks have finished it is what they wanted on the disk, and is still on its way there. And in both cases it is
the best checkpoint, where that is not the newest one. A run of which the last save has gone with its holders is not
finished: it goes on from what is left.

That a job is over is on the record (`Job.ending`), and so is the last save of ranks that have finished, so that another
master goes on ending it. Who holds what is not on the record: it hears that from the nodes first.
"""

from __future__ import annotations

from collections.abc import Iterator

from . import beside, checkpoints, doubts, durable, memory, running, waits
from .checkpoints import in_memory_alone, resume_point
from .state import Checkpoint, Ending, Node, Phase
from .turn import Turn, names

__all__ = ("awaits", "is_under_way", "put_off", "settles")

# A step that nobody can write is tried again for so long, as the ranks do with the last one of all.
GIVEN_UP_AFTER_SECONDS = 600.0


def put_off(turn: Turn, message: str, *, notice: bool) -> bool:
    """Whether a failed job ends only when something is on the disk that is in memory alone. It is over all the same."""
    if turn.job.ending is not None:
        return False
    record = memory.would_go_on_from(turn.state) or in_memory_alone(turn.job)
    if record is None and (best := durable.best_in_memory(turn.state)) is not None:
        record = best.record
    if record is None and not any(unheard(turn)):
        return False
    turn.job.ending = Ending(message, notice)
    turn.begin_phase()
    if record is not None:
        turn.notice(f"the job ends when {record.name}, which is in memory only, is on the disk")
    return True


def is_under_way(turn: Turn) -> bool:
    """Whether no world opens any more."""
    return turn.job.phase.is_terminal or turn.job.ending is not None


def awaits(turn: Turn) -> bool:
    """Whether what a failed job would go on from is still being written to the disk, or may be.

    Its phase began when it failed, and begins anew with another master.
    """
    memory.adopt(turn)
    return is_on_its_way(turn, turn.live.phase_heard, "before the job ends")


def settles(turn: Turn) -> bool:
    """Ends the epoch of ranks that have all finished, once it is known what becomes of what they wanted on the disk.

    If it is lost with the nodes that held it the run goes on from what is left, as behind a crash: what the ranks have
    made since is made again. If no node can write it the job fails, as where ranks cannot save their last step.
    """
    if turn.open.finished_at is None:
        turn.open.finished_at = turn.heard
    last = last_save(turn)
    if last is not None and memory.lost(turn, last):
        turn.open.top_step = max(turn.open.top_step, last.step)  # another master was told of it
        running.unplanned(turn)
        return True
    if beside.holds(turn, ready=True):
        if last is not None:
            durable.want_by_parts(turn, last)
        return False
    if is_on_its_way(turn, turn.open.finished_at, "as the ranks have finished"):
        return False
    newest = resume_point(turn.job)
    if last is None or (newest is not None and newest.age >= last.age):
        running.finish(turn)
    elif turn.job.stopping:
        running.unplanned(turn)  # which ends it as stopped
    else:
        running.end(turn, Phase.FAILED, f"the ranks have finished, but no node could write {last.name} to the disk")
    return True


def last_save(turn: Turn) -> Checkpoint | None:
    """What the ranks wanted on the disk last, if it is not there. It is on the record from then on.

    So a master that comes after all who held it are gone knows of it. Ranks that have saved nothing themselves began
    from it, perhaps with no step left to make.
    """
    step = durable.due(turn.state)
    if step is not None:
        checkpoints.put_newer(turn, step.record)
    return in_memory_alone(turn.job)


def is_on_its_way(turn: Turn, since: float, when: str) -> bool:
    """Whether something is still written from memory to the disk; not without an end, if nobody can."""
    while memory.lost(turn, resume_point(turn.job)):
        pass  # An older one may be there.
    step = durable.owed(turn.state)
    if step is None:
        return is_to_be_told(turn, since)
    record, left = step.record, None
    if record.parts and turn.job.checkpoint(record.digest) is not None:
        durable.want_by_parts(turn, record)
    if step.stuck_since is not None:
        until = max(step.stuck_since, since) + GIVEN_UP_AFTER_SECONDS
        left = max(0.0, until - turn.heard)
        # Who was asked again may be writing, and large parts take their time.
        if turn.overdue(until) and durable.is_stuck(turn.job, step):
            give_up(turn, record)
            return False
    waits.say(turn, "end", f"waiting for {record.name} to be written from memory to the disk {when}", left)
    return True


def unheard(turn: Turn) -> Iterator[Node]:
    """The nodes that are there and have not said to this master all that they hold."""
    return (node for node in turn.job.nodes.values() if memory.is_unheard(turn.state, node) and turn.is_fresh(node))


def is_to_be_told(turn: Turn, since: float) -> bool:
    """Whether nodes may still say that they hold what nobody knows of. Not without an end."""
    until = since + memory.TOLD_WITHIN_SECONDS
    silent = [node.name for node in unheard(turn)]
    if not silent or turn.overdue(until):
        return False
    waits.say(
        turn, "end", f"waiting for {names(silent)} to say what is in memory before the job ends", until - turn.heard
    )
    return True


def give_up(turn: Turn, record: Checkpoint) -> None:
    """No node could write it to the disk."""
    newest = resume_point(turn.job)
    if newest is None or newest.parts or newest.age < record.age:
        doubts.give_up(turn, record, "no node could write it to the disk")
        return
    doubts.set_aside(turn, record)
    turn.notice(f"{record.name} was the best checkpoint, in memory only, and no node could write it to the disk", True)
