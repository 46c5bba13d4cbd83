"""The agent's end of the network as gRPC's synchronous channel: the real client and connector call it and wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message import Message

from dalsegno.protos import control_pb2

from .threads import Process, Thread, running

if TYPE_CHECKING:
    from .network import Attempt, Network, Stream

# A call without a deadline of its own is not one of ours.
LONGEST_CALL = 60.0


class CallError(grpc.RpcError):
    """The status of a call that failed; stands for a `grpc.Call`."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"{code}: {detail}")
        self._code, self._detail = code, detail

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode[self._code]

    def trailing_metadata(self) -> tuple[()]:
        return ()

    def details(self) -> str:
        return self._detail


grpc.Call.register(CallError)


def copy(message: Message) -> Message:
    """As over the wire: the other side never shares an object."""
    return type(message).FromString(message.SerializeToString())


class Endpoint:
    """One process's place in the network; `client` and `client.agent` of `network`."""

    def __init__(self, process: Process, network: Network) -> None:
        self.process = process
        self.network = network
        self.host = process.host
        self.calls: dict[Attempt, None] = {}
        self.streams: dict[Stream, Reader] = {}
        # What came last over the newest stream.
        self.newest: control_pb2.Directive | None = None

    @property
    def agent(self) -> Endpoint:
        return self

    def run(self, call: Callable[..., None], *args: Any) -> None:
        """A stopped process has its answers in its sockets: whoever waits for them wakes up later."""
        if self.process.alive:
            call(*args)

    def directed(self, stream: Stream, directive: control_pb2.Directive) -> None:
        if reader := self.streams.get(stream):
            self.newest = directive
            reader.push(directive)

    def stream_broken(self, stream: Stream) -> None:
        if reader := self.streams.pop(stream, None):
            reader.end(stream.code)

    def close(self) -> None:
        """The process is gone; its kernel closes what was open."""
        for attempt in self.calls:
            attempt.done = None
            self.network.open.pop(attempt, None)
        self.calls.clear()
        for stream in list(self.streams):
            self.network.hang_up(stream)
        self.streams.clear()


class Channel:
    """`grpc.Channel`, as far as the generated stub and the connector use it."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._closed = False
        self._calls: dict[Attempt, None] = {}
        self._readers: dict[Reader, None] = {}

    def unary_unary(self, method: str, **_: Any) -> Callable[..., Message]:
        return self._call

    def unary_stream(self, method: str, **_: Any) -> Callable[..., Reader]:
        return self._watch

    def _call(self, request: Message, timeout: float | None = None, metadata: object = None) -> Message:
        if self._closed:
            raise ValueError("Cannot invoke RPC on closed channel!")
        kernel = running()
        thread = kernel.current
        assert thread is not None
        answer: list[tuple[str, str, Message | None]] = []

        def done(code: str, detail: str, message: Message | None) -> None:
            answer.append((code, detail, message))
            kernel.wake(thread)

        seconds = LONGEST_CALL if timeout is None else timeout
        attempt = self._endpoint.network.send(self._endpoint, copy(request), seconds, done)
        self._calls[attempt] = self._endpoint.calls[attempt] = None
        while not answer:
            kernel.park()
        del self._calls[attempt], self._endpoint.calls[attempt]
        code, detail, message = answer[0]
        if code != "OK" or message is None:
            raise CallError(code if code != "OK" else "UNKNOWN", detail)
        return copy(message)

    def _watch(self, request: control_pb2.WatchRequest, metadata: object = None) -> Reader:
        if self._closed:
            raise ValueError("Cannot invoke RPC on closed channel!")
        caller = request.caller
        stream = self._endpoint.network.watch(self._endpoint, caller.node, caller.incarnation)
        stream.request = copy(request)
        reader = Reader(self._endpoint, stream)
        self._endpoint.newest = None
        self._endpoint.streams[stream] = reader
        self._readers[reader] = None
        return reader

    def close(self) -> None:
        self._closed = True
        for attempt in list(self._calls):
            attempt.resolve("CANCELLED", "the channel was closed")
        for reader in self._readers:
            reader.cancel()
        self._readers.clear()


class Reader(Iterator[control_pb2.Directive]):
    """A stream of directives, read by one thread."""

    def __init__(self, endpoint: Endpoint, stream: Stream) -> None:
        self._endpoint = endpoint
        self._stream = stream
        self._arrived: deque[control_pb2.Directive] = deque()
        self._ended = ""
        self._waiting: Thread | None = None

    def push(self, directive: control_pb2.Directive) -> None:
        self._arrived.append(control_pb2.Directive.FromString(directive.SerializeToString()))
        self._wake()

    def end(self, code: str) -> None:
        self._ended = self._ended or code
        self._wake()

    def _wake(self) -> None:
        thread, self._waiting = self._waiting, None
        if thread is not None:
            running().wake(thread)

    def __next__(self) -> control_pb2.Directive:
        kernel = running()
        while not self._arrived and not self._ended:
            self._waiting = kernel.current
            kernel.park()
        if self._arrived and self._ended != "CANCELLED":
            return self._arrived.popleft()
        if self._ended == "OK":
            raise StopIteration
        raise CallError(self._ended, "the stream broke")

    def cancel(self) -> None:
        if self._endpoint.streams.pop(self._stream, None) is not None:
            self._endpoint.network.hang_up(self._stream)
        self.end("CANCELLED")


class Credentials:
    """Gives the real connector channels into the simulated network."""

    metadata = ()
    token = None

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint

    def channel(self, address: str, target: str = "") -> Channel:
        return Channel(self._endpoint)
