"""What a person sees, and where everything else goes."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from dalsegno.protos.text import one_line

__all__ = ["Console", "set_up_logging"]

# Characters of one line.
_LONGEST = 4000

logger = logging.getLogger(__name__)


class Console:
    """One line per thing that happened to the run, on standard error, so that the script's output stays its own."""

    def __init__(self, name: str = "dlrover-run") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._last = ""

    def say(self, text: str, warning: bool = False) -> None:
        """Prints a line, unless it is the same as the one before. What others put into it cannot move the cursor."""
        text = one_line(text, _LONGEST)
        with self._lock:
            if text == self._last:
                return
            self._last = text
            mark = "warning: " if warning else ""
            try:
                print(f"{self._name}: {mark}{text}", file=sys.stderr, flush=True)
            except OSError as error:
                # The terminal was closed or its reader is gone: the run goes on, and the log has the line.
                logger.info("the console cannot be written: %s", error)
        logging.getLogger("dalsegno.agent.console").log(logging.WARNING if warning else logging.INFO, "%s", text)


class _Where(logging.Filter):
    """Puts `[job/node/epoch/step]` before every line."""

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self._where = where

    def filter(self, record: logging.LogRecord) -> bool:
        record.where = self._where()
        return True


class _LogFile(logging.FileHandler):
    """A log that cannot be written (a full disk) is told once, and does not flood the console with tracebacks."""

    _told = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._told:
            self._told = True
            reason = error.strerror or error
            print(f"dlrover-run: warning: the log {self.baseFilename} cannot be written: {reason}", file=sys.stderr)


def set_up_logging(
    path: Path, where: Callable[[], str], names: Sequence[str] = ("dalsegno", "torch.distributed")
) -> None:
    """Sends the log of this package and of torch's elastic parts (`names`) to a file.

    Raises:
        OSError: it cannot be written.
    """
    handler = _LogFile(path, encoding="utf-8")
    handler.addFilter(_Where(where))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s [%(where)s] %(name)s: %(message)s"))
    for name in names:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.DEBUG if name == "dalsegno" else logging.INFO)
        logger.propagate = False
