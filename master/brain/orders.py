"""Orders of people and tools: a node goes, the job stops or may start again, the ranks save now. See also `scaling`.

Orders enter the brain as calls like any other, may be repeated, and only say what is wanted. The phases do the rest: a
node that is told to go leaves as if it had got a notice, and a job that is stopped is one whose nodes all leave.
"""

from __future__ import annotations

from typing import Any

from dalsegno.protos import control_pb2
from dalsegno.protos.limits import MOST

from . import announcements, doubts, membership, memory, running
from .checkpoints import in_memory_alone, newest_on_disk, resume_point
from .chronicle import Kind
from .events import Reply
from .registration import take_up_again
from .state import Job, Node, Phase, SaveOrder
from .stopped import goes_on, how_stopped, where
from .turn import Turn, names, of_nodes

__all__ = ("drain_node", "fence", "look_at_stop", "save_now", "start", "stop")


# Seconds after which the nodes of a job that stops have gone, if not one of them has a connection. An agent that lost
# its own connects again sooner.
DESERTED_SECONDS = 8.0
# Bits of a number of an order below those of the generation.
GENERATION_SHIFT = 24
# The most incarnations whose agents are not let in again; the oldest are forgotten.
MOST_SHUT_OUT = 64


def drain_node(turn: Turn, message: control_pb2.DrainNodeRequest) -> Reply:
    """Tells one node to go, as soon as the run is saved."""
    job = turn.job
    node = job.nodes.get(message.node)
    if job.phase.is_terminal:
        return refusal(f"the job has ended ({job.message}): no node has to go")
    if node is None:
        there = f"it has {names(sorted(job.nodes))}" if len(job.nodes) else "it has none just now"
        return Reply("NOT_FOUND", f"no node of the job is called {message.node!r}: {there}")
    if node.leaving:
        return done(turn, f"{node.name} is leaving already", incarnation=node.incarnation)
    order_to_go(turn, node)
    text = f"{node.name} goes by order"
    turn.notice(text, kind=Kind.ORDERED, nodes=(node.name,))
    return done(turn, f"{text}, as soon as the run is saved{then(turn)}", incarnation=node.incarnation)


def then(turn: Turn) -> str:
    """What follows for the others, if they are too few; with a comma in front."""
    job = turn.job
    stay = len(job.nodes) - len(job.nodes.leavers)
    if stay >= job.settings.least_nodes:
        return ""
    return f"; then the run waits for nodes: {of_nodes(stay)} left, at least {job.settings.least_nodes} needed"


def order_to_go(turn: Turn, node: Node) -> None:
    """Gives a node a notice of --drain-timeout."""
    membership.give_notice(turn, node, turn.job.settings.drain_timeout)


def fence(turn: Turn, message: control_pb2.FenceNodeRequest) -> Reply:
    """Closes a node's epoch at once: what it still says is answered NOT_FOUND, and nothing of it counts any more.

    `for_good`: the agent, which would register anew, is refused then. Another one on its machine is not.
    """
    node = turn.job.nodes.get(message.node)
    if node is None or message.incarnation not in ("", node.incarnation):
        return Reply("NOT_FOUND", f"{message.node!r} is not registered as {message.incarnation or 'a node'} any more")
    if message.left and not node.leaving:
        node = turn.update(node, leaving=True)
    why = message.reason or "fenced by order"
    if message.for_good:
        turn.live.shut_out[node.incarnation] = why
        while len(turn.live.shut_out) > MOST_SHUT_OUT:
            del turn.live.shut_out[next(iter(turn.live.shut_out))]
    membership.lose(turn, [(node, why)])
    return done(turn, f"{node.name} is fenced")


def stop(turn: Turn, message: control_pb2.StopRequest) -> Reply:
    """Tells all nodes to go, and lets nobody in any more."""
    job = turn.job
    if job.phase is Phase.SUCCEEDED:
        return refusal(f"the job has ended ({job.message}): there is nothing to stop")
    if job.phase is Phase.STOPPED:
        return done(turn, job.message)
    before = job.sequence
    if job.stopping:
        return done(turn, "the job is being stopped already", event=before)
    if job.phase is Phase.FAILED:
        # Its supervisors may start agents again and again.
        end_stopped(turn)
        return done(turn, job.message, event=before)
    job.stopping = True
    turn.notice("the job stops by order", kind=Kind.ORDERED)
    for node in list(job.nodes.values()):
        if not node.leaving:
            order_to_go(turn, node)
    if not len(job.nodes):
        return done(turn, f"no node is here: the run goes on from {where(job)}{goes_on(job)}", event=before)
    text = f"{of_nodes(len(job.nodes))} save at the next step boundary and go{goes_on(job)}"
    return done(turn, text, event=before)


