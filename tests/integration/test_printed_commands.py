"""Every command that the project prints and that stands by itself is typed as it is printed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs.stage import Stage
from tests.support.pages.printed_commands import COMMANDS, Run
from tests.support.workers.tiny_swift import OFFLINE

pytestmark = pytest.mark.timeout(900)

RUNS = [
    pytest.param(command, how, id=command[:60], marks=pytest.mark.full if how.full else ())
    for command, how in COMMANDS.items()
    if isinstance(how, Run)
]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    one = Stage(tmp_path / "stage", OFFLINE)
    yield one
    one.close()


@pytest.mark.parametrize(("command", "how"), RUNS)
def test_it_runs_as_printed(command: str, how: Run, stage: Stage) -> None:
    """With short flags behind it, or something where a placeholder stands; it says what it should, and no traceback."""
    line = command
    for placeholder, value in how.replaced.items():
        assert placeholder in line
        line = line.replace(placeholder, value)
    said = stage.type(f"{line} {how.more}".strip(), seconds=840)
    assert re.search(how.says, said), said


@pytest.mark.parametrize("line", ["pip install --no-deps -e .", "python -m pip install --no-deps -e ."])
def test_a_stage_takes_nobodys_environment(line: str, stage: Stage) -> None:
    """It is the tests' own: an installed stage would be gone at the test's end, and `dalsegno` with it."""
    assert "the stage installs nothing" in stage.type(line, code=1)
