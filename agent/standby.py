"""A standby worker: a process that has imported the heavy modules and waits to be told what to run.

Executed as `python -u -m dalsegno.agent.standby --channel FD …` by `standby_pool`. Over the channel (a socket,
JSON messages behind four bytes of length) it says once what it has imported, and is then given one `Assignment`:
it becomes that script, as `python -u script.py …` or `python -u -m module …` would have run it, with the assignment's
environment, arguments, working directory and output. End of the channel without one: it ends.

It must not touch CUDA: a context would hold memory of a device that the running workers use.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import importlib
import json
import os
import runpy
import signal
import socket
import struct
import sys
import threading
import types
from importlib.machinery import SourceFileLoader

__all__ = ["Assignment", "receive", "send"]

_HEADER = struct.Struct(">I")
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What a standby worker becomes.

    Attributes:
        arguments: the script's path, or the module's name, and its own arguments.
        module: `arguments[0]` names a module.
        environment: all of it; what the process had before is dropped.
        cwd: the working directory.
        stdout, stderr: files to write to instead of what the agent itself writes to.
    """

    arguments: list[str]
    module: bool
    environment: dict[str, str]
    cwd: str
    stdout: str | None = None
    stderr: str | None = None


def send(channel: socket.socket, value: dict[str, object]) -> None:
    """Writes one JSON message."""
    data = json.dumps(value).encode()
    channel.sendall(_HEADER.pack(len(data)) + data)


def receive(channel: socket.socket) -> dict[str, object] | None:
    """Reads one JSON message; None at the end of the channel."""
    header = _read(channel, _HEADER.size)
    data = _read(channel, *_HEADER.unpack(header)) if header else None
    return dict(json.loads(data)) if data else None


def _read(channel: socket.socket, count: int) -> bytes | None:
    received = bytearray()
    while len(received) < count:
        data = channel.recv(count - len(received))
        if not data:
            return None
        received += data
    return bytes(received)


def _die_with_parent(parent: int) -> None:
    """In addition to the keeper: SIGKILL when the thread that spawned us ends (prctl(2))."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the agent is gone")


def _import_all(modules: list[str], niceness: int, failed: dict[str, str]) -> None:
    if niceness:
        # On Linux this is a property of the calling thread: the main thread, which is going to train, keeps its own,
        # because a process without privileges could never take it back.
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # Anything may come out of a foreign module; the script itself will say it again.
            failed[name] = f"{type(error).__name__}: {error}"


def warm_up(modules: list[str], niceness: int) -> dict[str, object]:
    """Imports the modules, on a thread of lower priority if `niceness` says so. Returns what to report."""
    if niceness and "torch" in modules:
        # OpenBLAS starts its threads when numpy is imported, and they would keep the lower priority for good.
        _import_all(["numpy"], 0, {})
    failed: dict[str, str] = {}
    thread = threading.Thread(target=_import_all, args=(modules, niceness, failed), name="warm-up")
    thread.start()
    thread.join()
    torch = sys.modules.get("torch")
    cuda = bool(torch is not None and torch.cuda.is_initialized())
    return {"failed": failed, "cuda_initialized": cuda}


def _redirect(path: str | None, saved: int, target: int) -> None:
    source = saved if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(source, target)
    os.close(source)


def _report_and_end(error: BaseException) -> None:
    """Prints the traceback as the interpreter would have, without our own frames, and exits with 1."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    raise SystemExit(1) from None


def _set_first_path(path: str) -> None:
    # With -P or PYTHONSAFEPATH the interpreter has put nothing of its own in front.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = path


def _run_script(path: str) -> None:
    """Runs a file as `__main__`, for good: what outlives the last line (threads, atexit) still finds its module."""
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    loader = SourceFileLoader("__main__", path)
    with open(path, "rb") as file:
        # Without `dont_inherit` the script would get this module's __future__ flags.
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __loader__=loader, __builtins__=__builtins__, __cached__=None)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def become(assignment: Assignment, console: tuple[int, int]) -> None:
    """Turns this process into the script. Does not return normally when the script exits by itself."""
    os.environ.clear()
    os.environ.update(assignment.environment)
    os.chdir(assignment.cwd)
    _redirect(assignment.stdout, console[0], 1)
    _redirect(assignment.stderr, console[1], 2)
    sys.argv = list(assignment.arguments)
    try:
        if assignment.module:
            _set_first_path(assignment.cwd)
            runpy.run_module(assignment.arguments[0], run_name="__main__", alter_sys=True)
        else:
            _run_script(assignment.arguments[0])
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:
        _report_and_end(error)


def main() -> None:
    """Warms up, reports, waits for the assignment, becomes it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int, required=True)
    parser.add_argument("--console", type=int, nargs=2, required=True)
    parser.add_argument("--parent", type=int, default=0)
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("modules", nargs="*")
    options = parser.parse_args()
    for fd in (options.channel, *options.console):
        os.set_inheritable(fd, False)
    if options.parent:
        _die_with_parent(options.parent)
    channel = socket.socket(fileno=options.channel)
    report = warm_up(options.modules, options.nice)
    try:
        send(channel, report)
        message = receive(channel)
    except (BrokenPipeError, ConnectionResetError):
        message = None
    if message is None:
        return
    channel.close()
    become(Assignment(**message), (options.console[0], options.console[1]))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
