"""The HTTP edge of a master: a process of its own, so that however many ask, no turn waits for them.

It shows the state that was stored and nothing older. The listening socket is the master's: a process that ends is
started again, and serves the same address. It needs the extra `http`; without it the master runs as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
from asyncio.subprocess import DEVNULL, Process
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dalsegno.protos.own_program import command_of

from ..server.auth import TlsFiles
from ..server.listener import Listener
from .home import Home
from .wire import LARGEST_ASK_BYTES, READY, EdgeWire, WireError

if TYPE_CHECKING:
    from .looking import Master

__all__ = ("Edge",)

log = logging.getLogger(__name__)

# Seconds: after which an edge that says nothing is ended (it looks at the job every second); in which it ends by
# itself; before the next one, at first and at most.
SILENT_SECONDS = 30
CLOSE_SECONDS = 4.0
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 60.0


class Edge:
    """Serves from `start` to `close`."""

    def __init__(
        self,
        master: Master,
        host: str,
        port: int,
        token: str | None,
        *,
        loopback: bool,
        tls: TlsFiles | None = None,
        stands_by: Callable[[], bool] = lambda: False,
    ) -> None:
        """Listens at once (port 0: any free one). If `token` is given, everything that shows the job requires it.

        A master that `stands_by` is healthy, but not ready. Made in the master's running loop. Raises OSError if the
        address is not available.
        """
        self._master, self._stands_by = master, stands_by
        self._listener = Listener.open(host, port)
        self.address = self._listener.address
        self._settings: dict[str, Any] = {"what": "settings", "token": token, "loopback": loopback, "tls": None}
        if tls is not None:
            # The process has another working directory.
            files = (tls.certificate, tls.key, tls.client_ca)
            self._settings["tls"] = [None if path is None else os.path.abspath(path) for path in files]
        self._over = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Starts to answer. An edge that fails says so in the log, and is started again."""
        self._task = asyncio.create_task(self._keep())

    async def close(self) -> None:
        """Ends within a bounded time: open connections are cut. Safe at any moment, and twice."""
        self._over.set()
        if self._task is not None:
            await self._task
        self._listener.close()

    async def _keep(self) -> None:
        loop, pause = asyncio.get_running_loop(), PAUSE_SECONDS
        while not self._over.is_set():
            began = loop.time()
            why = await self._once()
            if self._over.is_set():
                return
            if loop.time() - began > LONGEST_PAUSE_SECONDS:
                pause = PAUSE_SECONDS
            log.error("the HTTP edge %s; the job does not depend on it, and it starts again in %g s", why, pause)
            await asyncio.wait([over := asyncio.create_task(self._over.wait())], timeout=pause)
            over.cancel()
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _once(self) -> str:
        """Has one process serve until it ends, or `close`; returns what happened."""
        try:
            ours, theirs = socket.socketpair()
            with ours, theirs:
                process = await self._started(theirs)
                try:
                    theirs.close()
                    return await self._lent(process, ours)
                finally:
                    ours.close()
                    await _end(process, CLOSE_SECONDS if self._over.is_set() else 0.0)
        # No room for a process, for a thread that waits for it, or for a descriptor.
        except (OSError, RuntimeError) as error:
            return f"cannot be started ({error})"

    async def _started(self, theirs: socket.socket) -> Process:
        # A master without standard streams may have got one of their numbers for it.
        wire = fcntl.fcntl(theirs.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
        try:
            return await asyncio.create_subprocess_exec(
                *command_of(f"{__package__}.edge_process"),
                str(wire),
                stdin=DEVNULL,
                stdout=DEVNULL,
                pass_fds=[wire],
                # Signals that a terminal sends to all that it runs are for the master.
                start_new_session=True,
            )
        finally:
            os.close(wire)

    async def _lent(self, process: Process, ours: socket.socket) -> str:
        """Lends the process the listening socket, and has it serve; returns what happened.

        It says first that it ends with the master: one that is killed before that leaves nobody who holds its port.
        """
        ours.setblocking(False)
        ready = asyncio.create_task(asyncio.get_running_loop().sock_recv(ours, 1))
        over = asyncio.create_task(self._over.wait())
        await asyncio.wait((ready, over), timeout=SILENT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        ready.cancel()
        (said,) = await asyncio.gather(ready, return_exceptions=True)
        if said != READY:
            return "has ended before it served"
        socket.send_fds(ours, [READY], [self._listener.fileno()])
        wire = await EdgeWire.over(ours, LARGEST_ASK_BYTES)
        try:
            return await self._served(process, wire)
        finally:
            wire.end()

    async def _served(self, process: Process, wire: EdgeWire) -> str:
        home = Home(self._master, wire, self._stands_by)
        tasks: list[asyncio.Task[Any]] = []
        try:
            await asyncio.wait_for(wire.send(self._settings), CLOSE_SECONDS)
            served, silent, ended, _ = tasks = [
                asyncio.create_task(work) for work in (home.serve(), _silence(home), process.wait(), self._over.wait())
            ]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                # What it said last is still to be read, to the end.
                await asyncio.wait((served,), timeout=CLOSE_SECONDS)
            if silent.done():
                return f"has said nothing for {SILENT_SECONDS} s"
            failure = served.exception() if served.done() else None
            if isinstance(failure, WireError):
                return f"said nonsense ({failure})"
            if failure is not None and not isinstance(failure, OSError):
                log.error("answers for the HTTP edge failed", exc_info=failure)
            return "has ended"
        except (OSError, asyncio.TimeoutError):
            return "has ended"
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _silence(home: Home) -> None:
    """Returns once nothing was heard for so many of this loop's own seconds: one that was stopped heard nothing."""
    silent = 0
    while silent < SILENT_SECONDS:
        await asyncio.sleep(1.0)
        silent = 0 if home.heard else silent + 1
        home.heard = False


async def _end(process: Process, seconds: float) -> None:
    """Waits so long for the process to end by itself, then kills it."""
    try:
        await asyncio.wait_for(process.wait(), seconds)
    except asyncio.TimeoutError:
        # Not `process.kill`, which may take the exit code away from the thread that waits for it.
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        await process.wait()
