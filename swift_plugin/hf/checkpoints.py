"""The Trainer's own ``checkpoint-<n>`` among the run's checkpoints, and links to it where people look for it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dalsegno.elastic import Session
from dalsegno.elastic.checkpoint import MANIFEST, CheckpointStore, Manifest, Reads, inventory, lineage
from dalsegno.elastic.saving.bests import Sight
from dalsegno.protos.contract import JobSettings

from .written import Kept, kept_here, written_here

log = logging.getLogger(__name__)

PROGRESS = "trainer-progress.json"
TRAINER_STATE = "trainer_state.json"
VERSION = 6
# Between two looks for what agents bring to the disk; and how long a process at its end waits for them to delete.
LOOK_SECONDS, LAST_PRUNE_SECONDS = 1.0, 3.0


@dataclass(frozen=True)
class Unfinished:
    """What the Trainer keeps only in memory, and what it had no time for at the step that was saved.

    Attributes:
        loss: The sum of the losses of the steps since the last log, as a mean over the ranks.
        logged: The step of that log.
        evaluation: An evaluation was due.
        epoch_end: A data epoch had ended, and no callback was told yet.
        may_end: If that evaluation stops the training, the data epoch ends with it.
        callbacks: What callbacks count and do not save themselves: class, attribute, value.
        tell_of_save: These callbacks must be told that this step was saved, which happens only after a save.
        untold: A save was due. If this is not on the disk, it is still to be made; otherwise all others must be told,
            too, because it took the place of that one.
        of_step: What a log at that data epoch's end says of the step itself, by name.
        hyperparameters: See `arguments.hyperparameters`; empty: an older version has saved it.
        counts: What the Trainer itself counts, by attribute; empty: nothing, or an older version has saved it.
    """

    loss: float = 0.0
    logged: int = 0
    evaluation: bool = False
    epoch_end: bool = False
    may_end: bool = False
    callbacks: dict[str, dict[str, Any]] = field(default_factory=dict)
    tell_of_save: bool = False
    untold: bool = False
    of_step: dict[str, float] = field(default_factory=dict)
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)

    def encoded(self) -> bytes:
        """The content of its file, which lies beside the Trainer's directory."""
        return json.dumps({"version": VERSION, **asdict(self)}).encode()

    def write(self, directory: Path) -> None:
        """Writes that file."""
        (directory / PROGRESS).write_bytes(self.encoded())

    @classmethod
    def read(cls, directory: Path) -> Unfinished:
        """The inverse.

        Raises:
            ValueError: It was not saved by an elastic Trainer, or by a newer one.
        """
        try:
            found = json.loads((directory / PROGRESS).read_text())
        except FileNotFoundError as error:
            raise ValueError(
                f"{directory.name} was not saved by an elastic Trainer, it has no {PROGRESS}: go on without hf.elastic,"
                " or begin anew with its weights (--new-run)"
            ) from error
        if found.pop("version") > VERSION:
            raise ValueError(f"{directory.name} was saved by a newer dalsegno: install that one")
        return cls(**found)


class Errors:
    """Keeps the first error of a save until the save's collectives are over, because the other ranks wait in them."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            log.debug("kept until the end of the save", exc_info=error)
            self.first = self.first or _as_of_the_disk(error)

    def raise_first(self) -> None:
        if self.first is not None:
            raise self.first


def _as_of_the_disk(error: Exception) -> Exception:
    """The file system's error inside one of the libraries that write weights and tokenizers."""
    foreign = type(error).__module__.partition(".")[0] in ("safetensors", "safetensors_rust", "tokenizers")
    if foreign or type(error) is Exception:
        told = OSError(str(error))
        told.__cause__ = error
        return told
    return error


