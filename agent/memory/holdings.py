"""What of memory checkpoints is on this node, whole: steps of runs, and which nodes' parts of each.

Which files lie where is in docs/contracts.md ("Memory of a node"). Ranks write their own node's part; what comes from
other agents is put in place by `Incoming`. What is known here is what this agent has seen to be whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import secrets
import shutil
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dalsegno.elastic.checkpoint import (
    MANIFEST,
    CheckpointDamaged,
    CheckpointName,
    Damage,
    FileEntry,
    Manifest,
    is_checkpoint_name,
    read_sealed,
)
from dalsegno.elastic.checkpoint.files import publish, write_exclusive
from dalsegno.elastic.checkpoint.manifest import MAX_BYTES
from dalsegno.elastic.checkpoint.parts import (
    PARTS_SUFFIX,
    part_path,
    parts_directory,
    read_part,
    read_parts,
    write_part,
)
from dalsegno.elastic.checkpoint.reading import NotRegular, read_regular
from dalsegno.elastic.checkpoint.spares import clear_spares, keep_spares, spare_bytes
from dalsegno.protos import control_pb2

from .arrivals import Arrivals, Key

__all__ = ["HeldParts", "Holdings", "StepPart", "StepPlace"]


@dataclass(frozen=True)
class HeldParts:
    """What this node holds of one step.

    Attributes:
        checkpoint: As its manifest describes it, with `in_memory`.
        parts: Group ranks, in the epoch that wrote it, whose parts are here, each whole. Empty: nothing any more.
        copies: Addresses (`PeerAddress`) of the agents that have said that they hold this node's own part.
        unsent: A buddy cannot be brought this node's own part, or has not taken the one before: nobody waits for it.
        damaged: What was found of a part that is here no more because its bytes were others; else empty.
    """

    run_id: str
    checkpoint: control_pb2.Checkpoint
    parts: tuple[int, ...]
    copies: tuple[str, ...] = ()
    unsent: bool = False
    damaged: str = ""


class StepPlace:
    """Paths of one step in a run's memory directory.

    Raises:
        ValueError: `name` is not a sharded checkpoint's.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        self.name = CheckpointName.parse(name)
        if self.name.lease is not None:
            raise ValueError(f"{name} is a later form: in memory are sharded checkpoints only")
        self.files = run_dir / name
        self.parts = parts_directory(self.files)

    def part(self, group_rank: int) -> Path:
        return part_path(self.files, group_rank)

    def publish_manifest(self, data: bytes) -> None:
        """Puts the manifest in place, unless the same one is there. What is no manifest is replaced.

        Raises:
            CheckpointDamaged: another one is there.
            OSError: It cannot be written.
        """
        aside = self.parts / f".manifest-{secrets.token_hex(8)}"
        write_exclusive(aside, data, lasting=False)
        try:
            publish(aside, self.files / MANIFEST)
        except FileExistsError:
            if self._is_another(data):
                raise CheckpointDamaged(self.files, MANIFEST, Damage.DIGEST, "another one is there") from None
            os.replace(aside, self.files / MANIFEST)
        finally:
            aside.unlink(missing_ok=True)

    def _is_another(self, data: bytes) -> bool:
        """Whether a manifest is there that is whole, and not this one."""
        try:
            there = read_regular(self.files / MANIFEST, MAX_BYTES)
            return there != data and bool(Manifest.from_bytes(there))
        except (NotRegular, ValueError):
            return False

    def write_part(self, group_rank: int, paths: Iterable[str]) -> None:
        """Says that a part is here, whole. It comes last."""
        write_part(self.files, group_rank, paths)

    def read_part(self, group_rank: int, manifest: Manifest) -> tuple[str, ...]:
        """Paths of a part's files.

        Raises:
            ValueError: it is not what it should be, or names what the manifest does not.
            OSError: it cannot be read, FileNotFoundError where it is not here.
        """
        return checked_paths(read_part(self.files, group_rank), manifest)


def checked_paths(paths: Iterable[str], manifest: Manifest) -> tuple[str, ...]:
    """The same.

    Raises:
        ValueError: one that the manifest does not list, or one twice.
    """
    wanted = tuple(paths)
    unknown = set(wanted) - {entry.path for entry in manifest.files}
    if unknown:
        raise ValueError(f"{min(unknown)!r} is not in the manifest of {manifest.name}")
    if len(set(wanted)) != len(wanted):
        raise ValueError(f"a file of {manifest.name} is named twice")
    return wanted


@dataclass(frozen=True)
class StepPart:
    """One node's part of a step that is here: everything that is needed to send it."""

    run_id: str
    manifest: Manifest
    group_rank: int
    entries: tuple[FileEntry, ...]
    place: StepPlace

    @property
    def key(self) -> tuple[str, str, int]:
        return self.run_id, self.manifest.name, self.group_rank

    @property
    def identity(self) -> Key:
        """With the digest of its manifest."""
        return (*self.key, self.manifest.digest)

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(entry.size for entry in self.entries)

    def __str__(self) -> str:
        return f"part {self.group_rank} of {self.manifest.name}"


