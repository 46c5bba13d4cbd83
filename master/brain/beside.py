"""Universal files that are made beside a world that has re-sharded (`--universal-checkpoint`), and who waits for them.

The world opens at once; what it owes stands in the record as the conversion of the next world, so that a new master
knows it. A member makes them while the others train: the first in rank order that can. They are there before the next
world opens, and before the job has succeeded; if nobody can make them, that is said, and nothing waits any longer.
"""

from __future__ import annotations

from dataclasses import replace

from . import conversion, durable, memory
from .live import ConversionLife, ConversionWait
from .membership import in_rank_order
from .state import Checkpoint, Conversion, Job, MemberState, Node, Phase, World
from .turn import Turn, names

__all__ = ("UNWRITTEN", "holds", "holds_growth", "is_over", "owe", "still_owed", "tend")

# They are waited for so long until a line says so, and then each time that the wait has doubled (seconds).
SAID_AFTER_SECONDS = 5.0
# Why what is in memory alone cannot be converted.
UNWRITTEN = "nobody could write it to the disk"


def owe(turn: Turn, world: World, resume: Checkpoint | None) -> None:
    """A world has opened: if it re-shards, and universal files are wanted, they are made from now on."""
    wanted = world.resharded and turn.job.settings.universal_checkpoint
    if resume is None or not wanted or resume.universal_digest or resume.unconvertible:
        return
    turn.update_next(conversion=Conversion(source=resume.digest, beside=True))
    turn.live.conversion = ConversionLife()


def still_owed(job: Job) -> Conversion | None:
    """What is owed over the job's end, if it goes on later; nobody is at work on it then."""
    held = job.conversion
    return Conversion(source=held.source, earlier=held.earlier, beside=True) if held and held.beside else None


def tend(turn: Turn) -> None:
    """See that somebody makes what is owed, whatever the phase; until it is there, or will never be."""
    held = turn.job.conversion
    if held is None or not held.beside:
        return
    source = turn.job.checkpoint(held.source)
    if source is None or source.retired:
        drop(turn)
    elif source.universal_digest:
        turn.notice(f"the universal files of {source.name} are there")
        drop(turn)
    elif source.unconvertible:
        give_up(turn, source, source.unconvertible)
    elif not source.reshards:
        # It did not work: the next world cannot open without them.
        conversion.change(turn, held, beside=False)
    else:
        make(turn, held, source)


def make(turn: Turn, held: Conversion, source: Checkpoint) -> None:
    """Somebody has the lease, or gets it."""
    conversion.retry(turn)
    held = turn.job.conversion or held
    if source.parts:
        bring_to_disk(turn, held, source)
        return
    if held.lease:
        held = conversion.check_owner(turn, held)
    if held.lease or held.blocked or begins(turn):
        return
    able = [node for node in turn.job.nodes.values() if can_make(turn, node, source)]
    fresh = [node for node in in_rank_order(turn.job, able) if node.name not in held.failed]
    if fresh:
        # A node that has it in sight for certain goes first.
        conversion.lend(turn, held, min(fresh, key=lambda node: not has_seen(turn, node, source)))
    elif held.failed:
        conversion.block(turn, held)


def bring_to_disk(turn: Turn, held: Conversion, source: Checkpoint) -> None:
    """What is in memory is written down first: only files on the disk are converted."""
    if memory.is_gone(turn, source):
        give_up(turn, source, "the nodes that held a part of it in memory are gone")
    elif not begins(turn):
        durable.want_durable(turn, source)
        if not held.blocked and durable.cannot_write(turn, source):
            conversion.block(turn, conversion.change(turn, held, reason=UNWRITTEN))


def begins(turn: Turn) -> bool:
    """The world starts: its first step comes first."""
    job = turn.job
    return job.phase is Phase.RUNNING and not job.told.first_step and set(job.parts.values()) == {MemberState.RUNNING}


def can_make(turn: Turn, node: Node, source: Checkpoint) -> bool:
    """Alive, and it reads the job's directory."""
    return not node.leaving and node.sees_directory and node.unreadable != source.digest and turn.is_fresh(node)


def has_seen(turn: Turn, node: Node, source: Checkpoint) -> bool:
    """Its workers have loaded it, or its Join named it."""
    world = turn.job.world
    loaded = world is not None and world.resume == source.digest and world.member(node.incarnation) is not None
    return loaded or (node.joined is not None and source.digest in node.joined.seen)


def holds(turn: Turn, ready: bool) -> bool:
    """Whether the next world, or the end, waits for what is owed. `ready`: nothing else is waited for."""
    held = turn.job.conversion
    if held is None or not held.beside:
        return False
    source = turn.job.checkpoint(held.source)
    if source is None or not ready:
        turn.live.conversion.wait = None
        return source is not None
    if held.blocked or not any(not node.leaving for node in turn.job.nodes.values()):
        give_up(turn, source, held.reason or "no node is left to make them")
        return False
    say_wait(turn, held, source)
    return True


def holds_growth(turn: Turn, new: list[Node]) -> bool:
    """Whether newcomers wait for what is owed: the others would wait with them, and now they train meanwhile."""
    held = turn.job.conversion
    source = turn.job.checkpoint(held.source) if held is not None and held.beside and not held.blocked else None
    if source is None:
        return False
    if not turn.live.conversion.growth_told:
        turn.live.conversion.growth_told = True
        who = names(sorted(node.name for node in new))
        turn.notice(f"{who} joined: taken in as soon as the universal files of {source.name} are there")
    return True


def is_over(turn: Turn) -> bool:
    """The training has ended on all nodes, and only what is owed is waited for."""
    return set(turn.job.parts.values()) == {MemberState.FINISHED}


def say_wait(turn: Turn, held: Conversion, source: Checkpoint) -> None:
    """After some seconds, and each time that the wait has doubled: what is waited for, and how far it is."""
    life = turn.live.conversion
    if life.wait is None:
        life.wait = ConversionWait(turn.now, SAID_AFTER_SECONDS)
    if not turn.due(life.wait.since + life.wait.said_after):
        return
    seconds = turn.now - life.wait.since
    life.wait = replace(life.wait, said_after=2 * seconds)
    turn.due(life.wait.since + life.wait.said_after)
    what = "the training has ended" if turn.job.phase.has_workers else "the next world is ready"
    who = f", which {held.owner} makes" if held.owner else ""
    files = f" ({life.lease.files} files so far)" if life.lease.files > 0 else ""
    turn.notice(f"{what}; for {seconds:.0f} s it has waited for the universal files of {source.name}{who}{files}")


def give_up(turn: Turn, source: Checkpoint, reason: str) -> None:
    """Nothing waits for them any longer."""
    turn.notice(f"the universal files of {source.name} could not be made ({reason}): going on without them", True)
    drop(turn)


def drop(turn: Turn) -> None:
    """Nothing is owed."""
    turn.update_next(conversion=None)
    turn.live.conversion = ConversionLife()
