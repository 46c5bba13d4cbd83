"""Work that yields to the training, in a process of low priority itself."""

from __future__ import annotations

import os
import queue
import sys

import pytest

from dalsegno.agent.memory.line import Line
from dalsegno.agent.memory.writing import Writer
from dalsegno.agent.standby.nursery import warm_up
from dalsegno.protos.priority import yield_of_thread


@pytest.fixture
def set_to(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What was started with `nice -n 15` by a plain user: the kernel raises no priority of its."""
    done: list[int] = []

    def setpriority(which: int, who: int, priority: int) -> None:
        if priority < 15:
            raise PermissionError(13, os.strerror(13))
        done.append(priority)

    monkeypatch.setattr(os, "getpriority", lambda which, who: 15)
    monkeypatch.setattr(os, "setpriority", setpriority)
    return done


def test_a_thread_yields_more_and_never_less(set_to: list[int]) -> None:
    """Raising it is refused."""
    for niceness in (5, 15, 19):
        yield_of_thread(niceness)
    assert set_to == [19]


def test_a_memory_checkpoint_of_an_agent_with_nice_reaches_the_disk(set_to: list[int]) -> None:
    """The writing thread ended at once, and no order was answered: the job never ended."""
    writer = Writer(60.0)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    writer.put("d1", lambda stopped: "", said.put)
    assert said.get(timeout=30) == ""
    writer.close(5.0)


def test_a_nursery_of_an_agent_with_nice_imports(set_to: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It said that it was ready, with nothing imported."""
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert warm_up(["colorsys"], 10)["failed"] == {}
    assert "colorsys" in sys.modules


def test_a_line_that_cannot_be_prepared_works() -> None:
    """It took work that nobody did."""
    done: queue.SimpleQueue[str] = queue.SimpleQueue()

    def fail() -> None:
        raise MemoryError

    line = Line("line", fail)
    assert line.put(lambda: done.put("done"))
    assert done.get(timeout=30) == "done"
    line.close(5.0)
