"""The agent's end of the Unix socket over which its workers speak (worker.proto, docs/contracts.md).

One thread serves all connections. Messages of workers go to a callback. What the agent wants of the workers is one
small message, sent to every connection when it changes, and at once to each new one.

A connection speaks for one rank of the epoch that the agent started last. One process at a time speaks for a rank: its
worker, or a process that the worker started. A connection that says anything else is cut, with a line in the log.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.message import DecodeError

from dalsegno.protos import control_pb2, worker_pb2
from dalsegno.protos.contract import FRAME

from ..decisions.events import TellWorkers
from ..decisions.worker_checks import checked, one_line
from ..processes.lifeline import Lifeline
from ..processes.proc import belongs_to
from ..processes.semaphores import remove_semaphores, semaphore_files
from .socket_place import SocketPlace
from .step_counts import take_step_count

__all__ = ["MAX_FRAME_BYTES", "WorkerLink", "to_worker"]

# The most bytes of a message (worker.proto).
MAX_FRAME_BYTES = 1 << 20
# The most bytes that a worker may leave unread before it is cut off: about ten thousand messages of ours.
_MAX_UNSENT_BYTES = 1 << 16
# Limits for connections without a Hello: how many (or two for each expected rank), for how many seconds, and with how
# many bytes.
_MAX_STRANGERS, _HELLO_TIMEOUT_SECONDS, _MAX_HELLO_BYTES = 64, 10.0, 1024
# How often a connection is read whose process seems to have a successor: more often than one frame needs.
_LAST_READS = 32
# The most lines about cut connections that the log gets, in so many seconds.
_COMPLAINTS, _COMPLAINTS_SECONDS = 20, 60.0
# Seconds without accepting, if this process has no file descriptors left.
_DESCRIPTORS_PAUSE_SECONDS = 1.0
_PEER = struct.Struct("3i")

logger = logging.getLogger(__name__)

Deliver = Callable[[int, int, worker_pb2.ToAgent], None]


@dataclass
class _Expected:
    """The workers that the agent started last; by local rank, a function that returns the process (0: not known)."""

    epoch: int
    first_rank: int
    nproc: int
    pids: dict[int, Callable[[], int]] = field(default_factory=dict)
    # The connection that speaks for each rank; owned by the serving thread.
    speakers: dict[int, _Connection] = field(default_factory=dict)


@dataclass
class _Connection:
    socket: socket.socket
    pid: int
    since: float
    hello: worker_pb2.Hello | None = None
    received: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)


class _Broken(Exception):
    """The peer violates the protocol, or is gone."""


def to_worker(order: TellWorkers, *, may_stay: bool) -> worker_pb2.ToWorker:
    """The message that an order of the decisions becomes."""
    return worker_pb2.ToWorker(
        drain=order.drain,
        master_seen=order.master_seen,
        ending=order.ending,
        to_memory=order.to_memory,
        keep=order.keep,
        save_order=order.save_order,
        may_stay=may_stay,
    )


class WorkerLink:
    """Serves the socket of one agent.

    Args:
        deliver: called on the serving thread with (epoch, rank, message), epoch and rank as the worker's Hello said.
        directory: where the private directory (0700) with the socket (0600) is made; TMPDIR or a shorter one if None.
    """

    def __init__(self, deliver: Deliver, directory: Path | None = None) -> None:
        self._deliver = deliver
        self._place = SocketPlace(directory)
        self.directory, self.path = self._place.directory, self._place.path
        self._lock = threading.Lock()
        self._told = worker_pb2.ToWorker()
        self._expected: _Expected | None = None
        self._flushes: deque[tuple[int, threading.Event]] = deque()
        self._closing = False
        self._connections: dict[socket.socket, _Connection] = {}
        # Connections without a Hello, the oldest first.
        self._strangers: dict[socket.socket, _Connection] = {}
        self._listening_again_at: float | None = None
        self._complaints: deque[float] = deque(maxlen=_COMPLAINTS)
        # Callers that wait for all messages of a process; owned by the serving thread.
        self._waiting: dict[int, list[threading.Event]] = {}
        self._wake_reader, self._wake_writer = socket.socketpair()
        for end in (self._wake_reader, self._wake_writer):
            end.setblocking(False)
        self._listener, self._made_again = self._place.listen(), list[socket.socket]()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="worker-link", daemon=True)
        self._thread.start()

    def leave_to(self, lifeline: Lifeline) -> None:
        """Has the keeper remove the directory, and what goes with it, where the agent is killed."""
        lifeline.add_path(self.directory)
        lifeline.add_prefix(semaphore_files(self.directory.name))

    def stand(self, say: Callable[[str, bool], object]) -> None:
        """Makes the directory and the socket again, at their path, if somebody has deleted them, and says so.

        Workers that have a connection keep it.

        Raises:
            OSError: they cannot be made; one line that names the path.
        """
        if self._place.is_there():
            return
        listener = self._place.listen()
        with self._lock:
            self._made_again.append(listener)
        self._wake()
        say(f"the socket of the workers was deleted: {self.path} is made again", True)

    def tell(self, told: worker_pb2.ToWorker) -> None:
        """Sets what the workers should know; sent to all of them if it changed, and to newcomers."""
        with self._lock:
            if told == self._told:
                return
            self._told = told
        self._wake()

    def expect(self, epoch: int, first_rank: int, nproc: int) -> None:
        """Sets whose Hello counts from now on: these ranks of this epoch. Earlier connections stay."""
        with self._lock:
            self._expected = _Expected(epoch, first_rank, nproc)

    def started(self, local_rank: int, pid: Callable[[], int]) -> None:
        """Sets the function that returns the process of an expected rank, which may speak for it, with its children.

        It is called for each Hello, and returns 0 while it does not know (a standby worker that is about to start).
        """
        with self._lock:
            if self._expected is not None:
                self._expected.pids[local_rank] = pid

    def flush(self, pid: int, timeout_seconds: float) -> bool:
        """Waits until everything that process `pid`, now ended, said is delivered; False: not in time."""
        done = threading.Event()
        with self._lock:
            self._flushes.append((pid, done))
        self._wake()
        return done.wait(timeout_seconds)

    def last_step(self, epoch: int, rank: int) -> int | None:
        """The last step of a rank whose process is gone; None if it has counted none. Can be called once."""
        return take_step_count(self.directory, epoch, rank)

    def clean(self, pid: int) -> None:
        """Removes the semaphores of a rank that is gone."""
        remove_semaphores(self.directory.name, pid)

    def close(self) -> None:
        """Ends the serving thread, cuts all connections, and removes the socket's directory and ranks' semaphores."""
        with self._lock:
            self._closing = True
        self._wake()
        self._thread.join(5.0)
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        for end in (self._listener, *self._made_again, self._wake_reader, self._wake_writer):
            end.close()
        remove_semaphores(self.directory.name)
        self._place.close()

    def _wake(self) -> None:
        try:
            self._wake_writer.send(b"\0")
        except BlockingIOError:
            return  # full of earlier wake-ups that were not read yet, so it will wake up

    # ---- the serving thread -----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        sent = worker_pb2.ToWorker()
        while True:
            for key, events in self._selector.select(self._patience()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj is self._wake_reader:
                    self._wake_reader.recv(4096)
                else:
                    self._serve_connection(key.data, events)
            self._look_at_the_time()
            with self._lock:
                if self._closing:
                    return
                told, flushes, made_again = self._told, list(self._flushes), list(self._made_again)
                self._flushes.clear()
                self._made_again.clear()
            for listener in made_again:
                self._listen_at(listener)
            if told != sent:
                sent = told
                for connection in list(self._connections.values()):
                    self._send(connection, told)
            for pid, done in flushes:
                self._flush(pid, done)

    def _patience(self) -> float | None:
        """Seconds until the next thing to do that no socket announces."""
        times = [connection.since + _HELLO_TIMEOUT_SECONDS for connection in list(self._strangers.values())[:1]]
        if self._listening_again_at is not None:
            times.append(self._listening_again_at)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _look_at_the_time(self) -> None:
        now = time.monotonic()
        for connection in list(self._strangers.values()):
            if now < connection.since + _HELLO_TIMEOUT_SECONDS:
                break
            self._cut(connection, f"no Hello within {_HELLO_TIMEOUT_SECONDS:g} s")
        if self._listening_again_at is not None and now >= self._listening_again_at:
            self._listening_again_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _accept(self) -> None:
        while True:
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                self._stop_listening(error)
                return
            pid, uid, _ = _PEER.unpack(accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            if uid != os.geteuid():
                logger.warning("refused a connection of user %d", uid)
                accepted.close()
                continue
            accepted.setblocking(False)
            connection = _Connection(accepted, pid, time.monotonic())
            self._connections[accepted] = self._strangers[accepted] = connection
            self._selector.register(accepted, selectors.EVENT_READ, connection)
            with self._lock:
                told = self._told
            self._send(connection, told)
            self._make_room()

    def _make_room(self) -> None:
        """Cuts the oldest of too many unknown connections, unless its Hello is there and was only not read yet."""
        with self._lock:
            nproc = self._expected.nproc if self._expected is not None else 0
        # All ranks may connect before the first says who it is, and so may what they start.
        most = max(_MAX_STRANGERS, 2 * nproc)
        while len(self._strangers) > most:
            oldest = next(iter(self._strangers.values()))
            self._serve_connection(oldest, selectors.EVENT_READ)
            if oldest.socket in self._strangers:
                self._cut(oldest, f"{most} others came without a Hello, too")

    def _listen_at(self, listener: socket.socket) -> None:
        self._accept()  # who came before the path was deleted
        if self._listening_again_at is None:
            self._selector.unregister(self._listener)
        self._listener.close()
        self._listener, self._listening_again_at = listener, None
        self._selector.register(listener, selectors.EVENT_READ)

    def _stop_listening(self, error: OSError) -> None:
        """Stops for a moment, because a listener that cannot accept would keep this thread busy."""
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            raise error
        self._complain(f"no worker can connect for now: {error.strerror}")
        if self._listening_again_at is None:
            self._selector.unregister(self._listener)
            self._listening_again_at = time.monotonic() + _DESCRIPTORS_PAUSE_SECONDS

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
        except (_Broken, OSError, DecodeError, ValueError) as error:
            self._cut(connection, str(error))

    def _cut(self, connection: _Connection, why: str) -> None:
        """Cuts a connection; no reason means that it ended by itself."""
        if why:
            self._complain(f"connection of process {connection.pid} cut: {one_line(why)}")
        self._drop(connection)

    def _complain(self, text: str) -> None:
        """Writes one line to the log, unless there were too many lately."""
        now = time.monotonic()
        if len(self._complaints) < _COMPLAINTS or now - self._complaints[0] > _COMPLAINTS_SECONDS:
            logger.warning("%s", text)
            self._complaints.append(now)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(1 << 16)
        except BlockingIOError:
            return
        if not data:
            raise _Broken
        connection.received += data
        while len(connection.received) >= FRAME.size:
            (length,) = FRAME.unpack_from(connection.received)
            most = MAX_FRAME_BYTES if connection.hello is not None else _MAX_HELLO_BYTES
            if length > most:
                raise _Broken(f"a frame of {length} bytes, at most {most} are allowed")
            end = FRAME.size + length
            if len(connection.received) < end:
                return
            frame = bytes(connection.received[FRAME.size : end])
            del connection.received[:end]
            self._said(connection, worker_pb2.ToAgent.FromString(frame))

    def _said(self, connection: _Connection, message: worker_pb2.ToAgent) -> None:
        if message.WhichOneof("body") == "hello":
            self._admit(connection, message.hello)
        elif connection.hello is None:
            raise _Broken(f"{message.WhichOneof('body')} before Hello")
        assert connection.hello is not None
        rank = connection.hello.rank
        self._hand_over(connection.hello.epoch, rank, checked(message, rank, seals=self._any_rank_seals()))

    def _admit(self, connection: _Connection, hello: worker_pb2.Hello) -> None:
        """Handles a Hello, in which a process says which rank it is. Its process id comes from the kernel instead."""
        if connection.hello is not None:
            raise _Broken("it says Hello twice")
        with self._lock:
            expected = self._expected
            process = None if expected is None else expected.pids.get(hello.rank - expected.first_rank)
        if expected is None or hello.epoch != expected.epoch:
            raise _Broken(f"it is of epoch {hello.epoch}, which is not the one started last")
        local_rank = hello.rank - expected.first_rank
        # With --virtual-local-rank every worker's local rank is 0.
        if not 0 <= local_rank < expected.nproc or hello.local_rank not in (0, local_rank):
            raise _Broken(f"rank {hello.rank}, local rank {hello.local_rank} is none of this node's")
        worker = 0 if process is None else process()
        if worker and not belongs_to(connection.pid, worker):
            raise _Broken(f"it says that it is rank {hello.rank}, whose worker, process {worker}, did not start it")
        speaker = expected.speakers.get(hello.rank)
        if speaker is not None:
            # Its end may be there and was only not read yet.
            for _ in range(_LAST_READS):
                self._serve_connection(speaker, selectors.EVENT_READ)
            if speaker.socket in self._connections:
                raise _Broken(f"it says that it is rank {hello.rank}, as process {speaker.pid} does")
        expected.speakers[hello.rank] = connection
        connection.hello = hello
        self._strangers.pop(connection.socket, None)

    def _any_rank_seals(self) -> bool:
        """Whether any rank may seal: rank 0 may be gone, and then the node that was told to seals."""
        with self._lock:
            return self._told.ending == control_pb2.ENDING_SEAL

    def _hand_over(self, epoch: int, rank: int, message: worker_pb2.ToAgent) -> None:
        """Delivers a message again and again if the deciding thread is behind, so that none is lost."""
        while True:
            try:
                self._deliver(epoch, rank, message)
                return
            except queue.Full as error:
                logger.warning("the agent is behind with what its workers say: %s", error)
                with self._lock:
                    if self._closing:
                        return

    def _send(self, connection: _Connection, message: worker_pb2.ToWorker) -> None:
        data = message.SerializeToString()
        connection.unsent += FRAME.pack(len(data)) + data
        try:
            if len(connection.unsent) > _MAX_UNSENT_BYTES:
                raise _Broken("it does not read")
            self._write(connection)
        except (_Broken, OSError) as error:
            # A worker that is ending: what it sent before must still be read, and the read side finds the end.
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
        self._strangers.pop(connection.socket, None)
        connection.socket.close()
        if any(other.pid == connection.pid for other in self._connections.values()):
            return
        for done in self._waiting.pop(connection.pid, ()):
            done.set()
