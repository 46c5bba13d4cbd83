"""What pods, foreign workers and the Commander call the same: the states of a run, and where its HTTP edge has what.

Standard library only.
"""

from __future__ import annotations

from enum import Enum

__all__ = (
    "ACQUIRE_PATH",
    "EXPIRE",
    "MILESTONES",
    "RELEASE",
    "RENEW_PATH",
    "REPORT_PATH",
    "RUNS_PATH",
    "RunState",
    "run_path",
)

# The runs; and below a run's own path its milestones, and the orders that fence whoever holds it: a holder that is
# known dead, and any holder, for good.
RUNS_PATH = "/api/relay"
MILESTONES = "/milestones"
EXPIRE = "/expire"
RELEASE = "/release"
# For workers that are not ours.
ACQUIRE_PATH = "/api/lease/acquire"
RENEW_PATH = "/api/lease/renew"
REPORT_PATH = "/api/job/report"


class RunState(str, Enum):
    """How a run stands, for people: on the Commander, in `state.json`, and in what foreign workers report.

    WAITING: nobody has ever held it. RUNNING: somebody holds it. PREEMPTED: whoever held it is gone, and somebody else
    may go on. FAILED: its holder said that it cannot go on; the next one may all the same. COMPLETED: it is over.
    """

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    PREEMPTED = "PREEMPTED"
    FAILED = "FAILED"
    COMPLETED = "COMPLETED"


def run_path(run_id: str) -> str:
    """Where a run is, and what belongs to it."""
    return f"{RUNS_PATH}/{run_id}"
