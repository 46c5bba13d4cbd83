"""The pages tell the truth about what can be checked: flags with their defaults, exit codes, files they link to."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.agent.commands.arguments import build_parser
from dalsegno.agent.commands.dalsegno import _parser as dalsegno_parser
from dalsegno.agent.commands.unused import IGNORED, UNUSED
from dalsegno.agent.decisions import events
from dalsegno.master.cli import _parser as master_parser
from dalsegno.protos.options import Parser
from dalsegno.relay.command import ACTIONS, pod_parser
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
        named = re.findall(r"--[a-z_-]+", flags)
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


PAGES = "\n".join(path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def parsers_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser, and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from parsers_of(below)


def every_flag() -> set[tuple[str, str]]:
    """Of all programs: program, and the flag as people type it."""
    relay = [pod_parser()]
    for name, action in ACTIONS.items():
        relay.append(Parser(prog=f"dalsegno relay {name}"))
        action.add(relay[-1])
    parsers = [build_parser({}), master_parser(), *parsers_of(dalsegno_parser()[0]), *relay]
    return {
        (parser.prog, next(one for one in action.option_strings if one.startswith("--")))
        for parser in parsers
        for action in parser._actions
        if action.option_strings and action.option_strings != ["-h", "--help"]
    }


@pytest.mark.parametrize(("program", "flag"), sorted(every_flag()))
def test_every_flag_of_every_program_stands_on_a_page(program: str, flag: str) -> None:
    """Whoever meets it in a command line finds what it does; of the two long programs in the reference's tables."""
    rows = [line for line in REFERENCE.splitlines() if line.startswith("| `--")]
    where = "\n".join(row.split("|")[1] for row in rows) if program.startswith("dlrover-") else PAGES
    assert re.search(rf"(?<![\w-]){flag}(?![\w-])", where), program


def test_flags_without_effect_are_told_as_such() -> None:
    """In the table of torchrun's and DLRover's: those of the parser's lists, and no others."""
    table = REFERENCE[REFERENCE.index("| flag of torchrun or DLRover |") :].split("\n\n")[0]
    told = {
        flag
        for row in table.splitlines()
        if "| no effect" in row
        for flag in re.findall(r"`(--[a-z-]+)`", row.split("|")[1])
    }
    assert told == {flag for flag, *_ in IGNORED} | {f"--{flag}" for flag, *_ in UNUSED}


def test_the_readme_is_short() -> None:
    """It says what this is, shows it, and points on; the rest has pages of its own."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1100


def test_files_that_pages_name_exist() -> None:
    """Every path of ours in a page is there, so that a reader finds what the page speaks of."""
    pages = [
        ROOT / "CONTRIBUTING.md",
        ROOT / "README.md",
        ROOT / "examples" / "README.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
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
    pages = [
        ROOT / "CONTRIBUTING.md",
        ROOT / "README.md",
        ROOT / "examples" / "README.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
    for page in pages:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
            there = page.parent / target if target else page
            assert there.exists(), f"{page.relative_to(ROOT)} links to {target}"
            assert not anchor or anchor in anchors(there), f"{page.relative_to(ROOT)} links to {target}#{anchor}"
