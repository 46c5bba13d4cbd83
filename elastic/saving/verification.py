"""Ranks verify what they resume from beside their main threads, which build their models meanwhile.

Each rank reads its share on a thread of its own. The threads tell each other what they found over the world's store, so
every rank learns the same, and none has to be at a certain place of its script for that. Who asks for a file waits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import thread as _pools  # noqa: F401 (whose hook at Python's end is registered before ours)
from typing import Any, TypeAlias

from dalsegno.protos import trace

from ..rank.board import Board, CalledOff

__all__ = ["JointVerification", "NobodyTold", "Note"]

log = logging.getLogger(__name__)

Note: TypeAlias = "dict[str, str]"
"""What one rank has found; empty if all is well. Plain JSON."""
_ALL = "all"
# Seconds between two looks at what the others have said, at most: for each rank that looks, and for any number.
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.0005, 0.05
# Seconds in which a thread that was told to end does: it reads a piece of a file, or asks the store once.
_END_SECONDS = 5.0
# What has not ended in this process.
_under_way: weakref.WeakSet[JointVerification] = weakref.WeakSet()


class NobodyTold(OSError):
    """The ranks could not tell each other what they have verified, which says nothing of the files."""


class JointVerification:
    """One rank's part in it, which has begun.

    Args:
        board: For this use alone.
        rank, world_size: As in the session.
        work: Reads this rank's share and returns what it has found, as a note. It calls its argument now and then, with
            a number of bytes, and passes on what that raises.
        found: Called on the thread with the notes of all ranks, if one of them says anything.
        judge: Called on each thread that waits, with the notes of all ranks. It returns if the files may be used.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        world_size: int,
        work: Callable[[Callable[[int], None]], Note],
        found: Callable[[Sequence[Note]], None],
        judge: Callable[[Sequence[Note]], None],
    ) -> None:
        # Its connection is closed once it is not needed.
        self._board: Board | None = board
        self._rank, self._world_size = rank, world_size
        self._work, self._found, self._judge = work, found, judge
        self._over, self._off = threading.Event(), threading.Event()
        self._notes: list[Note] = []
        self._error: BaseException | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name="dalsegno-verification", daemon=True)
        _under_way.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:
            log.debug("verified without a thread of its own: %s", error)
            self._run()

    def wait(self) -> None:
        """Waits until all ranks have verified their shares; returns if the files may be used. Any thread, repeatedly.

        A peer that ends meanwhile may never say anything: then whoever watches over the ranks ends this one, too.

        Raises:
            NobodyTold: It was ended, or the world's store could not be reached.
            RuntimeError: The world's store is gone, which is torch's error.
        """
        if os.getpid() != self._process and not self._over.is_set():
            raise OSError("this process was forked while the resume point was being verified: ask for it before")
        self._over.wait()
        if isinstance(self._error, CalledOff) or type(self._error) is RuntimeError:
            # A RuntimeError is what frameworks raise that reject a state.
            text = f"the ranks could not tell each other what they have verified: {self._error}"
            raise NobodyTold(text) from self._error
        if self._error is not None:
            raise self._error
        self._judge(self._notes)

    def end(self) -> None:
        """Nobody needs it any more: its thread ends soon. Repeating it does no harm."""
        self._off.set()

    def join(self) -> None:
        """Ends it, and waits for its thread, but not for ever."""
        self.end()
        if self._thread.is_alive():
            self._thread.join(_END_SECONDS)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """A copy of what has it is made once all is verified, and has none."""
        self.wait()
        return type(None), ()

    def _run(self) -> None:
        try:
            note = self._verified()
            self._notes = [note] if self._world_size == 1 else self._exchanged(note)
            if any(self._notes):
                self._found(self._notes)
        except BaseException as error:  # raised where somebody waits
            self._error = error
        finally:
            self._board = None
            trace.mark("verified")
            self._over.set()

    def _verified(self) -> Note:
        try:
            note = self._work(self._go_on)
        except CalledOff:
            raise
        except Exception as error:
            log.exception("what this rank resumes from cannot be verified")
            note = {"os": f"{type(error).__name__}: {error}"}
        return note

    def _exchanged(self, note: Note) -> list[Note]:
        """The notes of all ranks. The first rank collects them, so that each of the others asks for one thing only."""
        ranks, board = range(self._world_size), self._board
        assert board is not None
        pause = min(_LONGEST_LOOK_SECONDS, 0.001 + _LOOK_SECONDS * self._world_size)
        if self._rank:
            board.say(str(self._rank), note)
            said = board.hear([_ALL], self._off.wait, pause)[0]
        else:
            heard: list[Any] = board.hear([str(rank) for rank in ranks if rank], self._off.wait, pause)
            said = {str(rank): one for rank, one in zip(ranks, [note, *heard], strict=True) if one}
            board.say(_ALL, said)
        return [dict(said.get(str(rank), {})) for rank in ranks]

    def _go_on(self, moved: int) -> None:
        if self._off.is_set():
            raise CalledOff("what this rank resumes from is not verified any more")


def _end_all() -> None:
    for one in list(_under_way):
        one.join()


# A child has no such thread, and perhaps a lock of one that it will never get.
os.register_at_fork(after_in_child=_under_way.clear)
# Before Python's end waits for the threads of pools, which would read on. A thread that is in torch's store then, and
# needs the interpreter once more, would abort the process. Nothing public is called so early.
with contextlib.suppress(AttributeError, RuntimeError):
    threading._register_atexit(_end_all)  # type: ignore[attr-defined]
