"""What a process's session does where its script calls ``sys.exit``, which Python shows no hook.

The agent that started the process sees that its script exits, and its session knows who waits for that. Neither imports
the other, so the one leaves here what the other calls.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["exits", "when_it_exits"]

_called: list[Callable[[SystemExit], object]] = []


def when_it_exits(call: Callable[[SystemExit], object]) -> None:
    """Has this called where the script exits as one that has failed, before its threads are waited for."""
    _called[:] = [call]


def exits(error: SystemExit) -> None:
    """The script exits. Does nothing where it does so as one that has ended well."""
    if error.code not in (0, None):
        for call in _called:
            call(error)