class TrainerWrite:
    """``write(path)`` for ``Session.save``: makes the Trainer save below ``path``.

    Args:
        save: The Trainer's own save, which takes its directory from ``directory``.
        unfinished: What else rank 0 writes.
        rank: This rank.
        reshards, by_place, reads: See ``Session.save``.

    Attributes:
        by_place: As many ranks load what rank 0 has saved, their own generators and their own parts of an engine.
        copied: Called with this rank's files, by path, where they are copied for a save in the background.
        directory: Where the Trainer saves; None unless a save is under way.
        errors: The errors of this save.
        called: Whether there was anything to save.
        kept: What of the save under way is copied instead of written.
    """

    def __init__(
        self,
        save: Callable[[], None],
        unfinished: Unfinished,
        rank: int,
        *,
        reshards: bool = False,
        by_place: bool = False,
        reads: Reads | None = None,
    ) -> None:
        self._save, self._unfinished, self._rank = save, unfinished, rank
        self.copied: Callable[[Mapping[str, Any]], None] = lambda files: None
        self.reshards, self.by_place, self.reads = reshards, by_place, reads
        self.errors = Errors()
        self.directory: Path | None = None
        self.called = False
        self.kept: Kept | None = None

    def __call__(self, path: Path) -> None:
        with self._saving_to(path), written_here(path):
            self._save()
        self.errors.raise_first()
        if self._rank == 0:
            self._unfinished.write(path)

    def copies(self, copy: Callable[[Any], Any], path: Path) -> dict[str, Any]:
        """This rank's files, by path, for a save in the background: ``copy`` has copied all tensors in them.

        What is small the Trainer writes below a directory in ``path``, which is deleted at the end.
        """
        own = path / f".rank-{self._rank}"
        with self.errors.kept():
            own.mkdir()
        try:
            with self._saving_to(own), kept_here(own, copy) as self.kept:
                self._save()
                self.errors.raise_first()
                if self._rank == 0:
                    self._unfinished.write(own)
                files = self.kept.files()
            self.copied(files)
            return files
        finally:
            self.kept = None
            shutil.rmtree(own, ignore_errors=True)

    @contextmanager
    def _saving_to(self, path: Path) -> Iterator[None]:
        self.directory, self.called = path, True
        try:
            yield
        finally:
            self.directory = None


class Arriving:
    """Checkpoints that agents bring to the disk: each is put where people look for it, once it is there.

    Args:
        link: Called with such a checkpoint and its step.
        session: Its rank 0 looks, on a thread of its own and now and then: the disk may be slow.
    """

    def __init__(self, link: Callable[[Path, int], None], session: Session) -> None:
        self._link, self._run_dir, self._sight = link, session.run_dir, None
        self._coming: dict[str, tuple[int, Callable[[int], None]]] = {}
        # The newest one as of the look before the last: what is older and was not there at the last one is left out.
        self._passed, self._newest, self._looked_at = 0, 0, 0.0
        if session.rank == 0 and session.run_dir is not None:
            self._sight = Sight(CheckpointStore(session.run_dir))

    def add(self, step: int, name: str, then: Callable[[int], None]) -> None:
        """This one comes, unless a newer one does in its place. ``then`` is called with its step."""
        self._coming[name] = step, then

    def look(self) -> None:
        """At each boundary."""
        if self._sight is None or not self._coming or time.monotonic() < self._looked_at + LOOK_SECONDS:
            return
        self._looked_at = time.monotonic()
        for name in [name for name in self._coming if self._sight.found(name)]:
            self._put(name)
        self._coming = {name: one for name, one in self._coming.items() if one[0] >= self._passed}
        self._passed = self._newest
        self._sight.look(self._coming)

    def look_at_last(self) -> None:
        """At the end of the training, whose last checkpoint is newer than all that are still to come."""
        if self._sight is not None and self._run_dir is not None:
            for name in [name for name in self._coming if (self._run_dir / name / MANIFEST).exists()]:
                self._put(name)

    def _put(self, name: str) -> None:
        step, then = self._coming.pop(name)
        self._newest = max(self._newest, step)
        assert self._run_dir is not None
        self._link(self._run_dir / name, step)
        then(step)


def trainers(checkpoint: Path, step: int) -> Path:
    """The Trainer's directory in a checkpoint of the run."""
    return checkpoint / f"checkpoint-{step}"


