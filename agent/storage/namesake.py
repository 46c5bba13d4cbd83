"""An unfinished job of a script of the same name, for whoever has changed an argument and begins another job by that.

A job that nobody has named is named after its script, with a digest of user, script and arguments. Nothing else of the
script is recorded, so it is a script of this name, and perhaps not this one.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

from dalsegno.elastic.checkpoint import CheckpointName, is_checkpoint_name
from dalsegno.elastic.checkpoint.layout import FINISHED, MANIFEST

from .job_directory import JobDirectory
from .private import PRIVATE
from .survey import runs_in_order

__all__ = ["unfinished"]

_BY_DEFAULT = re.compile("(.+)-[0-9a-f]{8}")
# The newest jobs of that name that are looked into, of the first so many: a directory may hold thousands, and be slow.
_MOST, _MOST_OF_THE_NAME = 3, 200

logger = logging.getLogger(__name__)


def unfinished(directory: JobDirectory, is_served: Callable[[Path], bool]) -> tuple[str, int] | None:
    """The newest unfinished job of a script of the same name that nobody runs now, and its step; None: there is none.

    Args:
        directory: the job's, prepared. If the job has a run already, nothing is looked for.
        is_served: whether a job has a master just now, by its private directory.
    """
    try:
        if runs_in_order(os.listdir(directory.runs)):
            return None
        with os.scandir(directory.root) as entries:
            alike = (entry for entry in entries if entry.name != directory.job_id and _alike(entry, directory.job_id))
            others = list(itertools.islice(alike, _MOST_OF_THE_NAME))
            newest = sorted(others, key=lambda entry: entry.stat().st_mtime, reverse=True)[:_MOST]
        for entry in newest:
            # Nobody else may go on with it.
            private = directory.root / PRIVATE / entry.name
            if _owner(private) != _owner(directory.private) or is_served(private):
                continue
            if (step := _step(Path(entry.path))) is not None:
                return entry.name, step
    except OSError as error:
        logger.debug("no other job is looked for: %s", error)
    return None


def _alike(entry: os.DirEntry[str], job_id: str) -> bool:
    names = _BY_DEFAULT.fullmatch(entry.name), _BY_DEFAULT.fullmatch(job_id)
    stems = [None if name is None else name[1] for name in names]
    return stems[0] is not None and stems[0] == stems[1] and entry.is_dir(follow_symlinks=False)


def _owner(path: Path) -> int:
    """Who owns it; -1: it is not there."""
    try:
        return os.lstat(path).st_uid
    except FileNotFoundError:
        return -1


def _step(job: Path) -> int | None:
    """The step of the newest sealed checkpoint of the job's last run; None: there is none, or the run is finished."""
    runs = runs_in_order(os.listdir(job))
    if not runs or (job / runs[-1] / FINISHED).exists():
        return None
    run = job / runs[-1]
    names = sorted((CheckpointName.parse(name) for name in os.listdir(run) if is_checkpoint_name(name)), key=_age)
    return next((name.step for name in reversed(names) if (run / str(name) / MANIFEST).is_file()), None)


def _age(name: CheckpointName) -> tuple[int, int, int]:
    return name.age
