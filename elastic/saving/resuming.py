"""Where to resume: the checkpoint that the agent named or, without an agent, the newest sealed one that is sound."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

from dalsegno.protos.reads import Reads, ranks_read

from ..checkpoint import (
    MANIFEST,
    SHARDED,
    UNIVERSAL,
    CheckpointDamaged,
    CheckpointName,
    CheckpointStore,
    Damage,
    FileEntry,
    Inventory,
    Manifest,
    Position,
    Ref,
    inspect,
    lineage,
    read_sealed,
    verify_files,
    verify_listing,
)
from ..checkpoint.parts import read_parts
from ..checkpoint.reading import NotRegular
from ..rank import rng
from ..rank.collective import Collective
from ..rank.identity import Identity, ResumeOrder
from ..rank.meetings import may_be_a_peers
from .save_errors import describe
from .verification import JointVerification, NobodyTold, Note

log = logging.getLogger(__name__)

# In place of a part's number: files of no part that is here.
_ELSEWHERE = -1
LOADERS = "loader-states"
"""The states of the ranks' data loaders lie below this directory of a checkpoint (``sources``)."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that this epoch starts from.

    Attributes:
        step: Optimizer steps done.
        position: Where the data continue.
        form: ``"sharded"``: load ``path``; ``"universal"``: load ``universal``.
        saved_at: The directory that the writing world saved: its name, while its files may not be verified yet.
        universal_at: The directory of universal files, if ``form`` is ``"universal"``.
        manifest: The manifest of ``saved_at``.
        reshard: With the form ``"sharded"``: another number of ranks saved it, and each of the present ranks reads its
            own ranges of it.
        verification: Of the files, where that is under way beside the main threads.
        in_memory: It is a memory checkpoint.
        beside: Within `loading`: the verification that may still be under way.
    """

    step: int
    position: Position
    form: str
    saved_at: Path
    universal_at: Path | None
    manifest: Manifest
    reshard: bool = False
    verification: JointVerification | None = field(default=None, compare=False, repr=False)
    in_memory: bool = False
    beside: JointVerification | None = field(default=None, compare=False, repr=False)

    @property
    def ref(self) -> Ref:
        return self.manifest.ref

    @property
    def path(self) -> Path:
        """The directory that the writing world saved, once all ranks know that it is sound: see `wait`."""
        self.wait()
        return self.saved_at

    @property
    def universal(self) -> Path | None:
        """The directory of universal files, if ``form`` is ``"universal"``, once all ranks know that it is sound."""
        self.wait()
        return self.universal_at

    def lists(self, name: str) -> bool:
        """Whether the checkpoint has a file of this name."""
        return any(entry.path == name for entry in self.manifest.files)

    def sees(self, name: str) -> bool:
        """The same, for who reads it next: a file that is not in sight may still have been saved.

        Raises:
            OSError: The checkpoint has it, and this rank does not see it. Another start may.
        """
        listed = self.lists(name)
        if listed and not (self.path / name).is_file():
            raise OSError(f"{self.path / name} is not here, although the checkpoint's manifest lists it")
        return listed

    def wait(self) -> None:
        """Waits until all ranks have verified the files.

        Raises:
            BadResumePoint: They are damaged; the agent was told. Exit code 84.
            OSError: A rank could not read them.
        """
        if self.verification is not None:
            self.verification.wait()

    @contextmanager
    def loading(self) -> Iterator[ResumePoint]:
        """For loaders that read files and do nothing else: this resume point, whose files are there at once.

        A memory checkpoint is read beside its verification, which is waited for at the end. A loader's error then says
        nothing, if the files turn out to be damaged. Files on a disk, and those that were cut, are verified first: what
        cannot be read of a file ends a process that has mapped it, before anybody is told.

        Raises:
            BadResumePoint, OSError: See `wait`.
        """
        if not (self.in_memory and self.universal_at is None and self._is_there_whole()):
            self.wait()
        files = replace(self, verification=None, beside=self.verification or self.beside)
        with files.unless_damaged():
            yield files
        self.wait()

    @contextmanager
    def unless_damaged(self) -> Iterator[None]:
        """Within `loading`, for a part of it whose errors others hear before that waits.

        Raises:
            BadResumePoint, OSError: See `wait`. In place of an error of this block, which then says nothing.
        """
        try:
            yield
        except Exception as error:
            try:
                if self.beside is not None:
                    self.beside.wait()
            except NobodyTold:
                # Who lost the store may have lost a peer. Anything else may be damage that nobody was told of.
                if not may_be_a_peers(error):
                    raise
            raise

    def _is_there_whole(self) -> bool:
        """Whether its files, as far as they are here, are as long as they should be."""
        files = [(self.saved_at / entry.path, entry.size) for entry in self.manifest.files]
        try:
            return all(path.stat().st_size == size for path, size in files if path.exists())
        except OSError:
            return False

    def end(self) -> None:
        """Nobody will ask for the files any more."""
        if self.verification is not None:
            self.verification.end()


def check_strategy(resume: ResumePoint | None, strategy: str) -> None:
    """Checks that a run continues with the strategy that wrote its files, or re-shards with another DeepSpeed stage.

    Raises:
        ValueError: They were written with another one.
    """
    if resume is None:
        return
    saved = resume.manifest.shape.strategy
    by_values = resume.form == UNIVERSAL or resume.reshard
    family = by_values and saved.startswith("deepspeed") and strategy.startswith("deepspeed")
    if saved != strategy and not family:
        why = f"with strategy {saved}, and this run has {strategy}: go on with {saved}, or start a new run"
        if resume.manifest.saved_as is not None:
            why = "without a session and hf.elastic: go on without them, or begin anew with its weights (--new-run)"
        raise ValueError(f"{resume.ref.name} was written {why}")


def check_loaders(manifest: Manifest, world_size: int) -> None:
    """Checks that as many ranks resume as saved, because the state of a data loader is one rank's own.

    Raises:
        RuntimeError: The checkpoint has such states, and the number of ranks is another one.
    """
    saved = manifest.shape.world_size
    if saved != world_size and any(entry.path.startswith(f"{LOADERS}/") for entry in manifest.files):
        raise RuntimeError(
            f"{manifest.name} has the state of the data loader of each of {saved} ranks, and there are {world_size}: "
            f"start {saved}. A run with Batches in place of that loader goes on with any number"
        )


@dataclass(frozen=True)
class Damaged:
    """What made a resume point unusable, alike on all ranks. ``found_here``: this rank found it."""

    ref: Ref
    form: str
    file: str
    message: str
    found_here: bool


Work: TypeAlias = Callable[[Callable[[int], None]], Note]
"""Verifies one rank's share, see `JointVerification`."""
Judge: TypeAlias = Callable[[Sequence[Note]], Damaged | None]
"""What the notes of all ranks say of the resume point. It raises OSError where one of them could not read it."""


