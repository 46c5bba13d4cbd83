"""The Commander: for each relayed run a master of its own, all in one process and loop, behind one HTTP port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from dalsegno.protos import processes
from dalsegno.protos.contract import EXIT_FINISHED
from dalsegno.protos.options import UsageError
from dalsegno.protos.run_file import RunFile, read_run_file
from dalsegno.protos.yaml_text import InputRefused

from .brain.state import Settings
from .http.lease import RelayedRun
from .http.leases import settings_of
from .http.relay import RelayEdge
from .record.store import Store, StoreError, open_store
from .server.auth import is_loopback
from .server.job_brain import JobBrain
from .server.server import BindError, ControlServer, ServerOptions
from .serving import print_line, run, stopping

__all__ = ("Commander",)

_SQLITE = "sqlite:///"


class Commander:
    """The masters of several runs.

    Args:
        files: `run.yaml` of each run.
        store: `sqlite:///FILE`. Each run has a file of its own beside that name.
        options: Where the masters listen, and to whom they speak. The port is the first run's, the next ones follow.
        wait: Returns once all of a store could be read.

    Raises:
        UsageError: One line for a person; nothing was started.
    """

    def __init__(
        self, files: Sequence[Path], store: str, options: ServerOptions, *, wait: Callable[[Store], object]
    ) -> None:
        self._runs = _read(files)
        self._options, self._wait = options, wait
        if not store.startswith(_SQLITE):
            raise UsageError(f"--store {store!r}: with --relay each run has a file, write {_SQLITE}FILE")
        self._record = Path(store.removeprefix(_SQLITE))
        if not self._record.name:
            raise UsageError(f"--store {store!r} names no file: write {_SQLITE}FILE")
        if options.port and options.port + len(self._runs) > 65536:
            raise UsageError(f"--port {options.port}: each of {len(self._runs)} runs needs a port, from this one on")

    async def serve(self, http_port: int, admin: str | None) -> int:
        """Serves until it is told to stop; returns the exit code.

        Raises:
            UsageError, BindError, AuthError, StoreError: One line for a person.
        """
        servers: dict[str, ControlServer] = {}
        edge: RelayEdge | None = None
        try:
            for number, file in enumerate(self._runs):
                servers[file.run_id] = self._server(file, number)
            runs = {file.run_id: RelayedRun(file, servers[file.run_id]) for file in self._runs}
            edge = self._edge(runs, http_port, admin)
            for file in self._runs:
                await self._start(servers[file.run_id], file)
            edge.start()
            stop = _hear_signals(list(servers.values()))
            self._announce(servers, edge)
            return await _run_all(list(servers.values()), stop)
        finally:
            if edge is not None:
                await edge.close()
            for server in servers.values():
                await server.close()

    def _server(self, file: RunFile, number: int) -> ControlServer:
        """The master of one run. Raises StoreError."""
        store = open_store(f"{_SQLITE}{self._beside(file, 'db')}", file.run_id)
        try:
            self._wait(store)
            is_gone = partial(processes.is_gone, here=processes.own_process())
            settings = Settings(**asdict(settings_of(file)))
            brain = JobBrain(file.run_id, (1, 1), is_gone=is_gone, unix=time.time, settings=settings)
            port = self._options.port + number if self._options.port else self._last_port(file)
            options = replace(self._options, port=port)
            return ControlServer(file.run_id, brain, store, options)
        except BaseException:
            store.close()
            raise

    async def _start(self, server: ControlServer, file: RunFile) -> None:
        """Starts one master, without a port of a person's choice where it was last: agents that run know no other.

        Raises:
            BindError, AuthError, StoreError: One line for a person.
        """
        try:
            await server.start()
        except BindError as error:
            if self._options.port or not (last := self._last_port(file)):
                raise
            why = f"{file.run_id} had port {last} last ({self._port_file(file)}), and something else has it now"
            raise BindError(f"{why}: end the other Commander if there is one, or choose a --port") from error
        if not self._options.port:
            port = int(server.address.rpartition(":")[2])
            # A full disk or a kill in the middle of it would lose the port that agents know.
            if port != self._last_port(file):
                self._port_file(file).write_text(f"{port}\n", encoding="utf-8")

    def _last_port(self, file: RunFile) -> int:
        """The port that it had last; 0: none is noted.

        Raises:
            StoreError: Nobody can tell now. Agents that run know no other.
        """
        path = self._port_file(file)
        try:
            port = int(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return 0
        except OSError as error:
            raise StoreError(f"the port that {file.run_id} had last: {path}: {error.strerror or error}") from error
        return port if 0 < port < 65536 else 0

    def _port_file(self, file: RunFile) -> Path:
        return self._beside(file, "port")

    def _beside(self, file: RunFile, kind: str) -> Path:
        """`commander.db` is `commander.RUN.db` for a run."""
        stem = self._record.name.removesuffix(".db")
        return self._record.with_name(f"{stem}.{file.run_id}.{kind}")

    def _edge(self, runs: dict[str, RelayedRun], port: int, admin: str | None) -> RelayEdge:
        host = self._options.host
        try:
            return RelayEdge(
                runs, host, port, self._options.token, admin, loopback=is_loopback(host), tls=self._options.tls
            )
        except OSError as error:
            raise UsageError(f"cannot listen on {host} port {port} (--http-port): {error.strerror or error}") from error

    def _announce(self, servers: dict[str, ControlServer], edge: RelayEdge) -> None:
        """The first line, with what a master of one job says, too."""
        runs = {
            run_id: {"address": server.address, "generation": server.driver.generation}
            for run_id, server in servers.items()
        }
        print_line({**next(iter(runs.values())), "runs": runs, "http": edge.address})


def _read(files: Sequence[Path]) -> list[RunFile]:
    """Raises UsageError with a line for each thing that is wrong."""
    runs: list[RunFile] = []
    for path in files:
        try:
            file = read_run_file(path)
        except InputRefused as error:
            raise UsageError(str(error)) from error
        if any(other.run_id == file.run_id for other in runs):
            raise UsageError(f"{path}: there is another run {file.run_id!r}: give each one a run_id of its own")
        runs.append(file)
    return runs


def _hear_signals(servers: list[ControlServer]) -> Callable[[], None]:
    """From now on a signal ends all of them well. Returns what does so."""
    loop = asyncio.get_running_loop()

    def stop() -> None:
        for server in servers:
            server.stop()

    for signum in stopping():
        loop.add_signal_handler(signum, stop)
    return stop


async def _run_all(servers: list[ControlServer], stop: Callable[[], None]) -> int:
    """Serves all of them; one that ends ends all, because a supervisor starts them together. Returns the exit code."""
    tasks = [asyncio.create_task(run(server, None)) for server in servers]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    stop()
    return max(await asyncio.gather(*tasks), default=EXIT_FINISHED)
