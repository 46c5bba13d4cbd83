"""The interpreter's end waits for gloo's threads that are at work, and for no others."""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

import pytest

from dalsegno.elastic.rank import gloo_threads

pytestmark = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="Linux tells of threads")

# Rounds; some tenths of a second.
WORK = 500_000


class Worker(threading.Thread):
    """Works for some tenths of a second without the interpreter, as gloo's threads do, and then needs it."""

    def __init__(self, name: str, rounds: int, pauses: int = 0) -> None:
        super().__init__(daemon=True)
        self._called, self._rounds, self._pauses = name, rounds, pauses
        self.ready, self.told, self.done = threading.Event(), threading.Event(), threading.Event()

    def run(self) -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(self._called)
        self.ready.set()
        if not self._rounds:
            self.told.wait()
        for _ in range(self._pauses):
            time.sleep(0.0003)  # why: so short that it is over between two looks
        hashlib.pbkdf2_hmac("sha256", b"", b"", self._rounds or 1)
        self.done.set()


def test_it_waits_for_a_thread_at_work() -> None:
    worker = Worker("pt_gloo_runloop", WORK)
    worker.start()
    worker.ready.wait()
    gloo_threads._settle()
    assert worker.done.is_set()


def test_it_waits_for_a_thread_that_stops_now_and_then() -> None:
    """As one does that waits for the interpreter: it hardly ever runs when somebody looks."""
    worker = Worker("pt_gloo_runloop", 1, pauses=500)
    worker.start()
    worker.ready.wait()
    gloo_threads._settle()
    assert worker.done.is_set()


def test_it_waits_for_no_thread_that_rests() -> None:
    """A collective whose peers never come would otherwise keep each process for seconds."""
    worker = Worker("pt_gloo_runloop", 0)
    worker.start()
    worker.ready.wait()
    began = time.monotonic()
    gloo_threads._settle()
    assert time.monotonic() - began < gloo_threads._PATIENCE_SECONDS / 2
    assert not worker.done.is_set()
    worker.told.set()


def test_it_waits_for_no_thread_of_others() -> None:
    worker = Worker("other", 5 * WORK)
    worker.start()
    worker.ready.wait()
    gloo_threads._settle()
    assert not worker.done.is_set()
    worker.join()


def test_its_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_threads, "_PATIENCE_SECONDS", 0.1)
    worker = Worker("pt_gloo_runloop", 5 * WORK)
    worker.start()
    worker.ready.wait()
    gloo_threads._settle()
    assert not worker.done.is_set()
    worker.join()
