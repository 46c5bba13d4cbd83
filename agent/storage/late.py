"""Takes over what a script without a session saved last in a world whose first node is gone.

The first node takes what is saved, a second or more after it was saved. When it is lost, the last save may be whole,
and not taken yet. Before the next world opens another node looks into the directory of the epoch, as the first one
would have done; the master chooses it (`taking` in its brain).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from dalsegno.elastic.checkpoint import CheckpointDamaged, CheckpointName, Manifest, is_checkpoint_name
from dalsegno.elastic.checkpoint.reading import is_directory
from dalsegno.protos import control_pb2

from ..decisions import events as ev
from .adoption import Adopter
from .best_save import BestRule
from .layouts import FileState, state_of
from .placing import put_back
from .slices import Latest
from .taking import Before, Late, Origin, save_directory
from .volume_clock import now_at

__all__ = ["take_late"]

logger = logging.getLogger(__name__)


def take_late(
    run_dir: Path,
    world: control_pb2.World,
    origin: Origin,
    deliver: Callable[[ev.Event], None],
    pattern: str,
    best: BestRule | None,
    seconds: float,
    since: int = 0,
) -> None:
    """Adopts what is whole and newer than all that is sealed; blocks for at most `seconds`, and while it copies.

    Only what says by its format that it is whole counts, and whatever has checksums is read through.

    Args:
        run_dir, world, origin, deliver, pattern, best: see `Adopter`.
        seconds: what it may take.
        since: see `Late`.
    """
    root = save_directory(run_dir, world.epoch)
    if not is_directory(root):
        return
    sealed = _newest_sealed(run_dir, world.epoch)
    step = world.resume.source.step if world.HasField("resume") else 0
    last = sealed
    if last is None and world.HasField("resume") and not world.resume.source.in_memory:
        last = _read(run_dir / world.resume.source.ref.name)
    before = None
    if last is not None and last.saved_as is not None:
        # Copies of what was sealed in this epoch have the times of its files.
        earlier = 0 if sealed is not None else put_back(root)
        before = Before(run_dir / last.name, _unchanged(root, run_dir / last.name, last, earlier), last.saved_as)
    numbers = dict(sealed.saved_as.numbers) if sealed is not None and sealed.saved_as is not None else {}
    latest = None if sealed is None else _latest(run_dir, sealed)
    step = max(step, sealed.step) if sealed is not None else step
    late = Late(step, numbers, now_at(root), time.monotonic(), since, latest)
    adopter = Adopter(run_dir, world, origin, deliver, pattern, before, best=best, late=late)
    try:
        adopter.settle(seconds, ended_well=False)
    finally:
        adopter.close()


def _newest_sealed(run_dir: Path, epoch: int) -> Manifest | None:
    names = [CheckpointName.parse(name) for name in os.listdir(run_dir) if is_checkpoint_name(name)]
    mine = sorted((one for one in names if one.epoch == epoch and one.lease is None), key=lambda one: one.age)
    return next((found for one in reversed(mine) if (found := _read(run_dir / str(one))) is not None), None)


def _read(directory: Path) -> Manifest | None:
    try:
        return Manifest.read(directory)
    except (CheckpointDamaged, OSError) as error:
        logger.debug("%s does not count: %s", directory.name, error)
        return None


def _latest(run_dir: Path, sealed: Manifest) -> Latest | None:
    """None: its layout counts no steps, or it is being deleted. A copy keeps the time of its file."""
    if sealed.saved_as is None or not sealed.saved_as.below or not sealed.saved_as.numbers:
        return None
    ((series, _), *_) = sealed.saved_as.numbers
    try:
        return Latest(series, max(os.stat(run_dir / sealed.name / entry.path).st_mtime_ns for entry in sealed.files))
    except (OSError, ValueError):
        return None


def _unchanged(root: Path, taken: Path, manifest: Manifest, earlier: int) -> dict[str, FileState]:
    """The script's files that are still what was taken of them, or put there with times that are so much `earlier`."""
    assert manifest.saved_as is not None
    found = {}
    for entry in manifest.files:
        name = f"{manifest.saved_as.below}/{entry.path}" if manifest.saved_as.below else entry.path
        try:
            (file,) = state_of(root, [name])
            copied = os.stat(taken / entry.path)
        except OSError:
            continue  # the script has deleted it
        if (file.size, file.written) == (copied.st_size, copied.st_mtime_ns - earlier):
            found[name] = file
    return found
