"""The worker's end of its agent's Unix socket (``protos/worker.proto``).

A daemon thread reads and keeps three facts, nothing more. Callers send on their own threads. A dead agent costs only a
warning, because the node's keeper is about to end this process anyway.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable

from dalsegno.protos import worker_pb2
from dalsegno.protos.contract import FRAME
from dalsegno.protos.staying import offered
from dalsegno.protos.trace import mark

log = logging.getLogger(__name__)

MAX_FRAME_BYTES = 1 << 20
SEND_SECONDS = 30.0
CONNECT_SECONDS = 10.0
CONNECT_PAUSE_SECONDS = 0.05


class Link:
    """A connection to the agent.

    Args:
        path: The socket, from ``DALSEGNO_SOCKET``.
        hello: Sent first.

    Raises:
        OSError: The agent cannot be reached; without an agent this process must not train.
    """

    def __init__(self, path: str, hello: worker_pb2.Hello) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._lock = threading.Lock()
        self._drain = self._to_memory = False
        self._drain_since: float | None = None
        self._master_seen = False
        self._ending = 0
        self._keep = self._may_stay = False
        self._save_order = 0
        self._when_told_to_keep: Callable[[], None] | None = None
        self._alive = True
        try:
            self._socket.setblocking(False)
            self._connect(path)
            self.send(worker_pb2.ToAgent(hello=hello))
        except OSError:
            self._socket.close()
            raise
        # A forked DataLoader process must not keep the connection open after this process has gone.
        this = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _forget(this()))
        self._reader = threading.Thread(target=self._read, name="dalsegno-link", daemon=True)
        self._reader.start()

    @property
    def drain(self) -> bool:
        """Whether the agent wants the run saved and stopped at the next agreed boundary."""
        return self._drain

    @property
    def drain_since(self) -> float | None:
        """Since when the agent has wanted that, in monotonic seconds; None: it does not."""
        return self._drain_since

    @property
    def to_memory(self) -> bool:
        """The save of that drain goes to memory, if every rank is told so."""
        return self._to_memory

    @property
    def master_seen(self) -> bool:
        """Whether the agent has heard the master lately."""
        return self._master_seen

    @property
    def ending(self) -> int:
        """How the save of a drain ends, as ``control.Ending``."""
        return self._ending

    @property
    def keep(self) -> bool:
        """The world has broken: a rank that holds the last boundary saves it now, see ``worker.proto``."""
        return self._keep

    @property
    def may_stay(self) -> bool:
        """Once all is saved, this process may wait for a place in the next world instead of ending."""
        return self._may_stay and offered() is not None

    @property
    def save_order(self) -> int:
        """Number of the order to save at the next agreed boundary and train on; 0: none."""
        return self._save_order

    def when_told_to_keep(self, then: Callable[[], None]) -> None:
        """``then`` is called on the reader's thread once `keep` is said."""
        self._when_told_to_keep = then

    @property
    def is_sending(self) -> bool:
        """Something is being sent just now, by whichever thread."""
        return self._lock.locked()

    @property
    def alive(self) -> bool:
        return self._alive

    def send(self, message: worker_pb2.ToAgent, *, droppable: bool = False) -> None:
        """Sends one frame.

        Args:
            message: The message.
            droppable: Drop the message if the agent does not read; otherwise wait for the agent up to ``SEND_SECONDS``.
        """
        data = message.SerializeToString()
        if len(data) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {len(data)} bytes, allowed are {MAX_FRAME_BYTES}")
        with self._lock:
            if self._alive and (not droppable or self._writable(0.0)):
                try:
                    self._send_all(FRAME.pack(len(data)) + data)
                except OSError as error:
                    self._lost(error)

    def close(self) -> None:
        """Ends the connection and its reader."""
        with self._lock:
            self._alive = False
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            log.debug("the agent's socket was closed already: %s", error)
        self._reader.join(timeout=5.0)
        self._socket.close()

    def _connect(self, path: str) -> None:
        deadline = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                self._socket.connect(path)
                return
            except BlockingIOError:
                # Too many others wait to be accepted, and there is no way to wait for room with an unconnected socket.
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"the agent let nobody in for {CONNECT_SECONDS:g} s") from None
                time.sleep(CONNECT_PAUSE_SECONDS)  # why: no event tells when there is room
            except OSError as error:
                raise OSError(error.errno, f"the agent's socket: {error.strerror}", path) from None

    def _send_all(self, data: bytes) -> None:
        deadline = time.monotonic() + SEND_SECONDS
        view = memoryview(data)
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                rest = deadline - time.monotonic()
                if rest <= 0 or not self._writable(rest):
                    raise TimeoutError(f"the agent did not read for {SEND_SECONDS:g} s") from None

    def _writable(self, seconds: float) -> bool:
        poller = select.poll()
        poller.register(self._socket, select.POLLOUT)
        return bool(poller.poll(seconds * 1000))

    def _read(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        buffer = bytearray()
        try:
            while True:
                # No deadline: this thread has nothing else to do, and closing the socket wakes it.
                poller.poll()
                try:
                    data = self._socket.recv(1 << 16)
                except BlockingIOError:
                    continue
                if not data:
                    break
                buffer += data
                self._take(buffer)
        except (OSError, ValueError) as error:
            self._lost(error)
        else:
            self._lost(None)

    def _take(self, buffer: bytearray) -> None:
        while len(buffer) >= FRAME.size:
            (length,) = FRAME.unpack_from(buffer)
            if length > MAX_FRAME_BYTES:
                raise ValueError(f"the agent sent a frame of {length} bytes")
            if len(buffer) < FRAME.size + length:
                return
            try:
                message = worker_pb2.ToWorker.FromString(bytes(buffer[FRAME.size : FRAME.size + length]))
            except Exception as error:  # protobuf's DecodeError differs between its implementations
                raise ValueError(f"the agent sent something unreadable: {error}") from error
            del buffer[: FRAME.size + length]
            if message.drain and not self._drain:
                mark("told")
            if not message.drain:
                self._drain_since = None
            elif self._drain_since is None:
                self._drain_since = time.monotonic()
            # Before the drain itself: who is told of that from another thread reads this next.
            self._to_memory, self._may_stay = message.to_memory, message.may_stay
            self._save_order = message.save_order
            self._drain, self._master_seen, self._ending = message.drain, message.master_seen, message.ending
            told, self._keep = message.keep and not self._keep, message.keep
            if told and self._when_told_to_keep is not None:
                self._when_told_to_keep()

    def _lost(self, error: Exception | None) -> None:
        if self._alive:
            self._alive = False
            self._master_seen = False
            log.warning("the connection to the agent is gone (%s)", error or "closed by the agent")


def _forget(link: Link | None) -> None:
    if link is not None:
        link._alive = False
        link._socket.close()
