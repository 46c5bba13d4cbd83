"""A wait that takes long is said, and again whenever it has taken twice as long; a short one is not."""

from __future__ import annotations

import itertools
import queue
import time

import pytest

from dalsegno.agent.shell import slow
from dalsegno.agent.shell.slow import said_while_slow


def test_a_wait_that_takes_long_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rarer and rarer."""
    monkeypatch.setattr(slow, "SILENCE_SECONDS", 0.05)
    lines: queue.Queue[tuple[float, str, bool]] = queue.Queue()
    began = time.monotonic()
    with said_while_slow(lambda text, warning: lines.put((time.monotonic() - began, text, warning)), "copying x"):
        told = [lines.get(timeout=30) for _ in range(3)]
    assert all(text.startswith("copying x (") and not warning for _, text, warning in told)
    assert all(later >= 1.9 * earlier for (earlier, *_), (later, *_) in itertools.pairwise(told))
    with pytest.raises(queue.Empty):
        lines.get(timeout=1.0)


def test_a_short_wait_is_not() -> None:
    """Nor does what fails within it stay hidden."""
    lines: list[str] = []
    with pytest.raises(OSError, match="as it is"), said_while_slow(lambda text, warning: lines.append(text), "x"):
        raise OSError("as it is")
    assert lines == []
