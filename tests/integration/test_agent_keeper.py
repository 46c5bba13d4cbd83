"""The keeper with real processes: whatever happens to the agent, nothing that it started outlives it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.processes import keeper
from dalsegno.agent.processes import lifeline as lifeline_module
from dalsegno.agent.processes.lifeline import Lifeline
from dalsegno.agent.processes.proc import start_time
from dalsegno.protos.contract import Variable
from tests.support.jobs.local_processes import is_same_process, process_state

# A worker with a forked child, a child with a session of its own, and a grandchild of that.
WORKER = """
import os, subprocess, sys, time
out = open(sys.argv[1], "a", buffering=1)
print(os.getpid(), file=out)
if os.fork() == 0:
    print(os.getpid(), file=out)
    time.sleep(300)
nested = "import os, subprocess, sys, time; print(os.getpid(), file=open(sys.argv[1], 'a')); " \\
         "subprocess.Popen([sys.executable, '-c', 'import os, sys, time; print(os.getpid(), file=open(sys.argv[1], \\"a\\")); time.sleep(300)', sys.argv[1]]); time.sleep(300)"
subprocess.Popen([sys.executable, "-c", nested, sys.argv[1]], start_new_session=True)
time.sleep(300)
"""  # noqa: E501

AGENT = """
import os, subprocess, sys, time
from dalsegno.agent.processes.lifeline import Lifeline
lifeline = Lifeline()
out, worker, register = sys.argv[1], sys.argv[2], sys.argv[3] == "register"
child = subprocess.Popen([sys.executable, "-c", worker, out], start_new_session=True,
                         env={**os.environ, **lifeline.environment()})
if register:
    lifeline.add_group(child.pid)
print(lifeline.keeper_pid, flush=True)
time.sleep(300)
"""


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def listed(path: Path) -> dict[int, int]:
    """The processes named in a file, with their start times."""
    pids = [int(line) for line in path.read_text().split()] if path.exists() else []
    return {pid: started for pid in pids if (started := start_time(pid)) is not None}


@pytest.fixture
def lifeline() -> Iterator[Lifeline]:
    line = Lifeline()
    yield line
    line.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["register", "token only"])
def test_everything_dies_with_a_killed_agent(tmp_path: Path, how: str) -> None:
    """SIGKILL of the agent alone: workers, forked children and setsid grandchildren are gone within seconds."""
    out = tmp_path / "pids"
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(out), WORKER, how], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    keeper = int(agent.stdout.readline())
    keeper_started = start_time(keeper)
    assert eventually(lambda: len(listed(out)) == 4, 20)
    processes = listed(out)
    # What ends a terminal's jobs must not end the keeper first.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(keeper, signum)
    agent.kill()
    assert eventually(lambda: not any(is_same_process(*process) for process in processes.items()), 20.0)
    agent.wait()
    assert keeper_started is not None
    assert eventually(lambda: not is_same_process(keeper, keeper_started), 20.0)


def sleeper(token: str = "") -> subprocess.Popen[bytes]:
    """A process without the token, or with another one, so that only its registration can find it."""
    environment = {**os.environ, Variable.LIFELINE: token} if token else None
    command = [sys.executable, "-c", "import time; time.sleep(300)"]
    return subprocess.Popen(command, start_new_session=True, env=environment)


@pytest.mark.timeout(60)
def test_a_dead_keeper_is_replaced(tmp_path: Path) -> None:
    """The new keeper knows the groups of the old one, and closing ends them."""
    replaced: list[int] = []
    line = Lifeline(replaced.append)
    child = sleeper()
    line.add_group(child.pid)
    for count in (1, 2):
        old = line.keeper_pid
        os.kill(old, signal.SIGKILL)
        assert eventually(lambda count=count: len(replaced) == count, 20.0)
        assert line.keeper_pid != old
    assert child.poll() is None
    line.close()
    assert child.wait(20.0) == -signal.SIGKILL


@pytest.mark.timeout(60)
def test_a_keeper_that_cannot_be_replaced_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more processes are allowed for a while: afterwards there is one again, which knows everything."""
    plain, replaced = lifeline_module.subprocess.Popen, threading.Event()
    refusals = iter(range(3))

    def few(*arguments: Any, **options: Any) -> Any:
        if next(refusals, None) is not None:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return plain(*arguments, **options)

    line = Lifeline(lambda times: replaced.set())
    before = line.keeper_pid
    monkeypatch.setattr(lifeline_module.subprocess, "Popen", few)
    os.kill(before, signal.SIGKILL)
    assert replaced.wait(20)
    assert next(refusals, None) is None
    assert line.keeper_pid != before
    line.close()


def test_a_dropped_group_and_a_stranger_live_on(lifeline: Lifeline) -> None:
    """Only what is registered, under the start time that it was registered with, is ended."""
    dropped, reused, ours = sleeper(), sleeper(), sleeper()
    stranger = sleeper("another")
    try:
        lifeline.add_group(ours.pid)
        lifeline.add_group(dropped.pid)
        lifeline.drop_group(dropped.pid)
        # As if the number had been given to another process since.
        lifeline._groups[reused.pid] = (start_time(reused.pid) or 0) - 1
        old = lifeline.keeper_pid
        os.kill(old, signal.SIGKILL)
        assert eventually(lambda: lifeline.keeper_pid != old, 20.0)
        lifeline.close()
        assert ours.wait(20.0) == -signal.SIGKILL
        assert [p.poll() for p in (dropped, stranger, reused)] == [None, None, None]
    finally:
        for process in (dropped, stranger, reused, ours):
            process.kill()
            process.wait()


