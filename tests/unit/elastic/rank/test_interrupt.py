"""The main thread is called out of what it does, again and again, and not after that is over."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from dalsegno.elastic.rank.interrupt import SIGNAL, UNHEARD_SECONDS, Interrupt

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def before() -> Iterator[None]:
    handler = signal.signal(SIGNAL, signal.SIG_DFL)
    yield
    signal.signal(SIGNAL, handler)


def test_it_is_called_out_of_a_sleep_until_it_has_done_its_work() -> None:
    """On the main thread, between two of its instructions."""
    calls: list[threading.Thread] = []

    def called() -> None:
        calls.append(threading.current_thread())
        if len(calls) == 3:
            interrupt.close()

    interrupt = Interrupt(called)
    threading.Thread(target=interrupt.begin).start()
    deadline = time.monotonic() + 30
    while len(calls) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)  # a sleep goes on behind the call
    assert calls == [threading.main_thread()] * 3
    time.sleep(0.1)
    assert len(calls) == 3


def test_it_is_called_once_where_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that begins it reads what the agent says, and must go on."""
    calls: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    interrupt = Interrupt(lambda: calls.append(threading.current_thread()))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        interrupt.begin()
    assert calls == [threading.main_thread()]
    interrupt.close()


def test_a_signal_that_is_in_use_is_left_alone() -> None:
    calls: list[str] = []
    signal.signal(SIGNAL, lambda *_: calls.append("the script's"))
    interrupt = Interrupt(lambda: calls.append("ours"))
    interrupt.begin()
    signal.raise_signal(SIGNAL)
    assert calls == ["the script's"]


def test_the_next_loop_of_a_process_takes_over() -> None:
    calls: list[int] = []
    Interrupt(lambda: calls.append(1))
    Interrupt(lambda: calls.append(2))
    signal.raise_signal(SIGNAL)
    assert calls == [2]


def test_another_thread_has_none() -> None:
    calls: list[int] = []

    def begin() -> None:
        Interrupt(lambda: calls.append(1)).begin()

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert signal.getsignal(SIGNAL) is signal.SIG_DFL
    assert not calls


def test_another_thread_is_called_where_the_main_one_waits_in_a_library() -> None:
    """The main thread hears it when it returns, before its next instruction."""
    others: list[threading.Thread] = []
    heard: list[int] = []  # how many calls others had before

    interrupt = Interrupt(
        # It may be called before it waits, too: what counts is that it was not while others were.
        lambda: heard.append(len(others)),
        lambda: others.append(threading.current_thread()),
    )
    threading.Thread(target=interrupt.begin).start()
    # No signal ends this call, as none ends a collective. It takes seconds.
    hashlib.pbkdf2_hmac("sha256", b"", b"", 6_000_000)
    interrupt.close()
    assert others
    assert threading.main_thread() not in others
    assert heard
    assert heard[-1] > 0


def test_no_other_thread_is_called_where_the_main_one_hears() -> None:
    others: list[int] = []
    heard: list[int] = []
    interrupt = Interrupt(lambda: heard.append(1), lambda: others.append(1))
    threading.Thread(target=interrupt.begin).start()
    stood = 0.0  # the longest time in which this thread itself had no processor
    before = time.monotonic()
    deadline = before + 3 * UNHEARD_SECONDS
    while before < deadline:
        time.sleep(0.01)
        before, last = time.monotonic(), before
        stood = max(stood, before - last)
    interrupt.close()
    assert heard
    assert not others or stood > UNHEARD_SECONDS / 2
