"""Ways out of a worker that no one can take for success."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from dalsegno.protos.contract import WORKER_BAD_CHECKPOINT, WORKER_DRAINED

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


class _Exit:
    """The exit code that was decided. The process ends with it whatever the script does with the exception."""

    code: int | None = None


def insist(code: int) -> None:
    """Makes this process end with ``code``, even if the script swallows the exception or fails while it ends."""
    if _Exit.code is None:
        # Registered last, so it runs first at exit, before handlers that could end the process in another way.
        atexit.register(_end)
    _Exit.code = code


def end_at_once(code: int) -> NoReturn:
    """Ends this process without handlers and destructors, and without waiting for threads."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:
        # Also where a stream cannot be flushed: a call that interrupts a print cannot flush what that has.
        os._exit(code)


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
        end_at_once(_Exit.code if _Exit.code is not None else 1)
