"""What was published of a run, and what it may still be published of. Part of the record, see `state`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("MILESTONES_KEPT", "PRUNED_KEPT", "Milestone", "Pruned")

# The most milestones that are remembered, of those with a checkpoint and of those without; and the most checkpoints
# that were committed and whose files are gone: one of them may be on its way to where it is published, from a copy.
MILESTONES_KEPT = 16
PRUNED_KEPT = 256


@dataclass(frozen=True)
class Milestone:
    """A checkpoint that was published outside of the checkpoint directory.

    Attributes:
        repo: OWNER/NAME of a repository.
        revision: where all of it is there.
        step: the step that it is of.
        checkpoint: its name; empty for what a node without checkpoints of ours has published.
        digest: of its manifest; empty likewise.
    """

    repo: str
    revision: str
    step: int
    checkpoint: str = ""
    digest: str = ""


@dataclass(frozen=True)
class Pruned:
    """A checkpoint that was committed, and whose files were deleted later."""

    # They are numbered in the order of their deletion.
    number: int
    name: str
    digest: str
