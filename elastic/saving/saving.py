"""Saving as one act of all ranks: it succeeds on all or fails on all, and no rank waits for one that failed.

Rank 0 chooses the name. Every rank writes its files, and all exchange errors. The files are dealt out, and all ranks
sync and checksum them. Rank 0 seals, and all learn the digest. After each part that can fail, all ranks compare notes
before they go on to the next.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from dalsegno.protos import trace, worker_pb2

from ..checkpoint import (
    Best,
    CheckpointDamaged,
    CheckpointName,
    CheckpointStore,
    FileEntry,
    Manifest,
    Ref,
    Tracked,
    seal,
)
from ..checkpoint.files import checksums, list_files, write_exclusive
from ..rank import rng
from ..rank.agreement import differences
from ..rank.collective import Collective, PeerLost
from ..rank.identity import Identity
from ..rank.link import Link
from ..rank.meetings import Meetings
from ..rank.remarks import remark
from .apart import PATIENCE_SHARE, all_files, has_to_seal, missing_parts, seal_once, unless_stuck
from .background_save import LAST_WORDS_SECONDS, PARTS, Flight, check_paths
from .content import Content, Own
from .declared import DDP, contradiction, of_each_rank
from .notes import Notes
from .save_errors import Cause, Failed, describe, is_fatal, is_mistake, kept, problem
from .saving_reports import Count, SavingReports, bytes_below
from .staging import HostBuffers
from .writing import Summed

log = logging.getLogger(__name__)


_TOLD_OTHERWISE = "the ranks were told to save different things"


class SaveError(RuntimeError):
    """A save failed because of something that another try will not cure, or it failed too often."""


@dataclass
class _UnderWay:
    """A save in the background, as this rank knows it."""

    name: str
    content: Content
    drain: bool
    flight: Flight
    began: float


class Saver:
    """Saves checkpoints of one session.

    Args:
        identity: This worker.
        collective: The session's group.
        store: The run's directory.
        link: The connection to the agent, if there is one.
        resumed_from: The resume point of this epoch.
        best: The best checkpoint as of the resume point.

    Attributes:
        best: The best checkpoint as of the last save, the same on all ranks.
        tracked: What makes a checkpoint the best; None: the best one does not change.
        apart: A leaver was gone before a drain's save was complete: this rank has done its part, and exits.
    """

    def __init__(
        self,
        identity: Identity,
        collective: Collective,
        store: CheckpointStore,
        link: Link | None,
        resumed_from: Ref | None,
        best: Best | None = None,
    ) -> None:
        self._identity, self._collective, self._store = identity, collective, store
        self._link, self._resumed_from = link, resumed_from
        self._last: CheckpointName | None = None
        self.best = best
        self.tracked: Tracked | None = None
        self.apart = False
        self._notes = Notes(store, apart=link is not None)
        self._noted_empty = False
        self._buffers = HostBuffers()
        self._looked = False
        self._under_way: _UnderWay | None = None

    def save(
        self, content: Content, write: Callable[[Path], None], *, create_directory: bool, drain: bool
    ) -> Manifest | None:
        """Writes and seals one checkpoint. Collective: all ranks call it at the same step.

        Args:
            content: What is saved.
            write: Called with the checkpoint's path on every rank; writes this rank's files below it.
            create_directory: Create the directory before ``write`` is called. Frameworks that create it themselves get
                a path that does not exist yet.
            drain: The save is a drain's. A failure is reported as such, and a leaver may be gone before it is complete.

        Returns:
            The manifest, on every rank; None if the save failed on some rank. Then nothing of it is left. With
            ``apart`` only the rank that sealed it has the manifest.

        Raises:
            PeerLost: Only in a drain: a peer is gone that was no leaver.
            SaveError: ``write`` failed on some rank, and not for lack of disk or memory: a mistake, which every later
                save would repeat. Raised on all ranks.
        """
        own, began = Own(content), time.monotonic()
        try:
            with self._together(drain):
                own.name, own.content = self._choose_name(content, create_directory)
                self._write(own, write)
                trace.mark("written")
                files = self._describe(own)
                trace.mark("synced")
                self._check_files([entry.path for entry in files], own.content)
                manifest = self._seal(own, files)
        except Failed as failure:
            self._failed_save(own.name, content.step, failure, drain)
            return None
        except PeerLost as lost:
            return self._complete(own, lost, began)
        self.best = manifest.best
        if self._identity.rank == 0:
            self._announce(manifest, began)
        return manifest

    @property
    def failed(self) -> bool:
        """Whether this rank could not write its part of the save under way. The others must hear of it."""
        return self._under_way is not None and self._under_way.flight.failed

    def begin(
        self, content: Content, state: Callable[[], Mapping[str, Any]], sealed: Callable[[], None], *, drain: bool
    ) -> str | None:
        """Copies what ``state`` returns, and starts writing and sealing it while the training goes on. Collective.

        Args:
            content: What is saved.
            state: This rank's files, see ``background.background``.
            sealed: Called on a thread of rank 0 once the checkpoint is sealed and announced.
            drain: The save is a drain's; a failure is reported as such.

        Returns:
            The checkpoint's name, on every rank; None if some rank could not begin. ``settle`` says how it ended.

        Raises:
            RuntimeError: The previous save is not settled.
            SaveError: See ``save``.
        """
        if self._under_way is not None:
            raise RuntimeError(f"{self._under_way.name} is being saved; settle that first")
        name = ""
        try:
            name, content = self._choose_name(content, True)
            files = self._stage(name, state, content)
        except Failed as failure:
            self._buffers.release()
            self._failed_save(name, content.step, failure, drain)
            return None
        path, identity, done, began = self._store.path(name), self._identity, Count(0), time.monotonic()
        reports = SavingReports(self._link, name, done.read, path if identity.local_rank == 0 else None)

        def seal_all(entries: tuple[FileEntry, ...]) -> str:
            manifest = self._manifest(name, content, entries)
            digest = seal(path, manifest)
            self._announce(manifest, began)
            sealed()
            return digest

        copied = self._buffers.wait
        patience = PATIENCE_SHARE * identity.stall_timeout
        flight = Flight(path, identity.rank, identity.world_size, files, copied, seal_all, done, patience, reports)
        self._under_way = _UnderWay(name, content, drain, flight, began)
        return name

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
        answer: dict[str, Any] = {}
        own = Own(ending.content, ending.name)
        try:
            try:
                path = self._store.path(ending.name)
                error = ending.flight.written()
                own.written = error is None
                with self._together(ending.drain):
                    self._agree(error, path)
                if self._identity.rank == 0:
                    digest, error = ending.flight.sealed()
                    found = problem(error, path)
                    answer = {"digest": digest} if found is None else found.answer
                with self._together(ending.drain):
                    answer = self._collective.broadcast(answer)
                self._raise_first([answer])
            finally:
                ending.flight.cancel()
                self._buffers.release()
                self._under_way = None
        except Failed as failure:
            self._failed_save(ending.name, ending.content.step, failure, ending.drain)
            return None
        except PeerLost as lost:
            completed = self._complete(own, lost, ending.began)
            return None if completed is None else (completed.step, completed.ref)
        self.best = ending.content.best
        return ending.content.step, Ref(ending.name, answer["digest"])

    def _together(self, drain: bool) -> AbstractContextManager[None]:
        """A context for a save's collectives. In a drain's save nobody waits for a leaver whose notice is over."""
        link = self._link
        if link is None or not drain:
            return nullcontext()
        return self._collective.unless(lambda: bool(link.ending))

    def _complete(self, own: Own, lost: PeerLost, began: float) -> Manifest | None:
        """Completes a save after a peer is gone. If it was a leaver, another rank seals what is there, see `apart`.

        Raises:
            PeerLost: It was no leaver, or this rank's part is not written.
            SaveError: A rank's part is missing.
        """
        identity, link = self._identity, self._link
        if link is None or not own.written:
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
        self.best = manifest.best
        self._announce(manifest, began)
        return manifest

    def _stage(self, name: str, state: Callable[[], Mapping[str, Any]], content: Content) -> dict[str, Any]:
        """This rank's files in host memory. Returns once all ranks have theirs."""
        error: BaseException | None = None
        files: dict[str, Any] = {}
        try:
            given = state()
            check_paths(given)
            files = {**self._buffers.copy(given), rng.file_name(self._identity.rank): rng.capture()}
        # The other ranks must hear of every error before this one does anything else.
        except BaseException as caught:
            log.debug("no state to save", exc_info=caught)
            error = kept(caught)
        found = problem(error, self._store.path(name))
        answers = self._agree_on(content, {"paths": sorted(files)} if found is None else found.answer)
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
        own = [path for path in paths if PurePosixPath(path).parts[0] not in (rng.DIRECTORY, PARTS)]
        each = of_each_rank(own, self._identity.world_size)
        if each is not None and self._identity.rank == 0:
            remark(
                "each rank has saved a file of its own, %s, and strategy='ddp' says that any number of ranks loads "
                "them: if they hold parts of the model or of the optimizer, give save or steps any_world_size=False",
                each,
            )

    def close(self) -> None:
        """Ends the saver when the script goes on without a session: a save under way gets some time. Not collective."""
        if self._under_way is not None and not self._under_way.flight.wait(LAST_WORDS_SECONDS):
            log.warning("%s is not sealed yet, and nobody will hear of it", self._under_way.name)

    def improves(self, value: float | None) -> bool:
        """Whether a checkpoint with rank 0's ``value`` would be the best so far. Collective."""
        best = self.best if self._under_way is None else self._under_way.content.best
        better = self.tracked is not None and self.tracked.improves(value, best)
        return bool(self._collective.broadcast(better))

    def credit(self, name: str, value: float) -> None:
        """Makes a checkpoint that exists the best so far, as all ranks have agreed."""
        assert self.tracked is not None
        self.best = Best(name, self.tracked.metric, self.tracked.mode, value)
        if self._identity.rank == 0:
            self._notes.write(None, self.best)

    def _choose_name(self, content: Content, create_directory: bool) -> tuple[str, Content]:
        """Rank 0's name, metric and best: a metric is often computed on one rank, or differs in its last bits."""
        step, metric = content.step, content.metric
        if metric is not None and not math.isfinite(metric):
            log.warning(
                "the metric of step %d is %s: it is left out, and this is not the best checkpoint", step, metric
            )
            metric = None
        answer: dict[str, Any] = {"metric": metric}
        if self._identity.rank == 0:
            try:
                name = self._store.next_name(step, self._identity.epoch)
                last = self._last
                if last is not None and last.step == step:
                    name = replace(name, attempt=max(name.attempt, last.attempt + 1))
                self._last = name
                self._store.run_dir.mkdir(parents=True, exist_ok=True)
                if create_directory:
                    self._store.path(str(name)).mkdir()
                answer["name"] = str(name)
                best = self._best_as_of(str(name), metric)
                answer["best"] = None if best is None else asdict(best)
            except OSError as error:
                answer["error"] = describe(error)
        answer = self._collective.broadcast(answer)
        if "error" in answer:
            raise Failed(answer["error"], fatal=False)
        best = None if answer["best"] is None else Best(**answer["best"])
        return str(answer["name"]), replace(content, metric=answer["metric"], best=best)

    def _best_as_of(self, name: str, metric: float | None) -> Best | None:
        tracked = self.tracked
        if tracked is None or metric is None or not tracked.improves(metric, self.best):
            return self.best
        return Best(name, tracked.metric, tracked.mode, metric)

    def _write(self, own: Own, write: Callable[[Path], None]) -> None:
        path = self._store.path(own.name)
        error: BaseException | None = None
        link = self._link if self._identity.local_rank == 0 else None
        with SavingReports(link, own.name, lambda: bytes_below(path), path), Summed() as summed:
            try:
                write(path)
                state = path / rng.file_name(self._identity.rank)
                state.parent.mkdir(parents=True, exist_ok=True)
                write_exclusive(state, rng.capture(), lasting=False)  # `_describe` makes it durable
            # The other ranks must hear of every error before this one does anything else.
            except BaseException as caught:
                error = kept(caught)
        own.written = error is None
        own.summed = summed.entries(path)
        self._agree_on(own.content, self._answer(error, path))

    def _describe(self, own: Own) -> tuple[FileEntry, ...]:
        """Every file of the checkpoint with its checksum, durable; the work is shared by all ranks.

        What a rank has summed as it wrote it nobody reads back: that rank makes it durable.
        """
        path, collective, identity = self._store.path(own.name), self._collective, self._identity
        # One rank of each node lists: a network file system may not show a node yet what another one wrote.
        part: dict[str, Any] = {"files": [], "summed": [entry.path for entry in own.summed]}
        try:
            if identity.local_rank == 0:
                part["files"] = list_files(path)
        except (OSError, CheckpointDamaged) as error:
            part["text"] = describe(error)
        listed = collective.gather(part)
        self._raise_first(listed)
        summed = {file for some in listed for file in some["summed"]}
        paths = sorted({file for some in listed for file in some["files"]} - summed)
        part = {"files": []}
        done = Count(bytes_below(path) if identity.local_rank == 0 else 0)
        dealt = paths[collective.rank :: collective.world_size]
        try:
            with SavingReports(self._link, own.name, done.read, path if identity.local_rank == 0 else None):
                sync = partial(checksums, path, dealt, sync=True, known=own.summed, moved=done.add)
                own.entries = tuple(unless_stuck(sync, done, PATIENCE_SHARE * identity.stall_timeout))
            own.moved = done.read()
            part["files"] = [asdict(entry) for entry in own.entries]
        except (OSError, CheckpointDamaged) as error:
            part["text"] = describe(error)
        described = collective.gather(part)
        self._raise_first(described)
        entries = [FileEntry(**entry) for some in described for entry in some["files"]]
        if all(PurePosixPath(entry.path).parts[0] == rng.DIRECTORY for entry in entries) and not self._noted_empty:
            self._noted_empty = True
            if self._identity.rank == 0:
                remark(
                    "save wrote nothing below the path it was given: %s holds no weights, only generators", path.name
                )
        return tuple(sorted(entries, key=lambda entry: entry.path))

    def _manifest(self, name: str, content: Content, files: tuple[FileEntry, ...]) -> Manifest:
        return content.manifest(name, self._identity, self._resumed_from, files)

    def _seal(self, own: Own, files: tuple[FileEntry, ...]) -> Manifest:
        identity, manifest = self._identity, self._manifest(own.name, own.content, files)
        answer: dict[str, Any] = {}
        if identity.rank == 0:
            try:
                path = self._store.path(own.name)
                # Sealing also syncs a directory, for which a slow disk takes its time.
                with SavingReports(self._link, own.name, lambda: own.moved, path):
                    answer["digest"] = seal(path, manifest)
            except (OSError, CheckpointDamaged) as error:
                answer["text"] = describe(error)
        answer = self._collective.broadcast(answer)
        self._raise_first([answer])
        if answer["digest"] != manifest.digest:
            raise SaveError(f"{_TOLD_OTHERWISE}, rank {identity.rank} another manifest than rank 0: {manifest}")
        return manifest

    def _announce(self, manifest: Manifest, began: float) -> None:
        if self._link is not None:
            took = time.monotonic() - began
            sealed = worker_pb2.Sealed(name=manifest.name, digest=manifest.digest, step=manifest.step, seconds=took)
            self._link.send(worker_pb2.ToAgent(sealed=sealed))
        self._notes.write(manifest, manifest.best)

    def _failed_save(self, name: str, step: int, failure: Failed, drain: bool) -> None:
        self._give_up(name, step, str(failure), drain, failure.fatal)
        if failure.fatal:
            line = f"saving step {step} failed: {failure}"
            if failure.final:
                Meetings(self._collective, self._link).refused(line)
            raise SaveError(line) from failure

    def _give_up(self, name: str, step: int, reason: str, drain: bool, fatal: bool) -> None:
        if self._identity.rank == 0:
            if not fatal:
                log.warning("saving %s failed, the last commit stands: %s", name or "a step", reason)
            for error in self._store.prune([name] if name else []).values():
                log.warning("what the failed save left in %s could not be removed: %s", name, error)
        # No rank may begin the next attempt while the leftovers of this one are being removed.
        self._collective.barrier()
        # A mistake ends the training, and its error says all that is to be said.
        if self._link is not None and not fatal:
            failed = worker_pb2.SaveFailed(name=name, reason=reason[:4096], drain=drain, step=step)
            self._link.send(worker_pb2.ToAgent(save_failed=failed))

    def _agree(self, error: BaseException | None, path: Path) -> None:
        """Compares notes on this rank's ``error`` in writing below ``path``."""
        self._raise_first(self._collective.gather(self._answer(error, path)))

    def _answer(self, error: BaseException | None, path: Path) -> dict[str, Any]:
        """What this rank says of its ``error``, if it has one. A script's mistake also goes to this rank's log."""
        found = problem(error, path)
        if found is not None and found.cause is not Cause.SURROUNDINGS:
            log.error("writing %s failed", path.name, exc_info=error)
        return {} if found is None else dict(found.answer)

    def _agree_on(self, content: Content, said: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Checks before a seal that no rank has a problem and all save the same. Returns all answers."""
        answers = self._collective.gather({**said, "content": asdict(content)})
        self._raise_first(answers)
        wrong = differences([answer["content"] for answer in answers])
        if wrong:
            raise Failed(f"{_TOLD_OTHERWISE}: {'; '.join(wrong)}", fatal=True)
        return answers

    def _raise_first(self, answers: list[dict[str, Any]]) -> None:
        problems = [(rank, answer) for rank, answer in enumerate(answers) if "text" in answer]
        if problems:
            # If there are several, prefer one that may have caused the others.
            rank, first = min(problems, key=lambda one: one[1].get("cause") == Cause.LIKELY_MISTAKE.value)
            raise Failed(f"{first['text']} (rank {rank})", is_fatal(answers), final=is_mistake(answers))