def handed_out(
    order: ResumeOrder,
    run_dir: Path,
    collective: Collective,
    *,
    verify: bool = True,
    identity: Identity | None = None,
    unread: Collection[str] = (),
    beside: Callable[[Work, Judge], JointVerification] | None = None,
) -> ResumePoint | Damaged:
    """The resume point that the agent named, verified by all ranks together. Collective.

    Args:
        order: What it is, and where.
        run_dir: Where it is if ``order`` does not say.
        collective: The session's group.
        verify: Read its files, and compare their checksums. Rank 0's counts.
        identity: Who reads. Of a checkpoint in memory each node has a copy of its own, and verifies all of that: all
            parts, or those that it needs, see ``Shape``.
        unread: Files that this rank will not read. What nobody reads of those that share a directory is not verified.
        beside: Has the files verified beside the main thread. Only the manifests are read before this returns.

    Raises:
        OSError: It could not be read, for a reason that says nothing about the checkpoint. Raised on all ranks.
    """
    saved = order.directory or run_dir / order.source.name
    directory, form, digest = saved, SHARDED, order.source.digest
    if order.universal is not None:
        directory = order.universal_directory or run_dir / order.universal.name
        form, digest = UNIVERSAL, order.universal.digest
    source: Manifest | None = None
    manifest: Manifest | None = None
    error: Exception | None = None
    work: Work | None = None
    verify, left_out = _agreed(verify, unread if form == SHARDED else (), directory, collective, identity)
    try:
        source = read_sealed(saved, order.source.digest)
        manifest = source if order.universal is None else read_sealed(directory, digest)
        if verify:
            here: Mapping[int, Collection[str]] = {0: [entry.path for entry in manifest.files]}
            if identity is not None and identity.in_memory(directory) and manifest.shape.by_place:
                here = _read_here(directory, manifest, identity)
            share = _share_of(directory, collective, identity)
            verify_share = partial(_verify_part, directory, manifest, here, left_out, *share)
            work = partial(_noted, verify_share)
            if beside is None:
                verify_share()
    # Others wait for this rank's note, whatever it met.
    except Exception as caught:
        error = caught
    judge = partial(_judged, collective.rank, directory, order)
    if (damaged := judge(collective.gather(_note(error)))) is not None:
        return damaged
    assert source is not None
    universal = None if order.universal is None else directory
    shape = source.shape
    reshard = universal is None and shape.reshards and shape.world_size != collective.world_size
    verification = None if beside is None or work is None else beside(work, judge)
    in_memory = identity is not None and identity.in_memory(directory)
    return ResumePoint(source.step, source.position, form, saved, universal, source, reshard, verification, in_memory)


