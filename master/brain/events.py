"""What the master's brain receives, and what it answers. Plain values, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.message import Message


@dataclass(frozen=True)
class Called:
    """A unary request of `dalsegno.control.v1.Control`."""

    message: Message


@dataclass(frozen=True)
class StreamOpened:
    """An agent's `Watch` stream is open."""

    node: str
    incarnation: str


@dataclass(frozen=True)
class StreamClosed:
    """The peer closed its stream, or the connection broke."""

    node: str
    incarnation: str


@dataclass(frozen=True)
class Tick:
    """The time that `State.wake` names has come."""


Event = Called | StreamOpened | StreamClosed | Tick


@dataclass(frozen=True)
class Reply:
    """The answer to one `Called`: the name of a gRPC status code, and a message if it is OK."""

    code: str = "OK"
    detail: str = ""
    message: Message | None = None
