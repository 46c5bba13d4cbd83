"""Whether the checkpoint directory has room for the next checkpoint, looked at beside everything else."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from dalsegno.elastic.checkpoint import CheckpointName, CheckpointStore
from dalsegno.elastic.checkpoint.errors import printable
from dalsegno.elastic.checkpoint.spares import clear_spares, spare_bytes
from dalsegno.protos import control_pb2
from dalsegno.protos.shortage import shortage

__all__ = ["RoomWatch", "Undeleted", "give_back_spares", "missing_bytes", "prune_replaced"]

LOOK_EVERY_SECONDS = 3.0
# A disk with less is full.
FULL_BYTES = 16 << 20
# What else is written beside a checkpoint: logs, notes, a larger one.
SPARE_BYTES = 32 << 20
SPARE_SHARE = 0.05
# The longest that the agent's end waits until files are deleted. The disk may hang.
GIVE_BACK_SECONDS = 2.0
# So long a checkpoint could not be deleted, and people hear of it.
UNDELETED_SECONDS = 60.0

logger = logging.getLogger(__name__)


def missing_bytes(free_bytes: int, next_bytes: int, at_commit: bool) -> int:
    """What is missing for the next checkpoint; 0: nothing.

    Args:
        free_bytes: free on the disk.
        next_bytes: what the next checkpoint will need.
        at_commit: no checkpoint is half written. At any other time one may be, and only a full disk is known to lack
            room.
    """
    if not at_commit and free_bytes >= FULL_BYTES:
        return 0
    return max(0, next_bytes + int(next_bytes * SPARE_SHARE) + SPARE_BYTES - free_bytes)


def prune_replaced(store: CheckpointStore, names: Iterable[str], ends: threading.Event) -> dict[str, OSError]:
    """`CheckpointStore.prune` of what newer ones have replaced. Nothing is kept once the agent `ends`."""
    problems = store.prune(names, replaced=True)
    if ends.is_set():
        clear_spares(store.run_dir)
    return problems


class Undeleted:
    """Tells people what stays on the disk for long although the run needs it no more. For one thread at a time.

    A later directive has it tried again, and what somebody has open on NFS, or a stale handle, passes.

    Args:
        once: see `Complaint.once`.
    """

    def __init__(self, once: Callable[[str, str], None]) -> None:
        self._once = once
        # When, monotonic, each one first could not be deleted.
        self._since: dict[str, float] = {}

    def tried(self, names: Iterable[str], problems: Mapping[str, Exception]) -> None:
        """Notes that the deletion of checkpoints was tried.

        Args:
            names: which ones.
            problems: of each that could not be deleted, why.
        """
        for name in {*names} - problems.keys():
            self._since.pop(name, None)
        now = time.monotonic()
        for name, problem in problems.items():
            logger.warning("checkpoint %s cannot be deleted: %s", name, problem)
            if isinstance(problem, OSError):
                first = self._since.setdefault(name, now)
                # A source that stays for its form has no cause of its own.
                if now - first >= UNDELETED_SECONDS and not _stays_for_form(name, problems):
                    # A mount or a link that forbids one deletion forbids them all.
                    why = shortage(problem) or printable(str(problem))
                    text = f"checkpoint {name} cannot be deleted yet ({why}); it is tried again"
                    self._once(f"deleting: {problem.errno}", text)
            elif not isinstance(problem, ValueError):
                logger.error("deleting %s failed", name, exc_info=problem)
                self._once(
                    name, f"checkpoint {name} cannot be deleted: {shortage(problem) or printable(repr(problem))}"
                )


def _stays_for_form(name: str, problems: Iterable[str]) -> bool:
    """Whether one of its forms could not be deleted before it: see `CheckpointStore.prune`."""
    return any(one != name and str(CheckpointName.parse(one).source) == name for one in problems)


def give_back_spares(run_dir: Path) -> None:
    """Deletes the files that later saves would have written over, or leaves them if that takes too long."""
    thread = threading.Thread(target=clear_spares, args=[run_dir], name="storage-spares", daemon=True)
    with contextlib.suppress(RuntimeError):  # without room for a thread they are left
        thread.start()
        thread.join(GIVE_BACK_SECONDS)


class RoomWatch:
    """Looks after each commit, and every few seconds.

    Args:
        copies: how many copies of a checkpoint there are for a while: one, or two where a script's own is adopted.
        deletion: held while checkpoints are being deleted, until that is told.
        deliver: gets the missing bytes, each time that they are more than 0. Called on a thread of this object.
    """

    def __init__(self, copies: int, deletion: threading.Lock, deliver: Callable[[int], None]) -> None:
        self._copies = copies
        self._deletion = deletion
        self._deliver = deliver
        self._changed = threading.Condition()
        self._directory: Path | None = None
        self._head: control_pb2.Checkpoint | None = None
        self._closed = self._refused = False
        # Whether there were spares at the last look; and when, monotonic, one last found that they are gone.
        self._had_spares, self._given_back_at = False, -math.inf

    def committed(self, directory: Path, head: control_pb2.Checkpoint) -> None:
        """The newest commit of the run, which is in this directory; told as often as one likes."""
        with self._changed:
            if self._closed or (self._head is not None and self._head.ref.digest == head.ref.digest):
                return
            first = self._head is None
            self._directory, self._head, self._refused = directory, head, False
            self._changed.notify()
        if first:
            try:
                threading.Thread(target=self._watch, name="storage-room", daemon=True).start()
            except RuntimeError:  # the next commit may find room for a thread
                with self._changed:
                    self._head = None

    def refused(self, reason: str) -> None:
        """A save, or a copy of a script's, failed for this reason: perhaps as a quota or the inodes are used up.

        No look sees that. Told as often as one fails.
        """
        if any(os.strerror(number) in reason for number in (errno.ENOSPC, errno.EDQUOT)):
            with self._changed:
                self._refused = True
                self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _watch(self) -> None:
        looked = ""
        while True:
            with self._changed:
                if self._closed:
                    return
                directory, head = self._directory, self._head
                refused, self._refused = self._refused, False
            assert directory is not None
            assert head is not None
            self._look(directory, head, at_commit=head.ref.digest != looked, refused=refused)
            looked = head.ref.digest
            with self._changed:
                # No event tells of a disk that others fill.
                if not self._closed and self._head is head and not self._refused:
                    self._changed.wait(LOOK_EVERY_SECONDS)

    def _look(self, directory: Path, head: control_pb2.Checkpoint, at_commit: bool, refused: bool) -> None:
        waits = self._deletion.locked()
        with self._deletion:
            if waits and self._copies > 1:
                # A copy that failed meanwhile may have room now, and else fails again at once. A save comes seldom.
                refused = False
                with self._changed:
                    self._refused = False
            try:
                missing = self._missing(directory, head, at_commit)
                spares = bool(spare_bytes(directory))
                if self._had_spares and not spares:
                    self._given_back_at = time.monotonic()
                if (missing or refused) and spares:
                    clear_spares(directory)
                    missing, spares = self._missing(directory, head, at_commit), False
                    self._given_back_at = time.monotonic()
                self._had_spares = spares
                # By the ranks, before each of them tells that their save failed; or here, for the first of these.
                if refused and time.monotonic() - self._given_back_at >= LOOK_EVERY_SECONDS:
                    # A little less than it takes, as sizes differ: for one that is to come one goes.
                    missing = max(missing, int(head.bytes * (1 - SPARE_SHARE)))
            except Exception as error:  # whatever it is, the next look may tell
                logger.info("the room in %s is not known: %s", directory, error)
                return
            if missing:
                self._deliver(missing)

    def _missing(self, directory: Path, head: control_pb2.Checkpoint, at_commit: bool) -> int:
        usage = shutil.disk_usage(directory)
        # A file system without a limit says that it has no size at all.
        return missing_bytes(usage.free, self._copies * head.bytes, at_commit) if usage.total else 0
