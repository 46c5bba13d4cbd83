"""A connection between two agents: messages, and bytes in frames, as peer.proto has them."""

from __future__ import annotations

import contextlib
import fcntl
import select
import socket
import ssl
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from dalsegno.protos import peer_pb2
from dalsegno.protos.contract import FRAME
from dalsegno.protos.text import one_line

from .frames import packed, parsed

__all__ = ["PIECE_BYTES", "BrokenOff", "Connection", "Stranger"]

# What caller and callee begin with, so that an echo is no callee; another protocol has another number. Who expects TLS
# waits for five bytes before it says what it got.
_CALLER, _CALLEE = b"DSMEM/1?", b"DSMEM/1!"
# Of a frame with a part's bytes.
PIECE_BYTES = 1 << 20
# Of a message: a header names all files of a part.
_MESSAGE_BYTES = 16 << 20
# Of one call of the kernel's, which comes back when all of it is on its way.
_SEND_BYTES = 128 << 10
# Between two looks whether what was sent is getting on its way; milliseconds.
_LOOK_MS = 1000
# For what is still on its way to who has refused it: without that, TCP may take the refusal back. Seconds.
_DRAIN_SECONDS = 2.0
_SILENT = "it does not answer"

Received = TypeVar("Received", bound=Message)


class BrokenOff(Exception):
    """The other side is gone, or silent, or this side has cancelled; one line that says which."""


class Stranger(Exception):
    """What answers there is no agent that this one can speak to; one line that says why. Waiting does not help."""


