"""What must hold after every event (DESIGN 4). Asserted in the running master, and checked by the simulator."""

from __future__ import annotations

from .state import Phase, State


class InvariantBroken(AssertionError):
    """A bug of the master's: the state says something that must never be."""


def check(state: State) -> None:
    """Raise `InvariantBroken` if the state contradicts itself."""
    job = state.job
    world = job.world
    if job.phase.has_workers and (world is None or world.epoch != job.epoch):
        raise InvariantBroken(f"{job.phase.value} without the world of epoch {job.epoch}")
    if world is not None:
        if world.epoch > job.epoch:
            raise InvariantBroken(f"world of epoch {world.epoch} above {job.epoch}")
        ranks = [member.group_rank for member in world.members]
        if ranks != list(range(len(ranks))):
            raise InvariantBroken(f"group ranks {ranks}")
        if world.resume and job.phase.has_workers and job.checkpoint(world.resume) is None:
            raise InvariantBroken("the resume point of the open world was deleted from the record")
    if job.phase is Phase.DRAINING and job.drain is None:
        raise InvariantBroken("draining without a drain")
    if job.phase is not Phase.DRAINING and job.drain is not None:
        raise InvariantBroken(f"{job.phase.value} with a drain")
    steps: dict[int, int] = {}
    for record in job.checkpoints:
        if record.step <= steps.get(record.epoch, -1):
            raise InvariantBroken(f"committed steps of epoch {record.epoch} do not grow")
        steps[record.epoch] = record.step
        if record.epoch > job.epoch and not job.listening:
            raise InvariantBroken(f"{record.name} is of an epoch that was never opened")
