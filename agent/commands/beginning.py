"""What an agent does before it imports torch: its directories, its log, its keeper, and its first nursery.

A nursery's imports take longer than the agent's own, and are what a first step waits for. So they begin as soon as the
command line is known to be good, and run beside the agent's. Nothing here imports torch or gRPC.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from dalsegno.protos.contract import Variable
from dalsegno.protos.options import UsageError
from dalsegno.protos.shortage import file_limit, prove_descriptors, prove_room, starting
from dalsegno.protos.text import few
from dalsegno.protos.trace import trace_into

from ..own_modules import first_path
from ..processes.lifeline import Lifeline
from ..processes.signals import SignalWatch
from ..script import Script, early_names, modules_of
from ..shell.console import make_log_dir, set_up_logging
from ..shell.output import Output
from ..standby.nursery_start import NurserySpec, StartedNursery, start_nursery
from ..storage.complaint import not_made
from ..storage.job_directory import JobDirectory, StorageError
from ..storage.preparing import prepare
from .size import cards
from .tuning import tune

__all__ = ["Beginning", "Where", "kept_back", "made_directories", "nursery_spec", "script_of"]

logger = logging.getLogger(__name__)

# Files that an agent with one worker has open at most, beside those at its beginning: 45 in all, as measured.
_MORE_DESCRIPTORS = 28

# Secrets; and variables by which DLRover's client library, if a script uses it, would take our master for its own.
_NOT_FOR_WORKERS = (Variable.MASTER, Variable.TOKEN, Variable.ADMIN_TOKEN)
# Torch sets it for nodes with more than one worker.
_THREADS = "OMP_NUM_THREADS"


class Where:
    """The present `job/node/epoch/step`, for every line of the log."""

    def __init__(self, job_id: str) -> None:
        self.now: Callable[[], str] = lambda: f"{job_id}/-/0/0"

    def __call__(self) -> str:
        return self.now()


class Beginning:
    """An agent's beginning. Use it as a context manager around all that the agent does; main thread.

    Args:
        options: the checked command line.
        notices: lines for people.
        watch: the source of signals.
        output: where people read.

    Attributes:
        token: the job's token, which was in the environment; None: it was not.
        directory: the job's directory, prepared.
        log_dir: where this agent's logs are.
        where: the beginning of their lines.
        lifeline: the node's lifeline.
        early: a nursery that imports what the workers need; None: there is none.

    Raises:
        UsageError: bad input that only now came to light.
        OSError: no process can be started.
    """

    def __init__(self, options: argparse.Namespace, notices: Sequence[str], watch: SignalWatch, output: Output) -> None:
        self.token = os.environ.get(Variable.TOKEN)
        for name in _NOT_FOR_WORKERS:
            os.environ.pop(name, None)
        tune(os.environ)
        self.directory, self.log_dir = made_directories(options, output.console.say)
        self.where = Where(options.job_id)
        level = logging.getLevelName(options.log_level)
        set_up_logging(self.log_dir / "agent.log", self.where, ("dalsegno",), level)
        output.divert(self.log_dir / "output.log")
        for line in notices:
            output.console.say(line)
        with starting("the agent"):
            prove_room()
            prove_descriptors(_MORE_DESCRIPTORS)
        self.lifeline = Lifeline()
        try:
            self.early = self._start_early(options, [int(number) for number in watch.signals])
        except BaseException:
            self.lifeline.close()
            raise

    def __enter__(self) -> Beginning:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop_early()
        self.lifeline.close()

    def take_early(self) -> StartedNursery | None:
        """The early nursery, for an agent that ends it from now on."""
        early, self.early = self.early, None
        return early

    def drop_early(self) -> None:
        """Ends the early nursery if nobody has taken it."""
        if (early := self.take_early()) is not None:
            early.end(self.lifeline)

    def _start_early(self, options: argparse.Namespace, notices: Sequence[int]) -> StartedNursery | None:
        environment = {**os.environ, **self.lifeline.environment()}
        try:
            spec = nursery_spec(options, self.log_dir / "standby.log", notices, environment)
            return None if spec is None else start_nursery(spec, self.lifeline, low_priority=False)
        except OSError as error:
            # The pool tries again.
            logger.warning("%s", error)
            return None


def made_directories(
    options: argparse.Namespace, say: Callable[[str, bool], None] = lambda text, warning: None
) -> tuple[JobDirectory, Path]:
    """Makes the directories that a command line names: the job's, and this agent's for logs, which it returns.

    This process, and all that it starts, note from now on what happens when, if that is wanted.

    Raises:
        UsageError: one cannot be made, or written.
    """
    directory = JobDirectory(Path(options.checkpoint_dir).absolute(), options.job_id)
    try:
        prepare(directory, say)
    except StorageError as error:
        raise UsageError(str(error)) from error
    try:
        log_dir = make_log_dir(options.log_dir, options.job_id)
    except OSError as error:
        raise UsageError(_without_logs(options.log_dir, error)) from error
    try:
        _trace_into(options.trace_dir)
    except OSError as error:
        raise UsageError(not_made("--trace-dir", options.trace_dir, error)) from error
    return directory, log_dir


def _without_logs(given: str | None, error: OSError) -> str:
    if given:
        return not_made("--log-dir", given, error)
    # Python finds no temporary directory where nothing can be written at all.
    nowhere = isinstance(error, FileNotFoundError) and error.filename is None
    if nowhere and (limit := file_limit()):
        return f"{error}; {limit}: raise that limit"
    why = error.strerror or error
    return f"no directory for logs can be made ({why}): choose another TMPDIR, or give --log-dir"


def script_of(options: argparse.Namespace) -> Script:
    """What the workers run, as `config_from_args` of torch's launcher composes it."""
    arguments = (options.training_script, *options.training_script_args)
    if options.no_python:
        return Script(options.training_script, tuple(options.training_script_args))
    return Script(
        os.environ.get("PYTHON_EXEC", sys.executable), ("-u", *(("-m",) if options.module else ()), *arguments)
    )


