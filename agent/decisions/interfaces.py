"""Under which address a node is reached, and over which interface its ranks meet those of others. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from dataclasses import dataclass

__all__ = ["AddressChanged", "MoveTo", "is_loopback", "rank_interfaces"]

# How each library takes the name of an interface: gloo as it is, NCCL as a prefix unless there is "=" before it.
_FORMS = {"GLOO_SOCKET_IFNAME": "{}", "NCCL_SOCKET_IFNAME": "={}"}


@dataclass(frozen=True)
class AddressChanged:
    """Event: other nodes reach this one at `new` from now on, and at `old` no longer; connections of old are dead."""

    old: str
    new: str


@dataclass(frozen=True)
class MoveTo:
    """Action: what this node serves is served at this address from now on; the way to the master is made anew."""

    address: str


def is_loopback(address: str) -> bool:
    """Whether only this machine can mean itself by an IP address."""
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def rank_interfaces(address: str, interfaces: Iterable[tuple[str, str]], chosen: Collection[str]) -> dict[str, str]:
    """Variables that have the ranks of a node meet others where the others reach it.

    Without them gloo announces what the host's own name means, which may be loopback or another network, and NCCL takes
    the interface that it likes best.

    Args:
        address: the node's own, as other nodes are told it.
        interfaces: name and IP address of each interface; one may have several.
        chosen: variables that somebody has set: they stand. An empty one counts as set.

    Returns: nothing for a node that only this machine can reach, or whose address no interface has.
    """
    if is_loopback(address):
        return {}
    name = next((name for name, own in interfaces if own == address), "")
    return {variable: form.format(name) for variable, form in _FORMS.items() if name and variable not in chosen}
