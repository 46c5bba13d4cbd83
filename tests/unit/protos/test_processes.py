"""What this machine's kernel proves of a process that was recorded earlier."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from dalsegno.protos import control_pb2, processes
from dalsegno.protos.processes import Process, exists, is_gone, is_of_earlier_boot, own_process

HERE = replace(own_process(), machine="this machine")


def child(code: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE)


def recorded(process: subprocess.Popen[bytes]) -> Process:
    status = processes.status_of(process.pid)
    assert status is not None
    return replace(HERE, pid=process.pid, start_time=status.started)


def test_a_process_is_gone_when_it_has_ended() -> None:
    """Not before; also while it is a zombie, and when it is reaped."""
    assert not is_gone(HERE, HERE)
    with child("input()") as process:
        known = recorded(process)
        assert not is_gone(known, HERE)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(known, HERE)
    assert is_gone(known, HERE)


def test_a_number_that_was_used_again_is_another_process() -> None:
    """Which of the two it is, its start tells."""
    assert is_gone(replace(HERE, start_time=HERE.start_time - 1), HERE)


@pytest.mark.parametrize(
    "unseen",
    [
        replace(HERE, pid_ns="pid:[1]", pid=1 << 22),
        replace(HERE, pid_ns="", pid=1 << 22),
        replace(HERE, pid=0),
        replace(HERE, start_time=0),
        replace(HERE, boot_id="of another machine", machine="another", pid=1 << 22),
        replace(HERE, boot_id="another", machine="", pid=1 << 22),
        replace(HERE, boot_id="", pid=1 << 22),
    ],
)
def test_what_cannot_be_seen_may_live(unseen: Process) -> None:
    """In another container, on another machine, or of which not enough is known."""
    assert not is_gone(unseen, HERE)


def test_nothing_lives_through_a_start_of_its_machine() -> None:
    """The same machine with another boot; of a container nobody knows the machine."""
    before = replace(HERE, boot_id="before")
    assert is_gone(before, HERE)
    assert is_of_earlier_boot(control_pb2.Process(machine="this machine", boot_id="before"), HERE)
    assert not is_of_earlier_boot(replace(before, machine=""), replace(HERE, machine=""))


def test_another_users_process_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where /proc shows nothing of it."""

    def not_permitted(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", not_permitted)
    monkeypatch.setattr(processes, "status_of", lambda pid: None)
    assert not is_gone(replace(HERE, pid=1 << 22), HERE)


def test_a_container_does_not_know_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its image may be everywhere."""
    assert len(processes.machine()) in (0, 64)
    monkeypatch.setattr(processes, "namespace", lambda kind: f"{kind}:[4026532201]")
    assert processes.machine() == ""


def test_a_child_whose_parent_is_gone_already_ends() -> None:
    """Nobody would tell it any more."""
    begin = (
        "import os, signal; from dalsegno.protos.processes import ends_with_parent; "
        "bind = ends_with_parent(signal.SIGTERM, os.getpid())"
    )
    # The second one was not started by the process that has prepared it.
    for code, ended in (
        ("child = os.fork(); os.waitpid(child, 0) if child else (bind(), print('on'))", 0),
        ("bind(); print('on')", -signal.SIGTERM),
    ):
        command = [sys.executable, "-c", f"{begin}\n{code}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stdout) == (ended, "" if ended else "on\n"), done.stderr


def test_a_child_that_asks_for_it_leads_a_group() -> None:
    """A terminal's signals reach it through its parent alone, with any Python from 3.10 on."""
    print_group = [sys.executable, "-c", "import os; print(os.getpgrp() == os.getpid())"]
    for own in (True, False):
        bind = processes.ends_with_parent(signal.SIGTERM, os.getpid(), own_group=own)
        done = subprocess.run(print_group, preexec_fn=bind, capture_output=True, text=True, timeout=30, check=True)
        assert done.stdout == f"{own}\n"


@pytest.mark.parametrize("pid", [2**31, 2**32 - 1, 2**64])
def test_a_number_that_no_kernel_gives_is_no_process(pid: int) -> None:
    """Whoever claims it, what asks about it goes on."""
    assert is_gone(replace(HERE, pid=pid), HERE)
    assert not exists(pid)
