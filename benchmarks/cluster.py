"""Runs a real master and swarms of simulated nodes as processes: starts, stops and loses them, and takes the cost."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from google.protobuf import json_format

from dalsegno.protos import control_pb2 as pb
from tests.support.jobs import local_processes as processes

__all__ = ("PATIENCE", "Cluster", "SceneFailed", "World")

ROOT = Path(__file__).resolve().parents[1]
JOB = "rendezvous"
# Seconds after which a wait has failed.
PATIENCE = 60.0
# The usual limit of descriptors in a shell, if nobody has raised it.
DESCRIPTORS = 1024
TICK = os.sysconf("SC_CLK_TCK")

T = TypeVar("T")
Event = dict[str, Any]


class SceneFailed(Exception):
    """What was waited for did not come, or can no longer come; one line."""


class World(NamedTuple):
    """One world as the swarms saw it; times of the machine's monotonic clock."""

    epoch: int
    nodes: int
    # When the last node asked for its place, and when the last one was told of the world.
    joined: float
    formed: float


class Process:
    """A child process, which ends with this one; and its CPU time."""

    def __init__(self, command: list[str], console: Path) -> None:
        self.console = console
        self.closing = False
        with console.open("ab") as errors:
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said(line)
        self.said("")

    def said(self, line: str) -> None:
        """Called for each line on a thread of its own; "" at the end."""
        self._lines.put(line)

    def line(self, seconds: float) -> str:
        with contextlib.suppress(queue.Empty):
            return self._lines.get(timeout=seconds)
        return ""

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def cpu(self) -> float:
        """CPU seconds of all its threads; 0 when it has ended."""
        fields = processes.stat_fields(self._process.pid)
        return (int(fields[11]) + int(fields[12])) / TICK if fields else 0.0

    def memory(self) -> float:
        """Resident MiB."""
        fields = processes.stat_fields(self._process.pid)
        return int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20 if fields else 0.0

    def close(self) -> None:
        self.closing = True
        self._process.kill()
        self._process.wait(30)
        self._reader.join(30)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class Master(Process):
    """`dlrover-master` as a user starts it."""

    def __init__(self, folder: Path, port: int, ended: Callable[[str], None]) -> None:
        self._ended = ended
        script = str(Path(sysconfig.get_path("scripts")) / "dlrover-master")
        command = [script, f"--job-id={JOB}", f"--store=sqlite:///{folder / 'master.sqlite'}", f"--port={port}"]
        command += [f"--log-file={folder / 'master.log'}"]
        super().__init__(
            ["/bin/sh", "-c", f'ulimit -Sn {DESCRIPTORS}; exec "$@"', "sh", *command], folder / "master.console"
        )
        line = self.line(PATIENCE)
        if not line:
            self.close()
            raise RuntimeError(f"the master did not start: {self.console.read_text(errors='replace')[-2000:]}")
        self.address: str = json.loads(line)["address"]

    def said(self, line: str) -> None:
        super().said(line)
        if not line and not self.closing:
            self._ended(last_line(self.console))