def newest(
    store: CheckpointStore, collective: Collective, world_size: int, *, verify: bool = True
) -> ResumePoint | None:
    """Without a master: the newest sealed checkpoint that verifies. Names damaged ones and skips them. Collective.

    Args:
        verify: Read the files, and compare their checksums; else only their sizes. Rank 0's counts.

    Raises:
        RuntimeError: There are checkpoints, but none is sound, the newest does not fit the world, or several runs wrote
            them. Raised on all ranks.
        OSError: The directory cannot be read. Raised on all ranks.
    """
    answer: dict[str, Any] = {}
    if collective.rank == 0:
        try:
            # Sizes are left to the verification, so that a truncated file is named and not merely skipped.
            seen = inspect(store.run_dir, check_sizes=not verify)
            answer["verify"] = verify
            found = list(seen.sealed)
            answer["damaged"] = [[one.name, one.reason] for one in seen.unsealed if one.damaged]
            _refuse_unreadable(seen)
            answer["runs"] = sorted({f"{m.job_id}/{m.run_id}" for m in found})
            # A branch that the run once left by going back comes last, however far it had gone.
            chain = [m.name for m in lineage(found)]
            found.sort(key=lambda m: chain.index(m.name) if m.name in chain else -1)
            answer["found"] = [[m.name, m.digest] for m in reversed(found)]
        # The others wait for this rank's answer, whatever it met.
        except Exception as error:
            answer["error"] = _told(error)
    answer = collective.broadcast(answer)
    if "error" in answer:
        raise OSError(answer["error"])
    if len(answer["runs"]) > 1:
        raise RuntimeError(
            f"{store.run_dir} holds checkpoints of several runs ({', '.join(answer['runs'])}), and each run needs a"
            " directory of its own: move the others away, or give another directory"
        )
    for name, reason in answer["damaged"]:
        if collective.rank == 0:
            log.warning("checkpoint %s is damaged, it does not count: %s", name, reason)
    refs = [Ref(name, digest) for name, digest in answer["found"]]
    sharded = [ref for ref in refs if not _is_later(ref)]
    for ref in sharded:
        point = handed_out(ResumeOrder(ref, SHARDED, None), store.run_dir, collective, verify=answer["verify"])
        if isinstance(point, Damaged):
            if collective.rank == 0:
                log.warning("checkpoint %s is damaged, trying the one before: %s", ref.name, point.message)
            continue
        shape = point.manifest.shape
        if shape.any_world_size or shape.world_size == world_size:
            return point
        check_loaders(point.manifest, world_size)
        # Universal files that somebody has made come first, perhaps because re-sharding does not work here.
        other = _universal_of(point, refs, store, collective, answer["verify"])
        if other is None and not shape.reshards:
            convert = ", convert it first, or let dlrover-run do that" if shape.strategy.startswith("deepspeed") else ""
            raise RuntimeError(
                f"{ref.name} was written by {shape.world_size} ranks and loads at no other number; start as many (there"
                f" are {world_size}){convert}"
            )
        return other or point
    damaged = len(sharded) + sum(CheckpointName.parse(name).lease is None for name, _ in answer["damaged"])
    if damaged:
        raise RuntimeError(f"all {damaged} checkpoints in {store.run_dir} are damaged; give another directory")
    return None


