"""The process of a master's HTTP edge. Its argument is the wire's descriptor, over which the master lends the rest."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dalsegno.protos.processes import ends_with_parent

from .wire import LONGEST_LINE, READY

if TYPE_CHECKING:
    from .across import Across

__all__ = ("main",)

# Processor time goes to the master and to training first: a page may come later.
NICENESS = 5
# Seconds in which the last lines reach the master.
LAST_LINES_SECONDS = 1.0


def main() -> int:
    """Serves until the wire ends; returns the exit code: 0, or 1 if serving failed."""
    # A master that is killed must leave no process behind that holds its port.
    ends_with_parent(signal.SIGKILL, os.getppid())()
    # Terminals, Slurm and supervisors send these to all processes of a job: the master decides when this one ends.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    os.nice(NICENESS)
    end = socket.socket(fileno=int(sys.argv[1]))
    # A master that has ended already lends nothing.
    try:
        end.sendall(READY)
        _, lent, _, _ = socket.recv_fds(end, 1, 1)
    except OSError:
        return 0
    return asyncio.run(_serve(end, lent[0])) if lent else 0


async def _serve(end: socket.socket, listener_descriptor: int) -> int:
    # Only now: signals could have come while they are imported.
    from ..server.auth import TlsFiles
    from ..server.garbage import collect_rarely
    from ..server.listener import Listener
    from .across import Across
    from .site import Site
    from .wire import LARGEST_ANSWER_BYTES, EdgeWire

    collect_rarely()
    wire = await EdgeWire.over(end, LARGEST_ANSWER_BYTES)
    frame = await wire.receive()
    if frame is None:
        return 0
    settings: dict[str, Any] = frame[0]
    master = Across(wire)
    lines = _ErrorsHome(master)
    logging.getLogger().addHandler(lines)
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    tls = None
    if settings["tls"] is not None:
        certificate, key, client_ca = settings["tls"]
        tls = TlsFiles(Path(certificate), Path(key), None if client_ca is None else Path(client_ca))
    site = Site(
        master,
        Listener.adopt(listener_descriptor),
        settings["token"],
        loopback=settings["loopback"],
        tls=tls,
        stands_by=lambda: master.stands_by,
        failed=lambda error: None if failed.done() else failed.set_result(error),
    )
    site.start()
    heard = asyncio.create_task(master.run())
    await asyncio.wait((heard, failed), return_when=asyncio.FIRST_COMPLETED)
    error = failed.result() if failed.done() else heard.exception()
    if error is not None:
        logging.getLogger(__name__).error("the HTTP edge cannot serve", exc_info=error)
    await lines.sent()
    await site.close()
    heard.cancel()
    wire.end()
    return int(error is not None)


class _ErrorsHome(logging.Handler):
    """Sends errors to the master, whose log has one writer."""

    def __init__(self, master: Across) -> None:
        super().__init__(logging.ERROR)
        self._master, self._loop = master, asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        text = self.format(record)
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._send, text)

    async def sent(self) -> None:
        """Returns once all lines are on their way, within a bounded time."""
        await asyncio.sleep(0)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_LINES_SECONDS)

    def _send(self, text: str) -> None:
        if len(self._tasks) < 100:
            task = asyncio.create_task(self._say(text))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            await self._master.say(text[:LONGEST_LINE])


if __name__ == "__main__":
    sys.exit(main())