class SwarmProcess(Process):
    """One swarm; its messages go to its cluster."""

    def __init__(self, cluster: Cluster, prefix: str, count: int) -> None:
        self.cluster, self.prefix, self.count = cluster, prefix, count
        settings = json_format.MessageToJson(cluster.settings, indent=None)
        super().__init__(
            [sys.executable, "-m", "benchmarks.swarm", cluster.address, JOB, settings, prefix, str(count)],
            cluster.folder / "swarms.console",
        )

    def said(self, line: str) -> None:
        self.cluster.heard(self, json.loads(line) if line.startswith("{") else {"event": "ended"})

    def order(self, do: str, **fields: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self._process.stdin.flush()


class Cluster:
    """A master and its swarms, below a directory of their own; a context manager that ends all it started."""

    def __init__(self, settings: pb.Settings) -> None:
        self.settings = settings
        self.swarms: dict[str, SwarmProcess] = {}
        self._started = 0
        self._events: list[tuple[SwarmProcess, Event]] = []
        self._changed = threading.Condition()
        # What ends every wait: a client that broke is an error of the benchmark, a master that ended is a result.
        self._broken: Exception | None = None

    def __enter__(self) -> Cluster:
        self._folder = tempfile.TemporaryDirectory(prefix="rendezvous-")
        self.folder = Path(self._folder.name)
        self.port = _free_port()
        try:
            self.start_master()
        except BaseException:
            self._folder.cleanup()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in [*self.swarms.values(), self.master]:
            process.close()
        self._folder.cleanup()

    def start_master(self) -> None:
        """Starts the master, or starts it again on the same port and store."""
        self.master = Master(self.folder, self.port, self.master_ended)
        self.address = self.master.address

    def start(self, role: str, count: int) -> SwarmProcess:
        """Starts a swarm of new nodes in this role, in place of a lost one."""
        self._started += 1
        self.swarms[role] = SwarmProcess(self, f"{role}-{self._started}", count)
        return self.swarms[role]

    def kill(self, role: str) -> None:
        """Kills these nodes: all their connections close at once."""
        self.swarms.pop(role).close()

    def silence(self, role: str) -> None:
        """Stops these nodes: they no longer answer, not even a ping, but their connections stay open."""
        self.swarms[role].signal(signal.SIGSTOP)

    def wake(self, role: str) -> None:
        self.swarms[role].signal(signal.SIGCONT)

    # ---- what happened ----------------------------------------------------------------------------------------------

    def heard(self, swarm: SwarmProcess, event: Event) -> None:
        with self._changed:
            self._events.append((swarm, event))
            if event["event"] == "broken":
                self._broken = RuntimeError(f"a node of {swarm.prefix} broke: {event['error']}")
            self._changed.notify_all()

    def master_ended(self, why: str) -> None:
        with self._changed:
            self._broken = self._broken or SceneFailed(f"the master ended: {why}")
            self._changed.notify_all()

    def wait(self, find: Callable[[], T | None], what: str, seconds: float = PATIENCE) -> T:
        """Waits until `find` returns something. Raises SceneFailed, or RuntimeError for a broken client."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while (found := find()) is None:
                if self._broken is not None:
                    raise self._broken
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise SceneFailed(f"{what}: not within {seconds:.0f} s")
        return found

    def world(self, roles: list[str], since: float = 0.0, seconds: float = PATIENCE) -> World:
        """The first world after `since` that consists of all nodes of these swarms, once all were told."""
        swarms = [self.swarms[role] for role in roles]
        count = sum(swarm.count for swarm in swarms)

        def find() -> World | None:
            told: dict[int, dict[str, Event]] = {}
            for swarm, event in self._events:
                if event["event"] == "running" and event["at"] >= since and event["nodes"] == count:
                    told.setdefault(event["epoch"], {})[swarm.prefix] = event
            for epoch, events in sorted(told.items()):
                if all(swarm.prefix in events for swarm in swarms):
                    joined = max(event["joined"] for event in events.values())
                    return World(epoch, count, joined, max(event["at"] for event in events.values()))
            return None

        return self.wait(find, f"a world of {count} nodes", seconds)

    def noticed(self, epoch: int, roles: list[str], seconds: float) -> float:
        """When the first of these nodes was told that the world `epoch` is over."""
        return self.wait(lambda: self.ended_at(epoch, roles), f"the end of the world of epoch {epoch}", seconds)

    def ended_at(self, epoch: int, roles: list[str]) -> float | None:
        """The same if that has happened by now; else None."""
        prefixes = {self.swarms[role].prefix for role in roles}
        with self._changed:
            left = [(swarm.prefix, event) for swarm, event in self._events if event["event"] == "left"]
        times = [event["at"] for prefix, event in left if event["epoch"] == epoch and prefix in prefixes]
        return min(times, default=None)

    def ask(self, role: str, do: str = "report", **fields: Any) -> Event:
        """Gives an order, and waits for the answer."""
        return self.answers(self.order(role, do, **fields), fields.get("seconds", 0.0))

    def order(self, role: str, do: str, **fields: Any) -> tuple[SwarmProcess, int]:
        """Gives an order; `answers` waits for the answer."""
        with self._changed:
            mark = len(self._events)
        self.swarms[role].order(do, **fields)
        return self.swarms[role], mark

    def answers(self, asked: tuple[SwarmProcess, int], seconds: float) -> Event:
        swarm, mark = asked

        def find() -> Event | None:
            for one, event in self._events[mark:]:
                if one is swarm and event["event"] == "done":
                    return event
                if one is swarm and event["event"] == "ended":
                    raise RuntimeError(f"{one.prefix} ended: {one.console.read_text(errors='replace')[-2000:]}")
            return None

        return self.wait(find, f"the answer of {swarm.prefix}", seconds + PATIENCE)


def last_line(path: Path) -> str:
    """Last line of a console; "" if nothing was written."""
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


def _free_port() -> int:
    """A port that is free now: a master that is started again needs the same one."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])