class Connection:
    """One of them. For one thread, but `cancel`; `close` always.

    Args:
        opened: connected.

    Attributes:
        moved: called whenever some bytes have come or gone.
    """

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        self._until: float | None = None
        self._piece = memoryview(bytearray(0))
        self.cancelled = False
        self.moved: Callable[[], None] = lambda: None
        # Answers are short, and waited for.
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def secure(self, context: ssl.SSLContext, server_side: bool) -> bytes:
        """Speaks TLS from now on; returns the other side's certificate (DER), empty where it shows none.

        Raises:
            Stranger: it does not speak TLS.
            BrokenOff: it has hung up, or says nothing.
        """
        self._check()
        try:
            # It is this connection's before it shakes hands, so that `cancel` ends that, too.
            self._socket = secured = context.wrap_socket(
                self._socket, server_side=server_side, do_handshake_on_connect=False
            )
            secured.do_handshake()
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            raise BrokenOff("it hung up") from error
        except ssl.SSLError as error:
            raise Stranger(f"what answers there does not speak TLS ({error.reason or error})") from error
        except OSError as error:
            raise BrokenOff(_why(error)) from error
        self._check()
        return secured.getpeercert(binary_form=True) or b""

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """All that is sent and received meanwhile takes so long at most, or BrokenOff is raised."""
        self._until = time.monotonic() + seconds
        try:
            yield
        finally:
            self._until = None
            with contextlib.suppress(OSError):
                self._socket.settimeout(None)

    def greet(self, *, calls: bool) -> None:
        """Says the first word, and waits for the other side's.

        Args:
            calls: this is the caller.

        Raises:
            BrokenOff: nothing comes.
            Stranger: something else does.
        """
        own, other = (_CALLER, _CALLEE) if calls else (_CALLEE, _CALLER)
        self._put(own)
        if self._get(len(other)) != other:
            raise Stranger("what answers there is no agent, or one of another version")

    def send(self, *messages: Message) -> None:
        """Sends them. Raises BrokenOff."""
        frames = (packed(message) for message in messages)
        self._put(b"".join(FRAME.pack(len(frame)) + frame for frame in frames))

    def receive(self, kind: type[Received], most_bytes: int = _MESSAGE_BYTES) -> Received:
        """The next message.

        Raises:
            BrokenOff: none comes.
            Garbled: what comes is not what was sent.
            ValueError: it is none of this kind, or a larger one.
        """
        count = self._receive_length()
        if count > most_bytes:
            raise ValueError("not a message of this protocol: it is too large")
        return parsed(kind, self._get(count))

    def receive_answer(self) -> peer_pb2.Answer:
        """The next message, with one line in it. Raises BrokenOff.

        As long as what was sent gets on its way, something moves: over a slow line that may take minutes.
        """
        queued = self._queued()
        while not self.is_readable(_LOOK_MS):
            before, queued = queued, self._queued()
            if queued < before:
                self.moved()
        try:
            answer = self.receive(peer_pb2.Answer)
        except ValueError as error:
            raise BrokenOff(f"it answers {error}") from error
        answer.detail = one_line(answer.detail)
        return answer

    def is_readable(self, milliseconds: int = 0) -> bool:
        """Whether something can be received, or the other side is gone; waits for that so long at most."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        look = select.poll()
        try:
            look.register(self._socket, select.POLLIN)
        except (OSError, ValueError):  # closed
            return True
        return bool(look.poll(milliseconds))

    def send_piece(self, piece: Any) -> None:
        """Sends some bytes of a part; none: that was all of it. Raises BrokenOff."""
        self._put(FRAME.pack(len(piece)))
        if piece:
            self._put(piece)

    def receive_pieces(self) -> Iterator[memoryview]:
        """The bytes of a part as they come; each piece is good until the next one.

        Raises:
            BrokenOff: they do not all come.
            ValueError: a piece is too large.
        """
        while count := self._receive_length():
            if count > PIECE_BYTES:
                raise ValueError(f"a piece of {count} bytes")
            if len(self._piece) < count:
                self._piece = memoryview(bytearray(PIECE_BYTES))
            yield self._fill(self._piece[:count])

    def refuse(self, code: grpc.StatusCode, reason: str, others: Sequence[str] = ()) -> None:
        """Answers with a status that is none of success, and ends the call."""
        with contextlib.suppress(BrokenOff):
            self.send(peer_pb2.Answer(code=code.value[0], detail=reason, others=others))
            self.hang_up()

    def hang_up(self) -> None:
        """Has sent all, and takes nothing more; waits a little until the other side has it."""
        with contextlib.suppress(BrokenOff, OSError), self.within(_DRAIN_SECONDS):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            rest = memoryview(bytearray(_SEND_BYTES))
            while self._get_some(rest):
                pass

    def cancel(self) -> None:
        """Ends whatever is under way, from any thread."""
        self.cancelled = True
        with contextlib.suppress(OSError):
            # So that the end is told in any case: after a shutdown Linux may leave the other side waiting for room.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            # Not that of an SSLSocket, which would go on in plaintext.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _receive_length(self) -> int:
        return int(FRAME.unpack(self._get(FRAME.size))[0])

    def _get(self, count: int) -> bytes:
        return bytes(self._fill(memoryview(bytearray(count))))

    def _fill(self, view: memoryview) -> memoryview:
        rest = view
        while rest:
            count = self._get_some(rest)
            if not count:
                raise BrokenOff("it has ended the call")
            rest = rest[count:]
        return view

    def _get_some(self, view: memoryview) -> int:
        self._check()
        try:
            count = self._socket.recv_into(view)
        except OSError as error:
            raise BrokenOff(_why(error)) from error
        self.moved()
        return count

    def _put(self, data: Any) -> None:
        rest = memoryview(data)
        while rest:
            self._check()
            try:
                self._socket.sendall(rest[:_SEND_BYTES])
            except OSError as error:
                raise BrokenOff(_why(error)) from error
            rest = rest[_SEND_BYTES:]
            self.moved()

    def _check(self) -> None:
        """Before each call of the kernel's. Raises BrokenOff: it was cancelled, or the time is over."""
        if self.cancelled:
            raise BrokenOff("it was ended")
        if self._until is not None:
            left = self._until - time.monotonic()
            if left <= 0:
                raise BrokenOff(_SILENT)
            with contextlib.suppress(OSError):
                self._socket.settimeout(left)

    def _queued(self) -> int:
        """Bytes that the other machine has not got yet."""
        try:
            return int.from_bytes(fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)), sys.byteorder)
        except (OSError, ValueError):  # closed
            return 0


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return _SILENT
    gone = ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLZeroReturnError
    return "it has ended the call" if isinstance(error, gone) else str(error.strerror or error)
