"""The benchmark of the pause, with a small state: both scenes with real agents, and parts that sum."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks import pause
from benchmarks.pause import Cell, Options
from benchmarks.pause_page import Change
from dalsegno.agent.commands import dalsegno

# A benchmark: `make test-all`.
pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]

STEP_SECONDS = 0.1
# Between a step's line in the script's own log and its mark, on a machine that others use, too.
APART = 1.0


class Played(NamedTuple):
    changes: dict[str, Change]
    marks: Path


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """A node joins and leaves, another one joins and is killed, once for all tests."""
    marks = tmp_path_factory.mktemp("marks")
    options = Options(save_every=5, saves=1, step_time=STEP_SECONDS, settle=0.5, patience=90.0, trace=marks)
    found = pause.measure(Cell("ddp", 10**5, 16, "ours"), options)
    return Played({one.scene: one for one in found}, marks)


@pytest.mark.parametrize("scene", pause.SCENES)
def test_the_parts_sum_to_the_pause(played: Played, scene: str) -> None:
    """What the marks say is what the script's own log of its steps says, by another clock."""
    change = played.changes[scene]
    assert sum(change.parts.values()) == pytest.approx(change.pause, abs=1e-6)
    assert min(change.parts.values()) >= 0
    # Up to two steps ended before the boundary was agreed on. The log is written before the mark.
    steps = change.parts.get("noticed", 0.0) + change.parts.get("step finished", 0.0)
    assert change.gap <= change.pause + APART
    assert change.pause <= change.gap + (steps if scene == "join" else 0.0) + APART


def test_a_join_has_every_part_and_loses_nothing(played: Played) -> None:
    """Nobody has forgotten a mark: what is not there is told as a part of what follows."""
    change = played.changes["join"]
    # The scripts had come to `session()` before the world was formed: standby workers run them ahead.
    wanted = {"noticed", "step finished", "written", "synced", "sealed", "committed", "stopped", "formed"}
    wanted |= {"met", "verified", "model built", "built", "loaded", "ready", "first step"}
    assert wanted <= set(change.parts)
    assert change.lost == 0
    assert {"noticed", "stopped", "formed"} <= set(played.changes["kill"].parts)


def test_the_trace_of_a_job_is_shown(played: Played, capsys: pytest.CaptureFixture[str]) -> None:
    """The command on what `--trace-dir` left: all changes, each with its parts."""
    assert dalsegno.run(["pauses", str(played.marks)]) == 0
    said = capsys.readouterr().out
    assert said.count("epoch ") == 4, "two joins, a leave and a kill"
    assert "2 ranks" in said
    assert "(planned)" in said
    assert "(unplanned, " in said


def test_a_directory_without_a_trace_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, not a traceback."""
    assert dalsegno.run(["pauses", str(tmp_path)]) == 1
    assert "no change of the world" in capsys.readouterr().out
    assert dalsegno.run(["pauses", str(tmp_path / "none")]) == 2
    assert "is no directory" in capsys.readouterr().err
