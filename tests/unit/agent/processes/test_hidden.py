"""Where /proc hides other users' processes (`hidepid` of proc(5)): each of their files is refused, or not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from dalsegno.agent.control.embedded import EmbeddedMaster
from dalsegno.agent.control.machine import Machine
from dalsegno.agent.processes.proc import belongs_to, descendants, listeners
from dalsegno.agent.processes.signs import Work
from dalsegno.protos.processes import Process, boot_id, is_gone, namespace

# A worker's launcher, which tells the number of the process that it has started.
_LAUNCHER = "import subprocess; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"


@pytest.fixture(params=[PermissionError(1, os.strerror(1)), FileNotFoundError(2, os.strerror(2))], ids=["1", "2"])
def hidden(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> set[int]:
    """The numbers of processes of which /proc shows nothing; number 1 is one of them."""
    numbers = {1}
    read_text = Path.read_text

    def read(path: Path, *more: Any, **options: Any) -> str:
        number = path.parts[2] if path.parts[:2] == ("/", "proc") else ""
        if number.isdigit() and int(number) in numbers:
            raise request.param
        return read_text(path, *more, **options)

    monkeypatch.setattr(Path, "read_text", read)
    return numbers


@pytest.fixture
def child() -> Iterator[int]:
    """A process of ours."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def test_strangers_hide_nothing_of_ours(hidden: set[int], child: int) -> None:
    """Workers that are told to end keep their time for that: it is for those of them that are seen."""
    assert child in descendants(os.getpid())
    assert listeners([child], 10) == []
    hidden.add(child)
    assert child not in descendants(os.getpid())
    assert not Work()([child])


def test_a_hidden_one_is_no_worker_of_ours(hidden: set[int], child: int) -> None:
    """Nor is what it has started: each process of the same user would be admitted as a rank's."""
    with subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as launcher:
        assert launcher.stdout is not None
        started = int(launcher.stdout.readline())
        try:
            assert belongs_to(started, launcher.pid)
            assert not belongs_to(started, child)
            hidden.add(launcher.pid)
            assert belongs_to(started, launcher.pid)
            assert not belongs_to(started, child)
            assert not belongs_to(launcher.pid, child)
        finally:
            os.kill(started, signal.SIGKILL)


def test_one_that_is_gone_may_have_belonged_to_a_worker(hidden: set[int], child: int) -> None:
    """It has said something and ended; that is read later."""
    with subprocess.Popen(["true"]) as gone:
        pass
    assert belongs_to(gone.pid, child)


def test_a_hidden_one_is_not_gone(hidden: set[int], child: int) -> None:
    """It may be signalled, so it lives."""
    hidden.add(child)
    recorded = Process("", boot_id(), namespace("pid"), child, 1)
    assert not is_gone(recorded, Process("", boot_id(), namespace("pid"), os.getpid(), 1))


def test_a_master_that_cannot_be_looked_at_is_another_users(hidden: set[int], child: int) -> None:
    """The claim of a job's own master may name any number. An agent that could not look at that process ended."""
    hidden.add(child)
    embedded: Any = object.__new__(EmbeddedMaster)
    embedded._machine, embedded._place = Machine(), None
    embedded._inquiry = SimpleNamespace(ask=lambda address: grpc.StatusCode.UNAVAILABLE)
    embedded._claims = SimpleNamespace(is_copied=lambda claim: False)
    claim: Any = SimpleNamespace(
        address="localhost:1",
        pid=child,
        start_time=1,
        ended_with_boot=lambda place: False,
        is_reached_from=lambda place: True,
        is_seen_from=lambda place: True,
    )
    assert embedded._standing(claim).name == "GONE"
