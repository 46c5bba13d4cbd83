"""The agent's work in the checkpoint directory, always off the main thread.

The directory is one file system that all nodes see, possibly NFS: everything may take long, and what another node
wrote may come into sight late.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

from dalsegno.elastic.checkpoint import (
    CheckpointDamaged,
    CheckpointStore,
    Damage,
    Manifest,
    is_checkpoint_name,
    read_sealed,
    verify,
)
from dalsegno.elastic.checkpoint.errors import printable
from dalsegno.elastic.checkpoint.files import Meter, publish
from dalsegno.elastic.checkpoint.spares import clear_spares, spare_bytes
from dalsegno.protos import control_pb2
from dalsegno.protos.limits import MOST_FINISHED_RUNS
from dalsegno.protos.text import is_component, one_line

from ..decisions.events import ManifestRead, Pruned, Sighted, VerificationDone, VerificationMoved
from .complaint import Complaint, unread, unwritable
from .errand import Errand, spawned, submitted
from .forms import in_the_making, with_forms
from .private import PRIVATE, NotPrivateError, check_private, read_private
from .problems import is_gone
from .room import Undeleted, prune_replaced
from .survey import Manifests, Survey, look_at, looked_again, surveyed

__all__ = ["JobDirectory", "Storage", "StorageError", "Survey"]

# Seconds for which a member looks again for a resume point that it does not see. (NFS caches attributes for up to 60 s,
# but opening the directory revalidates it; the master waits for this answer.)
LOOK_SECONDS = 10.0
# Seconds between two looks: the master waits for a member; a spare may look for days.
_FIRST_PAUSE_SECONDS, _LAST_PAUSE_SECONDS, _LAST_PATIENT_PAUSE_SECONDS = 0.1, 1.0, 8.0
# Seconds between the tries of a verification that the file system spoils (ESTALE, EIO, a mount that is away).
_VERIFY_PAUSES_SECONDS = (1.0, 3.0, 6.0, 10.0)
# Damage that may only be late sight, over NFS for one, and how often in a row it must be found before it counts.
_MAY_COME_LATE = (Damage.MANIFEST, Damage.DIGEST, Damage.MISSING_FILE, Damage.WRONG_SIZE)
_DAMAGE_LOOKS = 3
# Seconds between two reports of how far a verification is.
_MOVED_EVERY_SECONDS = 5.0
# Seconds between the looks for what another node has just sealed: file systems cache a missing name for up to a minute.
_SIGHT_PAUSES_SECONDS = (0.5, 2.0, 5.0, 10.0, 20.0, 30.0)
# How often a directory in sight without a usable manifest is looked at before that is reported: over NFS a manifest may
# come into sight later than its directory.
_UNUSABLE_LOOKS = 5
# The most bytes of a probe file, which holds a token.
_MAX_PROBE_BYTES = 256
_SURVEYS = "looking at the checkpoint directory"

logger = logging.getLogger(__name__)


class StorageError(Exception):
    """The checkpoint directory cannot be used; one line that says what to change."""


class JobDirectory:
    """Paths and small files of one job below the checkpoint directory (docs/contracts.md)."""

    def __init__(self, checkpoint_dir: Path, job_id: str) -> None:
        self.root = checkpoint_dir
        self.job_id = job_id
        self.private = checkpoint_dir / PRIVATE / job_id
        self.runs = checkpoint_dir / job_id
        self._manifests, self.complaint = Manifests(), Complaint()

    def run(self, run_id: str) -> Path:
        """A run's directory: checkpoints are its children.

        Raises:
            ValueError: `run_id` is not one path component.
        """
        if not is_component(run_id):
            raise ValueError(f"not a run id: {run_id!r}")
        return self.runs / run_id

    def prepare(self) -> None:
        """Makes the directories and checks that they can be written, the private one only by us.

        Raises:
            StorageError: they cannot be written, or others can write the private one.
        """
        try:
            self.private.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_private(self.private)
            self.runs.mkdir(parents=True, exist_ok=True)
            trial = self.runs / f".write-{secrets.token_hex(8)}"
            trial.touch(exist_ok=False)
            trial.unlink()
        except NotPrivateError as error:
            raise StorageError(str(error)) from error
        except OSError as error:
            raise StorageError(unwritable(self.root, error)) from error

    def probe(self) -> str:
        """The content of the job's probe file: the same for all nodes that see the same directory.

        The first agent makes it: written aside and linked into place, so that nobody ever reads half of it.

        Raises:
            NotPrivateError: something else is there, or somebody else's file.
            OSError: it cannot be read or made.
        """
        path = self.private / "probe"
        with contextlib.suppress(FileNotFoundError):
            if probe := self._read_probe(path):
                return probe
            # No other agent would ever write it.
            logger.warning("%s is empty: it is made anew", path)
            path.unlink(missing_ok=True)
        self.private.mkdir(parents=True, exist_ok=True, mode=0o700)
        aside = self.private / f"probe.{secrets.token_hex(8)}"
        with open(aside, "x", encoding="ascii") as file:
            file.write(secrets.token_hex(16))
            file.flush()
            os.fsync(file.fileno())
        try:
            # Another agent's came first, so that one counts.
            with contextlib.suppress(FileExistsError):
                publish(aside, path)
        finally:
            aside.unlink()
        return self._read_probe(path)

    @staticmethod
    def _read_probe(path: Path) -> str:
        # All nodes that see the same file say the same, whatever somebody has written into it.
        return one_line(read_private(path).decode("ascii", errors="replace"), _MAX_PROBE_BYTES)

    def survey(self, *, passes_over: bool = False) -> Survey:
        """For `Register`: the newest checkpoints of the runs that are not finished, and the finished runs.

        Raises:
            OSError: see `surveyed`, also for `passes_over`.
        """
        found, finished = surveyed(self.runs, self._manifests, passes_over=passes_over)
        return Survey(self.probe(), tuple(found), tuple(finished[-MOST_FINISHED_RUNS:]))

    def look(self, run_id: str, resume: control_pb2.CheckpointRef | None, newer_than: tuple[int, int] | None) -> Survey:
        """For `Join`, see `look_at`.

        Raises:
            OSError: the run's directory cannot be read.
        """
        if not run_id:
            return Survey(self.probe(), (), ())
        found, unusable, passed_over = look_at(self.run(run_id), resume, newer_than, self._manifests)
        return Survey(self.probe(), tuple(found), (), tuple(unusable), tuple(passed_over))


def _nobody(why: str) -> None:
    """Nobody waits for its end."""


class Storage:
    """Does such work on a few threads and passes the results to callbacks (called on those threads).

    Args:
        directory: the job's directory.
        threads: threads of one verification.
    """

    def __init__(self, directory: JobDirectory, threads: int = 4) -> None:
        self.directory, self._threads = directory, threads
        self._closing = threading.Event()
        # Pools of their own, so that a slow verification or deletion does not hold up a Join.
        self._quick = ThreadPoolExecutor(2, thread_name_prefix="storage")
        self._slow = ThreadPoolExecutor(2, thread_name_prefix="storage-slow")
        self._look_lock, self._look, self._turn = threading.Lock(), 0, 0
        # Held while checkpoints are deleted, until that is told: a look at the free room waits for it.
        self.deletion, self.keeps_spares = threading.Lock(), False
        self._undeleted = Undeleted(directory.complaint.once)

    def survey(
        self,
        deliver: Callable[[Survey], None],
        failed: Callable[[str], None],
        patient: bool = True,
        again: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """Looks at the job's directory: once, but where it cannot be read, for some seconds (`looked_again`).

        Not `patient`: of a node that was in already, and that a master without a record hears only for some seconds.
        `again` hears before each further look at a file system that fails why.
        """
        look = self.directory.survey if patient else partial(self.directory.survey, passes_over=True)

        def looks_again(error: OSError) -> None:
            again(unread(self.directory.root, error))

        def work() -> None:
            try:
                survey = looked_again(look, self._closing, patient=patient, again=looks_again)
            except OSError as error:
                failed(unread(self.directory.root, error))
                return
            deliver(survey)

        self._submit(self._quick, work, _SURVEYS, lambda why: failed(f"the checkpoint directory cannot be read: {why}"))

    def look(
        self,
        run_id: str,
        resume: control_pb2.CheckpointRef | None,
        patient: bool,
        deliver: Callable[[Survey], None],
        seconds: float = LOOK_SECONDS,
        newer_than: tuple[int, int] | None = None,
        turn: int = 0,
        failed: Callable[[str], None] = _nobody,
    ) -> None:
        """Looks until `resume` is in sight, at most `seconds` (for ever if `patient`), then delivers what is seen.

        If the directory is in sight, but has no usable manifest in several looks, that is delivered, and a patient look
        then goes on. What may be newer, and cannot be read, is waited for as well, at most `seconds`. A later `look`
        ends an earlier one without a delivery; one of an earlier `turn` looks at nothing. A directory that cannot be
        read counts as empty. `failed` hears why there is no look, or no more of them.
        """
        with self._look_lock:
            if turn < self._turn:
                return
            self._turn = turn
            self._look += 1
            number = self._look

        def work() -> None:
            deadline = time.monotonic() + seconds
            pause, longest = _FIRST_PAUSE_SECONDS, _LAST_PATIENT_PAUSE_SECONDS if patient else _LAST_PAUSE_SECONDS
            unusable = 0
            while self._current(number):
                survey = self._look_or_nothing(run_id, resume, newer_than)
                seen = resume is None or not resume.digest or self._sees(survey, resume)
                damaged = resume is not None and any(one.name == resume.name for one in survey.unusable)
                unusable = unusable + 1 if damaged else 0
                late = time.monotonic() >= deadline
                # What cannot be read may be newer than the resume point. It is waited for, though not for ever.
                over = seen and (late or not survey.passed_over)
                over = over or (not patient and (late or unusable >= _UNUSABLE_LOOKS))
                if (over or unusable == _UNUSABLE_LOOKS) and self._current(number):
                    for line in survey.passed_over:
                        self.directory.complaint.once(line, line)
                    deliver(survey)
                if over:
                    return
                # Over NFS no event tells of a file that another machine makes.
                self._closing.wait(pause)
                pause = min(pause * 2, longest)

        spawned("storage-look", self._errand(work, _SURVEYS, failed))

    def read_manifest(self, run_id: str, name: str, digest: str, deliver: Callable[[ManifestRead], None]) -> None:
        """Describes a checkpoint that a worker of this node's epoch has sealed."""

        def work() -> None:
            path = self.directory.run(run_id) / name
            try:
                manifest = read_sealed(path, digest)
            except (CheckpointDamaged, OSError, ValueError) as error:
                deliver(ManifestRead(name, None, str(error), gone=is_gone(path, error)))
            else:
                deliver(ManifestRead(name, manifest.to_proto()))

        self._submit(self._quick, work, f"reading {name}", lambda why: deliver(ManifestRead(name, None, why)))

    def verify(
        self,
        run_id: str,
        verification: control_pb2.Verification,
        deliver: Callable[[VerificationMoved | VerificationDone], None],
    ) -> None:
        """Checks all checksums of one directory. Delivers from time to time how far it is, and last the verdict.

        Only damage is a verdict; damage that may only be late sight must be found in several looks. If the file system
        fails, the verification is tried a few times, for about 20 seconds in all, and then reported as inconclusive:
        that says nothing about the checkpoint, which other nodes may be able to read.
        """

        number = verification.number

        def work() -> None:
            moved = Meter(lambda count: deliver(VerificationMoved(number, count)), _MOVED_EVERY_SECONDS)
            done = self._look_through(run_id, verification, moved)
            if done is not None:
                deliver(done)

        def failed(why: str) -> None:
            deliver(VerificationDone(number, False, why, inconclusive=True))

        self._submit(self._slow, work, f"verifying {verification.ref.name}", failed)

    def _look_through(
        self, run_id: str, verification: control_pb2.Verification, moved: Callable[[int], None]
    ) -> VerificationDone | None:
        """Looks for damage; blocks. None: this storage was closed meanwhile."""
        problem = ""
        looks = 0
        for pause in (0.0, *_VERIFY_PAUSES_SECONDS):
            # No event tells when a file system works again.
            if self._closing.wait(pause):
                return None
            try:
                path = self.directory.run(run_id) / verification.ref.name
                damage = _damage_of(path, verification.ref.digest, self._threads, moved)
            except (OSError, ValueError) as error:
                problem = printable(str(error))
                logger.warning("verifying %s: %s", verification.ref.name, problem)
                continue
            looks += 1
            if damage is None or damage.reason not in _MAY_COME_LATE or looks >= _DAMAGE_LOOKS:
                return VerificationDone(verification.number, damage is None, "" if damage is None else str(damage))
            problem = str(damage)
        return VerificationDone(verification.number, False, problem, inconclusive=True)

    def sight(self, run_id: str, ref: control_pb2.CheckpointRef, deliver: Callable[[Sighted], None]) -> None:
        """Looks for a checkpoint that another node has sealed, for as long as file systems may take to show it."""

        def work() -> None:
            for pause in (0.0, *_SIGHT_PAUSES_SECONDS):
                # Over NFS no event tells of a file that another machine makes.
                if self._closing.wait(pause):
                    return
                try:
                    read_sealed(self.directory.run(run_id) / ref.name, ref.digest)
                except Exception as error:  # whatever it is, the next look may see it
                    logger.info("%s is not in sight: %s", ref.name, error)
                else:
                    deliver(Sighted(ref))
                    return

        spawned("storage-sight", self._errand(work, f"looking for {ref.name}"))

    def prune(self, run_id: str, refs: Sequence[control_pb2.CheckpointRef], deliver: Callable[[Pruned], None]) -> None:
        """Deletes retired checkpoints with their later forms. Delivers those that are gone; the others stay."""

        def work() -> None:
            with self.deletion:
                deliver(Pruned(tuple(ref for ref in refs if self._delete(run_id, ref))))

        self._submit(self._slow, work, "deleting checkpoints", lambda why: deliver(Pruned(())))

    def _delete(self, run_id: str, ref: control_pb2.CheckpointRef) -> bool:
        problems: Mapping[str, Exception]
        names = [ref.name]
        try:
            store = CheckpointStore(self._own_run(run_id))
            names = with_forms(store.run_dir, ref)
            problems = prune_replaced(store, names, self._closing)
            self.keeps_spares = spare_bytes(store.run_dir) > 0
        except Exception as error:  # whatever it is: it holds up neither the others nor the next deletion
            problems = {ref.name: error}
        self._undeleted.tried(names, problems)
        return not problems

    def sweep(self, run_id: str, epoch: int, step: int = 0, converting: str = "") -> None:
        """Deletes directories without a manifest that epochs before `epoch`, and its saves before `step`, left behind.

        New forms of `converting` stay: one is being made, perhaps by another node out of those that were begun.
        """

        def work() -> None:
            try:
                store = CheckpointStore(self._own_run(run_id))
                # A checkpoint that is being deleted looks like one that was never sealed.
                with self.deletion:
                    for name in store.lost_manifest(epoch):
                        logger.warning("%s was sealed and has lost its manifest: it stays, delete it by hand", name)
                    found = store.never_sealed(epoch, step)
                    left = sorted({*found} - in_the_making(found, converting))
                    problems = store.prune(left)
            except OSError as error:
                logger.warning("unsealed checkpoints cannot be removed: %s", error)
                return
            for name, problem in problems.items():
                logger.warning("what was never sealed as %s cannot be removed: %s", name, problem)
            if gone := [name for name in left if name not in problems]:
                logger.info("removed what was never sealed: %s", ", ".join(gone))

        self._submit(self._slow, work, "deleting what was never sealed")

    def _own_run(self, run_id: str) -> Path:
        """The run's directory, for a deletion.

        Raises:
            OSError: it is a link, and files elsewhere may be used by others, too.
        """
        path = self.directory.run(run_id)
        if os.path.islink(path):
            raise OSError(errno.ELOOP, "it is a link, through which nothing is deleted", str(path))
        return path

    def write_latest(self, run_id: str, head: control_pb2.Checkpoint) -> None:
        """Copies the newest commit to `latest.json`, for people."""

        def work() -> None:
            store = CheckpointStore(self.directory.run(run_id))
            try:
                store.write_latest(Manifest.read(store.path(head.ref.name)))
            except (CheckpointDamaged, OSError, ValueError) as error:
                logger.warning("latest.json was not written: %s", error)

        self._submit(self._quick, work, "writing latest.json")

    def mark_finished(
        self, run_id: str, step: int, head: control_pb2.CheckpointRef | None, timeout_seconds: float = 10.0
    ) -> None:
        """Writes `FINISHED.json`, and waits for that, because the agent is about to exit."""

        def work() -> None:
            store = CheckpointStore(self.directory.run(run_id))
            try:
                store.mark_finished(step, _sealed_as(store, head))
            except (CheckpointDamaged, OSError, ValueError) as error:
                logger.warning("FINISHED.json was not written: %s", error)

        future = self._submit(self._quick, work, "writing FINISHED.json")
        if future is not None and wait([future], timeout_seconds).not_done:
            logger.warning("FINISHED.json was not written within %.0f s", timeout_seconds)
        self._submit(self._slow, lambda: clear_spares(self.directory.run(run_id)), "deleting spare files")

    def close(self) -> None:
        """Lets running work end by itself; what was not begun is dropped."""
        self._closing.set()
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)

    def _submit(
        self, pool: ThreadPoolExecutor, work: Callable[[], None], what: str, failed: Callable[[str], None] = _nobody
    ) -> Future[None] | None:
        return None if self._closing.is_set() else submitted(pool, self._errand(work, what, failed))

    def _errand(self, work: Callable[[], None], what: str, failed: Callable[[str], None] = _nobody) -> Errand:
        return Errand(what, work, failed, self.directory.complaint.once)

    def _current(self, number: int) -> bool:
        with self._look_lock:
            return self._look == number and not self._closing.is_set()

    def _look_or_nothing(
        self, run_id: str, resume: control_pb2.CheckpointRef | None, newer_than: tuple[int, int] | None
    ) -> Survey:
        try:
            survey = self.directory.look(run_id, resume, newer_than)
        except Exception as error:  # whatever it is: this node is waited for
            self.directory.complaint(error)
            return Survey("", (), ())
        self.directory.complaint.over()
        return survey

    @staticmethod
    def _sees(survey: Survey, resume: control_pb2.CheckpointRef) -> bool:
        return any(one.ref.digest == resume.digest for one in survey.inventory)


def _sealed_as(store: CheckpointStore, ref: control_pb2.CheckpointRef | None) -> Manifest | None:
    try:
        return None if ref is None else read_sealed(store.path(ref.name), ref.digest)
    except CheckpointDamaged:
        return None


def _damage_of(path: Path, digest: str, threads: int, moved: Callable[[int], None]) -> CheckpointDamaged | None:
    """What is wrong with a sealed checkpoint; None if nothing is.

    Raises:
        OSError: nobody can tell: the file system fails, or the whole directory is out of sight.
    """
    try:
        verify(path, read_sealed(path, digest), threads, moved=moved)
    except CheckpointDamaged as damaged:
        if os.path.isdir(path):
            return damaged
        # A mount that is away looks like missing files; the master finds out whether all nodes miss them.
        others = sum(is_checkpoint_name(name) for name in os.listdir(path.parent))
        raise OSError(
            errno.ENOENT, f"it is not in sight, and {others} others are in the run's directory", str(path)
        ) from None
    return None
