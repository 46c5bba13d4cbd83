"""What a rank tells its agent."""

from __future__ import annotations

from typing import Any

import pytest

from dalsegno.elastic.rank import reports
from dalsegno.elastic.rank.exchange import Boundary
from dalsegno.elastic.rank.reports import Reports
from dalsegno.protos import worker_pb2


class Told:
    """Stands for the link to the agent."""

    def __init__(self) -> None:
        self.progress: list[worker_pb2.Progress] = []

    def send(self, message: worker_pb2.ToAgent, *, droppable: bool) -> None:
        self.progress.append(message.progress)


def test_an_evaluation_that_shows_signs_of_life_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step takes 1 s, then 100 batches of an evaluation 1 s each, a save 3 s: silent for 3 s at most."""
    now = [100.0]
    monkeypatch.setattr(reports.time, "monotonic", lambda: now[0])
    told: Any = Told()
    one, boundary = Reports(told), Boundary(1, exchanged=True, master_seen=True)
    one.begin()

    def later(seconds: float) -> None:
        now[0] += seconds

    later(1.0)
    one.step(boundary, one.lap())
    assert (told.progress[-1].seconds, told.progress[-1].longest) == (1.0, 1.0)
    for _ in range(100):
        later(1.0)
        one.busy(1)
    assert (told.progress[-1].beats, told.progress[-1].longest, told.progress[-1].step) == (100, 1.0, 1)
    later(3.0)
    assert one.lap() == 103.0
    later(2.0)
    one.step(boundary, one.lap())
    assert (told.progress[-1].seconds, told.progress[-1].longest) == (2.0, 3.0)
