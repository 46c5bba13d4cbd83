"""Imported by multiprocessing's fork server only. The server ignores notices; the processes that it forks do not."""

from __future__ import annotations

import os
import signal

from ..rank.notices import noticed

_before = {number: signal.signal(number, signal.SIG_IGN) for number in noticed()}


def _put_back() -> None:
    for number, handler in _before.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


os.register_at_fork(after_in_child=_put_back)
