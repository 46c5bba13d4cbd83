"""Processes of tests, forked from one that has imported torch, DeepSpeed and the agent once.

Those imports are most of what a short run costs. A forked process is one of its own all the same: with its own
environment, directory, output and session, and killed like any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[3]
# What has imported torch, DeepSpeed and the agent; others of its kind have imported more.
PRELOADED = "tests.support.forks.preloaded"
# Whether what a test starts first is executed as a user would; else it is forked, too. Each test finds it set
# (`integration/conftest.py`).
EXECUTES = True
# Names a directory in which the pytest processes of a run note what they fork from (`tests/conftest.py`): one has
# started it, and all use it.
SHARED = "DALSEGNO_TEST_FORKS"
# Makes room in the initial environment, for the marks by which processes are found.
_ROOM = "DALSEGNO_TEST_ROOM"
_ROOM_BYTES = 2048
_context = multiprocessing.get_context("forkserver")
_servers: dict[str, forkserver.ForkServer] = {}


class Forked:
    """A process that runs a function; the part of `subprocess.Popen`'s interface that tests use.

    Args:
        target: a function of a module; it and its arguments are pickled.
        preloaded: the module that the process which it is forked from has imported.
    """

    def __init__(self, target: Callable[..., Any], *arguments: object, preloaded: str = PRELOADED) -> None:
        server = _server(preloaded)
        self._process = _context.Process(target=_run, args=(preloaded, target, *arguments))
        # The standard library knows of one such process only.
        with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """As `poll` has it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that killed it); None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs after so many seconds.
        """
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Joined(forkserver.ForkServer):
    """A process to fork from that another pytest process has started.

    It ends when nobody has the write end of a pipe open any more; so we open that, too.

    Raises:
        OSError: it has ended.
    """

    def __init__(self, address: str, pid: int) -> None:
        super().__init__()
        words = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
        pipe = re.search(r"forkserver import main; main\(\d+, (\d+)", words)
        if pipe is None:
            raise ProcessLookupError(pid)
        self._forkserver_address = address
        self._forkserver_alive_fd = os.open(f"/proc/{pid}/fd/{pipe[1]}", os.O_WRONLY)

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()


def _server(preloaded: str) -> forkserver.ForkServer:
    """The process that others are forked from; started when it is first asked for, by whichever pytest process."""
    if preloaded not in _servers:
        directory = os.environ.get(SHARED)
        # Newer Pythons let nobody in but the process that has started it.
        if directory is None or hasattr(forkserver.ForkServer(), "_forkserver_authkey"):
            _servers[preloaded] = _started(preloaded)
        else:
            _servers[preloaded] = _found(preloaded, Path(directory))
    return _servers[preloaded]


def _found(preloaded: str, directory: Path) -> forkserver.ForkServer:
    note = directory / preloaded
    with open(directory / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(OSError):
            return _Joined(*json.loads(note.read_text(encoding="utf-8")))
        server: Any = _started(preloaded)
        note.write_text(json.dumps([server._forkserver_address, server._forkserver_pid]), encoding="utf-8")
        return server  # type: ignore[no-any-return]


def _started(preloaded: str) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload([preloaded])
    # In 3.11 it imports nothing from the `sys.path` that it is given, and is silent about it.
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, {_ROOM: "." * _ROOM_BYTES, "PYTHONPATH": path}):
        server.ensure_running()
    return server


def _run(preloaded: str, target: Callable[..., Any], *arguments: object) -> None:
    assert preloaded in sys.modules, f"the process that this was forked from has not imported {preloaded}"
    # As in a process that was executed; a data loader's workers are started by the default method.
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]
    target(*arguments)


def fork_script(
    command: Sequence[str],
    environment: Mapping[str, str],
    output: Path,
    cwd: Path,
    *,
    module: bool = False,
    preloaded: str = PRELOADED,
) -> Forked:
    """Starts a training process; the script is `__main__`, as in an agent's standby workers.

    Args:
        command: the script's path, or the module's name, and its arguments.
        environment: all of it.
        output: the file that it appends to.
        cwd: its working directory.
        module: the first of `command` names a module.
        preloaded: what is imported already.
    """
    arguments = (list(command), module, dict(environment), str(output), str(cwd))
    return Forked(_become_script, *arguments, preloaded=preloaded)


def _become_script(command: list[str], module: bool, environment: dict[str, str], output: str, cwd: str) -> None:
    from dalsegno.agent.standby.worker_main import Assignment, become

    # As an interpreter does it when it starts.
    sys.path[:1] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    console = os.open(output, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    become(Assignment(command, module, environment, cwd), (console, os.dup(console)), fresh=False)


def take_environment(environment: Mapping[str, str]) -> None:
    """Makes it the environment of this forked process, `/proc/<pid>/environ` included as far as marks of ours go.

    There the kernel shows the memory in which the process that was forked had its own, to which nothing points any
    more once every variable has been set anew.
    """
    os.environ.clear()
    os.environ.update(environment)
    _show([f"{name}={value}" for name, value in environment.items() if name.startswith("DALSEGNO_")], 47)


def take_command_line(command: Sequence[str]) -> None:
    """Makes its first words (`python -u FILE MODULE`) what `/proc/<pid>/cmdline` shows of this forked process."""
    _show(command[:4], 45)


def _show(words: Sequence[str], field: int) -> None:
    """Writes where the kernel reads it; `field`: of its first byte's address, in proc(5)'s stat behind the name."""
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    begin, end = int(fields[field]), int(fields[field + 1])
    assert len(text) < end - begin, f"no room for {words}"
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, text, len(text))
