"""Ranks verify what they resume from beside their main threads, which build their models meanwhile.

Each rank reads its share on a thread of its own. The threads tell each other what they found over the world's store, so
every rank learns the same, and none has to be at a certain place of its script for that. Who asks for a file waits.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from dalsegno.protos import trace

from ..rank.board import Board, CalledOff

__all__ = ["JointVerification", "Note"]

log = logging.getLogger(__name__)

Note: TypeAlias = "dict[str, str]"
"""What one rank has found; empty if all is well. Plain JSON."""
_ALL = "all"


class JointVerification:
    """One rank's part in it, which has begun.

    Args:
        board: For this use alone.
        rank, world_size: As in the session.
        work: Reads this rank's share and returns what it has found, as a note. It calls its argument now and then, with
            a number of bytes, and passes on what that raises.
        found: Called on the thread with a note that says anything, before the other ranks hear of it.
        judge: Called on each thread that waits, with the notes of all ranks. It returns if the files may be used.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        world_size: int,
        work: Callable[[Callable[[int], None]], Note],
        found: Callable[[Note], None],
        judge: Callable[[Sequence[Note]], None],
    ) -> None:
        self._board, self._rank, self._world_size = board, rank, world_size
        self._work, self._found, self._judge = work, found, judge
        self._over, self._off = threading.Event(), threading.Event()
        self._notes: list[Note] = []
        self._error: BaseException | None = None
        try:
            threading.Thread(target=self._run, name="dalsegno-verification", daemon=True).start()
        except RuntimeError as error:
            log.debug("verified without a thread of its own: %s", error)
            self._run()

    def wait(self) -> None:
        """Waits until all ranks have verified their shares; returns if the files may be used. Any thread, repeatedly.

        A peer that ends meanwhile may never say anything: then whoever watches over the ranks ends this one, too.

        Raises:
            RuntimeError: It was ended, or the world's store is gone.
        """
        self._over.wait()
        if self._error is not None:
            raise self._error
        self._judge(self._notes)

    def end(self) -> None:
        """Nobody needs it any more: its thread ends soon. Repeating it does no harm."""
        self._off.set()

    def _run(self) -> None:
        try:
            note = self._verified()
            self._notes = [note] if self._world_size == 1 else self._exchanged(note)
        except BaseException as error:  # raised where somebody waits
            self._error = error
        finally:
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
        if note:
            self._found(note)
        return note

    def _exchanged(self, note: Note) -> list[Note]:
        """The notes of all ranks. The first rank collects them, so that each of the others asks for one thing only."""
        ranks = range(self._world_size)
        if self._rank:
            self._board.say(str(self._rank), note)
            said = self._board.hear([_ALL], self._off.wait)[0]
        else:
            heard: list[Any] = self._board.hear([str(rank) for rank in ranks if rank], self._off.wait)
            said = {str(rank): one for rank, one in zip(ranks, [note, *heard], strict=True) if one}
            self._board.say(_ALL, said)
        return [dict(said.get(str(rank), {})) for rank in ranks]

    def _go_on(self, moved: int) -> None:
        if self._off.is_set():
            raise CalledOff("what this rank resumes from is not verified any more")
