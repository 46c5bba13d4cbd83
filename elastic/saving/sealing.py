"""A memory checkpoint that was written beside the training is sealed beside it: by threads, over the world's store.

Nobody sees what other nodes have written. So every rank tells rank 0, which compares, the first rank of each node seals
there, and all learn that it is done. It is sealed a few milliseconds after the slowest rank has written its files,
however long a step takes, and no rank's training waits for that.

A store may fall silent, and then nothing that asks it comes back. So these threads are given up where they do not end,
and the ranks' main threads seal by themselves what all have written.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..checkpoint import FileEntry, Manifest
from ..rank.board import Board, CalledOff
from ..rank.identity import Identity
from .answers import raise_first
from .content import Own
from .save_errors import Failed, problem, trouble

# Seconds in which a thread that is told to stop does, unless it is given up.
STOP_SECONDS = 0.5


class Sealing:
    """One rank's part in sealing one checkpoint, on a thread of its own.

    Args:
        board: Of this world.
        identity: This worker.
        own: The save.
        manifest: Makes the manifest; on all ranks the same bytes.
        check: Rank 0 gives it the paths of all files, before anything is sealed. It raises `Failed`.
        sealed: Called with the manifest on the ranks that lead, once all nodes have sealed it.
        before: The one before, whose end all ranks know, since they have begun this one.

    Attributes:
        over: The thread has ended.
        digest: The manifest's, if this rank knows that it is sealed on all nodes.
        error: What ended the thread, if it was an error of its own.
        told: ``sealed`` has been called.
    """

    def __init__(
        self,
        board: Board,
        identity: Identity,
        own: Own,
        manifest: Callable[[tuple[FileEntry, ...]], Manifest],
        check: Callable[[Sequence[str]], None],
        sealed: Callable[[Manifest], None],
        before: Sealing | None,
    ) -> None:
        self._board, self._identity, self._own = board, identity, own
        self._manifest, self._check, self._sealed, self._before = manifest, check, sealed, before
        # Where ranks say what they have written, and those that lead that they have sealed it.
        self._parts, self._leads = (
            [f"{own.name}/{what}/{rank}" for rank in range(identity.world_size)] for what in ("part", "lead")
        )
        # Where rank 0 says what that makes together, and how it ends.
        self._files, self._end = f"{own.name}/files", f"{own.name}/end"
        self.over, self.digest, self.told = threading.Event(), "", False
        # Sealed here, on a rank that leads: rank 0 tells nobody that it is sealed before all these have it.
        self.manifest: Manifest | None = None
        self.error: BaseException | None = None
        # Held while something is done that others see, and set while that is not: nothing is done behind `stop`.
        self._acts, self._off = threading.Lock(), threading.Event()

    @property
    def failed(self) -> bool:
        """It is over, and this rank does not know that it is sealed."""
        return self.over.is_set() and not self.digest

    def begin(self, entries: Sequence[FileEntry], error: BaseException | None) -> None:
        """Seals it with all other ranks, or tells them that this rank could not write its files. Any thread.

        Args:
            entries: What this rank has written.
            error: Why it could not.
        """
        # A daemon: whoever asks a silent store never comes back, and a process may end all the same.
        thread = threading.Thread(target=self._run, args=(entries, error), name="dalsegno-sealing", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as late:  # the interpreter is ending, or no more threads are allowed
            self.error = late
            self.over.set()

    def stop(self) -> None:
        """Nothing is sealed or told any more by this; waits for the thread, but not for a store that is silent."""
        with self._acts:
            self._off.set()
        self.over.wait(STOP_SECONDS)

    def _run(self, entries: Sequence[FileEntry], error: BaseException | None) -> None:
        # A thread that needs the interpreter while Python ends would abort the process.
        atexit.register(self.stop)
        try:
            if self._before is not None:
                self._before._forget()
                self._before = None
            if error is None:
                self.digest = self._seal(entries)
            else:
                self._tell_failed(error)
        # The main thread hears of every error, and through it the other ranks.
        except BaseException as caught:
            # Without what it came through: that may hold a file open, and in memory what is deleted so stays there.
            self.error = caught.with_traceback(None)
        finally:
            self.over.set()
            atexit.unregister(self.stop)

    def _is_off(self, seconds: float) -> bool:
        """Waits for so long; returns whether nobody wants to know any more how this ends."""
        return self._off.wait(seconds) or not threading.main_thread().is_alive()

    def _tell_failed(self, error: BaseException) -> None:
        found = problem(error, self._own.path)
        answer: Mapping[str, Any] = {} if found is None else found.answer
        if self._identity.rank == 0:
            self._decided({self._files, self._end}, [answer], lambda answers: {})
        else:
            self._board.say(self._parts[self._identity.rank], answer)

    def _seal(self, entries: Sequence[FileEntry]) -> str:
        """Returns the manifest's digest.

        Raises:
            Failed: Some rank has a problem; on all ranks.
            CalledOff: `stop` was called.
            RuntimeError: The store is gone.
        """
        board, identity, off = self._board, self._identity, self._is_off
        leads, leading = self._own.tier.leads, list[int]()
        self._check_wanted()
        board.say(self._parts[identity.rank], {"files": [asdict(entry) for entry in entries], "leads": leads})
        if identity.rank == 0:
            parts = board.hear(self._parts, off)
            self._decided({self._files}, parts, self._compared)
            leading = [rank for rank, part in enumerate(parts) if part.get("leads")]
        manifest = self._seal_here() if leads else None
        if identity.rank == 0:
            self._decided({self._end}, board.hear([self._leads[rank] for rank in leading], off), self._alike)
        digest = str(self._heard(self._end)["digest"])
        if manifest is not None:
            self._act(lambda: self._tell(manifest))
        return digest

    def _forget(self) -> None:
        """What was said of it is not asked for again."""
        identity, board = self._identity, self._board
        board.forget(self._parts[identity.rank])
        if self._own.tier.leads:
            board.forget(self._leads[identity.rank])
        for name in (self._files, self._end) if identity.rank == 0 else ():
            board.forget(name)

    def _decided(self, names: set[str], answers: list[Any], decided: Callable[[list[Any]], Mapping[str, Any]]) -> None:
        """On rank 0: says what follows from the answers, or that it has failed."""
        try:
            raise_first(answers)
            said = decided(answers)
        except Failed as failure:
            said = {"failed": str(failure), "fatal": failure.fatal, "final": failure.final}
            names.add(self._end)  # Ranks that do not lead wait for that alone.
        for name in names:
            self._board.say(name, said)

    def _compared(self, answers: list[Any]) -> Mapping[str, Any]:
        self._check([entry["path"] for said in answers for entry in said["files"]])
        return {"entries": [said["files"] for said in answers]}

    def _alike(self, answers: list[Any]) -> Mapping[str, Any]:
        digests = {said["digest"] for said in answers}
        if len(digests) > 1:
            raise Failed(f"nodes have sealed {self._own.name} with different manifests", fatal=True)
        return {"digest": digests.pop()}

    def _seal_here(self) -> Manifest:
        """For this node. That it could not be sealed here comes back as the end of all."""
        described = [[FileEntry(**entry) for entry in some] for some in self._heard(self._files)["entries"]]
        files = sorted((entry for some in described for entry in some), key=lambda entry: entry.path)
        manifest = self._manifest(tuple(files))
        said: dict[str, Any] = {"digest": manifest.digest}
        try:
            self._act(lambda: self._own.tier.seal(manifest, described))
            self.manifest = manifest
        except CalledOff:
            raise
        except Exception as error:
            said = {**trouble(error, self._own.path), "rank": self._identity.rank}
        self._board.say(self._leads[self._identity.rank], said)
        return manifest

    def _tell(self, manifest: Manifest) -> None:
        self._sealed(manifest)
        self.told = True

    def _act(self, work: Callable[[], None]) -> None:
        """Does what others see.

        Raises:
            CalledOff: `stop` was called.
        """
        with self._acts:
            self._check_wanted()
            work()

    def _check_wanted(self) -> None:
        if self._off.is_set():
            raise CalledOff(f"{self._own.name} is sealed in another way, or not at all")

    def _heard(self, name: str) -> dict[str, Any]:
        said: dict[str, Any] = self._board.hear([name], self._is_off)[0]
        if "failed" in said:
            raise Failed(said["failed"], said["fatal"], final=said["final"])
        return said
