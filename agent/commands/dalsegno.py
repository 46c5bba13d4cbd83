"""`dalsegno`: looks at a job, at checkpoints, and at the installation. Needs no torch."""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import json
import os
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Any

from dalsegno.elastic.checkpoint import (
    CheckpointDamaged,
    CheckpointStore,
    DirectoryInUse,
    LocalLock,
    Manifest,
    inspect,
    inventory,
    is_checkpoint_name,
    lineage,
    retirable,
    verify,
)
from dalsegno.elastic.checkpoint.errors import printable
from dalsegno.elastic.universal import is_read, is_written
from dalsegno.protos.contract import Variable, run_number
from dalsegno.protos.options import Parser, UsageError, file_path, job_id, path_text, seconds

from ..control.grpc_logs import quiet_grpc
from ..decisions.events import COMMAND_INTERRUPTED, EXIT_FAILED, EXIT_FINISHED, EXIT_USAGE
from . import convert_command, doctor, verifying
from . import pauses as pauses_command
from . import render as render_command
from .run_directories import run_directories, say
from .values import address

__all__ = ["main"]


def _ask(options: argparse.Namespace) -> int:
    """The commands that ask a job's master."""
    with quiet_grpc():
        from . import orders, status

    module = status if options.command in ("status", "scale") else orders
    try:
        return int(getattr(module, options.command)(options))
    except BrokenPipeError:
        raise  # the reader of our output has gone
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def _convert(options: argparse.Namespace) -> int:
    try:
        return convert_command.convert(options)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _list(options: argparse.Namespace) -> int:
    runs, code = run_directories(options.directory)
    if not runs and code == EXIT_FINISHED:
        say(f"no checkpoints in {options.directory}")
    for run in runs:
        try:
            seen, finished = inspect(run), CheckpointStore(run).finished
        except OSError as error:
            code = EXIT_FAILED
            say(f"{run}: it cannot be read: {error.strerror} ({error.filename})")
            continue
        say(f"{run}{' (finished)' if finished else ''}")
        chain = lineage(seen.sealed)
        for manifest in seen.sealed:
            shape = f"{manifest.shape.strategy}, {manifest.shape.world_size} ranks"
            marks = "".join(f", {mark}" for mark in _marks(manifest, chain))
            say(f"  {manifest.name}  {manifest.form}, {shape}, {manifest.total_bytes / 1e6:.1f} MB{marks}")
        for unsealed in seen.unsealed:
            say(f"  {unsealed.name}  not usable: {unsealed.reason}")
    return code


def _marks(manifest: Manifest, chain: Sequence[Manifest]) -> Iterator[str]:
    head = chain[-1] if chain else None
    if manifest.metric is not None:
        yield f"metric {manifest.metric:g}"
    if head is not None and head.best is not None and head.best.name == manifest.name:
        yield f"best {head.best.metric} ({head.best.mode})"
    if manifest.source is None and manifest.name not in {one.name for one in chain}:
        yield "left when the run went back"


class _NotOurs(Exception):
    """Another program or person decides what is deleted of a run."""


def _prune(options: argparse.Namespace) -> int:
    """Deletes old checkpoints of runs that nobody else prunes; the master of a live job retires its own."""
    if options.keep < 1:
        raise UsageError(f"--keep {options.keep}: at least 1, the newest always stays")
    runs, code = run_directories(options.directory, follow=False)
    if not runs and code == EXIT_FINISHED:
        say(f"no checkpoints in {options.directory}")
    for run in runs:
        try:
            with LocalLock(run):
                done = _prune_run(run, options)
        except (DirectoryInUse, _NotOurs, OSError) as error:
            done = EXIT_FAILED
            say(f"{run}: nothing was deleted: {error}")
        code = code or done
    return code


def _prune_run(run: Path, options: argparse.Namespace) -> int:
    found = inventory(run, check_sizes=False)
    store = CheckpointStore(run)
    # Of a run's first save only the place says whose it is.
    jobs = sorted({manifest.job_id for manifest in found if manifest.job_id}) if found else _jobs_by_place(run)
    if len({(manifest.job_id, manifest.run_id) for manifest in found}) > 1:
        raise _NotOurs("checkpoints of several runs are there; give each a directory of its own")
    if jobs and not store.finished:
        raise _NotOurs(f"job {jobs[0]} has not finished it, and prunes it itself (dlrover-run --keep-checkpoints)")
    gone = retirable(found, options.keep)
    if gone.old or gone.left:
        gone = retirable(found, options.keep, damaged=_damaged(run, lineage(found), options.keep))
    for name in store.lost_manifest(store.next_epoch()):
        say(f"{run / name}: it was sealed and has lost its manifest: it stays, delete it by hand")
    names = [*gone.left, *gone.old, *store.never_sealed(store.next_epoch())]
    written = [target for target in filter(is_checkpoint_name, os.listdir(run)) if is_written(run / target)]
    used = {name for target in written for name in (target, target.partition(".universal.")[0])}
    failures: dict[str, OSError] = {}
    # Each is asked for just before it goes: deleting the ones before it may take minutes.
    for name in names:
        if name in used or is_read(run / name):
            used.add(name)
        elif not options.dry_run:
            failures |= store.prune([name])
    for name in sorted(used.intersection(names)):
        say(f"{run / name}: in use by a conversion, stays")
    names = [name for name in names if name not in used and name not in failures]
    say(f"{run}: {'would delete' if options.dry_run else 'deleted'} {len(names)}")
    for name in names:
        say(f"  {name}")
    for name, error in failures.items():
        say(f"{run / name}: it could not be deleted: {error}")
    return EXIT_FAILED if failures else EXIT_FINISHED


