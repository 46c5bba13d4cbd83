"""What an agent reports of its job's checkpoint directory: it lists names, and reads manifests only where needed.

A directory may hold ten thousand checkpoints and a job a thousand nodes, so nobody reads all manifests. The names tell
what a run contains, and the master knows what it has recorded. See `JobDirectory.survey`, for `Register`, and
`JobDirectory.look`, for `Join`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Event, Lock

from dalsegno.elastic.checkpoint import (
    CheckpointDamaged,
    CheckpointName,
    CheckpointStore,
    Manifest,
    is_checkpoint_name,
)
from dalsegno.elastic.checkpoint.errors import printable
from dalsegno.elastic.checkpoint.layout import MANIFEST
from dalsegno.elastic.checkpoint.reading import NOT_THERE, is_directory
from dalsegno.protos import control_pb2
from dalsegno.protos.contract import run_number
from dalsegno.protos.limits import MOST_CHECKPOINTS, MOST_UNUSABLE
from dalsegno.protos.shortage import shortage

from .complaint import FailingError, UnreadableError, is_forbidden, unreadable
from .private import NotPrivateError

__all__ = [
    "FAILING_PAUSES_SECONDS",
    "Manifests",
    "Survey",
    "look_at",
    "looked_again",
    "newest_of",
    "runs_in_order",
    "surveyed",
]

# A Join always reports so many of the newest, and so many of each of the last epochs. What a closed epoch sealed too
# late to be recorded is among these, because that was the last thing that the epoch did.
_NEWEST, _EPOCHS, _OF_EPOCH = 16, 8, 4
# A master deletes checkpoints that it does not know once the run has gone on without them. So a Join reports only what
# Register could report to a master without memory: the newest 256, including forms and best ones.
_RECENT = 100
# Seconds between the looks of a node that registers at what its user may not read. That may be over in a moment: a
# `chown -R` goes through the files, or a ticket is renewed. A supervisor takes the exit that follows as final.
_FORBIDDEN_PAUSES_SECONDS = (0.1, 0.2, 0.4, 0.6, 0.7)
# And where the file system fails (ESTALE, EIO, a mount that is away for a moment).
FAILING_PAUSES_SECONDS = (1.0, 3.0, 6.0, 10.0)
# How many manifests' descriptions an agent remembers.
_REMEMBERED = 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Survey:
    """One look at the job's directory: see `RegisterRequest` and `JoinRequest`."""

    probe: str
    inventory: tuple[control_pb2.Checkpoint, ...]
    finished_runs: tuple[str, ...]
    unusable: tuple[control_pb2.UnusableCheckpoint, ...] = ()
    # Lines about what may be newer than all of these, and nobody can read: the next look may see it.
    passed_over: tuple[str, ...] = ()


def runs_in_order(names: Iterable[str]) -> list[str]:
    """The runs among these names, by their numbers."""
    numbers = {name: number for name in names if (number := run_number(name)) is not None}
    return sorted(numbers, key=numbers.__getitem__)


