"""Where a checkpoint is saved, and how durably: on the disk that all nodes see, or in the memory of each node.

On the disk one directory holds the files of all ranks, rank 0 makes, seals and removes it, and everything is synced. In
memory (`Memory`) each node has a directory of its own with what its own ranks have written, the first of them does for
the node what rank 0 does for the disk, and nothing is synced: it is gone with the machine anyway.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from dalsegno.protos import trace
from dalsegno.protos.room import available_bytes, lacks_memory
from dalsegno.protos.text import megabytes

from ..checkpoint import CheckpointStore, FileEntry, Manifest, Ref, seal
from ..checkpoint.files import list_files, write_exclusive
from ..checkpoint.layout import MANIFEST
from ..checkpoint.mounts import is_away, mount_point
from ..checkpoint.parts import delete_parts, write_part
from ..checkpoint.reading import size_below
from ..checkpoint.spares import clear_spares, spare_bytes
from ..rank.identity import Identity
from ..rank.remarks import remark
from .saving_reports import bytes_below
from .writing import AHEAD_BYTES

# What a memory checkpoint takes besides its files: their names, the manifest.
SPARE_BYTES = 1 << 20
# So many bytes more than what is written over need no memory to be asked for.
FEW_BYTES = 8 << 20


class Disk:
    """The run's directory, which all nodes see.

    Args:
        store: Of the run.
        identity: Who saves.
        resumed_from: The checkpoint that it began with.

    Attributes:
        in_memory: It is not this, but `Memory`.
        leads: This rank seals and removes.
    """

    in_memory = False

    def __init__(self, store: CheckpointStore, identity: Identity, resumed_from: Ref | None = None) -> None:
        self.store, self.identity = store, identity
        # A newer one than the resume point may be damaged, and be deleted before anything is saved.
        self._known = [ref for ref in (store.begun_with(), resumed_from) if ref is not None]
        self.leads = identity.rank == 0
        self._mount = mount_point(store.run_dir) if self.leads else None

    def look(self) -> None:
        """On each rank, before a checkpoint is begun, so that all can be told before one of them is in a collective.

        Raises:
            OSError: There is no room for it.
        """

    def prepare(self) -> None:
        """On rank 0, before a checkpoint has its name: the directory for all of them is there, and ours.

        Raises:
            OSError: It cannot be made, or its volume is away: nothing is written where that was mounted. Or without a
                master it is another one than this run has locked.
        """
        place = self.store.run_dir
        if not place.exists() and is_away(self._mount, place):
            raise OSError(errno.ESTALE, "the volume that the run began on is not mounted here any more", str(place))
        self.store.hold(self._known)
        place.mkdir(parents=True, exist_ok=True)

    def create(self, name: str) -> None:
        """On rank 0, before any other rank knows the name: makes the checkpoint's directory.

        Raises:
            OSError: It cannot be made.
        """
        self.store.path(name).mkdir()

    def enter(self, name: str, *, create: bool) -> None:
        """On each rank, before it writes there; ``create``: the directory exists afterwards.

        Raises:
            OSError: It cannot be made.
        """

    def check_room(self) -> None:
        """On each rank, while new files grow.

        Raises:
            OSError: It must not take more (ENOSPC).
        """

    def dealt(self, listed: Sequence[Sequence[str]]) -> list[str]:
        """Which files this rank sums, of those that each rank has listed (the first of each node has, in fact)."""
        paths = sorted({file for some in listed for file in some})
        return paths[self.identity.rank :: self.identity.world_size]

    def written_twice(self, listed: Sequence[Sequence[str]]) -> set[str]:
        """Files of one path that several nodes have written: no rank alone knows which one counts."""
        return set()

    def seal(self, manifest: Manifest, entries: Sequence[Sequence[FileEntry]]) -> None:
        """Seals the checkpoint. On those that lead.

        Args:
            manifest: Of the whole checkpoint.
            entries: What each rank has summed of it.

        Raises:
            OSError: The manifest could not be written.
            CheckpointDamaged: Other files are there.
        """
        self.store.check_held()
        seal(self.store.path(manifest.name), manifest)
        self._known = [manifest.ref]

    def remove(self, name: str) -> Iterable[OSError]:
        """Deletes what a save has left that failed. On those that lead. What the file system would not do is said."""
        return self.store.prune([name]).values()


class Memory(Disk):
    """This node's memory: a directory of its own for each checkpoint, see `checkpoint.parts`.

    Args:
        store: In memory.
        identity: Who saves.
        alone: No other rank of the node has a part in it: this one leads, whichever it is.
    """

    in_memory = True

    def __init__(self, store: CheckpointStore, identity: Identity, *, alone: bool = False) -> None:
        super().__init__(store, identity)
        self.leads = alone or identity.local_rank == 0
        # What the last one took on this node.
        self._bytes = 0

    def look(self) -> None:
        self._check_there()
        if self.leads:
            self._check_all()

    def prepare(self) -> None:
        """The agent has made it, for nobody else to read: if it is gone, so is what others know of it, see `look`."""

    def create(self, name: str) -> None:
        """Each node has one of its own, see `enter`."""

    def enter(self, name: str, *, create: bool) -> None:
        self._check_there()
        if create:
            self.store.path(name).mkdir(exist_ok=True)

    def check_takes(self, count: int, beside: int = 0) -> None:
        """Before a first checkpoint of which it is known that it takes so many bytes, or was tried and had so many.

        Args:
            beside: Bytes of the memory that making it takes meanwhile.

        Raises:
            OSError: There is no room for these (ENOSPC).
        """
        self._bytes = count
        try:
            self._check_all(self._ahead, beside)
        finally:
            self._bytes = 0

    def check_room(self) -> None:
        # Of the first checkpoint of a process nobody knows how much it takes, until it is written.
        problem = lacks_memory(self._ahead, available_bytes())
        if not problem and self.leads and not self._bytes:
            problem = self._without_spares(self._exceeds_budget)
        if problem:
            raise OSError(errno.ENOSPC, problem, str(self.store.run_dir))

    @property
    def _ahead(self) -> int:
        """Bytes that may be written until somebody looks again. All ranks of the node may be at it."""
        return AHEAD_BYTES * self.identity.local_world_size

    def _check_there(self) -> None:
        if not self.store.run_dir.is_dir():
            line = "the directory of this node in memory is gone (was it deleted?): the next world makes it again"
            raise OSError(errno.ENOENT, line, str(self.store.run_dir))

    def _check_all(self, ahead: int = 0, beside: int = 0) -> None:
        """``ahead``: so much of the memory has to be left where a write looks for it, see `check_room`."""
        if problem := self._without_spares(self._lacks_room) or self._lacks_memory(ahead, beside):
            raise OSError(errno.ENOSPC, problem, str(self.store.run_dir))

    def _without_spares(self, lacks: Callable[[], str]) -> str:
        """What is lacking also when the spares are gone, which go only if need be; empty: nothing."""
        if not lacks():
            return ""
        clear_spares(self.store.run_dir)
        return lacks()

    def _lacks_room(self) -> str:
        """Why another checkpoint as large as the last one has no room; empty: it has."""
        free, wanted = self._free(), self._bytes + SPARE_BYTES
        if free < wanted:
            return f"{free >> 20} MiB are free in memory, and a checkpoint takes {wanted >> 20} MiB on this node"
        return self._exceeds_budget()

    def _exceeds_budget(self) -> str:
        """The same of --memory-budget alone. Of the first one only what is written already counts."""
        budget = self.identity.memory_budget
        # All that the agents of this node hold, of whatever run.
        if budget is None or (used := size_below(self.store.run_dir.parent)) + self._bytes <= budget:
            return ""
        takes = f"a checkpoint takes {megabytes(self._bytes)} on this node" if self._bytes else "this one takes more"
        return (
            f"{megabytes(used)} of the {megabytes(budget)} of --memory-budget are in use, and {takes}: a node holds"
            " two, and two of each node whose part it has"
        )

    def _lacks_memory(self, ahead: int, beside: int) -> str:
        # What it writes over has its memory: to give that back would win nothing.
        more = max(0, self._bytes - spare_bytes(self.store.run_dir)) + beside
        if more <= FEW_BYTES or not (problem := lacks_memory(more + ahead, available_bytes())):
            return ""
        return f"a checkpoint takes {megabytes(more)} more on this node, and {problem}"

    def _free(self) -> int:
        there = os.statvfs(self.store.run_dir)
        return there.f_bavail * there.f_frsize

    def dealt(self, listed: Sequence[Sequence[str]]) -> list[str]:
        """A file that ranks of several nodes have written counts as the first one's, as on the disk the last one's."""
        first: dict[str, int] = {}
        for rank, files in enumerate(listed):
            for file in files:
                first.setdefault(file, rank)
        identity = self.identity
        own = sorted(file for file, rank in first.items() if rank == identity.rank - identity.local_rank)
        return own[identity.local_rank :: identity.local_world_size]

    def written_twice(self, listed: Sequence[Sequence[str]]) -> set[str]:
        counts = Counter(file for files in listed for file in files)
        return {file for file, count in counts.items() if count > 1}

    def seal(self, manifest: Manifest, entries: Sequence[Sequence[FileEntry]]) -> None:
        path, begin = self.store.path(manifest.name), self.identity.rank
        own = {entry.path: entry for some in entries[begin : begin + self.identity.local_world_size] for entry in some}
        # On the disk a rank that writes nothing makes no directory of its own either.
        path.mkdir(exist_ok=True)
        for file in list_files(path):
            if file not in own:
                # The same file of another node counts, and will be put here.
                (path / file).unlink()
        data = manifest.to_bytes()
        try:
            write_exclusive(path / MANIFEST, data, lasting=False)
        except FileExistsError:
            # A thread of this rank has sealed it here, and was given up because others had not.
            if (path / MANIFEST).read_bytes() != data:
                raise
        write_part(path, self.identity.group_rank, own)
        self._bytes = len(data) + sum(entry.size for entry in own.values())
        trace.mark("sealed")

    def remove(self, name: str) -> Iterable[OSError]:
        # The next one takes at least as much as this one had when it failed.
        self._bytes = max(self._bytes, bytes_below(self.store.path(name)))
        try:
            delete_parts(self.store.path(name))
        except OSError as error:
            return [error, *super().remove(name)]
        return super().remove(name)


class LastSaves:
    """The last checkpoints of a session, on the disk and in memory, and what was said of those that failed."""

    def __init__(self) -> None:
        # With the step, and whether it is to be on the disk in the end.
        self._last: dict[bool, tuple[int, Ref, bool]] = {}
        # What was said, on rank 0, since a save to memory succeeded: of those for the disk, and of the others.
        self._said: set[bool] = set()

    def note(self, step: int, ref: Ref, *, in_memory: bool, for_disk: bool = True) -> None:
        """It is sealed. ``for_disk``: it is there, or the agents bring it there."""
        self._last[in_memory] = step, ref, for_disk
        if in_memory and self._said:
            self._said.clear()
            remark("step %d was saved in memory again", step)

    @property
    def last(self) -> int | None:
        """The newest step that there is; None: there is none."""
        return max((step for step, _, _ in self._last.values()), default=None)

    def forget(self, step: int) -> Ref | None:
        """That step on the disk is to be saved anew. Returns what it was saved as."""
        ref = self.of(step)
        if ref is not None:
            del self._last[False]
        return ref

    def is_news(self, *, in_memory: bool, make_durable: bool) -> bool:
        """Whether a failure is to be said. Memory that others have filled may fail in every step."""
        known = in_memory and make_durable in self._said
        if in_memory:
            self._said.add(make_durable)
        return not known

    def of(self, step: int, *, in_memory: bool = False, for_disk: bool = False) -> Ref | None:
        """The checkpoint of this step, if it is the last one there; ``for_disk``: and if it is to come to the disk."""
        last = self._last.get(in_memory)
        if last is None or last[0] != step or (for_disk and not last[2]):
            return None
        return last[1]
