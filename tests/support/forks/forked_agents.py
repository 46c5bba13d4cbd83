"""Agents, executed as a user does it, or forked with the nursery of their standby workers (`forked`).

All of a forked agent's own code runs as it would otherwise, from the console script's `main` on. Its nursery and its
embedded master are processes that it has forked before anything else, and that wait to be one: `subprocess.Popen`,
where the agent calls it for them, gives them the command line, the environment and the files. What an agent starts
beyond that, a later nursery after some changes of the world or a second master, is executed.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import process, resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from dalsegno.agent.control.spawning import COMMAND as MASTER
from dalsegno.protos.own_program import command_of

from ..hosts.namespaces import Inside, as_child_in, words_in
from .forked import PRELOADED, ROOT, Forked, take_command_line, take_environment

DLROVER_RUN = str(Path(sysconfig.get_path("scripts")) / "dlrover-run")
NURSERY = "dalsegno.agent.standby.nursery"
# Each change of the world takes one, and its imports would take longer than most tests.
_NURSERIES = 6
# Above whatever an agent or a nursery has open.
_HIGH = 500
_MAX_MESSAGE = 100_000


def start_agent(
    command: Sequence[str],
    environment: Mapping[str, str],
    console: Path,
    cwd: Path,
    *,
    executed: bool,
    stdout: Path | None = None,
    preloaded: str = PRELOADED,
    host: int | None = None,
) -> subprocess.Popen[bytes] | Forked | Inside:
    """Starts an agent in a session of its own.

    Args:
        command: the console script and its arguments.
        environment: all of it.
        console: where it writes to, as in a terminal; a file that it appends to.
        cwd: its working directory.
        executed: as a user starts it (any other command, too); otherwise forked.
        stdout: where standard output goes, if not to the console.
        preloaded: what is imported already where it is forked.
        host: a process in whose namespaces it runs (`support.hosts`).
    """
    console.touch()
    files = (str(stdout or console), str(console))
    if not executed:
        arguments = (list(command), dict(environment), files, str(cwd), host)
        forked = Forked(_run_agent, *arguments, preloaded=preloaded)
        return forked if host is None else Inside(forked)
    line = list(command) if host is None else words_in(host, command, cwd)
    with open(files[0], "ab") as out, open(files[1], "ab") as errors:
        process = subprocess.Popen(
            line,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            start_new_session=True,
            env=environment,
            cwd=cwd,
        )
    return process if host is None else Inside(process)


def _run_agent(
    command: list[str], environment: dict[str, str], files: tuple[str, str], cwd: str, host: int | None
) -> NoReturn:
    if host is not None:
        as_child_in(host)
    os.setsid()
    # As in a terminal, also where the tests themselves run under nohup or in the background.
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _forget_multiprocessing()
    stdout, stderr = (os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT) for file in files)
    _take_files({1: stdout, 2: stderr})
    os.chdir(cwd)
    # Before the environment: what no one has asked for carries no mark by which a test would find it.
    nurseries, masters = [_Seed(_be_nursery) for _ in range(_NURSERIES)], [_Seed(_be_master)]
    take_environment(environment)
    _take_arguments(command, os.path.dirname(command[0]))
    _customize()
    from dalsegno.agent.commands import dlrover_run
    from dalsegno.agent.control import spawning
    from dalsegno.agent.standby import nursery_start

    nursery_start.subprocess = _Subprocess(nurseries, command_of(NURSERY, ("-u",)))  # type: ignore[assignment]
    spawning.subprocess = _Subprocess(masters, MASTER)  # type: ignore[assignment]
    dlrover_run.main()
    raise AssertionError("the agent returned")


def _forget_multiprocessing() -> None:
    """Nobody's child as far as libraries can see."""
    process._parent_process = None  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]


def _take_files(files: Mapping[int, int]) -> None:
    """Descriptors by the number that they are to have; all others above 2 are closed."""
    moved = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, _HIGH) for number, fd in files.items()}
    for number, fd in moved.items():
        os.dup2(fd, number)
    last = 2
    for number in sorted(number for number in moved if number > 2):
        os.closerange(last + 1, number)
        last = number
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))


