"""A part that is on its way is handed on: all of its bytes, in order, as they come, and not if they come too slowly."""

from __future__ import annotations

import os
import queue
import random
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from dalsegno.agent.memory import incoming
from dalsegno.agent.memory.arrivals import LEAST_BYTES_PER_SECOND, MOST_SECONDS, Arrival, ArrivalEnded
from dalsegno.agent.memory.holdings import HeldParts, Holdings
from dalsegno.agent.memory.incoming import PartRefusedError
from dalsegno.agent.memory.space import Space
from dalsegno.elastic.checkpoint import FileEntry
from dalsegno.protos import peer_pb2
from tests.support.checkpoints.memory import JOB, RUN, manifest_of

FILES = {"a": os.urandom(700_001), "deep/b": b"b", "empty": b"", "deep/er/c": os.urandom(300_000), "last": b""}
MANIFEST = manifest_of("step-1.e1.1", {0: FILES})
HEAD = MANIFEST.to_bytes()
ALL = HEAD + b"".join(FILES.values())
HEADER = peer_pb2.Header(
    job_id=JOB,
    run_id=RUN,
    epoch=1,
    name=MANIFEST.name,
    digest=MANIFEST.digest,
    manifest_bytes=len(HEAD),
    paths=list(FILES),
)


@pytest.fixture
def here(tmp_path: Path) -> Holdings:
    (tmp_path / RUN).mkdir()
    return Holdings(tmp_path)


class Source:
    """Brings the part to a node, as much at a time as the test says."""

    def __init__(self, here: Holdings, pool: ThreadPoolExecutor) -> None:
        self._here, self._given = here, queue.SimpleQueue[bytes]()
        space = Space(None, here.bytes, lambda: 1 << 40, lambda: 1 << 40)
        self.received: Future[HeldParts] = pool.submit(incoming.receive, HEADER, self._come(), here, space)

    def _come(self) -> Iterator[memoryview]:
        while data := self._given.get():
            yield memoryview(data)

    def brings(self, data: bytes) -> None:
        self._given.put(data)

    def ends(self) -> None:
        self._given.put(b"")

    def arrival(self) -> Arrival:
        while (found := self._here.arrivals.find(RUN, MANIFEST.name, MANIFEST.digest, 0)) is None:
            assert not self.received.done(), self.received.exception()
            time.sleep(0.001)  # why: the other thread is to begin
        return found


@contextmanager
def source(here: Holdings) -> Iterator[tuple[Source, ThreadPoolExecutor]]:
    with ThreadPoolExecutor(8) as pool:
        found = Source(here, pool)
        try:
            yield found, pool
        finally:
            found.ends()


def read(arrival: Arrival, piece_bytes: int) -> bytes:
    return b"".join(bytes(piece) for piece in arrival.read(piece_bytes))


@pytest.mark.parametrize("seed", range(8))
def test_who_wants_it_too_gets_all_of_it_as_it_comes(here: Holdings, seed: int) -> None:
    """Several, from the beginning or later, in pieces of any size; also what is put in its place meanwhile."""
    chance, readers = random.Random(seed), []
    with source(here) as (brought, pool):
        at = 0
        while at < len(ALL):
            size = chance.choice((1, 1000, 100_000, 400_000))
            brought.brings(ALL[at : at + size])
            at += size
            if at > len(HEAD) and len(readers) < 6:
                readers.append(pool.submit(read, brought.arrival(), chance.choice((1 << 20, 65_536, 7777))))
        brought.ends()
        assert brought.received.result(60).parts == (0,)
        assert [reader.result(60) == ALL for reader in readers] == [True] * len(readers)
    assert here.arrivals.find(RUN, MANIFEST.name, MANIFEST.digest, 0) is None


def test_what_is_here_is_not_held_back(here: Holdings) -> None:
    """A piece that is not full is sent on, when no more comes for a moment."""
    with source(here) as (brought, _):
        brought.brings(ALL[: len(HEAD) + 1000])
        pieces, got = brought.arrival().read(), 0
        while got < len(HEAD) + 1000:
            got += len(next(pieces))
        brought.brings(ALL[len(HEAD) + 1000 :])
        brought.ends()
        assert sum(map(len, pieces)) == len(ALL) - got


@pytest.mark.parametrize("brings", [len(HEAD) + 1, len(ALL) - 1])
def test_what_is_given_up_is_given_up_behind_it_too(here: Holdings, brings: int) -> None:
    with source(here) as (brought, pool):
        brought.brings(ALL[:brings])
        reader = pool.submit(read, brought.arrival(), 1000)
        brought.ends()
        with pytest.raises(ArrivalEnded):
            reader.result(60)
        with pytest.raises(PartRefusedError):
            brought.received.result(60)


def test_who_reads_late_finds_nothing_of_what_was_given_up(here: Holdings) -> None:
    with source(here) as (brought, _):
        brought.brings(ALL[: len(HEAD) + 1000])
        arrival = brought.arrival()
        brought.ends()
        with pytest.raises(PartRefusedError):
            brought.received.result(60)
        with pytest.raises(ArrivalEnded):
            read(arrival, 1000)


def test_nobody_waits_for_a_reader_that_has_gone(here: Holdings) -> None:
    with source(here) as (brought, _):
        brought.brings(HEAD)
        pieces = brought.arrival().read(unwanted=lambda: True)
        assert bytes(next(pieces)) == HEAD
        with pytest.raises(ArrivalEnded):
            next(pieces)


def test_what_comes_slowly_is_not_handed_on(tmp_path: Path) -> None:
    """Only if that would last long, and as soon as it is known; a faster second makes it good again."""
    now = [0.0]
    rate = LEAST_BYTES_PER_SECOND / 2
    size = int(rate * (MOST_SECONDS + 5))
    entries = [FileEntry("file", size, "")]
    arrival = Arrival(HEADER, HEAD, entries, str(tmp_path), tmp_path, lambda: now[0])
    assert not arrival.is_slow()
    slow = []
    for _ in range(7):
        now[0] += 1
        arrival.moved(int(rate))
        slow.append(arrival.is_slow())
    # Behind the fifth second the rest takes no longer than others would be waited for.
    assert slow == [True] * 4 + [False] * 3
    fast = Arrival(HEADER, HEAD, entries, str(tmp_path), tmp_path, lambda: now[0])
    now[0] += 2
    assert fast.is_slow()
    with pytest.raises(ArrivalEnded, match="slowly"):
        read(fast, 1000)
    fast.moved(int(3 * LEAST_BYTES_PER_SECOND))
    now[0] += 1
    assert not fast.is_slow()
