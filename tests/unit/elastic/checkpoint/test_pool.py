"""A limit on threads makes a save slow. It does not fail."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint.files import checksums
from dalsegno.elastic.checkpoint.pool import Pool
from dalsegno.elastic.rank.threads import shared_out
from dalsegno.elastic.saving.apart import unless_stuck
from dalsegno.elastic.saving.background_save import Flight
from dalsegno.elastic.saving.saving_reports import Count, SavingReports


@pytest.fixture(params=[0, 1, 3])
def few(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """No more than so many threads can be started from now on."""
    plain, left = threading.Thread.start, iter(range(request.param))

    def start(self: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        plain(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    return int(request.param)


def test_all_work_is_done(few: int, tmp_path: Path) -> None:
    """By the threads that there are, and by the caller where there are none. Results stay in order."""
    with Pool(4) as pool:
        assert list(pool.map(lambda number: 2 * number, range(20))) == list(range(0, 40, 2))
        assert [pool.submit(divmod, number, 3).result(10) for number in (7, 8)] == [(2, 1), (2, 2)]
        with pytest.raises(ZeroDivisionError):
            pool.submit(divmod, 1, 0).result(10)
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(divmod, 1, 1)


def test_files_are_checksummed(few: int, tmp_path: Path) -> None:
    """And made durable."""
    for number in range(10):
        (tmp_path / f"{number}").write_bytes(b"x" * number)
    entries = checksums(tmp_path, [f"{number}" for number in range(10)], sync=True)
    assert [entry.size for entry in entries] == list(range(10))


def test_shares_are_worked_on(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a rank that has several cores."""
    monkeypatch.setattr("dalsegno.elastic.rank.threads.own_threads", lambda: 4)
    done: list[int] = []
    shared_out(done.extend, range(8))
    assert sorted(done) == list(range(8))


def test_what_is_watched_is_done(few: int) -> None:
    """Without its watch, if there is no thread for it."""
    assert unless_stuck(lambda: "done", Count(0), 60.0) == "done"


def test_a_background_save_without_a_thread_fails(few: int, tmp_path: Path) -> None:
    """As on a full disk: the ranks hear of it, nobody waits, and the next one may succeed."""
    path = tmp_path / "step-1.e1.1"
    path.mkdir()
    flight = Flight(path, 0, 1, {"a.json": b"{}"}, lambda: None, lambda entries: "digest", Count(0), 0.0, reports())
    error = flight.written()
    flight.cancel()
    if few:
        assert error is None
    else:
        assert isinstance(error, OSError)
        assert flight.failed
        assert flight.sealed() == ("", error)


def reports() -> SavingReports:
    """To nobody."""
    return SavingReports(None, "step-1.e1.1", lambda: 1)
