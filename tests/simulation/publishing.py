"""A mirror publishes checkpoints: what is answered stays on the record, and what was never committed is refused."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from dalsegno.master.brain.events import Called, Reply
from dalsegno.master.brain.published import Milestone
from dalsegno.protos import control_pb2

if TYPE_CHECKING:
    from .plan import Plan
    from .world import Simulation

# How many schedules have some.
PUBLISHED = 0.2
# Seconds that an upload takes: meanwhile the checkpoint may be deleted, and the master may die.
UPLOAD = (0.1, 20.0)
# Seconds after the answer for which the record is looked at again.
LATER = 15.0


def publishing_of(plan: Plan) -> None:
    """Adds some, drawn apart from everything else of the seed."""
    random = Random(f"publishing {plan.seed}")
    if random.random() < PUBLISHED and not plan.silent and plan.kind != "store":
        times = [random.uniform(3.0, plan.fault_time) for _ in range(random.randint(1, 4))]
        plan.happenings = sorted([*plan.happenings, *((at, "publish") for at in times)])


def publish(sim: Simulation) -> None:
    """The newest commit is uploaded, and told when that is done; beside it one that nobody has committed."""
    job = sim.master.job
    head = None if job is None else job.checkpoints.head
    if job is None or head is None or head.parts:
        return
    run = job.run.number
    made = Milestone("me/model", f"revision of {head.name}", head.step, head.name, head.digest)
    taken = Random(f"upload {sim.plan.seed} {sim.clock.now}").uniform(*UPLOAD)
    sim.clock.after(taken, tell, sim, made, run, True)
    sim.clock.after(
        taken, tell, sim, Milestone("me/model", "of a fenced node", head.step, head.name, "f" * 64), run, False
    )


def tell(sim: Simulation, made: Milestone, run: int, committed: bool) -> None:
    """Tells the master, which may be away."""
    said = control_pb2.Milestone(repo=made.repo, revision=made.revision, step=made.step)
    said.checkpoint.name, said.checkpoint.digest = made.checkpoint, made.digest

    def answered(reply: Reply) -> None:
        sim.trace("mirror", "{}: {} {}", made.revision, reply.code, reply.detail)
        job = sim.master.job
        if (
            reply.code not in ("OK", "FAILED_PRECONDITION")
            or job is None
            or job.run.number != run
            or sim.ledger.amnesia
        ):
            return
        sim.ledger.require(
            (reply.code == "OK") is committed, "only commits are published", f"{made.checkpoint}: {reply.detail}"
        )
        if committed:
            look(sim, made, run)
            sim.clock.after(LATER, look, sim, made, run)

    sim.master.receive(Called(control_pb2.MilestoneRequest(job_id="job", milestone=said)), answered)


def look(sim: Simulation, made: Milestone, run: int) -> None:
    """What was answered is on the record, unless the record was lost or another run has begun."""
    job = sim.master.job
    if job is not None and job.run.number == run and not sim.ledger.amnesia and not sim.ledger.stores_lost:
        sim.ledger.require(made in job.run.milestones, "a milestone stays", f"{made.revision} is gone")
