"""Mistakes with cards that can be shown without one; where there is one, `tests/gpu` shows more."""

from __future__ import annotations

import pytest

from tests.gpu.scenes import share_one_card
from tests.support.pages.mistakes import Comes, brings

pytestmark = pytest.mark.timeout(200)


@pytest.mark.full
@brings(
    "more workers on a machine than it has GPUs, with a `Trainer`",
    Comes.SAID,
    "NCCL refuses two ranks on one GPU, so the whole world uses gloo, which is slow",
    "`--nproc-per-node=gpu`; with several nodes on one machine, `CUDA_VISIBLE_DEVICES` for each",
)
def test_ranks_that_share_a_card() -> None:
    """They train, and rank 0 says why it is slow."""
    lines = [line for line in share_one_card()[0].splitlines() if "gloo takes NCCL's place" in line]
    assert len(lines) == 1
    assert "--nproc-per-node=gpu" in lines[0]
