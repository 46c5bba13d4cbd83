"""Makes files durable behind the back of those who write them, so that writing the next one need not wait for the disk.

Many at once where that can be, see `checkpoint.durability`: what has come in while the disk was at work is its next
batch. Elsewhere each by itself, several at a time, with its file held open until then: whoever opens it anew may not
hear any more of what failed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import BoundedSemaphore, Condition, Thread

from ..checkpoint import FileEntry
from ..checkpoint.durability import FileSystem, at_once, unwritten

THREADS = 4
# Files that wait to be made durable each by itself, at most: each is open, and a disk that is slower than we are must
# slow us down.
BACKLOG = 64
# Of those that are synced at once: a batch is full with so many bytes or files, and as many again may wait. So nothing
# larger happens without a word to who watches, and what a killed conversion has to make anew is bounded.
BATCH_BYTES, BATCH_FILES = 128 << 20, 2048
# What came in first waits so long for company, seconds.
LINGER_SECONDS = 0.25
# Others may begin to write, and end: looked at so often, seconds.
LOOK_SECONDS = 1.0


class Syncing:
    """Of the files of one directory. Everything but the constructor may be called from several threads.

    Args:
        directory: Is there, and none of the files is.
        expected: So many files will come, about.
        durable: Called with each file once it is durable, on threads of this object.

    Raises:
        OSError: The directory cannot be opened.
    """

    def __init__(self, directory: Path, expected: int, durable: Callable[[FileEntry], None]) -> None:
        self._system = FileSystem(directory)
        self._expected, self._durable = expected, durable
        self._changed = Condition()
        # Under it:
        self._batch: list[FileEntry] = []
        self._batch_bytes = self._syncing_bytes = 0
        self._batch_began = 0.0
        self._error: BaseException | None = None
        self._closed = False
        self._looked = time.monotonic()
        self._at_once = self._choose()
        self._room = BoundedSemaphore(BACKLOG)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="dalsegno-sync")
        self._thread = Thread(target=self._run, name="dalsegno-sync", daemon=True)
        self._thread.start()

    def add(self, descriptor: int, entry: FileEntry) -> None:
        """Takes over an open file that is complete. Waits while too many wait for the disk.

        Raises:
            OSError: One that came before could not be made durable; this one is closed.
        """
        if not self._is_at_once():
            self._room.acquire()
            if self._error is not None:
                self._room.release()
                os.close(descriptor)
                raise self._error
            self._pool.submit(self._sync_one, descriptor, entry)
            return
        # Its bytes are in the kernel's hands: nobody needs it open.
        os.close(descriptor)
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._is_full())
            if self._error is not None:
                raise self._error
            if not self._batch:
                self._batch_began = time.monotonic()
            self._batch.append(entry)
            self._batch_bytes += entry.size
            self._changed.notify_all()

    def close(self) -> BaseException | None:
        """Waits until every file is durable, or cannot be. Returns what was wrong first."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        self._pool.shutdown(wait=True)
        self._system.close()
        return self._error

    def _is_full(self) -> bool:
        return len(self._batch) >= BATCH_FILES or self._batch_bytes >= BATCH_BYTES

    def _is_at_once(self) -> bool:
        with self._changed:
            now = time.monotonic()
            if now - self._looked >= LOOK_SECONDS:
                self._looked = now
                self._at_once = self._choose()
            return self._at_once

    def _choose(self) -> bool:
        others = max(0, unwritten() - self._batch_bytes - self._syncing_bytes)
        return self._system.tells and at_once(self._expected, others)

    def _sync_one(self, descriptor: int, entry: FileEntry) -> None:
        try:
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
                self._room.release()
            self._durable(entry)
        except BaseException as error:
            self._failed(error)

    def _run(self) -> None:
        while batch := self._next():
            try:
                self._system.sync()
            except BaseException as error:
                self._failed(error)
                return
            for entry in batch:
                try:
                    self._durable(entry)
                except BaseException as error:
                    self._failed(error)

    def _next(self) -> list[FileEntry]:
        """What is to be made durable now; nothing at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._batch or self._closed)
            while not self._closed and not self._is_full():
                left = self._batch_began + LINGER_SECONDS - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            batch, self._batch = self._batch, []
            self._batch_bytes, self._syncing_bytes = 0, self._batch_bytes
            self._changed.notify_all()
            return batch

    def _failed(self, error: BaseException) -> None:
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()


__all__ = ("Syncing",)
