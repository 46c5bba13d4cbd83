"""The Trainer's own ``checkpoint-<n>`` among the run's checkpoints, and a link to it where people look for it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

log = logging.getLogger(__name__)

PROGRESS = "trainer-progress.json"
VERSION = 1


@dataclass(frozen=True)
class Unfinished:
    """What the Trainer keeps in memory only, and what it had no time for at the step that was saved.

    Attributes:
        loss: The sum of the losses of the steps since the last log, its mean over the ranks.
        logged: The step of that log.
        evaluation: An evaluation was due.
        epoch_end: A data epoch had ended, and nobody was told yet.
    """

    loss: float = 0.0
    logged: int = 0
    evaluation: bool = False
    epoch_end: bool = False

    def write(self, directory: Path) -> None:
        """Beside the Trainer's directory."""
        (directory / PROGRESS).write_text(json.dumps({"version": VERSION, **asdict(self)}))

    @classmethod
    def read(cls, directory: Path) -> Unfinished:
        """The inverse.

        Raises:
            ValueError: It was not saved by an elastic Trainer, or by a newer one.
        """
        try:
            found = json.loads((directory / PROGRESS).read_text())
        except FileNotFoundError as error:
            raise ValueError(f"{directory.name} was not saved by an elastic Trainer: it has no {PROGRESS}") from error
        if found.pop("version") != VERSION:
            raise ValueError(f"{directory.name} was saved by a newer dalsegno: install that one")
        return cls(**found)


class Errors:
    """Keeps the first error of a save until the collectives of the save are over: the other ranks wait in them."""

    def __init__(self) -> None:
        self.first: Exception | None = None

    @contextmanager
    def kept(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            log.debug("kept until the end of the save", exc_info=error)
            self.first = self.first or error

    def raise_first(self) -> None:
        if self.first is not None:
            raise self.first


class Write:
    """``write(path)`` for ``Session.save``: has the Trainer save below ``path``.

    Args:
        save: The Trainer's own save, which asks ``directory`` where.
        unfinished: What else to write, on rank 0.
        rank: This one's.
        reshards: See ``Session.save``.

    Attributes:
        directory: Where the Trainer saves; None unless it does just now.
        errors: Those of this save.
        called: Whether there was anything to save.
    """

    def __init__(self, save: Callable[[], None], unfinished: Unfinished, rank: int, reshards: bool) -> None:
        self._save, self._unfinished, self._rank = save, unfinished, rank
        self.reshards = reshards
        self.errors = Errors()
        self.directory: Path | None = None
        self.called = False

    def __call__(self, path: Path) -> None:
        self.directory, self.called = path, True
        try:
            self._save()
        finally:
            self.directory = None
        self.errors.raise_first()
        if self._rank == 0:
            self._unfinished.write(path)


def trainers(checkpoint: Path, step: int) -> Path:
    """The Trainer's directory in a checkpoint of the run."""
    return checkpoint / f"checkpoint-{step}"


def tidy(output_dir: Path) -> None:
    """Takes away links to checkpoints that have been pruned.

    Raises:
        OSError: The file system says no.
    """
    for old in output_dir.glob("checkpoint-*"):
        if old.is_symlink() and not old.exists():
            old.unlink(missing_ok=True)


def link(output_dir: Path, checkpoint: Path, step: int) -> None:
    """Lets people find ``checkpoint-<step>`` in the output directory, and takes away links to what is gone.

    A link: the checkpoint's own directory is sealed, and one copy of it is enough.
    """
    place = trainers(output_dir, step)
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        tidy(output_dir)
        if place.exists() and not place.is_symlink():
            log.warning("%s is there already and is not the run's: its own is %s", place, trainers(checkpoint, step))
            return
        with suppress(FileNotFoundError):
            temporary.unlink()
        temporary.symlink_to(trainers(checkpoint, step), target_is_directory=True)
        os.replace(temporary, place)
    except OSError as error:
        log.warning("%s cannot be linked: %s; the checkpoint itself is %s", place, error, trainers(checkpoint, step))