def _take_arguments(command: list[str], *first_path: str) -> None:
    sys.argv = command
    sys.path[:] = [*first_path, *(path for path in sys.path if path not in ("", str(ROOT)))]


def _customize(index: int = 1) -> None:
    """What an interpreter does when it starts, for modules that a test has put in its way.

    Args:
        index: of `sys.path`, where they come.
    """
    for directory in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        sys.path.insert(index, directory)
        if (custom := Path(directory) / "sitecustomize.py").exists():
            runpy.run_path(str(custom), run_name="sitecustomize")


class _Seed:
    """A child of this process that waits to become what it is asked for; it ends with this process if nobody asks.

    Args:
        be: what it does in the end, with its command line; returns its exit code.
    """

    def __init__(self, be: Callable[[list[str]], object]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            self._channel.close()
            _grow(theirs, be)
        theirs.close()

    def grow(self, command: Sequence[str], options: Mapping[str, Any], files: Mapping[int, int]) -> None:
        """Returns when it has its own session. `options`: of `subprocess.Popen`."""
        blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
        given = [list(command), dict(options["env"]), options.get("cwd") or os.getcwd(), blocked, list(files)]
        socket.send_fds(self._channel, [json.dumps(given).encode()], list(files.values()))
        self._channel.recv(1)
        self._channel.close()


def _grow(channel: socket.socket, be: Callable[[list[str]], object]) -> NoReturn:
    message, fds, _, _ = socket.recv_fds(channel, _MAX_MESSAGE, 16)
    if not message:
        os._exit(0)
    command, environment, directory, blocked, numbers = json.loads(message)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    channel.send(b".")
    channel.detach()
    take_command_line(command)
    take_environment(environment)
    os.chdir(directory)
    _take_files(dict(zip(numbers, fds, strict=True)))
    # As with -u.
    sys.stdout, sys.stderr = (io.TextIOWrapper(io.FileIO(fd, "w", closefd=False), write_through=True) for fd in (1, 2))
    _take_arguments(command)
    _customize(0)
    code: object = 1
    try:
        code = be(command)
    except SystemExit as error:
        code = error.code
    finally:
        os._exit(code if isinstance(code, int) else 1)


def _be_nursery(command: list[str]) -> object:
    from dalsegno.agent.standby import nursery

    sys.argv = command[3:]
    nursery.main()
    return 0


def _be_master(command: list[str]) -> object:
    from dalsegno.master import cli

    sys.argv = command[2:]
    return cli.main()


class _Child(subprocess.Popen[Any]):
    """A child of this process that nobody has to start any more. `stdout`: what it says there, if that is a pipe."""

    def __init__(self, pid: int, command: Sequence[str], stdout: io.TextIOWrapper | None) -> None:
        self.pid, self.args, self.returncode = pid, command, None  # type: ignore[assignment]
        self.stdin, self.stdout, self.stderr = None, stdout, None
        self._child_created = True
        self._waitpid_lock = threading.Lock()


class _Subprocess:
    """What a module of the agent's sees as `subprocess`.

    Args:
        seeds: become the first processes that are started with this command.
        command: how its command line begins.
    """

    def __init__(self, seeds: list[_Seed], command: Sequence[str]) -> None:
        self._seeds = seeds
        self._command = list(command)

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def Popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        if not self._seeds or list(command[: len(self._command)]) != self._command:
            return subprocess.Popen(command, **options)
        seed = self._seeds.pop()
        assert options["start_new_session"]
        said, theirs = None, options["stdout"]
        if theirs == subprocess.PIPE:
            ours, other = os.pipe()
            said, theirs = open(ours, encoding="utf-8"), open(other, "wb")  # noqa: SIM115
        kept = {fd: fd for fd in options.get("pass_fds", ())}
        seed.grow(command, options, {1: theirs.fileno(), 2: options["stderr"].fileno(), **kept})
        if said is not None:
            theirs.close()
        return _Child(seed.pid, command, said)
