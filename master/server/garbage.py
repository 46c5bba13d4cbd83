"""How often the garbage of a master's processes is collected."""

from __future__ import annotations

import gc

__all__ = ("collect_rarely",)


def collect_rarely() -> None:
    """Keeps garbage collections short, and full ones rare: with thousands of nodes one takes 0.2 s and finds nothing.

    Each holds up all threads. With ten times as many objects at a time, those behind hundreds of requests took 0.02 to
    0.17 s.
    """
    gc.freeze()
    gc.set_threshold(2_000, 5, 1_000)
