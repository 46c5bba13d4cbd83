"""2,000 agents that are told nonsense by what answers as their master; 100,000 in `make test-all`."""

from __future__ import annotations

import pytest

from .counts import SEED, count, patience
from .directives import fuzz_directives

USUAL = 2_000

pytestmark = pytest.mark.timeout(patience(USUAL, 60))


def test_an_agent_stays_itself_whatever_it_is_told() -> None:
    """No exception, no spinning, no workers in an impossible place; and enough of it is believed to try them."""
    failure, believed = fuzz_directives(SEED, count(USUAL))
    assert not failure, failure
    assert believed > count(USUAL) // 10
