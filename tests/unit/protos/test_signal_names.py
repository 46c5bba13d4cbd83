"""The signal that ended a process has a name, and a cure where a limit sent it."""

from __future__ import annotations

import pytest

from dalsegno.protos.signal_names import how_ended, killed_by


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (9, "was killed by signal 9 (SIGKILL)"),
        (24, "was killed by signal 24 (SIGXCPU; its CPU time is used up: raise ulimit -t)"),
        (25, "was killed by signal 25 (SIGXFSZ; a file may be no larger: raise ulimit -f)"),
        (40, "was killed by signal 40"),
    ],
)
def test_a_signal_is_named(number: int, text: str) -> None:
    """With its number, which logs are searched for."""
    assert killed_by(number) == text


def test_a_return_code_says_how_a_process_ended() -> None:
    assert (how_ended(3), how_ended(-9)) == ("exited with code 3", "was killed by signal 9 (SIGKILL)")
