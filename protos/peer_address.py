"""Where other agents reach an agent's memory (peer.proto), and by what they know it. Masters pass it on.

Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .text import LONGEST_NAME, one_line, text_problem

__all__ = ("PeerAddress", "shown", "speaks_tls")

_ADDRESS = re.compile(r"(?:([0-9a-f]{64})@)?((?:\[[^][@/]+\]|[^][@/:]+):[0-9]{1,5})", re.ASCII)


@dataclass(frozen=True)
class PeerAddress:
    """`HOST:PORT`, or `DIGEST@HOST:PORT` of an agent that speaks TLS.

    Place and certificate are one text, so that they cannot be mixed up on their way: an agent that starts anew at the
    same port has another address.

    Attributes:
        target: HOST:PORT.
        certificate: SHA-256 of its certificate (DER), hex. Empty: it speaks plaintext.
    """

    target: str
    certificate: str = ""

    @classmethod
    def parse(cls, text: str) -> PeerAddress:
        """Raises ValueError: it is none; the message goes on after a name for it."""
        if problem := text_problem(text):
            raise ValueError(problem)
        match = _ADDRESS.fullmatch(text)
        if match is None:
            raise ValueError(
                f"is {one_line(text)!r}: neither HOST:PORT, nor that after 64 hex digits of a certificate and an '@'"
            )
        return cls(match[2], match[1] or "")

    def __str__(self) -> str:
        return f"{self.certificate}@{self.target}" if self.certificate else self.target


def shown(address: str) -> str:
    """An address as people know it, without the digest."""
    return one_line(address.rpartition("@")[2], LONGEST_NAME)


def speaks_tls(address: str) -> bool:
    """Whether the agent at an address does, without a look at the rest of it."""
    return "@" in address
