"""The run files that the project prints are runs, and what its page says of them and of the command is so."""

from __future__ import annotations

import argparse
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from dalsegno.agent.commands.arguments import parse
from dalsegno.protos.run_file import Baseline, Hub, Improvement, RunFile, read_run_file
from dalsegno.relay.command import ACTIONS, pod_parser
from dalsegno.relay.command_line import agent_command
from dalsegno.relay.volume import Volume
from tests.support.pages.sources import ROOT

FILES = sorted((ROOT / "deploy" / "relay").glob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_printed_run_is_one(path: object) -> None:
    """Its command reaches the agent with the macros in it, and the resume point reaches the trainer."""
    file = read_run_file(path)  # type: ignore[arg-type]
    words = agent_command(file, Volume(file.l1_root, file.run_id), "localhost:1", 30.0, logs=Path("/logs"))
    assert f"--job-id={file.run_id}" in words
    assert any("${resume_dir" in word for word in words)
    assert words[-1] != file.resume_flag


def test_the_agent_keeps_the_best_by_the_metric_of_the_milestones() -> None:
    """What `hf.on_improve` says becomes flags that the agent takes; without it there are none."""
    file = read_run_file(ROOT / "deploy" / "relay" / "run.yaml")

    def told(run: RunFile) -> argparse.Namespace:
        words = agent_command(run, Volume(run.l1_root, run.run_id), "localhost:1", 30.0, logs=Path("/logs"))
        return parse(words, {})

    options = told(file)
    assert options.best == ("eval_loss", "min")
    assert (options.best_min_delta, options.metrics_file) == (0.001, "metrics.jsonl")
    assert told(file.model_copy(update={"hf": None})).best is None


def test_the_agent_handles_what_its_pod_passes_on() -> None:
    """Whatever an image's environment says of torchrun's flags: of SIGHUP it would die, and lose what is not saved."""
    file = read_run_file(ROOT / "deploy" / "relay" / "quickstart.yaml")
    words = agent_command(file, Volume(file.l1_root, file.run_id), "localhost:1", 30.0, logs=Path("/logs"))
    options = parse(words, {"PET_SIGNALS_TO_HANDLE": "SIGTERM"})
    assert {"SIGTERM", "SIGINT", "SIGHUP"} <= {*options.signals_to_handle.split(",")}


def test_the_files_are_found() -> None:
    """There are some."""
    assert len(FILES) >= 5


def test_the_first_one_has_every_key() -> None:
    """`run.yaml` is where a person looks keys up; `baseline` alone has one of two, and the other one in its comment."""
    text = (ROOT / "deploy" / "relay" / "run.yaml").read_text(encoding="utf-8")
    said: dict[str, Any] = yaml.safe_load(text)
    assert set(said) == set(RunFile.model_fields)
    assert set(said["hf"]) == set(Hub.model_fields)
    assert set(said["hf"]["on_improve"]) == set(Improvement.model_fields)
    assert all(re.search(rf"\b{name}:", text[text.index("\n# What a run without") :]) for name in Baseline.model_fields)
    # A default that stands there is the one that counts without it.
    for name in ("interval_seconds", "keep_last", "lease_seconds", "self_fence"):
        assert said[name] == RunFile.model_fields[name].default, name
    assert said["hf"]["interval_seconds"] == Hub.model_fields["interval_seconds"].default


def test_every_key_of_the_first_one_has_its_comment() -> None:
    """A line above it says what it is, with its unit; the lines of `baseline` and `manifest` stand above these."""
    lines = (ROOT / "deploy" / "relay" / "run.yaml").read_text(encoding="utf-8").splitlines()
    bare = set()
    for before, line in itertools.pairwise(lines):
        key = re.match(r" *(\w+):", line)
        if key and not before.lstrip().startswith("#"):
            bare.add(key[1])
    assert bare == {"data_version", "hf"}


def test_the_page_has_every_flag_of_a_pod() -> None:
    """The table names the flags that the command takes, no others, and the default of each that has one."""
    page = (ROOT / "docs" / "relay.md").read_text(encoding="utf-8")
    table = page[page.index("| flag of `dalsegno relay` |") :].split("\n\n")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines()[2:]]
    found = {flag: default.strip() for flags, default in rows for flag in re.findall(r"--[a-z-]+", flags)}
    known = {flag: action for flag, action in pod_parser()._option_string_actions.items() if flag.startswith("--")}
    assert set(found) == set(known) - {"--help"}
    for flag, default in found.items():
        if isinstance(known[flag].default, float):
            assert default == f"{known[flag].default:g}", flag


def test_the_pages_name_no_other_command() -> None:
    """What follows `dalsegno relay` on a page is a run's file or one of the commands."""
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("relay*.md"))
    assert set(re.findall(r"dalsegno relay ([a-z]+)\b(?![./])", pages)) <= {*ACTIONS, "run", "deploy"}