def _jobs_by_place(run: Path) -> list[str]:
    """The job whose run lies there, as agents name the directories: `<job>/run-0001`. At most one; links are seen."""
    place = Path(os.path.realpath(run))
    return [place.parent.name] if run_number(place.name) is not None else []


def _damaged(run: Path, chain: Sequence[Manifest], keep: int) -> list[str]:
    """Reports and returns the newest ones that do not count as kept, because they are damaged. Reads every byte."""
    damaged: list[str] = []
    sound = 0
    for manifest in reversed(chain):
        if sound == keep:
            break
        try:
            verify(run / manifest.name, manifest)
        except (CheckpointDamaged, OSError) as error:
            damaged.append(manifest.name)
            say(f"{run / manifest.name}: it does not count as one that is kept: {error}")
        else:
            sound += 1
    return damaged


def _show(options: argparse.Namespace) -> int:
    try:
        manifest = Manifest.read(options.directory)
    except (CheckpointDamaged, OSError) as error:
        raise UsageError(f"{options.directory} is no sealed checkpoint: {error}") from error
    print(json.dumps(json.loads(manifest.to_bytes()), indent=2))
    print(f"digest {manifest.digest}")
    return EXIT_FINISHED


def _pauses(options: argparse.Namespace) -> int:
    try:
        return pauses_command.show(options)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def _doctor(options: argparse.Namespace) -> int:
    try:
        return doctor.doctor(options)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def _render(options: argparse.Namespace) -> int:
    try:
        return render_command.render(options)
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error


def _parser() -> tuple[argparse.ArgumentParser, Container[str]]:
    """For the command line, and the names of the commands."""
    parser = Parser(
        prog="dalsegno", description="Looks at an elastic training job, its checkpoints, and the installation."
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=Parser)
    _add_job_commands(commands)
    checkpoints = commands.add_parser("checkpoints", help="what is in a checkpoint directory")
    actions = checkpoints.add_subparsers(dest="action", required=True, parser_class=Parser)
    acts: tuple[tuple[str, Callable[[argparse.Namespace], int], str], ...] = (
        ("ls", _list, "lists runs and checkpoints"),
        ("verify", verifying.verify, "compares every file with its checksum"),
        ("prune", _prune, "deletes all but the newest and the best of runs that are finished or have no job"),
        ("show", _show, "prints one checkpoint's manifest"),
    )
    for name, act, text in acts:
        action: Any = actions.add_parser(name, help=text)
        action.add_argument("directory", type=file_path, metavar="DIR")
        action.set_defaults(act=act)
        if act is _prune:
            action.add_argument("--keep", type=int, required=True, metavar="N", help="how many of each run stay")
            action.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    convert = commands.add_parser("convert", help="makes a DeepSpeed checkpoint loadable at any world size")
    convert_command.add_arguments(convert)
    convert.set_defaults(act=_convert)
    parts = commands.add_parser("pauses", help="where the time of each change of the world went, part by part")
    parts.add_argument("directory", type=file_path, metavar="DIR", help="the directory of dlrover-run --trace-dir")
    parts.set_defaults(act=_pauses)
    renders = commands.add_parser("render", help="prints manifests of a job for Kubernetes, Slurm or systemd")
    render_command.add_arguments(renders)
    renders.set_defaults(act=_render)
    looks = commands.add_parser("doctor", help="the installation; or what a training script is, before its first step")
    doctor.add_arguments(looks)
    looks.set_defaults(act=_doctor)
    return parser, commands.choices


