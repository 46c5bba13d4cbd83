"""Parts that are on their way to this node: who wants them too may have what has come, and the rest as it comes.

So where many nodes want a large part at once, it passes through them as through a pipe: all have it after little more
than the time of one transfer.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from dalsegno.elastic.checkpoint import FileEntry
from dalsegno.elastic.checkpoint.reading import open_regular
from dalsegno.protos import peer_pb2

from .connection import PIECE_BYTES
from .filling import Filling, cut

__all__ = ["Arrival", "ArrivalEnded", "Arrivals", "Key"]

# Of a part: run, name of the checkpoint, group rank, digest.
Key = tuple[str, str, int, str]

# What comes with fewer bytes a second, and would for longer than so many seconds, is not handed on: who waits for it
# finds it sooner elsewhere.
LEAST_BYTES_PER_SECOND, MOST_SECONDS = 16e6, 10.0
# How long a measurement of that takes; between two looks whether who reads is still there; seconds.
_MEASURED_SECONDS, _LOOK_SECONDS = 1.0, 0.2


class ArrivalEnded(Exception):
    """The rest of a part does not come here, or too slowly."""


class Arrival:
    """One part that is coming, its manifest known. One thread moves it on, any number of others read it.

    Args:
        header: what it was announced with.
        manifest: its bytes.
        entries: its files, in the order in which they come.
        aside: folder in which they are written, under their numbers.
        files: folder in which they are put once all are there, under their names.
        clock: seconds.
    """

    def __init__(
        self,
        header: peer_pb2.Header,
        manifest: bytes,
        entries: Sequence[FileEntry],
        aside: str,
        files: Path,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.header, self._manifest, self._entries = header, manifest, tuple(entries)
        self._aside, self.files, self._clock = aside, files, clock
        self.size = sum(entry.size for entry in entries)
        self._changed = threading.Condition()
        self._come, self._ended = 0, False
        # When the measurement of how fast it comes began, how much had come by then, and what the last one gave.
        self._since, self._before, self._rate = clock(), 0, float("inf")

    @property
    def identity(self) -> Key:
        """As `StepPart.identity`."""
        return self.header.run_id, self.header.name, self.header.group_rank, self.header.digest

    def __str__(self) -> str:
        return f"part {self.header.group_rank} of {self.header.name}"

    # ---- who receives it --------------------------------------------------------------------------------------------

    def moved(self, count: int) -> None:
        """So many bytes more lie in its files."""
        with self._changed:
            self._come += count
            self._measure()
            self._changed.notify_all()

    def end(self) -> None:
        """No more comes."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    # ---- who reads it -----------------------------------------------------------------------------------------------

    def is_slow(self) -> bool:
        """Whether it is sooner had elsewhere."""
        with self._changed:
            return self._is_slow()

    def read(
        self, piece_bytes: int = PIECE_BYTES, unwanted: Callable[[], bool] = lambda: False
    ) -> Iterator[memoryview]:
        """The manifest and the files, as they come.

        Args:
            unwanted: asked now and then while nothing comes; where it is so, this ends.

        Yields:
            Pieces of `piece_bytes` at most, each good until the next one.

        Raises:
            ArrivalEnded: the rest does not come, or too slowly.
            OSError: it cannot be read.
        """
        yield from cut(self._manifest, piece_bytes)
        piece, before = Filling(piece_bytes), 0
        for number, entry in enumerate(self._entries):
            done = 0
            with contextlib.ExitStack() as opened:
                descriptor = -1
                while done < entry.size:
                    come = min(self._wait(before + done, len(piece), unwanted) - before, entry.size)
                    if come <= done:  # It stands still for a moment: what is here is not held back.
                        yield piece.take()
                        continue
                    if descriptor < 0:
                        descriptor = self._open(number, entry)
                        opened.callback(os.close, descriptor)
                    count = len(piece.read(descriptor, come - done, done))
                    if not count:
                        raise ArrivalEnded(f"{entry.path} is shorter than it was")
                    done += count
                    if piece.is_full:
                        yield piece.take()
            before += entry.size
        if piece:
            yield piece.take()

    def _wait(self, read: int, filled: int, unwanted: Callable[[], bool]) -> int:
        """Until there is more than was read; with something to send it does not wait. Returns how much has come."""
        with self._changed:
            while self._come <= read and not filled:
                if self._ended or unwanted():
                    raise ArrivalEnded("the rest did not come")
                if self._is_slow():
                    raise ArrivalEnded("it comes slowly here, too")
                self._changed.wait(_LOOK_SECONDS)
            return self._come

    def _open(self, number: int, entry: FileEntry) -> int:
        for path in (Path(f"{self._aside}/{number}"), self.files / entry.path):
            with contextlib.suppress(FileNotFoundError):
                return open_regular(path)
        raise ArrivalEnded("it was given up")

    def _is_slow(self) -> bool:
        self._measure()
        return self._rate < LEAST_BYTES_PER_SECOND and self.size - self._come > self._rate * MOST_SECONDS

    def _measure(self) -> None:
        now = self._clock()
        if now - self._since >= _MEASURED_SECONDS:
            self._rate = (self._come - self._before) / (now - self._since)
            self._since, self._before = now, self._come


class Arrivals:
    """Those of this node. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._coming: dict[Key, list[Arrival]] = {}

    @contextlib.contextmanager
    def coming(self, arrival: Arrival) -> Iterator[None]:
        """Within this it may be read."""
        key = arrival.identity
        with self._lock:
            self._coming.setdefault(key, []).append(arrival)
        try:
            yield
        finally:
            with self._lock:
                self._coming[key].remove(arrival)
                if not self._coming[key]:
                    del self._coming[key]
            arrival.end()

    def find(self, run_id: str, name: str, digest: str, group_rank: int) -> Arrival | None:
        """The one that began last, if that part is coming, and not too slowly to be of use."""
        with self._lock:
            found = next(reversed(self._coming.get((run_id, name, group_rank, digest), ())), None)
        return None if found is None or found.is_slow() else found
