"""Masters that are services hear signals which whoever started them had blocked."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.jobs.commander import Commander, commander, run_file
from tests.support.jobs.local_processes import BLOCKS
from tests.support.jobs.master_process import eventually


def is_ready(pid: int, number: signal.Signals) -> bool:
    """Whether it is a master by now, to which the signal gets through."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[1:2] == [b"-m"] and not blocks(pid, number)


def blocks(pid: int, number: signal.Signals) -> bool:
    """Whether the process holds this signal back."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    (mask,) = (line.split()[1] for line in lines if line.startswith("SigBlk:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_that_waits_for_its_store_can_be_ended(number: signal.Signals) -> None:
    """Nothing is served yet, so there is nothing to end well; but `kill` ends it."""
    service = ("-m", "dalsegno.master", "--job-id=job", "--store=etcd://127.0.0.1:9", "--advertise=127.0.0.1:9")
    with subprocess.Popen([*BLOCKS, sys.executable, *service], stderr=subprocess.DEVNULL) as process:
        try:
            eventually(lambda: is_ready(process.pid, number), 60.0)
            process.send_signal(number)
            assert process.wait(30) == -number
        finally:
            process.kill()


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
