"""Holds up the main thread between two of its steps, so that it is not in the midst of a call meanwhile."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator

__all__ = ["stillness"]

# Nobody holds it up for longer, whatever happens.
_MOST_SECONDS = 30.0
_CALL = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
# Calls that the interpreter may still make.
_asked: list[object] = []


@contextlib.contextmanager
def stillness(wanted: bool) -> Iterator[Callable[[], bool]]:
    """Until its end the main thread stands still as soon as it comes to its next step in Python. For other threads.

    What is called inside must take no lock that a script may hold. A main thread in native code runs on.

    Args:
        wanted: False: it stands still anyway.

    Yields:
        Says whether it stands still.
    """
    begun, over = threading.Event(), threading.Event()
    if wanted:
        _ask(begun, over)
    else:
        begun.set()
    try:
        yield begun.is_set
    finally:
        over.set()


def _ask(begun: threading.Event, over: threading.Event) -> None:
    def wait(_: object) -> int:
        try:
            begun.set()
            over.wait(_MOST_SECONDS)
        except BaseException as error:  # a signal's handler: raised again where the thread goes on
            main = ctypes.c_ulong(threading.main_thread().ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(type(error)))
        return 0

    call = _CALL(wait)
    _asked.append(call)
    # If too many wait already, it goes without.
    ctypes.pythonapi.Py_AddPendingCall(call, None)
