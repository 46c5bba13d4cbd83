"""`dalsegno relay`: carries a run on from this machine, or looks at one."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dalsegno.protos.contract import JobSettings
from dalsegno.protos.options import Parser, UsageError, file_path
from dalsegno.protos.shortage import CannotStartError

from . import looking
from .milestones.access import add_tls

__all__ = ("ACTIONS", "Action", "run")


@dataclass(frozen=True)
class Action:
    """One of the words after `dalsegno relay`.

    Attributes:
        text: what it does, for `--help`.
        add: adds its arguments to the parser.
        act: does it, and returns the exit code. It may raise `UsageError`.
    """

    text: str
    add: Callable[[argparse.ArgumentParser], None]
    act: Callable[[argparse.Namespace], int]


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=file_path, metavar="run.yaml", help="the run")


def _add_pod(parser: argparse.ArgumentParser) -> None:
    _add_file(parser)
    parser.add_argument(
        "--no-mount-check", action="store_true", help="l1_root may be a folder of this machine's own disk"
    )
    parser.add_argument(
        "--allow-baseline",
        action="store_true",
        help="begin anew, without asking for milestones, where no checkpoint on the volume is intact",
    )
    parser.add_argument(
        "--allow-older",
        action="store_true",
        help="go on from the newest intact checkpoint although a newer one is lost or cannot be read",
    )
    parser.add_argument(
        "--notice",
        type=float,
        default=JobSettings.drain_timeout,
        metavar="SECONDS",
        help="the notice that SIGTERM gives",
    )
    parser.add_argument(
        "--nproc-per-node",
        type=_ranks,
        default="1",
        metavar="N",
        help="ranks of a script with a session; gpu: one for each card. A launcher starts its own",
    )
    add_tls(parser)


def _ranks(text: str) -> str:
    if text not in ("gpu", "cpu", "auto") and not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of ranks, nor gpu")
    return text


def _carry_on(options: argparse.Namespace) -> int:
    from .agent_process import AgentProcess

    # Whoever started us may have blocked some, as threads of C++ programs do.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
    try:
        # Its imports take longer than all that comes before it is needed.
        with contextlib.closing(AgentProcess()) as agent:
            from .entry import carry_on

            return carry_on(options, agent)
    except CannotStartError as error:
        raise UsageError(str(error)) from error


def _add_verify(parser: argparse.ArgumentParser) -> None:
    _add_file(parser)
    parser.add_argument(
        "--at", type=file_path, metavar="DIR", help="another place than l1_root, for instance an export"
    )


def _add_export(parser: argparse.ArgumentParser) -> None:
    from .exporting import add_export

    add_export(parser)


def _export(options: argparse.Namespace) -> int:
    from .exporting import export

    return export(options)


def _verify(options: argparse.Namespace) -> int:
    from .verifying import verify

    return verify(options)


# What may follow `dalsegno relay` besides a file; the file itself is the pod.
ACTIONS: dict[str, Action] = {
    "status": Action("shows how a run stands", looking.add_status, looking.status),
    "events": Action("shows what happened to a run", looking.add_events, looking.events),
    "expire": Action(
        "ends the lease of a holder that is gone, with the admin's token", looking.add_order, looking.expire
    ),
    "release": Action("fences whoever holds a run, with the admin's token", looking.add_order, looking.release),
    "verify": Action("compares every checkpoint on the volume with its checksums", _add_verify, _verify),
    "export": Action("copies the least from which the run can go on to another place", _add_export, _export),
}


def run(arguments: Sequence[str]) -> int:
    """Runs `dalsegno relay ARGUMENTS`, and returns its exit code.

    Raises:
        UsageError: bad input, in one line.
    """
    if arguments and arguments[0] in ACTIONS:
        action = ACTIONS[arguments[0]]
        parser: Any = Parser(prog=f"dalsegno relay {arguments[0]}", description=action.text)
        action.add(parser)
        return int(action.act(parser.parse_args(arguments[1:])))
    if arguments and not os.path.exists(arguments[0]) and (near := difflib.get_close_matches(arguments[0], ACTIONS, 1)):
        raise UsageError(f"{arguments[0]} is no file, did you mean dalsegno relay {near[0]}?")
    return _carry_on(pod_parser().parse_args(arguments))


def pod_parser() -> Parser:
    """Reads the arguments of a pod."""
    said = "; ".join(f"`dalsegno relay {name} --help`: {action.text}" for name, action in sorted(ACTIONS.items()))
    parser = Parser(
        prog="dalsegno relay",
        description="Carries a run on from this machine, until it is finished or this machine is taken away.",
        epilog=said,
    )
    _add_pod(parser)
    return parser