def _refuse_unreadable(seen: Inventory) -> None:
    """Refuses to go back behind a checkpoint that may be sound but cannot be read. An older one does not matter."""
    newest_age = max((manifest.parsed_name.age for manifest in seen.sealed), default=(-1, -1, -1))
    for one in seen.unsealed:
        if one.unreadable and CheckpointName.parse(one.name).age > newest_age:
            raise OSError(f"{one.name} cannot be read: {one.reason}; let it be read, or move it away")


def _universal_of(
    point: ResumePoint, refs: list[Ref], store: CheckpointStore, collective: Collective, verify: bool
) -> ResumePoint | None:
    for ref in refs:
        if ref.name.startswith(f"{point.ref.name}.{UNIVERSAL}."):
            other = handed_out(ResumeOrder(point.ref, UNIVERSAL, ref), store.run_dir, collective, verify=verify)
            if isinstance(other, ResumePoint):
                return other
    return None


def _is_later(ref: Ref) -> bool:
    return CheckpointName.parse(ref.name).lease is not None


def _share_of(directory: Path, collective: Collective, identity: Identity | None) -> tuple[int, int]:
    """This rank's number among those that verify the same directory together, and how many they are."""
    if identity is not None and identity.in_memory(directory):
        return identity.local_rank, identity.local_world_size
    return collective.rank, collective.world_size


def _agreed(
    verify: bool, unread: Collection[str], directory: Path, collective: Collective, identity: Identity | None
) -> tuple[bool, set[str]]:
    """Whether files are verified, and what no rank that verifies them with this one will read. Collective."""
    alone = identity is not None and identity.in_memory(directory)
    mine = identity.group_rank if identity is not None and alone else -1
    answers = collective.gather([mine, sorted(unread), verify])
    return answers[0][2], set.intersection(*(set(names) for node, names, _ in answers if node == mine))


def _read_here(directory: Path, manifest: Manifest, identity: Identity) -> Mapping[int, Collection[str]]:
    """By part, which files of a checkpoint in memory are read by this node's ranks: all, unless some parts are enough.

    In a world of another size these are whatever is here: a script that loads something else than it said reads nothing
    that was not verified. Files that are in no part that is here are one more.

    Raises:
        CheckpointDamaged: One of the parts that they need is not here, or the note on it is none.
    """
    try:
        parts = read_parts(directory)
    except (NotRegular, ValueError) as error:
        raise CheckpointDamaged(directory, MANIFEST, Damage.MANIFEST, str(error)) from error
    there, shape = set(chain.from_iterable(parts.values())), manifest.shape
    elsewhere = tuple(entry.path for entry in manifest.files if entry.path not in there)
    another_size = shape.world_size != identity.world_size
    if not elsewhere or (another_size and shape.reads is None):
        return {**parts, _ELSEWHERE: elsewhere}
    needed = {0, identity.group_rank}
    if shape.reads is not None:
        needed = {0, *_parts_of(_ranks_read(shape.reads, shape.world_size, identity), parts, directory)}
    for part in sorted(needed - parts.keys()):
        raise CheckpointDamaged(directory, MANIFEST, Damage.MISSING_FILE, f"the part of node {part} is not here")
    return parts if another_size else {part: parts[part] for part in needed}


