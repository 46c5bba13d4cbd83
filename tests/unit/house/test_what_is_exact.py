"""The page about what is exact says what the tests show."""

from __future__ import annotations

import importlib

from tests.support.pages.mistakes import PAGE, rendered, rows


def test_the_page_is_made_from_the_tests() -> None:
    """`python -m tests.support.pages.mistakes` writes it."""
    page = PAGE.read_text()
    assert rendered(page) == page


def test_each_row_has_its_own_name_and_a_reason() -> None:
    """What is refused or only said has a cure."""
    seen: set[str] = set()
    for row in rows():
        assert row.what not in seen, row.what
        assert row.why, row.what
        assert row.cure or row.comes.name in ("BITWISE", "ROUNDED", "ALIKE"), row.what
        assert "|" not in row.what + row.why + row.cure, row.what
        module, _, name = row.test.partition("::")
        assert callable(getattr(importlib.import_module(module), name))
        seen.add(row.what)
