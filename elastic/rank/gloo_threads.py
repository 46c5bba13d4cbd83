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
    before, until = None, time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < until:
        # why: nothing tells that a thread of C++'s rests
        time.sleep(_LOOK_SECONDS)
        found = _at_rest()
        # One that waits for the interpreter rests, too, but got it meanwhile, or has tried to.
        if found is not None and found == before:
            return
        before = found


def _at_rest() -> dict[str, list[str]] | None:
    """How often each thread of gloo's has stopped running; None if one runs, or would if a core were free.

    One that waits for a peer does neither.
    """
    found = {}
    for task in os.listdir(_TASKS):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            lines = (_TASKS / task / "status").read_text().splitlines()
            told = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
            if told.get("Name") == _NAME:
                if not told["State"].startswith("S"):
                    return None
                found[task] = [value for key, value in told.items() if key.endswith("_switches")]
    return found