def _ranks_read(reads: Reads, saved: int, identity: Identity) -> frozenset[int]:
    first = identity.rank - identity.local_rank
    return ranks_read(reads, saved, identity.world_size, first, first + identity.local_world_size)


def _parts_of(ranks: Collection[int], parts: Mapping[int, Collection[str]], directory: Path) -> set[int]:
    """In which parts lies what these ranks saved: each has saved its generators at least.

    Raises:
        CheckpointDamaged: That of one of them is not here.
    """
    found = {path: part for part, paths in parts.items() for path in paths}
    for rank in sorted(ranks):
        if rng.file_name(rank) not in found:
            reason = f"the part with the files of rank {rank} is not here"
            raise CheckpointDamaged(directory, MANIFEST, Damage.MISSING_FILE, reason)
    return {found[rng.file_name(rank)] for rank in ranks}


def _verify_part(
    directory: Path,
    manifest: Manifest,
    here: Mapping[int, Collection[str]],
    left_out: set[str],
    number: int,
    ranks: int,
    moved: Callable[[int], None] = lambda count: None,
) -> None:
    entries = {entry.path: entry for entry in manifest.files if entry.path not in left_out}
    if number == 0:
        looked_at = set(chain.from_iterable(here.values()))
        whole = all(entry.path in looked_at for entry in manifest.files)
        verify_listing(directory, manifest, None if whole else looked_at)
    own: list[FileEntry] = []
    # Each part by itself, as another one may arrive between one rank's look and the next one's.
    for part, paths in here.items():
        known = [entries[path] for path in paths if path in entries]
        # Large files first, so that dealing them out in turn gives every rank about as many bytes.
        known.sort(key=lambda entry: (-entry.size, entry.path))
        own += known[(number - part) % ranks :: ranks]
    verify_files(directory, own, moved=moved)


def _noted(verify: Callable[..., None], moved: Callable[[int], None]) -> Note:
    """This rank's note, behind its part."""
    try:
        verify(moved=moved)
    except (CheckpointDamaged, OSError) as error:
        return _note(error)
    return {}


def _judged(own: int, directory: Path, order: ResumeOrder, notes: Sequence[Note]) -> Damaged | None:
    """What the notes of all ranks say, also where one could not even begin. ``own``: the number of this rank."""
    for rank, note in enumerate(notes):
        if "damage" in note:
            # The damage is in the form that would be loaded, or in its source, of which only the manifest was read.
            of_form = order.universal if order.universal and order.universal.name == note["name"] else None
            ref, form = (order.source, SHARDED) if of_form is None else (of_form, UNIVERSAL)
            return Damaged(ref, form, note["file"], f"{note['damage']} (rank {rank})", rank == own)
    for rank, note in enumerate(notes):
        if "os" in note:
            raise OSError(f"rank {rank} cannot read {directory}: {note['os']}")
    return None


def _note(error: Exception | None) -> Note:
    if error is None:
        return {}
    if isinstance(error, CheckpointDamaged):
        return {"damage": str(error), "file": error.file, "name": error.directory.name}
    return {"os": _told(error)}


def _told(error: Exception) -> str:
    """A line about what a rank met as it read. Of all but a file system's error its own log has more."""
    if isinstance(error, OSError):
        return str(error)
    log.error("what this rank resumes from cannot be read", exc_info=error)
    return describe(error)
