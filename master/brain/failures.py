"""The failure budget: which ends of a world are the script's fault, and how many of them end the job."""

from __future__ import annotations

from dataclasses import replace

from . import running
from .membership import has_answered
from .state import Checkpoint, Failure, Member, Part, Phase
from .turn import Turn


def count(turn: Turn) -> bool:
    """Counts the failure of the last world before the next one opens. Returns whether it was one too many."""
    job = turn.job
    failure, doubtful = job.run.budget.pending, job.run.budget.doubtful
    budget = replace(job.run.budget, pending=None, doubtful=())
    turn.update_run(budget=budget)
    if failure is None or job.world is None:
        return False
    if doubtful and all(is_there(turn, incarnation) for incarnation in doubtful):
        budget = replace(budget, failures=budget.failures + 1)  # the one before this: nobody was lost then either
    members = job.world.members
    if not any(broke_it(turn, member) for member in members):
        silent = tuple(member.incarnation for member in members if not answers(turn, member))
        budget = replace(
            budget,
            doubtful=silent,
            last_step=max(budget.last_step, failure.step),
            failures=budget.failures + (not silent),
        )
    turn.update_run(budget=budget)
    if budget.failures <= job.settings.max_restarts:
        return False
    running.end(
        turn,
        Phase.FAILED,
        f"{failure.node}: {failure.message}; {budget.failures} failures without progress (--max-restarts "
        f"{job.settings.max_restarts})",
    )
    return True


def blame(turn: Turn, failure: Failure) -> None:
    """Keeps what broke the world. A node's own cause outweighs a report about another; a refusal outweighs both."""
    budget = turn.job.run.budget
    if budget.pending is None or weight(failure) > weight(budget.pending):
        turn.update_run(budget=replace(budget, pending=failure))


def weight(failure: Failure) -> tuple[bool, bool]:
    """How much a failure says about why the world ended."""
    return failure.refused, not failure.elsewhere


def acquit(turn: Turn) -> None:
    """Notes that the failure was not the script's fault."""
    turn.update_run(budget=replace(turn.job.run.budget, pending=None))


def broke_it(turn: Turn, member: Member) -> bool:
    """Whether a node's loss or leave ended its world."""
    node = turn.job.node_by(member.incarnation)
    return node is None or node.leaving or turn.job.part(member) is Part.LOST


def answers(turn: Turn, member: Member) -> bool:
    """Whether a node is certainly there after the failure. A silent one may only not be declared dead yet."""
    node = turn.job.node_by(member.incarnation)
    if node is None or not turn.is_fresh(node):
        return False
    return turn.job.part(member) is Part.FAILED or has_answered(turn, node)


def is_there(turn: Turn, incarnation: str) -> bool:
    """Whether an incarnation that had not answered is there after all, and was only slow."""
    node = turn.job.node_by(incarnation)
    return node is not None and not node.leaving and turn.is_fresh(node)


def cannot_reshard(turn: Turn, resume: Checkpoint) -> bool:
    """Whether re-sharding failed: the last world's workers failed before their first step although no node was lost.

    While a node is silent it may be lost, too: then the next world shows it.
    """
    world = turn.job.world
    if world is None or not world.resharded or world.resume != resume.digest or turn.job.told.first_step:
        return False
    if turn.job.run.budget.pending is None:
        return False
    return all(answers(turn, member) and not broke_it(turn, member) for member in world.members)
