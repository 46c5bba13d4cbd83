"""What the agent does with a node's part of a Flash Checkpoint, with a saver that only answers."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.dlrover.beside import DlroverSupport
from dalsegno.agent.script import Script


def support(saved: int, told: queue.Queue[Any]) -> Any:
    """One whose saver brings this step to the disk."""
    none: Any = None
    made: Any = DlroverSupport(
        False, "", "job", 60.0, Script("python", ("train.py",)), Path(), Path(), none, told.put, lambda line, loud: None
    )
    made._saver = SimpleNamespace(save=lambda seconds, part: saved)
    made.save_timeout = 45.0
    return made


@pytest.mark.parametrize("fails", [False, True])
def test_a_part_is_taken_before_anybody_joins(fails: bool) -> None:
    """What stands below `${save_dir}` becomes the run's, or the next world begins at an earlier save."""
    told: queue.Queue[Any] = queue.Queue()

    def take(seconds: float) -> None:
        told.put(0.0 < seconds <= 45.0)
        if fails:
            raise OSError("no disk")

    support(7, told).save_part(1, 7, take)
    assert [told.get(timeout=30) for _ in range(2)] == [True, ev.FlashSaved(1, 7)]


def test_what_could_not_be_saved_is_not_waited_for() -> None:
    told: queue.Queue[Any] = queue.Queue()
    support(0, told).save_part(1, 7, told.put)
    assert told.get(timeout=30) == ev.FlashSaved(1, 0)
    assert told.empty()


def test_a_saver_that_crashes_is_not_waited_for_either() -> None:
    told: queue.Queue[Any] = queue.Queue()
    made = support(7, told)
    made._saver = SimpleNamespace(save=None)
    made.save_part(1, 7, told.put)
    assert told.get(timeout=30) == ev.FlashSaved(1, 0)
