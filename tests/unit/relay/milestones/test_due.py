"""When a milestone is due."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.elastic.checkpoint import Tracked
from dalsegno.elastic.checkpoint.metrics import Record
from dalsegno.relay.milestones import due
from dalsegno.relay.milestones.due import MilestonePace, Rules

HOURLY = Rules(3600.0, None)
LOSS = Tracked("loss", "min", 0.1)
BY_LOSS = Rules(None, LOSS)


def test_the_first_one_waits_for_nothing() -> None:
    """A run that has none gets one with its first checkpoint: a wrong token shows at once, not after hours."""
    assert due.due(MilestonePace(), HOURLY, 40) == due.INTERVAL
    assert due.due(MilestonePace(), BY_LOSS, 40) == ""


def test_the_interval_counts_from_the_beginning_of_the_last_one() -> None:
    """However long an upload takes."""
    pace = due.done(due.passed(due.begun(MilestonePace()), 1000), 40)
    assert due.due(due.passed(pace, 2599), HOURLY, 50) == ""
    assert due.due(due.passed(pace, 2600), HOURLY, 50) == due.INTERVAL


@pytest.mark.parametrize(
    ("mode", "values", "wish"),
    [
        ("min", [2.0], 1),
        ("min", [2.0, 1.95], 1),
        ("min", [2.0, 1.85], 2),
        ("min", [2.0, 1.95, 1.89], 3),
        ("min", [2.0, 3.0, 2.5], 1),
        ("max", [2.0, 3.0], 2),
        ("max", [2.0, 1.0], 1),
        ("min", [math.nan], None),
        ("min", [-math.inf], None),
        ("min", [2.0, math.nan, 1.0], 3),
    ],
)
def test_an_improvement_is_by_more_than_the_least(mode: str, values: list[float], wish: int | None) -> None:
    """Of the best value so far, not of the last one; what is no number never is one."""
    rules = Rules(None, Tracked("loss", mode, 0.1))
    pace = due.observed(MilestonePace(), rules, [Record(value, step) for step, value in enumerate(values, 1)])
    assert (pace.wish_step if pace.wish else None) == wish


def test_a_checkpoint_from_before_the_improvement_does_not_do() -> None:
    """The weights that were measured, or later ones."""
    pace = due.observed(MilestonePace(), BY_LOSS, [Record(1.0, 60)])
    assert due.due(pace, BY_LOSS, 59) == ""
    assert due.due(pace, BY_LOSS, 60) == due.IMPROVEMENT
    assert due.due(due.observed(MilestonePace(), BY_LOSS, [Record(1.0, None)]), BY_LOSS, 0) == due.IMPROVEMENT


def test_what_was_read_again_is_no_improvement() -> None:
    """After a restart the file is read from its beginning."""
    records = [Record(2.0, 1), Record(1.0, 2)]
    pace = due.done(due.begun(due.observed(MilestonePace(), BY_LOSS, records)), 2)
    assert due.observed(pace, BY_LOSS, records) == pace


def test_an_improvement_during_an_upload_is_not_lost() -> None:
    """The milestone that is being made is of an earlier step."""
    pace = due.begun(due.observed(MilestonePace(), BY_LOSS, [Record(2.0, 40)]))
    pace = due.done(due.observed(pace, BY_LOSS, [Record(1.0, 60)]), 40)
    assert due.due(pace, BY_LOSS, 60) == due.IMPROVEMENT


def test_a_report_makes_one() -> None:
    """Whatever the metrics file says."""
    assert due.due(due.reported(MilestonePace(), 40), BY_LOSS, 40) == due.REPORT


@pytest.mark.parametrize(("rules", "period"), [(HOURLY, 3600), (BY_LOSS, due.RETRY_SECONDS)])
def test_what_failed_is_tried_in_the_next_period(rules: Rules, period: float) -> None:
    """Counted from the beginning of the try, for the same reason, and no earlier whatever improves."""
    pace = due.reported(MilestonePace()) if rules is BY_LOSS else MilestonePace()
    reason = due.due(pace, rules, 40)
    pace = due.failed(due.passed(due.begun(pace), 100), rules, reason)
    pace = due.observed(pace, rules, [Record(0.0, 50)])
    assert due.due(due.passed(pace, period - 101), rules, 60) == ""
    assert due.due(due.passed(pace, period - 100), rules, 60) != ""


@given(st.lists(st.floats(), max_size=20), st.sampled_from(["min", "max"]), st.floats(0, 10))
def test_the_best_is_the_best(values: list[float], mode: str, least: float) -> None:
    """No finite value is better than the best one by more than the least; without finite ones there is none."""
    rules = Rules(None, Tracked("loss", mode, least))
    pace = due.observed(MilestonePace(), rules, [Record(value, None) for value in values])
    finite = [value for value in values if math.isfinite(value)]
    assert (pace.best is None) == (not finite)
    for value in finite:
        assert pace.best is not None
        assert not (pace.best - value if mode == "min" else value - pace.best) > least
