"""Calls the main thread from another one, also out of a sleep: between two of its instructions, wherever it is."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

log = logging.getLogger(__name__)

# One that no library of training scripts uses.
SIGNAL = signal.SIGRTMAX - 3 if hasattr(signal, "SIGRTMAX") else signal.SIGUSR2
AGAIN_SECONDS = 0.02
# The main thread has not heard a call for so long: it waits in a library.
UNHEARD_SECONDS = 0.3


class Interrupt:
    """Made on the main thread; on another one, or where the signal is in use, it never calls.

    Args:
        then: Called on the main thread. Where that waits in a library it comes when that returns, before anything else.
        unheard: Called on a thread of its own where it does not return, now and then.
    """

    def __init__(self, then: Callable[[], None], unheard: Callable[[], None] = lambda: None) -> None:
        self._then, self._unheard = then, unheard
        self._over = threading.Event()
        self._works = False
        self._heard_at = 0.0
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(SIGNAL)
        # Another loop of this process may have had one.
        if before is signal.SIG_DFL or getattr(before, "__func__", None) is Interrupt._heard:
            signal.signal(SIGNAL, self._heard)
            self._works = True
        else:
            log.debug("signal %d is in use: the main thread is not called", SIGNAL)

    def begin(self) -> None:
        """Calls again and again from now on, on a thread of its own, until `close`. Any thread.

        Where no thread can be started, it calls once: who begins this has other things to do.
        """
        if not self._works or self._over.is_set():
            return
        try:
            threading.Thread(target=self._call, name="dalsegno-interrupt", daemon=True).start()
        except RuntimeError as error:
            log.debug("the main thread is called only once: %s", error)
            self._heard_at = time.monotonic()
            main = threading.main_thread()
            if main.ident is not None:
                signal.pthread_kill(main.ident, SIGNAL)

    def close(self) -> None:
        """No more calls."""
        self._over.set()

    def _call(self) -> None:
        main = threading.main_thread()
        self._heard_at = time.monotonic()
        while not self._over.is_set() and main.is_alive() and main.ident is not None:
            signal.pthread_kill(main.ident, SIGNAL)
            # A call that came at a bad moment is made again.
            self._over.wait(AGAIN_SECONDS)
            if time.monotonic() - self._heard_at > UNHEARD_SECONDS and not self._over.is_set():
                self._unheard()
                self._heard_at = time.monotonic()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        self._heard_at = time.monotonic()
        if not self._over.is_set():
            self._then()
