"""Where a master's name leads to: each connection begins at the next of its addresses.

gRPC asks a name's addresses in the order in which they come, and stays with the first that listens. Behind a name of
several masters that may be one that stands by, and knows no leader.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence

from dalsegno.protos.addresses import host_and_port

__all__ = ["MasterPlaces", "looked_up"]

# The most addresses of one name that are remembered as asked.
_MOST_ADDRESSES = 1000


def looked_up(host: str, port: int) -> list[str]:
    """The addresses of a name, in the order in which this machine prefers them. May take seconds. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class MasterPlaces:
    """Looks a name up anew for each connection, so that every address gets its turn. For one thread at a time.

    Args:
        lookup: returns a host's addresses, or raises OSError.
    """

    def __init__(self, lookup: Callable[[str, int], Sequence[str]] = looked_up) -> None:
        self._lookup = lookup
        # When each address was begun with, as a count of connections.
        self._asked: dict[tuple[str, str], int] = {}
        self._count = 0
        # Of each HOST:PORT with a choice, what it was: a target for each address.
        self._each: dict[str, list[str]] = {}

    def target(self, address: str, alone: bool = False) -> str:
        """Where gRPC is to connect for a master at HOST:PORT: the address that was begun with the longest ago first.

        The others of its kind (IPv4, IPv6) come behind it, for the case that nobody listens at the first, unless it is
        to be asked `alone`. Empty: there is no choice, or the name is not known now; then gRPC does it all.
        """
        host, port, found = self._choice(address)
        if not found:
            self._each.pop(address, None)
            return ""
        self._each[address] = [_written([one], port) for one in found]
        # Sorting keeps the order of those that were never begun with.
        found.sort(key=lambda one: self._asked.get((host, one), 0))
        if len(self._asked) >= _MOST_ADDRESSES:
            self._asked.clear()
        self._count += 1
        self._asked[host, found[0]] = self._count
        return _written(found[:1] if alone else found, port)

    def each(self, address: str) -> list[str]:
        """What `target` may return `alone`, as it knew it last: no name is looked up, so it may be called any time."""
        return self._each.get(address) or [""]

    def targets(self, address: str) -> list[str]:
        """As `target`, for whoever may have to ask all of them: one for each address; one that is empty: see there."""
        _, port, found = self._choice(address)
        return [_written(found[turn:] + found[:turn], port) for turn in range(len(found))] or [""]

    def _choice(self, address: str) -> tuple[str, int, list[str]]:
        """Host, port and the host's addresses; none where there is no choice between two of one kind."""
        try:
            host, port = host_and_port(address)
            found = [] if _is_address(host) else [one for one in self._lookup(host, port) if _is_address(one)]
        except (OSError, ValueError):
            # gRPC says what is wrong with it.
            return "", 0, []
        six = sum(":" in one for one in found)
        return host, port, list(found) if max(six, len(found) - six) > 1 else []


def _written(addresses: Sequence[str], port: int) -> str:
    """The first address, and behind it those of its kind, as gRPC writes them."""
    if ":" in addresses[0]:
        return "ipv6:" + ",".join(f"[{one}]:{port}" for one in addresses if ":" in one)
    return "ipv4:" + ",".join(f"{one}:{port}" for one in addresses if ":" not in one)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
