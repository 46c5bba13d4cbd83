"""Whom a signal that asks for something is sent to: only who handles it, and of its descendants nobody."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from dalsegno.agent.processes import proc
from dalsegno.agent.processes.proc import descendants, listeners

# A launcher that does not handle SIGUSR1, a trainer that does, and its helper, which has inherited that by a fork.
_TRAINER = """
import os, signal, sys, time
signal.signal(signal.SIGUSR1, lambda *_: None)
helper = os.fork()
if helper:
    print(os.getpid(), helper, flush=True)
time.sleep(600)
"""
_LAUNCHER = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {_TRAINER!r}])
"""


def test_a_launcher_and_a_helper_are_not_asked() -> None:
    """The launcher would die of it, the helper would do the same a second time."""
    with subprocess.Popen([sys.executable, "-c", _LAUNCHER], stdout=subprocess.PIPE, text=True) as launcher:
        try:
            assert launcher.stdout is not None
            trainer, helper = map(int, launcher.stdout.readline().split())
            assert {trainer, helper} <= set(descendants(launcher.pid))
            assert listeners([launcher.pid], signal.SIGUSR1) == [trainer]
            assert listeners([helper], signal.SIGUSR1) == [helper]
            assert listeners([launcher.pid], signal.SIGUSR2) == []
        finally:
            for pid in (*descendants(launcher.pid), launcher.pid):
                subprocess.run(["kill", "-9", str(pid)], check=True)
    deadline = time.monotonic() + 10
    while listeners([launcher.pid], signal.SIGUSR1):
        assert time.monotonic() < deadline, "who is gone handles nothing"
        time.sleep(0.05)


def test_a_worker_that_does_not_exist_yet_has_no_processes() -> None:
    """Its number is 0, from which everything on the machine descends, strangers too."""
    with subprocess.Popen([sys.executable, "-c", _TRAINER], stdout=subprocess.PIPE, text=True) as stranger:
        try:
            assert stranger.stdout is not None
            stranger.stdout.readline()
            assert stranger.pid in descendants(0)
            assert listeners([0], signal.SIGUSR1) == []
        finally:
            for pid in (*descendants(stranger.pid), stranger.pid):
                subprocess.run(["kill", "-9", str(pid)], check=True)


def test_one_look_is_enough_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long where many processes run, and the time of a notice is short."""
    looks = []
    look = proc._processes

    def counted() -> Any:
        looks.append(1)
        return look()

    monkeypatch.setattr(proc, "_processes", counted)
    with contextlib.ExitStack() as stack:
        workers = []
        for _ in range(2):
            worker = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", _TRAINER], stdout=subprocess.PIPE, text=True)
            )
            workers.append(worker.pid)
            assert worker.stdout is not None
            stack.callback(worker.kill)
            helper = int(worker.stdout.readline().split()[1])
            stack.callback(os.kill, helper, signal.SIGKILL)
        assert listeners(workers, signal.SIGUSR1) == workers
    assert len(looks) == 1
