"""What the agent does in the checkpoint directory, always off the main thread.

The directory is one file system that all nodes see, possibly NFS: everything may take long, and what another node
wrote may come into sight late.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from dalsegno.elastic.checkpoint import (
    CheckpointDamaged,
    CheckpointName,
    CheckpointStore,
    Manifest,
    finished_runs,
    inventory,
    is_checkpoint_name,
    read_sealed,
    verify,
)
from dalsegno.elastic.checkpoint.files import Meter, publish, read_published
from dalsegno.protos import control_pb2

from .events import ManifestRead, Pruned, VerificationDone, VerificationMoved
from .private import NotPrivateError, check_private

__all__ = ["JobDirectory", "Storage", "StorageError", "Survey"]

# Seconds that a member looks again for a resume point which it does not see (NFS caches attributes for up to 60 s, but
# opening the directory revalidates it; the master waits for this answer).
LOOK_SECONDS = 10.0
# Between two looks: the master waits for a member; a spare may look for days, and each look reads all manifests.
_FIRST_PAUSE, _LAST_PAUSE, _LAST_PATIENT_PAUSE = 0.1, 1.0, 8.0
# Between the tries of a verification that the file system spoils (ESTALE, EIO, a mount that is away), seconds.
_VERIFY_PAUSES = (1.0, 3.0, 6.0, 10.0)
# Between two words on how far a verification is, seconds.
_MOVED_EVERY = 5.0
# A probe file is a token; more is not ours.
_MAX_PROBE = 256

logger = logging.getLogger(__name__)


class StorageError(Exception):
    """The checkpoint directory cannot be used; one line that says what to change."""


@dataclass(frozen=True)
class Survey:
    """One look at the job's directory: see `RegisterRequest` and `JoinRequest`."""

    probe: str
    inventory: tuple[control_pb2.Checkpoint, ...]
    finished_runs: tuple[str, ...]


