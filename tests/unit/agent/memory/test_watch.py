"""Transfers that do not move are ended, and work waits in line."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from dalsegno.agent.memory import watch
from dalsegno.agent.memory.calls import SendPace
from dalsegno.agent.memory.line import Line
from dalsegno.agent.memory.watch import StallWatch


@pytest.mark.slow
def test_only_what_does_not_move_is_ended() -> None:
    """However long it takes."""
    looking = StallWatch(0.4)
    stuck, slow = threading.Event(), threading.Event()
    with looking.over(stuck.set) as standing, looking.over(slow.set) as moving:
        deadline = time.monotonic() + 30
        while not stuck.wait(0.02):
            moving.moved()
            assert time.monotonic() < deadline
        assert standing.stalled
        assert not moving.stalled
        assert not slow.is_set()
    looking.close()


@pytest.mark.slow
def test_a_call_may_have_less_time_than_others() -> None:
    looking = StallWatch(4.0)
    short, usual = threading.Event(), threading.Event()
    with looking.over(short.set, seconds=0.1), looking.over(usual.set, seconds=100.0):
        assert short.wait(3.0)
        assert not usual.is_set()
        assert usual.wait(30)
    looking.close()


@pytest.mark.slow
def test_a_pause_of_this_process_is_nobodys_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slept, an agent that was stopped: peers had no chance to move anything."""
    state = SimpleNamespace(offset=0.0, looks=0)

    def monotonic() -> float:
        if threading.current_thread().name == "memory-watch":
            state.looks += 1
        return time.monotonic() + state.offset

    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=monotonic))
    looking = StallWatch(30.0)
    ended = threading.Event()
    with looking.over(ended.set) as transfer:
        state.offset, seen = 1000.0, state.looks
        deadline = time.monotonic() + 30
        while state.looks < seen + 3:
            assert time.monotonic() < deadline
            assert not ended.wait(0.05)
        assert not transfer.stalled
    looking.close()


def test_after_the_end_nothing_begins() -> None:
    looking = StallWatch()
    under_way, late = threading.Event(), threading.Event()
    with looking.over(under_way.set):
        looking.close()
        assert under_way.is_set()
    with looking.over(late.set) as transfer:
        assert late.is_set()
        assert not transfer.stalled


def test_work_waits_in_line_and_is_bounded() -> None:
    """One after the other; what fails stops nothing; too much, and what comes after the end, is not taken."""
    line = Line("test")
    begun, go, done = threading.Event(), threading.Event(), threading.Event()
    ran: list[int] = []

    def first() -> None:
        begun.set()
        go.wait(30)
        raise OSError("it fails")

    assert line.put(first)
    assert begun.wait(30)
    taken = [line.put(lambda number=number: ran.append(number)) for number in range(100)]  # type: ignore[misc]
    assert taken == [True] * 64 + [False] * 36
    go.set()
    deadline = time.monotonic() + 30
    while not line.put(done.set):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert done.wait(30)
    assert ran == list(range(64))
    line.close(30)
    assert not line.put(done.set)


def test_a_pace_holds_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many bytes in a second, in pieces of which several pass in a second; without one nothing waits."""
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    pace = SendPace(1000.0)
    for _ in range(3):
        pace.wait(500)
    # Nothing slept: what was held back adds up.
    assert waits == [0.0, pytest.approx(0.5, abs=0.1), pytest.approx(1.0, abs=0.1)]
    for one in (pace, SendPace(None)):
        one.hurry(True)
        one.wait(1 << 30)
    assert len(waits) == 3
    pace.hurry(False)
    pace.wait(1)
    assert waits[3:] == [pytest.approx(1.5, abs=0.1)]
    assert [SendPace(rate).piece_bytes for rate in (None, 1e9, 1e6, 1.0)] == [1 << 20, 1 << 20, 100_000, 4096]


@pytest.mark.slow
def test_several_senders_share_a_pace() -> None:
    """It is the node's, however many buddies there are."""
    pace = SendPace(1e6)
    began = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(pace.wait, 50_000) for _ in range(8)]:
            done.result(30)
    assert time.monotonic() - began >= 7 * 0.05


def test_a_watch_that_could_not_start_starts_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call goes on that nobody would end."""
    looking = StallWatch(0.2)
    ended = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(watch.threading.Thread, "start", lambda self: (_ for _ in ()).throw(RuntimeError("no thread")))
        with pytest.raises(RuntimeError, match="no thread"), looking.over(ended.set):
            pass
    with looking.over(ended.set):
        assert ended.wait(30)
    looking.close()
