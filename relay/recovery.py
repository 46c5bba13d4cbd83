"""What a pod trains from: the volume, a milestone, the baseline, or nothing. Pure.

Never silently from the baseline, or from nothing, while something better exists: then the pod waits, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

__all__ = ("Age", "PodKnowledge", "Way", "in_line", "way_of")

# What `CheckpointName.age` returns: epoch, step, attempt.
Age = tuple[int, int, int]


class Way(str, Enum):
    """Where the run goes on from."""

    # A checkpoint on the volume that verified.
    VOLUME = "volume"
    # The newest milestone, restored to the volume.
    MILESTONE = "milestone"
    # The run has committed checkpoints, and none is in sight: the agent looks for them, and says so.
    LOOK = "look"
    # All that is on the volume is damaged, and there is nothing else: a person decides.
    STUCK = "stuck"
    BASELINE = "baseline"
    SCRATCH = "scratch"


@dataclass(frozen=True)
class PodKnowledge:
    """What a pod knows before it starts its agent.

    Attributes:
        intact: a checkpoint on the volume verified, byte by byte.
        damaged: some on the volume did not, or could not be read.
        head: the Commander has recorded a checkpoint.
        milestones: how many it has recorded, and may still be tried.
        baseline: `run.yaml` has one.
        allowed: somebody said that the run may begin anew (`--allow-baseline`).
        newer: one of these milestones is newer than what is intact on the volume.
    """

    intact: bool
    damaged: bool
    head: bool
    milestones: int
    baseline: bool
    allowed: bool = False
    newer: bool = False


def way_of(known: PodKnowledge) -> Way:
    """The best that there is. A milestone that cannot be reached is waited for, so it stays the answer."""
    if known.intact:
        return Way.MILESTONE if known.newer else Way.VOLUME
    if known.milestones and not known.allowed:
        return Way.MILESTONE
    if known.damaged and not known.allowed:
        return Way.STUCK
    if known.head and not known.allowed:
        return Way.LOOK
    return Way.BASELINE if known.baseline else Way.SCRATCH


def in_line(age: Age, last: Age, began: Mapping[int, Age]) -> bool | None:
    """Whether the run came by a checkpoint on its way to its last one; None: that is not known.

    Args:
        age: the checkpoint's.
        last: that of the run's last checkpoint.
        began: from what each epoch began, as far as that is known; an age of zeros: from none.
    """
    at = last
    while at[0] > age[0]:
        start = began.get(at[0])
        if start is None or start[0] >= at[0]:
            return None
        at = start
    return age <= at