def nursery_spec(
    options: argparse.Namespace, log: Path, notices: Sequence[int], environment: Mapping[str, str]
) -> NurserySpec | None:
    """What this agent's pool is going to start its first nursery with, as far as it is known without torch.

    The pool compares, and starts another one if this was wrong.

    Returns:
        None: no nursery is wanted (`ElasticAgent` says why).
    """
    script = script_of(options)
    if not _has_nursery(script, options):
        return None
    environment = dict(environment)
    if _THREADS not in environment and _seems_to_have_several(options.nproc_per_node, environment):
        environment[_THREADS] = "1"
    first = first_path(script.source)
    return NurserySpec(modules_of(script.source), log, tuple(notices), environment, first=first)


def kept_back(options: argparse.Namespace) -> list[str]:
    """A line if standby workers do without some imports, because the script sets what is read there."""
    script = script_of(options)
    names = early_names(script.source) if _has_nursery(script, options) else []
    if not names:
        return []
    return [
        f"the script sets {few(names)} before its imports, which read that: its workers make these anew at each start,"
        " and start later; set for dlrover-run instead, it costs nothing"
    ]


def _has_nursery(script: Script, options: argparse.Namespace) -> bool:
    return script.adoptable and not options.virtual_local_rank and options.numa_binding is None


def _seems_to_have_several(nproc: str, environment: Mapping[str, str]) -> bool:
    """Whether this node is going to have more than one worker; a guess where only torch can count the devices."""
    if nproc.isdecimal():
        return int(nproc) > 1
    if nproc == "gpu":
        return cards(environment) > 1
    return ((nproc != "cpu" and cards(environment)) or len(os.sched_getaffinity(0))) > 1


def _trace_into(directory: str | None) -> None:
    """Makes this process, and all that it starts, note what happens when.

    Raises:
        OSError: the directory cannot be made, or not be written.
    """
    if directory is not None:
        os.makedirs(directory, exist_ok=True)
        # A mark that cannot be written says nothing: it is made in the midst of a training.
        with tempfile.TemporaryFile(dir=directory):
            pass
        trace_into(os.path.abspath(directory))
