"""Takes a script's checkpoint: seals a copy of it among the run's.

A link would not do: the script may delete its own checkpoint, or save again under the same name, which overwrites its
files in place.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dalsegno.elastic.checkpoint import (
    SHARDED,
    Best,
    CheckpointName,
    CheckpointStore,
    Manifest,
    Position,
    Ref,
    SavedAs,
    Shape,
    describe,
    is_checkpoint_name,
    seal,
)
from dalsegno.elastic.checkpoint.errors import is_full
from dalsegno.elastic.checkpoint.files import copy_file, place_file
from dalsegno.elastic.checkpoint.layout import MANIFEST
from dalsegno.elastic.checkpoint.reading import is_there
from dalsegno.protos import control_pb2

from .layouts import Complete, FileState, state_of
from .slices import Latest, SaveSlice
from .volume_check import VolumeCheck

__all__ = ["Before", "Changed", "Judge", "Late", "Origin", "adopt", "is_taken", "save_directory"]

# A new checkpoint's value of the metric, and the best one as of it: of its name, its step and its series' numbers.
Judge = Callable[[str, int, Mapping[str, int | None]], tuple[float | None, Best | None]]


def _no_metric(name: str, step: int, numbers: Mapping[str, int | None]) -> tuple[float | None, Best | None]:
    return None, None


def save_directory(run_dir: Path, epoch: int) -> Path:
    """The directory in which the script saves in this epoch, and in no other."""
    return run_dir / f"e{epoch}"


@dataclass(frozen=True)
class Origin:
    """What a manifest says about the writing epoch and the world does not contain."""

    job_id: str
    generation: int
    world_size: int
    min_nodes: int
    max_nodes: int


@dataclass(frozen=True)
class Before:
    """A sealed checkpoint whose files may be those of the next one, too.

    Attributes:
        directory: it.
        files: as they were in the script's directory when it was sealed, or put there from it, by their names there.
        saved_as: as its manifest has it.
    """

    directory: Path
    files: Mapping[str, FileState]
    saved_as: SavedAs


@dataclass(frozen=True)
class Late:
    """What the first node of a world had taken until it was lost.

    Attributes:
        step: the last step; of the resume point, if it had taken nothing.
        numbers: see `SavedAs`; empty, if it had taken nothing.
        now: by the clock of the volume, in ns, when it was `at` by this process's; 0: nobody knows.
        since: only what was written from then on is taken, by that clock: the first node is there, and has the rest.
        latest: what it took last, if that counts steps.
        sealed: the name under which the run has what it took last; empty, if it had taken nothing.
        others: that has random states of other ranks, see `MainAlone`.
    """

    step: int
    numbers: Mapping[str, int | None]
    now: int
    at: float
    since: int = 0
    latest: Latest | None = None
    sealed: str = ""
    others: bool = False

    def stands_since(self, one: Complete) -> float:
        """When its last file was written, by this process's clock: who comes late need not see that for itself."""
        return self.at - max(0, self.now - one.written) / 1e9


def is_taken(run_dir: Path, step: int, epoch: int) -> bool | None:
    """Whether another node has sealed the same save; False: it is about to. None: nobody has begun to.

    Raises:
        OSError: the file system says no.
    """
    names = [CheckpointName.parse(name) for name in os.listdir(run_dir) if is_checkpoint_name(name)]
    same = [str(one) for one in names if (one.step, one.epoch, one.lease) == (step, epoch, None)]
    return any(is_there(run_dir / name / MANIFEST) for name in same) if same else None


def sealed_as(run_dir: Path, step: int, epoch: int) -> Manifest | None:
    """What a node has sealed of this step in this epoch, if that is readable."""
    sealed = CheckpointStore(run_dir).sealed(SHARDED)
    return next((one for one in reversed(sealed) if (one.step, one.epoch) == (step, epoch)), None)


class Changed(Exception):
    """The script writes a checkpoint again."""


