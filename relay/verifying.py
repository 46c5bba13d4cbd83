"""`dalsegno relay verify`: all checkpoints of a run on the volume, and what its milestones hold, byte by byte."""

from __future__ import annotations

import argparse
import sys

from dalsegno.elastic.checkpoint import Manifest
from dalsegno.elastic.checkpoint.errors import printable
from dalsegno.protos.contract import EXIT_FAILED, EXIT_FINISHED
from dalsegno.protos.options import UsageError, no_directory
from dalsegno.protos.run_file import read_run_file
from dalsegno.protos.yaml_text import InputRefused

from .volume import Volume, damage_of

__all__ = ("verify",)


def verify(options: argparse.Namespace) -> int:
    """Prints a line for each checkpoint. Returns 1 if one of them is damaged.

    Raises:
        UsageError: `run.yaml` is wrong, or the volume cannot be read.
    """
    try:
        file = read_run_file(options.file)
    except InputRefused as refused:
        raise UsageError("; ".join(refused.lines)) from refused
    volume = Volume(options.at.absolute() if options.at else file.l1_root, file.run_id)
    if problem := no_directory(volume.root):
        raise UsageError(f"{problem}: nothing of {file.run_id} is seen on this volume: is it mounted?")
    try:
        found = volume.manifests()
    except OSError as error:
        raise UsageError(f"{volume.job} cannot be read: {error.strerror or error}") from error
    if not found:
        print(f"no checkpoints in {volume.job}")
    code = EXIT_FINISHED
    for one in found:
        if not isinstance(one, Manifest):
            if one.damaged or one.unreadable:
                code = EXIT_FAILED
                print(printable(f"{one.name}: damaged: {one.reason}"))
            else:
                print(printable(f"not a checkpoint (never sealed): {one.name}: {one.reason}"))
            continue
        directory = volume.directory_of(one)
        try:
            problem = damage_of(directory, one)
        except OSError as error:
            problem = f"it cannot be read: {error}"
        code = EXIT_FAILED if problem else code
        print(printable(f"{directory}: {problem or 'intact'}"))
        sys.stdout.flush()
    return code
