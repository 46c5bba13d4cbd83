"""Scaling down by order of a person or tool: the world drains, and its first nodes go on."""

from __future__ import annotations

from dataclasses import replace

from dalsegno.protos import control_pb2

from .checkpoints import only_size
from .chronicle import Kind
from .events import Reply
from .state import Job, MemberState, Node
from .turn import Turn, of_nodes


def scale(turn: Turn, message: control_pb2.ScaleRequest) -> Reply:
    """Sets or lifts the limit. The same again changes nothing, but takes in newcomers that are held off."""
    job, settings = turn.job, turn.job.settings
    if job.phase.is_terminal:
        return Reply("FAILED_PRECONDITION", f"the job has ended ({job.message}): there is nothing to scale")
    if not job.settled:
        return Reply("FAILED_PRECONDITION", "no agent has said the job's --nnodes yet: start one first")
    if not settings.min_nodes <= usable(job, message.nodes) <= message.nodes <= settings.max_nodes:
        unit = f" in steps of --node-unit={settings.node_unit}" if settings.node_unit > 1 else ""
        return Reply(
            "INVALID_ARGUMENT",
            f"cannot scale to {message.nodes} nodes: --nnodes={settings.min_nodes}:{settings.max_nodes}{unit} allows"
            f" {settings.min_nodes} to {settings.max_nodes}",
        )
    if job.world is not None and message.nodes < len(job.world.members) and not loads_with(job, message.nodes):
        return Reply(
            "FAILED_PRECONDITION",
            f"cannot scale to {of_nodes(message.nodes)}: what the run saves loads with {only_size(job)} workers only",
        )
    turn.live.scaled_at = turn.heard
    limit = message.nodes if message.nodes < settings.max_nodes else 0
    count = len(job.world.members) if job.world is not None else 0
    if limit != job.limit:
        job.limit = limit
        # A person who asks for a number of nodes wants it tried, whatever failed before.
        turn.update_run(shapes=replace(job.run.shapes, failed=()))
        had = f", the world has {count}" if count else ""
        turn.notice(f"scaled to {of_nodes(message.nodes)}{had}", kind=Kind.SCALED)
    return Reply(message=control_pb2.ScaleReply(generation=job.generation, limit=job.most_nodes, nodes=count))


def is_too_large(turn: Turn) -> bool:
    """The open world has more nodes than the next one may have."""
    world = turn.job.world
    return world is not None and len(world.members) > turn.job.most_nodes


def has_shrunk(turn: Turn, old: set[str], nodes: list[Node]) -> bool:
    """The limit leaves out a live node of the last world, whose incarnations are `old`."""
    job = turn.job
    chosen = {node.incarnation for node in nodes}
    out = any(node.incarnation in old - chosen and not node.leaving for node in job.nodes.values())
    return bool(job.limit) and out and len(nodes) >= usable(job, job.limit)


def usable(job: Job, count: int) -> int:
    """How many of `count` nodes a world may have: a multiple of --node-unit."""
    return count - count % max(1, job.settings.node_unit)


def loads_with(job: Job, count: int) -> bool:
    """Whether the first `count` nodes of the world could resume from what the run saves."""
    members = job.world.members[: usable(job, count)] if job.world is not None else ()
    return only_size(job) in (0, sum(member.nproc for member in members))


def wants_to_shrink(turn: Turn) -> bool:
    """Whether a scale-down starts: once the epoch has made a step; if one was put off, with the next commit."""
    job, epoch = turn.job, turn.open
    if not job.limit or job.world is None or epoch.ended or not is_too_large(turn):
        return False
    if any(part is not MemberState.RUNNING for part in job.parts.values()) or not loads_with(job, job.most_nodes):
        return False
    if not job.has_session:
        return job.told.start  # before that its hello may be on its way
    return epoch.first_step_at is not None and not epoch.put_off
