"""10,000 hostile calls to a master, 100,000 in `make test-all`, with two good agents beside them."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

import pytest

from tests.support.jobs.master_process import eventually

from .arena import Arena, fuzz
from .calls import FAMILIES
from .counts import SEED, count, patience

USUAL = 1_500
SHARE = {"strangers": 0.1, "malformed": 0.15, "registrations": 0.15, "forgers": 0.15, "rogues": 0.2, "everybody": 0.25}

pytestmark = pytest.mark.timeout(patience(USUAL, 120))


@pytest.mark.parametrize("family", FAMILIES)
def test_good_agents_notice_nothing(family: str, tmp_path: Path) -> None:
    """The master lives, answers sensibly, believes no one but whom it should, and recovers the same record."""
    failure = fuzz(tmp_path, family, SEED, round(count(USUAL) * SHARE[family]))
    assert failure is None, str(failure)


def test_connections_that_say_nothing_or_nonsense(tmp_path: Path) -> None:
    """Hundreds of them, open all the while: good agents are served, and the master forgets who has gone."""
    rng = random.Random(SEED)
    greetings = (
        b"",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01",
        rng.randbytes(3000),
    )
    with Arena(tmp_path) as arena:
        host, _, port = arena.master.address.rpartition(":")
        descriptors = Path(f"/proc/{arena.master.process.pid}/fd")
        before = len(list(descriptors.iterdir()))
        for _ in range(3):
            with contextlib.ExitStack() as stack:
                for _ in range(100):
                    one = stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
                    # The other end may have had enough of it already.
                    with contextlib.suppress(OSError):
                        one.sendall(rng.choice(greetings))
                arena.check()
        eventually(lambda: len(list(descriptors.iterdir())) <= before + 10, seconds=30)
        arena.end()
