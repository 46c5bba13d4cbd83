"""Under which address a node is reached, over which interface, and what it does when that changes."""

from __future__ import annotations

import pytest

from dalsegno.agent.decisions.interfaces import is_loopback, rank_interfaces

HERE = [("lo", "127.0.0.1"), ("docker0", "172.17.0.1"), ("eth1", "10.0.0.4"), ("eth1", "fd00::4"), ("eth0", "10.1.0.4")]


@pytest.mark.parametrize(
    ("address", "name"), [("10.0.0.4", "eth1"), ("10.1.0.4", "eth0"), ("fd00::4", "eth1"), ("172.17.0.1", "docker0")]
)
def test_the_interface_with_the_address(address: str, name: str) -> None:
    """Both libraries are told it, NCCL exactly: it would take `eth1` for `eth10`, too."""
    assert rank_interfaces(address, HERE, ()) == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1"])
def test_on_one_machine_nothing_changes(address: str) -> None:
    """Where others cannot be, ranks meet as they like."""
    assert is_loopback(address)
    assert rank_interfaces(address, [*HERE, ("lo", address)], ()) == {}


def test_what_the_user_has_set_stands() -> None:
    """Each for itself, and also if it is empty."""
    assert rank_interfaces("10.0.0.4", HERE, {"GLOO_SOCKET_IFNAME": ""}) == {"NCCL_SOCKET_IFNAME": "=eth1"}
    assert rank_interfaces("10.0.0.4", HERE, ["NCCL_SOCKET_IFNAME"]) == {"GLOO_SOCKET_IFNAME": "eth1"}


def test_an_address_of_no_interface() -> None:
    """Nothing is guessed."""
    assert rank_interfaces("192.0.2.1", HERE, ()) == {}


