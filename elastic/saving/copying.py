"""Copies many tensors of the host's memory at once, with other cores' help where they are idle.

One core does not use all of the memory's bandwidth, and torch copies with one thread where ``OMP_NUM_THREADS`` is 1, as
launchers set it. What copies here is what the training waits for. How glibc copies is up to `agent/commands/tuning.py`.
"""

from __future__ import annotations

import _thread
import ctypes
import logging
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..rank.threads import MOST_THREADS, cores

log = logging.getLogger(__name__)

# Bytes below which one thread is enough: to start another takes as long as to copy a megabyte.
LEAST = 16 << 20
# So many pieces for each thread. For each the interpreter is needed once, which other threads of the script may keep
# busy; and one that is under way is waited for, if its core has something else to do.
PIECES = 2
# Bytes from which on a tensor is copied by itself, by glibc: the interpreter is needed once more for each.
STREAMED = 8 << 20

Piece = tuple[list[torch.Tensor], list[torch.Tensor]]


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copies each source into its target: contiguous tensors on the CPU, of the same shape and dtype.

    Raises:
        RuntimeError: Of torch. As with any other exception, the targets may still be written to.
    """
    total = sum(tensor.nbytes for tensor in sources)
    if total < LEAST or torch.get_num_threads() > 1:
        with torch.no_grad():
            torch._foreach_copy_(list(targets), list(sources))
    else:
        # More than this rank's share of the cores: those of others help only while they are idle.
        threads = min(MOST_THREADS, cores())
        _Copying(_pieces(targets, sources, max(1, total // (PIECES * threads)))).with_threads(threads)


class _Copying:
    """Work that several threads share: each takes the next piece until none is left."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces
        self._errors: list[BaseException] = []

    def with_threads(self, count: int) -> None:
        """Returns when all is copied. A helper that has not begun by then is not waited for: its core is busy.

        Raises:
            BaseException: Of torch, or of a signal's handler. Then a helper may still be at its last piece.
        """
        busy: list[threading.Lock] = []
        try:
            for _ in range(count - 1):
                busy.append(threading.Lock())
                # Not a `Thread`, whose start waits until it runs.
                _thread.start_new_thread(self._work, (busy[-1],))
        except RuntimeError:  # the limit of processes: those that there are do it
            log.debug("a state is copied by %d threads: no more can be started", len(busy))
        try:
            self._work(nullcontext())
        finally:
            self._pieces.clear()
            for lock in busy:
                with lock:
                    pass
        if self._errors:
            raise self._errors[0]

    def _work(self, busy: AbstractContextManager[Any]) -> None:
        with torch.no_grad():
            while self._pieces:
                with busy:
                    self._next()

    def _next(self) -> None:
        try:
            targets, sources = self._pieces.pop()
        except IndexError:  # another thread has taken the last one
            return
        try:
            _copy(targets, sources)
        # Raised where it is waited for.
        except BaseException as error:
            self._errors.append(error)
            self._pieces.clear()


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """The large ones past the caches, if glibc does that: torch has the processor read first what it writes over."""
    small: Piece = [], []
    for target, source in zip(targets, sources, strict=True):
        if source.nbytes < STREAMED:
            small[0].append(target)
            small[1].append(source)
        else:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
    if small[0]:
        torch._foreach_copy_(*small)


def _pieces(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], size: int) -> list[Piece]:
    """The same as lists of about so many bytes. What is larger is cut."""
    pieces: list[Piece] = []
    room = 0
    for target, source in zip(targets, sources, strict=True):
        if source.nbytes > 2 * size:
            count = -(-source.nbytes // size)
            cut = zip(target.view(-1).chunk(count), source.detach().view(-1).chunk(count), strict=True)
            pieces += [([part], [whole]) for part, whole in cut]
            continue
        if room <= 0:
            pieces.append(([], []))
            room = size
        pieces[-1][0].append(target)
        pieces[-1][1].append(source)
        room -= source.nbytes
    return pieces