class Manifests:
    """Reads manifests, each only once while its file does not change. For several threads."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int], control_pb2.Checkpoint | str]] = {}
        self._logged: dict[Path, str] = {}
        self._lock = Lock()

    def describe(self, directory: Path) -> control_pb2.Checkpoint:
        """The checkpoint in `directory` as its manifest describes it.

        Raises:
            CheckpointDamaged, OSError: see `Manifest.read`.
            ValueError: a manifest of the same size and time was unusable before.
        """
        try:
            found = os.lstat(directory / MANIFEST)
        except (FileNotFoundError, NotADirectoryError):
            return Manifest.read(directory).to_proto()  # says what is wrong
        mark = (found.st_ino, found.st_size, found.st_mtime_ns)
        with self._lock:
            known_mark, known = self._known.get(directory, (None, ""))
        if known_mark == mark:
            if isinstance(known, str):
                raise ValueError(known)
            return known
        try:
            described = Manifest.read(directory).to_proto()
        except CheckpointDamaged as damaged:
            self._remember(directory, mark, str(damaged))
            raise
        self._remember(directory, mark, described)
        return described

    def _remember(self, directory: Path, mark: tuple[int, int, int], what: control_pb2.Checkpoint | str) -> None:
        with self._lock:
            self._known.pop(directory, None)
            self._known[directory] = mark, what
            while len(self._known) > _REMEMBERED:
                del self._known[next(iter(self._known))]

    def usable(
        self, run_dir: Path, names: Iterable[CheckpointName], *, vital: bool = False
    ) -> Iterator[control_pb2.Checkpoint]:
        """Those of `names` that are sealed; others are skipped.

        Args:
            run_dir: the run's directory.
            names: of directories in it.
            vital: each may be where the run goes on. So one that is there, and cannot be read, is not skipped.

        Raises:
            UnreadableError: see `vital`; a FailingError where no rights forbid it.
            OSError: of a vital one: this process, or the machine, has no more of something.
        """
        for name in names:
            directory = run_dir / str(name)
            try:
                yield self.describe(directory)
            except (CheckpointDamaged, ValueError) as error:
                logger.debug("%s does not count: %s", name, error)
            except OSError as error:
                if vital and error.errno not in NOT_THERE:
                    if shortage(error):
                        raise  # nothing is wrong with the file
                    raise unreadable(directory, error) from error
                self.skipped(directory, error)

    def skipped(self, directory: Path, error: OSError) -> None:
        """Logs why a checkpoint cannot be read: once, as each Join looks again, and a spare for days."""
        text = str(error)
        with self._lock:
            if self._logged.pop(directory, "") != text:
                logger.warning("%s cannot be read and does not count: %s", directory, text)
            self._logged[directory] = text
            while len(self._logged) > _REMEMBERED:
                del self._logged[next(iter(self._logged))]


def looked_again(
    look: Callable[[], Survey], closing: Event, *, patient: bool, again: Callable[[OSError], None]
) -> Survey:
    """What a look at the job's directory finds. It is repeated for about two seconds while this user may not read it.

    Where the file system fails it is repeated for about twenty seconds: one stale handle would cost the node for good.

    Args:
        look: looks once.
        closing: set when nobody waits for it any more.
        patient: also for a file system that fails.
        again: hears, where that fails and is to be looked at again, why.

    Raises:
        NotPrivateError: at once.
        OSError: the last look's.
    """
    short, failing = iter(_FORBIDDEN_PAUSES_SECONDS), iter(FAILING_PAUSES_SECONDS if patient else ())
    while not closing.is_set():
        try:
            return look()
        except NotPrivateError:
            raise
        except OSError as error:
            passing = _is_of_rights(error) or shortage(error)
            pause = next(short if passing else failing, None)
            if pause is None:
                raise
            if not passing:
                again(error)
            logger.info("the checkpoint directory is looked at again: %s", error)
        # No event tells of a change of rights, or when a file system works again.
        closing.wait(pause)
    return look()


def _is_of_rights(error: OSError) -> bool:
    return is_forbidden(error) or (isinstance(error, UnreadableError) and not isinstance(error, FailingError))


def surveyed(
    runs: Path, manifests: Manifests, *, passes_over: bool = False
) -> tuple[list[control_pb2.Checkpoint], list[str]]:
    """The newest checkpoints of the runs that are not finished, and the finished runs by their numbers.

    Of all runs but the last it has only the newest checkpoint, which tells the run's epochs.

    Args:
        runs: the job's directory.
        manifests: reads the manifests.
        passes_over: see `newest_of`.

    Raises:
        OSError: that directory cannot be read, or that of the run that continues.
    """
    try:
        names = runs_in_order(os.listdir(runs))
    except FileNotFoundError:
        names = []
    found: list[control_pb2.Checkpoint] = []
    finished: list[str] = []
    for name in reversed(names):
        run, room = runs / name, MOST_CHECKPOINTS - len(found)
        try:
            if CheckpointStore(run).finished:
                finished.append(name)
            elif is_directory(run):
                # A seal is enough, because a damaged one must be in sight to be found damaged.
                found += newest_of(run, manifests, min(room, 1) if found else room, passes_over=passes_over)
        except OSError as error:
            # Behind a newer run it matters to nobody.
            if not found:
                raise
            logger.warning("%s cannot be read: %s", run, error)
    return found, finished[::-1]


def newest_of(
    run_dir: Path, manifests: Manifests, most: int = MOST_CHECKPOINTS, *, passes_over: bool = False
) -> list[control_pb2.Checkpoint]:
    """For a master that may know nothing: the newest checkpoints with their later forms, and those named as best.

    Args:
        run_dir: the run's directory.
        manifests: reads the manifests.
        most: of them all.
        passes_over: what cannot be read counts as not there, unless this user may not read it.

    Raises:
        UnreadableError: the newest one is there, and cannot be read. Without it such a master would go back to an
            older one, or to step 0, and give the epoch in its name to another world.
        OSError: the run's directory cannot be read.
    """
    sources, forms = _names(run_dir)
    found: dict[str, control_pb2.Checkpoint] = {}
    for source in reversed(sources):
        if len(found) >= most:
            break
        try:
            described = _with_form(run_dir, source, forms, manifests, vital=not found)
        except OSError as error:
            if not passes_over or _is_of_rights(error):
                raise
            manifests.skipped(run_dir / str(source), error)
            continue
        found.update((one.ref.name, one) for one in described)
    bests = {name for one in found.values() for name in (one.best, one.candidate)} - {"", *found}
    there = [source for source in sources if str(source) in bests]
    told = [*manifests.usable(run_dir, there[-_NEWEST:]), *found.values()]
    return told[:most]


def look_at(
    run_dir: Path,
    resume: control_pb2.CheckpointRef | None,
    newer_than: tuple[int, int] | None,
    manifests: Manifests,
) -> tuple[list[control_pb2.Checkpoint], list[control_pb2.UnusableCheckpoint], list[str]]:
    """For a master that has asked for `resume`, and may not know what was sealed lately.

    Args:
        run_dir: the run's directory.
        resume: None: nothing was asked for.
        newer_than: epoch and step of the newest checkpoint that the master has told; None: it has told none.
        manifests: reads the manifests.

    Returns:
        `JoinRequest.inventory` and `JoinRequest.unusable`, and a line for people about each later one that the file
        system does not let anybody read.

    Raises:
        UnreadableError: this user may not read `resume`, or one that was made later. A look without it would say that
            it is gone.
        OSError: the run's directory cannot be read.
    """
    sources, forms = _names(run_dir)
    told: dict[str, control_pb2.Checkpoint] = {}
    newest = newer_than or (0, 0)
    unusable: list[control_pb2.UnusableCheckpoint] = []
    passed_over: list[str] = []
    if resume is not None and is_checkpoint_name(resume.name):
        wanted = CheckpointName.parse(resume.name)
        newest = max(newest, (wanted.epoch, wanted.step))
        for name in [wanted, *reversed(forms.get(wanted, []))]:
            seen = _asked_for(run_dir, name, resume, manifests)
            if isinstance(seen, control_pb2.Checkpoint):
                told[seen.ref.name] = seen
            elif seen:
                unusable.append(control_pb2.UnusableCheckpoint(name=str(name), reason=seen))
    for source in _unrecorded(sources, newer_than):
        if len(told) >= MOST_CHECKPOINTS:
            break
        if str(source) in told:
            continue
        try:
            found = _with_form(run_dir, source, forms, manifests, vital=(source.epoch, source.step) > newest)
        except FailingError as error:
            # Nobody could mend a bad sector, and the master's record has all that counts for sure.
            passed_over.append(
                f"{source} may have been saved last, but the file system does not let it be read ({error.reason}):"
                " the run goes on without it"
            )
            continue
        told.update((one.ref.name, one) for one in found)
        if found:
            newest = max(newest, (source.epoch, source.step))
    return list(told.values())[:MOST_CHECKPOINTS], unusable[:MOST_UNUSABLE], passed_over


def _asked_for(
    run_dir: Path, name: CheckpointName, resume: control_pb2.CheckpointRef, manifests: Manifests
) -> control_pb2.Checkpoint | str:
    """The resume point, or a later form of it: its description, or why its manifest is unusable; "": out of sight.

    Raises:
        UnreadableError: the resume point is there, but this user may not read it.
    """
    directory = run_dir / str(name)
    try:
        # The resume point's manifest is read each time, because a lost bit on the disk does not change its time.
        found = Manifest.read(directory).to_proto() if name.lease is None else manifests.describe(directory)
    except (CheckpointDamaged, ValueError) as error:
        return printable(str(error)) if os.path.lexists(directory) else ""
    except OSError as error:
        if name.lease is None and is_forbidden(error):
            raise unreadable(directory, error) from error
        manifests.skipped(directory, error)
        return ""
    digest = found.ref.digest if name.lease is None else found.source.digest
    if digest != resume.digest:
        what = "it is" if name.lease is None else "it is a form of"
        return f"{what} {digest[:12]}, recorded is {resume.digest[:12]}"
    return found


def _unrecorded(sources: list[CheckpointName], newer_than: tuple[int, int] | None) -> list[CheckpointName]:
    """Checkpoints that the master may not have recorded, newest first."""
    newer = [one for one in sources if newer_than is None or (one.epoch, one.step) > newer_than]
    recent = sources[-_RECENT:]
    chosen = {*newer[-MOST_CHECKPOINTS:], *recent[-_NEWEST:]}
    for epoch in sorted({one.epoch for one in recent})[-_EPOCHS:]:
        chosen.update([one for one in recent if one.epoch == epoch][-_OF_EPOCH:])
    return sorted(chosen, key=lambda one: one.age, reverse=True)


def _with_form(
    run_dir: Path,
    source: CheckpointName,
    forms: Mapping[CheckpointName, Sequence[CheckpointName]],
    manifests: Manifests,
    *,
    vital: bool,
) -> list[control_pb2.Checkpoint]:
    """A checkpoint and its newest later form, as far as they are sealed; `vital` is of the checkpoint."""
    form = islice(manifests.usable(run_dir, reversed(forms.get(source, ()))), 1)
    return [*manifests.usable(run_dir, [source], vital=vital), *form]


def _names(run_dir: Path) -> tuple[list[CheckpointName], dict[CheckpointName, list[CheckpointName]]]:
    """Checkpoints by age, and their later forms by lease. A directory that does not exist is empty."""
    try:
        listed = os.listdir(run_dir)
    except FileNotFoundError:
        return [], {}
    names = [CheckpointName.parse(name) for name in listed if is_checkpoint_name(name)]
    forms: dict[CheckpointName, list[CheckpointName]] = {}
    for name in sorted((name for name in names if name.lease is not None), key=lambda name: name.lease or 0):
        forms.setdefault(name.source, []).append(name)
    return sorted((name for name in names if name.lease is None), key=lambda name: name.age), forms
