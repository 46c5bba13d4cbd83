"""What people see on the console, and where everything else goes."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from dalsegno.protos.log_file import LogFile
from dalsegno.protos.outlet import Outlet
from dalsegno.protos.text import one_line

__all__ = ["RunConsole", "log_torch", "make_log_dir", "set_up_logging"]

# The most characters of one line.
_LONGEST = 4000

logger = logging.getLogger(__name__)


class RunConsole:
    """Prints one line for each thing that happens to the run, on standard error: standard output is the script's own.

    Args:
        outlet: the way to the terminal; default: this process's standard error. Nobody ever waits for it.
        name: the program's name.
    """

    def __init__(self, outlet: Outlet | None = None, name: str = "dlrover-run") -> None:
        self._outlet = Outlet(2, name) if outlet is None else outlet
        self._name = name
        self._lock = threading.Lock()
        self._last = ""

    def say(self, text: str, warning: bool = False) -> None:
        """Prints a line, unless it equals the line before. Escape sequences in it cannot move the cursor."""
        text = one_line(text, _LONGEST)
        with self._lock:
            if text == self._last:
                return
            self._last = text
            mark = "warning: " if warning else ""
            self._outlet.put(f"{self._name}: {mark}{text}\n".encode(errors="replace"))
        logging.getLogger("dalsegno.agent.shell.console").log(logging.WARNING if warning else logging.INFO, "%s", text)

    @property
    def last(self) -> str:
        """The text of the line that was said last."""
        with self._lock:
            return self._last

    def flush(self, timeout_seconds: float) -> None:
        """Waits until everything is shown, at most `timeout_seconds`."""
        self._outlet.flush(timeout_seconds)


class _Where(logging.Filter):
    """Puts `[job/node/epoch/step]` before every line."""

    def __init__(self, where: Callable[[], str]) -> None:
        super().__init__()
        self._where = where

    def filter(self, record: logging.LogRecord) -> bool:
        record.where = self._where()
        return True


def make_log_dir(given: str | None, job_id: str) -> Path:
    """Makes a directory for this process's logs, below the `given` one or the system's directory for temporary files.

    It is not among the checkpoints, which may lie on a small or slow file system. As with torchrun, nobody else can
    write in it.

    Raises:
        OSError: it cannot be made.
    """
    if not given:
        return Path(tempfile.mkdtemp(prefix=f"dalsegno-{job_id[:64]}-"))
    path = Path(given).absolute() / f"{socket.gethostname()}-{os.getpid()}"
    path.mkdir(parents=True, exist_ok=True)
    return path


def set_up_logging(
    path: Path,
    where: Callable[[], str],
    names: Sequence[str] = ("dalsegno", "torch.distributed"),
    level: int = logging.INFO,
) -> None:
    """Sends the log of this package (from `level` on) and of torch's elastic parts (`names`) to a file.

    Raises:
        OSError: it cannot be written.
    """
    handler = LogFile(path)
    handler.addFilter(_Where(where))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s [%(where)s] %(name)s: %(message)s"))
    for name in names:
        _send(name, handler, level if name == "dalsegno" else logging.INFO)


def log_torch() -> None:
    """Sends the log of torch's elastic parts to our file, too. First import torch, which sets it up itself."""
    _send("torch.distributed", logging.getLogger("dalsegno").handlers[0], logging.INFO)


def _send(name: str, handler: logging.Handler, level: int) -> None:
    logger = logging.getLogger(name)
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
