"""A rank's share of its node's cores, for what several threads copy faster than one: memory that is new."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from ..checkpoint.pool import Pool

__all__ = ["MOST_THREADS", "cores", "own_threads", "shared_out"]

# More do not copy faster.
MOST_THREADS = 4
Item = TypeVar("Item")


def cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_threads() -> int:
    """How many threads this rank may use at once: its share of the cores, at least 1 and at most 4."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, min(MOST_THREADS, cores() // max(1, int(ranks) if ranks.isdigit() else 1)))


def shared_out(work: Callable[[Sequence[Item]], None], items: Sequence[Item]) -> None:
    """Has ``items`` worked on by all of a rank's threads, each with a share of them.

    Args:
        work: Called with a share, on a thread of its own where there are several. What it does has to let go of the
            GIL, or it takes longer than on one thread.
        items: In any order.

    Raises:
        Exception: What ``work`` raised first, in the order of the shares; all have ended then.
    """
    threads = min(own_threads(), len(items))
    if threads <= 1:
        work(items)
        return
    with Pool(threads, thread_name_prefix="dalsegno-share") as pool:
        for _ in pool.map(work, [items[first::threads] for first in range(threads)]):
            pass
