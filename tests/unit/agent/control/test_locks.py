"""Locks of an embedded master's directory: whoever waits for one hears which process holds it, and whether it runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.control import awake, locks
from dalsegno.agent.control.awake import AwakeTime
from dalsegno.agent.control.locks import JobLocks, LockTimeout
from dalsegno.agent.control.machine import Machine
from tests.support.jobs.local_processes import process_state
from tests.support.jobs.master_process import eventually

pytestmark = pytest.mark.timeout(60)

HOLDER = """
import sys, threading
from pathlib import Path
from dalsegno.agent.control.locks import JobLocks
from dalsegno.agent.control.machine import Machine
with JobLocks(Path(sys.argv[1]), Machine()).hold("start.lock", 5.0, threading.Event()):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[int]:
    """The number of a process that holds a lock."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process.pid
        process.kill()


def waits(directory: Path, seconds: float = 0.0) -> tuple[list[str], str]:
    """What whoever waits for the lock hears meanwhile, and at the end."""
    told: list[str] = []
    timeout = pytest.raises(LockTimeout)
    with timeout as failed, JobLocks(directory, Machine()).hold("start.lock", seconds, threading.Event(), told.append):
        pass
    return told, str(failed.value)


def test_who_waits_is_told_for_whom(tmp_path: Path, holder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has pressed Ctrl-Z, and the next start waited for 90 s without a word, and named nobody."""
    monkeypatch.setattr(locks, "_SILENCE_SECONDS", 0.2)
    who = f"process {holder} of this machine"
    assert waits(tmp_path, 0.5) == ([who], f"{tmp_path / 'start.lock'} is locked by {who} for more than 0 s")
    os.kill(holder, signal.SIGSTOP)
    eventually(lambda: process_state(holder) == "T", 20)
    who += " (it is stopped: `fg`, or end it)"
    assert waits(tmp_path, 0.5) == ([who], f"{tmp_path / 'start.lock'} is locked by {who} for more than 0 s")


def test_a_short_wait_is_none(tmp_path: Path, holder: int) -> None:
    """Each start on a machine waits for the one before."""
    assert waits(tmp_path, 1.0)[0] == []


@pytest.mark.parametrize(
    ("change", "who"),
    [
        ({"host": "other"}, "process 7 on other"),
        ({"boot_id": "other"}, "process 7 on HOST"),
        ({"pid_ns": "pid:[1]"}, "process 7 in another container of this machine (HOST)"),
        # Gone: somebody has taken it since, and could not write who.
        ({"started": 1}, "another process"),
        # Not ours.
        *(({name: value}, "another process") for name in ("pid", "started") for value in ("7", 1.5, None)),
        *(({"host": value}, "another process") for value in ("\x1b[2J", "h" * 300, 1)),
        *(({name: 1}, "another process") for name in ("later", "boot_id", "pid_ns")),
        ({"pid": -1}, "another process"),
    ],
)
def test_a_holder_elsewhere_is_named(tmp_path: Path, change: dict[str, Any], who: str) -> None:
    """As far as anything is known of it; what is no holder's word is not shown."""
    here = Machine().place()
    with JobLocks(tmp_path, Machine()).try_hold("start.lock"):
        signed = json.loads((tmp_path / "start.lock").read_text())
        text = json.dumps({**signed, "pid": 7 if "started" not in change else os.getpid(), **change})
        (tmp_path / "start.lock").write_text(text)
        assert waits(tmp_path)[1].startswith(
            f"{tmp_path / 'start.lock'} is locked by {who} for".replace("HOST", here.host)
        )


@pytest.mark.parametrize("text", [b"", b"[1]", b"[" * 4000, b"\xff", b"null"])
def test_a_damaged_word_names_nobody(tmp_path: Path, text: bytes) -> None:
    """Whatever is in the file, and whatever was there before is written over."""
    (tmp_path / "start.lock").write_bytes(text)
    with contextlib.closing(os.fdopen(os.open(tmp_path / "start.lock", os.O_RDWR))):
        free = Machine().lock(tmp_path / "start.lock")
        assert free is not None
        assert "locked by another process for" in waits(tmp_path)[1]
        free()
    with JobLocks(tmp_path, Machine()).try_hold("start.lock"):
        assert f"process {os.getpid()} of" in waits(tmp_path)[1]


def test_a_lock_is_held_without_a_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk costs nobody the lock."""

    def refuse(path: Path, flags: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(locks, "open_private", refuse)
    with JobLocks(tmp_path, Machine()).try_hold("start.lock") as held:
        assert held
        assert "locked by another process for" in waits(tmp_path)[1]


def test_time_in_which_this_process_was_stopped_is_not_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long time between two looks only a little counts."""
    now = iter((100.0, 101.0, 103.5, 1000.0, 1001.0))
    monkeypatch.setattr(awake, "time", type("clock", (), {"monotonic": lambda: next(now)}))
    time = AwakeTime()
    assert [time.seconds() for _ in range(4)] == [1.0, 3.5, 8.5, 9.5]


TAKES = """
import sys, threading, time
from pathlib import Path
from dalsegno.agent.control.locks import JobLocks
from dalsegno.agent.control.machine import Machine
from dalsegno.agent.processes.signals import SignalWatch
with SignalWatch((), print, stopping=lambda has_workers: None) as watch:
    locks = JobLocks(Path(sys.argv[1]), Machine(), watch.undisturbed)
    print("ready", flush=True)
    while True:
        with locks.hold("start.lock", 5.0, threading.Event()):
            time.sleep(0.02)  # why: what is done under it takes as long as the pause
        time.sleep(0.02)  # why: see above
"""


def test_ctrl_z_never_leaves_a_lock_taken(tmp_path: Path) -> None:
    """In one of six tries it had just been taken, or was not yet free again: the other agents waited until `fg`."""
    command = [sys.executable, "-c", TAKES, str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, preexec_fn=os.setpgrp)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for _ in range(60):
            os.kill(process.pid, signal.SIGTSTP)
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            with JobLocks(tmp_path, Machine()).try_hold("start.lock") as held:
                assert held
            os.kill(process.pid, signal.SIGCONT)
            time.sleep(0.03)  # why: another moment of its round
    finally:
        process.kill()
        process.communicate()
