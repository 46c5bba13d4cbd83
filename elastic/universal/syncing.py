"""Makes files durable in the background, so that writing the next file need not wait for the disk.

Many files are synced at once if that is possible, see `checkpoint.durability`: the files that arrive while the disk is
at work form the next batch. Otherwise each file is synced by itself, several at a time, and stays open until then,
because errors may not be reported to a descriptor that is opened later.
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
# The most files that wait for a sync of their own. Each of them is open, and a disk that is slower than the writers
# must slow them down.
BACKLOG = 64
# Bounds of a batch that is synced at once. A full batch may be syncing while another one fills. The bounds keep the
# silence during a sync short, and limit what a killed conversion has to make anew.
BATCH_BYTES, BATCH_FILES = 128 << 20, 2048
# Seconds that the first file of a batch waits for others.
LINGER_SECONDS = 0.25
# Seconds between two looks at whether other processes write to the same disk.
LOOK_SECONDS = 1.0


class Syncing:
    """Makes the files of one directory durable. Everything but the constructor may be called from several threads.

    Args:
        directory: It exists, and none of the files does.
        expected: Approximate number of files that will come.
        durable: Called with each file once it is durable, on threads of this object.

    Raises:
        OSError: The directory cannot be opened.
    """

    def __init__(self, directory: Path, expected: int, durable: Callable[[FileEntry], None]) -> None:
        self._system = FileSystem(directory)
        self._expected, self._durable = expected, durable
        self._changed = Condition()
        # Guarded by it:
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
        """Takes over an open file that is complete. Waits if too many files wait for the disk.

        Raises:
            OSError: An earlier file could not be made durable; this one is closed.
        """
        if not self._is_at_once():
            self._room.acquire()
            if self._error is not None:
                self._room.release()
                os.close(descriptor)
                raise self._error
            self._pool.submit(self._sync_one, descriptor, entry)
            return
        # The kernel has its bytes, so it need not stay open.
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
        """Waits until every file is durable, or cannot be. Returns the first error."""
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
        """The files to make durable now; none at the end."""
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
