"""Waiting workers that do not take their place."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dalsegno.agent.standby import patience
from dalsegno.agent.standby.placing import Placing

NURSERY: Any = SimpleNamespace(place=lambda worker, place: True)

# An agent that hears, a moment after it goes on, what was said meanwhile: one worker took its place, another waits for
# one, and a nursery has imported all.
_AGENT = """
import threading, time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock
from dalsegno.agent.standby.ahead_workers import AheadWorkers
from dalsegno.agent.standby.placing import Placing
from dalsegno.agent.standby.standby_pool import StandbyPool

class Worker:
    taken, returncode, parked, failed, stale, late = False, None, "", "", "", ""
    def __init__(self, who):
        self._who = who
    def signal_group(self, signum):
        print(self._who, "killed", flush=True)
    def discard(self):
        self.signal_group(9)
    def when_settled(self, call):
        self.settled = call

placed, ahead = Worker("placed"), Worker("ahead")
placing, workers = Placing(2.0), AheadWorkers(lambda: None, 2.0)
placing.give(0, SimpleNamespace(place=lambda worker, place: True), placed, {})
workers.run(SimpleNamespace(start_worker=lambda *_, **__: ahead), [None])
pool = StandbyPool(MagicMock(), 1, (), Path("log"), lambda: None, patience_seconds=2.0)
nursery = SimpleNamespace(
    settled=threading.Event(), ready=threading.Event(), usable=True, process=MagicMock(pid=1),
    give_up=lambda: print("nursery given up", flush=True))
threading.Thread(target=pool._watch_imports, args=(nursery,), daemon=True).start()
time.sleep(0.5)  # why: until who looks after them has begun to
last = time.monotonic()
print("given", flush=True)
while time.monotonic() - last < 1.5:
    last = time.monotonic()
    time.sleep(0.05)  # why: nothing tells a process that it was stopped
time.sleep(0.3)  # why: its other threads go on first
placed.taken, ahead.parked = True, "it needs its place"
placing.settled(placed)
ahead.settled()
nursery.ready.set()
nursery.settled.set()
time.sleep(3)  # why: nobody may be killed for longer than the rest of the patience
print("over", flush=True)
"""


def test_an_agent_that_stood_still_kills_nobody_for_it() -> None:
    """It has not heard what they said meanwhile. A worker trained already, and was killed; the next start was cold."""
    with subprocess.Popen([sys.executable, "-c", _AGENT], stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        assert agent.stdout.readline() == "given\n"
        agent.send_signal(signal.SIGSTOP)
        time.sleep(4)  # why: longer than a worker has, and than any pause of a busy machine
        agent.send_signal(signal.SIGCONT)
        assert agent.stdout.read() == "over\n"


def test_an_agent_that_is_slow_again_and_again_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each look, however long, as much counts as it was to take."""
    now = 0.0
    killed: list[int] = []

    class Slow:
        looks = 0

        def wait(self, timeout_seconds: float) -> bool:
            nonlocal now
            self.looks += 1
            assert self.looks < 100, "without a bound"
            now += timeout_seconds + 5
            return False

        def is_set(self) -> bool:
            return False

    monkeypatch.setattr(patience, "time", SimpleNamespace(monotonic=lambda: now))
    worker: Any = SimpleNamespace(taken=False, returncode=None, signal_group=killed.append)
    settled: Any = Slow()
    Placing(20.0)._watch(0, worker, settled)
    assert killed == [signal.SIGKILL]
    assert settled.looks >= 20


class Waiting:
    """A worker that is told to end."""

    def __init__(self) -> None:
        self.taken, self.returncode = False, None
        self.killed = threading.Event()

    def signal_group(self, signum: int) -> None:
        self.killed.set()


def test_one_that_does_not_take_its_place_is_killed() -> None:
    one: Any = Waiting()
    assert Placing(0.4).give(0, NURSERY, one, {})
    assert one.killed.wait(30)


def test_one_that_takes_its_place_is_left_alone() -> None:
    """The same where all is over."""
    first, second, late = Waiting(), Waiting(), Waiting()
    placing = Placing(1.0)
    everyone: list[Any] = [first, second]
    for one in everyone:
        assert placing.give(0, NURSERY, one, {})
    placing.settled(everyone[0])
    placing.close()
    last: Any = late
    assert placing.give(0, NURSERY, last, {})
    assert late.killed.wait(30)
    assert not first.killed.is_set()
    assert not second.killed.is_set()
