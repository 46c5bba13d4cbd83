"""Takes addresses as people write them apart. Standard library only."""

from __future__ import annotations

__all__ = ("host_and_port",)


def host_and_port(address: str) -> tuple[str, int]:
    """The two of HOST:PORT; an IPv6 host is without its brackets.

    Raises:
        ValueError: there is no port.
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
