"""That a job is over, although it has not ended yet. Part of the record, see `state`."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("Ending",)


@dataclass(frozen=True)
class Ending:
    """The job has failed, but for what it has in memory alone. See `ending`."""

    # Why, for a person; and whether that is an event's line.
    message: str
    notice: bool
