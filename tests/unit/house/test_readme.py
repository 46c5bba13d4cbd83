"""The pages tell the truth about what can be checked: flags with their defaults, exit codes, files they link to."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from dalsegno.agent.commands.arguments import build_parser
from dalsegno.agent.decisions import events
from dalsegno.master.cli import _parser as master_parser
from tests.support.pages.sources import ROOT

REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
TABLE = REFERENCE[REFERENCE.index("| flag |") : REFERENCE.index("| exit code |")]


def our_flags() -> list[argparse.Action]:
    parser = build_parser({})
    (group,) = (group for group in parser._action_groups if group.title == "elastic training")
    return group._group_actions


@pytest.mark.parametrize("action", our_flags(), ids=lambda action: action.option_strings[0])
def test_every_flag_of_ours_is_listed(action: argparse.Action) -> None:
    """Each flag has a row, and the row has the default where that is a number above 0."""
    flag = action.option_strings[0]
    rows = [line for line in TABLE.splitlines() if re.search(rf"^\| `{flag}[ `]", line)]
    assert len(rows) == 1
    if isinstance(action.default, int | float) and not isinstance(action.default, bool) and action.default > 0:
        assert rows[0].split("|")[2].strip() == f"{action.default:g}"


def test_no_flag_is_invented() -> None:
    """Each flag in the table exists."""
    known = set(build_parser({})._option_string_actions)
    assert set(re.findall(r"--[a-z][a-z-]+", TABLE)) <= known


def test_flags_and_variables_of_the_master(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each flag in its table exists; each variable beside it does the same, and the flag wins."""
    table = REFERENCE[REFERENCE.index("| flag of `dlrover-master` |") :].split("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[2:]]
    pairs = []
    for flags, variables in rows:
        named = re.findall(r"--[a-z-]+", flags)
        assert set(named) <= set(master_parser()._option_string_actions)
        if variables.strip():
            pairs += list(zip(named, re.findall(r"[A-Z_]+", variables), strict=True))
    assert len(pairs) == 4
    for flag, variable in pairs:
        monkeypatch.setenv(variable, "from the environment")
        options = ["--job-id=job", "--store=sqlite:///x"]
        name = flag[2:].replace("-", "_")
        assert getattr(master_parser().parse_args(options), name) == Path("from the environment")
        assert getattr(master_parser().parse_args([*options, f"{flag}=given"]), name) == Path("given")


def test_exit_codes_are_the_agent_s() -> None:
    """The table of exit codes has those that dlrover-run ends with."""
    for name in ("EXIT_USAGE", "EXIT_LEFT", "EXIT_LEFT_UNSAVED"):
        assert f"| {getattr(events, name)} | dlrover-run |" in REFERENCE


def test_the_readme_is_short() -> None:
    """It says what this is, shows it, and points on; the rest has pages of its own."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1100


def test_files_that_pages_name_exist() -> None:
    """Every path of ours in a page is there, so that a reader finds what the page speaks of."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    folders = "agent|elastic|master|protos|relay|swift_plugin|tests|examples|benchmarks"
    for page in pages:
        for path in re.findall(rf"`((?:{folders})/[\w/.]+\.\w+)`", page.read_text(encoding="utf-8")):
            assert (ROOT / path).exists(), f"{page.relative_to(ROOT)} names {path}"


def anchors(page: Path) -> set[str]:
    """Where links into a page may lead: its headings as GitHub spells them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    """Files and headings that the README and docs link to exist."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
            there = page.parent / target if target else page
            assert there.exists(), f"{page.relative_to(ROOT)} links to {target}"
            assert not anchor or anchor in anchors(there), f"{page.relative_to(ROOT)} links to {target}#{anchor}"
