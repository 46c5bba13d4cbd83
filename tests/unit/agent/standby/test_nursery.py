"""The nursery's side, without its process: what one worker does must not end the others."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dalsegno.agent.standby.nursery import CANNOT_START, _Nursery, receive, send
from dalsegno.agent.standby.worker_main import Assignment
from dalsegno.protos.own_program import command_of
from dalsegno.protos.processes import exists, stat_fields
from dalsegno.protos.ready import readable
from tests.support.jobs.master_process import eventually
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
    error, made = OSError(errno.EMFILE, os.strerror(errno.EMFILE)), list[socket.socket]()
    socketpair = socket.socketpair

    def pair(*arguments: Any) -> tuple[socket.socket, socket.socket]:
        if lacks == "a descriptor":
            raise error
        ends = socketpair(*arguments)
        made.extend(ends)
        return ends

    monkeypatch.setattr(socket, "socketpair", pair)
    monkeypatch.setattr(os, "fork", Mock(side_effect=error))
    nursery._report = {"own": "", "unforkable": ""}
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
    assert [end.fileno() for end in made] == ([] if lacks == "a descriptor" else [-1] * 4)


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
        self.pid = self._process.pid

    def starts(self, script: Path) -> int:
        """A worker's process."""
        send(self.agent, {"start": 1, **dataclasses.asdict(Assignment([str(script)], False, dict(os.environ), "/"))})
        answer = receive(self.agent)
        assert answer is not None
        return int(str(answer["pid"]))

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


def test_what_a_worker_leaves_is_the_nurserys(tmp_path: Path) -> None:
    """Where the agent was process 1, which it came to, each world that was killed left zombies until the agent's end.

    What has left the worker's group lives on, as it would without.
    """
    script, left = tmp_path / "script.py", tmp_path / "left"
    script.write_text(
        "import os, time\n"
        "def child(own):\n"
        "    if pid := os.fork():\n"
        "        return pid\n"
        "    own and os.setsid()\n"
        "    time.sleep(600)\n"
        "text = ' '.join(str(child(own)) for own in (False, True, True))\n"
        f"open('{left}-new', 'w').write(text)\n"
        f"os.rename('{left}-new', '{left}')\n"
        "time.sleep(600)\n"
    )
    daemons: list[int] = []
    try:
        with Real(tmp_path) as nursery:
            assert receive(nursery.agent)
            worker = nursery.starts(script)
            eventually(left.exists, 60)
            loader, *daemons = map(int, left.read_text().split())
            eventually(lambda: all(os.getsid(one) == one for one in daemons), 60)
            os.kill(worker, signal.SIGKILL)
            assert receive(nursery.agent) == {"exited": 1, "code": -signal.SIGKILL}
            eventually(lambda: not exists(loader), 60)
            assert [parent_of(one) for one in daemons] == [nursery.pid, nursery.pid]
            os.kill(daemons[0], signal.SIGKILL)
            eventually(lambda: not exists(daemons[0]), 60)
        assert parent_of(daemons[1]) not in (None, nursery.pid)
    finally:
        for one in daemons:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)


def parent_of(pid: int) -> int | None:
    """None: it is gone, or a zombie."""
    fields = stat_fields(pid)
    return int(fields[1]) if fields and fields[0] != "Z" else None


def forbidden(*_: Any) -> None:
    raise PermissionError(1, "Operation not permitted")
