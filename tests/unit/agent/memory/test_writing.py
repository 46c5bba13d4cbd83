"""Orders to bring something to the disk, each of which is answered."""

from __future__ import annotations

import queue
import threading

import pytest

from dalsegno.agent.memory.writing import Writer


def test_an_order_without_a_thread_that_watches_it_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its master waited for it for ever. The next one is carried out, when there is room again."""
    writer = Writer(60.0)
    said: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    start = threading.Thread.start

    def no_room(thread: threading.Thread) -> None:
        if thread.name == "memory-watch":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_room)
        writer.put("d1", lambda stopped: "", lambda failure: said.put(("d1", failure)))
        assert said.get(timeout=30) == ("d1", "can't start new thread")
    writer.put("d2", lambda stopped: "", lambda failure: said.put(("d2", failure)))
    assert said.get(timeout=30) == ("d2", "")
    assert writer._orders == []
    writer.close(5.0)


def test_an_order_that_fails_is_answered_with_why() -> None:
    """Whatever is raised."""
    writer = Writer(60.0)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def fail(stopped: object) -> str:
        raise MemoryError

    writer.put("d1", fail, said.put)
    assert said.get(timeout=30) == "MemoryError"
    writer.close(5.0)
