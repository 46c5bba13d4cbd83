"""How a drain's save ends if a leaver is gone before it is complete, so that the others' parts are not lost.

No collective works any more. Each remaining rank finishes its own part and exits, except one: the first rank of the
node that the master names waits until the others are gone, and seals the checkpoint if every rank's part is there. Each
rank writes the file of its random generators last, so that file proves that its part is whole.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TypeVar

from dalsegno.protos import control_pb2

from ..checkpoint import FileEntry, Manifest, seal
from ..checkpoint.files import checksums, list_files
from ..rank import rng
from ..rank.collective import TIMEOUT_SECONDS, Collective, PeerLost
from ..rank.link import Link
from .background_save import STUCK
from .saving_reports import Count
from .sight import SIGHT_PAUSES_SECONDS, look_again

log = logging.getLogger(__name__)

T = TypeVar("T")

# Seconds that a rank waits, after a peer is gone, to learn whether that was a leaver. The master sees a leaver's end by
# a clock of its own. After a crash the agent ends this process earlier.
WORD_SECONDS = 30.0
# Seconds to wait for the other nodes, which still write. The master gives them up earlier (--stall-timeout).
OTHERS_SECONDS = TIMEOUT_SECONDS
LOOK_SECONDS = 0.1
# Part of --stall-timeout after which a disk that moves nothing makes the save fail. Steps then go on before the master
# takes the ranks for stuck.
PATIENCE_SHARE = 0.75


def has_to_seal(link: Link, local_rank: int, lost: PeerLost) -> bool:
    """Waits for the master's decision. False: others complete the checkpoint, and this rank exits.

    Raises:
        PeerLost: ``lost``: nobody has said that a leaver is gone, so this is a crash.
    """
    _await(lambda: link.ending != control_pb2.ENDING_TOGETHER, WORD_SECONDS, link, lost)
    if local_rank != 0 or link.ending == control_pb2.ENDING_WRITE:
        return False
    log.info("a leaver is gone (%s): this rank completes the save without it", lost)
    _await(lambda: link.ending == control_pb2.ENDING_SEAL, OTHERS_SECONDS, link, lost)
    return True


def agree_to_go(collective: Collective, wanted: bool, *, saved: bool) -> tuple[bool, bool]:
    """After a drain's save: whether all ranks exit (some rank still wants that), and whether nobody is waited for.

    A leaver may be gone as soon as its work is ``saved``; then this rank exits as well. Collective.

    Raises:
        RuntimeError: A peer is gone, and nothing is saved.
    """
    try:
        # If nothing is saved, work would be lost with this rank, too, so a lost peer is a failure.
        with collective.unless(lambda: False) if saved else nullcontext():
            return bool(collective.max([int(wanted)])[0]), False
    except PeerLost as lost:
        log.info("everything is saved, and a rank is gone already (%s)", lost)
        return True, True


def _await(holds: Callable[[], bool], seconds: float, link: Link, lost: PeerLost) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if not link.alive or time.monotonic() >= deadline:
            raise lost
        # The thread that reads the agent's messages stores them, and wakes nobody.
        threading.Event().wait(LOOK_SECONDS)


def missing_parts(path: Path, world_size: int, beside: Iterable[int] = ()) -> list[int]:
    """The ranks whose part is not wholly there, once all other nodes are done.

    Ranks ``beside`` this one, on the same node, may still be writing: if one of them fails, the agent ends them all.
    Files of another machine may come into sight late, and a mount may fail for a moment.

    Raises:
        OSError: The file system still fails, so nobody can tell.
    """
    _await_beside([path / rng.file_name(rank) for rank in beside])
    missing = list(range(world_size))
    for pause in (*SIGHT_PAUSES_SECONDS, 0.0):
        missing = [rank for rank in missing if not _seems_whole(path / rng.file_name(rank))]
        if not missing:
            break
        threading.Event().wait(pause)
    for rank in missing:
        with contextlib.suppress(FileNotFoundError):
            (path / rng.file_name(rank)).read_bytes()
    return missing


def _await_beside(states: Iterable[Path]) -> None:
    """Waits for what other ranks may still be writing, as long as the file system fails for moments only."""
    states, deadline = list(states), time.monotonic() + OTHERS_SECONDS
    failing_since: float | None = None
    while (now := time.monotonic()) < deadline:
        try:
            if all(map(_is_whole, states)):
                return
            failing_since = None
        except OSError:
            failing_since = failing_since or now
            if now - failing_since >= sum(SIGHT_PAUSES_SECONDS):
                raise
        threading.Event().wait(LOOK_SECONDS)


def _is_whole(state: Path) -> bool:
    """Raises OSError where nobody can tell."""
    try:
        json.loads(state.read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    return True


def _seems_whole(state: Path) -> bool:
    with contextlib.suppress(OSError):
        return _is_whole(state)
    return False


def all_files(path: Path, known: Iterable[FileEntry], moved: Callable[[int], None]) -> tuple[FileEntry, ...]:
    """Entries of every file of the checkpoint, all of them durable; those of ``known`` are durable already.

    Raises:
        OSError: The file system fails, and goes on failing if that may pass.
        CheckpointDamaged: What is there is no file, or gone again.
    """
    entries = {entry.path: entry for entry in known}
    listed = look_again(lambda: list_files(path), lambda error: isinstance(error, OSError))
    rest = [file for file in listed if file not in entries]
    found = look_again(lambda: checksums(path, rest, sync=True, moved=moved), _is_stale)
    return tuple(sorted([*entries.values(), *found], key=lambda one: one.path))


def seal_once(path: Path, manifest: Manifest) -> Manifest:
    """Seals the checkpoint, unless another thread or rank has just done so. Returns the manifest that is in force.

    Raises:
        OSError: As `all_files` does.
        CheckpointDamaged: Other files are there than the manifest lists.
    """

    def work() -> Manifest:
        try:
            seal(path, manifest)
        except FileExistsError:
            return Manifest.read(path)
        return manifest

    return look_again(work, _is_stale)


def _is_stale(error: Exception) -> bool:
    """Whether the handle of a file was lost (NFS), and another one may do.

    Behind another failure of a sync nobody knows what is on the disk, and a second one says nothing of it any more.
    """
    return isinstance(error, OSError) and error.errno == errno.ESTALE


def unless_stuck(work: Callable[[], T], count: Count, patience_seconds: float) -> T:
    """Runs ``work`` as long as bytes move at least every ``patience_seconds``; 0: without a limit.

    Raises:
        TimeoutError: No byte moved for that long. ``work`` runs on by itself.
    """
    if patience_seconds <= 0:
        return work()
    result: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            result.append(work())
        # Every error is passed on to the caller.
        except BaseException as error:
            errors.append(error)
        finally:
            done.set()

    try:
        threading.Thread(target=run, name="dalsegno-sync", daemon=True).start()
    except RuntimeError as error:  # no more threads are allowed: nobody watches it
        log.debug("it is not noticed if the disk stands still: %s", error)
        return work()
    while not done.wait(max(0.01, patience_seconds - count.still())):
        if count.still() >= patience_seconds:
            raise TimeoutError(STUCK.format(patience_seconds))
    if errors:
        raise errors[0]
    return result[0]
