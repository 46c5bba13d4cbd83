"""What becomes of an Ethernet frame: a switch that learns, and cables that lose, delay or are not plugged in. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

__all__ = ["Cable", "Sent", "Switch", "Way"]

_ADDRESS_BYTES = 6


@dataclass(frozen=True)
class Way:
    """One direction of a cable.

    Attributes:
        loss: the share of frames that do not arrive, from 0 to 1.
        delay_seconds: how long those that do are on their way.
    """

    loss: float = 0.0
    delay_seconds: float = 0.0


@dataclass(frozen=True)
class Cable:
    """What connects a host with the switch.

    Attributes:
        out: from the host.
        into: to the host.
        plugged: otherwise nothing passes.
    """

    out: Way = Way()
    into: Way = Way()
    plugged: bool = True


@dataclass(frozen=True)
class Sent:
    """A frame that is to be given to a port at a time (seconds of the caller's clock)."""

    due: float
    port: str
    frame: bytes


class Switch:
    """Passes frames on to the port where their address was seen last, or else to all other ports.

    Args:
        random: decides which frames are lost.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self._cables: dict[str, Cable] = {}
        self._seen: dict[bytes, str] = {}

    def set(self, port: str, cable: Cable) -> None:
        """Plugs a cable into a port, or puts another one in its place; what it was known for is forgotten."""
        self._cables[port] = cable
        self.forget(port)

    def remove(self, port: str) -> None:
        """The port is no more."""
        self._cables.pop(port, None)
        self.forget(port)

    def forget(self, port: str) -> None:
        """Forgets which addresses are there."""
        self._seen = {address: at for address, at in self._seen.items() if at != port}

    def take(self, port: str, frame: bytes, now: float) -> list[Sent]:
        """What becomes of a frame that a host has sent."""
        cable = self._cables.get(port)
        if cable is None or len(frame) < 2 * _ADDRESS_BYTES or not self._passes(cable, cable.out):
            return []
        to, sender = frame[:_ADDRESS_BYTES], frame[_ADDRESS_BYTES : 2 * _ADDRESS_BYTES]
        self._seen[sender] = port
        there = self._seen.get(to)
        # The lowest bit of the first byte: a broadcast or multicast.
        ports = [there] if there is not None and not to[0] & 1 else list(self._cables)
        found = []
        for other in ports:
            into = self._cables[other].into
            if other != port and self._passes(self._cables[other], into):
                found.append(Sent(now + cable.out.delay_seconds + into.delay_seconds, other, frame))
        return found

    def _passes(self, cable: Cable, way: Way) -> bool:
        return cable.plugged and (way.loss <= 0.0 or self._random.random() >= way.loss)
