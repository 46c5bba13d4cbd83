"""The agent's end of the Unix socket over which its workers speak (worker.proto, docs/contracts.md).

One thread serves all connections. What a worker says is handed to a callback; what the agent wants of the workers is
one small message, sent to every connection when it changes and to every newcomer at once.
"""

from __future__ import annotations

import logging
import os
import selectors
import shutil
import socket
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError

from dalsegno.protos import worker_pb2

__all__ = ["MAX_FRAME", "WorkerLink"]

# Bytes; worker.proto.
MAX_FRAME = 1 << 20
_HEADER = struct.Struct(">I")
# Bytes that a worker may leave unread before it is cut off: about ten thousand messages of ours.
_MAX_UNSENT = 1 << 16
_PEER = struct.Struct("3i")
# sun_path of unix(7), without the closing zero.
_MAX_PATH = 107
_SOCKET = "agent.sock"
# Where TMPDIR is too long a path.
_SHORT_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm")

logger = logging.getLogger(__name__)

Deliver = Callable[[int, int, worker_pb2.ToAgent], None]


@dataclass
class _Connection:
    socket: socket.socket
    pid: int
    hello: worker_pb2.Hello | None = None
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class _Broken(Exception):
    """The peer does not keep to the protocol, or is gone."""


def _private_directory(wanted: Path | None) -> Path:
    """A directory of ours for the socket, whose path is short enough for the kernel.

    Raises:
        OSError: there is none; one line that says what to change.
    """
    tried = [str(wanted)] if wanted is not None else [_default_directory(), *_SHORT_DIRECTORIES]
    reasons = []
    for place in filter(None, tried):
        try:
            directory = Path(tempfile.mkdtemp(prefix="dalsegno-", dir=place))
        except OSError as error:
            reasons.append(f"{place}: {error.strerror or error}")
            continue
        if len(os.fsencode(directory / _SOCKET)) <= _MAX_PATH:
            return directory
        os.rmdir(directory)
        reasons.append(f"{place}: too long a path")
    raise OSError(f"no place for the socket of the workers ({'; '.join(reasons)}); set TMPDIR to a short, writable one")


def _default_directory() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        return ""


class WorkerLink:
    """Serves the socket of one agent.

    Args:
        deliver: called on the serving thread with (epoch, rank, message), epoch and rank as the worker's Hello said.
        directory: where the private directory (0700) with the socket (0600) is made; TMPDIR or a shorter one if None.
    """

    def __init__(self, deliver: Deliver, directory: Path | None = None) -> None:
        self._deliver = deliver
        self.directory = _private_directory(directory)
        self.path = self.directory / _SOCKET
        self._lock = threading.Lock()
        self._told = worker_pb2.ToWorker()
        self._flushes: deque[tuple[int, threading.Event]] = deque()
        self._closing = False
        self._connections: dict[socket.socket, _Connection] = {}
        # Who waits for all messages of a process; owned by the serving thread.
        self._waiting: dict[int, list[threading.Event]] = {}
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(str(self.path))
        os.chmod(self.path, 0o600)
        self._listener.listen(128)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="worker-link", daemon=True)
        self._thread.start()

    def tell(self, *, drain: bool, master_seen: bool) -> None:
        """Sets what the workers should know; sent to all of them if it changed, and to newcomers."""
        with self._lock:
            told = worker_pb2.ToWorker(drain=drain, master_seen=master_seen)
            if told == self._told:
                return
            self._told = told
        self._wake()

    def flush(self, pid: int, timeout: float) -> bool:
        """Waits until all that process `pid`, which has ended, ever said was delivered. False: not within `timeout`."""
        done = threading.Event()
        with self._lock:
            self._flushes.append((pid, done))
        self._wake()
        return done.wait(timeout)

    def close(self) -> None:
        """Ends the serving thread, cuts all connections, and removes the socket and its directory."""
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join(5.0)
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        for end in (self._listener, self._wake_reader, self._wake_writer):
            end.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"\0")
        except BlockingIOError:
            return  # Full of earlier wake-ups that were not read yet: it will wake.

    # ---- the serving thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        sent = worker_pb2.ToWorker()
        while True:
            for key, events in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_reader:
                    self._wake_reader.recv(4096)
                else:
                    self._serve_connection(key.data, events)
            with self._lock:
                if self._closing:
                    return
                told, flushes = self._told, list(self._flushes)
                self._flushes.clear()
            if told != sent:
                sent = told
                for connection in list(self._connections.values()):
                    self._send(connection, told)
            for pid, done in flushes:
                self._flush(pid, done)

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            pid, uid, _ = _PEER.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if uid != os.geteuid():
                logger.warning("refused a connection of user %d", uid)
                accepted.close()
                continue
            accepted.setblocking(False)
            connection = _Connection(accepted, pid)
            self._connections[accepted] = connection
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            with self._lock:
                told = self._told
            self._send(connection, told)

    def _flush(self, pid: int, done: threading.Event) -> None:
        # It may have connected, spoken and ended since the last look.
        self._accept()
        if any(connection.pid == pid for connection in self._connections.values()):
            self._waiting.setdefault(pid, []).append(done)
        else:
            done.set()

    def _serve_connection(self, connection: _Connection, events: int) -> None:
        if connection.socket not in self._connections:
            return
        try:
            if events & selectors.EVENT_READ:
                self._receive(connection)
            if events & selectors.EVENT_WRITE:
                self._write(connection)
        except (_Broken, OSError, DecodeError) as error:
            if str(error):
                logger.warning("connection of process %d cut: %s", connection.pid, error)
            self._drop(connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:
            raise _Broken
        connection.received += data
        while len(connection.received) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(connection.received)
            if length > MAX_FRAME:
                raise _Broken(f"a frame of {length} bytes, at most {MAX_FRAME} are allowed")
            end = _HEADER.size + length
            if len(connection.received) < end:
                return
            frame = bytes(connection.received[_HEADER.size : end])
            del connection.received[:end]
            self._said(connection, worker_pb2.ToAgent.FromString(frame))

    def _said(self, connection: _Connection, message: worker_pb2.ToAgent) -> None:
        if message.WhichOneof("body") == "hello":
            connection.hello = message.hello
        elif connection.hello is None:
            raise _Broken(f"{message.WhichOneof('body')} before Hello")
        self._deliver(connection.hello.epoch, connection.hello.rank, message)

    def _send(self, connection: _Connection, message: worker_pb2.ToWorker) -> None:
        data = message.SerializeToString()
        connection.unsent += _HEADER.pack(len(data)) + data
        try:
            if len(connection.unsent) > _MAX_UNSENT:
                raise _Broken("it does not read")
            self._write(connection)
        except (_Broken, OSError) as error:
            # A worker that is ending: what it sent before is still to be read, so the read side finds the end.
            logger.info("cannot send to process %d: %s", connection.pid, error)
            connection.unsent.clear()

    def _write(self, connection: _Connection) -> None:
        while connection.unsent:
            try:
                sent = connection.socket.send(connection.unsent)
            except BlockingIOError:
                break
            del connection.unsent[:sent]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        self._selector.modify(connection.socket, events, connection)

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        del self._connections[connection.socket]
        connection.socket.close()
        if any(other.pid == connection.pid for other in self._connections.values()):
            return
        for done in self._waiting.pop(connection.pid, ()):
            done.set()
