"""Worlds that fail only because of their shape: their number of workers, or the nodes that came since others trained.

A script may refuse a number of workers (it asserts that the number divides something), and a newcomer may lack what
the script needs. If a world fails before its first step although all of its nodes are there, and others have worked,
that is not counted as the script's failure (`failures.blames_shape`). The run goes back to what worked, and whoever is
left over is a spare. The same number of workers is tried again only once something has changed: without those that were
new in it, with another newcomer, and after a pause that doubles; or when all agents were started anew, as a person does
who has changed the script or its arguments; or when a person scales the job. If nobody was new in it, or nobody would
have heard of its steps (the script has no session), it is tried twice: one crash says little. Other numbers of workers
may be tried at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate

from .state import FailedShape, Node, World
from .turn import Turn, names, of_nodes

__all__ = (
    "LIVED_SECONDS",
    "RETRY_SECONDS",
    "best",
    "give_up",
    "note_worked",
    "others_than_suspects",
    "put_off",
    "why_spare",
)

# Without a session nobody hears of steps: a world that has lived for so many seconds has worked. Longer than scripts
# take to build what they assert something about.
LIVED_SECONDS = 300.0
# Seconds until the same number of workers may be tried again with another newcomer; they double.
RETRY_SECONDS = 30.0
MAX_RETRY_SECONDS = 3600.0
# How often nodes that have all trained before try a number of workers that never worked.
TRIES = 2
AGAIN = "are tried again when other nodes come, or when all agents were started anew"


def best(turn: Turn, nodes: list[Node], counts: Iterable[int]) -> list[Node]:
    """The first of these counts of nodes whose shape is not known to fail; empty if there is none.

    Nodes that were new in a world that failed come last.
    """
    shapes = turn.job.run.shapes
    sizes = list(accumulate(node.nproc for node in nodes))
    for count in counts:
        shape = shapes.failure_of(sizes[count - 1])
        if shape is None:
            return nodes[:count]
        others = [node for node in nodes if node.incarnation not in shape.suspects][:count]
        for chosen in (nodes[:count], others):
            if len(chosen) == count and not is_barred(turn, chosen):
                return chosen
    return []


def is_barred(turn: Turn, chosen: list[Node]) -> bool:
    """Whether so many workers have failed, and nothing has changed since."""
    shape = turn.job.run.shapes.failure_of(sum(node.nproc for node in chosen))
    if shape is None or shape.doubtful:
        return False
    if any(node.incarnation in shape.suspects for node in chosen):
        return True
    new = sum(not node.trained for node in chosen)
    if not new:
        return shape.failures >= TRIES
    return new < len(chosen) and not turn.due(may_try_again(turn, shape))


def may_try_again(turn: Turn, shape: FailedShape) -> float:
    """When somebody else may take part in it. A new master does not know when it failed: the pause begins anew."""
    failed_at = turn.live.run.shape_failed_at.setdefault(shape.size, turn.now)
    return failed_at + min(RETRY_SECONDS * 2.0 ** min(shape.failures - 1, 20), MAX_RETRY_SECONDS)


def note_worked(turn: Turn, world: World) -> None:
    """Notes that a world has made a step or a commit, or lived for long: its size and its nodes are right."""
    job = turn.job
    shapes = job.run.shapes
    if world.size not in shapes.worked or shapes.failure_of(world.size) is not None:
        worked = tuple(sorted({*shapes.worked, world.size}))
        failed = tuple(shape for shape in shapes.failed if shape.size != world.size)
        turn.update_run(shapes=replace(shapes, worked=worked, failed=failed))
    for member in world.members:
        node = job.node_by(member.incarnation)
        if node is not None and not node.trained:
            turn.update(node, trained=True)


def give_up(
    turn: Turn, world: World, ready: list[Node], counts: Iterable[int], message: str, *, heard: bool
) -> list[Node]:
    """Notes that this world failed because of its shape. Returns who goes on; empty, and no change, if nobody could.

    Args:
        ready: the nodes that may take part in the next world.
        counts: the numbers of nodes that it may have.
        message: what failed.
        heard: whether a step would have been heard of. Otherwise one failure is no proof, see `FailedShape.doubtful`.
    """
    before = turn.job.run.shapes
    new = [node.incarnation for node in turn.job.nodes.values() if world.member(node.incarnation) and not node.trained]
    known = before.failure_of(world.size) or FailedShape(world.size, len(world.members), failures=0)
    failed = replace(
        known,
        nodes=len(world.members),
        suspects=tuple(sorted({*new, *(one for one in known.suspects if turn.job.node_by(one) is not None)})),
        failures=known.failures + 1,
        doubtful=not heard and not known.failures,
        message=message,
    )
    others = tuple(shape for shape in before.failed if shape.size != world.size)
    turn.update_run(shapes=replace(before, failed=(*others, failed)))
    turn.live.run.shape_failed_at[world.size] = turn.now
    chosen = best(turn, ready, counts)
    if not chosen:
        turn.update_run(shapes=before)
        return []
    say(turn, failed, ready, chosen, {node.incarnation for node in chosen} == set(world.by_incarnation))
    return chosen


def say(turn: Turn, failed: FailedShape, ready: list[Node], chosen: list[Node], again: bool) -> None:
    """Tells people who goes on, and why. `again`: it is those who have just failed."""
    text = f"with {of_nodes(failed.nodes)} the script failed"
    left = [node.name for node in ready if node not in chosen]
    spares = f", and {names(left)} {'is a spare' if len(left) == 1 else 'are spares'}" if left else ""
    if again and failed.doubtful:
        turn.notice(f"{text}, perhaps at its start (no steps are heard of it): it is tried once more", True)
    elif again:
        turn.notice(f"{text} at its start, and has never worked with so many: it is tried once more", True)
    else:
        turn.notice(f"{text} at its start: the run goes on with {len(chosen)}{spares}. {failed.nodes} {AGAIN}", True)


def put_off(turn: Turn, nodes: list[Node], counts: Iterable[int]) -> tuple[FailedShape, list[Node], float] | None:
    """The failed number of workers that newcomers wait to try again: which it is, who they are, and when.

    None if they wait for nothing of the kind.
    """
    shapes = turn.job.run.shapes
    for count in counts:
        for shape in shapes.failed:
            chosen = [node for node in nodes if node.incarnation not in shape.suspects][:count]
            new = [node for node in chosen if not node.trained]
            fits = len(chosen) == count and sum(node.nproc for node in chosen) == shape.size
            if fits and 0 < len(new) < count and not turn.due(at := may_try_again(turn, shape)):
                return shape, new, at
    return None


def others_than_suspects(failed: tuple[FailedShape, ...], nodes: Iterable[Node]) -> tuple[int, ...]:
    """For each failed shape, how many workers the nodes have that took part in no such world."""
    there = [(node.incarnation, node.nproc) for node in nodes] if failed else []
    suspects = [frozenset(shape.suspects) for shape in failed]
    return tuple(sum(nproc for one, nproc in there if one not in known) for known in suspects)


def why_spare(failed: tuple[FailedShape, ...], node: Node, size: int, others: Sequence[int]) -> str:
    """Why a node has no place beside a world of `size` workers, if larger ones failed; empty if none did.

    One that took part in no such world may try it, if there are enough others that took part in none; see `put_off`.

    Args:
        others: see `others_than_suspects`.
    """

    def bars(shape: FailedShape, free: int) -> bool:
        if node.trained or node.incarnation in shape.suspects:
            return True
        return not shape.doubtful and free < shape.size

    tried = [shape for shape, free in zip(failed, others, strict=True) if shape.size > size and bars(shape, free)]
    if not tried:
        return ""
    at_start, message = f"with {of_nodes(tried[-1].nodes)} the script failed at its start", tried[-1].message
    return f"{node.name} is a spare: {at_start} ({message}). They {AGAIN}"
