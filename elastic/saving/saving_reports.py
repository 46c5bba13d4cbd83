"""Reports to the agent how far a save has come."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from dalsegno.protos import worker_pb2
from dalsegno.protos.text import one_line

from ..rank.link import Link

log = logging.getLogger(__name__)

REPORT_SECONDS = 2.0


class Count:
    """Number of bytes that several threads have handled, and when the last of them came."""

    def __init__(self, begin: int) -> None:
        self._bytes = begin
        self._moved = time.monotonic()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._bytes += count
            self._moved = time.monotonic()

    def still(self) -> float:
        """Seconds since the last bytes were added, or since this was made."""
        with self._lock:
            return time.monotonic() - self._moved

    def read(self) -> int:
        with self._lock:
            return self._bytes


class SavingReports:
    """Tells the agent from time to time how far a part of a save has come, which tells a slow save from a stuck one.

    ``measure`` returns bytes that never decrease from one part to the next. ``path`` is the directory whose size this
    rank reports as the checkpoint's size so far. ``problem`` says why it cannot write its own part.
    """

    def __init__(
        self, link: Link | None, name: str, measure: Callable[[], int], path: Path | None = None, problem: str = ""
    ) -> None:
        self._link, self._name, self._measure, self._path, self._problem = link, name, measure, path, problem
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._link is not None:
            self._send(self._link, self._written())
            thread = threading.Thread(target=self._run, name="dalsegno-saving", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads are allowed: the save goes on
                log.debug("nothing more is told of the save under way: %s", error)
            else:
                self._thread = thread

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=REPORT_SECONDS * 5)
        if self._link is not None:
            self._send(self._link, 0)

    def _run(self) -> None:
        assert self._link is not None
        while not self._done.wait(REPORT_SECONDS):
            self._send(self._link, self._written())

    def _written(self) -> int:
        """Bytes in the checkpoint's files, including those of earlier parts of the save; at least 1."""
        return 1 if self._path is None else max(1, bytes_below(self._path))

    def _send(self, link: Link, written: int) -> None:
        problem = self._problem if written else ""  # at its end nobody waits any more
        saving = worker_pb2.Saving(name=self._name, bytes=self._measure(), written=written, problem=one_line(problem))
        link.send(worker_pb2.ToAgent(saving=saving), droppable=True)


def bytes_below(path: Path) -> int:
    """Size of all files in a directory that somebody may be writing in, as far as it can be told.

    It ends no save: the other ranks would wait for this one. Whoever writes or reads a file says what is wrong with it.
    """
    return _trace(path)[0]


class Written:
    """Bytes in a directory's files; one more each time that somebody has written, and none of them has grown.

    Such are memory maps, and files whose blocks were asked for first: they have their size from the beginning.

    Args:
        path: The directory.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._beside = path, 0
        # Only who is told of it looks.
        self._trace: tuple[int, int, int] | None = None

    def read(self) -> int:
        before, found = self._trace, _trace(self._path)
        self._trace = found
        self._beside += before is not None and found[0] == before[0] and found != before
        return found[0] + self._beside


def _trace(path: Path) -> tuple[int, int, int]:
    """Of all files below: the sizes, the blocks on the disk, and the times of the last changes, each as a sum."""
    size = blocks = changed_ns = 0
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                found = os.lstat(os.path.join(directory, name))
            except OSError:  # also a temporary file of a framework that is gone again
                continue
            size, blocks, changed_ns = size + found.st_size, blocks + found.st_blocks, changed_ns + found.st_mtime_ns
    return size, blocks, changed_ns
