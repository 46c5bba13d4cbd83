"""The switch between the tests' hosts does to frames what its cables say."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.hosts.switch import Cable, Sent, Switch, Way

A, B, C = (bytes([2, 0, 0, 0, 0, number]) for number in (1, 2, 3))
ALL = b"\xff" * 6


@pytest.fixture
def switch() -> Switch:
    """Three hosts, and nothing is known of them."""
    one = Switch(Random(1))
    for port in "abc":
        one.set(port, Cable())
    return one


def frame(to: bytes, sender: bytes) -> bytes:
    return to + sender + b"\x08\x00 what it says"


def ports(sent: list[Sent]) -> list[str]:
    return [one.port for one in sent]


def test_it_learns_where_addresses_are(switch: Switch) -> None:
    """What is for nobody known goes to all others; later only where it has to."""
    assert ports(switch.take("a", frame(B, A), 0.0)) == ["b", "c"]
    assert switch.take("b", frame(A, B), 5.0) == [Sent(5.0, "a", frame(A, B))]
    assert ports(switch.take("a", frame(B, A), 0.0)) == ["b"]
    assert ports(switch.take("a", frame(ALL, A), 0.0)) == ["b", "c"]
    switch.forget("b")
    assert ports(switch.take("a", frame(B, A), 0.0)) == ["b", "c"]


def test_nothing_passes_a_cable_that_is_out(switch: Switch) -> None:
    """In neither direction, and nothing that is no frame passes any."""
    switch.set("b", Cable(plugged=False))
    assert ports(switch.take("a", frame(ALL, A), 0.0)) == ["c"]
    assert switch.take("b", frame(ALL, B), 0.0) == []
    assert switch.take("a", b"short", 0.0) == []
    switch.remove("c")
    assert switch.take("c", frame(ALL, C), 0.0) == []


def test_one_direction_may_be_lost(switch: Switch) -> None:
    """Out of it, or into it."""
    switch.set("b", Cable(out=Way(loss=1.0)))
    assert switch.take("b", frame(ALL, B), 0.0) == []
    assert ports(switch.take("a", frame(ALL, A), 0.0)) == ["b", "c"]
    switch.set("b", Cable(into=Way(loss=1.0)))
    assert ports(switch.take("b", frame(ALL, B), 0.0)) == ["a", "c"]
    assert ports(switch.take("a", frame(ALL, A), 0.0)) == ["c"]


def test_delays_add_up(switch: Switch) -> None:
    """Of the sender's cable and the receiver's."""
    switch.set("a", Cable(out=Way(delay_seconds=0.2)))
    switch.set("b", Cable(into=Way(delay_seconds=0.1), out=Way(delay_seconds=9.0)))
    due = {one.port: one.due for one in switch.take("a", frame(ALL, A), 100.0)}
    assert due == {"b": pytest.approx(100.3), "c": pytest.approx(100.2)}


def test_a_share_is_lost(switch: Switch) -> None:
    """About one in ten, decided anew for each."""
    switch.set("a", Cable(out=Way(loss=0.1)))
    passed = sum(bool(switch.take("a", frame(ALL, A), 0.0)) for _ in range(10_000))
    assert 8_700 < passed < 9_300
