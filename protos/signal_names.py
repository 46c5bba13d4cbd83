"""What is said of a process that has ended, by a signal or by itself."""

from __future__ import annotations

import signal

__all__ = ["how_ended", "killed_by"]

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


def how_ended(code: int) -> str:
    """The same of a return code as `subprocess` gives it; or `exited with code 1`."""
    return killed_by(-code) if code < 0 else f"exited with code {code}"