def look_at_stop(turn: Turn) -> bool:
    """Ends a job that is being stopped, once everybody has gone. Returns whether anything changed."""
    job = turn.job
    if not job.stopping:
        return False
    if len(job.nodes):
        return lose_deserters(turn)
    if job.phase not in (Phase.WAITING, Phase.FORMING):
        return False
    end_stopped(turn)
    return True


def lose_deserters(turn: Turn) -> bool:
    """Takes nodes that go for gone if not one of them is connected any more. Returns whether they were.

    While nobody at all is heard, silence proves nothing, so that no other deadline would ever come. Here nothing
    follows from it: what a node has sealed meanwhile counts when it comes back.
    """
    live = turn.live
    nodes = list(turn.job.nodes.values())
    if any(not node.leaving or is_connected(turn, node) for node in nodes):
        live.deserted_at = None
        return False
    if live.deserted_at is None:
        live.deserted_at = turn.now
    if not turn.due(live.deserted_at + DESERTED_SECONDS):
        return False
    live.deserted_at = None
    membership.lose(turn, [(node, "the job stops") for node in nodes])
    return True


def is_connected(turn: Turn, node: Node) -> bool:
    """Whether this master has a connection to the node's agent; a new master has none at first."""
    presence = turn.presence(node)
    return presence.opened and presence.closed is None


def end_stopped(turn: Turn) -> None:
    """Ends the job so that it can be started again. Nobody is left, so that what was in memory alone is gone."""
    job = turn.job
    while (record := in_memory_alone(job)) is not None:
        doubts.give_up(turn, record, "the nodes that held it are gone")
    failure = job.ending.message if job.ending is not None else ""
    running.end(turn, Phase.STOPPED, how_stopped(job, failure))


def start(turn: Turn, message: control_pb2.StartRequest) -> Reply:
    """Lets agents of a stopped job in again."""
    job = turn.job
    if job.stopping:
        return refusal("the job is still being stopped: try again when its nodes have gone")
    if job.phase is not Phase.STOPPED:
        return refusal(f"the job is not stopped ({job.phase.value}): there is nothing to start")
    # Agents that were told that it has stopped are leaving, or come back.
    take_up_again(turn)
    text = f"started by order: {job.run_id} goes on from {where(job)} when nodes come"
    turn.notice(text, kind=Kind.ORDERED)
    return done(turn, text)


def save_now(turn: Turn, message: control_pb2.SaveNowRequest) -> Reply:
    """Has the ranks save at the next boundary and train on."""
    job = turn.job
    if not job.phase.has_workers:
        head = resume_point(job)
        kept = f"the newest checkpoint is {head.name}" if head is not None else "nothing is saved"
        return refusal(f"no ranks are at work that could save ({job.phase.value}): {kept}")
    if not job.has_session or turn.open.saves_nothing:
        why = "the script's loop saves nothing" if job.has_session else announcements.no_session(turn)
        return refusal(f"{why}: the ranks save nothing by order")
    after = running.last_step(turn)
    if job.save_order is None or job.save_order.after != after:
        # Ranks follow an order once. If one still stands, their save may have failed, or the run went back since.
        job.save_order = SaveOrder(order_number(job), after)
        turn.notice("the ranks save at the next boundary, by order", kind=Kind.ORDERED, step=after)
    text = f"the ranks save behind step {after}, and train on"
    if memory.to_memory(turn.state, somebody_stays=True):
        text += "; agents write it from memory to the disk"
    before, order = newest_on_disk(job), job.save_order
    return done(turn, text, step=order.after, number=order.number, before=before.name if before is not None else "")


def order_number(job: Job) -> int:
    """A number above all that ranks know, which follow no other. A master that lost its store counts events from 1.

    Its generation is above the one that agents knew; where one is as large as no job's, agents still take the number.
    """
    generation = min(job.generation, (MOST >> GENERATION_SHIFT) - 1)
    return (generation << GENERATION_SHIFT) + job.sequence + 1


def done(turn: Turn, text: str, **more: Any) -> Reply:
    return Reply(message=control_pb2.OrderReply(generation=turn.job.generation, text=text, **more))


def refusal(why: str) -> Reply:
    return Reply("FAILED_PRECONDITION", why)
