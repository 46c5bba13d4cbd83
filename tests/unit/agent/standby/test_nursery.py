"""The nursery's side, without its process: what one worker does must not end the others."""

from __future__ import annotations

import dataclasses
import errno
import os
import socket
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dalsegno.agent.standby.nursery import CANNOT_START, _Nursery, receive
from dalsegno.agent.standby.worker_main import Assignment
from dalsegno.protos.own_program import command_of
from dalsegno.protos.ready import readable
from tests.support.pages.sources import ROOT


def scene() -> tuple[_Nursery, socket.socket]:
    """A nursery, and the agent's end of its channel."""
    agent, channel = socket.socketpair()
    return _Nursery(channel, [], 0, False, []), agent


@pytest.mark.parametrize("data", [b"50\n", b"null", b"[1]", b'"a"', b"garbage", b"\xff", b"[" * 100_000])
def test_what_a_script_writes_to_descriptors_that_it_does_not_know_counts_for_nothing(data: bytes) -> None:
    """A number ended all ranks of the node: it is JSON, too."""
    nursery, agent = scene()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    nursery._words[4242], nursery._workers[4242] = ours, 1
    theirs.send(data)
    theirs.send(b'{"imports": true}')
    assert nursery._hear_word(4242)
    assert not readable(agent.fileno(), 0)
    assert nursery._hear_word(4242)
    assert receive(agent) == {"imports": True, "of": 1}


def test_the_end_of_a_worker_that_is_another_users_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have become `sudo`: its nursery may signal nothing of its group."""
    nursery, agent = scene()
    process = subprocess.Popen(["/bin/sh", "-c", "exit 3"], start_new_session=True)
    nursery._workers[process.pid] = 1
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    # No other test's children.
    waitid = os.waitid
    monkeypatch.setattr(os, "waitid", lambda _, __, options: waitid(os.P_PID, process.pid, options))
    monkeypatch.setattr(os, "killpg", forbidden)
    nursery._reap()
    assert receive(agent) == {"exited": 1, "code": 3}


def test_a_worker_that_is_another_users_and_takes_no_place_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nursery tried to end it."""
    nursery, _ = scene()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.close()
    nursery._words[4242], nursery._workers[4242] = ours, 1
    monkeypatch.setattr(os, "killpg", forbidden)
    nursery._place({"place": 1})


@pytest.mark.parametrize("lacks", ["a descriptor", "a process"])
def test_a_worker_that_cannot_be_started_ends_nobody(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    """Without a descriptor for it the nursery ended with a traceback, and all that trained with it."""
    nursery, agent = scene()
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    monkeypatch.setattr(*((socket, "socketpair") if lacks == "a descriptor" else (os, "fork")), Mock(side_effect=error))
    nursery._report = {"own": "", "unforkable": ""}
    before = os.listdir("/proc/self/fd")
    for ahead in (False, True):
        request: dict[str, object] = {
            "start": 7,
            "ahead": ahead,
            **dataclasses.asdict(Assignment(["x"], False, {}, "/")),
        }
        assert nursery._start(request) is None
        answer = receive(agent)
        assert answer is not None
        assert (answer["exited"], answer["code"]) == (7, CANNOT_START)
        assert "it cannot be started: this process may have no more files open" in str(answer["failure"])
    assert os.listdir("/proc/self/fd") == before


class Real:
    """A nursery's process, and the agent's end of its channel."""

    def __init__(self, directory: Path, *modules: str) -> None:
        self.agent, channel = socket.socketpair()
        self.agent.settimeout(60)
        command = [
            *command_of("dalsegno.agent.standby.nursery", ("-u",)),
            *("--channel", str(channel.fileno()), "--console", "1", "2", "--", *modules),
        ]
        environment = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{directory}"}
        self._process = subprocess.Popen(command, pass_fds=(channel.fileno(),), env=environment, cwd=ROOT)
        channel.close()

    def __enter__(self) -> Real:
        return self

    def __exit__(self, *_: object) -> None:
        self.agent.close()
        assert self._process.wait(60) == 0


def test_what_imports_start_ends_with_its_own_code(tmp_path: Path) -> None:
    """The nursery reaped it, and the module, which found no process any more, took that for a 0."""
    (tmp_path / "asks.py").write_text(
        "import subprocess, time\n"
        "child = subprocess.Popen(['/bin/sh', '-c', 'exit 3'])\n"
        "time.sleep(0.3)\n"
        "if child.wait() != 3:\n"
        "    raise RuntimeError(child.returncode)\n"
    )
    with Real(tmp_path, "asks") as nursery:
        assert receive(nursery.agent) == {"ready": {"failed": {}, "unforkable": "", "own": ""}}


def forbidden(*_: Any) -> None:
    raise PermissionError(1, "Operation not permitted")
