"""Where other agents reach an agent's memory (peer.proto), and by what they know it. Masters pass it on.

Standard library only.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .text import LONGEST_NAME, one_line, text_problem

__all__ = ("PeerAddress", "shown", "speaks_tls")

_ADDRESS = re.compile(r"(?:([0-9a-f]{64})(?:\.([0-9a-f]{32}))?@)?((?:\[[^][@/]+\]|[^][@/:]+):[0-9]{1,5})", re.ASCII)


@dataclass(frozen=True)
class PeerAddress:
    """`HOST:PORT`; of an agent that speaks TLS `DIGEST@HOST:PORT`, and `DIGEST.SECRET@HOST:PORT` without a token.

    Place and certificate are one text, so that they cannot be mixed up on their way: an agent that starts anew at the
    same port has another address.

    Attributes:
        target: HOST:PORT.
        certificate: SHA-256 of its certificate (DER), hex. Empty: it speaks plaintext.
        secret: What a caller shows in the token's place, 32 hex digits. Only the master has it, and the agents that it
            gives the address to. Empty: the token counts.
    """

    target: str
    certificate: str = ""
    secret: str = ""

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
        return cls(match[3], match[1] or "", match[2] or "")

    def __str__(self) -> str:
        known = f"{self.certificate}.{self.secret}" if self.secret else self.certificate
        return f"{known}@{self.target}" if known else self.target


def shown(address: str) -> str:
    """An address as people know it, without digest and secret."""
    return one_line(address.rpartition("@")[2], LONGEST_NAME)


def speaks_tls(address: str) -> bool:
    """Whether the agent at an address does, without a look at the rest of it."""
    return "@" in address
