"""The agent's side of a saver of Flash Checkpoint that does not answer, or does not end."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import pytest

from dalsegno.agent.dlrover import saver as savers
from dalsegno.agent.dlrover.saver import NodeSaver


def saver_of(process: Any) -> NodeSaver:
    """One whose companion is up."""
    saver = object.__new__(NodeSaver)
    saver._process, saver._lifeline = process, MagicMock()
    saver._asking, saver._settling, saver._news = threading.Lock(), threading.Lock(), threading.Condition()
    saver._calm_since = 0.0
    saver._number, saver._answers, saver._silent = 0, {}, None
    saver._up, saver._closed = True, False
    return saver


class Companion:
    """Answers what `answers` says, from the first order on; then nothing more."""

    pid = 1 << 22

    def __init__(self, answers: list[dict[str, Any] | None]) -> None:
        self.stdin = MagicMock()
        self.stdin.write = self._write
        self.answers = answers
        self.saver: NodeSaver
        self.killed = False

    def _write(self, line: str) -> None:
        answer = self.answers.pop(0) if self.answers else None
        if answer is not None:
            number = json.loads(line)["number"]
            self.saver._answers[number] = {**answer, "answers": number}

    def poll(self) -> int | None:
        return -9 if self.killed else None

    def wait(self, timeout: float | None = None) -> int:
        return -9


@pytest.fixture
def companion(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[dict[str, Any] | None]], Companion]:
    monkeypatch.setattr(savers, "_ANSWERS_WITHIN_SECONDS", 0.1)
    monkeypatch.setattr(savers, "_ASK_EVERY_SECONDS", 0.01)

    def make(answers: list[dict[str, Any] | None]) -> Companion:
        made = Companion(answers)
        monkeypatch.setattr(savers, "kill_group", lambda pid: setattr(made, "killed", True))
        made.saver = saver_of(made)
        return made

    return make


BUSY, CALM = {"busy": True}, {"busy": False}


def test_a_saver_that_does_not_answer_may_be_saving(companion: Any) -> None:
    """It is not calm, and lives on: it was killed in the middle of a save, which counted as done."""
    one = companion([BUSY])
    assert not one.saver.settle(0.5)
    assert not one.killed


def test_a_saver_is_done_once_it_says_so_twice_in_a_row(companion: Any) -> None:
    """What it does not say meanwhile is no word for it."""
    one = companion([BUSY, CALM, None, CALM, BUSY, CALM, CALM])
    assert one.saver.settle(30)
    assert one.answers == []


def test_a_saver_that_does_not_freeze_is_ended(companion: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(savers, "_FREEZES_WITHIN_SECONDS", 0.1)
    one = companion([])
    one.saver.freeze()
    assert one.killed


def test_an_agent_does_not_wait_for_a_saver_that_sigkill_does_not_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is stuck in the kernel, on a file system that is away. The keeper has it on its list still."""
    process = MagicMock()

    def wait(timeout: float | None = None) -> int:
        assert timeout is not None, "without a bound"
        raise subprocess.TimeoutExpired("saver", timeout)

    process.wait = wait
    monkeypatch.setattr(savers, "kill_group", MagicMock())
    saver: Any = saver_of(process)
    saver._end(process)
    assert not saver._lifeline.drop_group.called
    assert "did not end within" in caplog.text


def test_ranks_that_end_at_once_keep_nobody_from_freezing(companion: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them asks at a time. Each had its question in the queue, and the end of a world waited for all."""
    monkeypatch.setattr(savers, "_ANSWERS_WITHIN_SECONDS", 1.0)
    monkeypatch.setattr(savers, "_FREEZES_WITHIN_SECONDS", 0.1)
    one = companion([])
    ends: list[bool] = []
    ranks = [threading.Thread(target=lambda: ends.append(one.saver.settle(20.0))) for _ in range(32)]
    for rank in ranks:
        rank.start()
    began = time.monotonic()
    one.saver.freeze()
    took = time.monotonic() - began
    assert one.killed
    one.saver._up = False
    for rank in ranks:
        rank.join(30)
    assert ends == [True] * 32
    assert took < 10, "32 questions of 1 s"


def test_one_answer_is_for_all_ranks_that_waited_for_it(companion: Any) -> None:
    """Those that came before it was asked for."""
    one = companion([BUSY, *[CALM] * 4])
    asks, entered = threading.Event(), threading.Event()
    write = one._write

    def held(line: str) -> None:
        asks.set()
        assert entered.wait(30)
        write(line)

    one.stdin.write = held
    ends: list[bool] = []
    ranks = [threading.Thread(target=lambda: ends.append(one.saver.settle(30))) for _ in range(8)]
    ranks[0].start()
    assert asks.wait(30)
    for rank in ranks[1:]:
        rank.start()
    time.sleep(0.5)  # why: nothing tells that a thread waits for its turn
    entered.set()
    for rank in ranks:
        rank.join(30)
    assert ends == [True] * 8
    assert one.answers, "all had come before the first question that was answered with calm"


def test_the_wait_for_another_order_counts(companion: Any) -> None:
    """A save may keep the saver for long."""
    one = companion([])
    with one.saver._asking:
        began = time.monotonic()
        assert not one.saver.settle(0.2)
        assert time.monotonic() - began < 10
    with one.saver._settling:
        assert not one.saver.settle(0.2)


class Talking(Companion):
    """A companion whose lines the saver's own thread reads; `say` makes the answers to an order from its number."""

    def __init__(self, say: Callable[[int], list[dict[str, Any]]]) -> None:
        super().__init__([])
        self._say = say
        self.saver = saver_of(self)
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.stdout = iter(self._lines.get, None)

    def _write(self, line: str) -> None:
        for said in self._say(json.loads(line)["number"]):
            self._lines.put(json.dumps(said))

    def end(self) -> None:
        self.saver._closed = True
        self._lines.put(None)


def test_a_late_answer_does_not_hide_the_one_that_is_waited_for() -> None:
    """A save that outlived its time may answer just behind the order that came after it: the saver was ended then."""
    one = Talking(lambda number: [{"answers": number, "step": 7}, {"answers": number - 1}])
    one.saver._number = 4
    reader = threading.Thread(target=one.saver._read, args=(one,))
    reader.start()
    try:
        for _ in range(50):
            assert one.saver._ask({"do": "world"}, 10.0)["step"] == 7
    finally:
        one.end()
        reader.join(30)
    assert not one.killed


def test_an_answer_that_lies_unread_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent itself was stopped until the time was over, and its thread has not read it yet."""
    monkeypatch.setattr(savers, "_READS_WITHIN_SECONDS", 30.0)
    one = Talking(lambda number: [{"answers": number, "step": 7}])
    reader = threading.Timer(0.3, one.saver._read, args=(one,))
    reader.start()
    try:
        assert one.saver._ask({"do": "world"}, 0.01)["step"] == 7
    finally:
        one.end()
        reader.join(30)


def test_who_is_ended_for_its_silence_was_not_killed_by_somebody(companion: Any) -> None:
    """The line for the user tells what happened."""
    one = companion([])
    one.saver._ask({"do": "world"}, 0.01)
    assert one.killed
    lines: list[str] = []
    one.stdout = iter(())
    one.saver._log, one.saver._deaths, one.saver._made = "saver.log", 0, None
    one.saver._starting, one.saver._say = threading.RLock(), lambda text, warning: lines.append(text)
    one.saver._read(one)
    assert lines == [
        "the saver of Flash Checkpoint did not answer in time, and was ended: nothing is saved until the next change "
        "of the world, which starts another one; more in saver.log"
    ]