class JobDirectory:
    """Paths and small files of one job below the checkpoint directory (docs/contracts.md)."""

    def __init__(self, checkpoint_dir: Path, job_id: str) -> None:
        self.root = checkpoint_dir
        self.job_id = job_id
        self.private = checkpoint_dir / ".dalsegno" / job_id
        self.runs = checkpoint_dir / job_id

    def run(self, run_id: str) -> Path:
        """A run's directory: checkpoints are its children.

        Raises:
            ValueError: `run_id` is not one path component.
        """
        if not run_id or run_id in (".", "..") or "/" in run_id:
            raise ValueError(f"not a run id: {run_id!r}")
        return self.runs / run_id

    def prepare(self) -> None:
        """Makes the directories and checks that they can be written, the private one by us alone.

        Raises:
            StorageError: they cannot, or it can.
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
            raise StorageError(
                f"the checkpoint directory {self.root} cannot be written ({error.strerror or error}); "
                "choose another with --checkpoint-dir, or fix its permissions"
            ) from error

    def probe(self) -> str:
        """The content of the job's probe file: the same for all nodes that see the same directory.

        Made by whoever comes first: written aside and linked into place, so that nobody ever reads half of it.
        """
        path = self.private / "probe"
        with contextlib.suppress(FileNotFoundError):
            return self._read_probe(path)
        self.private.mkdir(parents=True, exist_ok=True, mode=0o700)
        aside = self.private / f"probe.{secrets.token_hex(8)}"
        with open(aside, "x", encoding="ascii") as file:
            file.write(secrets.token_hex(16))
            file.flush()
            os.fsync(file.fileno())
        try:
            # Somebody else's came first: theirs counts.
            with contextlib.suppress(FileExistsError):
                publish(aside, path)
        finally:
            aside.unlink()
        return self._read_probe(path)

    @staticmethod
    def _read_probe(path: Path) -> str:
        return read_published(path)[:_MAX_PROBE].decode("ascii", errors="replace")

    def survey(self) -> Survey:
        """Probe, all sealed checkpoints of runs that are not finished, and the finished runs.

        Raises:
            OSError: the directory cannot be read.
        """
        finished = finished_runs(self.runs)
        found: list[control_pb2.Checkpoint] = []
        with contextlib.suppress(FileNotFoundError):
            for entry in sorted(os.scandir(self.runs), key=lambda entry: entry.name):
                if entry.name not in finished and not entry.name.startswith(".") and entry.is_dir():
                    # Recorded ones are verified elsewhere; here a damaged one must still be in sight.
                    found += [manifest.to_proto() for manifest in inventory(Path(entry.path), check_sizes=False)]
        return Survey(self.probe(), tuple(found), tuple(finished))


class Storage:
    """Runs such work on a few threads and hands the results to callbacks (called on those threads).

    Args:
        directory: the job's.
        threads: for one verification.
    """

    def __init__(self, directory: JobDirectory, threads: int = 4) -> None:
        self.directory = directory
        self._threads = threads
        self._closing = threading.Event()
        # A slow verification or deletion must not hold up a Join.
        self._quick = ThreadPoolExecutor(2, thread_name_prefix="storage")
        self._slow = ThreadPoolExecutor(2, thread_name_prefix="storage-slow")
        self._look = 0
        self._look_lock = threading.Lock()

    def survey(self, deliver: Callable[[Survey], None], failed: Callable[[str], None]) -> None:
        """Looks at the job's directory once."""

        def work() -> None:
            try:
                survey = self.directory.survey()
            except OSError as error:
                failed(f"the checkpoint directory cannot be read: {error}")
                return
            deliver(survey)

        self._submit(self._quick, work)

    def look(
        self,
        run_id: str,
        resume: control_pb2.CheckpointRef | None,
        patient: bool,
        deliver: Callable[[Survey], None],
        seconds: float = LOOK_SECONDS,
    ) -> None:
        """Looks until `resume` is in sight, at most `seconds` (for ever if `patient`), then delivers what is seen.

        A later `look` ends an earlier one without a delivery. A directory that cannot be read is an empty one.
        """
        with self._look_lock:
            self._look += 1
            number = self._look

        def work() -> None:
            deadline = time.monotonic() + seconds
            pause, longest = _FIRST_PAUSE, _LAST_PATIENT_PAUSE if patient else _LAST_PAUSE
            while self._current(number):
                survey = self._survey_or_nothing()
                seen = resume is None or not resume.digest or self._sees(survey, resume)
                if seen or (not patient and time.monotonic() >= deadline):
                    if self._current(number):
                        deliver(survey)
                    return
                # A file that another machine makes gives no event over NFS.
                self._closing.wait(pause)
                pause = min(pause * 2, longest)

        # On a thread of its own: it may take for ever.
        threading.Thread(target=work, name="storage-look", daemon=True).start()

    def read_manifest(self, run_id: str, name: str, digest: str, deliver: Callable[[ManifestRead], None]) -> None:
        """Describes a checkpoint that a worker of this node's epoch has sealed."""

        def work() -> None:
            try:
                manifest = read_sealed(self.directory.run(run_id) / name, digest)
            except (CheckpointDamaged, OSError, ValueError) as error:
                deliver(ManifestRead(name, None, str(error)))
            else:
                deliver(ManifestRead(name, manifest.to_proto()))

        self._submit(self._quick, work)

    def verify(
        self,
        run_id: str,
        verification: control_pb2.Verification,
        deliver: Callable[[VerificationMoved | VerificationDone], None],
    ) -> None:
        """Checks all checksums of one directory; delivers now and then how far it is, and last the verdict.

        Only damage is a verdict. A file system that fails is tried a few times, for about 20 seconds in all, and then
        reported as inconclusive: it says nothing about the checkpoint, which other nodes may read well.
        """

        def work() -> None:
            number = verification.number
            moved = Meter(lambda count: deliver(VerificationMoved(number, count)), _MOVED_EVERY)
            done = self._look_through(run_id, verification, moved)
            if done is not None:
                deliver(done)

        self._submit(self._slow, work)

    def _look_through(
        self, run_id: str, verification: control_pb2.Verification, moved: Callable[[int], None]
    ) -> VerificationDone | None:
        """Blocks. None: this storage was closed meanwhile."""
        problem = ""
        for pause in (0.0, *_VERIFY_PAUSES):
            # Nothing tells when a file system is well again.
            if self._closing.wait(pause):
                return None
            try:
                path = self.directory.run(run_id) / verification.ref.name
                damage = _damage_of(path, verification.ref.digest, self._threads, moved)
            except (OSError, ValueError) as error:
                problem = str(error)
                logger.warning("verifying %s: %s", verification.ref.name, error)
            else:
                return VerificationDone(verification.number, not damage, damage)
        return VerificationDone(verification.number, False, problem, inconclusive=True)

    def prune(self, run_id: str, refs: Sequence[control_pb2.CheckpointRef], deliver: Callable[[Pruned], None]) -> None:
        """Deletes retired checkpoints with their later forms. Delivers those that are gone; the others stay."""

        def work() -> None:
            store = CheckpointStore(self.directory.run(run_id))
            gone = []
            for ref in refs:
                try:
                    store.prune(self._with_forms(store.run_dir, ref))
                    gone.append(ref)
                except (OSError, ValueError) as error:
                    logger.warning("checkpoint %s cannot be deleted: %s", ref.name, error)
            deliver(Pruned(tuple(gone)))

        self._submit(self._slow, work)

    def sweep(self, run_id: str, epoch: int) -> None:
        """Deletes directories without a manifest that epochs before `epoch` left behind."""

        def work() -> None:
            store = CheckpointStore(self.directory.run(run_id))
            try:
                left = store.never_sealed(epoch)
                store.prune(left)
            except OSError as error:
                logger.warning("unsealed checkpoints cannot be removed: %s", error)
            else:
                if left:
                    logger.info("removed what was never sealed: %s", ", ".join(left))

        self._submit(self._slow, work)

    def write_latest(self, run_id: str, head: control_pb2.Checkpoint) -> None:
        """Copies the newest commit to `latest.json`, for people."""

        def work() -> None:
            store = CheckpointStore(self.directory.run(run_id))
            try:
                store.write_latest(Manifest.read(store.path(head.ref.name)))
            except (CheckpointDamaged, OSError, ValueError) as error:
                logger.warning("latest.json was not written: %s", error)

        self._submit(self._quick, work)

    def mark_finished(self, run_id: str, step: int, head: str, timeout: float = 10.0) -> None:
        """Writes `FINISHED.json`; waits for it, as the agent is about to exit."""

        def work() -> None:
            store = CheckpointStore(self.directory.run(run_id))
            try:
                found = [manifest for manifest in store.sealed() if manifest.digest == head]
                store.mark_finished(step, found[0] if found else None)
            except (CheckpointDamaged, OSError, ValueError) as error:
                logger.warning("FINISHED.json was not written: %s", error)

        future = self._submit(self._quick, work)
        if future is not None and wait([future], timeout).not_done:
            logger.warning("FINISHED.json was not written within %.0f s", timeout)

    def close(self) -> None:
        """Lets running work end by itself; what was not begun is dropped."""
        self._closing.set()
        for pool in (self._quick, self._slow):
            pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, pool: ThreadPoolExecutor, work: Callable[[], None]) -> Future[None] | None:
        if self._closing.is_set():
            return None
        future = pool.submit(work)
        future.add_done_callback(_log_crash)
        return future

    def _current(self, number: int) -> bool:
        with self._look_lock:
            return self._look == number and not self._closing.is_set()

    def _survey_or_nothing(self) -> Survey:
        try:
            return self.directory.survey()
        except OSError as error:
            logger.warning("the checkpoint directory cannot be read: %s", error)
            return Survey("", (), ())

    @staticmethod
    def _sees(survey: Survey, resume: control_pb2.CheckpointRef) -> bool:
        return any(one.ref.digest == resume.digest for one in survey.inventory)

    @staticmethod
    def _with_forms(run_dir: Path, ref: control_pb2.CheckpointRef) -> list[str]:
        wanted = CheckpointName.parse(ref.name)
        names = [name for name in os.listdir(run_dir) if is_checkpoint_name(name)]
        if wanted.lease is not None:
            return [ref.name]
        # Later forms first: while the source is there, what is left of a form can be told from a stray directory.
        forms = [name for name in names if CheckpointName.parse(name).source == wanted and name != ref.name]
        return [*forms, ref.name]


def _damage_of(path: Path, digest: str, threads: int, moved: Callable[[int], None]) -> str:
    """What is wrong with a sealed checkpoint; empty where nothing is.

    Raises:
        OSError: it cannot be told: the file system fails, or the directory is not in sight as a whole.
    """
    try:
        verify(path, read_sealed(path, digest), threads, moved=moved)
    except CheckpointDamaged as damaged:
        # A mount that is away looks like missing files.
        os.stat(path)
        return str(damaged)
    return ""


def _log_crash(future: Future[None]) -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        logger.error("work in the checkpoint directory failed", exc_info=error)
