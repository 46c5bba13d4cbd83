"""Saving as one act of all ranks: it succeeds on all or fails on all, and no rank waits for one that failed.

Name by rank 0; every rank writes its files; errors are exchanged; the files are dealt out, synced and summed by all
ranks; rank 0 seals; everybody learns the digest. After each part that can fail, all ranks compare notes before they go
on to the next.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from dalsegno.protos import worker_pb2

from . import rng
from .checkpoint import (
    SHARDED,
    Best,
    CheckpointDamaged,
    CheckpointName,
    CheckpointStore,
    FileEntry,
    Manifest,
    Order,
    Position,
    Ref,
    Shape,
    Tracked,
    seal,
)
from .checkpoint.files import checksums, list_files, write_exclusive, write_problem
from .collective import Collective
from .identity import Identity
from .link import Link

log = logging.getLogger(__name__)

REPORT_SECONDS = 2.0


class SaveError(RuntimeError):
    """A save failed for a reason that trying again will not cure, or too often."""


@dataclass(frozen=True)
class Content:
    """What a checkpoint says about itself, apart from its files.

    Attributes:
        step: Optimizer steps done.
        position: Where the data goes on.
        order: The order of samples; None where the script has its own.
        strategy: ``"ddp"``, ``"deepspeed-zero-<stage>"``, or a name of the script's own.
        any_world_size: It loads at any world size as it is.
        metric: The run's tracked metric.
        best: The best checkpoint as of this one.
    """

    step: int
    position: Position
    order: Order | None = None
    strategy: str = "ddp"
    any_world_size: bool = True
    metric: float | None = None
    best: Best | None = None


class _Failed(Exception):
    """A part of the save failed on some rank; all ranks have this with the same text."""

    def __init__(self, reason: str, fatal: bool) -> None:
        super().__init__(reason)
        self.fatal = fatal


class Saver:
    """Saves checkpoints of one session.

    Args:
        identity: Who writes.
        collective: The session's group.
        store: The run's directory.
        link: The agent, where there is one.
        resumed_from: The resume point of this epoch.
        best: The best checkpoint as of the resume point.

    Attributes:
        best: The best checkpoint as of the last save, the same on all ranks.
        tracked: What makes one the best; None: the best of before stays it.
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
        self._noted_best: str | None = None

    def save(
        self, content: Content, write: Callable[[Path], None], *, create_directory: bool, drain: bool
    ) -> Manifest | None:
        """Writes and seals one checkpoint. Collective: all ranks call it at the same step.

        Args:
            content: What is saved.
            write: Called with the checkpoint's path on every rank; writes this rank's files below it.
            create_directory: The directory exists when ``write`` is called. Frameworks that make it themselves get a
                path that does not exist yet.
            drain: For the report of a failure.

        Returns:
            The manifest, on every rank; None if the save failed on some rank. Nothing of it is left then.

        Raises:
            SaveError: ``write`` failed on some rank with something else than an ``OSError`` or ``RuntimeError``: a
                mistake in the script, which every later save would repeat. Raised on all ranks.
        """
        name = ""
        try:
            name, content = self._choose_name(content, create_directory)
            self._write(name, write)
            files = self._describe(name)
            manifest = self._seal(name, content, files)
        except _Failed as failure:
            self._give_up(name, content.step, str(failure), drain)
            if failure.fatal:
                raise SaveError(f"saving step {content.step} failed: {failure}") from failure
            return None
        self.best = manifest.best
        if self._identity.rank == 0:
            self._announce(manifest)
        return manifest

    def improves(self, value: float | None) -> bool:
        """Whether a checkpoint with rank 0's ``value`` would be the best so far. Collective."""
        better = self.tracked is not None and self.tracked.improves(value, self.best)
        return bool(self._collective.broadcast(better))

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
                answer["error"] = _describe_error(error)
        answer = self._collective.broadcast(answer)
        if "error" in answer:
            raise _Failed(answer["error"], fatal=False)
        best = None if answer["best"] is None else Best(**answer["best"])
        return str(answer["name"]), replace(content, metric=answer["metric"], best=best)

    def _best_as_of(self, name: str, metric: float | None) -> Best | None:
        tracked = self.tracked
        if tracked is None or metric is None or not tracked.improves(metric, self.best):
            return self.best
        return Best(name, tracked.metric, tracked.mode, metric)

    def _write(self, name: str, write: Callable[[Path], None]) -> None:
        path = self._store.path(name)
        error: Exception | None = None
        link = self._link if self._identity.local_rank == 0 else None
        with _SavingReports(link, name, lambda: _bytes_below(path)):
            try:
                write(path)
                state = path / rng.file_name(self._identity.rank)
                state.parent.mkdir(parents=True, exist_ok=True)
                write_exclusive(state, rng.capture())
            # Whatever it is, the other ranks must hear of it before this one does anything else.
            except Exception as caught:
                error = caught
        fatal = error is not None and not isinstance(error, (OSError, RuntimeError))
        if fatal:
            log.error("writing %s failed", name, exc_info=error)
        if error is None:
            self._agree(None)
            return
        text = _describe_error(error)
        problem = write_problem(path) if isinstance(error, RuntimeError) else ""
        self._agree({"text": f"{problem}; {text}" if problem else text, "fatal": fatal})

    def _describe(self, name: str) -> tuple[FileEntry, ...]:
        """Every file of the checkpoint with its checksum, durable; the work is shared by all ranks."""
        path, collective = self._store.path(name), self._collective
        # One rank of each node lists: a network file system may not show a node yet what another one wrote.
        part: dict[str, Any] = {"files": []}
        try:
            if self._identity.local_rank == 0:
                part["files"] = list_files(path)
        except (OSError, CheckpointDamaged) as error:
            part["text"] = _describe_error(error)
        listed = collective.gather(part)
        self._raise_first(listed)
        paths = sorted({file for some in listed for file in some["files"]})
        part = {"files": []}
        done = _Count(_bytes_below(path) if self._identity.local_rank == 0 else 0)
        try:
            with _SavingReports(self._link, name, done.read):
                mine = checksums(path, paths[collective.rank :: collective.world_size], sync=True, moved=done.add)
            part["files"] = [asdict(entry) for entry in mine]
        except (OSError, CheckpointDamaged) as error:
            part["text"] = _describe_error(error)
        described = collective.gather(part)
        self._raise_first(described)
        entries = [FileEntry(**entry) for some in described for entry in some["files"]]
        return tuple(sorted(entries, key=lambda entry: entry.path))

    def _seal(self, name: str, content: Content, files: tuple[FileEntry, ...]) -> Manifest:
        identity = self._identity
        manifest = Manifest(
            name=name,
            job_id=identity.job_id,
            run_id=identity.run_id,
            step=content.step,
            epoch=identity.epoch,
            generation=identity.generation,
            form=SHARDED,
            shape=Shape(identity.world_size, content.strategy, content.any_world_size),
            position=content.position,
            order=content.order,
            source=None,
            resumed_from=self._resumed_from,
            min_nodes=identity.min_nodes,
            max_nodes=identity.max_nodes,
            metric=content.metric,
            files=files,
            best=content.best,
        )
        answer: dict[str, Any] = {}
        if identity.rank == 0:
            try:
                answer["digest"] = seal(self._store.path(name), manifest)
            except (OSError, CheckpointDamaged) as error:
                answer["text"] = _describe_error(error)
        answer = self._collective.broadcast(answer)
        self._raise_first([answer])
        if answer["digest"] != manifest.digest:
            raise SaveError(
                f"rank {identity.rank} was told to save something else than rank 0 (step, position, order and strategy"
                f" must be the same on all ranks): {content}"
            )
        return manifest

    def _announce(self, manifest: Manifest) -> None:
        if self._link is not None:
            sealed = worker_pb2.Sealed(name=manifest.name, digest=manifest.digest, step=manifest.step)
            self._link.send(worker_pb2.ToAgent(sealed=sealed))
        try:
            self._store.write_latest(manifest)
            best = "" if manifest.best is None else manifest.best.name
            if best != self._noted_best:
                self._store.write_best(manifest.best)
                self._noted_best = best
        except OSError as error:
            log.warning("%s is saved, but its note in latest.json or best.json is not: %s", manifest.name, error)

    def _give_up(self, name: str, step: int, reason: str, drain: bool) -> None:
        if self._identity.rank == 0:
            log.warning("saving %s failed, the run goes on from the checkpoint before: %s", name or "a step", reason)
            try:
                if name:
                    self._store.prune([name])
            except OSError as error:
                log.warning("what the failed save left in %s could not be removed: %s", name, error)
        # No rank may begin the next attempt while the leftovers of this one are being removed.
        self._collective.barrier()
        if self._link is not None:
            failed = worker_pb2.SaveFailed(name=name, reason=reason[:4096], drain=drain, step=step)
            self._link.send(worker_pb2.ToAgent(save_failed=failed))

    def _agree(self, problem: dict[str, Any] | None) -> None:
        self._raise_first(self._collective.gather(problem or {}))

    def _raise_first(self, answers: list[dict[str, Any]]) -> None:
        problems = [(rank, answer) for rank, answer in enumerate(answers) if "text" in answer]
        if problems:
            rank, first = problems[0]
            fatal = any(answer.get("fatal", False) for _, answer in problems)
            raise _Failed(f"{first['text']} (rank {rank})", fatal)


class _Count:
    """Bytes that several threads have dealt with."""

    def __init__(self, begin: int) -> None:
        self._bytes = begin
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self._bytes += count

    def read(self) -> int:
        with self._lock:
            return self._bytes


class _SavingReports:
    """Tells the agent now and then how far a part of a save has come: a slow save is not a stuck one.

    ``measure`` says it in bytes, from one part to the next without going back.
    """

    def __init__(self, link: Link | None, name: str, measure: Callable[[], int]) -> None:
        self._link, self._name, self._measure = link, name, measure
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self._link is not None:
            self._send(self._link)
            self._thread = threading.Thread(target=self._run, name="dalsegno-saving", daemon=True)
            self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=REPORT_SECONDS * 5)

    def _run(self) -> None:
        assert self._link is not None
        while not self._done.wait(REPORT_SECONDS):
            self._send(self._link)

    def _send(self, link: Link) -> None:
        saving = worker_pb2.Saving(name=self._name, bytes=self._measure())
        link.send(worker_pb2.ToAgent(saving=saving), droppable=True)


def _bytes_below(path: Path) -> int:
    total = 0
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(directory, name)).st_size
            except FileNotFoundError:
                continue  # a framework's temporary file that is gone again
    return total


def _describe_error(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
