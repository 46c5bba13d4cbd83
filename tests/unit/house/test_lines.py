"""How many lines make a plain loop elastic: counted in what the pages print, as they say it."""

from __future__ import annotations

from difflib import SequenceMatcher

import pytest

from tests.support.pages import printed
from tests.support.pages.sources import ROOT

# Numbers in words, as pages have them.
WORDS = {"ten": 10, "twelve": 12}


def written(plain: str, elastic: str) -> list[str]:
    """The lines of the elastic loop that whoever has the plain one writes: new ones, and those that he changes.

    Empty lines do not count; a line that moves into the inner loop does.
    """
    before, after = ([line.rstrip() for line in text.splitlines() if line.strip()] for text in (plain, elastic))
    parts = SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [line for kind, _, _, low, high in parts if kind != "equal" for line in after[low:high]]


@pytest.mark.parametrize(
    ("page", "plain", "elastic", "said", "link"),
    [
        ("README.md", "for rows in batches:", "state = s.state(model, optimizer)", "ten", "../README.md#ten-lines"),
        (
            "docs/deepspeed.md",
            'engine.load_checkpoint("checkpoints")',
            "state = s.engine(engine)",
            "twelve",
            "deepspeed.md",
        ),
    ],
)
def test_a_plain_loop_becomes_elastic_in_so_few_lines(
    page: str, plain: str, elastic: str, said: str, link: str
) -> None:
    """The number that the table of scripts gives is not exceeded by the two loops that its link leads to."""
    lines = written(text_with(page, plain), text_with(page, elastic))
    assert "from dalsegno.elastic import session" in lines
    assert len(lines) <= WORDS[said], lines
    table = (ROOT / "docs" / "bring-your-script.md").read_text(encoding="utf-8")
    assert f"[{said} lines]({link})" in table


def text_with(page: str, line: str) -> str:
    """The block of code of a page that has this line."""
    (block,) = (block for block in printed.code() if block.page == page and line in block.text)
    return block.text