def link(output_dir: Path, checkpoint: Path, step: int) -> None:
    """Lets people find ``checkpoint-<step>`` in the output directory.

    It is a directory of links to files. What a callback or ``swift infer`` adds is added there; in the checkpoint
    itself it would be a file that the manifest does not know.

    Args:
        output_dir: The Trainer's.
        checkpoint: The sealed checkpoint.
        step: The checkpoint's step.
    """
    place, source = trainers(output_dir, step), trainers(checkpoint, step)
    try:
        if is_foreign(place):
            log.warning("%s is there already and is not the run's: its own is %s", place, source)
            return
        # `is_foreign` recognises our place by the first of these links.
        _link(place / TRAINER_STATE, source / TRAINER_STATE)
        for file in (path for path in source.rglob("*") if path.is_file()):
            _link(place / file.relative_to(source), file)
        # The step was saved before, perhaps by more ranks.
        for old in (path for path in place.rglob("*") if path.is_symlink()):
            if not (source / old.relative_to(place)).exists():
                old.unlink()
        tidy(output_dir)
    except OSError as error:
        log.warning("%s cannot be linked: %s; the checkpoint itself is %s", place, error, source)


def _link(place: Path, file: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    with suppress(FileNotFoundError):
        temporary.unlink()
    temporary.symlink_to(file)
    os.replace(temporary, place)


def unlinked(output_dir: Path, run_dir: Path, resume: Manifest) -> list[tuple[Path, int]]:
    """The sealed checkpoints on the way to a resume point that have no place in the output directory, oldest first.

    With their steps. They are newer than all that have one, because what people have deleted stays deleted; but the
    resume point itself always gets one.

    Args:
        output_dir: The Trainer's.
        run_dir: The run's.
        resume: The manifest of the resume point, which may be in memory alone.
    """
    try:
        found = inventory(run_dir, check_sizes=False)
        linked = newest_linked(output_dir, run_dir, resume.step)
    except OSError as error:
        log.warning("%s: what is there cannot be linked in %s: %s", run_dir, output_dir, error)
        return []
    before = [one for one in found if one.parsed_name.age < resume.parsed_name.age]
    # Of several of one step it is the last one.
    chain = {one.step: run_dir / one.name for one in lineage([*before, resume])}
    places = {step: trainers(output_dir, step) for step in chain if step > linked or step == resume.step}
    return [
        (chain[step], step)
        for step, place in places.items()
        if not (is_linked(place) or is_foreign(place)) and (trainers(chain[step], step) / TRAINER_STATE).is_file()
    ]


def newest_linked(output_dir: Path, run_dir: Path, most: int = sys.maxsize) -> int:
    """The newest step, of at most ``most``, that has a place that points below ``run_dir``; -1: none has."""
    own = os.path.realpath(run_dir)
    steps = [-1]
    for place in output_dir.glob("checkpoint-*"):
        step = place.name.partition("-")[2]
        if step.isdecimal() and is_linked(place):
            target = Path(os.path.realpath(place / TRAINER_STATE))
            steps += [int(step)] if target.is_relative_to(own) and int(step) <= most else []
    return max(steps)


def is_linked(place: Path) -> bool:
    """Whether `link` has made this place, and what it linked still exists."""
    return (place / TRAINER_STATE).is_symlink() and (place / TRAINER_STATE).exists()


def is_foreign(place: Path) -> bool:
    """Whether something is there that `link` has not made: a checkpoint of another training."""
    if not os.path.lexists(place) or (place / TRAINER_STATE).is_symlink():
        return False
    return not place.is_dir() or any(place.iterdir())


def tidy(output_dir: Path) -> None:
    """Removes links to what has been pruned; files that somebody has added stay.

    Raises:
        OSError: The file system says no.
    """
    for place in output_dir.glob("checkpoint-*"):
        state = place / TRAINER_STATE
        if not state.is_symlink() or state.exists():
            continue
        for path in sorted(place.rglob("*"), reverse=True):  # deeper entries first
            if path.is_symlink() and not path.exists():
                path.unlink(missing_ok=True)
            elif path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        if not any(place.iterdir()):
            place.rmdir()


def tidy_at_last(output_dir: Path, keep: int | None) -> None:
    """The same at a process's end: what its last checkpoint replaces the agents delete a moment later.

    Args:
        keep: The Trainer's limit; None: it has none, and the job's is taken for the usual one.
    """
    end, most = time.monotonic() + LAST_PRUNE_SECONDS, JobSettings().keep_checkpoints if keep is None else keep
    with suppress(OSError):
        tidy(output_dir)
        while 0 < most < len([*output_dir.glob("checkpoint-*")]) and time.monotonic() < end:
            # No event tells; and what a world has resumed from is never deleted.
            threading.Event().wait(0.1)
            tidy(output_dir)
