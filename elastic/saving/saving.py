"""Saving as one act of all ranks: it succeeds on all or fails on all, and no rank waits for one that failed.

Rank 0 chooses the name. Every rank writes its files, and all exchange errors. The files are dealt out, and all ranks
sync and checksum them. Rank 0 seals, and all learn the digest. After each part that can fail, all ranks compare notes
before they go on to the next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from dalsegno.protos import trace

from ..checkpoint import Best, CheckpointStore, FileEntry, Manifest, Ref
from ..checkpoint.files import checksums, list_files, write_exclusive
from ..rank import rng
from ..rank.board import Board, open_board
from ..rank.collective import Collective, PeerLost
from ..rank.identity import Identity
from ..rank.link import Link
from ..rank.remarks import remark
from .answers import TOLD_OTHERWISE, Answers, raise_first
from .apart import PATIENCE_SHARE, all_files, has_to_seal, missing_parts, seal_once, unless_stuck
from .background_save import LAST_WORDS_SECONDS, Background, Flight, UnderWay, check_paths
from .content import Content, Own
from .file_check import FileCheck
from .names import Names
from .outcomes import Outcomes, SaveError
from .save_errors import Failed, kept, problem, trouble
from .saving_reports import Count, SavingReports, Written, bytes_below
from .sealing import Sealing
from .staging import HostBuffers, wait_for_cards
from .stranded import Unawaited, unless_stranded
from .tiers import Disk, Memory
from .writing import Summed

log = logging.getLogger(__name__)

# So long the ranks' threads have to seal what all have written in memory.
SEALING_SECONDS = 5.0


class Saver:
    """Saves checkpoints of one session.

    Args:
        identity: This worker.
        collective: The session's group.
        store: The run's directory.
        link: The connection to the agent, if there is one.
        resumed_from: The resume point of this epoch.
        best, candidate: The best checkpoint as of the resume point, and what was on its way to be that.
        resumed_in_memory: That is not on the disk yet.

    Attributes:
        bests: The best checkpoint as of the last save, the same on all ranks.
        saved: The last checkpoints.
        disk: Where they go that do not go to memory.
        apart: A leaver was gone before a drain's save was complete: this rank has done its part, and goes.
    """

    def __init__(
        self,
        identity: Identity,
        collective: Collective,
        store: CheckpointStore,
        link: Link | None,
        resumed_from: Ref | None,
        best: Best | None = None,
        candidate: Best | None = None,
        resumed_in_memory: bool = False,
    ) -> None:
        self._identity, self._collective, self._store = identity, collective, store
        self._link, self._resumed_from = link, resumed_from
        self._names = Names(identity, collective)
        self._unless_stranded = partial(unless_stranded, collective, identity, link)
        self._unawaited = Unawaited(identity)
        in_memory = resumed_from.name if resumed_from is not None and resumed_in_memory else ""
        self._outcomes = Outcomes(identity, collective, link, store, best, candidate, in_memory)
        self.bests, self.saved = self._outcomes.bests, self._outcomes.saved
        self.apart = False
        self._answers, self.disk = Answers(collective), Disk(store, identity, resumed_from)
        self._memory = None if identity.memory_dir is None else Memory(CheckpointStore(identity.memory_dir), identity)
        self._noted_empty = False
        self._buffers = HostBuffers()
        self._files = FileCheck(identity)
        self._under_way: UnderWay | None = None
        # What the other ranks were last told of, see `tells`.
        self._told_of: UnderWay | None = None
        self._board: Board | None = None
        self._sealed_before: Sealing | None = None
        # All ranks have agreed on one save in memory, file by file: later ones do as they go. And the ranks' threads do
        # not seal any more: the store was silent or gone.
        self._agreed = self._unsealed = False

    def save(
        self,
        content: Content,
        write: Callable[[Path], None],
        *,
        create_directory: bool,
        drain: bool,
        in_memory: bool = False,
    ) -> Manifest | None:
        """Writes and seals one checkpoint. Collective: all ranks call it at the same step.

        Args:
            content: What is saved.
            write: Called with the checkpoint's path on every rank; writes this rank's files below it.
            create_directory: The directory exists when ``write`` is called. Frameworks that make it themselves get a
                path that does not exist yet.
            drain: It is a drain's: for the report of a failure, and for a leaver that is gone before it is complete.
            in_memory: Into the nodes' memory, which is there on all ranks.

        Returns:
            The manifest, on every rank; None if the save failed on some rank. Then nothing of it is left. With
            ``apart`` only the rank that sealed it has the manifest.

        Raises:
            PeerLost: Only in a drain: a peer is gone that was no leaver.
            SaveError: ``write`` failed on some rank, and not for lack of disk or memory: a mistake, which every later
                save would repeat. Raised on all ranks.
        """
        own, began = Own(content, self._tier(in_memory), drain), time.monotonic()
        try:
            with self._together(own, drain):
                self._names.choose(own, self.bests.as_of, create_directory=create_directory)
                self._write(own, write, create_directory)
                trace.mark("written")
                entries = self._describe(own)
                trace.mark("synced")
                self._files.check([entry.path for some in entries for entry in some], own.content)
                manifest = self._seal(own, entries)
        except Failed as failure:
            self._outcomes.failed(own, failure, drain)
            return None
        except PeerLost as lost:
            return self._complete(own, lost, began)
        self._outcomes.announce(own, manifest, began)
        return manifest

    def _tier(self, in_memory: bool) -> Disk:
        tier = self._memory if in_memory else self.disk
        assert tier is not None
        return tier

    def tells(self) -> tuple[bool, bool]:
        """What the others must hear of the save under way: whether this rank's part has failed, or is not over."""
        ending = self._told_of = self._under_way
        if ending is None:
            return False, False
        # In this order: it may end in between.
        over = ending.over
        return over and ending.failed, not over

    @property
    def busy(self) -> bool:
        """This rank's part of the save that is under way is not over."""
        return self._under_way is not None and not self._under_way.over

    @property
    def under_way(self) -> Disk | None:
        """Where a save goes that is not settled yet; on all ranks alike."""
        return None if self._under_way is None else self._under_way.own.tier

    def begin(
        self,
        content: Content,
        state: Background,
        sealed: Callable[[], None],
        *,
        drain: bool,
        in_memory: bool = False,
        waits: bool = False,
    ) -> str | None:
        """Copies what ``state`` returns, and starts writing and sealing it while the training goes on. Collective.

        Args:
            content: What is saved.
            state: This rank's files.
            sealed: Called on a thread of rank 0 once the checkpoint is sealed and announced. Not of one in memory.
            drain: For the report of a failure.
            in_memory: Into the nodes' memory, which is there on all ranks. Each rank's thread has a part in sealing it.
            waits: `settle` follows at once, so nothing changes meanwhile, and nothing is copied.

        Returns:
            The checkpoint's name, on every rank; None if some rank could not begin. ``settle`` says how it ended.

        Raises:
            RuntimeError: The previous save is not settled.
            SaveError: See ``save``.
        """
        if self._under_way is not None:
            raise RuntimeError(f"{self._under_way.own.name} is being saved; settle that first")
        own, began = Own(content, self._tier(in_memory), drain), time.monotonic()
        try:
            files, copied = self._stage(own, state, waits=waits)
        except Failed as failure:
            self._buffers.release()
            self._outcomes.failed(own, failure, drain)
            return None
        self._agreed = self._agreed or in_memory
        path, identity, done = own.path, self._identity, Count(0)
        reports = SavingReports(self._link, own.name, done.read, path if identity.local_rank == 0 else None)

        def seal_all(entries: tuple[FileEntry, ...]) -> str:
            manifest = self._manifest(own.name, own.content, entries)
            own.tier.seal(manifest, [entries])
            self._outcomes.tell(own, manifest, began)
            sealed()
            return manifest.digest

        patience_seconds = PATIENCE_SHARE * identity.stall_timeout
        seals, sealing = (None, self._sealing(own, began)) if in_memory else (seal_all, None)
        then = None if sealing is None else sealing.begin
        more = done, patience_seconds, reports, then, own.tier.check_room
        flight = Flight(path, identity.rank, identity.world_size, files, copied, seals, *more)
        self._under_way = UnderWay(own, drain, flight, began, sealing)
        return own.name

    def _sealing(self, own: Own, began: float) -> Sealing | None:
        """None: the ranks seal it as they settle it."""
        if self._unsealed:
            return None
        board = self._board = self._board or open_board(self._collective)
        manifest = partial(self._manifest, own.name, own.content)
        check, tell = partial(self._files.check, content=own.content), partial(self._outcomes.tell, own, began=began)
        before, identity = self._sealed_before, self._identity
        self._sealed_before = sealing = Sealing(board, identity, own, manifest, check, tell, before)
        return sealing

    def settle(self, *, over: bool = False) -> tuple[int, Ref] | None:
        """Returns what became of the save under way. Collective; waits until it has ended on all ranks.

        Args:
            over: No rank has told of a failure or of work since `tells` was asked; alike on all ranks.

        Returns:
            Its step and the checkpoint, on every rank; None if there was none, or if it failed and nothing of it is
            left.

        Raises:
            SaveError: See ``save``.
        """
        ending = self._under_way
        if ending is None:
            return None
        own = ending.own
        over = over and ending is self._told_of and own.tier.in_memory
        try:
            try:
                error = ending.flight.written()
                own.written = error is None
                with self._together(own, ending.drain):
                    ref = (
                        self._settle_in_memory(ending, error, over)
                        if own.tier.in_memory
                        else self._settle(ending, error)
                    )
            finally:
                ending.cancel()
                self._buffers.release()
                self._under_way = self._told_of = None
        except Failed as failure:
            self._outcomes.failed(own, failure, ending.drain)
            return None
        except PeerLost as lost:
            completed = self._complete(own, lost, ending.began)
            return None if completed is None else (completed.step, completed.ref)
        self._outcomes.note(own, ref)
        return own.content.step, ref

    def _settle(self, ending: UnderWay, error: BaseException | None) -> Ref:
        """Rank 0's thread has sealed it, or not."""
        path, answer = ending.own.path, dict[str, Any]()
        self._answers.agree(error, path)
        if self._identity.rank == 0:
            digest, error = ending.flight.sealed()
            found = problem(error, path)
            answer = {"digest": digest} if found is None else found.answer
        answer = self._collective.broadcast(answer)
        raise_first([answer])
        return Ref(ending.own.name, answer["digest"])

    def _settle_in_memory(self, ending: UnderWay, error: BaseException | None, over: bool) -> Ref:
        """The ranks' threads have sealed it, or not. ``over``: they have, on all ranks, as all know."""
        own, sealing, answers = ending.own, ending.sealing, self._answers
        if sealing is not None:
            digest = sealing.digest if over else answers.agree_on_end(sealing, error, own.path, seconds=SEALING_SECONDS)
            if digest and sealing.manifest is not None and not sealing.told:
                self._outcomes.tell(own, sealing.manifest, ending.began)
            if digest:
                return Ref(own.name, digest)
            log.debug("%s is sealed by hand, and so are those to come: %s", own.name, sealing.error)
            self._unsealed = True
        # Nobody sees what other nodes have written: all hear of it here, and seal.
        own.moved = sum(entry.size for entry in ending.flight.entries)
        said = answers.answer(error, own.path) or {"files": [asdict(entry) for entry in ending.flight.entries]}
        entries = [[FileEntry(**entry) for entry in one["files"]] for one in answers.exchange(said)]
        self._files.check([entry.path for some in entries for entry in some], own.content)
        manifest = self._seal(own, entries)
        self._outcomes.announce(own, manifest, ending.began)
        return manifest.ref

    def _together(self, own: Own, drain: bool) -> AbstractContextManager[None]:
        """Around the collectives of a save. In a drain's nobody waits for a leaver whose notice is over.

        In memory nobody else has what the leaver has: without it there is no checkpoint.
        """
        link = self._link
        if link is None or not drain or own.tier.in_memory:
            return nullcontext()
        return self._collective.unless(lambda: bool(link.ending))

    def _complete(self, own: Own, lost: PeerLost, began: float) -> Manifest | None:
        """Completes a save after a peer is gone. If it was a leaver, another rank seals what is there, see `apart`.

        Raises:
            PeerLost: It was no leaver, or this rank's part is not written.
            SaveError: A rank's part is missing.
        """
        identity, link = self._identity, self._link
        if link is None or not own.written or own.tier.in_memory:
            raise lost
        sealing = has_to_seal(link, identity.local_rank, lost)
        self.apart = True
        if not sealing:
            return None
        path, done = self._store.path(own.name), Count(sum(entry.size for entry in own.entries))
        beside = range(identity.rank, identity.rank + identity.local_world_size)
        missing = missing_parts(path, identity.world_size, beside)
        if missing:
            raise SaveError(f"{own.name} is lost: rank {missing[0]} had to go before its part was written")
        with SavingReports(link, own.name, done.read, path):
            files = all_files(path, own.entries, done.add)
            self._files.check([entry.path for entry in files], own.content)
            manifest = seal_once(path, self._manifest(own.name, own.content, files))
        self._outcomes.tell(own, manifest, began)
        self._outcomes.note(own, manifest.ref)
        return manifest

    def _stage(self, own: Own, state: Background, *, waits: bool) -> tuple[dict[str, Any], Callable[[], None]]:
        """This rank's files in host memory, once all ranks have theirs.

        Where ranks have agreed on a save in memory before, they do not wait for one another again: the name comes while
        the copies are made, and what a rank could not copy comes with what it could not write.

        Returns:
            The files, and what the thread calls before it writes them.
        """
        beside = self._agreed and own.tier.in_memory and not (waits or state.copies or own.content.make_durable)
        asked = self._names.ask(own, self.bests.as_of, create_directory=True, looks=not beside)
        if not beside:
            asked.answer()
        files, error = self._copied(own, state, copies=not waits, enters=not beside)
        if beside:
            self._unawaited.note(own, error)
            asked.answer()
            return files, partial(self._enter_late, own, error)
        found = problem(error, own.path)
        said = {"paths": sorted(files)} if found is None else found.answer
        with self._unless_stranded(own, said):
            answers = self._answers.exchange(said)
        self._files.check([path for answer in answers for path in answer["paths"]], own.content)
        return files, self._buffers.wait

    def _enter_late(self, own: Own, error: BaseException | None) -> None:
        if error is not None:
            raise error
        own.tier.look()
        own.tier.enter(own.name, create=True)
        self._buffers.wait()

    def _copied(
        self, own: Own, state: Background, *, copies: bool, enters: bool
    ) -> tuple[dict[str, Any], BaseException | None]:
        try:
            if enters:
                own.tier.enter(own.name, create=True)
            # Who makes its copies itself has been told the name before.
            path = own.path if enters else Path()
            staged = state.staged(self._buffers.add if copies else lambda given: given, path)
            if copies:
                self._buffers.trim()
            else:
                wait_for_cards(staged)
            check_paths(staged)
            return {**staged, rng.file_name(self._identity.rank): rng.taken()}, None
        # The other ranks must hear of every error before this one does anything else.
        except BaseException as caught:
            log.debug("no state to save", exc_info=caught)
            return {}, kept(caught)

    def close(self) -> None:
        """Ends it when the script goes on without a session: what is under way gets some time. Not collective."""
        ending = self._under_way
        if ending is not None and ending.own.tier.in_memory:
            ending.cancel()
        elif ending is not None and not ending.flight.wait(LAST_WORDS_SECONDS):
            log.warning("%s is not sealed yet, and nobody will hear of it", ending.own.name)
        self._outcomes.close(LAST_WORDS_SECONDS)

    def improves(self, value: float | None) -> bool:
        """Whether a checkpoint with rank 0's ``value`` would be the best so far. Collective."""
        best = None if self._under_way is None else self._under_way.own.content.best
        return bool(self._collective.broadcast(self.bests.improves(value, best)))

    def credit(self, name: str, value: float) -> None:
        """See `Outcomes`."""
        self._outcomes.credit(name, value)

    def _write(self, own: Own, write: Callable[[Path], None], create_directory: bool) -> None:
        path = own.path
        error: BaseException | None = None
        link = self._link if self._identity.local_rank == 0 else None
        with SavingReports(link, own.name, Written(path).read, path), Summed(own.tier.check_room) as summed:
            try:
                own.tier.enter(own.name, create=create_directory)
                write(path)
                state = path / rng.file_name(self._identity.rank)
                state.parent.mkdir(parents=True, exist_ok=True)
                write_exclusive(state, rng.capture(), lasting=False)  # `_describe` makes it durable
            # The other ranks must hear of every error before this one does anything else.
            except BaseException as caught:
                error = kept(caught)
        own.written = error is None
        # Kept no longer: it holds open what its write was about, and in memory what is deleted so stays there.
        said, error = self._answers.answer(error, path), None
        with self._unless_stranded(own, said):
            self._answers.exchange(said)
        # Another rank may change what this one wrote, until all have said that they are through.
        own.summed = summed.entries(path)

    def _describe(self, own: Own) -> list[list[FileEntry]]:
        """Every file of the checkpoint with its checksum, durable, by the rank that read it: all share the work.

        Nobody reads back a file that a rank checksummed while it wrote it: that rank makes it durable.
        """
        path, identity = own.path, self._identity
        # One rank of each node lists: a network file system may not show a node yet what another one wrote.
        part: dict[str, Any] = {"files": [], "summed": [entry.path for entry in own.summed]}
        try:
            if identity.local_rank == 0:
                part["files"] = list_files(path)
        except Exception as error:
            part |= trouble(error, path)
        listed = self._answers.exchange(part)
        twice = own.tier.written_twice([some["files"] for some in listed])
        own.summed = tuple(entry for entry in own.summed if entry.path not in twice)
        summed = {file for some in listed for file in some["summed"]} - twice
        dealt = own.tier.dealt([[file for file in some["files"] if file not in summed] for some in listed])
        part = {"files": []}
        done = Count(bytes_below(path) if identity.local_rank == 0 else 0)
        try:
            with SavingReports(self._link, own.name, done.read, path if identity.local_rank == 0 else None):
                lasting = not own.tier.in_memory
                sync = partial(checksums, path, dealt, sync=lasting, known=own.summed, moved=done.add)
                own.entries = tuple(unless_stuck(sync, done, PATIENCE_SHARE * identity.stall_timeout))
            own.moved = done.read()
            part["files"] = [asdict(entry) for entry in own.entries]
        except Exception as error:
            part |= trouble(error, path)
        described = [[FileEntry(**entry) for entry in said["files"]] for said in self._answers.exchange(part)]
        entries = [entry for some in described for entry in some]
        if all(PurePosixPath(entry.path).parts[0] == rng.DIRECTORY for entry in entries) and not self._noted_empty:
            self._noted_empty = True
            if self._identity.rank == 0:
                remark(
                    "save wrote nothing below the path it was given: %s holds no weights, only generators", path.name
                )
        return described

    def _manifest(self, name: str, content: Content, files: tuple[FileEntry, ...]) -> Manifest:
        return content.manifest(name, self._identity, self._resumed_from, files)

    def _seal(self, own: Own, entries: Sequence[Sequence[FileEntry]]) -> Manifest:
        """Every rank knows all files; those that lead write it down."""
        files = sorted((entry for some in entries for entry in some), key=lambda entry: entry.path)
        manifest = self._manifest(own.name, own.content, tuple(files))
        said = {"digest": manifest.digest}
        if own.tier.leads:
            try:
                # On a disk a directory is synced, too, which may take its time.
                link = None if own.tier.in_memory else self._link
                with SavingReports(link, own.name, lambda: own.moved, own.path):
                    own.tier.seal(manifest, entries)
            except Exception as error:
                said = trouble(error, own.path)
        first = self._answers.exchange(said)[0]
        if first["digest"] != manifest.digest:
            raise SaveError(f"{TOLD_OTHERWISE}, rank {self._identity.rank} another manifest than rank 0: {manifest}")
        return manifest
