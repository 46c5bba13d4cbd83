"""Under which address a node is reached, and over which interface its ranks meet those of others. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from dalsegno.protos.addresses import is_loopback

__all__ = ["AddressChanged", "MoveTo", "rank_interfaces", "ranks_elsewhere"]

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True)
class AddressChanged:
    """Event: other nodes reach this one at `new` from now on, and at `old` no longer; connections of old are dead."""

    old: str
    new: str


@dataclass(frozen=True)
class MoveTo:
    """Action: what this node serves is served at this address from now on; the way to the master is made anew."""

    address: str


def rank_interfaces(address: str, interfaces: Iterable[tuple[str, str]], chosen: Collection[str]) -> dict[str, str]:
    """Variables that have the ranks of a node meet others where the others reach it.

    Without them gloo announces what the host's own name means, which may be loopback or another network, and NCCL takes
    the interface that it likes best.

    Args:
        address: the node's own, as other nodes are told it.
        interfaces: name and IP address of each interface; one may have several, some with a label (`eth0:ranks`).
        chosen: variables that somebody has set: they stand. An empty one counts as set.

    Returns: nothing for a node that only this machine can reach, or whose address no interface has.
    """
    if is_loopback(address):
        return {}
    name = next((name for name, own in interfaces if own == address), "")
    # gloo takes a label for an interface. NCCL would take what is behind the colon for a port, and takes a name for the
    # beginning of one unless there is "=" before it.
    found = {GLOO: name, NCCL: f"={name.partition(':')[0]}"} if name else {}
    return {variable: value for variable, value in found.items() if variable not in chosen}


def ranks_elsewhere(address: str, interfaces: Iterable[tuple[str, str]], chosen: Collection[str]) -> str:
    """What a person is to know if gloo meets other nodes at another address than `address`; empty: it does not.

    It takes the first address that an interface has, of whatever kind. Args: see `rank_interfaces`.
    """
    there = list(interfaces)
    name = rank_interfaces(address, there, chosen).get(GLOO, "")
    first = next((own for one, own in there if one == name), address)
    if first == address or ":" in address:
        return ""
    return (
        f"the ranks of this node meet others at {first}, the first address of {name}, and not at {address}, as gloo"
        f" takes no other; if other nodes do not reach that one, give {address} a label: ip addr add {address}/BITS"
        f" dev {name} label {name}:ranks"
    )
