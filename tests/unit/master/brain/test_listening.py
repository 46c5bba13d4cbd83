"""The listening clock: what does not count as silence, and that it cannot be kept from going on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.master.brain.listening import RECONNECT_SECONDS, ListeningClock

TIMEOUT = 15.0


def heard_every_second(clock: ListeningClock, start: float, seconds: int) -> float:
    for second in range(seconds):
        clock.word(start + second, TIMEOUT)
    return start + seconds


def test_it_goes_on_while_somebody_is_heard() -> None:
    """Second by second, as real time does."""
    clock = ListeningClock()
    clock.word(100.0, TIMEOUT)
    before = clock.at(100.0)
    now = heard_every_second(clock, 100.0, 60)
    assert clock.at(now) - before == 60.0
    assert not clock.stands_still(now)


def test_it_stands_still_while_nobody_is_heard() -> None:
    """However long; the first word sets it going, after some time for the others to come back."""
    clock = ListeningClock()
    clock.word(100.0, TIMEOUT)
    shown = clock.at(200.0)
    assert shown <= clock.at(100.0) + 2.5
    assert clock.at(500.0) == shown
    assert clock.stands_still(500.0)
    assert clock.word(500.0, TIMEOUT)
    assert clock.at(500.0 + RECONNECT_SECONDS) == shown
    now = heard_every_second(clock, 500.0, 10)
    assert clock.at(now) == shown + 10 - RECONNECT_SECONDS


def test_it_stands_still_while_every_stream_is_closed() -> None:
    """From that moment on, until a word comes or nobody is registered any more."""
    clock = ListeningClock()
    clock.word(100.0, TIMEOUT)
    clock.shut(101.0)
    shown = clock.at(160.0)
    assert shown == clock.at(101.0)
    clock.nobody(160.0)
    assert clock.at(170.0) == shown + 10.0


def test_time_in_which_the_loop_stood_still_does_not_count() -> None:
    """Neither for silence, nor twice where it was an outage besides."""
    clock = ListeningClock()
    now = heard_every_second(clock, 100.0, 20)
    shown = clock.at(now)
    clock.held_up(2.0, TIMEOUT)
    assert clock.at(now + 2.0) == shown
    clock.word(now + 2.0, TIMEOUT)
    assert clock.at(now + 3.0) == shown + 1.0


def test_a_master_that_is_held_up_again_and_again_still_hears_who_is_dead() -> None:
    """One hold-up every 14 s kept a silent node a member for ever: now half of what was listened counts at least."""
    for held, free in ((1.5, 14.0), (3.0, 3.0), (10.0, 5.0), (60.0, 4.0)):
        clock = ListeningClock()
        now = heard_every_second(clock, 100.0, 30)
        before, listened = clock.at(now), 0.0
        for _ in range(50):
            now += held
            clock.held_up(held, TIMEOUT)
            for _ in range(int(free)):
                clock.word(now, TIMEOUT)
                now += 1.0
            listened += free
        assert clock.at(now) - before >= 0.45 * listened, (held, free)


WHAT = st.one_of(
    st.tuples(st.just("word"), st.just(0.0)),
    st.tuples(st.just("held"), st.floats(1.0, 100.0)),
    st.tuples(st.sampled_from(["shut", "reopened", "nobody"]), st.just(0.0)),
)


@pytest.mark.slow
@given(st.lists(st.tuples(st.floats(0.0, 50.0), WHAT), max_size=40))
def test_it_never_runs_back_nor_ahead(happenings: list[tuple[float, tuple[str, float]]]) -> None:
    """Whatever happens: what it shows only grows, and no faster than real time."""
    clock = ListeningClock()
    now = 1000.0
    clock.word(now, TIMEOUT)
    shown = clock.at(now)
    for pause, (what, seconds) in happenings:
        earlier, now = now, now + pause + seconds
        if what == "word":
            clock.word(now, TIMEOUT)
        elif what == "held":
            clock.held_up(seconds, TIMEOUT)
        elif what == "nobody":
            clock.nobody(now)
        elif what == "shut":
            clock.shut(now)
        else:
            clock.reopened(now)
        assert shown <= clock.at(now) <= shown + (now - earlier) + 1e-6
        shown = clock.at(now)
        assert clock.stands_still(now) or clock.real(now, shown + 5.0) >= now
