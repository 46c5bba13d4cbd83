"""What a script can bring, and what comes of it: the table that `docs/what-is-exact.md` prints, made from the tests.

    @brings("a model given to TrainingState after fully_shard", Comes.REFUSED, "…", "…")
    def test_...

`python -m tests.support.pages.mistakes` writes the tables into the page;
`tests/unit/house/test_what_is_exact.py` compares.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "what-is-exact.md"
TESTS = "tests/integration/test_mistakes_*.py"
BEGIN, END = "<!-- {}: made from the tests -->", "<!-- end -->"

Test = TypeVar("Test", bound=Callable[..., None])


class Comes(enum.Enum):
    """What comes of it; the name is that of the page's part."""

    BITWISE = "the same bits"
    ROUNDED = "the same up to rounding"
    ALIKE = "the same only in distribution"
    SAID = "goes on, and one line says what"
    REFUSED = "refused with one line"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: What the script does or has.
        comes: What comes of it.
        why: The reason.
        cure: What to do instead; empty where nothing is to be done.
        test: Where it is shown.
    """

    what: str
    comes: Comes
    why: str
    cure: str
    test: str


def brings(what: str, comes: Comes, why: str, cure: str = "") -> Callable[[Test], Test]:
    """Marks the test that shows what comes of something. Several marks may be put on one test."""

    def mark(test: Test) -> Test:
        rows: list[Row] = test.__dict__.setdefault("brings", [])
        rows.insert(0, Row(what, comes, why, cure, f"{test.__module__}::{test.__name__}"))
        return test

    return mark


def rows() -> Iterator[Row]:
    """Of all tests, in their order."""
    for path in sorted(ROOT.glob(TESTS)):
        module = importlib.import_module(f"tests.integration.{path.stem}")
        for thing in vars(module).values():
            yield from getattr(thing, "brings", [])


def table(part: Comes) -> str:
    """The lines of one part."""
    lines = ["| What you have | Why | What to do |", "|---|---|---|"]
    lines += [f"| {row.what} | {row.why} | {row.cure or '-'} |" for row in rows() if row.comes is part]
    return "\n".join(lines)


def rendered(page: str) -> str:
    """The page with its tables made anew."""
    for part in Comes:
        begin = BEGIN.format(part.name)
        before, _, rest = page.partition(begin)
        if not rest:
            raise ValueError(f"the page has no {begin}")
        page = f"{before}{begin}\n\n{table(part)}\n\n{END}{rest.partition(END)[2]}"
    return page


def main() -> int:
    """Writes the page."""
    PAGE.write_text(rendered(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    # The tests know this module by its name: its parts are not those of the one that runs.
    sys.exit(importlib.import_module("tests.support.pages.mistakes").main())
