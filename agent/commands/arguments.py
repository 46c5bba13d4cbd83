"""The command line of `dlrover-run`: torchrun's flags, ours, and DLRover's where they mean something. No torch needed.

Each flag is also an environment variable, PET_ and its name in capitals, as torchrun has it; the flag wins.
`tests/unit/agent/commands/test_arguments.py` compares torchrun's part with the torch that is installed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from dalsegno.protos.contract import CONNECT_TIMEOUT_SECONDS, MASTER_OUTAGE_TIMEOUT_SECONDS, JobSettings, Variable
from dalsegno.protos.options import Parser, UsageError, file_path, job_id, nnodes, path_text, seconds

from ..storage.macros import SAVE_DIR, first_macro, macros_of
from .endpoint import find_master
from .size import settle_size
from .unused import IGNORED, UNUSED
from .values import (
    address,
    bandwidth,
    best_metric,
    bytes_of,
    commas,
    count_of,
    directory,
    glob,
    host,
    least_gain,
    log_level,
    metrics_file,
    more_than_none,
    node_name,
    node_timeout,
    nproc,
    resume_step,
    save_signal,
    seconds_or_auto,
    signals,
    streams,
)

__all__ = ["build_parser", "parse"]

_TRUE = ("1", "true", "yes", "on")
# Defaults.
_SETTINGS = JobSettings()


class _Parser(Parser):
    """Tells which values a flag takes that may have none."""

    def error(self, message: str) -> NoReturn:
        if message.startswith("argument --universal-checkpoint"):
            message = "--universal-checkpoint has no value, or =beside, or =gate"
        super().error(message)


class _Group:
    """Adds flags, each with its environment variable and both spellings, hyphens and underscores."""

    def __init__(self, group: Any, environ: Mapping[str, str]) -> None:
        self._group = group
        self._environ = environ

    def value(self, *flags: str, default: Any = None, type: Callable[[str], Any] = str, **extra: Any) -> None:
        """Adds a flag with a value. A value from the environment is checked like one from the command line.

        The defaults of the job's settings are those of `JobSettings`.
        """
        name = flags[-1].lstrip("-").replace("-", "_")
        given = self._environ.get(f"{Variable.FLAG}{name.upper()}", getattr(_SETTINGS, name, default))
        self._group.add_argument(*_spellings(flags), dest=name, default=given, type=type, **extra)

    def universal(self, flag: str, *, beside: str, gate: str) -> None:
        """A flag that may say how: with `=beside`, as without, or with `=gate`. Two settings of the job follow from it.

        Each is a flag of its own. An optional value would be taken from what follows, the script.
        """
        name = flag.lstrip("-").replace("-", "_")
        given = self._environ.get(f"{Variable.FLAG}{name.upper()}", "").lower()
        both = _spellings([flag]), _spellings([f"{flag}=beside"]), _spellings([f"{flag}=gate"])
        known = {"nargs": 0, "action": _Universal}
        wanted = given in (*_TRUE, "beside", "gate")
        self._group.add_argument(*both[0], *both[1], dest=name, const="beside", default=wanted, help=beside, **known)
        self._group.add_argument(
            *both[2], dest="universal_gate", const="gate", default=given == "gate", help=gate, **known
        )

    def switch(self, *flags: str, **extra: Any) -> None:
        """Adds a flag without a value."""
        name = flags[-1].lstrip("-").replace("-", "_")
        given = self._environ.get(f"{Variable.FLAG}{name.upper()}", "").lower() in _TRUE
        self._group.add_argument(*_spellings(flags), dest=name, action="store_true", default=given, **extra)


def _spellings(flags: Sequence[str]) -> list[str]:
    found: list[str] = []
    for flag in flags:
        found.append(flag)
        if flag.startswith("--") and "-" in flag[2:]:
            found.append("--" + flag[2:].replace("-", "_"))
    return found


def _add_memory(group: _Group) -> None:
    group.value(
        "--memory-replicas",
        type=count_of(0),
        metavar="N",
        help="other nodes that hold each node's part of a memory checkpoint; 0: there are none",
    )
    group.value(
        "--memory-budget",
        default=None,
        type=bytes_of,
        metavar="SIZE",
        help="most memory that they may take on this node, like 32GiB; default: what is free",
    )
    group.value(
        "--memory-bandwidth",
        default=None,
        type=bandwidth,
        metavar="SIZE",
        help="most of them that this node sends to others in a second, like 200MB; default: no limit",
    )


def _add_where_to_begin(group: _Group) -> None:
    group.switch("--new-run", help="start over although the job's last run is finished or has failed")
    group.value(
        "--resume-step",
        default=None,
        type=resume_step,
        metavar="N",
        help="go back to this step's checkpoint at this start, once; later ones are kept aside (N:2: once more)",
    )


def _add_growth(group: _Group) -> None:
    known: dict[str, Any] = {"type": seconds_or_auto, "metavar": "SECONDS|auto"}
    group.value("--grow-interval", help="least time between growths", **known)
    group.value(
        "--grow-wait",
        help="how long a growth of a script without a session waits for a checkpoint; then all workers restart",
        **known,
    )


def _add_for_plain_scripts(group: _Group) -> None:
    group.switch(
        "--deepspeed-load-universal",
        help="a script without a session: its engine loads universal files where it resumes from them, as with "
        "checkpoint.load_universal in its configuration",
    )
    group.value(
        "--checkpoint-glob",
        default="",
        type=glob,
        metavar="GLOB",
        help="which files or directories below '${save_dir}' are checkpoints; default: all that look like one",
    )
    group.value(
        "--save-signal",
        default="",
        type=save_signal,
        metavar="NAME",
        help="asks a script without a session to save before it is ended (SIGUSR1); default: it only gets SIGTERM",
    )
    group.value(
        "--best",
        type=best_metric,
        metavar="METRIC:min|max",
        help="a script without a session: the checkpoint with its best value of this metric is kept, too",
    )
    group.value("--best-min-delta", type=least_gain, metavar="X", help="how much better counts; default: anything")
    group.value(
        "--metrics-file",
        type=metrics_file,
        metavar="FILE",
        help="its metrics, as lines of JSON with a step; below '${save_dir}' unless absolute; default: metrics.jsonl",
    )
    group.value(
        "--initial-checkpoint",
        default=None,
        type=directory,
        metavar="DIR",
        help="what '${resume_dir}' names while the run has no checkpoint",
    )
    group.value("--keep-saves", default=0, type=count_of(0), metavar="N", help="last epochs whose saves stay; 0: all")


def _add_dlrover(group: _Group) -> None:
    group.switch(
        "--dlrover",
        help="the script uses DLRover's trainer classes: give it their environment and their saver (automatic where "
        "the script's text imports dlrover)",
    )
    group.switch(
        "--dlrover-fixes",
        help="our order and plan behind DLRover's classes: one global batch, each sample once, in any world",
    )
    group.switch(
        "--auto-config",
        help="where they are not given: as many nodes as NODE_NUM says, and a worker for each card (as DLRover's)",
    )


def _add_outages(group: _Group) -> None:
    group.value(
        "--master-outage-timeout",
        default=MASTER_OUTAGE_TIMEOUT_SECONDS,
        type=seconds,
        help="a node cut off from the master drains",
        metavar="SECONDS",
    )
    group.value(
        "--self-fence",
        default=0.0,
        type=seconds,
        help="no word of the master for so long: the workers save and stop until there is one; 0: they train on",
        metavar="SECONDS",
    )
    group.value(
        "--command-fd",
        default=None,
        type=count_of(3),
        metavar="N",
        help="the rest of the command line comes there, as JSON; imports begin before",
    )
    group.value(
        "--tell-fd", default=None, type=count_of(3), metavar="N", help="tell there, as lines of JSON, what happens"
    )


def _add_credentials(group: _Group) -> None:
    for flag, text in (
        ("--token-file", "token for --master (or DALSEGNO_TOKEN: itself)"),
        ("--tls-ca", "speak TLS, also between agents; the master's authority (PEM)"),
        ("--tls-cert", "this agent's certificate (PEM)"),
        ("--tls-key", "its key (PEM)"),
    ):
        group.value(flag, default=None, type=path_text, metavar="FILE", help=text)


def _add_ours(group: _Group) -> None:
    as_seconds = {"metavar": "SECONDS"}
    group.value("--job-id", default=None, type=job_id, help="the job; default: from user, script and arguments")
    group.value(
        "--master",
        default=None,
        type=address,
        metavar="HOST:PORT",
        help="the job's master, several with commas (also DLROVER_MASTER_ADDR); default: an embedded one",
    )
    text = "one file system that all nodes see"
    group.value("--checkpoint-dir", default="checkpoints", type=path_text, metavar="DIR", help=text)
    group.universal(
        "--universal-checkpoint",
        beside="make universal files at each change of shape, and hand this flag to the script when it resumes from "
        "them (one with a session needs none); a world that can load the others' shards trains meanwhile; without it "
        "they are made only where ranks cannot",
        gate="each world waits until they are there, and loads them",
    )
    _add_for_plain_scripts(group)
    group.value("--node-unit", type=count_of(1), metavar="N", help="worlds have a multiple of N nodes")
    group.value("--node-name", type=node_name, default="", metavar="NAME", help="default: the host name and a number")
    group.value("--node-timeout", type=node_timeout, help="silence after which a node is dead", **as_seconds)
    group.value("--drain-timeout", type=more_than_none, help="notice that SIGTERM gives", **as_seconds)
    group.value("--join-timeout", type=more_than_none, help="time to stop workers and join", **as_seconds)
    group.value("--stall-timeout", type=seconds, help="no step for so long: stuck; 0: never", **as_seconds)
    _add_growth(group)
    group.value("--wait-for-nodes", type=seconds, help="give up waiting; default: never", **as_seconds)
    _add_outages(group)
    group.value("--quiet-time", type=seconds, help="wait for more nodes at a start", **as_seconds)
    group.value(
        "--connect-timeout",
        default=CONNECT_TIMEOUT_SECONDS,
        type=more_than_none,
        help="wait for the master's answer",
        **as_seconds,
    )
    group.value("--keep-checkpoints", type=count_of(0), metavar="N", help="0: all")
    group.switch("--make-room", help="no room for the next checkpoint: the oldest of these go, but two")
    _add_memory(group)
    _add_dlrover(group)
    group.value("--max-restarts", type=count_of(0), metavar="N", help="failures without progress that the job survives")
    group.value(
        "--run-ahead",
        default="auto",
        choices=["auto", "always", "never"],
        help="start the script beside the training, up to where it needs its rank; auto: scripts with a session",
    )
    group.value(
        "--log-level",
        default="INFO",
        type=log_level,
        metavar="LEVEL",
        help="of agent.log: DEBUG, INFO, WARNING, ERROR",
    )
    group.value(
        "--trace-dir",
        default=None,
        type=path_text,
        metavar="DIR",
        help="note there what happens when at each change of the world (dalsegno pauses DIR)",
    )
    _add_where_to_begin(group)
    _add_credentials(group)


def _add_torchrun(group: _Group) -> None:
    group.value("--nnodes", type=nnodes, metavar="N|MIN:MAX", help="number of nodes, or their range; default: 1")
    group.value("--nproc-per-node", type=nproc, metavar="N", help="workers per node, or auto, cpu, gpu; default: 1")
    group.value("--rdzv-backend", default="dalsegno", help="c10d: the node at --rdzv-endpoint hosts the master")
    group.value("--rdzv-endpoint", default="", metavar="HOST:PORT", help="as --master, or the node that hosts it")
    group.value("--rdzv-id", default="none", help="as --job-id")
    group.value("--rdzv-conf", default=None, help="no effect: for plain torchrun")
    group.switch("--standalone", help="a master of its own (the default)")
    group.value("--monitor-interval", default=None, type=float, help="no effect: exits are events")
    group.value("--start-method", default=None, choices=["spawn", "fork", "forkserver"], help="no effect for scripts")
    group.value("--event-log-handler", default="null", help="as torchrun")
    group.value("--role", default="default", help="name of the workers in logs")
    group.switch("-m", "--module", help="run the script as a module, like python -m")
    group.switch("--no-python", help="run the script as a program of its own")
    group.switch("--run-path", help="no effect: workers run that way anyway")
    group.value("--log-dir", default=None, type=path_text, metavar="DIR", help="default: one of its own below TMPDIR")
    group.value("-r", "--redirects", default="2", type=streams, help="output into files: 0 none, 1 out, 2 err, 3 both")
    group.value("-t", "--tee", default="0", type=streams, help="output into files and to the console")
    group.value("--local-ranks-filter", default="", help="show only the output of these local ranks")
    group.value("--duplicate-stdout-filters", default=[], type=commas, help="as torchrun")
    group.value("--duplicate-stderr-filters", default=[], type=commas, help="as torchrun")
    group.value("--local-addr", default=None, type=host, metavar="HOST", help="where other nodes reach this one")
    group.value("--logs-specs", default=None, help="as torchrun")
    group.value("--numa-binding", default=None, help="as torchrun")
    group.value("--signals-to-handle", default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", type=signals, help="notices to leave")
    group.value("--shutdown-timeout", default=None, type=int, help="no effect: workers have saved before they stop")
    group.switch("--virtual-local-rank", help="as torchrun")


def _add_meeting(group: Any, environ: Mapping[str, str]) -> None:
    """torchrun's flags for the node that hosts the master. Torch's launcher reads them under their own names."""
    for name, metavar, text in (
        ("addr", "HOST", "where several nodes meet: the node with this address hosts the master"),
        ("port", "PORT", "of --master-addr; default: 29500"),
    ):
        group.add_argument(
            *_spellings([f"--master-{name}"]),
            dest=f"meet_{name}",
            default=environ.get(f"{Variable.FLAG}MASTER_{name.upper()}"),
            metavar=metavar,
            action=_Noted,
            help=text,
        )


def build_parser(environ: Mapping[str, str] = os.environ) -> argparse.ArgumentParser:
    """The whole command line. A variable that is empty, as templates leave them, is not set."""
    environ = {name: value for name, value in environ.items() if value}
    parser = _Parser(
        prog="dlrover-run",
        description="Elastic training that goes on from the last mark. Every flag is also an environment variable: "
        "PET_ and its name in capitals.",
        allow_abbrev=False,
    )
    _add_ours(_Group(parser.add_argument_group("elastic training"), environ))
    as_torchrun = parser.add_argument_group("as torchrun")
    _add_torchrun(_Group(as_torchrun, environ))
    _add_meeting(as_torchrun, environ)
    hidden = parser.add_argument_group("accepted, without effect")
    for flag, takes_value, why in IGNORED:
        name = flag.lstrip("-").replace("-", "_")
        given = environ.get(f"{Variable.FLAG}{name.upper()}")
        known: dict[str, Any] = {"dest": f"ignored_{name}", "default": given, "help": why, "metavar": "VALUE"}
        if not takes_value:
            known |= {"metavar": None, "nargs": 0, "action": _Given, "default": (given or "").lower() in _TRUE or None}
        hidden.add_argument(*_spellings([flag]), **known)
    parser.set_defaults(flags=())
    parser.add_argument("training_script", help="the script, or the module with -m")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its own arguments")
    return parser


class _Universal(argparse.Action):
    """Universal files are wanted, made as its constant says."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.universal_checkpoint, namespace.universal_gate = True, self.const == "gate"