def _add_job_commands(commands: Any) -> None:
    """Adds what is asked of, and ordered from, a job's master."""
    said = {
        "status": "the job as it stands",
        "scale": "how many nodes the job's world may have, between --nnodes' two numbers",
        "drain": "one node saves with all others at the next step boundary, and goes",
        "stop": "all nodes save at the next step boundary and go; the run can be resumed",
        "start": "lets agents of a stopped job in again (an embedded master's job: the same dlrover-run command)",
        "checkpoint": "the ranks save at the next step boundary, and train on",
        "events": "what happened to the job",
    }
    made = {name: commands.add_parser(name, help=text) for name, text in said.items()}
    made["scale"].add_argument(
        "nodes", type=int, metavar="N", help="with fewer than there are, the others stand by as spares"
    )
    made["drain"].add_argument("node", metavar="NODE", help="its name, as `dalsegno status` shows it")
    for name in ("drain", "stop", "checkpoint"):
        made[name].add_argument("--no-wait", action="store_true", help="do not wait until it is carried out")
        made[name].add_argument(
            "--timeout", type=seconds, default=600.0, metavar="S", help="wait S seconds (default: 600)"
        )
    made["events"].add_argument("--after", type=_event_number, default=0, metavar="N", help="only those behind event N")
    made["events"].add_argument("--follow", "-f", action="store_true", help="go on as they come")
    for command in made.values():
        command.add_argument("--json", action="store_true", help="for programs: JSON, one object in a line")
        command.set_defaults(act=_ask)
        _add_master(command)


def _event_number(text: str) -> int:
    if not text.isdecimal() or len(text) > 15:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of an event")
    return int(text)


def _add_master(command: argparse.ArgumentParser) -> None:
    """Adds the options that name the master to ask, and the credentials for it. Each has dlrover-run's variable."""

    def add(flag: str, otherwise: str | None, metavar: str, text: str, **known: Any) -> None:
        variable = f"{Variable.FLAG}{flag.upper().replace('-', '_')}"
        default = os.environ.get(variable) or otherwise
        text = f"{text}; also {variable}"
        known = {"type": path_text} if metavar in ("DIR", "FILE") else known
        command.add_argument(f"--{flag}", default=default, metavar=metavar, help=text, **known)

    service = os.environ.get(Variable.MASTER) or None
    add("master", service, "HOST:PORT", f"the job's master, if it is a service; also {Variable.MASTER}", type=address)
    add("job-id", None, "JOB", "which job, where several have a master of their own", type=job_id)
    add("checkpoint-dir", "checkpoints", "DIR", "where a job without a service has its master's address")
    for name in ("token-file", "tls-ca", "tls-cert", "tls-key"):
        add(name, None, "FILE", "as dlrover-run's, for --master")


def _others() -> dict[str, importlib.metadata.EntryPoint]:
    """Commands that other packages add: entry points of the group `dalsegno.commands`, by name."""
    return {point.name: point for point in importlib.metadata.entry_points(group="dalsegno.commands")}


def run(arguments: Sequence[str] | None) -> int:
    """Runs one command and returns its exit code: 0 success, 1 something is wrong with what it looked at, 2 usage."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    try:
        parser, names = _parser()
        if not given or given[0] not in names:
            others = _others()
            if given and given[0] in others:
                return int(others[given[0]].load()(given[1:]))
            if others:
                parser.epilog = f"Other packages add: {', '.join(sorted(others))} (each with a --help of its own)."
        options = parser.parse_args(given)
        return int(options.act(options))
    except UsageError as error:
        print(printable(f"dalsegno: error: {error}"), file=sys.stderr)
        return EXIT_USAGE


class _Unwritable(Exception):
    """Standard output takes nothing more, for a reason that its reader did not choose."""


class _Output:
    """Standard output, whose errors are not taken for those of the files that a command reads."""

    def __init__(self, out: Any) -> None:
        self._out = out

    def write(self, text: str) -> int:
        return int(self._done(lambda: self._out.write(text)))

    def flush(self) -> None:
        self._done(self._out.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    @staticmethod
    def _done(act: Callable[[], Any]) -> Any:
        try:
            return act()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _Unwritable(error.strerror or str(error)) from error


def main() -> None:
    """The console script."""
    # Python has none if it was closed: then nobody wants to see anything.
    plain = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (until this process ends)
    # Names and texts of others may have characters that the terminal's encoding has not.
    if isinstance(plain, io.TextIOWrapper):
        plain.reconfigure(errors="backslashreplace")
    sys.stdout = _Output(plain)
    try:
        code = run(None)
        sys.stdout.flush()
    except (BrokenPipeError, _Unwritable) as error:
        # The reader of our output has seen enough, or its disk is full; the rest must not fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        code = EXIT_FAILED
        if isinstance(error, _Unwritable):
            print(f"dalsegno: error: standard output cannot be written: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        code = COMMAND_INTERRUPTED  # what was ordered still stands
    sys.exit(code)


if __name__ == "__main__":
    main()
