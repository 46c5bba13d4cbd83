"""How a job that ends, or has ended, is taken up again: for people."""

from __future__ import annotations

from .checkpoints import resume_point
from .state import Job

__all__ = ("goes_on", "how_stopped", "where")


def where(job: Job) -> str:
    """Where the run resumes."""
    head = resume_point(job)
    return f"step {head.step}" if head is not None else "step 0"


def goes_on(job: Job) -> str:
    """How a stopped job is taken up again; with a semicolon in front."""
    return "; the same command goes on with it" if job.embedded else "; dalsegno start lets agents go on with it"


def how_stopped(job: Job, failure: str = "") -> str:
    """How a stopped job has ended. `failure`: for what it would have ended in any case."""
    beside = f" (it failed meanwhile: {failure})" if failure else ""
    return f"the job was stopped by order{beside}: {job.run_id} goes on from {where(job)}{goes_on(job)}"