class _Noted(argparse.Action):
    """Notes in `flags` that a value came from a flag, and not from its variable."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, values)
        namespace.flags = (*namespace.flags, self.dest)


class _Given(argparse.Action):
    """Notes that a flag without a value was given."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, True)


def _check_best(options: argparse.Namespace) -> None:
    """Checks that `--best` and its flags go together.

    Raises:
        UsageError: they do not fit.
    """
    if options.best is None:
        given = [name for name in ("best_min_delta", "metrics_file") if getattr(options, name) is not None]
        if given:
            raise UsageError(f"--{given[0].replace('_', '-')} says more about --best=METRIC:min|max: give that, too")
    elif SAVE_DIR not in macros_of(options.training_script_args):
        raise UsageError(
            "--best is for a script that gets '${save_dir}': a session says itself which is best (session.improved)"
        )


def parse(
    arguments: Sequence[str] | None, environ: Mapping[str, str] = os.environ, *, here: bool = True
) -> argparse.Namespace:
    """Parses the command line, and checks what can be checked without torch, the network or files.

    `here`: it is for this machine, so that directories which it names are there.

    Raises:
        UsageError: bad input.
    """
    parser = build_parser(environ)
    if not here:
        for action in parser._actions:
            action.type = file_path if action.type is directory else action.type
    options = parser.parse_args(arguments)
    options.unused = []
    for flag, default, _ in UNUSED:
        name = flag.replace("-", "_")
        given = getattr(options, name)
        if given is None or given is False:
            setattr(options, name, default)
        else:
            options.unused.append(flag)
    for flag in ("deepspeed_load_universal", "dlrover_fixes"):
        if getattr(options, flag) and options.no_python:
            raise UsageError(f"--{flag.replace('_', '-')} needs a script in Python, which --no-python says it is not")
    own = options.training_script_args
    if (macro := first_macro(own)) and SAVE_DIR not in macros_of(own):
        raise UsageError(f"'{macro}' without '${{save_dir}}': only what the script saves there can be resumed from")
    _check_best(options)
    if options.module and options.no_python:
        raise UsageError("--module and --no-python exclude each other: drop one")
    settle_size(options, environ)
    options.min_nodes, options.max_nodes = options.nnodes
    find_master(options, environ)
    if options.job_id is None and options.rdzv_id not in ("none", ""):
        try:
            options.job_id = job_id(options.rdzv_id)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"argument --rdzv-id: {error}") from error
    if (options.tls_cert is None) != (options.tls_key is None):
        raise UsageError("--tls-cert and --tls-key belong together")
    options.nnodes = f"{options.min_nodes}:{options.max_nodes}"  # torchrun's own code reads it, too
    if -(-options.min_nodes // options.node_unit) * options.node_unit > options.max_nodes:
        raise UsageError(
            f"--node-unit={options.node_unit} does not fit --nnodes={options.nnodes}: "
            "worlds have a multiple of it, and none lies between MIN and MAX"
        )
    return options
