"""What is said of a process that a signal has ended."""

from __future__ import annotations

import signal

__all__ = ["killed_by"]

# Those with which the kernel enforces a limit.
_LIMITS = {
    signal.SIGXCPU: "its CPU time is used up: raise ulimit -t",
    signal.SIGXFSZ: "a file may be no larger: raise ulimit -f",
}


def killed_by(number: int) -> str:
    """`was killed by signal 9 (SIGKILL)`: with its name, and with the limit that it stands for."""
    try:
        known = signal.Signals(number)
    except ValueError:  # a real-time signal
        return f"was killed by signal {number}"
    limit = _LIMITS.get(known)
    return f"was killed by signal {number} ({known.name}{f'; {limit}' if limit else ''})"
