"""The directory that a conversion writes: files are created exclusively, hashed, made durable, journalled."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from ..checkpoint import FileEntry
from ..checkpoint.files import place_file
from ..checkpoint.summing import WRITE_BYTES, SummingWriter
from .journal import Journal
from .records import Frame
from .syncing import Syncing


class ConversionOutput:
    """The target directory of one conversion.

    Use it as a context manager: leaving it waits until every file is durable and journalled.

    Args:
        target: The directory.
        journal: This conversion's journal; files that it lists are not made again.
        done: Called after every file, on any thread.
        moved: Called with the number of bytes written or synced just now, on any thread.
        expected: Approximate number of files that will be written.

    Raises:
        OSError: The directory cannot be opened.
    """

    def __init__(
        self,
        target: Path,
        journal: Journal,
        done: Callable[[], None],
        moved: Callable[[int], None] = lambda count: None,
        *,
        expected: int = 0,
    ) -> None:
        self._target, self._journal, self._done, self._moved = target, journal, done, moved
        self._finished = set(journal.entries)
        self._directories: set[str] = set()
        self._syncing = Syncing(target, expected, self._durable)

    def __enter__(self) -> ConversionOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        # Queued files are made durable even after an error, so that the next lease need not make them again.
        failed = self._syncing.close()
        if error is None and failed is not None:
            raise failed

    def has(self, path: str) -> bool:
        """Whether ``path`` was taken over from an earlier lease."""
        return path in self._finished

    def stream(self, path: str, around: Frame, pieces: Iterable[memoryview]) -> None:
        """Writes a file of ``torch.save`` whose one tensor comes in pieces.

        Raises:
            OSError: The file system says no.
        """
        if self.has(path):
            return
        with self._create(path) as file:
            if around.nbytes <= WRITE_BYTES:  # one call to the system for a small file
                whole = bytearray(around.head)
                for piece in pieces:  # they share one buffer
                    whole += piece
                file.write(whole + around.tail)
            else:
                file.write(around.head)
                for piece in pieces:
                    file.write(piece)
                file.write(around.tail)
            if file.size != len(around.head) + around.nbytes + len(around.tail):
                wrong = file.size - len(around.head) - len(around.tail)
                raise RuntimeError(f"{path}: {wrong} bytes of values were written, there are {around.nbytes}")

    def put(self, path: str, data: bytes) -> None:
        """Writes ``data``.

        Raises:
            OSError: The file system says no.
        """
        if self.has(path):
            return
        with self._create(path) as file:
            file.write(data)

    def link(self, path: str, source: Path, entry: FileEntry) -> None:
        """Takes over a file unchanged; ``entry`` describes it."""
        if self.has(path):
            return
        place_file(source, self._target / path)
        descriptor = os.open(self._target / path, os.O_RDONLY | os.O_CLOEXEC)
        self._syncing.add(descriptor, FileEntry(path, entry.size, entry.xxh3_128))

    @contextmanager
    def _create(self, path: str) -> Iterator[SummingWriter]:
        """A new file. At the end it is handed on to be made durable."""
        full = os.path.join(self._target, path)
        directory = os.path.dirname(full)
        if directory not in self._directories:
            os.makedirs(directory, exist_ok=True)
            self._directories.add(directory)
        descriptor = os.open(full, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)

        try:
            file = SummingWriter(descriptor, self._moved)
            yield file
        except BaseException:
            os.close(descriptor)
            raise
        self._syncing.add(descriptor, FileEntry(path, file.size, file.digest))

    def _durable(self, entry: FileEntry) -> None:
        self._moved(entry.size)
        self._journal.add(entry)
        self._done()


__all__ = ("ConversionOutput",)
