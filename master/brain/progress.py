"""What counts as progress of a run: after it the failure budget is full again."""

from __future__ import annotations

from dataclasses import replace

from .state import Budget

__all__ = ("is_further", "refilled")


def is_further(budget: Budget, step: int) -> bool:
    """Whether a save of this step is progress: beyond the failure before, or beyond all saves before.

    A process that dies with its second save leaves one more each time, and the run comes further, although no save is
    beyond the failure before. What always fails at one step ends the job all the same: nothing is saved beyond it, and
    what is saved again, after the run had gone back, counts for nothing. That holds where steps are counted: a save
    that names none is taken as one step more (agent/storage/slices.py).
    """
    return step > min(budget.last_step, budget.saved_step)


def refilled(budget: Budget, step: int) -> Budget:
    """The budget after progress: a save of this step."""
    return replace(budget, failures=0, doubtful=(), saved_step=max(budget.saved_step, step))
