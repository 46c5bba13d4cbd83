"""`dalsegno render`: prints what Kubernetes, Slurm or systemd need to run a job, from a dozen lines of YAML."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dalsegno.elastic.checkpoint.errors import printable
from dalsegno.protos.options import UsageError, file_path
from dalsegno.protos.yaml_text import InputRefused, documents, printed

from ..decisions.events import EXIT_FINISHED, EXIT_USAGE
from ..deploy import kustomize
from ..deploy.elasticjob import is_elastic_job, translated
from ..deploy.job import JobSpec, job_of
from ..deploy.kubernetes import objects
from ..deploy.refusals import TARGETS, refusals
from ..deploy.slurm import script
from ..deploy.systemd import units
from .arguments import build_parser, parse

__all__ = ["add_arguments", "render"]

# A job is a dozen lines: a file of this many bytes is something else.
LARGEST_FILE_BYTES = 1 << 20


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Adds the arguments of `dalsegno render`."""
    command.add_argument("target", choices=TARGETS, help="for whom")
    command.add_argument("file", type=file_path, metavar="job.yaml", help="the job, or DLRover's ElasticJob")
    command.add_argument(
        *("--set", "-s"),
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="as a line of the file, like claim=data",
    )
    command.add_argument(
        "--output", "-o", type=file_path, metavar="DIR", help="write files there (k8s: a base of Kustomize)"
    )
    command.add_argument(
        "--base",
        type=file_path,
        metavar="job.yaml",
        help="k8s, with --output: write an overlay of the base beside that file",
    )


def render(options: argparse.Namespace) -> int:
    """Prints or writes the manifests; returns 0, or 2 if the job cannot work, with a line for each reason."""
    try:
        job = _job(options.file, options.target, options.set)
        files = _files(job, options)
    except InputRefused as error:
        for line in error.lines:
            print(printable(f"dalsegno: error: {options.file}: {line}"), file=sys.stderr)
        return EXIT_USAGE
    if options.output is None:
        sys.stdout.write(_text(files))
        return EXIT_FINISHED
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (options.output / name).write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"cannot write there: {error.strerror}; name a directory, which is made if there is none"
        print(printable(f"dalsegno: error: --output {options.output}: {what}"), file=sys.stderr)
        return EXIT_USAGE
    print(printable(f"{options.output}: {', '.join(files)}"))
    return EXIT_FINISHED


def _job(file: Path, target: str, settings: Sequence[str]) -> JobSpec:
    """The checked job of a file. Raises InputRefused, OSError."""
    if file.stat().st_size > LARGEST_FILE_BYTES:
        raise InputRefused(f"{file.stat().st_size} bytes: this is no job")
    try:
        found = documents(file.read_text(encoding="utf-8"), file.name)
    except UnicodeDecodeError as error:
        raise InputRefused(f"this is no text: {error.reason} at byte {error.start}") from error
    if len(found) != 1:
        raise InputRefused(f"{len(found)} documents: one job is what can be rendered at a time")
    values: Any = found[0]
    if is_elastic_job(values):
        values, notes = translated(values)
        for note in notes:
            print(printable(f"dalsegno: {file}: {note}"), file=sys.stderr)
    elif isinstance(values, Mapping) and "kind" in values:
        raise InputRefused(
            f"kind: {values['kind']}: a job of our own has no kind, and of others' only ElasticJob is read"
        )
    job = job_of(_with(values, settings))
    if found_wrong := refusals(job, target) or list(_misfits(job)):
        raise InputRefused(*found_wrong)
    return job


def _misfits(job: JobSpec) -> Iterator[str]:
    """What `dlrover-run` would refuse on every node, by its own parser."""
    if job.shell:
        return
    if not job.command[0].startswith("-") and not _finds_script(job.flags, job.command[0]):
        yield (
            f"flags: dlrover-run would not find {job.command[0]!r} behind them: a flag lacks its value (write"
            " --flag=VALUE), or a word is none"
        )
        return
    # Whatever the target is: render writes the others itself.
    line = [f"--nnodes={job.nnodes[0]}:{job.nnodes[1]}", "--master=head:29400", *job.flags, *job.command]
    for place, environ in (("flags" if job.flags else "command", {}), ("env", job.env)):
        try:
            parse(line, environ, here=False)
        except UsageError as error:
            yield f"{place}: dlrover-run refuses {'them' if place == 'flags' else 'it'}: {error}"
            return


def _finds_script(flags: Sequence[str], script: str) -> bool:
    try:
        return bool(build_parser({}).parse_args([*flags, script]).training_script == script)
    except UsageError as error:
        # Of what else is wrong the whole line tells.
        return "training_script" not in str(error)


def _with(values: Any, settings: Sequence[str]) -> Any:
    """The mapping with keys of the command line, which win: `secrets.token=NAME`."""
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not key or not equals:
            raise InputRefused(f"--set {setting}: write KEY=VALUE, like --set claim=data")
        value = (documents(text, f"--set {key}") or [None])[0]
        for part in reversed(key.split(".")):
            value = {part: value}
        values = _merged(values, value)
    return values


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}


def _files(job: JobSpec, options: argparse.Namespace) -> dict[str, str]:
    """Names of files and their texts."""
    if options.base is not None and (options.target != "k8s" or options.output is None):
        raise InputRefused(
            "--base is for k8s, together with --output: there is nothing else that an overlay could be of"
        )
    if options.target == "slurm":
        return {f"{job.name}.sbatch": script(job)}
    if options.target == "systemd":
        return units(job)
    made = objects(job)
    if options.base is not None:
        path = os.path.relpath(options.base.parent, options.output)
        return kustomize.overlay(objects(_job(options.base, "k8s", [])), made, path)
    return {"": printed(made)} if options.output is None else kustomize.base(made)


def _text(files: Mapping[str, str]) -> str:
    """For a person's terminal, or a pipe: several files have their names above them."""
    if len(files) == 1:
        return next(iter(files.values()))
    return "\n".join(f"# {name}\n{text}" for name, text in files.items())