class _Step:
    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        # Made once: a manifest may name ten thousand files.
        self.checkpoint = manifest.to_proto()
        self.checkpoint.in_memory = True
        self.entries = {entry.path: entry for entry in manifest.files}
        self.parts: dict[int, tuple[str, ...]] = {}

    def bytes(self) -> int:
        return sum(self.entries[path].size for paths in self.parts.values() for path in paths)


class Holdings:
    """Thread-safe. Files are read and written outside of its lock."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._lock = threading.Lock()
        self._steps: dict[tuple[str, str], _Step] = {}
        # Steps that something is at work on: they are not deleted.
        self._busy: dict[tuple[str, str], int] = {}
        # Runs that have spares, and the epoch that wrote them.
        self._spares: dict[str, int] = {}
        # What is on its way here.
        self.arrivals = Arrivals()

    def place(self, run_id: str, name: str) -> StepPlace:
        """Raises ValueError: `name` is not a sharded checkpoint's."""
        return StepPlace(self._root / run_id, name)

    @contextlib.contextmanager
    def at_work(self, run_id: str, name: str) -> Iterator[None]:
        """The step is not deleted meanwhile."""
        key = run_id, name
        with self._lock:
            self._busy[key] = self._busy.get(key, 0) + 1
        try:
            yield
        finally:
            with self._lock:
                self._busy[key] -= 1
                if not self._busy[key]:
                    del self._busy[key]

    # ---- what is here ----

    def manifest(self, run_id: str, name: str) -> Manifest | None:
        """The manifest of a step of which something is here; None: nothing is."""
        with self._lock:
            step = self._steps.get((run_id, name))
            return None if step is None else step.manifest

    def has(self, run_id: str, name: str, digest: str, group_rank: int) -> bool:
        """Whether that part is here, whole."""
        return self.part(run_id, name, digest, group_rank) is not None

    def part(self, run_id: str, name: str, digest: str, group_rank: int) -> StepPart | None:
        """To be sent."""
        with self._lock:
            step = self._steps.get((run_id, name))
            if step is None or step.manifest.digest != digest or group_rank not in step.parts:
                return None
            entries = tuple(step.entries[path] for path in step.parts[group_rank])
        return StepPart(run_id, step.manifest, group_rank, entries, self.place(run_id, name))

    def missing(self, run_id: str, name: str) -> list[str]:
        """Files of a step, of which something is here, that are in no part which is."""
        with self._lock:
            step = self._steps.get((run_id, name))
            if step is None:
                return []
            return sorted(set(step.entries) - {path for paths in step.parts.values() for path in paths})

    def parts_with(self, run_id: str, name: str, path: str) -> list[int]:
        """Which parts that are here a file is in."""
        with self._lock:
            step = self._steps.get((run_id, name))
            return [] if step is None else [rank for rank, paths in step.parts.items() if path in paths]

    def held(self, run_id: str, name: str) -> HeldParts | None:
        with self._lock:
            step = self._steps.get((run_id, name))
            return None if step is None or not step.parts else _held(run_id, step)

    def all(self) -> list[HeldParts]:
        """From old to new."""
        with self._lock:
            steps = [(run_id, step) for (run_id, _), step in self._steps.items() if step.parts]
            return [_held(run_id, step) for run_id, step in sorted(steps, key=_order)]

    def bytes(self) -> int:
        """The size of all parts that are here, and of what the next ones may be written over."""
        with self._lock:
            parts = sum(step.bytes() for step in self._steps.values())
        return parts + sum(spare_bytes(self._root / run_id) for run_id in list(self._spares))

    # ---- what comes ----

    def add_own(self, run_id: str, name: str, digest: str, group_rank: int) -> StepPart:
        """What the ranks of this node have written: their part and the manifest are complete.

        What a rank has saved alone are all parts, of which the other nodes' have no files.

        Raises:
            CheckpointDamaged: the manifest is not that one.
            ValueError, OSError: see `StepPlace.read_part`.
        """
        place = self.place(run_id, name)
        manifest = read_sealed(place.files, digest)
        self.add(run_id, manifest, group_rank, place.read_part(group_rank, manifest))
        for other, paths in read_parts(place.files).items():
            if not paths:
                self.add(run_id, manifest, other, paths)
        part = self.part(run_id, name, digest, group_rank)
        assert part is not None
        return part

    def add(self, run_id: str, manifest: Manifest, group_rank: int, paths: tuple[str, ...]) -> HeldParts:
        """A part is here, whole, and in its place.

        Raises:
            ValueError: of a step of this name there is another manifest here.
        """
        new = _Step(manifest)
        with self._lock:
            step = self._steps.setdefault((run_id, manifest.name), new)
            if step.manifest.digest != manifest.digest:
                raise ValueError(f"another {manifest.name} is here already")
            step.parts[group_rank] = paths
            return _held(run_id, step)

    def mend_note(self, part: StepPart) -> None:
        """Has ranks find a part that is here, though the note on it is damaged or gone.

        Raises:
            OSError: It cannot be noted.
        """
        paths = sorted(entry.path for entry in part.entries)
        try:
            if sorted(part.place.read_part(part.group_rank, part.manifest)) == paths:
                return
        except (OSError, ValueError):
            pass  # It is written anew.
        part.place.write_part(part.group_rank, paths)

    # ---- what goes ----

    def drop_part(self, part: StepPart) -> HeldParts:
        """A part proved bad: nobody gets it any more. What is left of the step."""
        with contextlib.suppress(FileNotFoundError):
            part.place.part(part.group_rank).unlink()
        with self._lock:
            step = self._steps.get((part.run_id, part.manifest.name)) or _Step(part.manifest)
            step.parts.pop(part.group_rank, None)
            return _held(part.run_id, step)

    def keep(self, run_id: str, epoch: int, digests: frozenset[str], newest: int) -> list[HeldParts]:
        """Deletes steps up to `epoch` that are neither in `digests` nor among its `newest` of which a part is here.

        What something is at work on stays as well, and what may still be written: of `epoch`, not older than those.
        Returns what was deleted, with no parts, as far as it was held. The next step may be written over its files.

        Raises:
            OSError: the run's directory cannot be read.
        """
        here = self._directories(run_id)
        with self._lock:
            known = {name: step for (run, name), step in self._steps.items() if run == run_id and step.parts}
            ages = {name: CheckpointName.parse(name).age for name in here | set(known)}
            of_epoch = sorted((name for name in known if ages[name][0] == epoch), key=ages.__getitem__)
            stay = set(of_epoch[-newest:] if newest else ())
            oldest = min((ages[name] for name in stay), default=(epoch, 0, 0))
            stay |= {name for name, step in known.items() if step.manifest.digest in digests or ages[name][0] > epoch}
            stay |= {name for name in here - set(known) if ages[name] >= oldest}
            stay |= {name for run, name in self._busy if run == run_id}
            gone = {name: self._steps.pop((run_id, name), None) for name in sorted(set(ages) - stay)}
            aside = {name: list(self._put_aside(run_id, name)) for name in gone}
        # A world that saves to memory again and again goes on over the files of the step that it began with. One that
        # only drains there saves once: nothing is held back for that.
        replaced = {name: known[name] for name in gone if name in known} if of_epoch else {}
        self._keep_spares(run_id, epoch, replaced, aside)
        for path in itertools.chain(*aside.values()):
            shutil.rmtree(path, ignore_errors=True)
        return [HeldParts(run_id, _held(run_id, step).checkpoint, ()) for step in gone.values() if step is not None]

    def _keep_spares(self, run_id: str, epoch: int, gone: Mapping[str, _Step], aside: Mapping[str, list[Path]]) -> None:
        """Keeps the files of the last step that newer ones have replaced."""
        if self._spares.get(run_id, epoch) != epoch:
            # Another world may write other files, and perhaps none in memory.
            self.clear_spares()
        if gone:
            last = max(gone, key=lambda name: CheckpointName.parse(name).age)
            self._spares[run_id] = epoch
            for directory in aside[last][-1:]:
                paths = itertools.chain(*gone[last].parts.values())
                keep_spares(self._root / run_id, directory, paths)

    def clear_spares(self) -> None:
        """Deletes what is kept to be written over."""
        for run_id in list(self._spares):
            clear_spares(self._root / run_id)
            self._spares.pop(run_id, None)

    def _put_aside(self, run_id: str, name: str) -> Iterator[Path]:
        """Takes a step's names away: what is deleted takes long, and another part of it may come meanwhile."""
        place = self.place(run_id, name)
        # First what says that it is here.
        for path in (place.parts, place.files):
            aside = path.parent / f".gone-{secrets.token_hex(8)}"
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, aside)
                yield aside

    def _directories(self, run_id: str) -> set[str]:
        """Names of the steps of which anything lies in a run's directory."""
        try:
            names = os.listdir(self._root / run_id)
        except FileNotFoundError:
            return set()
        return {name for entry in names if is_checkpoint_name(name := entry.removesuffix(PARTS_SUFFIX))}


def manifest_of(data: bytes, digest: str) -> Manifest:
    """The manifest that these bytes are.

    Raises:
        ValueError: they are none, or another one.
    """
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError("the manifest is not the one that was named")
    return Manifest.from_bytes(data)


def _held(run_id: str, step: _Step) -> HeldParts:
    checkpoint = control_pb2.Checkpoint()
    checkpoint.CopyFrom(step.checkpoint)
    return HeldParts(run_id, checkpoint, tuple(sorted(step.parts)))


def _order(entry: tuple[str, _Step]) -> tuple[str, tuple[int, int, int]]:
    return entry[0], entry[1].manifest.parsed_name.age
