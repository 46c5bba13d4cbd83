"""`dlrover-run`, also `dalsegno-run`: checks its command line, then runs one agent.

Nothing here needs torch, so that help and bad input are answered at once. `beginning` starts what the workers' imports
need, and `launch` has the rest.
"""

from __future__ import annotations

import argparse
import getpass
import hashlib
import importlib.util
import logging
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

from dalsegno.protos.contract import EXIT_LEFT, EXIT_USAGE
from dalsegno.protos.options import UsageError
from dalsegno.protos.shortage import shortage

from ..dlrover import scripts
from ..processes.signals import SignalWatch, signals_of
from ..script import ScriptError, check_script, dlrover_text, main_file
from ..shell.output import Output
from .ahead import command_line, launcher
from .arguments import parse
from .installed import outdated_dlrover
from .size import idle_cards
from .unused import ignored

__all__ = ["default_job_id", "main", "run"]

# Seconds that the last line of an early leave may take to a terminal that does not read.
_LAST_LINE_SECONDS = 1.0


def default_job_id(options: argparse.Namespace, user: str) -> str:
    """A job id that is the same for the same user, script and script arguments: a second terminal joins the first."""
    script = options.training_script
    if not options.module and not options.no_python:
        script = os.path.realpath(script)
    key = "\0".join([user, script, *options.training_script_args])
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", Path(script).stem).strip(".-_") or "job"
    return f"{stem[:64]}-{hashlib.sha256(os.fsencode(key)).hexdigest()[:8]}"


def user_name() -> str:
    """Of whoever runs this; the number of one that no file knows, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # as Python has it before 3.13, and since
        return str(os.getuid())


def check_installation() -> None:
    """Checks that the trainer's extra is installed.

    Raises:
        UsageError: it is not.
    """
    if importlib.util.find_spec("torch") is None:
        raise UsageError("torch is missing; install the trainer's extra: pip install 'dalsegno[train]'")


def check_dlrover(options: argparse.Namespace) -> list[str]:
    """Says what of DLRover's client library, if the script uses it, does not do what one would think.

    Raises:
        UsageError: the script needs DLRover's master.
    """
    if options.no_python:
        return []
    script = options.training_script
    source = script if options.module else main_file(script)
    # What a module of the script's only has may serve other scripts: it is refused when it makes such a thing.
    if line := scripts.refusal(script, scripts.uses(dlrover_text(source, modules=False))):
        raise UsageError(line)
    text = dlrover_text(source)
    found = scripts.uses(text)
    lines = outdated_dlrover(found)
    if options.dlrover_fixes:
        return lines + (scripts.fixed(found) if text else scripts.fixed_unread(script))
    return lines + scripts.warnings(found, options.min_nodes, options.max_nodes, options.node_unit)


def _check_descriptor(tell_fd: int | None) -> None:
    try:
        if tell_fd is not None:
            os.fstat(tell_fd)
    except (OSError, OverflowError) as error:
        raise UsageError(f"argument --tell-fd: {tell_fd} is no descriptor that is open here") from error


def leave_early(number: int, output: Output) -> NoReturn:
    """Handles a signal before there is an agent: no worker runs, and no master knows this node.

    It ends the process directly, because an exception would mostly be raised inside somebody else's import.
    """
    line = f"{signal.Signals(number).name}: left on notice; no workers were running here"
    output.console.say(line)
    output.console.flush(_LAST_LINE_SECONDS)
    os._exit(EXIT_LEFT)


def say_it_stops(has_workers: bool, output: Output) -> None:
    """Says what Ctrl-Z does, while somebody can still read it."""
    workers = "its workers train on, and nothing that they save is recorded" if has_workers else "it has no workers now"
    output.console.say(
        f"Ctrl-Z: this agent stands still until `fg`; {workers}. To pause the run, press Ctrl-C, and give the same"
        " command later",
        warning=True,
    )
    output.console.flush(_LAST_LINE_SECONDS)


def is_at_terminal() -> bool:
    """Whether somebody could press Ctrl-Z here. Elsewhere SIGTSTP does what it does to any process."""
    return any(os.isatty(fd) for fd in (0, 1, 2))


def run(arguments: Sequence[str] | None, environ: Mapping[str, str] = os.environ) -> int:
    """Runs one agent and returns its exit code (docs/contracts.md). Main thread only.

    Args:
        arguments: its command line; None: this process's.
        environ: variables that may stand for flags.
    """
    try:
        return run_with_output(arguments, environ)
    except (OSError, RuntimeError, MemoryError, ImportError) as error:
        if not (why := shortage(error)):
            raise
        print(f"dlrover-run: error: the agent cannot be started: {why}", file=sys.stderr)
        return EXIT_USAGE


def run_with_output(arguments: Sequence[str] | None, environ: Mapping[str, str]) -> int:
    """The same, once there is a thread for its output."""
    with Output() as output:
        try:
            options = parse(arguments, environ)
            signals = signals_of(options.signals_to_handle)
            stopping = partial(say_it_stops, output=output) if is_at_terminal() else None
            with SignalWatch(signals, partial(leave_early, output=output), stopping=stopping) as watch:
                return run_checked(options, watch, output)
        except UsageError as error:
            output.console.say(f"error: {error}")
            return EXIT_USAGE
        except (OSError, RuntimeError, MemoryError, ImportError) as error:
            if not (why := shortage(error)):
                raise
            output.console.say(f"error: {why}")
            return EXIT_USAGE


def run_checked(options: argparse.Namespace, watch: SignalWatch, output: Output) -> int:
    """The same for a command line that was parsed.

    Raises:
        UsageError: bad input that only now came to light.
    """
    if options.command_fd is not None:
        raise UsageError("--command-fd: the script comes on that descriptor, with the rest of the command line")
    _check_descriptor(options.tell_fd)
    try:
        check_script(options.training_script, module=options.module, no_python=options.no_python)
    except ScriptError as error:
        raise UsageError(str(error)) from error
    check_installation()
    if options.deepspeed_load_universal and importlib.util.find_spec("deepspeed") is None:
        raise UsageError("--deepspeed-load-universal: deepspeed is not installed here")
    of_dlrover = check_dlrover(options)
    if options.job_id is None:
        options.job_id = default_job_id(options, user_name())
        options.job_id_is_default = True
    from .beginning import Beginning, kept_back  # all that the checks above can do without

    notices = [*ignored(options), *idle_cards(options, os.environ), *of_dlrover, *kept_back(options)]
    with Beginning(options, notices, watch, output) as beginning:
        launch = launcher()  # the nursery's imports run beside it
        return int(launch.launch(options, beginning, watch, output.console))


def main() -> None:
    """The console script."""
    # Whoever started us may have blocked some, as threads of C++ programs do, and workers inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    try:
        found = command_line(sys.argv[1:])
        code = run(*found) if found is not None else EXIT_LEFT
    except UsageError as error:
        print(f"dlrover-run: error: {error}", file=sys.stderr)
        code = EXIT_USAGE
    logging.shutdown()
    # Everything was ended in order. Only a thread that reads a hanging file system may be left, and nobody waits for
    # it.
    os._exit(code)


if __name__ == "__main__":
    main()
