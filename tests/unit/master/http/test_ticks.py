"""The marks on the axes of the page's pictures, without a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from dalsegno.master.http.page import PAGE

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script with node")


def ticks(*ranges: tuple[float, float]) -> list[list[float]]:
    """The ticks of each range on an axis of usual size."""
    source = re.search(r"const LEFT = .*?\n}\n", PAGE, flags=re.DOTALL)
    assert source is not None
    script = f"{source[0]}console.log(JSON.stringify({json.dumps(ranges)}.map(([a, b]) => ticks(a, b, 4.8))))"
    done = subprocess.run(["node", "-e", script], stdout=subprocess.PIPE, text=True, timeout=20, check=True)
    found: list[list[float]] = json.loads(done.stdout)
    return found


def test_ticks_are_round_numbers_within_the_range() -> None:
    assert ticks((0.0, 1.0), (2.2, 2.3), (-1.0, 1.0)) == [
        pytest.approx([0.0, 0.5, 1.0]),
        pytest.approx([2.2, 2.25, 2.3]),
        pytest.approx([-1.0, -0.5, 0.0, 0.5, 1.0]),
    ]


def test_a_range_without_numbers_in_between_has_an_end() -> None:
    """A loss that has diverged and stands still, or differs in its last bit: the page hung, and its tab crashed."""
    found = ticks(
        (1e16, 1e16), (1e38, 1e38), (11.0, 11.000000000000002), (0.0, 5e-324), (0.6931471805599453, 0.6931471805599454)
    )
    assert all(len(one) <= 100 for one in found)
