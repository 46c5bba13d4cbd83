"""2,000 hostile frames on the agent's socket, 100,000 in `make test-all`."""

from __future__ import annotations

import pytest

from .counts import SEED, count, patience
from .frames import fuzz_frames

USUAL = 2_000
KINDS = {"hello", "progress", "saving", "save_failed", "draining", "drained", "finished", "bad_checkpoint", "nothing"}

pytestmark = pytest.mark.timeout(patience(USUAL, 60))


def test_good_workers_are_served_and_nobody_else_believed() -> None:
    """Whatever comes in, the agent lives, no rank but their own is touched, and the good ones wait for nothing."""
    failure, heard = fuzz_frames(SEED, count(USUAL))
    assert not failure, failure
    # It got past the door often enough to try every word.
    assert set(heard) >= KINDS
