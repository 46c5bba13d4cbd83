"""`dalsegno checkpoints verify`: which checkpoints are still what was sealed, of a run that may be at work."""

from __future__ import annotations

import argparse
import contextlib
import os
from pathlib import Path

from dalsegno.elastic import checkpoint
from dalsegno.elastic.checkpoint import MANIFEST, CheckpointDamaged, Manifest, is_checkpoint_name
from dalsegno.elastic.checkpoint.layout import SEALED
from dalsegno.elastic.checkpoint.marks import marked

from ..decisions.events import EXIT_FAILED, EXIT_FINISHED
from .run_directories import run_directories, say

__all__ = ["verify"]


def verify(options: argparse.Namespace) -> int:
    """Compares every file with its checksum, and prints a line for each checkpoint.

    Returns:
        1 if one of them is damaged or cannot be read, or if nothing was verified in a directory that is not empty.

    Raises:
        UsageError: It is no directory.
    """
    directory: Path = options.directory
    one = _as_checkpoint(directory)
    if one is not None:
        return EXIT_FINISHED if _is_intact(one) else EXIT_FAILED
    runs, code = run_directories(directory)
    if not runs and code == EXIT_FINISHED:
        if not os.listdir(directory):
            say(f"no checkpoints in {directory}")
            return EXIT_FINISHED
        say(f"no checkpoints in {directory}, nor in what lies one or two levels below it: nothing was verified")
        return EXIT_FAILED
    some = False
    for run in runs:
        try:
            names = sorted(filter(is_checkpoint_name, os.listdir(run)))
        except OSError as error:
            code = EXIT_FAILED
            say(f"{run}: it cannot be read: {error.strerror}")
            continue
        for name in names:
            intact = _is_intact(run / name, found=True)
            some = some or intact is True
            code = EXIT_FAILED if intact is False else code
    if not some and code == EXIT_FINISHED:
        say(f"no sealed checkpoint in {directory}: nothing was verified")
        return EXIT_FAILED
    return code


def _as_checkpoint(directory: Path) -> Path | None:
    """The checkpoint that a person means by a directory, also by "." or a link. None: it is none, under any name."""
    if is_checkpoint_name(directory.name):
        return directory
    real = Path(os.path.realpath(directory))
    return real if is_checkpoint_name(real.name) or os.path.lexists(real / MANIFEST) else None


def _is_intact(path: Path, *, found: bool = False) -> bool | None:
    """Says how one is. None: it is no checkpoint (yet, or any more). `found`: where a job may be at work."""
    was_sealed = os.path.lexists(path / MANIFEST)
    try:
        checkpoint.verify(path, Manifest.read(path))
    except (CheckpointDamaged, OSError) as error:
        if found and not was_sealed and os.path.lexists(path / MANIFEST):
            return _is_intact(path, found=found)  # sealed just now
        if found and (why := _at_work(path, was_sealed)):
            say(f"{path}: {why}")
            return None
        say(f"{path}: {error}")
        return False
    say(f"{path}: intact")
    return True


def _at_work(path: Path, was_sealed: bool) -> str:
    """What the run's job does, or did, to what is no checkpoint without being damaged; empty: it is damaged.

    Only its marks tell that it was not sealed. A copy without them may be one that lacks its end, the manifest.
    """
    try:
        os.lstat(path)
        with contextlib.suppress(FileNotFoundError):
            os.lstat(path / MANIFEST)
            return ""
        if not os.path.isdir(path) or not os.path.isdir(path.parent / SEALED) or path.name in marked(path.parent):
            return ""
    except FileNotFoundError:
        return "deleted meanwhile"
    except OSError:
        return ""
    return "deleted meanwhile" if was_sealed else "not sealed: a save that goes on, or was given up"
