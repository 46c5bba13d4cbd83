"""What stands in the leader's key may be anything: it must stop no master."""

from __future__ import annotations

import json

import pytest

from dalsegno.master.leadership.leader_key import _decoded
from dalsegno.master.leadership.standing import Leader
from dalsegno.master.record.etcd_calls import Value

SOUND = {"master": "m", "address": "h:1", "generation": 3}


def said(**other: object) -> bytes:
    return json.dumps(SOUND | other).encode()


def test_a_sound_key() -> None:
    for address in ("h:1", "[::1]:1", "10.0.0.1:29400", "gpt-master-0.gpt:29400"):
        assert _decoded(Value(said(address=address), 1, 1, 7)) == Leader("m", address, 3)
    assert _decoded(None) is None


@pytest.mark.parametrize(
    "data",
    [
        *(b"nonsense", b"", b"\xff\xfe", b"[]", b"3", b"{}", b"[" * 100_000),
        *(said(generation=float("inf")), said(generation="3"), said(generation=True), said(generation=None)),
        *(said(master=1), said(address=None), said(address=""), said(address="m\u00fcnchen:1"), said(address="a\nb:1")),
        *(said(address="a b:1"), said(address="\x01:1")),
    ],
    ids=range(18),
)
def test_what_names_no_leader_counts_as_nothing(data: bytes) -> None:
    assert _decoded(Value(data, 1, 1, 7)) is None


def test_a_key_without_a_lease_counts_as_nothing() -> None:
    """It would never end, and nobody would ever lead."""
    assert _decoded(Value(said(), 1, 1)) is None
