"""The directory of one run: its checkpoints, the next name, deletion on order, and copies for people.

Under a master the master's record is the pointer, and nothing here decides. Without one ``LocalLock`` is the authority:
only the process that holds it (rank 0) may name, seal and prune in the directory.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import stat
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

from .best import Best
from .deletion import delete
from .errors import CheckpointDamaged
from .files import replace_file
from .inventory import inspect, inventory
from .layout import BEST, FINISHED, LATEST, LOCK, MANIFEST, SHARDED, CheckpointName, is_checkpoint_name
from .manifest import Manifest, Ref
from .marks import marked
from .reading import is_file
from .spares import clear_spares


class DirectoryInUse(RuntimeError):
    """Another live process holds the lock of this checkpoint directory."""


class LocalLock:
    """The right to write in a directory that no master watches over. It ends with the process that holds it."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        self._descriptor: int | None = None
        # Of the file that it is; the path may lead elsewhere by the time that matters.
        self._file: os.stat_result | None = None
        # Of that file as the path showed it: some mounts number an open file in another way.
        self._shown: os.stat_result | None = None
        _locks.add(self)

    def acquire(self) -> None:
        """Takes the lock or fails at once.

        Raises:
            DirectoryInUse: Another process holds it.
            OSError: The lock file cannot be made, or the file system has no locks.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise DirectoryInUse(
                f"{self._path.parent} is in use by another training; stop it, or give another checkpoint directory"
            ) from error
        except OSError as error:
            os.close(descriptor)
            what = (
                f"it cannot be locked ({error.strerror or error}), and without a lock two trainings could write here:"
                " mount it with file locks, or give a checkpoint directory on another file system"
            )
            raise OSError(error.errno, what, str(self._path.parent)) from error
        self._file, self._descriptor = os.fstat(descriptor), descriptor
        with contextlib.suppress(OSError):
            self._shown = os.stat(self._path)

    @property
    def is_there(self) -> bool:
        """Whether the path still leads to the file that is locked, as far as anybody can tell; True while none is.

        Raises:
            OSError: The file system fails.
        """
        if self._descriptor is None or self._shown is None:
            return True
        try:
            return os.path.samestat(os.stat(self._path), self._shown)
        except FileNotFoundError:
            return False

    @property
    def is_gone(self) -> bool:
        """Whether no file has the lock's name. Raises OSError where nobody can tell."""
        return not is_file(self._path)

    def renew(self, may_go_on: Callable[[], bool]) -> None:
        """Takes the lock of what the path leads to now, and gives the other one back.

        Args:
            may_go_on: Asked once the lock is taken, whether this may be.

        Raises:
            DirectoryInUse: Another process holds it.
            OSError: It may not be, or `acquire` says so.
        """
        other = LocalLock(self._path.parent)
        with other:
            if not may_go_on():
                raise OSError(errno.ESTALE, "there are checkpoints of another one", str(self._path.parent))
            old, self._descriptor = self._descriptor, other._descriptor
            self._file, self._shown, other._descriptor = other._file, other._shown, None
        # The file system may have forgotten it (ESTALE), and it is nobody's any more.
        with contextlib.suppress(OSError):
            _give_back(old)

    def release(self) -> None:
        """Gives the lock back, also where a forked process still has the descriptor."""
        # First: a process that is forked meanwhile must not close a number that somebody else has by then.
        descriptor, self._descriptor = self._descriptor, None
        _give_back(descriptor)

    def __enter__(self) -> LocalLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def forget(self) -> None:
        """Leaves the lock to the process that this one was forked from: it ends with that one, not with both."""
        descriptor, self._descriptor = self._descriptor, None
        # The script may have closed all descriptors that it did not know, and have others of these numbers now.
        with contextlib.suppress(OSError):
            if descriptor is not None and self._file and os.path.samestat(os.fstat(descriptor), self._file):
                os.close(descriptor)


def _give_back(descriptor: int | None) -> None:
    if descriptor is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


# A loader's workers outlive a process that was killed until they look for it, and would keep the lock so long.
_locks: weakref.WeakSet[LocalLock] = weakref.WeakSet()


def _forget_all() -> None:
    for lock in list(_locks):
        lock.forget()


os.register_at_fork(after_in_child=_forget_all)


