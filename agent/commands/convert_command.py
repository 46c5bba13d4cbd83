"""`dalsegno convert SRC DST`: a DeepSpeed ZeRO checkpoint becomes one that loads at any world size.

The converter is a process of its own, as in an agent. So this process needs no torch, and can say in one line what
killed the converter. After a kill or an interruption the same command continues.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from dalsegno.elastic.universal import Effort
from dalsegno.protos.options import file_path, no_directory
from dalsegno.protos.own_program import command_of
from dalsegno.protos.shortage import starting
from dalsegno.protos.signal_names import how_ended
from dalsegno.protos.text import object_in

from ..decisions.events import COMMAND_INTERRUPTED, EXIT_FAILED, EXIT_FINISHED
from ..processes.proc import kill_group

__all__ = ["add_arguments", "convert"]

_MODULE = "dalsegno.elastic.universal"
_EXTRA = ("torch", "deepspeed")
# Seconds that a converter may take from its last message to its end.
_END_WITHIN_SECONDS = 60.0
# What a converter's own lines have.
_TOLD = frozenset({"state", "bytes_total", "bytes_done", "files_total", "files_done"})
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    parser.add_argument(
        "source", type=file_path, metavar="SRC", help="the checkpoint: a directory of ours or DeepSpeed's"
    )
    parser.add_argument("target", type=file_path, metavar="DST", help="where to; an unfinished one is continued")
    parser.add_argument(
        "--threads", type=int, default=Effort.threads, metavar="N", help="working at once (default: %(default)s)"
    )
    parser.add_argument(
        "--memory",
        type=_bytes,
        default=Effort.memory,
        metavar="SIZE",
        help="bytes of all buffers together, like 64M (default: 16M)",
    )
    parser.add_argument(
        "--stage",
        type=int,
        choices=(1, 2, 3),
        help="the ZeRO stage that will load it, if it is not the one that saved",
    )
    parser.add_argument(
        "--reset-optimizer", action="store_true", help="keep the weights and let the optimizer start anew"
    )
    parser.add_argument("--upstream", action="store_true", help="use DeepSpeed's own converter, behind guards")
    parser.add_argument(
        "--allow", action="append", default=[], metavar="CLASS", help="a class that may be unpickled, as module.Class"
    )
    parser.add_argument("--no-latest", action="store_true", help="do not let latest_universal beside DST name it")


def convert(options: argparse.Namespace) -> int:
    """Runs one conversion; returns the exit code.

    Raises:
        ValueError: Nothing can be converted here; one line for a person.
        OSError: No process can be started.
    """
    missing = [name for name in _EXTRA if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"converting needs {' and '.join(missing)}: pip install 'dalsegno[train]'")
    if problem := no_directory(options.source):
        raise ValueError(problem)
    Effort(options.threads, options.memory)  # says what is wrong with them
    began = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        with starting("the converter"):
            process = subprocess.Popen(
                [*command_of(_MODULE), *_arguments(options)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        try:
            last = _follow(process)
            code = process.wait(_END_WITHIN_SECONDS)
        except KeyboardInterrupt:
            print("dalsegno: interrupted; the same command goes on from here", file=sys.stderr)
            return COMMAND_INTERRUPTED
        finally:
            kill_group(process.pid)
            process.wait()
        message = str(last.get("message", "")) if "state" in last else _death(code, errors)
    if code != 0:
        print(f"dalsegno: error: {message}", file=sys.stderr)
        return EXIT_FAILED
    print(message or _summary(options.target, time.monotonic() - began))
    return EXIT_FINISHED


def _arguments(options: argparse.Namespace) -> list[str]:
    arguments = ["--anywhere", "--source", str(options.source), "--target", str(options.target)]
    for name in ("threads", "memory", "stage"):
        value = getattr(options, name)
        arguments += [f"--{name}", str(value)] if value is not None else []
    for name in ("reset_optimizer", "upstream", "no_latest"):
        arguments += [f"--{name.replace('_', '-')}"] if getattr(options, name) else []
    for name in options.allow:
        arguments += ["--allow", name]
    return arguments


def _follow(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Shows how the converter gets on, until its end; its last line."""
    last: dict[str, Any] = {}
    assert process.stdout is not None
    with _bar() as bar:
        task = bar.add_task("verifying", total=None)
        for line in process.stdout:
            said = object_in(line)
            if said is None or not _TOLD.intersection(said):
                continue  # a site's `sitecustomize` prints there, too
            last = said
            if "bytes_total" in last:
                bar.update(task, total=last["bytes_total"], description="converting")
            if "bytes_done" in last:
                bar.update(task, completed=last["bytes_done"])
            if "files_total" in last:
                bar.update(task, description=f"file {last['files_done']} of {last['files_total']}")
    return last


def _bar() -> Progress:
    """A progress bar on standard error; nothing if that is no terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _death(code: int, errors: IO[bytes]) -> str:
    """One line about a converter that ended without a message."""
    if code == -signal.SIGKILL:
        return "the converter was killed, perhaps because memory was short; the same command goes on from here"
    if code < 0:
        return f"the converter {how_ended(code)}; the same command goes on from here"
    errors.seek(0)
    lines = [line for line in errors.read().decode(errors="replace").splitlines() if line.strip()]
    reason = re.sub(r"^.*: error: ", "", lines[-1]) if lines else f"it exited with code {code}"
    return f"the converter failed: {reason}"


def _summary(target: Path, seconds: float) -> str:
    for name in ("MANIFEST.json", "CONVERTED.json"):
        if (target / name).is_file():
            sizes = [entry["size"] for entry in json.loads((target / name).read_bytes())["files"]]
            return f"{target}: {len(sizes)} files, {sum(sizes) / 1e6:.1f} MB, in {seconds:.1f} s"
    return str(target)


def _bytes(text: str) -> int:
    """Parses a size like `64M` into bytes."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?)i?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 64M")
    return int(match[1]) * _UNITS[match[2].upper()]
