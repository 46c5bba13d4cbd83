"""A memory checkpoint that was written beside the training is sealed beside it: by threads, over the world's store.

Nobody sees what other nodes have written. So every rank tells rank 0, which compares, the first rank of each node seals
there, and all learn that it is done. It is sealed a few milliseconds after the slowest rank has written its files,
however long a step takes, and no rank's training waits for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..checkpoint import CheckpointDamaged, FileEntry, Manifest
from ..rank.board import Board
from ..rank.identity import Identity
from .answers import raise_first
from .content import Own
from .save_errors import Failed, describe

Off = Callable[[float], bool]


class Sealing:
    """One rank's part in sealing one checkpoint, on the thread that has written its files.

    Args:
        board: Of this world.
        identity: This worker.
        own: The save.
        manifest: Makes the manifest; on all ranks the same bytes.
        check: Rank 0 gives it the paths of all files, before anything is sealed. It raises `Failed`.
        sealed: Called with the manifest on the ranks that lead, once all nodes have sealed it.
        before: The one before, whose end all ranks know, since they have begun this one.
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

    def failed(self, answer: Mapping[str, Any]) -> None:
        """This rank could not write its files: no other rank need wait for them."""
        if self._identity.rank == 0:
            self._decided({self._files, self._end}, [answer], lambda answers: {})
        else:
            self._board.say(self._parts[self._identity.rank], answer)

    def seal(self, entries: Sequence[FileEntry], off: Off) -> str:
        """Seals it with all other ranks. Returns the manifest's digest.

        Args:
            entries: What this rank has written.
            off: As of `Board.hear`.

        Raises:
            Failed: Some rank has a problem; on all ranks.
            CalledOff: ``off`` said so.
            RuntimeError: The store is gone.
        """
        board, identity = self._board, self._identity
        if self._before is not None:
            self._before.forget()
            self._before = None
        leads, leading = self._own.tier.leads, list[int]()
        board.say(self._parts[identity.rank], {"files": [asdict(entry) for entry in entries], "leads": leads})
        if identity.rank == 0:
            parts = board.hear(self._parts, off)
            self._decided({self._files}, parts, self._compared)
            leading = [rank for rank, part in enumerate(parts) if part.get("leads")]
        manifest = self._seal_here(off) if leads else None
        if identity.rank == 0:
            self._decided({self._end}, board.hear([self._leads[rank] for rank in leading], off), self._alike)
        digest = str(self._heard(self._end, off)["digest"])
        if manifest is not None:
            self._sealed(manifest)
        return digest

    def forget(self) -> None:
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

    def _seal_here(self, off: Off) -> Manifest:
        """For this node. That it could not be sealed here comes back as the end of all."""
        described = [[FileEntry(**entry) for entry in some] for some in self._heard(self._files, off)["entries"]]
        files = sorted((entry for some in described for entry in some), key=lambda entry: entry.path)
        manifest = self._manifest(tuple(files))
        said: dict[str, Any] = {"digest": manifest.digest}
        try:
            self._own.tier.seal(manifest, described)
        except (OSError, CheckpointDamaged) as error:
            said = {"text": describe(error), "rank": self._identity.rank}
        self._board.say(self._leads[self._identity.rank], said)
        return manifest

    def _heard(self, name: str, off: Off) -> dict[str, Any]:
        said: dict[str, Any] = self._board.hear([name], off)[0]
        if "failed" in said:
            raise Failed(said["failed"], said["fatal"], final=said["final"])
        return said
