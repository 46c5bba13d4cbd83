"""Addresses of agents: place and certificate in one text."""

from __future__ import annotations

import pytest

from dalsegno.protos.peer_address import PeerAddress, shown

DIGEST, SECRET = "0123456789abcdef" * 4, "fedcba9876543210" * 2


@pytest.mark.parametrize("target", ["10.0.0.1:7", "node-3.example.org:65535", "[::1]:7", "[fe80::1%eth0]:29400"])
@pytest.mark.parametrize("known", [(), (DIGEST,), (DIGEST, SECRET)])
def test_it_is_read_as_it_is_written(target: str, known: tuple[str, ...]) -> None:
    address = PeerAddress(target, *known)
    assert PeerAddress.parse(str(address)) == address
    assert shown(str(address)) == target


@pytest.mark.parametrize(
    "text",
    [
        *("", "host", "host:", ":7", "host:7:8", "host:123456", "::1:7", "a/b:7", "[::1:7", "[]:7"),
        *("@host:7", f"{DIGEST}@", f"{DIGEST[1:]}@host:7", f"{DIGEST}0@host:7", f"{DIGEST.upper()}@host:7"),
        *(f"{DIGEST}@{DIGEST}@host:7", f"{DIGEST}@host:7\n", "ho\x1bst:7", f"{DIGEST}@{'h' * 200}:7", "ho\nst:7"),
        *(f"{SECRET}@host:7", f".{SECRET}@host:7", f"{DIGEST}.@host:7", f"{DIGEST}.{SECRET[1:]}@host:7"),
    ],
)
def test_what_is_none_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^is .+") as refused:
        PeerAddress.parse(text)
    assert str(refused.value).isprintable()
    assert shown(text).isprintable()
