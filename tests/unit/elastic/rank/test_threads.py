"""A rank's threads: as many as its share of the cores, and each item is worked on once."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import pytest

from dalsegno.elastic.rank.threads import own_threads, shared_out


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"),
    [(2, "", 2), (2, "1", 2), (2, "2", 1), (1, "1", 1), (2, "8", 1), (64, "8", 4), (64, "1", 4), (4, "nonsense", 4)],
)
def test_a_rank_uses_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: str, threads: int
) -> None:
    """And no more than help."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert own_threads() == threads


@pytest.mark.parametrize("cores", [1, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_each_item_is_worked_on_once(monkeypatch: pytest.MonkeyPatch, cores: int, count: int) -> None:
    """On the caller's thread where one is all there is."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    done: list[int] = []
    threads = set()

    def work(share: Sequence[int]) -> None:
        threads.add(threading.current_thread())
        done.extend(share)

    shared_out(work, range(count))
    assert sorted(done) == list(range(count))
    assert (threads <= {threading.current_thread()}) == (cores == 1 or count <= 1)


def test_what_goes_wrong_is_raised_when_all_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing goes on writing behind the caller's back."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    begun, failing, ended = threading.Event(), threading.Event(), threading.Event()

    def work(share: Sequence[int]) -> None:
        if 0 in share:
            assert begun.wait(10.0)
            failing.set()
            raise ValueError("does not fit")
        begun.set()
        assert failing.wait(10.0)
        ended.set()

    with pytest.raises(ValueError, match="does not fit"):
        shared_out(work, [0, 1])
    assert ended.is_set()