@pytest.mark.timeout(60)
def test_a_stopped_keeper_does_not_stop_the_agent(lifeline: Lifeline) -> None:
    """A keeper that no longer reads is replaced instead of waited for."""
    old = lifeline.keeper_pid
    os.kill(old, signal.SIGSTOP)
    child = sleeper()
    for _ in range(8000):
        lifeline.add_group(child.pid)
        if lifeline.keeper_pid != old:
            break
    assert eventually(lambda: lifeline.keeper_pid != old, 20.0)
    lifeline.close()
    assert child.wait(20.0) == -signal.SIGKILL


@pytest.mark.timeout(60)
def test_closing_while_the_keeper_is_replaced_ends_everything(
    lifeline: Lifeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new one may not know of anything yet."""
    child, spawning, spawn = sleeper(), threading.Event(), lifeline._spawn

    def slowly() -> subprocess.Popen[bytes]:
        spawning.set()
        time.sleep(0.5)  # why: the other thread calls close() meanwhile, and nothing tells that it has
        return spawn()

    lifeline.add_group(child.pid)
    monkeypatch.setattr(lifeline, "_spawn", slowly)
    os.kill(lifeline.keeper_pid, signal.SIGKILL)
    assert spawning.wait(5.0)
    lifeline.close()
    assert child.wait(5.0) == -signal.SIGKILL


@pytest.mark.timeout(60)
def test_closing_after_the_keeper_has_died_ends_everything(lifeline: Lifeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one that dies is replaced after a pause only; closing does not wait for it."""
    monkeypatch.setattr("dalsegno.agent.processes.lifeline._RESPAWN_PAUSE_SECONDS", 300.0)
    child, first = sleeper(), lifeline.keeper_pid
    lifeline.add_group(child.pid)
    os.kill(first, signal.SIGKILL)
    assert eventually(lambda: lifeline.keeper_pid != first, 20.0)
    os.kill(lifeline.keeper_pid, signal.SIGKILL)
    lifeline.close()
    assert child.wait(5.0) == -signal.SIGKILL


@pytest.mark.timeout(60)
@pytest.mark.parametrize("stopped", ["before", "at once"])
def test_closing_with_a_stopped_keeper_ends_everything(
    lifeline: Lifeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: str
) -> None:
    """Another one does its work: daemons of the script, in sessions of their own, were left behind, and directories."""
    daemon, directory = sleeper(lifeline.token), tmp_path / "private"
    directory.mkdir()
    lifeline.add_path(directory)
    if stopped == "before":
        os.kill(lifeline.keeper_pid, signal.SIGSTOP)
        assert eventually(lambda: process_state(lifeline.keeper_pid) == "T", 20.0)
    else:
        # Not before it was looked at.
        first = iter([lifeline.keeper_pid])
        monkeypatch.setattr(
            lifeline_module, "is_stopped", lambda pid: [os.kill(one, signal.SIGSTOP) for one in first] and False
        )
    began = time.monotonic()
    lifeline.close(10.0 if stopped == "before" else 1.0)
    assert daemon.wait(5.0) == -signal.SIGKILL
    assert not directory.exists()
    assert time.monotonic() - began < 8.0, "it is seen at once, and otherwise has a few seconds more"


def test_private_directories_go_too(tmp_path: Path) -> None:
    """The socket's directory is removed although the agent cannot do it any more."""
    private = tmp_path / "private"
    private.mkdir()
    (private / "agent.sock").touch()
    line = Lifeline()
    line.add_path(private)
    line.close()
    assert not private.exists()


def test_a_line_end_in_a_path_is_part_of_the_path(tmp_path: Path) -> None:
    """Of what is to be removed, the part before a line end may be somebody's directory."""
    other, inside = tmp_path / "other", tmp_path / "other\nend"
    for directory in (other, inside, tmp_path / "other\nend two"):
        directory.mkdir()
        (directory / "file").touch()
    (tmp_path / "claimed").mkdir()
    for name in ("pre", "pre\nfix 1", "claimed/\n.owner", "claimed/\nfile"):
        (tmp_path / name).touch()
    line = Lifeline()
    line.add_path(inside)
    line.add_prefix(f"{tmp_path}/pre\nfix")
    line.add_claim(tmp_path / "claimed/\n.owner", tmp_path / "other\nend two", f"{tmp_path}/claimed/\n")
    line.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["claimed", "other", "pre"]
    assert (other / "file").exists()
    assert not list((tmp_path / "claimed").iterdir())


def test_only_absolute_paths_are_removed(tmp_path: Path) -> None:
    """The keeper stands in `/`: what is relative would be something else there."""
    victim = tmp_path / "victim"
    victim.mkdir()
    said = "".join(f"{word} {bytes(victim.relative_to('/')).hex()}\n" for word in ("path", "prefix"))
    said += f"path\npath {victim}\nclaim {bytes(victim).hex()}\n"
    subprocess.run([sys.executable, "-I", "-S", keeper.__file__], input=said.encode(), cwd="/", timeout=60, check=True)
    assert victim.exists()


def test_files_with_a_common_beginning_go_too(tmp_path: Path) -> None:
    """Shared memory of DLRover's classes is named by a prefix; what only resembles it stays."""
    names = ["job_ckpt_shm_0", "job_ckpt_shm_1", "job.2_ckpt_shm_0", "other"]
    for name in names:
        (tmp_path / name).touch()
    line = Lifeline()
    line.add_prefix(f"{tmp_path}/job_ckpt_shm_")
    os.kill(line.keeper_pid, signal.SIGKILL)
    line.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == names[2:]
