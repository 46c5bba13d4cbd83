"""Takes addresses as people write them apart, and puts them together. Standard library only."""

from __future__ import annotations

import re

__all__ = ("ADDRESS", "address_of", "addresses_of", "host_and_port")

# A host, with brackets if it is an IPv6 address, and a port that may be missing.
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")


def addresses_of(text: str) -> list[str]:
    """Several addresses with commas, without the spaces between them."""
    return [one.strip() for one in text.split(",")]


def address_of(host: str, port: int) -> str:
    """HOST:PORT; an IPv6 host, given without brackets, gets them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str) -> tuple[str, int]:
    """The two of HOST:PORT; an IPv6 host is without its brackets.

    Raises:
        ValueError: there is no port.
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
