"""The failure budget: which ends of a world are the script's fault, and how many of them end the job."""

from __future__ import annotations

from dataclasses import replace

from dalsegno.protos.contract import COUNTED_BY_TORCHRUN
from dalsegno.protos.text import same_failure

from . import memory, running, shapes
from .membership import counts, has_answered, may_call_session
from .progress import is_further
from .state import Budget, Checkpoint, Failure, Member, MemberState, Node, Phase, World
from .turn import Turn, of_nodes

# Seconds before workers that failed without progress a second time are started again; they double.
RESTART_SECONDS = 1.0
MAX_RESTART_SECONDS = 60.0
# Of a world's causes: a worker failed, and its node said so.
FAILED_ON = "a worker failed on "


def count(turn: Turn) -> bool:
    """Counts the failure of the last world before the next one opens. Returns whether it was one too many."""
    job = turn.job
    failure, doubtful = job.run.budget.pending, job.run.budget.doubtful
    budget = replace(job.run.budget, pending=None, doubtful=())
    turn.update_run(budget=budget)
    if failure is None or job.world is None or saw_one_go(turn, failure):
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
        put_off_restart(turn, failure, budget)
        return False
    running.end(
        turn,
        Phase.FAILED,
        f"{failure.node}: {failure.message}; {of_failures(budget.failures)} without progress (--max-restarts "
        f"{job.settings.max_restarts})",
        notice=False,
    )
    return True


def put_off_restart(turn: Turn, failure: Failure, budget: Budget) -> None:
    """Has the workers started again only after a while, if they have failed without progress more than once."""
    if budget.failures < 2 or budget.doubtful:
        return
    pause = min(RESTART_SECONDS * 2.0 ** min(budget.failures - 2, 20), MAX_RESTART_SECONDS)
    turn.live.gathering.restart_at = turn.now + pause
    left = turn.job.settings.max_restarts - budget.failures
    text = f"{budget.failures} failures without progress, the last one on {failure.node}: the workers start again in"
    survived = f"; {left or 'no'} more {'is' if left == 1 else 'are'} survived (--max-restarts)"
    counted = turn.job.settings.max_restarts != COUNTED_BY_TORCHRUN
    turn.notice(f"{text} {pause:.0f} s{survived if counted else ''}")


def as_told(turn: Turn, node: Node, message: str) -> str:
    """The line about a failure: in full the first time; in a few words if it is the one before without progress.

    Who survives it may only now save steps, in memory: then nobody knows yet how many failures it makes.
    """
    budget, limit = turn.job.run.budget, turn.job.settings.max_restarts
    held = memory.would_go_on_from(turn.state)
    new = not budget.failures or (held is not None and is_further(budget, held.step))
    if not new and same_failure(budget.told, message):
        counted = turn.job.settings.memory_replicas <= 0 or not is_further(budget, turn.open.top_step)
        counted = counted and limit != COUNTED_BY_TORCHRUN
        attempt = f", attempt {budget.failures + 1} of {limit + 1}" if counted else ""
        return f"{node.name}: failed as before{attempt}"
    turn.update_run(budget=replace(budget, told=message))
    return f"{node.name}: {message}"


def of_failures(count: int) -> str:
    """A number of failures, for a person."""
    return f"{count} failure{'s' if count != 1 else ''}"


def pauses(turn: Turn) -> bool:
    """Whether the next world waits, because its workers have failed again and again."""
    restart_at = turn.live.gathering.restart_at
    return restart_at is not None and not turn.due(restart_at)


def note_end(turn: Turn, world: World) -> None:
    """A world is over: if it has worked, its shape has."""
    if has_worked(turn, world):
        shapes.note_worked(turn, world)


def has_worked(turn: Turn, world: World) -> bool:
    """Whether the world that ends now made a step or a commit; without a session, whether it lived for long.

    Nothing had failed of a world that ends because nodes come or go, so that one worked as far as anybody knows.
    """
    job = turn.job
    if job.told.first_step or turn.open.top_step > world.resumed_step or job.checkpoints.last_step(world.epoch) >= 0:
        return True
    if hears_of_steps(turn):
        return False
    broken = {MemberState.FAILED, MemberState.LOST} & set(job.parts.values())
    return not broken or turn.heard - turn.open.opened >= shapes.LIVED_SECONDS


def hears_of_steps(turn: Turn) -> bool:
    """Whether a step of the last world would have been heard of: its script has a session, or was on its way to it."""
    return turn.job.has_session or may_call_session(turn)


def blames_shape(turn: Turn) -> bool:
    """Whether the last world failed before a step, and all that is wrong with it may be its shape, see `shapes`.

    While a node is silent it may be lost, too: then the next world shows it.
    """
    world = turn.job.world
    return may_blame_shape(turn) and world is not None and all(answers(turn, member) for member in world.members)


def may_blame_shape(turn: Turn) -> bool:
    """Whether nothing that is known of the nodes speaks against it; not all of them may have answered yet.

    Other worlds of this run have worked; either so many workers never did, or only some of its nodes had trained.
    """
    job = turn.job
    world, pending, worked = job.world, job.run.budget.pending, job.run.shapes.worked
    if world is None or pending is None or pending.refused or not worked:
        return False
    if saw_one_go(turn, pending):
        return False
    nodes = [job.node_by(member.incarnation) for member in world.members]
    trained = [node is not None and node.trained for node in nodes]
    has_newcomers = any(trained) and not all(trained)
    if world.size in worked and not has_newcomers:
        return False
    return not any(broke_it(turn, member) for member in world.members)


def awaits_answers(turn: Turn, waited_for: list[Node]) -> bool:
    """Whether a node of the last world has yet to join, whose answer tells whether its shape is to blame.

    Others may be ready that fill a world: it would be of the same shape.
    """
    world = turn.job.world
    members = world.by_incarnation if world is not None else {}
    return any(node.incarnation in members for node in waited_for) and may_blame_shape(turn)


def leaves_shape(turn: Turn, ready: list[Node]) -> bool:
    """Goes back to another shape after a world that failed because of its own. Returns whether there is one.

    That was no failure of the script.
    """
    world, pending = turn.job.world, turn.job.run.budget.pending
    if world is None or pending is None or not blames_shape(turn):
        return False
    message = f"{pending.node}: {pending.message}"
    goes_on = shapes.give_up(turn, world, ready, counts(turn, ready), message, heard=hears_of_steps(turn))
    if goes_on:
        again = {node.incarnation for node in goes_on} == set(world.by_incarnation)
        turn.cause("tried once more" if again else f"back from {of_nodes(len(world.members))}")
        turn.update_run(budget=replace(turn.job.run.budget, pending=None, doubtful=()))
    return bool(goes_on)


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


def saw_one_go(turn: Turn, failure: Failure) -> bool:
    """Whether nobody failed by itself before the first step: a node drained, and the others lost it.

    So goes who has stayed and cannot follow new processes to the training.
    """
    return failure.elsewhere and not turn.job.told.first_step and MemberState.DRAINED in turn.job.parts.values()


def broke_it(turn: Turn, member: Member) -> bool:
    """Whether a node's loss or leave ended its world."""
    node = turn.job.node_by(member.incarnation)
    return node is None or node.leaving or turn.job.part(member) is MemberState.LOST


def answers(turn: Turn, member: Member) -> bool:
    """Whether a node is certainly there after the failure. A silent one may only not be declared dead yet."""
    node = turn.job.node_by(member.incarnation)
    if node is None or not turn.is_fresh(node):
        return False
    return turn.job.part(member) is MemberState.FAILED or has_answered(turn, node)


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
