"""A leave while the pace drops: agreed within two steps of the present pace, with real ranks and their store."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.workers import hurried_worker as worker
from tests.support.workers.zero_runs import run_world

pytestmark = pytest.mark.timeout(120)

DRAINED = 83


@pytest.mark.parametrize(("ranks", "who", "together"), [(2, 1, True), (3, 0, False)])
def test_a_drain_does_not_wait_for_an_exchange_at_the_old_pace(
    tmp_path: Path, ranks: int, who: int, together: bool
) -> None:
    """Steps of 1 ms are exchanged every 50; the notice comes in the first one of half a second."""
    told = {"fast": 100, "apart": 6, "slow": 0.5, "who": who, "together": together}
    told |= {"directory": str(tmp_path / "checkpoints"), "out": str(tmp_path)}
    ended = run_world(ranks, [worker.__file__, json.dumps(told)])
    assert [code for code, _ in ended] == [DRAINED] * ranks, "\n".join(output for _, output in ended)
    results = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
    (last,) = {result["last"] for result in results}
    assert results[0]["noticed"] <= last <= results[0]["noticed"] + 2, last
