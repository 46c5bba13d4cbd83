"""A terminal that is stopped with Ctrl-S, a pipe that nobody reads, a closed one: the run goes on, and ends with 0."""

from __future__ import annotations

import errno
import os
import pty
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from dalsegno.protos.outlet import Outlet
from tests.support.jobs.cluster import DLROVER_RUN
from tests.support.jobs.master_process import eventually

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


@pytest.mark.parametrize("how", ["> /dev/full 2> errors", pytest.param("> /dev/full 2>&1", marks=pytest.mark.full)])
def test_the_disk_of_the_output_is_full(tmp_path: Path, command: list[str], how: str) -> None:
    """The script's print does not fail, the run ends with 0, and a line says what is full and where all of it is."""
    line = " ".join(f"'{word}'" for word in command)
    shell = subprocess.run(["bash", "-c", f"{line} {how}"], cwd=tmp_path, stdin=subprocess.DEVNULL, timeout=120)
    assert shell.returncode == 0
    assert (tmp_path / "ended").exists()
    assert "line 39999 " in log_of(tmp_path)
    if "errors" in how:
        said = (tmp_path / "errors").read_text()
        assert said.count("warning: standard output cannot be written (No space left on device): the run goes on") == 1
        assert "output.log has what is not shown" in said


def test_a_file_has_all_of_it(tmp_path: Path, command: list[str]) -> None:
    """In order, and none of it is dropped."""
    with (tmp_path / "out").open("wb") as out:
        subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=out, timeout=120, check=True)
    lines = [line.split()[1] for line in (tmp_path / "out").read_text().splitlines() if line.startswith("line ")]
    assert lines == [str(number) for number in range(40000)]


def test_a_file_has_all_of_it_after_a_kill(tmp_path: Path) -> None:
    """What the script has written before its agent was killed is in the file, as if it had written it there itself."""
    script = tmp_path / "stops.py"
    script.write_text(
        "import os, sys, time\n"
        "open(sys.argv[1] + '-ready', 'w').close()\n"
        "while not os.path.exists(sys.argv[1] + '-go'):\n    time.sleep(0.05)\n"
        "print(*(f'line {number} {80 * chr(120)}' for number in range(5000)), sep='\\n', flush=True)\n"
        "open(sys.argv[1], 'w').close()\n"
        "time.sleep(300)\n"
    )
    told = tmp_path / "told"
    flags = (f"--checkpoint-dir={tmp_path / 'checkpoints'}", f"--log-dir={tmp_path / 'logs'}", "--max-restarts=0")
    with (tmp_path / "out").open("wb") as out:
        agent = subprocess.Popen([DLROVER_RUN, *flags, str(script), str(told)], stdout=out, cwd=tmp_path)
    eventually(Path(f"{told}-ready").exists, 100)
    agent.send_signal(signal.SIGSTOP)
    Path(f"{told}-go").touch()
    eventually(told.exists, 30)
    agent.kill()
    agent.wait(30)
    eventually(lambda: "line 4999 " in (tmp_path / "out").read_text(), 30)


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


def test_a_full_disk_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The reason is told once, and with room the file goes on and says how much it lacks."""
    told: list[str] = []
    full = threading.Event()
    plain = os.write

    def write(fd: int, data: memoryview) -> int:
        if fd == target and full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return plain(fd, data)

    monkeypatch.setattr(os, "write", write)
    with (tmp_path / "out").open("wb") as file:
        target = file.fileno()
        outlet = Outlet(target, "me", told.append)
        outlet.put(b"begun: ")
        assert outlet.flush(10)
        full.set()
        assert outlet.put(b"a\nb\n")
        assert outlet.put(b"c\n")
        assert outlet.flush(10)
        full.clear()
        assert outlet.put(b"d\n")
        eventually(lambda: b"not shown" in (tmp_path / "out").read_bytes(), 10)
    assert told == ["No space left on device"]
    text = (tmp_path / "out").read_text()
    assert text == "begun: d\nme: warning: 3 lines are not shown here: No space left on device\n"


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
