"""Standard output and error of the agent, and of all processes that inherit them.

A process that writes directly to a terminal waits if the terminal was stopped with Ctrl-S, and one that writes to a
pipe fails if nobody reads the pipe any more (`| head -1`). So there is a pipe of ours in between, which is always read.
Its content is shown as long as somebody reads, and goes to the log in any case. So it is for files: a worker's print
must not fail because the disk is full. What is still in the pipe when this process is killed is written by the keeper.
"""

from __future__ import annotations

import fcntl
import functools
import logging
import os
import stat
import sys
import threading
from logging.handlers import RotatingFileHandler
from pathlib import Path

from dalsegno.protos.outlet import Outlet
from dalsegno.protos.ready import first_readable

from .console import LogFile, RunConsole

__all__ = ["Output"]

# Bytes in the pipe, if the system allows it: what workers can write while this process is stopped.
_PIPE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
# Seconds that a reader has to take anything before lines are dropped, and seconds for the last lines at the end.
_PATIENCE_SECONDS = 1.0
_LAST_LINES_SECONDS = 2.0
# The same for a file: its disk may be slow, but nobody has to come back to it.
_LAST_OF_FILE_SECONDS = 30.0
_NAMES = {1: "standard output", 2: "standard error"}

logger = logging.getLogger(__name__)


class Output:
    """Use it as a context manager around everything that writes; main thread.

    Attributes:
        console: the console for people, on standard error.
    """

    def __init__(self) -> None:
        self._closed = _reopen()
        self._ours = {fd: os.dup(fd) for fd in (1, 2)}
        self._log_path: Path | None = None
        first = self._outlet(1)
        one = not self._closed and os.path.samestat(os.fstat(1), os.fstat(2))
        second = first if one else self._outlet(2)
        self._outlets = {1: first, 2: second}
        self._pumps: dict[int, _Pump] = {}
        self._log: _Log | None = None
        self.console = RunConsole(second)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def divert(self, log: Path) -> None:
        """From now on a missing reader neither holds up nor fails anything that writes to standard output or error."""
        self._log_path = log
        for fd, outlet in self._outlets.items():
            if fd not in self._closed and _takes_all(fd):
                continue
            self._log = self._log or _Log(log)
            pump = self._pumps.get(1) if fd == 2 and outlet is self._outlets[1] else None
            pump = pump or _Pump(outlet, self._log, file=fd not in self._closed and not _can_stop(fd))
            self._pumps[fd] = pump
            os.dup2(pump.writer, fd)

    def left_behind(self) -> list[tuple[int, int]]:
        """Descriptors to read and to write: what nobody has written to a file if this process is killed."""
        ends = {pump: fd for fd, pump in reversed(self._pumps.items()) if pump.file}
        return [(pump.reader, self._ours[fd]) for pump, fd in ends.items()]

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
        for fd, outlet in self._outlets.items():
            outlet.flush(_LAST_LINES_SECONDS if fd in self._closed or _can_stop(fd) else _LAST_OF_FILE_SECONDS)

    def _outlet(self, fd: int) -> Outlet:
        """The way to where `fd` leads."""
        if fd in self._closed:
            return Outlet(None)
        on_failure = None if _can_stop(fd) else functools.partial(self._say_failure, fd)
        return Outlet(self._ours[fd], on_failure=on_failure)

    def _say_failure(self, fd: int, reason: str) -> None:
        more = f": the run goes on, and {self._log_path} has what is not shown" if self._log_path else ""
        self.console.say(f"{_NAMES[fd]} cannot be written ({reason}){more}", warning=True)


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


def _takes_all(fd: int) -> bool:
    """Whether nobody ever fails to write there: /dev/null."""
    return os.path.samestat(os.fstat(fd), os.stat(os.devnull))


def _can_stop(fd: int) -> bool:
    """Whether a writer may have to wait for a reader: on terminals, pipes and sockets."""
    mode = os.fstat(fd).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(fd)


class _Log:
    """The log of what was written, byte for byte. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self._file: RotatingFileHandler = LogFile(path, errors="surrogateescape", delay=True)
        self._file.terminator = ""

    def write(self, data: bytes) -> None:
        text = data.decode("utf-8", errors="surrogateescape")
        self._file.handle(logging.makeLogRecord({"msg": text}))


class _Pump:
    """Reads one pipe to its end.

    Args:
        outlet, log: where it goes.
        file: the outlet's end is a file. It is waited for, however long one write takes.
    """

    def __init__(self, outlet: Outlet, log: _Log, *, file: bool) -> None:
        self._outlet = outlet
        self._log = log
        self.file = file
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
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
        self._thread.join(_LAST_OF_FILE_SECONDS if self.file else _PATIENCE_SECONDS + _LAST_LINES_SECONDS)
        os.close(self.writer)

    def _pump(self) -> None:
        while True:
            ready = first_readable(self.reader, self._stop_reader)
            # As little as possible is lost with this process: the rest stays in the pipe. As ever, a file on a disk
            # that stands still holds its writers up.
            while self.file and not self._outlet.flush(_PATIENCE_SECONDS):
                pass
            try:
                data = os.read(self.reader, _READ_BYTES)
            except BlockingIOError:
                if self._stop_reader in ready:
                    return
                continue
            self._log.write(data)
            self._outlet.put(data, _PATIENCE_SECONDS)
