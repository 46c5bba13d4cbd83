"""A connection between two agents: messages, and bytes in frames, as peer.proto has them."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from dalsegno.protos import peer_pb2
from dalsegno.protos.text import one_line

__all__ = ["MESSAGE_BYTES", "PIECE_BYTES", "BrokenOff", "Connection", "Stranger"]

# What each side begins with; another protocol has another number. Who speaks TLS waits for 5 bytes before it says so.
_FIRST_WORD = b"DSMEM/1\n"
# Of a frame with a part's bytes.
PIECE_BYTES = 1 << 20
# Of a message: a header names all files of a part.
MESSAGE_BYTES = 16 << 20
_LENGTH_BYTES = 4
# For what is still on its way to who has refused it: without that, TCP may take the refusal back. Seconds.
_DRAIN_SECONDS = 2.0

Heard = TypeVar("Heard", bound=Message)


class BrokenOff(Exception):
    """The other side is gone, or silent, or this side has cancelled; one line that says which."""


class Stranger(Exception):
    """What answers there is no agent that this one can speak to; one line that says why. Waiting does not help."""


class Connection:
    """One of them. For one thread, but `cancel`; `close` always.

    Args:
        opened: connected.
    """

    def __init__(self, opened: socket.socket) -> None:
        self._socket = opened
        self._until: float | None = None
        self._piece = memoryview(bytearray(0))
        self.cancelled = False
        # Answers are short, and waited for.
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def secure(self, context: ssl.SSLContext, server_side: bool) -> bytes:
        """Speaks TLS from now on; returns the other side's certificate (DER), empty where it shows none.

        Raises:
            Stranger: it does not speak TLS.
            BrokenOff: it has hung up, or says nothing.
        """
        try:
            self._socket.settimeout(self._left())
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
        return secured.getpeercert(binary_form=True) or b""

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """All that is said and heard meanwhile takes so long at most, or BrokenOff is raised."""
        self._until = time.monotonic() + seconds
        try:
            yield
        finally:
            self._until = None
            with contextlib.suppress(OSError):
                self._socket.settimeout(None)

    def greet(self) -> None:
        """Says the first word. Raises BrokenOff."""
        self._put(_FIRST_WORD)

    def expect_greeting(self) -> None:
        """Raises BrokenOff; and Stranger: something else was said."""
        word = self._get(len(_FIRST_WORD))
        if word != _FIRST_WORD:
            raise Stranger("what answers there is no agent, or one of another version")

    def send(self, *messages: Message) -> None:
        """Sends them. Raises BrokenOff."""
        frames = (message.SerializeToString() for message in messages)
        self._put(b"".join(_length(len(frame)) + frame for frame in frames))

    def receive(self, kind: type[Heard], most_bytes: int = MESSAGE_BYTES) -> Heard:
        """The next message.

        Raises:
            BrokenOff: none comes.
            ValueError: what comes is none of this kind, or a larger one.
        """
        count = self._hear_length()
        if count > most_bytes:
            raise ValueError("not a message of this protocol: it is too large")
        try:
            return kind.FromString(self._get(count))
        except DecodeError as error:
            raise ValueError("not a message of this protocol") from error

    def receive_answer(self) -> peer_pb2.Answer:
        """The next message, with a status that there is, and one line. Raises BrokenOff."""
        try:
            answer = self.receive(peer_pb2.Answer)
        except ValueError as error:
            raise BrokenOff(f"it answers {error}") from error
        answer.detail = one_line(answer.detail)
        return answer

    @property
    def is_readable(self) -> bool:
        """Whether something can be heard, or the other side is gone."""
        if isinstance(self._socket, ssl.SSLSocket) and self._socket.pending():
            return True
        look = select.poll()
        try:
            look.register(self._socket, select.POLLIN)
        except (OSError, ValueError):  # closed
            return True
        return bool(look.poll(0))

    def send_piece(self, piece: Any) -> None:
        """Sends some bytes of a part; none: that was all of it. Raises BrokenOff."""
        self._put(_length(len(piece)))
        if piece:
            self._put(piece)

    def receive_pieces(self) -> Iterator[memoryview]:
        """The bytes of a part as they come; each piece is good until the next one.

        Raises:
            BrokenOff: they do not all come.
            ValueError: a piece is too large.
        """
        while count := self._hear_length():
            if count > PIECE_BYTES:
                raise ValueError(f"a piece of {count} bytes")
            if len(self._piece) < count:
                self._piece = memoryview(bytearray(PIECE_BYTES))
            yield self._fill(self._piece[:count])

    def refuse(self, code: grpc.StatusCode, reason: str) -> None:
        """Answers with a status that is none of success, and ends the call."""
        with contextlib.suppress(BrokenOff):
            self.send(peer_pb2.Answer(code=code.value[0], detail=reason))
            self.hang_up()

    def hang_up(self) -> None:
        """Has said all, and hears nothing more; waits a little until the other side has heard it."""
        with contextlib.suppress(BrokenOff, OSError), self.within(_DRAIN_SECONDS):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)
            rest = memoryview(bytearray(PIECE_BYTES))
            while self._get_some(rest):
                pass

    def cancel(self) -> None:
        """Ends whatever is under way, from any thread."""
        self.cancelled = True
        with contextlib.suppress(OSError):
            # Not that of an SSLSocket, which would go on in plaintext.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _hear_length(self) -> int:
        return int.from_bytes(self._get(_LENGTH_BYTES), "big")

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
        try:
            self._bound()
            return self._socket.recv_into(view)
        except OSError as error:
            raise BrokenOff(_why(error)) from error

    def _put(self, data: Any) -> None:
        try:
            self._bound()
            self._socket.sendall(data)
        except OSError as error:
            raise BrokenOff(_why(error)) from error

    def _bound(self) -> None:
        if self._until is not None:
            self._socket.settimeout(self._left())

    def _left(self) -> float | None:
        """Seconds; a little where there are none: 0 would mean not to wait at all, which fails in another way."""
        return None if self._until is None else max(1e-3, self._until - time.monotonic())


def _length(count: int) -> bytes:
    return count.to_bytes(_LENGTH_BYTES, "big")


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "it does not answer"
    gone = ConnectionResetError, BrokenPipeError, ssl.SSLEOFError, ssl.SSLZeroReturnError
    return "it has ended the call" if isinstance(error, gone) else str(error.strerror or error)
