"""What a rank tells its agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic.rank import reports
from dalsegno.elastic.rank.exchange import Boundary
from dalsegno.elastic.rank.reports import Reports
from tests.support.workers.fake_link import FakeLink
from tests.unit.elastic.checkpoint.test_best import advance, start, write


def test_an_evaluation_that_shows_signs_of_life_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step takes 1 s, then 100 batches of an evaluation 1 s each, a save 3 s: silent for 3 s at most."""
    now = [100.0]
    monkeypatch.setattr(reports.time, "monotonic", lambda: now[0])
    link: Any = FakeLink()
    one, boundary = Reports(link), Boundary(1, exchanged=True, master_seen=True)
    one.begin()

    def later(seconds: float) -> None:
        now[0] += seconds

    later(1.0)
    one.step(boundary, one.lap())
    assert (link.said[-1].progress.seconds, link.said[-1].progress.longest) == (1.0, 1.0)
    for _ in range(100):
        later(1.0)
        one.busy(1)
    last = link.said[-1].progress
    assert (last.beats, last.longest, last.step) == (100, 1.0, 1)
    later(3.0)
    assert one.lap() == 103.0
    later(2.0)
    one.step(boundary, one.lap())
    assert (link.said[-1].progress.seconds, link.said[-1].progress.longest) == (2.0, 3.0)


def test_a_save_of_a_drain_tells_of_it_first(tmp_path: Path) -> None:
    """Also where no boundary has: an evaluation was left for it. Once of each step."""
    with start(tmp_path) as session:
        link: Any = FakeLink()
        session.reports = Reports(link)
        advance(session, 2)
        session.save(write, drain=True)
        session.reports.step(Boundary(2, drain=True), 0.1)
        assert [one.step for one in link.of("draining")] == [2]
        session.reports.step(Boundary(3, drain=True), 0.1)
        assert [one.step for one in link.of("draining")] == [2, 3]
