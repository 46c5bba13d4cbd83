"""People and tools give orders: a node goes, the ranks save now, the job stops and starts again."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from dalsegno.master.brain.events import Called, Reply
from dalsegno.master.brain.state import Job, SaveOrder
from dalsegno.protos import control_pb2

if TYPE_CHECKING:
    from .agents import SimAgent
    from .plan import Plan
    from .world import Simulation

ORDERS = ("order_leave", "order_leave", "order_save", "order_save", "stop_and_start")
# How many schedules have some.
ORDERED = 0.2
# Where nothing else happens, the ranks have saved by then (seconds): a step, a save of the longest kind, a commit.
SAVED_WITHIN = 60.0
# The most steps behind the last one known that a save by order is of: what the ranks make until all have heard of it.
SOON = 4
# Seconds between two tries to start a job that is still being stopped, and until agents come again.
AGAIN, COME = 2.0, 12.0


def orders_of(plan: Plan) -> None:
    """Adds some, drawn apart from everything else of the seed."""
    random = Random(f"orders {plan.seed}")
    if random.random() >= ORDERED or plan.silent:
        return
    names = random.choices(ORDERS, k=random.randint(1, 3))
    # One of them ends the schedule's picture of who is there; twice would be the same.
    names = [name for index, name in enumerate(names) if name != "stop_and_start" or name not in names[:index]]
    plan.happenings = sorted([*plan.happenings, *((random.uniform(3.0, plan.fault_time), name) for name in names)])


def _give(sim: Simulation, message: Message, what: str, heard: Callable[[Reply], None] = lambda _: None) -> list[Reply]:
    """Gives an order; the list gets the answer when there is one."""
    got: list[Reply] = []

    def answered(reply: Reply) -> None:
        sim.trace("person", "{}: {} {}", what, reply.code, reply.detail)
        got.append(reply)
        heard(reply)

    sim.master.receive(Called(message), answered)
    return got


def at_notice(agent: SimAgent) -> None:
    """Keeps in mind which workers an agent has when it is told to go."""
    if agent.group is not None and agent.group.alive:
        agent.group_at_notice, agent.broken_at_notice = agent.group, agent.group.collective.is_broken


def order_leave(sim: Simulation) -> None:
    """One node is told to go."""
    agent = sim.pick([one for one in sim.living() if one.state.node and not one.frozen])
    if agent is None:
        return
    # What is ordered may happen before the person has the answer.
    agent.noticed, agent.noticed_at = True, sim.clock.now
    at_notice(agent)

    def answered(reply: Reply) -> None:
        # A master that was held up answers later than anybody waits.
        if reply.code == "OK" and not agent.noticed:
            agent.noticed, agent.noticed_at = True, sim.clock.now
            at_notice(agent)

    request = control_pb2.DrainNodeRequest(job_id="job", node=agent.state.node)
    got = _give(sim, request, f"drain {agent.label}", answered)

    def heard() -> None:
        # Refused, or lost on the way: it may be told later, or never, and its ranks may be others by then.
        if (not got or got[0].code != "OK") and not agent.state.leaving:
            agent.noticed, agent.noticed_at, agent.group_at_notice = False, None, None

    sim.clock.after(1.0, heard)


def order_save(sim: Simulation) -> None:
    """The ranks are told to save and to train on."""
    began = sim.clock.now
    got = _give(sim, control_pb2.SaveNowRequest(job_id="job"), "save now")

    def looked() -> None:
        job = sim.master.job
        if not got or got[0].code != "OK" or job is None or job.save_order is None:
            return
        order = job.save_order
        quiet = sim.plan.kind == "planned" and not sim.plan.sync_time and not sim.plan.slow_disk
        since = sim.ledger.opened_at.get(job.epoch, 0.0)
        stands = quiet and since <= began and not job.phase.is_terminal and sim.ledger.last_step_at > began
        sim.ledger.require(
            not stands or order.after >= sim.plan.steps - 1,
            "a save by order is made",
            f"step {order.after} was the last one {SAVED_WITHIN:g} s ago, and nothing was committed behind it",
        )

    sim.clock.after(SAVED_WITHIN, looked)


def check_save(sim: Simulation, before: SaveOrder | None, job: Job) -> None:
    """Where only joins and notices happen, a save by order is of one of the next steps, not the next regular one."""
    head, plan = job.checkpoints.head, sim.plan
    if before is None or job.save_order is not None or head is None or job.phase.is_terminal:
        return
    if plan.kind != "planned" or plan.background or plan.memory_every or head.epoch != job.epoch or plan.shells:
        return
    sim.ledger.require(
        head.step <= before.after + SOON,
        "a save by order is made",
        f"it was ordered behind step {before.after}, and made at step {head.step}",
    )


def stop_and_start(sim: Simulation) -> None:
    """All nodes are told to go; then the job is started again, and other agents come."""
    if sim.ledger.success is not None or not sim.living():
        return
    sim.ledger.stops += 1
    for agent in sim.living():
        if agent.noticed:
            continue  # Its notice goes on, and is no longer for that.
        agent.noticed, agent.noticed_at = True, sim.clock.now
        agent.group_at_notice = None
        at_notice(agent)
    _give(sim, control_pb2.StopRequest(job_id="job"), "stop")
    sim.clock.after(COME, start, sim)


def was_stopped(agent: SimAgent) -> bool:
    """Whether the agent goes because it has heard that somebody has stopped the job."""
    leave = agent.state.leave
    return agent.state.phase == control_pb2.PHASE_STOPPED or (leave is not None and leave.stop)


def start(sim: Simulation) -> None:
    """Until the job can be started, or had not been stopped; an embedded master's job is started by its agents."""
    if sim.ledger.success is not None:
        return
    job = sim.master.job
    if sim.master.is_paused:
        sim.clock.after(AGAIN, start, sim)  # It may hear the order to stop only now.
        return
    if job is None or job.stopping or (job.phase.value == "stopped" and not sim.plan.embedded):
        _give(sim, control_pb2.StartRequest(job_id="job"), "start")
        sim.clock.after(AGAIN, start, sim)
        return
    for _ in range(sim.plan.settings.min_nodes):
        sim.clock.after(sim.random.uniform(0.5, 6.0), sim.start_later)
