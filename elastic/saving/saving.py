"""Saving as one act of all ranks: it succeeds on all or fails on all, and no rank waits for one that failed.

Rank 0 chooses the name. Every rank writes its files, and all exchange errors. The files are dealt out, and all ranks
sync and checksum them. Rank 0 seals, and all learn the digest. After each part that can fail, all ranks compare notes
before they go on to the next.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from dalsegno.protos import trace, worker_pb2

from ..checkpoint import (
    Best,
    CheckpointDamaged,
    CheckpointStore,
    FileEntry,
    Manifest,
    Ref,
    seal,
)
from ..checkpoint.files import checksums, list_files, write_exclusive
from ..rank import rng
from ..rank.collective import Collective, PeerLost
from ..rank.identity import Identity
from ..rank.link import Link
from ..rank.meetings import Meetings
from ..rank.remarks import remark
from .answers import TOLD_OTHERWISE, Answers
from .apart import PATIENCE_SHARE, all_files, has_to_seal, missing_parts, seal_once, unless_stuck
from .background_save import LAST_WORDS_SECONDS, PARTS, Background, Flight, UnderWay, check_paths
from .bests import Bests, Sight, writes_when_new
from .content import Content, Own
from .declared import DDP, contradiction, say_what_each_rank_has
from .names import Names
from .notes import Notes
from .save_errors import Failed, describe, kept, problem
from .saving_reports import Count, SavingReports, bytes_below
from .staging import HostBuffers
from .tiers import Disk, LastSaves, Memory
from .writing import Summed

log = logging.getLogger(__name__)


class SaveError(RuntimeError):
    """A save failed because of something that another try will not cure, or it failed too often."""


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
        in_memory = resumed_from.name if resumed_from is not None and resumed_in_memory else ""
        self.bests = Bests(Sight(store), best, candidate, in_memory)
        self.apart = False
        self.saved = LastSaves()
        self._answers, self._disk = Answers(collective), Disk(store, identity)
        self._memory = None if identity.memory_dir is None else Memory(CheckpointStore(identity.memory_dir), identity)
        self._notes = Notes(store, apart=link is not None)
        self._note_best = writes_when_new(partial(self._notes.write, None))
        self._noted_empty = False
        self._buffers = HostBuffers()
        self._looked = False
        self._under_way: UnderWay | None = None

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
        own, began = Own(content, self._tier(in_memory)), time.monotonic()
        try:
            with self._together(own, drain):
                own.name, own.content = self._names.choose(own, self.bests.as_of, create_directory=create_directory)
                self._write(own, write, create_directory)
                trace.mark("written")
                entries = self._describe(own)
                trace.mark("synced")
                self._check_files([entry.path for some in entries for entry in some], own.content)
                manifest = self._seal(own, entries)
        except Failed as failure:
            self._failed_save(own, failure, drain)
            return None
        except PeerLost as lost:
            return self._complete(own, lost, began)
        self._announce(own, manifest, began)
        return manifest

    def _tier(self, in_memory: bool) -> Disk:
        tier = self._memory if in_memory else self._disk
        assert tier is not None
        return tier

    @property
    def failed(self) -> bool:
        """Whether this rank could not write its part of the save under way. The others must hear of it."""
        return self._under_way is not None and self._under_way.flight.failed

    @property
    def busy(self) -> bool:
        """This rank's part of the save that is under way is not over."""
        return self._under_way is not None and not self._under_way.flight.wait(0.0)

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
            in_memory: Into the nodes' memory, which is there on all ranks. It is sealed by `settle`.
            waits: `settle` follows at once, so nothing changes meanwhile, and nothing is copied.

        Returns:
            The checkpoint's name, on every rank; None if some rank could not begin. ``settle`` says how it ended.

        Raises:
            RuntimeError: The previous save is not settled.
            SaveError: See ``save``.
        """
        if self._under_way is not None:
            raise RuntimeError(f"{self._under_way.own.name} is being saved; settle that first")
        own, began = Own(content, self._tier(in_memory)), time.monotonic()
        try:
            own.name, own.content = self._names.choose(own, self.bests.as_of, create_directory=True)
            files = self._stage(own, state, copies=not waits)
        except Failed as failure:
            self._buffers.release()
            self._failed_save(own, failure, drain)
            return None
        path, identity, done = own.path, self._identity, Count(0)
        reports = SavingReports(self._link, own.name, done.read, path if identity.local_rank == 0 else None)

        def seal_all(entries: tuple[FileEntry, ...]) -> str:
            manifest = self._manifest(own.name, own.content, entries)
            digest = seal(path, manifest)
            self._tell(own, manifest, began)
            sealed()
            return digest

        copied = self._buffers.wait
        patience_seconds = PATIENCE_SHARE * identity.stall_timeout
        seals = None if in_memory else seal_all
        flight = Flight(path, identity.rank, identity.world_size, files, copied, seals, done, patience_seconds, reports)
        self._under_way = UnderWay(own, drain, flight, began)
        return own.name

    def settle(self) -> tuple[int, Ref] | None:
        """Returns what became of the save under way. Collective; waits until it has ended on all ranks.

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
        try:
            try:
                error = ending.flight.written()
                own.written = error is None
                with self._together(own, ending.drain):
                    ref = self._settle_in_memory(ending, error) if own.tier.in_memory else self._settle(ending, error)
            finally:
                ending.flight.cancel()
                self._buffers.release()
                self._under_way = None
        except Failed as failure:
            self._failed_save(own, failure, ending.drain)
            return None
        except PeerLost as lost:
            completed = self._complete(own, lost, ending.began)
            return None if completed is None else (completed.step, completed.ref)
        self._note(own, ref)
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
        self._answers.raise_first([answer])
        return Ref(ending.own.name, answer["digest"])

    def _settle_in_memory(self, ending: UnderWay, error: BaseException | None) -> Ref:
        """Nobody sees what other nodes have written: all hear of it here, and seal."""
        own, answer = ending.own, self._answers.answer(error, ending.own.path)
        own.moved = sum(entry.size for entry in ending.flight.entries)
        answers = self._answers.exchange(answer or {"files": [asdict(entry) for entry in ending.flight.entries]})
        manifest = self._seal(own, [[FileEntry(**entry) for entry in said["files"]] for said in answers])
        self._announce(own, manifest, ending.began)
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
            self._check_files([entry.path for entry in files], own.content)
            manifest = seal_once(path, self._manifest(own.name, own.content, files))
        self._tell(own, manifest, began)
        self._note(own, manifest.ref)
        return manifest

    def _stage(self, own: Own, state: Background, *, copies: bool) -> dict[str, Any]:
        """This rank's files in host memory, once all ranks have theirs."""
        content = own.content
        error: BaseException | None = None
        files: dict[str, Any] = {}
        try:
            own.tier.enter(own.name, create=True)
            staged = state.staged(self._buffers.add if copies else lambda given: given, own.path)
            if copies:
                self._buffers.trim()
            check_paths(staged)
            files = {**staged, rng.file_name(self._identity.rank): rng.capture()}
        # The other ranks must hear of every error before this one does anything else.
        except BaseException as caught:
            log.debug("no state to save", exc_info=caught)
            error = kept(caught)
        found = problem(error, own.path)
        answers = self._answers.agree_on(content, {"paths": sorted(files)} if found is None else found.answer)
        paths = [path for answer in answers for path in answer["paths"]]
        for path in sorted({path for path in paths if paths.count(path) > 1}):
            raise Failed(f"several ranks save {path}, and only one may", fatal=True)
        self._check_files(paths, content)
        return files

    def _check_files(self, paths: list[str], content: Content) -> None:
        """Checks that the files are what the script says that it saves. All ranks get the same answer."""
        reason = contradiction(paths, content.strategy, content.any_world_size)
        if reason is not None:
            raise Failed(reason, fatal=True)
        if self._looked or content.strategy != DDP or not content.any_world_size:
            return
        self._looked = True
        if self._identity.rank == 0:
            own = [path for path in paths if PurePosixPath(path).parts[0] not in (rng.DIRECTORY, PARTS)]
            say_what_each_rank_has(own, self._identity.world_size)

    def close(self) -> None:
        """Ends it when the script goes on without a session: what is under way gets some time. Not collective."""
        if self._under_way is not None and not self._under_way.flight.wait(LAST_WORDS_SECONDS):
            log.warning("%s is not sealed yet, and nobody will hear of it", self._under_way.own.name)
        self._notes.close(LAST_WORDS_SECONDS)

    def improves(self, value: float | None) -> bool:
        """Whether a checkpoint with rank 0's ``value`` would be the best so far. Collective."""
        best = None if self._under_way is None else self._under_way.own.content.best
        return bool(self._collective.broadcast(self.bests.improves(value, best)))

    def credit(self, name: str, value: float) -> None:
        """Makes a checkpoint that exists the best so far, as all ranks have agreed."""
        best = self.bests.credit(name, value)
        if self._identity.rank == 0:
            self._notes.write(None, best)

    def _write(self, own: Own, write: Callable[[Path], None], create_directory: bool) -> None:
        path = own.path
        error: BaseException | None = None
        link = self._link if self._identity.local_rank == 0 else None
        with SavingReports(link, own.name, lambda: bytes_below(path), path), Summed() as summed:
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
        own.summed = summed.entries(path)
        # Kept no longer: it holds open what its write was about, and in memory what is deleted so stays there.
        said, error = self._answers.answer(error, path), None
        self._answers.agree_on(own.content, said)

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
        except (OSError, CheckpointDamaged) as error:
            part["text"] = describe(error)
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
        except (OSError, CheckpointDamaged) as error:
            part["text"] = describe(error)
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
            except (OSError, CheckpointDamaged) as error:
                said = {"text": describe(error)}
        first = self._answers.exchange(said)[0]
        if first["digest"] != manifest.digest:
            raise SaveError(f"{TOLD_OTHERWISE}, rank {self._identity.rank} another manifest than rank 0: {manifest}")
        return manifest

    def _announce(self, own: Own, manifest: Manifest, began: float) -> None:
        """It is sealed, as all ranks know."""
        self._note(own, manifest.ref)
        if own.tier.leads:
            self._tell(own, manifest, began)

    def _note(self, own: Own, ref: Ref) -> None:
        in_memory, content = own.tier.in_memory, own.content
        self.bests.note(ref.name, content.best, awaits_disk=in_memory and content.make_durable)
        self.saved.note(content.step, ref, in_memory=in_memory)
        if in_memory and self._identity.rank == 0:
            self._note_best(self.bests.best)

    def _tell(self, own: Own, manifest: Manifest, began: float) -> None:
        in_memory = own.tier.in_memory
        if self._link is not None:
            took = time.monotonic() - began
            sealed = worker_pb2.Sealed(name=manifest.name, digest=manifest.digest, step=manifest.step, seconds=took)
            sealed.in_memory, sealed.make_durable = in_memory, own.content.make_durable
            self._link.send(worker_pb2.ToAgent(sealed=sealed))
        if not in_memory:
            self._notes.write(manifest, manifest.best)

    def _failed_save(self, own: Own, failure: Failed, drain: bool) -> None:
        self._give_up(own, str(failure), drain, failure.fatal)
        if failure.fatal:
            line = f"saving step {own.content.step} failed: {failure}"
            if failure.final:
                Meetings(self._collective, self._link).refused(line)
            raise SaveError(line) from failure

    def _give_up(self, own: Own, reason: str, drain: bool, fatal: bool) -> None:
        name, in_memory = own.name, own.tier.in_memory
        news = self._identity.rank == 0 and not fatal
        if news and self.saved.is_news(in_memory=in_memory, make_durable=own.content.make_durable):
            where = " in memory" if in_memory else ""
            then = "the ranks save to the disk" if own.content.make_durable else "the last commit stands"
            say = remark if in_memory else log.warning  # the other one the agent says
            say("saving %s%s failed, %s: %s", name or "a step", where, then, reason)
        if own.tier.leads and name:
            for error in own.tier.remove(name):
                log.warning("what the failed save left in %s could not be removed: %s", name, error)
        if in_memory:
            gc.collect()  # A framework's error may be part of a cycle, and hold open what was deleted just now.
        # No rank may begin the next attempt while the leftovers of this one are being removed.
        self._collective.barrier()
        # A mistake ends the training; what is said of that comes with its error. What memory has no room for is on the
        # disk sooner or later.
        if self._link is not None and not fatal and not in_memory:
            failed = worker_pb2.SaveFailed(name=name, reason=reason[:4096], drain=drain, step=own.content.step)
            self._link.send(worker_pb2.ToAgent(save_failed=failed))
