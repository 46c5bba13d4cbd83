"""Ways out of a worker that no one can take for success."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

from dalsegno.protos.contract import WORKER_BAD_CHECKPOINT, WORKER_DRAINED, Variable

from .remarks import remark

# So long the threads of a script that has ended may go on; and how the names of ours begin.
THREADS_SECONDS, OURS = 5.0, "dalsegno-"

EXIT_DRAINED = WORKER_DRAINED
EXIT_BAD_CHECKPOINT = WORKER_BAD_CHECKPOINT


class Drained(SystemExit):
    """The run was saved at the agreed boundary, and this process must end, unfinished. Exit code 83."""

    def __init__(self) -> None:
        super().__init__(EXIT_DRAINED)


class Stays(BaseException):
    """The run was saved, and this process may wait for a place in the next world.

    Only the loop that has asked for this sees it.

    Attributes:
        holds: The checkpoint that this process's state is equal to, see ``protos.staying.Wait``.
        broken: The world has broken, and this may come between any two instructions of the loop's body.
    """

    def __init__(self, holds: Mapping[str, str], *, broken: bool = False) -> None:
        super().__init__("everything is saved, and this process waits for a place")
        self.holds, self.broken = holds, broken


class BadResumePoint(SystemExit):
    """The resume point cannot be loaded; the agent has been told. Exit code 84."""

    def __init__(self) -> None:
        super().__init__(EXIT_BAD_CHECKPOINT)


log = logging.getLogger(__name__)


class _Exit:
    """The exit code that was decided. The process ends with it whatever the script does with the exception."""

    code: int | None = None
    # That of a script that fails by itself.
    failed = 1
    # Whether the script's threads are looked at behind its end.
    watched = False


def insist(code: int) -> None:
    """Makes this process end with ``code``, even if the script swallows the exception or fails while it ends.

    Its threads have some seconds for that. (Python would wait for those that are no daemons before it calls a handler,
    and all other ranks for this one.)
    """
    first, _Exit.code = _Exit.code is None, code
    if first:
        # Registered last, so it runs first at exit, before handlers that could end the process in another way.
        atexit.register(_end)
        let_no_thread_delay()


def let_no_thread_delay(code: int = 1) -> None:
    """Gives the script's threads some seconds behind its end, for which others wait. Its handlers run as ever.

    Args:
        code: What the process ends with if they go on, unless that is decided.
    """
    _Exit.failed = code
    if not _Exit.watched:
        _Exit.watched = True
        late = threading.Thread(target=_end_late, args=(_end_of_script(),), name="dalsegno-exit", daemon=True)
        try:
            late.start()
        except RuntimeError as error:
            log.debug("threads of the script's may hold up its end, as none can watch them: %s", error)


def let_threads_go_on() -> None:
    """Takes `let_no_thread_delay` back: the script has caught and shown what looked like its end, and has finished."""
    if not is_decided():
        _Exit.watched = False


def is_decided() -> bool:
    """Whether the exit code is decided, so that what else goes wrong changes nothing."""
    return _Exit.code is not None


def end_if_decided() -> None:
    """Ends this process if an agent waits for its end, and the script goes on all the same: it swallows exceptions."""
    if _Exit.code is not None and os.environ.get(Variable.SOCKET):
        _end()


def end_at_once(code: int) -> NoReturn:
    """Ends this process without handlers and destructors, and without waiting for threads."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:
        # Also where a stream cannot be flushed: a call that interrupts a print cannot flush what that has.
        os._exit(code)


def _end_of_script() -> Callable[[], object]:
    """What waits until the main thread has nothing to do any more but to wait for others."""
    over = threading.Event()
    try:
        # Before all joins, those of executors too. Nothing public is called so early.
        threading._register_atexit(over.set)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return threading.main_thread().join
    return over.wait


def _end_late(script_ends: Callable[[], object]) -> None:
    """Ends the process where threads of the script's keep it behind its end. Ours write what is to be saved."""
    script_ends()
    if not _Exit.watched:
        return
    kept = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
    ours = [thread for thread in kept if thread.name.startswith(OURS)]
    for thread in ours:
        thread.join()
    end = time.monotonic() + THREADS_SECONDS
    for thread in (one for one in kept if one not in ours):
        thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            remark(
                "the script's thread %s goes on %g s after the script's end, and this process must end: make it a"
                " daemon, or end it with the script",
                thread.name,
                THREADS_SECONDS,
            )
            _end()


def _end() -> NoReturn:
    """Does what Python would still do that others can notice, then exits without running C++ destructors.

    Destructors of collective libraries abort now and then (exit code -6 instead of ours).
    """
    utilities = sys.modules.get("multiprocessing.util")
    try:
        if utilities is not None:
            utilities._exit_function()
        logging.shutdown()
    finally:
        end_at_once(_Exit.code if _Exit.code is not None else _Exit.failed & 0xFF)
