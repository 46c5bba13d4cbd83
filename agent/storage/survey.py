"""What an agent reports of its job's checkpoint directory: it lists names, and reads manifests only where needed.

A directory may hold ten thousand checkpoints and a job a thousand nodes, so nobody reads all manifests. The names tell
what a run contains, and the master knows what it has recorded. See `JobDirectory.survey`, for `Register`, and
`JobDirectory.look`, for `Join`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from threading import Lock

from dalsegno.elastic.checkpoint import CheckpointDamaged, CheckpointName, Manifest, is_checkpoint_name
from dalsegno.elastic.checkpoint.errors import printable
from dalsegno.elastic.checkpoint.layout import MANIFEST
from dalsegno.protos import control_pb2
from dalsegno.protos.contract import run_number
from dalsegno.protos.limits import MOST_CHECKPOINTS, MOST_UNUSABLE

__all__ = ["Manifests", "Survey", "look_at", "newest_of", "runs_in_order"]

# A Join always reports so many of the newest, and so many of each of the last epochs. What a closed epoch sealed too
# late to be recorded is among these, because that was the last thing that the epoch did.
_NEWEST, _EPOCHS, _OF_EPOCH = 16, 8, 4
# A master deletes checkpoints that it does not know once the run has gone on without them. So a Join reports only what
# Register could report to a master without memory: the newest 256, including forms and best ones.
_RECENT = 100
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


def runs_in_order(names: Iterable[str]) -> list[str]:
    """The runs among these names, by their numbers."""
    numbers = {name: number for name in names if (number := run_number(name)) is not None}
    return sorted(numbers, key=numbers.__getitem__)


class Manifests:
    """Reads manifests, each only once while its file does not change. For several threads."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, int, int], control_pb2.Checkpoint | str]] = {}
        self._lock = Lock()

    def describe(self, directory: Path) -> control_pb2.Checkpoint:
        """The checkpoint in `directory` as its manifest describes it.

        Raises:
            CheckpointDamaged, OSError: see `Manifest.read`.
            ValueError: a manifest of the same size and time was unusable before.
        """
        try:
            found = os.lstat(directory / MANIFEST)
        except FileNotFoundError:
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

    def usable(self, run_dir: Path, names: Iterable[CheckpointName]) -> Iterator[control_pb2.Checkpoint]:
        """Those of `names` that are sealed; others are skipped."""
        for name in names:
            try:
                yield self.describe(run_dir / str(name))
            except (CheckpointDamaged, ValueError) as error:
                logger.debug("%s does not count: %s", name, error)
            except OSError as error:
                logger.warning("%s cannot be read and does not count: %s", run_dir / str(name), error)


def newest_of(run_dir: Path, manifests: Manifests, most: int = MOST_CHECKPOINTS) -> list[control_pb2.Checkpoint]:
    """For a master that may know nothing: the newest checkpoints with their later forms, and those named as best.

    Raises:
        OSError: the run's directory cannot be read.
    """
    sources, forms = _names(run_dir)
    found: dict[str, control_pb2.Checkpoint] = {}
    for source in reversed(sources):
        if len(found) >= most:
            break
        found.update((one.ref.name, one) for one in _with_form(run_dir, source, forms, manifests))
    bests = {name for one in found.values() for name in (one.best, one.candidate)} - {"", *found}
    there = [source for source in sources if str(source) in bests]
    told = [*manifests.usable(run_dir, there[-_NEWEST:]), *found.values()]
    return told[:most]


def look_at(
    run_dir: Path,
    resume: control_pb2.CheckpointRef | None,
    newer_than: tuple[int, int] | None,
    manifests: Manifests,
) -> tuple[list[control_pb2.Checkpoint], list[control_pb2.UnusableCheckpoint]]:
    """For a master that has asked for `resume`, and may not know what was sealed lately.

    Args:
        run_dir: the run's directory.
        resume: None: nothing was asked for.
        newer_than: epoch and step of the newest checkpoint that the master has told; None: it has told none.
        manifests: reads the manifests.

    Returns:
        `JoinRequest.inventory` and `JoinRequest.unusable`.

    Raises:
        OSError: the run's directory cannot be read.
    """
    sources, forms = _names(run_dir)
    told: dict[str, control_pb2.Checkpoint] = {}
    unusable: list[control_pb2.UnusableCheckpoint] = []
    if resume is not None and is_checkpoint_name(resume.name):
        wanted = CheckpointName.parse(resume.name)
        for name in [wanted, *reversed(forms.get(wanted, []))]:
            seen = _asked_for(run_dir, name, resume, manifests)
            if isinstance(seen, control_pb2.Checkpoint):
                told[seen.ref.name] = seen
            elif seen:
                unusable.append(control_pb2.UnusableCheckpoint(name=str(name), reason=seen))
    for source in _unrecorded(sources, newer_than):
        if len(told) >= MOST_CHECKPOINTS:
            break
        if str(source) not in told:
            told.update((one.ref.name, one) for one in _with_form(run_dir, source, forms, manifests))
    return list(told.values())[:MOST_CHECKPOINTS], unusable[:MOST_UNUSABLE]


def _asked_for(
    run_dir: Path, name: CheckpointName, resume: control_pb2.CheckpointRef, manifests: Manifests
) -> control_pb2.Checkpoint | str:
    """The resume point, or a later form of it: its description, or why its manifest is unusable; "": out of sight."""
    directory = run_dir / str(name)
    try:
        # The resume point's manifest is read each time, because a lost bit on the disk does not change its time.
        found = Manifest.read(directory).to_proto() if name.lease is None else manifests.describe(directory)
    except (CheckpointDamaged, ValueError) as error:
        return printable(str(error)) if os.path.lexists(directory) else ""
    except OSError as error:
        logger.warning("%s cannot be read: %s", directory, error)
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
) -> list[control_pb2.Checkpoint]:
    """A checkpoint and its newest later form, as far as they are sealed."""
    form = islice(manifests.usable(run_dir, reversed(forms.get(source, ()))), 1)
    return [*manifests.usable(run_dir, [source]), *form]


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
