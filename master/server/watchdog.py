"""Ends a master whose event loop hangs, so that the next one can continue from the store.

Such a process lives but serves nobody, and agents never kill a master that lives. Only time in which this process ran
counts: one that was stopped, or whose machine slept, is fine afterwards. A slow store does not hold the loop up,
because it is written on a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import sys
import tempfile
import threading
from pathlib import Path

from dalsegno.protos.contract import MASTER_HUNG
from dalsegno.protos.ready import writable

from .standard_error import own_handler

__all__ = ("HANG_TIMEOUT_SECONDS", "Watchdog")

HANG_TIMEOUT_SECONDS = 300.0
# Seconds between two signs of life of the loop, and between two looks for them.
LOOK_EVERY_SECONDS = 1.0
# Seconds within which the process ends, whatever becomes of its last lines; and of these, how long each small piece of
# them waits to be read.
END_WITHIN_SECONDS = 10.0
PIECE_SECONDS = 1.0
PIECE_BYTES = 512


class Watchdog:
    """Call `run` in the event loop; it lasts until it is cancelled."""

    def __init__(self, seconds: float, log_file: Path | None) -> None:
        """Ends this process after `seconds` of its life without a turn of its loop; the stacks go into the log.

        0: never. Otherwise after at least two looks in a row: the loop may just be at work.
        """
        self._looks = max(2, round(seconds / LOOK_EVERY_SECONDS)) if seconds else 0
        self._log_file = log_file
        # Not asked for at the end: `logging` has locks.
        self._handler = own_handler()
        self._beats = 0
        self._over = threading.Event()

    async def run(self) -> None:
        """Reports that the loop runs, as long as it does. Once this is cancelled, nobody looks any more."""
        # Not a timer of the clock, which would have run on while the process was stopped.
        if self._looks:
            threading.Thread(target=self._watch, name="dalsegno-watchdog", daemon=True).start()
        try:
            while True:
                self._beats += 1
                await asyncio.sleep(LOOK_EVERY_SECONDS / 2)
        finally:
            self._over.set()

    def _watch(self) -> None:
        seen, missed = -1, 0
        while not self._over.wait(LOOK_EVERY_SECONDS):
            missed = missed + 1 if self._beats == seen else 0
            seen = self._beats
            if missed >= self._looks:
                self._end(missed * LOOK_EVERY_SECONDS)

    def _end(self, seconds: float) -> None:
        # Without `logging`, whose locks a thread that hangs may hold. Whoever reads the log may be what is waited for.
        with contextlib.suppress(RuntimeError, MemoryError):
            last = threading.Timer(END_WITHIN_SECONDS, os._exit, (MASTER_HUNG,))
            last.daemon = True
            last.start()
        try:
            if self._handler is not None:
                self._handler.flush()  # what was logged before stands before
            log = sys.stderr.fileno() if self._log_file is None else os.open(self._log_file, os.O_WRONLY | os.O_APPEND)
            text = f"the master's event loop has stood still for {seconds:.0f} s: this process ends\n"
            _write(log, text.encode())
            _write(log, _stacks())
        finally:
            os._exit(MASTER_HUNG)


def _stacks() -> bytes:
    """What all threads are doing. Not written where it may block: meanwhile no other thread could end this process."""
    # Not every Python was built with memfd_create.
    has = hasattr(os, "memfd_create")
    with open(os.memfd_create("stacks"), "r+b") if has else tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _write(fd: int, data: bytes) -> None:
    """Writes as much as somebody reads. What is ready takes a small piece without waiting."""
    while data and writable(fd, PIECE_SECONDS):
        data = data[os.write(fd, data[:PIECE_BYTES]) :]
