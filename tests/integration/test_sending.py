"""What DistributedDataParallel sends as it is made, by real ranks: nothing where all have it already."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.workers import sending_worker as worker
from tests.support.workers.zero_runs import run_world

pytestmark = pytest.mark.timeout(120)


def found(world: int) -> list[dict[str, Any]]:
    outputs = [output for _, output in run_world(world, [worker.__file__])]
    lines = [line for output in outputs for line in output.splitlines() if line.startswith("sent ")]
    assert len(lines) == world
    return [json.loads(line.removeprefix("sent ")) for line in lines]


def test_only_what_differs_is_sent() -> None:
    """A bit of a weight on one rank, or of a buffer, and all is sent; only the next wrap of this very module counts."""
    for rank in found(2):
        assert rank == {
            "never told": [1, True],
            "alike": [0, True],
            "wrapped again": [1, True],
            "a bit": [1, True],
            "a buffer": [1, True],
            "within another": [1, True],
        }


def test_one_rank_sends_nothing() -> None:
    """To itself: torch does."""
    (rank,) = found(1)
    assert {case: count for case, (count, _) in rank.items()} == {
        "never told": 1,
        "alike": 0,
        "wrapped again": 1,
        "a bit": 0,
        "a buffer": 0,
        "within another": 1,
    }
