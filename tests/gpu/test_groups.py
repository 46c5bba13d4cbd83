"""The training's process group, on cards of their own and on one that is shared."""

from __future__ import annotations

import json

import pytest

from tests.gpu.scenes import long_without_card, share_one_card

pytestmark = pytest.mark.timeout(200)


@long_without_card
def test_two_ranks_on_one_card_find_out_and_take_gloo() -> None:
    """NCCL would refuse it, after a while and in its own words: both ranks are told before, and rank 0 says it."""
    outputs = share_one_card()
    said = [json.loads(next(line for line in output.splitlines() if line.startswith("{"))) for output in outputs]
    assert said[0] == said[1]
    assert said[0]["sums"] == [[2.0] * 3] * 2
    assert "nccl" not in said[0]["backend"]
    assert ["2 ranks share 1 card, up to 2 on one" in output for output in outputs] == [True, False]
