"""Takes addresses as people write them apart, and puts them together. Standard library only."""

from __future__ import annotations

import ipaddress
import re

__all__ = ("ADDRESS", "EVERYWHERE", "address_of", "addresses_of", "host_and_port", "is_loopback", "is_only_here")

# A host, with brackets if it is an IPv6 address, and a port that may be missing.
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::([0-9]{1,5}))?")
# Whoever listens there does so at all addresses of its machine.
EVERYWHERE = "0.0.0.0"
# Names of the loopback address by convention; of Debian and Red Hat, too.
_LOCAL = ("localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback")


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


def is_loopback(address: str) -> bool:
    """Whether only this machine can mean itself by an IP address."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def is_only_here(host: str) -> bool:
    """Whether a host means each time the machine on which that is said: a loopback address, or a name like localhost.

    Any other name that means loopback here means this machine's own, as Debian's `/etc/hosts` has it (127.0.1.1):
    elsewhere it is another address.
    """
    try:
        return is_loopback(host)
    except ValueError:
        labels = host.lower().rstrip(".").split(".")
        return labels[0] in _LOCAL or labels[-1] == "localhost"
