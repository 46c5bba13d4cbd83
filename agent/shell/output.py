"""Standard output and error of the agent, and of all processes that inherit them.

A process that writes directly to a terminal waits if the terminal was stopped with Ctrl-S, and one that writes to a
pipe fails if nobody reads the pipe any more (`| head -1`). So there is a pipe of ours in between, which is always read.
Its content is shown as long as somebody reads, and goes to the log in any case. Files are written directly.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import sys
import threading
from logging.handlers import RotatingFileHandler
from pathlib import Path

from dalsegno.protos.log_file import LogFile
from dalsegno.protos.outlet import Outlet
from dalsegno.protos.ready import first_readable

from .console import RunConsole

__all__ = ["Output"]

# Bytes in the pipe, if the system allows it: what workers can write while this process is stopped.
_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
# Seconds that a reader has to take anything before lines are dropped, and seconds for the last lines at the end.
_PATIENCE_SECONDS = 1.0
_LAST_LINES_SECONDS = 2.0

logger = logging.getLogger(__name__)


class Output:
    """Use it as a context manager around everything that writes; main thread.

    Attributes:
        console: the console for people, on standard error.
    """

    def __init__(self) -> None:
        self._closed = _reopen()
        self._ours = {fd: os.dup(fd) for fd in (1, 2)}
        first = Outlet(None if 1 in self._closed else self._ours[1])
        one = not self._closed and os.path.samestat(os.fstat(1), os.fstat(2))
        second = first if one else Outlet(None if 2 in self._closed else self._ours[2])
        self._outlets = {1: first, 2: second}
        self._pumps: dict[int, _Pump] = {}
        self.console = RunConsole(second)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def divert(self, log: Path) -> None:
        """From now on a missing reader neither holds up nor fails anything that writes to standard output or error."""
        shown: _Log | None = None
        for fd, outlet in self._outlets.items():
            if fd not in self._closed and not _can_stop(fd):
                continue
            shown = shown or _Log(log, self._outlets[2])
            pump = self._pumps.get(1) if fd == 2 and outlet is self._outlets[1] else None
            pump = pump or _Pump(outlet, shown)
            self._pumps[fd] = pump
            os.dup2(pump.writer, fd)

    def close(self) -> None:
        """Shows what was written so far, for a bounded time, and restores standard output and error."""
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                try:
                    stream.flush()
                except (OSError, ValueError) as error:
                    logger.info("the console cannot be written: %s", error)
        for fd in self._pumps:
            os.dup2(self._ours[fd], fd)
        for pump in {*self._pumps.values()}:
            pump.close()
        self._pumps.clear()
        for outlet in {*self._outlets.values()}:
            outlet.flush(_LAST_LINES_SECONDS)


def _reopen() -> set[int]:
    """Opens standard output and error if they were closed (`>&-`), so that no other file gets their numbers."""
    closed = set()
    for fd, stream in ((0, sys.stdin), (1, sys.stdout), (2, sys.stderr)):
        if stream is not None:
            continue
        try:
            os.fstat(fd)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != fd:
                os.dup2(null, fd)
                os.close(null)
            os.set_inheritable(fd, True)
            closed.add(fd)
    if 1 in closed:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (for as long as this process lives)
    if 2 in closed:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    return closed - {0}


def _can_stop(fd: int) -> bool:
    """Whether a writer may have to wait for a reader: on terminals, pipes and sockets."""
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


class _Log:
    """The log of what was written, byte for byte. Thread-safe.

    That it cannot be written is said past the pipe: whoever reads that would wait there for itself.
    """

    def __init__(self, path: Path, outlet: Outlet) -> None:
        self._file: RotatingFileHandler = LogFile(
            path, lambda line: outlet.put(f"{line}\n".encode()), errors="surrogateescape", delay=True
        )
        self._file.terminator = ""

    def write(self, data: bytes) -> None:
        text = data.decode("utf-8", errors="surrogateescape")
        self._file.handle(logging.makeLogRecord({"msg": text}))


class _Pump:
    """Reads one pipe to its end."""

    def __init__(self, outlet: Outlet, log: _Log) -> None:
        self._outlet = outlet
        self._log = log
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        try:
            fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)  # type: ignore[attr-defined,unused-ignore]
        except (AttributeError, OSError) as error:
            logger.info("the pipe for output keeps its size: %s", error)
        self._stop_reader, self._stop_writer = os.pipe()
        self._thread = threading.Thread(target=self._pump, name="output", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Passes on what is there already, and ends. A child that outlives us writes to nobody."""
        os.close(self._stop_writer)
        self._thread.join(_PATIENCE_SECONDS + _LAST_LINES_SECONDS)
        os.close(self.writer)

    def _pump(self) -> None:
        while True:
            ready = first_readable(self._reader, self._stop_reader)
            try:
                data = os.read(self._reader, _READ_BYTES)
            except BlockingIOError:
                if self._stop_reader in ready:
                    return
                continue
            self._log.write(data)
            self._outlet.put(data, _PATIENCE_SECONDS)
