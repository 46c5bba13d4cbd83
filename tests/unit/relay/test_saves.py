"""A trainer that saves less often than it should."""

from __future__ import annotations

import threading

import pytest

from dalsegno.relay.saves import SaveWatch


def test_a_trainer_that_saves_too_seldom_is_told_of_once() -> None:
    """Whatever comes later."""
    lines: list[str] = []
    said = threading.Event()

    def say(text: str) -> None:
        lines.append(text)
        said.set()

    watch = SaveWatch(0.02, say)
    watch.begin()
    assert said.wait(30)
    assert "interval_seconds: 0.02" in lines[0]
    watch.begin()
    assert watch._timer is None
    assert len(lines) == 1


def test_each_save_begins_anew_and_an_end_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a trainer that saves in time is told nothing."""
    made: list[threading.Timer] = []

    class Timer(threading.Timer):
        def start(self) -> None:
            made.append(self)

    monkeypatch.setattr(threading, "Timer", Timer)
    watch = SaveWatch(600.0, lambda text: None)
    watch.begin()
    watch.begin()
    watch.end()
    assert [one.interval for one in made] == [750.0, 750.0]
    assert all(one.finished.is_set() for one in made)
