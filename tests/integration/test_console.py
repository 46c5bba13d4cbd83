"""A terminal that is stopped with Ctrl-S, a pipe that nobody reads, a closed one: the run goes on, and ends with 0."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from dalsegno.protos.outlet import Outlet
from tests.support.jobs.cluster import DLROVER_RUN
from tests.support.jobs.master_process import eventually
from tests.support.jobs.ports import free_port

pytestmark = pytest.mark.timeout(300)

# Says more than any pipe or terminal holds.
TALKS = """
import sys
for number in range(40000):
    print(f"line {number} " + 80 * "x", flush=number % 1000 == 0)
print("to errors", file=sys.stderr)
open(sys.argv[1], "w").close()
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    script = tmp_path / "talks.py"
    script.write_text(TALKS)
    flags = (f"--checkpoint-dir={tmp_path / 'checkpoints'}", f"--log-dir={tmp_path / 'logs'}", "--max-restarts=0")
    return [DLROVER_RUN, *flags, str(script), str(tmp_path / "ended")]


def log_of(directory: Path) -> str:
    """What was said, as far as it is kept."""
    (newest,) = (directory / "logs").glob("*/output.log")
    return newest.read_text()


@pytest.mark.parametrize("kind", ["terminal", pytest.param("pipe", marks=pytest.mark.full)])
def test_nobody_reads(tmp_path: Path, command: list[str], kind: str) -> None:
    """Neither the worker nor the agent waits for a reader, and the exit waits a bounded time."""
    reader, writer = pty.openpty() if kind == "terminal" else os.pipe()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, cwd=tmp_path)
    assert process.wait(120) == 0
    assert (tmp_path / "ended").exists()
    assert "line 39999 " in log_of(tmp_path)
    os.close(reader)
    os.close(writer)


WAITS = """
import pathlib, sys, time
pathlib.Path(sys.argv[1] + ".began").touch()
while not pathlib.Path(sys.argv[1] + ".may-end").exists():
    time.sleep(0.05)  # why: it is what a person waits for
pathlib.Path(sys.argv[1]).touch()
"""


def test_ctrl_z_says_what_it_does(tmp_path: Path, command: list[str]) -> None:
    """The agent alone stands still, after a line that says so; the worker goes on, and so does the run after `fg`."""
    (tmp_path / "talks.py").write_text(WAITS)
    reader, writer = pty.openpty()
    process = subprocess.Popen(command, stdin=writer, stdout=writer, stderr=writer, cwd=tmp_path, preexec_fn=os.setpgrp)
    os.close(writer)
    eventually(lambda: (tmp_path / "ended.began").exists(), 60)
    os.kill(process.pid, signal.SIGTSTP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    shown = b""
    while select.select([reader], [], [], 1.0)[0]:
        shown += os.read(reader, 1 << 16)
    assert b"Ctrl-Z: this agent stands still until `fg`; its workers train on" in shown
    (tmp_path / "ended.may-end").touch()
    eventually(lambda: (tmp_path / "ended").exists(), 60)
    assert process.poll() is None
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(60) == 0
    os.close(reader)


def test_ctrl_z_before_there_is_a_master(tmp_path: Path, command: list[str]) -> None:
    """Started in the same terminal it is found after `fg`, however long that took; no workers are spoken of."""
    (tmp_path / "talks.py").write_text(WAITS)
    (tmp_path / "ended.may-end").touch()
    command[1:1] = [f"--master=127.0.0.1:{free_port()}", "--connect-timeout=12"]
    reader, writer = pty.openpty()
    process = subprocess.Popen(command, stdin=writer, stdout=writer, stderr=writer, cwd=tmp_path, preexec_fn=os.setpgrp)
    os.close(writer)
    shown = b""
    while b"no master has answered yet" not in shown:
        assert select.select([reader], [], [], 60.0)[0]
        shown += os.read(reader, 1 << 16)
    os.kill(process.pid, signal.SIGTSTP)
    _, status = os.waitpid(process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    time.sleep(13.0)  # why: it is the time in which the agent, if that counted, would have given up
    os.kill(process.pid, signal.SIGCONT)
    until = time.monotonic() + 3.0
    while select.select([reader], [], [], max(0.0, until - time.monotonic()))[0]:
        shown += os.read(reader, 1 << 16)
    assert process.poll() is None, shown
    assert b"stands still until `fg`; it has no workers now" in shown
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    os.close(reader)


# One closed stream alone is half of what both are.
@pytest.mark.parametrize(
    "how",
    ["| head -1", *(pytest.param(one, marks=pytest.mark.full) for one in (">&-", "2>&-", ">&- 2>&-", "2>&1 | true"))],
)
def test_the_reader_goes(tmp_path: Path, command: list[str], how: str) -> None:
    """The script's print does not fail, the run ends with 0, and what was said is in the log."""
    line = " ".join(f"'{word}'" for word in command)
    shell = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {line} {how}"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert shell.returncode == 0, shell.stderr
    assert (tmp_path / "ended").exists()
    assert "line 39999 " in log_of(tmp_path)


@pytest.mark.full
def test_all_of_it_is_shown_to_a_slow_reader(tmp_path: Path, command: list[str]) -> None:
    """It holds the script up, as ever; nothing is dropped."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=tmp_path)
    assert process.stdout is not None
    lines = [line.split()[1] for line in process.stdout if line.startswith(b"line ")]
    assert process.wait(120) == 0
    assert lines == [str(number).encode() for number in range(40000)]


def test_what_was_dropped_is_counted() -> None:
    """Nobody reads for a while: writers do not wait twice, and whoever reads again hears how much is missing."""
    reader, writer = os.pipe()
    outlet = Outlet(writer, "me")
    line = 1023 * b"x" + b"\n"
    taken = 0
    while outlet.put(line, patience_seconds=0.05):
        taken += 1
    assert not outlet.put(line)
    assert not outlet.put(line, patience_seconds=3600)
    assert not outlet.flush(0.05)
    got = bytearray()
    end = b"me: warning: 3 lines are not shown here: nobody read them\n"
    while not got.endswith(end):
        got += os.read(reader, 1 << 16)
    assert bytes(got) == taken * line + end
    assert outlet.flush(10)
    assert outlet.put(line)
    os.close(reader)
    eventually(lambda: not outlet.put(line), 30)
    assert outlet.flush(0)
    os.close(writer)


def test_a_slow_reader_is_waited_for() -> None:
    """As long as it reads at all, and nothing is lost."""
    reader, writer = os.pipe()
    outlet = Outlet(writer)
    data = b"x" * (1 << 16)
    taken = 0
    while outlet.put(data):
        taken += 1
    count = 40
    got = [0]

    def read() -> None:
        while got[0] < (taken + count) * len(data):
            got[0] += len(os.read(reader, 1 << 14))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert all(outlet.put(data, patience_seconds=60) for _ in range(count))
    thread.join(60)
    assert not thread.is_alive()
    os.close(reader)
    os.close(writer)
