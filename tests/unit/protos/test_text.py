"""When two lines tell of the same failure."""

from __future__ import annotations

import pytest

from dalsegno.protos.text import same_failure

FIRST = "local rank 0 exited with code 1: ValueError: no data (train.py, line 3, in main) (see /t/attempt_0/0/e.log)"


@pytest.mark.parametrize(
    ("told", "text", "same"),
    [
        (FIRST, FIRST, True),
        (FIRST, FIRST.replace("attempt_0/0", "attempt_1/1").replace("rank 0", "rank 1"), True),
        (FIRST, FIRST.replace("/t/attempt_0", "/another/place"), True),
        ("lost at 0x7f3a in 12 s", "lost at 0xdeadbeef in 3 s", True),
        (FIRST, FIRST.replace("no data", "no room"), False),
        (FIRST, FIRST.replace("ValueError", "OSError"), False),
        ("", "", False),  # nothing was told
    ],
)
def test_the_same_failure_is_known_by_its_words(told: str, text: str, same: bool) -> None:
    """Numbers and files differ from try to try."""
    assert same_failure(told, text) is same
