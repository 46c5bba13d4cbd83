"""Masters that are services hear signals which whoever started them had blocked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs.commander import Commander, commander, run_file
from tests.support.jobs.local_processes import BLOCKS
from tests.support.jobs.master_process import eventually

# As the first process of a container is, which no signal ends for which it has no handler.
CONTAINED = ("unshare", "--pid", "--fork", "--kill-child", "--")


def own_pid(process: subprocess.Popen[str], *, contained: bool) -> int:
    """Of the program that was started, or of the one that `unshare` has started."""
    if not contained:
        return process.pid
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
    return int(child)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("contained", [False, True])
def test_one_that_waits_for_its_store_can_be_ended(contained: bool, number: signal.Signals) -> None:
    """Nothing is served yet, so there is nothing to end well. Nobody has to kill it."""
    if contained and os.geteuid():
        pytest.skip("a container needs root")
    service = ("-m", "dalsegno.master", "--job-id=job", "--store=etcd://127.0.0.1:9", "--advertise=127.0.0.1:9")
    command = [*(CONTAINED if contained else ()), *BLOCKS, sys.executable, *service]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline().endswith("; waiting for it\n")
            os.kill(own_pid(process, contained=contained), number)
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, said) == (0, "")


def test_a_commander_ends_well(tmp_path: Path) -> None:
    """It serves several runs, none of which is its process's own."""
    with commander(tmp_path / "s.sqlite", [run_file(tmp_path)]) as first:
        again = Commander([*BLOCKS, *first.command], first.environment)
        assert first.end() == 0
    again.start()
    try:
        assert again.end() == 0
    finally:
        again.process.kill()


def test_one_that_imports_ends_without_a_traceback(tmp_path: Path) -> None:
    """By the signal, as any program that has nothing to end."""
    command = (sys.executable, "-m", "dalsegno.master", "--job-id=job", f"--store=sqlite:///{tmp_path}/s.sqlite")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            maps = Path(f"/proc/{process.pid}/maps")
            eventually(lambda: "cygrpc" in maps.read_text(encoding="utf-8"), 60.0)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, said) == (-signal.SIGINT, "")


@pytest.mark.parametrize("outlives", [False, True])
def test_one_whose_terminal_closes_ends_well(tmp_path: Path, outlives: bool) -> None:
    """Unless it was started by `nohup`."""
    command = (sys.executable, "-m", "dalsegno.master", "--job-id=job", f"--store=sqlite:///{tmp_path}/s.sqlite")
    with subprocess.Popen([*(("nohup",) if outlives else ()), *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "address" in process.stdout.readline()
            process.send_signal(signal.SIGHUP)
            if outlives:
                process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
    log = tmp_path / "master.log"
    assert not log.exists() or "SIGHUP" not in log.read_text(encoding="utf-8") or not outlives
