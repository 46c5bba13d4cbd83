"""Signals before the agent's loop can hear them: a `torch` that never ends its import keeps it there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dalsegno.agent.decisions.events import EXIT_LEFT
from tests.support.jobs.local_processes import BLOCKS
from tests.support.jobs.master_process import eventually

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("hang_ups")]

NEVER_ENDS = """
import pathlib, threading
pathlib.Path(__file__).with_name("importing").touch()
threading.Event().wait()
"""
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `dlrover-run` and returns when it is in the middle of its imports."""
    torch = tmp_path / "modules" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text(NEVER_ENDS)
    (tmp_path / "train.py").touch()
    running: list[subprocess.Popen[str]] = []

    def begin(*flags: str, through: tuple[str, ...] = ()) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*through, sys.executable, "-m", "dalsegno.agent.commands.dlrover_run", *flags, "train.py"],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(torch.parent)},
        )
        running.append(process)
        eventually((torch / "importing").exists, 30)
        return process

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def ends(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = process.communicate(timeout=30)
    return process.returncode, errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_in_the_first_seconds(start: Start, number: signal.Signals) -> None:
    """One line and the documented exit code, not a death by signal."""
    process = start()
    process.send_signal(number)
    line = f"dlrover-run: {number.name}: left on notice; no workers were running here\n"
    assert ends(process) == (EXIT_LEFT, line)


def test_a_notice_to_a_node_that_waits_for_the_masters_name(tmp_path: Path) -> None:
    """As a supervisor has it wait for a week: it leaves at once, as it has nothing to save."""
    (tmp_path / "train.py").touch()
    line = ["--master=no-such-host.invalid:1", "--job-id=job", "--connect-timeout=604800", "train.py"]
    process = subprocess.Popen(
        [sys.executable, "-m", "dalsegno.agent.commands.dlrover_run", *line],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        waits = process.stderr.readline()
        assert "no-such-host.invalid:1 cannot be reached yet" in waits
        assert waits.endswith("): trying for 604800 s (--connect-timeout)\n")
        process.send_signal(signal.SIGTERM)
        assert ends(process) == (EXIT_LEFT, "dlrover-run: SIGTERM: left on notice; no workers were running here\n")
    finally:
        process.kill()
        process.communicate()


def test_signals_that_whoever_started_it_has_blocked(start: Start) -> None:
    """As threads of a C++ program do, and what they execute inherits it."""
    process = start(through=BLOCKS)
    process.send_signal(signal.SIGTERM)
    assert ends(process) == (EXIT_LEFT, "dlrover-run: SIGTERM: left on notice; no workers were running here\n")


def test_the_signals_are_those_of_the_flag(start: Start) -> None:
    """As torchrun: what is not named is not handled."""
    process = start("--signals-to-handle=SIGUSR1,SIGINT")
    process.send_signal(signal.SIGUSR1)
    code, errors = ends(process)
    assert (code, errors.split()[1]) == (EXIT_LEFT, "SIGUSR1:")
    process = start("--signals-to-handle=SIGUSR1")
    process.send_signal(signal.SIGTERM)
    assert ends(process) == (-signal.SIGTERM, "")


def test_nohup_keeps_its_meaning(start: Start) -> None:
    """A closed terminal is no notice to a job that was started to outlive it."""
    process = start(through=("sh", "-c", 'trap "" HUP QUIT; exec "$@"', "sh"))
    masks = dict(line.split(":\t") for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    ignored, caught = (int(masks[name], 16) for name in ("SigIgn", "SigCgt"))
    for number in (signal.SIGHUP, signal.SIGQUIT):
        assert ignored & 1 << (number - 1)
    assert caught & 1 << (signal.SIGTERM - 1)
