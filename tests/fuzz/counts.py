"""How many inputs a fuzzer tries, and which: FUZZ_COUNT of each kind in `make test-all`, a share of them otherwise."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

__all__ = ["SEED", "but_open", "count", "patience"]

SEED = int(os.environ.get("FUZZ_SEED", "1"))


def count(usual: int) -> int:
    """Inputs of one fuzzer; `usual` where nothing else is asked for."""
    return int(os.environ.get("FUZZ_COUNT", usual))


def patience(usual: int, seconds: float) -> float:
    """Seconds that a test may take: `seconds` for the usual number of inputs, in proportion for more."""
    return seconds * max(1.0, count(usual) / usual)


def but_open(names: Iterable[str], points: Mapping[str, str]) -> list[Any]:
    """Parameters of a test; those that `points` names do not hold yet, and fail the test once they do."""
    return [
        pytest.param(name, marks=pytest.mark.xfail(reason=points[name], strict=True)) if name in points else name
        for name in names
    ]
