"""What must hold after every event. The running master asserts it, and the simulator checks it."""

from __future__ import annotations

from itertools import pairwise

from .live import State
from .state import Phase

# How many of the newest commits are checked after each event.
RECENT = 8


class InvariantBroken(AssertionError):
    """A bug in the master: the state says something that must never be."""


def check(state: State) -> None:
    """Raises `InvariantBroken` if the state contradicts itself."""
    job = state.job
    world = job.world
    if job.phase.has_workers and (world is None or world.epoch != job.epoch):
        raise InvariantBroken(f"{job.phase.value} without the world of epoch {job.epoch}")
    if world is not None:
        if world.epoch > job.epoch:
            raise InvariantBroken(f"world of epoch {world.epoch} above {job.epoch}")
        if world.first_ranks and world.members[-1].group_rank != len(world.members) - 1:
            raise InvariantBroken(f"the last of {len(world.members)} members has rank {world.members[-1].group_rank}")
        if len(job.parts) != len(world.members):
            raise InvariantBroken(f"{len(world.members)} members with {len(job.parts)} parts")
        if world.resume and job.phase.has_workers and job.checkpoint(world.resume) is None:
            raise InvariantBroken("the resume point of the open world was deleted from the record")
    if job.phase is Phase.DRAINING and job.drain is None:
        raise InvariantBroken("draining without a drain")
    if job.phase is not Phase.DRAINING and job.drain is not None:
        raise InvariantBroken(f"{job.phase.value} with a drain")
    if (job.drain is None) is not (state.live.epoch.drain is None):
        raise InvariantBroken("a drain without its life, or the life of one that is over")
    if job.ending is not None and job.phase not in (Phase.WAITING, Phase.FORMING):
        raise InvariantBroken(f"{job.phase.value} although the job is over")
    check_commits(state)


def check_commits(state: State) -> None:
    """Checks that steps grow within an epoch. Only the last commits are checked: the record grows with the run."""
    job = state.job
    last = job.checkpoints.newest(RECENT)
    # Behind a damaged one the run goes on from an older step, which may be one in memory that was not recorded before.
    # Behind what is kept aside it goes on from a milestone, which the record may have had to learn anew.
    # A candidate for the best one may come to the disk behind newer ones: it says of itself that it is the best.
    for newer, older in pairwise(record for record in last if record.best != record.name):
        if newer.epoch == older.epoch and newer.step <= older.step and not (older.damaged or older.aside):
            raise InvariantBroken(f"committed steps of epoch {newer.epoch} do not grow")
    for record in last:
        if record.epoch > job.epoch and not job.recollection.listening:
            raise InvariantBroken(f"{record.name} is of an epoch that was never opened")
