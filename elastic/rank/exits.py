"""Ways out of a worker that no one can take for success."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import NoReturn

from dalsegno.protos.contract import WORKER_BAD_CHECKPOINT, WORKER_DRAINED

EXIT_DRAINED = WORKER_DRAINED
EXIT_BAD_CHECKPOINT = WORKER_BAD_CHECKPOINT


class Drained(SystemExit):
    """The run was saved at the agreed boundary and this process must go, unfinished. Exit code 83."""

    def __init__(self) -> None:
        super().__init__(EXIT_DRAINED)


class BadResumePoint(SystemExit):
    """The resume point cannot be loaded; the agent has been told. Exit code 84."""

    def __init__(self) -> None:
        super().__init__(EXIT_BAD_CHECKPOINT)


class _Exit:
    """The exit code that was decided; whatever the script makes of the exception, the process ends with it."""

    code: int | None = None


def insist(code: int) -> None:
    """From now on this process ends with ``code``, even if the script swallows the exception or fails while it ends."""
    if _Exit.code is None:
        # Registered now and so run first at exit, before handlers that could end the process otherwise.
        atexit.register(_end)
    _Exit.code = code


def _end() -> NoReturn:
    """Does what Python would still do that others can notice, then leaves without running C++ destructors.

    Collective libraries abort in them now and then (exit code -6 instead of ours).
    """
    utilities = sys.modules.get("multiprocessing.util")
    try:
        if utilities is not None:
            utilities._exit_function()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
    finally:
        os._exit(_Exit.code if _Exit.code is not None else 1)
