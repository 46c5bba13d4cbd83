"""The master's log on stderr. Who reads that may stop (Ctrl-S, a log driver that hangs), and nobody may wait."""

from __future__ import annotations

import logging
import sys

from dalsegno.protos.outlet import Outlet

__all__ = ("StderrHandler", "own_handler", "say_last")

# The longest that an ending process waits for its last lines to be read.
FLUSH_SECONDS = 1.0


class StderrHandler(logging.Handler):
    """Writes to stderr on a thread of its own. What finds no room there is dropped and counted, see `Outlet`."""

    def __init__(self) -> None:
        super().__init__()
        # Where stderr is closed its number may be any file's.
        self._outlet = Outlet(None if sys.stderr is None else 2, "dlrover-master")

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self.say(text)

    def say(self, text: str, patience_seconds: float = 0.0) -> None:
        """Writes whole lines, behind all that was logged before. `patience_seconds`: see `Outlet.put`."""
        self._outlet.put(f"{text}\n".encode(errors="backslashreplace"), patience_seconds)

    def flush(self) -> None:
        """Waits until all of it is written, for a short while. The interpreter's end calls it, too."""
        self._outlet.flush(FLUSH_SECONDS)


def own_handler() -> StderrHandler | None:
    """The one that the master's log goes through; None where it goes into a file."""
    handlers = logging.getLogger("dalsegno").handlers
    return next((handler for handler in handlers if isinstance(handler, StderrHandler)), None)


def say_last(text: str) -> None:
    """Says on stderr why this process ends, behind all that was logged there."""
    try:
        log = own_handler() or StderrHandler()
    except RuntimeError:  # no thread can be started, which may be why this process ends
        print(text, file=sys.stderr)
        return
    log.say(text, FLUSH_SECONDS)
    log.flush()
