"""The demo's own logic: when the next thing happens, what counts as a failure, what is shown."""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live

from dalsegno.protos import control_pb2
from examples import demo
from examples.demo_view import LiveScreen, PlainScreen, View, open_screen, sparkline
from examples.history import compare, epoch_spans, kept_history
from examples.job_status import JobStatus, from_reply, read_status
from examples.report import Scene
from tests.unit.house.test_history import world


def stage(tmp_path: Path) -> demo.Stage:
    return demo.Stage(demo.parse(["--steps=20"]), tmp_path, PlainScreen())


def node(tmp_path: Path, code: str, expected: int = 0) -> demo.Node:
    console = tmp_path / "node-x.log"
    with console.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=file)
    return demo.Node("node-x", process, console, expected)


def test_an_act_waits_for_its_world() -> None:
    """Steps of an older world of the same size don't count, only those of the newest epoch."""
    act = demo.Act(4, 3, lambda _: "")
    lines = world(1, 4, range(1, 9))
    assert demo._reached(lines, act)
    assert not demo._reached(lines + world(2, 3, range(6, 9)), act)
    assert not demo._reached(lines + world(2, 4, range(6, 8)), act)
    assert not demo._reached([], act)


def test_a_wrong_exit_code_fails_the_demo(tmp_path: Path) -> None:
    """A leaver must end with its own code, the others with 0."""
    played = stage(tmp_path)
    played.nodes.append(node(tmp_path, "raise SystemExit(75)", expected=75))
    played.nodes[0].process.wait(timeout=30)
    demo._check_exits(played)
    played.nodes[0].expected = 0
    with pytest.raises(demo.DemoError, match="node-x ended with 75, not 0"):
        demo._check_exits(played)


def test_stop_all_leaves_nobody(tmp_path: Path) -> None:
    """Agents that are left are ended."""
    played = stage(tmp_path)
    played.nodes.append(node(tmp_path, "import time; time.sleep(60)"))
    demo.stop_all(played)
    assert played.alive() == []


def test_console_lines_are_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What all agents say is said once; half a line waits for its rest."""
    played = stage(tmp_path)
    for name in ("node-1", "node-2"):
        console = tmp_path / f"{name}.log"
        console.write_text("step 1: loss 5\ndlrover-run: epoch 1: 2 nodes\nhal")
        process = subprocess.Popen([sys.executable, "-c", ""])
        process.wait(timeout=30)
        played.nodes.append(demo.Node(name, process, console))
    demo._relay_consoles(played)
    demo._relay_consoles(played)
    told = capsys.readouterr().out
    assert told.count("epoch 1: 2 nodes") == 1
    assert "step 1" not in told


@pytest.mark.parametrize(("epoch", "code"), [(0, 0), (1, 1)])
def test_the_verdict_is_the_exit_code(tmp_path: Path, epoch: int, code: int) -> None:
    """Other samples than the undisturbed run's: not 0."""
    lines = world(1, 2, range(1, 9))
    if epoch:
        lines[0] = type(lines[0])(**{**lines[0].__dict__, "sample_ids": (70, 71)})
    kept, undisturbed = kept_history(lines), kept_history(world(0, 1, range(1, 9)))
    compared = compare(kept, undisturbed)
    scene = Scene("t", "c", kept, undisturbed, epoch_spans(lines), compared, demo.LIMIT)
    assert demo.tell(scene, tmp_path) == code
    assert (tmp_path / "report.html").exists()


def test_view_shows_the_newest_step() -> None:
    """Step, loss and world of the newest line, and each step's newest loss."""
    view = View.of(20, world(1, 2, range(1, 5)) + world(2, 3, range(4, 6)), None, ["node-1"])
    assert (view.step, view.epoch, view.world_size, len(view.losses)) == (5, 2, 3, 5)
    assert View.of(20, [], None, []).step == 0


def test_sparkline_fits() -> None:
    """At most `width` columns, high values high, no division by zero."""
    assert len(sparkline([float(i) for i in range(1000)], 72)) <= 72
    assert sparkline([1.0, 2.0], 72) == "▁█"
    assert sparkline([1.0, 1.0], 72) == "▁▁"
    assert sparkline([], 72) == ""


def test_the_live_view_shows_the_run() -> None:
    """Step, nodes with their roles, and what was said, each on its own line."""
    console = Console(width=100, record=True, file=io.StringIO())
    status = JobStatus("running", "", {"node-1": "member"}, {"node-1": 0}, {})
    with Live(console=console) as live:
        screen = LiveScreen(live)
        screen.say("two nodes are started")
        screen.show(View.of(180, world(1, 2, range(1, 90)), status, ["node-1"]))
    lines = console.export_text().splitlines()
    assert any("step 89 of 180" in line for line in lines)
    assert any("node-1" in line and "member" in line and "group rank 0" in line for line in lines)
    assert any(line.rstrip(" │").endswith("two nodes are started") for line in lines)
    assert any("█" in line and "━" not in line for line in lines)


class Terminal(io.StringIO):
    """What a person looks at."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("output", "plain", "kind"),
    [(io.StringIO, False, PlainScreen), (Terminal, True, PlainScreen), (Terminal, False, LiveScreen)],
)
def test_without_a_terminal_the_demo_prints_plain_lines(
    monkeypatch: pytest.MonkeyPatch, output: type[io.StringIO], plain: bool, kind: type
) -> None:
    """A log file of CI gets no control sequences, and neither does who asks for --plain."""
    stream = output()
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    with open_screen(plain=plain) as screen:
        assert type(screen) is kind
        screen.say("two nodes are started")
        screen.show(View.of(20, world(1, 2, range(1, 5)), None, ["node-1"]))
    assert "two nodes are started" in stream.getvalue()
    assert ("\x1b" in stream.getvalue()) == (kind is LiveScreen)


def test_status_of_a_reply() -> None:
    """Phase, ranks of members only, and why each epoch came."""
    reply = control_pb2.StatusReply(
        phase=control_pb2.PHASE_RUNNING,
        nodes=[
            control_pb2.NodeStatus(node="a", role="member", group_rank=1),
            control_pb2.NodeStatus(node="b", role="spare"),
        ],
        history=[control_pb2.EpochRecord(epoch=2, cause="b joined", form=control_pb2.FORM_UNIVERSAL)],
    )
    status = from_reply(reply)
    assert (status.phase, status.group_ranks, status.changes) == ("running", {"a": 1}, {2: ("b joined", "universal")})


def test_no_master_is_no_status(tmp_path: Path) -> None:
    """Before the master is there, and when it doesn't answer, the demo goes on without."""
    assert read_status(tmp_path, "job") is None


def test_bad_scene_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An agent that fails at once ends the demo with one line and an exit code."""
    broken = tmp_path / "dlrover-run"
    broken.write_text(f"#!{sys.executable}\nraise SystemExit(3)\n")
    broken.chmod(0o700)
    monkeypatch.setattr(demo, "runner", lambda: [str(broken)])
    began = time.monotonic()
    assert demo.main(["--output", str(tmp_path / "out"), "--timeout=30", "--plain"]) == 1
    assert time.monotonic() - began < 30
    # Both of the first two fail, and either may be seen first.
    assert re.search(r"node-[12] ended with 3, not 0", capsys.readouterr().err)


def test_both_runs_get_the_same_flags() -> None:
    """Both runs get the same script flags."""
    options: argparse.Namespace = demo.parse([])
    assert demo.script_flags(options, Path("a"))[:-1] == demo.script_flags(options, Path("b"))[:-1]
