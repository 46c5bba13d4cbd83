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
from dalsegno.elastic.checkpoint.errors import printable
from dalsegno.elastic.checkpoint.reading import is_directory
from dalsegno.protos import control_pb2

from ..decisions import events as ev
from .adoption import Adopter
from .alone import is_of_another
from .best_save import BestRule
from .layouts import FileState, state_of
from .placing import put_back
from .settling import settled
from .slices import Latest
from .taking import Before, Late, Origin, save_directory
from .volume_clock import now_at

__all__ = ["take_late"]

# Seconds between the tries to look where the first node has left off, where the file system fails.
_PAUSES_SECONDS = (0.5, 1.0, 3.0, 6.0)

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
    deadline, root = time.monotonic() + seconds, save_directory(run_dir, world.epoch)
    for pause in (*_PAUSES_SECONDS, None):
        last = pause is None or time.monotonic() + pause > deadline
        try:
            if not is_directory(root):
                return  # the script had none in that epoch
            before, late = _left_off(run_dir, world, root, since, last=last)
            adopter = Adopter(run_dir, world, origin, deliver, pattern, before, best=best, late=late)
            break
        except OSError as error:
            if pause is None or last or time.monotonic() > deadline:
                why = printable(error.strerror or str(error))
                deliver(
                    ev.Remark(
                        f"nobody can tell here what the script saved last in epoch {world.epoch} ({why}): the run goes "
                        "on from its last commit"
                    )
                )
                return
            logger.info("what the script saved last in epoch %d is looked for again: %s", world.epoch, error)
        time.sleep(pause)  # why: no event tells when a file system works again
    try:
        settled(adopter, deadline - time.monotonic(), ended_well=False)
    finally:
        adopter.close()


def _left_off(
    run_dir: Path, world: control_pb2.World, root: Path, since: int, *, last: bool
) -> tuple[Before | None, Late]:
    """Where the first node has left off, see `Adopter`.

    With the `last` try a checkpoint that cannot be read does not count, as a damaged one.

    Raises:
        OSError: the file system says no.
    """
    sealed = _newest_sealed(run_dir, world.epoch, last)
    step = world.resume.source.step if world.HasField("resume") else 0
    newest = sealed
    if newest is None and world.HasField("resume") and not world.resume.source.in_memory:
        newest = _read(run_dir / world.resume.source.ref.name, last)
    before = None
    if newest is not None and newest.saved_as is not None:
        # Copies of what was sealed in this epoch have the times of its files.
        earlier = 0 if sealed is not None else put_back(root)
        files = _unchanged(root, run_dir / newest.name, newest, earlier)
        before = Before(run_dir / newest.name, files, newest.saved_as)
    numbers = dict(sealed.saved_as.numbers) if sealed is not None and sealed.saved_as is not None else {}
    latest = None if sealed is None else _latest(run_dir, sealed)
    step = max(step, sealed.step) if sealed is not None else step
    name = sealed.name if sealed is not None else ""
    # By its manifest: the script may have deleted it.
    others = sealed is not None and any(is_of_another(entry.path) for entry in sealed.files)
    return before, Late(step, numbers, _now(root), time.monotonic(), since, latest, name, others)


def _now(root: Path) -> int:
    """See `Late.now`."""
    try:
        return now_at(root)
    except OSError as error:
        logger.warning("the clock of the volume is not known, so all must be seen to stand still: %s", error)
        return 0


def _newest_sealed(run_dir: Path, epoch: int, last: bool) -> Manifest | None:
    names = [CheckpointName.parse(name) for name in os.listdir(run_dir) if is_checkpoint_name(name)]
    mine = sorted((one for one in names if one.epoch == epoch and one.lease is None), key=lambda one: one.age)
    return next((found for one in reversed(mine) if (found := _read(run_dir / str(one), last)) is not None), None)


def _read(directory: Path, last: bool) -> Manifest | None:
    """None: it is gone or damaged; or cannot be read at the last try."""
    try:
        return Manifest.read(directory)
    except (CheckpointDamaged, OSError) as error:
        if isinstance(error, OSError) and not last:
            raise
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
