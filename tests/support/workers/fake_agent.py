"""An agent as far as a worker sees one: its Unix socket, its environment variables, its store."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dalsegno.elastic.checkpoint import Manifest
from dalsegno.protos import worker_pb2

from .ranks import Rank, wait_all

WORKER = Path(__file__).with_name("session_worker.py")


class FakeAgent:
    """One agent with all ranks of one epoch. Use as a context manager: it ends what it started.

    Args:
        universal: The form of ``resume`` that is to be loaded; None: as it is.
        memory: Each rank is a node of its own, and keeps memory checkpoints in ``memory(rank)``.
        held: With ``memory``: ``resume`` is there, on each node.
        stall_timeout: What the ranks are told of it, seconds; 0: nobody is ever stuck.
    """

    def __init__(
        self,
        directory: Path,
        *,
        world: int,
        epoch: int,
        resume: Manifest | None = None,
        universal: Manifest | None = None,
        memory: bool = False,
        held: bool = False,
        stall_timeout: float = 0.0,
    ) -> None:
        self.directory, self.world, self.epoch, self.resume = directory, world, epoch, resume
        self.universal, self._has_memory, self._held = universal, memory, held
        self._stall_timeout = stall_timeout
        self.run_dir = directory / "run-0001"
        self.logs = directory / "logs"
        self.logs.mkdir(parents=True, exist_ok=True)
        self.messages: list[worker_pb2.ToAgent] = []
        self.changed = threading.Condition()
        self.ranks: list[Rank] = []
        self._connections: list[socket.socket] = []
        self._path = str(directory / f"agent-{epoch}.sock")
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(self._path)
        self._server.listen()
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> FakeAgent:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.close()
        # Threads that accept or read are woken by this, and not by closing. They would keep all of this agent's
        # descriptors.
        for end in (self._server, *self._connections):
            with contextlib.suppress(OSError):  # the other end has closed it
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        os.unlink(self._path)

    def start(self, *flags: str, script: Path = WORKER) -> None:
        """Starts all ranks."""
        command = [str(script), "--log", str(self.logs), *flags]
        self.ranks += [Rank(command, self._environment(rank)) for rank in range(self.world)]

    def wait(self, seconds: float = 60.0) -> list[int]:
        """Exit codes of all ranks in rank order."""
        ended = wait_all(self.ranks, seconds)
        self.outputs = [output for _, output in ended]
        return [code for code, _ in ended]

    def memory(self, rank: int) -> Path:
        """Where a rank that is a node of its own keeps memory checkpoints."""
        return self.directory / f"memory-{rank}"

    def drain(self, wanted: bool = True, *, to_memory: bool = False) -> None:
        self._tell(worker_pb2.ToWorker(drain=wanted, master_seen=True, to_memory=to_memory))

    def order_save(self, number: int, ranks: int | None = None) -> None:
        """Wants a save, without an end. `ranks`: only so many are told."""
        self._tell(worker_pb2.ToWorker(save_order=number, master_seen=True), ranks)

    def hear(self, heard: bool, ranks: int | None = None) -> None:
        """Hears the master again, or no longer. `ranks`: only so many are told."""
        self._tell(worker_pb2.ToWorker(master_seen=heard), ranks)

    def keep(self) -> None:
        """The world has broken: who holds the last boundary is to save it, and to end."""
        self._tell(worker_pb2.ToWorker(keep=True))

    def _tell(self, message: worker_pb2.ToWorker, ranks: int | None = None) -> None:
        for connection in list(self._connections)[:ranks]:
            self._send(connection, message)

    @staticmethod
    def _send(connection: socket.socket, message: worker_pb2.ToWorker) -> None:
        data = message.SerializeToString()
        connection.sendall(struct.pack(">I", len(data)) + data)

    def wait_for(self, kind: str, count: int = 1, seconds: float = 30.0) -> list[Any]:
        """Blocks until so many messages of one kind have come; returns all of them."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.of(kind)) >= count, timeout=seconds), (
                f"{kind}: {len(self.of(kind))} of {count}"
            )
            return self.of(kind)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        """Blocks until it holds; it is asked with each message."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout=seconds), self.messages

    def wait_for_step(self, step: int, seconds: float = 30.0) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: any(m.step >= step for m in self.of("progress")), timeout=seconds), (
                f"step {step} was not reached"
            )

    def of(self, kind: str) -> list[Any]:
        return [getattr(m, kind) for m in self.messages if m.WhichOneof("body") == kind]

    def history(self) -> dict[int, tuple[float, list[int]]]:
        """Loss and sample ids of every step of this epoch, ids of all ranks together."""
        return read_history(self.logs, self.epoch)

    def _environment(self, rank: int) -> dict[str, str]:
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "GLOO_SOCKET_IFNAME": "lo",
            "DALSEGNO_SOCKET": self._path,
            "DALSEGNO_EPOCH": str(self.epoch),
            "DALSEGNO_JOB_ID": "job",
            "DALSEGNO_RUN_ID": "run-0001",
            "DALSEGNO_NODE": "node-a",
            "DALSEGNO_GENERATION": "1",
            "DALSEGNO_MIN_NODES": "1",
            "DALSEGNO_MAX_NODES": "4",
            "DALSEGNO_RUN_DIR": str(self.run_dir),
            "DALSEGNO_STALL_TIMEOUT": str(self._stall_timeout),
        }
        if self.resume is not None:
            env["DALSEGNO_RESUME_NAME"] = self.resume.name
            env["DALSEGNO_RESUME_DIGEST"] = self.resume.digest
            env["DALSEGNO_RESUME_FORM"] = "sharded" if self.universal is None else "universal"
        if self._has_memory:
            self.memory(rank).mkdir(exist_ok=True)
            env |= {"GROUP_RANK": str(rank), "GROUP_WORLD_SIZE": str(self.world)}
            env |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            env["DALSEGNO_MEMORY_DIR"] = str(self.memory(rank))
        if self._held and self.resume is not None:
            env["DALSEGNO_RESUME_DIR"] = str(self.memory(rank) / self.resume.name)
        if self.universal is not None:
            env["DALSEGNO_UNIVERSAL_NAME"] = self.universal.name
            env["DALSEGNO_UNIVERSAL_DIGEST"] = self.universal.digest
        return env

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self._connections.append(connection)
            # An agent says so before all else.
            self._send(connection, worker_pb2.ToWorker(master_seen=True))
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        # A rank that is killed may reset its connection.
        with contextlib.suppress(ConnectionResetError), connection.makefile("rb") as stream:
            while header := stream.read(4):
                (length,) = struct.unpack(">I", header)
                message = worker_pb2.ToAgent.FromString(stream.read(length))
                with self.changed:
                    self.messages.append(message)
                    self.changed.notify_all()


def read_history(logs: Path, epoch: int) -> dict[int, tuple[float, list[int]]]:
    steps: dict[int, tuple[float, list[int]]] = {}
    for path in sorted(logs.glob(f"rank-*-epoch-{epoch}-*.jsonl")):
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            loss, ids = steps.get(entry["step"], (entry["loss"], []))
            assert loss == entry["loss"], "ranks disagree about the loss of a step"
            steps[entry["step"]] = (loss, ids + entry["ids"])
    return steps


def assert_same_curve(
    found: dict[int, tuple[float, list[int]]], wanted: dict[int, tuple[float, list[int]]], steps: Sequence[int]
) -> None:
    """Every step has the undisturbed run's loss (1e-5 relative) and samples."""
    assert sorted(found) == list(steps)
    for step in steps:
        assert abs(found[step][0] - wanted[step][0]) <= 1e-5 * abs(wanted[step][0]), step
        assert sorted(found[step][1]) == sorted(wanted[step][1]), step
