"""Turns a forked process into a user's script, as the interpreter would have run it."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import dataclasses
import os
import runpy
import sys
import threading
import types
from importlib.machinery import SourceFileLoader
from typing import NoReturn

from dalsegno.protos import exiting, staying

from ..own_modules import take_first_path
from . import hooks
from .run_ahead import RunAhead, report_of
from .staying import Staying, redirect
from .word import Word

__all__ = ["Assignment", "become", "is_of_session", "run_to_end"]

_SESSION_PACKAGE = "dalsegno.elastic"
# The modules that import it for torch.
_HANDLERS = ("torch.distributed.elastic.rendezvous", "dalsegno.agent.shell")
# Its rooms that agents import, too.
_OF_AGENTS = ("checkpoint", "universal")


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What a worker runs.

    Attributes:
        arguments: the script's path, or the module's name, and its own arguments.
        module: `arguments[0]` names a module.
        environment: the whole environment; variables that the process had before are dropped.
        cwd: the working directory.
        stdout, stderr: files to write to instead of the agent's own streams.
        helper: it is a module of ours, which finds nothing of the user's first.
    """

    arguments: list[str]
    module: bool
    environment: dict[str, str]
    cwd: str
    stdout: str | None = None
    stderr: str | None = None
    helper: bool = False


def _redirect(path: str | None, saved: int, target: int) -> None:
    if path is not None:
        redirect(path, target)
        return
    os.dup2(saved, target)
    os.close(saved)


def _report_and_end(error: BaseException) -> None:
    """Prints the traceback as the interpreter would have, without our own frames, and exits with 1."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    _end(1)


def _end(code: object) -> NoReturn:
    """Ends this process as the interpreter would, but without the destructors of C++ libraries.

    Threads of collective libraries sometimes meet these destructors, and abort a process that has done all its work
    (exit code -6, "terminate called without an active exception").
    """
    status = 0 if code is None else code if isinstance(code, int) else 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    # As Py_FinalizeEx begins: wait for threads that are no daemons, then run the handlers, then flush the streams.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status & 0xFF)


def _run_script(path: str) -> None:
    """Runs a file as `__main__`, for good: what outlives the last line (threads, atexit) still finds its module.

    `__file__` is absolute, as Python has made it since 3.9, so that it still leads there when the script has gone to
    another directory. Python leaves `..` in it, too: behind a symbolic link that is another directory.
    """
    path = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    take_first_path(os.path.dirname(os.path.realpath(path)))
    loader = SourceFileLoader("__main__", path)
    with open(path, "rb") as file:
        # Without `dont_inherit` the script would get this module's __future__ flags.
        code = compile(file.read(), path, "exec", dont_inherit=True)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=path, __loader__=loader, __builtins__=builtins, __cached__=None)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def is_of_session(module: str) -> bool:
    """Whether only a script that wants something of ours imports this module.

    Torch imports the rest: with `torch.distributed.checkpoint` come all rendezvous handlers, ours among them.
    """
    room = module.removeprefix(f"{_SESSION_PACKAGE}.").partition(".")[0]
    return module.startswith(f"{_SESSION_PACKAGE}.") and room not in _OF_AGENTS


def _by_torch() -> bool:
    """Whether torch is importing its rendezvous handlers, and with ours the package: no script has asked for it."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(_HANDLERS):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


class _SessionImport:
    """An import hook that reports once that this process imports what `session()` comes from. It finds no module.

    It stays where it is: an import that is under way, here or on another thread, would pass over the next finder.
    """

    def __init__(self, word: Word) -> None:
        self._word: Word | None = word

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        word = self._word
        if word is not None and (is_of_session(name) or (name == _SESSION_PACKAGE and not _by_torch())):
            self._word = None
            word.say({"imports": True})


def become(
    assignment: Assignment,
    console: tuple[int, int],
    fresh: bool,
    word: Word | None = None,
    *,
    ahead: bool = False,
    plainly: bool = False,
) -> None:
    """Turns this process into the script, with a `fresh` interpreter or in this one.

    Args:
        word: The way to the nursery; None: there is none.
        ahead: It has no place in a world yet, and runs as far as it can without one (`run_ahead`).
        plainly: See there.
    """
    os.environ.clear()
    os.environ.update(assignment.environment)
    os.chdir(assignment.cwd)
    running = RunAhead(word, console, plainly=plainly) if ahead and word is not None else None
    if running is None:
        _redirect(assignment.stdout, console[0], 1)
        _redirect(assignment.stderr, console[1], 2)
    hooked = bool(hooks.wanted(assignment.environment))
    if fresh:
        words = ("-u", *(["-m"] if assignment.module else []), *assignment.arguments)
        os.execv(sys.executable, [sys.executable, *(hooks.arguments_for(words) if hooked else words)])
    hooks.install(assignment.environment)
    sys.argv = list(assignment.arguments)
    if word is not None and not any(map(is_of_session, sys.modules)):
        sys.meta_path.insert(0, _SessionImport(word))
    if word is not None:
        staying.offer(Staying(word))
    if running is not None:
        running.begin()
    first = "" if assignment.helper else assignment.cwd
    run_to_end(assignment.arguments[0], assignment.module, first, running)


def run_to_end(name: str, module: bool, cwd: str, running: RunAhead | None = None) -> NoReturn:
    """Runs the script or module of this name as `__main__`, and ends the process as it would have ended.

    Args:
        name: the script's path, or the module's name; `sys.argv` has the arguments.
        module: it names a module.
        cwd: the working directory, which comes first for a module; "": nothing does.
        running: it runs ahead.
    """
    try:
        if module:
            take_first_path(cwd)
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            _run_script(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if running is not None:
            # The reason may be that it runs ahead. If it is not, the error comes again in a worker that does not.
            running.meet("its end") if code in (0, None) else running.failed(report_of(error))
        if isinstance(error, SystemExit):
            exiting.exits(error)
            _end(code)
        _report_and_end(error)
    if running is not None:
        running.meet("its end")
    _end(None)