class CheckpointStore:
    """One run's directory. Holds no state but its path; safe to make anywhere, any number of times.

    Args:
        run_dir: The directory.
        lock: Of a run that no master watches over, where this process holds it: nothing is written or deleted where
            the path leads elsewhere meanwhile.
    """

    def __init__(self, run_dir: Path, lock: LocalLock | None = None) -> None:
        self.run_dir, self._lock = Path(run_dir), lock

    def check_held(self) -> None:
        """Raises OSError where the lock is not that of the directory here any more."""
        if self._lock is None or self._lock.is_there:
            return
        if self._lock.is_gone:
            text = "this training's lock file, or the directory with it, was deleted: the next save makes it again"
            raise OSError(errno.ESTALE, text, str(self.run_dir))
        raise _lost("another training may be at work", self.run_dir)

    def begun_with(self) -> Ref | None:
        """The newest checkpoint that is sealed here, sound or not, for `hold`. None without a lock, or if unknown."""
        if self._lock is None:
            return None
        with contextlib.suppress(OSError):
            names = [CheckpointName.parse(name) for name in self._names() if is_checkpoint_name(name)]
            for name in sorted((one for one in names if one.lease is None), key=lambda one: one.age, reverse=True):
                with contextlib.suppress(CheckpointDamaged):
                    return Manifest.read(self.run_dir / str(name)).ref
        return None

    def hold(self, known: Collection[Ref]) -> None:
        """Before a checkpoint is begun: the lock is that of the directory here.

        It is taken anew where the directory or the lock file was deleted, unless another training has been here since.

        Args:
            known: The newest checkpoint that this process has sealed. Before the first one: its resume point, and what
                `begun_with` says.

        Raises:
            OSError: It is not, so nothing may be written here.
        """
        if self._lock is None or self._lock.is_there:
            return
        try:
            self._lock.renew(lambda: self._has_nothing_newer(known))
        except DirectoryInUse as error:
            raise _lost("another training is at work", self.run_dir) from error
        except OSError as error:
            raise _lost(error.strerror or str(error), self.run_dir) from error

    def _has_nothing_newer(self, known: Collection[Ref]) -> bool:
        """Nothing is sealed here, or one of those is the newest. Whoever begins here later has no lower epoch."""
        seen = inspect(self.run_dir, check_sizes=False)
        newest = [manifest.ref for manifest in seen.sealed if manifest.form == SHARDED][-1:]
        return all(one in known for one in newest) and not any(one.unreadable for one in seen.unsealed)

    def path(self, name: str) -> Path:
        """Where the checkpoint called ``name`` lies or will lie.

        Raises:
            ValueError: ``name`` is not a checkpoint's.
        """
        CheckpointName.parse(name)
        return self.run_dir / name

    def sealed(self, form: str | None = None) -> list[Manifest]:
        """Sealed checkpoints, oldest first, of one form or of all."""
        return [manifest for manifest in inventory(self.run_dir) if form in (None, manifest.form)]

    def newest(self, form: str = SHARDED) -> Manifest | None:
        """The sealed checkpoint of the highest epoch, then step, then attempt."""
        found = self.sealed(form)
        return found[-1] if found else None

    def next_name(self, step: int, epoch: int) -> CheckpointName:
        """A name that nobody has used: its attempt follows the highest one on disk, sealed or not."""
        attempts = [
            parsed.attempt
            for parsed in map(CheckpointName.parse, filter(is_checkpoint_name, self._names()))
            if (parsed.step, parsed.epoch) == (step, epoch)
        ]
        return CheckpointName(step, epoch, max(attempts, default=0) + 1)

    def next_epoch(self) -> int:
        """Higher than every epoch in the directory; 0 if it is empty. For runs without a master, which would count."""
        names = [CheckpointName.parse(name) for name in self._names() if is_checkpoint_name(name)]
        return max((name.epoch + 1 for name in names), default=0)

    def never_sealed(self, before_epoch: int, before_step: int = 0) -> list[str]:
        """Directories without a manifest whose epoch is below ``before_epoch``: saves and forms that were given up.

        Of that epoch itself they are its saves below ``before_step``.

        A directory that cannot be read is left out, and so are links and what was sealed once.

        Raises:
            OSError: The marks of what was sealed cannot be read.
        """
        sealed = marked(self.run_dir)
        return [name for name in self._without_manifest(before_epoch, before_step) if name not in sealed]

    def lost_manifest(self, before_epoch: int) -> list[str]:
        """Names of what was sealed and has no manifest any more: see ``marks``.

        Raises:
            OSError: The marks of what was sealed cannot be read.
        """
        sealed = marked(self.run_dir)
        return [name for name in self._without_manifest(before_epoch) if name in sealed]

    def _without_manifest(self, before_epoch: int, before_step: int = 0) -> list[str]:
        def is_old(name: CheckpointName) -> bool:
            save_of_epoch = name.epoch == before_epoch and name.lease is None
            return name.epoch < before_epoch or (save_of_epoch and name.step < before_step)

        old = [name for name in self._names() if is_checkpoint_name(name) and is_old(CheckpointName.parse(name))]
        return sorted(name for name in old if self._has_no_manifest(self.run_dir / name))

    def prune(self, names: Iterable[str], *, replaced: bool = False) -> dict[str, OSError]:
        """Deletes exactly the given checkpoints, see ``delete``. One that is gone already counts as deleted.

        Args:
            names: Which.
            replaced: Newer ones count: files of one of them are kept for the next one to write over.

        Returns:
            What could not be deleted, by name. If a form was named before its source and could not be deleted, the
            source stays: without it nobody could tell what the form is.

        Raises:
            ValueError: A name is not a checkpoint's; nothing was deleted.
        """
        failures: dict[str, OSError] = {}
        for path in [self.path(name) for name in names]:
            stays = [form for form in failures if str(CheckpointName.parse(form).source) == path.name]
            try:
                if _is_gone(path):
                    continue
                self.check_held()
                if stays:
                    raise OSError(errno.EBUSY, f"{stays[0]} could not be deleted before it", str(path))
                delete(path, replaced=replaced)
            except OSError as error:
                failures[path.name] = error
        return failures

    def clear_spares(self) -> None:
        """Removes the spare files, see ``spares``, unless the directory here is another training's by now."""
        with contextlib.suppress(OSError):
            self.check_held()
            clear_spares(self.run_dir)

    def write_latest(self, manifest: Manifest) -> None:
        """Notes the newest checkpoint in ``latest.json``: a copy for people, which nothing of ours reads."""
        self._note(LATEST, {"name": manifest.name, "digest": manifest.digest, "step": manifest.step})

    def write_best(self, best: Best | None) -> None:
        """Notes the best checkpoint, or that there is none, in ``best.json``: a copy for people, as ``latest.json``."""
        if best is None:
            self.check_held()
            (self.run_dir / BEST).unlink(missing_ok=True)
        else:
            self._note(BEST, asdict(best))

    def mark_finished(self, step: int, head: Manifest | None) -> None:
        """Writes ``FINISHED.json``, which says that the run reached its end with ``step`` steps."""
        self._note(FINISHED, {"step": step, "name": head and head.name, "digest": head and head.digest})

    @property
    def finished(self) -> bool:
        """Whether the run has reached its end. Raises OSError where nobody can tell."""
        return is_file(self.run_dir / FINISHED)

    @staticmethod
    def _has_no_manifest(directory: Path) -> bool:
        try:
            if not stat.S_ISDIR(os.lstat(directory).st_mode):
                return False
            os.lstat(directory / MANIFEST)
        except FileNotFoundError:
            return os.path.isdir(directory)
        except OSError:
            return False
        return False

    def _names(self) -> Iterable[str]:
        try:
            return os.listdir(self.run_dir)
        except FileNotFoundError:
            return ()

    def _note(self, name: str, content: dict[str, object]) -> None:
        self.check_held()
        self.run_dir.mkdir(parents=True, exist_ok=True)
        text = json.dumps(content, sort_keys=True).encode() + b"\n"
        # The other files are for people, and they are written while a drain waits.
        replace_file(self.run_dir / name, text, lasting=name == FINISHED)


def _is_gone(path: Path) -> bool:
    try:
        os.lstat(path)
    except FileNotFoundError:
        return True
    return False


def _lost(why: str, run_dir: Path) -> OSError:
    text = (
        "this training's lock is gone from here, since the directory or its lock file was renamed or deleted, and"
        f" {why}: nothing is written or deleted here until the directory that it began in has its name again"
    )
    return OSError(errno.ESTALE, text, str(run_dir))
