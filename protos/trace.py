"""Marks of what happened when: where the time of a change goes (docs/pause.md has their names).

Each process appends JSON lines to a file of its own below the directory that ``DALSEGNO_TRACE`` names. Without that
variable a mark costs nothing. Of several steps in a row only the first and the last are kept, so a file grows with
saves and changes of the world, not with steps. Standard library only.

A line says ``at``, ``mark``, and what is known of ``run``, ``node``, ``rank``, ``epoch`` and ``step``. ``at`` is the
machine's monotonic clock in seconds. Times of two machines, or of two boots of one, say nothing about each other: the
first part of a file's name says which clock it is.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import ahead
from .contract import Variable
from .processes import boot_id

__all__ = ("STEP", "Mark", "mark", "read", "trace_into")

# The mark at the end of each step.
STEP = "step"
# Lines of steps are padded to this width, so that a later one can take the place of an earlier one.
_STEP_WIDTH = 160
_SUFFIX = ".jsonl"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Mark:
    """One moment of one process.

    Attributes:
        at: seconds of a monotonic clock, which all processes of one machine share.
        process: who marked it; unlike a process number, never used again.
        clock: marks with another one cannot be compared.
        rank: -1 in an agent.
        epoch: 0 if there is none yet.
        step: -1 if it is not known.
        run: the run's id; empty if it is not known.
    """

    at: float
    name: str
    process: str
    clock: str
    node: str = ""
    rank: int = -1
    epoch: int = 0
    step: int = -1
    run: str = ""


def mark(name: str, **facts: str | int) -> None:
    """Notes that something has happened just now, if marks are wanted. Any thread may call it; it never fails.

    Args:
        name: what happened; docs/pause.md lists the names.
        facts: `step`; and `run`, `node`, `rank`, `epoch` if the process's environment does not say them.
    """
    directory = _look() if _directory is None else _directory
    if directory:
        at = time.monotonic()
        if ahead.running() is not None:
            # Whose mark this is, its place will say: asking for that, or writing a file, would wait for it.
            _kept.append((at, name, facts))
            return
        file = _file(directory)
        while _kept:
            with contextlib.suppress(IndexError):  # another thread has taken the last one
                file.write(*_kept.popleft())
        file.write(at, name, facts)


def trace_into(directory: str) -> None:
    """Makes this process, and all that it starts, note marks below a directory from here on; empty: nowhere."""
    global _directory
    os.environ[Variable.TRACE] = _directory = directory


# Where this process notes its marks; None: not looked up yet. It is kept because looking into the environment costs
# more than everything else that an unwanted mark costs.
_directory: str | None = None


# Marks of a process that runs ahead of its world.
_kept: deque[tuple[float, str, dict[str, str | int]]] = deque(maxlen=1000)


def _look() -> str:
    global _directory
    _directory = os.environ.get(Variable.TRACE, "")
    return _directory


class _File:
    """The file to which this process writes its marks."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._lock = threading.Lock()
        self._fd: int | None = None
        # Where the last line begins, its length, and how many lines of steps stand at the end.
        self._begin = self._length = self._steps = 0
        try:
            os.makedirs(directory, exist_ok=True)
            clock = boot_id()[:8]
            path = os.path.join(directory, f"{clock}-{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}")
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except OSError as error:
            logger.warning("nothing is traced: %s", error)

    def write(self, at: float, name: str, facts: dict[str, str | int]) -> None:
        """Appends one line. From the third step in a row on, a step takes the place of the one before it."""
        line: dict[str, Any] = {"at": round(at, 6), "mark": name, **_who(), **facts}
        data = json.dumps(line).encode().ljust(_STEP_WIDTH if name == STEP else 0) + b"\n"
        with self._lock:
            if self._fd is None:
                return
            again = name == STEP and self._steps > 1 and len(data) == self._length
            begin = self._begin if again else self._begin + self._length
            try:
                os.pwrite(self._fd, data, begin)
            except OSError as error:
                logger.warning("nothing more is traced: %s", error)
                self.forget()
                return
            self._begin, self._length = begin, len(data)
            self._steps = self._steps + 1 if name == STEP else 0

    def forget(self) -> None:
        """Closes the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


_own: _File | None = None
_making = threading.Lock()


def _file(directory: str) -> _File:
    global _own
    own = _own
    if own is not None and own.directory == directory:
        return own
    with _making:
        if _own is None or _own.directory != directory:
            _own = _File(directory)
        return _own


def _in_child() -> None:
    """Makes a forked process begin a file of its own; its environment may differ, too."""
    global _own, _making, _directory
    _making, _directory = threading.Lock(), None
    own, _own = _own, None
    if own is not None:
        own.forget()


os.register_at_fork(after_in_child=_in_child)


def _who() -> dict[str, str | int]:
    """Run, node, rank and epoch, as far as an agent or torchrun has put them into this worker's environment."""
    said = os.environ
    names = (("run", Variable.RUN_ID), ("node", Variable.NODE))
    found: dict[str, str | int] = {key: said[variable] for key, variable in names if variable in said}
    for key, variable in (("rank", "RANK"), ("epoch", Variable.EPOCH)):
        if said.get(variable, "").isdecimal():
            found[key] = int(said[variable])
    return found


def read(directory: Path) -> list[Mark]:
    """All marks below a directory, in order of time. A torn line, whose writer was killed, is skipped.

    Raises:
        OSError: the directory or a file of it cannot be read.
    """
    found: list[Mark] = []
    # Not `glob`, which finds nothing where it may not look.
    for name in sorted(os.listdir(directory)):
        if name.endswith(_SUFFIX):
            found += _marks(directory / name)
    return sorted(found, key=lambda one: one.at)


def _marks(path: Path) -> Iterator[Mark]:
    clock = path.name.partition("-")[0]
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            said = json.loads(line)
            yield Mark(
                at=float(said["at"]),
                name=str(said["mark"]),
                process=path.stem,
                clock=clock,
                node=str(said.get("node", "")),
                rank=int(said.get("rank", -1)),
                epoch=int(said.get("epoch", 0)),
                step=int(said.get("step", -1)),
                run=str(said.get("run", "")),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
