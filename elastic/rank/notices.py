"""A notice to leave that reaches a worker directly: systemd, Slurm and shells signal all processes of a group alike.

A worker with a session treats the notice as the drain flag, no matter who else has received it: the run saves at the
next step boundary. Processes that this one forks get back the handlers that the script had, so that ``terminate()``
still ends them.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any

from dalsegno.protos.contract import Variable

log = logging.getLogger(__name__)

DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


def noticed() -> tuple[signal.Signals, ...]:
    """The signals that count as a notice: those that the agent names; outside ``dlrover-run`` only SIGTERM."""
    if not os.environ.get(Variable.SOCKET):
        return (signal.SIGTERM,)
    names = os.environ.get(Variable.NOTICES, DEFAULT).split(",")
    return tuple(signal.Signals[name] for name in names if name in signal.Signals.__members__)


class Notice:
    """Whether this process has received a notice. Main thread only."""

    def __init__(self) -> None:
        self.given = False
        self._before: dict[signal.Signals, Any] = {}

    def watch(self, signals: Sequence[signal.Signals]) -> None:
        """Takes these signals for a notice from now on. A signal that is ignored (``nohup``) stays ignored."""
        if self._before:
            return
        if threading.current_thread() is not threading.main_thread():
            names = ", ".join(number.name for number in signals)
            log.warning("session() was not called in the main thread: %s will not save before it stops", names)
            return
        for number in signals:
            before = signal.getsignal(number)
            if before is not signal.SIG_IGN:
                # None: the handler is not Python's, so nobody could put it back.
                self._before[number] = signal.SIG_DFL if before is None else before
                signal.signal(number, self._heard)
        _watching.add(self)

    def release(self) -> None:
        """Restores the handlers that were there before, unless the script has replaced ours since."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            if signal.getsignal(number) == self._heard:
                signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self.given = True


# Handlers are this process's, not those of what it forks. (What is registered there stays for ever.)
_watching: weakref.WeakSet[Notice] = weakref.WeakSet()


def _release_all() -> None:
    for one in list(_watching):
        one.release()


os.register_at_fork(after_in_child=_release_all)
