"""`latest.json` and `best.json`, copies for people: written after the saves, and no save waits for them."""

from __future__ import annotations

import logging
import threading

from ..checkpoint import Best, CheckpointStore, Manifest

log = logging.getLogger(__name__)


class Notes:
    """Writes the notes of one run. Any thread may call it; the last request counts.

    Args:
        store: The run's directory.
        apart: Write on a thread. Under an agent other ranks wait for this one, and a leaver's notice may run out, so a
            disk that takes seconds for a file must cost neither. A process that ends waits for the thread.
    """

    def __init__(self, store: CheckpointStore, *, apart: bool) -> None:
        self._store, self._apart = store, apart
        self._lock = threading.Lock()
        self._wanted: tuple[Manifest | None, Best | None] | None = None
        self._busy = False
        # The last one that was started.
        self._thread: threading.Thread | None = None
        self._best: str | None = None

    def write(self, latest: Manifest | None, best: Best | None) -> None:
        """Notes the newest checkpoint (None: it has not changed) and the best one as of now."""
        with self._lock:
            before = self._wanted[0] if self._wanted is not None else None
            self._wanted = (latest or before, best)
            if self._busy:
                return
            self._busy = True
            if self._apart and self._start():
                return
        self._write()

    def close(self, seconds: float) -> None:
        """Waits until everything that was asked for is written, for at most so long. The thread goes on after that."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(seconds)

    def _start(self) -> bool:
        """Whether a thread writes from now on. The caller holds the lock."""
        thread = threading.Thread(target=self._write, name="dalsegno-notes")
        try:
            thread.start()
        except RuntimeError as error:  # The interpreter is about to end, or may have no more threads.
            log.debug("no thread for latest.json: %s", error)
            return False
        self._thread = thread
        return True

    def _write(self) -> None:
        while True:
            with self._lock:
                if self._wanted is None:
                    self._busy = False
                    return
                (latest, best), self._wanted = self._wanted, None
            try:
                self._note(latest, best)
            except OSError as error:
                log.warning("what is saved is safe, but latest.json or best.json does not say so: %s", error)

    def _note(self, latest: Manifest | None, best: Best | None) -> None:
        if latest is not None:
            self._store.write_latest(latest)
        name = "" if best is None else best.name
        if name != self._best:
            self._store.write_best(best)
            self._best = name
