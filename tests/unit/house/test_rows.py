"""Each kind of script that docs/bring-your-script.md promises something for has a test that plays it."""

from __future__ import annotations

import re

import pytest

from tests.support.pages.rows import ROWS
from tests.support.pages.sources import ROOT

PAGE = (ROOT / "docs" / "bring-your-script.md").read_text(encoding="utf-8")
SCRIPTS = [line.split("|")[1].strip() for line in PAGE.splitlines() if line.startswith("| ")][1:]


def is_full(test: str) -> bool:
    """Whether a mark right above it, or one of its whole file, keeps it out of `make test`."""
    file, _, name = test.partition("::")
    above = (ROOT / "tests" / "integration" / file).read_text(encoding="utf-8").split(f"\ndef {name}(")[0]
    of_file = re.findall(r"^pytestmark = .*$", above, re.MULTILINE)
    return any("pytest.mark.full" in marks for marks in (above.rpartition("\n\n\n")[2], *of_file))


def test_every_row_has_its_tests() -> None:
    """And no test is named for a row that is gone."""
    found = {script: [start for start in ROWS if script.startswith(start)] for script in SCRIPTS}
    assert {script: starts for script, starts in found.items() if len(starts) != 1} == {}
    assert {start for starts in found.values() for start in starts} == set(ROWS)


def test_the_page_says_where_the_batch_stays_the_same() -> None:
    """In its column: where the session or the plugin deals the samples, and nowhere else."""
    head, _, *rows = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("|")]
    column = head.index("same batch")
    said = {cells[0]: cells[column] for cells in rows}
    wanted = {script: row.same_batch for script in said for start, row in ROWS.items() if script.startswith(start)}
    assert said == wanted
    assert not re.search(r"(first|last) \w+ rows", PAGE)  # which are other rows once one is added


def test_the_gate_plays_three_rows_at_least() -> None:
    """By tests that no mark keeps for `make test-all`."""
    played = {start for start, row in ROWS.items() for test in row.tests if not is_full(test)}
    assert len(played) >= 3


@pytest.mark.parametrize("test", sorted({test for row in ROWS.values() for test in row.tests}))
def test_the_tests_are_there(test: str) -> None:
    """Under these names."""
    file, _, name = test.partition("::")
    assert f"\ndef {name}(" in (ROOT / "tests" / "integration" / file).read_text(encoding="utf-8")
