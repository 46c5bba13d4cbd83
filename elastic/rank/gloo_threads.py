"""The threads of gloo's, as the interpreter ends."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import time
from pathlib import Path

__all__ = ["settle_at_exit"]

_NAME = "pt_gloo_runloop"
_TASKS = Path("/proc/self/task")
# Between two looks. It is slept, so whoever waits for the interpreter gets it.
_LOOK_SECONDS = 0.002
# Looks in a row that have to find all of them at rest: one may have been about to ask for the interpreter.
_LOOKS = 2
_PATIENCE_SECONDS = 2.0


@functools.cache
def settle_at_exit() -> None:
    """Makes this process wait at its end, 2 s at most, until gloo's threads have let go of what they worked on.

    A little after a collective is done, the thread that did it drops the tensors, for which it needs the interpreter.
    If that is ending by then, CPython up to 3.13 ends the thread, and C++ aborts the process: exit code -6, "terminate
    called without an active exception", after all was done. Handlers that are registered later run before this one.
    """
    if _TASKS.is_dir():
        atexit.register(_settle)


def _settle() -> None:
    at_rest, until = 0, time.monotonic() + _PATIENCE_SECONDS
    while at_rest < _LOOKS and time.monotonic() < until:
        # why: nothing tells that a thread of C++'s rests
        time.sleep(_LOOK_SECONDS)
        at_rest = 0 if _is_at_work() else at_rest + 1


def _is_at_work() -> bool:
    """Whether some thread of gloo's runs, or would if a core were free; one that waits for a peer does neither."""
    for task in os.listdir(_TASKS):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            name, _, rest = (_TASKS / task / "stat").read_text().partition("(")[2].rpartition(")")
            if name == _NAME and rest.split()[0] == "R":
                return True
    return False
