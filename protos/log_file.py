"""A log file of a program that runs for months: bounded, and no reason to wait or to fail."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from .outlet import Outlet

__all__ = ["LARGEST_LOG_BYTES", "LogFile"]

# Bytes of a log file; one older file is kept beside it.
LARGEST_LOG_BYTES = 10_000_000


class LogFile(RotatingFileHandler):
    """A log of at most twice `LARGEST_LOG_BYTES` bytes.

    If it cannot be written (a full disk), that is said once, instead of a traceback for every line. A path that is not
    UTF-8 is written as Python shows it: `\\udce9`.

    Args:
        path: of the file.
        say: gets the line that it cannot be written; default: to standard error, which nobody waits for.
        program: the program's name, before that line.
    """

    _told = False

    def __init__(
        self, path: Path, say: Callable[[str], object] | None = None, *, program: str = "dlrover-run", **options: Any
    ) -> None:
        self._say = say or self._to_standard_error
        self._program = program
        options = {"errors": "backslashreplace", **options}
        super().__init__(path, maxBytes=LARGEST_LOG_BYTES, backupCount=1, encoding="utf-8", **options)

    def handleError(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            reason = error.strerror or error
            self._say(f"{self._program}: warning: the log {self.baseFilename} cannot be written: {reason}")

    def _to_standard_error(self, line: str) -> None:
        # Where it is closed its number may be any file's. Where no thread can be started, nobody may wait, either.
        with contextlib.suppress(RuntimeError):
            outlet = Outlet(None if sys.stderr is None else 2, self._program)
            outlet.put(f"{line}\n".encode(errors="backslashreplace"))
