"""The last look at what a script saved, which is worth more than one try."""

from __future__ import annotations

import time

from .adoption import Adopter

__all__ = ["settled"]

# Seconds between the last looks while the file system does not allow all of one (ESTALE, a mount that is away).
_PAUSES_SECONDS = (0.5, 1.5)


def settled(adopter: Adopter, timeout_seconds: float, *, ended_well: bool = True) -> None:
    """See `Adopter.settle`. Nobody looks later: one look that fails must not cost the last save.

    Args:
        adopter: of the epoch that ends.
        timeout_seconds: what all may take.
        ended_well: see there.
    """
    deadline = time.monotonic() + timeout_seconds
    for pause in (*_PAUSES_SECONDS, None):
        if adopter.settle(max(0.0, deadline - time.monotonic()), ended_well=ended_well) or pause is None:
            return
        if time.monotonic() + pause > deadline:
            return
        time.sleep(pause)  # why: no event tells when a file system works again
