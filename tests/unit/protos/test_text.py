"""When two lines tell of the same failure, and where an object stands in a line."""

from __future__ import annotations

import pytest

from dalsegno.protos.text import object_in, same_failure

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


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('{"a": 1}', {"a": 1}),
        ('loading {modules} {"a": {"b": 2}}', {"a": {"b": 2}}),
        ('{"b": 2}', None),
        ('{"a": 1} and more', None),
        ("[1]", None),
        ("{" * 100_000, None),
        ('{"a": ' * 100_000, None),
    ],
)
def test_a_line_of_ours_is_found_behind_what_others_print(line: str, found: object) -> None:
    """Only an object at the end of the line with the key that is asked for; long lines take no time."""
    assert object_in(line, "a") == found