def adopt(
    piece: SaveSlice,
    saved_as: SavedAs,
    run_dir: Path,
    world: control_pb2.World,
    origin: Origin,
    notes: Iterable[FileState] = (),
    beside: Iterable[FileState] = (),
    before: Before | None = None,
    volume: VolumeCheck | None = None,
    judge: Judge = _no_metric,
) -> Manifest:
    """Seals a copy of it among the run's checkpoints. A copy that cannot be finished is removed again.

    Args:
        piece, saved_as: what is taken.
        run_dir, world, origin: see `Adopter`.
        notes: small files that belong to it.
        beside: others that it may need; those that change meanwhile are left out.
        before: files that did not change since then are taken from there.
        volume: the volume as it was when the epoch began; None: as it is now.
        judge: says which is the best one. It is asked late, as the script may note a value while its files are copied.

    Raises:
        Changed: it is being written again.
        CheckpointDamaged: another process has changed the copy.
        OSError: the file system says no.
    """
    name = str(CheckpointStore(run_dir).next_name(piece.step, world.epoch))
    target = run_dir / name
    volume = volume or VolumeCheck(run_dir)
    target.mkdir()
    try:
        root, every = save_directory(run_dir, world.epoch), (*piece.files, *notes)
        taken = _take_beside(root, beside, target)
        _take(root, every, target, saved_as.below, before)
        volume.wait_listed(target, {_inside(file.name, saved_as.below) for file in (*every, *taken)})
        resumed = world.resume.source.ref if world.HasField("resume") else None
        metric, best = judge(name, piece.step, dict(piece.numbers))
        manifest = Manifest(
            name=name,
            job_id=origin.job_id,
            run_id=world.run_id,
            step=piece.step,
            epoch=world.epoch,
            generation=origin.generation,
            form=SHARDED,
            shape=Shape(origin.world_size, piece.strategy, piece.any_world_size),
            position=Position(),
            order=None,
            source=None,
            resumed_from=None if resumed is None else Ref(resumed.name, resumed.digest),
            min_nodes=origin.min_nodes,
            max_nodes=origin.max_nodes,
            metric=metric,
            best=best,
            files=describe(target),
            saved_as=saved_as,
        )
        volume.check()
        seal(target, manifest)
    except BaseException:
        # Removed, because it would take room until the epoch is over, and the next try makes another one. Not if nobody
        # can tell whether it is sealed, which others would go on from.
        with contextlib.suppress(OSError):
            if not is_there(target / MANIFEST):
                shutil.rmtree(target, ignore_errors=True)
        raise
    return manifest


def _take(root: Path, files: tuple[FileState, ...], target: Path, below: str, before: Before | None) -> None:
    """Copies files. All are first linked, in a moment, so that the script may delete them meanwhile."""
    mine: list[tuple[FileState, Path, bool]] = []
    for file in files:
        link = target / _inside(file.name, below)
        if before is not None and before.files.get(file.name) == file and _reuse(before, file, link):
            continue
        if place_file(root / file.name, link):
            # Some mounts (sshfs) count one name of every file: nobody can tell there that the script deleted its own.
            mine.append((file, link, os.stat(link).st_nlink > 1))
    if state_of(root, [file.name for file in files]) != files:
        raise Changed
    for number, (file, link, counted) in enumerate(mine):
        if counted and os.stat(link).st_nlink == 1:
            continue  # the script has deleted its own
        copy = target / f".copy-{number}"
        copy_file(link, copy)
        now = os.stat(link)
        if (now.st_size, now.st_mtime_ns, os.stat(copy).st_size) != (file.size, file.written, file.size):
            raise Changed
        # A script may take the newest of several.
        os.utime(copy, ns=(now.st_atime_ns, file.written))
        os.replace(copy, link)


def _take_beside(root: Path, files: Iterable[FileState], target: Path) -> tuple[FileState, ...]:
    """Copies those that stay as they are, and returns them: no checkpoint waits for one that is written all the time.

    Raises:
        OSError: there is no room.
    """
    taken = []
    for file in files:
        copy = target / file.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            copy_file(root / file.name, copy)
            if state_of(root, [file.name]) == (file,):
                os.utime(copy, ns=(file.written, file.written))
                taken.append(file)
                continue
        except OSError as error:
            if is_full(error):
                raise
        copy.unlink(missing_ok=True)
    return tuple(taken)


def _inside(name: str, below: str) -> str:
    return name[len(below) + 1 :] if below else name


def _reuse(before: Before, file: FileState, link: Path) -> bool:
    """Takes a file from a sealed checkpoint, where nobody writes. False: it is not there any more, or of a later time.

    That one was put back when the epoch began, and among those of now it would be the newest for a script.
    """
    sealed = before.directory / _inside(file.name, before.saved_as.below)
    try:
        if os.stat(sealed).st_mtime_ns > file.written:
            return False
        place_file(sealed, link)
    except OSError:
        link.unlink(missing_ok=True)
        return False
    return True
