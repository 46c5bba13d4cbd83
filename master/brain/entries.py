"""The two things of which a job has many: its registered nodes and its committed checkpoints. See `state`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from dalsegno.protos.processes import Process

from .table import Table

__all__ = ("Checkpoint", "Checkpoints", "Joined", "Node", "Nodes")


@dataclass(frozen=True)
class Joined:
    """A node's answer to one round: the fresh store it offers and the checkpoints it has in sight (digests)."""

    round: int
    resume: str
    store_host: str
    store_port: int
    seen: frozenset[str] = frozenset()
    # Names of directories in sight whose manifest is not the recorded one.
    unusable: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Node:
    """A registered agent."""

    name: str
    incarnation: str
    host: str
    nproc: int
    # Registrations are numbered: newcomers keep the order of their arrival.
    order: int
    # SHA-256 of what only the agent and the master know, hex; empty where an older master let it in.
    secret: str = ""
    sees_directory: bool = True
    # Content of the probe file as this node reads it.
    probe: str = ""
    joined: Joined | None = None
    warm: bool = False
    leaving: bool = False
    # The resume point that this node alone could not read.
    unreadable: str = ""
    # Why its ranks cannot train with those that did before it came.
    refused: str = ""
    # What its agent tells its person about this registration.
    remark: str = ""
    # Its workers import what session() comes from: they may call it, however late.
    expects_session: bool = False
    # None where an older agent did not say it.
    process: Process | None = None
    # The last changing call and its answer, so that a repeat has no second effect.
    request: int = 0
    answer: tuple[str, str] = ("OK", "")


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: what its manifest says, its later form, and whether it may still be chosen."""

    name: str
    digest: str
    step: int
    epoch: int
    world_size: int
    strategy: str = ""
    any_world_size: bool = False
    # Ranks of another world can take their ranges of it. No longer once such a world failed before its first step.
    reshards: bool = False
    data_epoch: int = 0
    samples: int = 0
    resumed_from: str = ""
    bytes: int = 0
    # 0: not known.
    largest_file: int = 0
    metric: float | None = None
    # Name of the run's best checkpoint as of this one; empty where no metric is tracked.
    best: str = ""
    # How many checkpoints the script wants kept; None: as the job's settings have it.
    keep: int | None = None
    # Why it has no universal form; empty where it may have one.
    unconvertible: str = ""
    universal_name: str = ""
    universal_digest: str = ""
    # Digests of later forms that turned out to be damaged: never adopted again.
    dropped: tuple[str, ...] = ()
    retired: bool = False
    # Retired because it is damaged: its files stay until a newer checkpoint is committed.
    damaged: bool = False
    # Name of the node that committed it, until another node has it in sight, too.
    unseen: str = ""

    @property
    def age(self) -> tuple[int, int]:
        """Newer is greater."""
        return self.epoch, self.step


class Nodes(Table[Node]):
    """The registered agents by name, found by incarnation and machine, too; and those who are leaving."""

    __slots__ = ("_leaving", "_machines", "_names")

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        super().__init__({node.name: node for node in nodes})
        self._names = {node.incarnation: node.name for node in self.values()}
        self._leaving = {node.name: None for node in self.values() if node.leaving}
        # By machine, where that is known.
        self._machines: dict[str, tuple[str, ...]] = {}
        for node in self.values():
            self._settle_in(node)

    def copy(self) -> Nodes:
        other = Nodes()
        other._rows, other._names, other._leaving = dict(self._rows), dict(self._names), dict(self._leaving)
        other._machines = dict(self._machines)
        other.touched = set(self.touched)
        return other

    def by(self, incarnation: str) -> Node | None:
        name = self._names.get(incarnation)
        return None if name is None else self._rows[name]

    def on_machine(self, machine: str) -> list[Node]:
        """Those whose agents say that they run there; none where `machine` is empty."""
        return [self._rows[name] for name in self._machines.get(machine, ())]

    def _settle_in(self, node: Node) -> None:
        if node.process is not None and node.process.machine:
            self._machines[node.process.machine] = (*self._machines.get(node.process.machine, ()), node.name)

    def _move_out(self, node: Node) -> None:
        if node.process is not None and node.process.machine:
            left = tuple(name for name in self._machines[node.process.machine] if name != node.name)
            self._machines[node.process.machine] = left
            if not left:
                del self._machines[node.process.machine]

    @property
    def leavers(self) -> list[Node]:
        """Those who are leaving, in the order in which they said so."""
        return [self._rows[name] for name in self._leaving]

    def put(self, key: str, row: Node) -> None:
        before = self._rows.get(key)
        if row.leaving:
            self._leaving[key] = None
        else:
            self._leaving.pop(key, None)
        if before is not None and before.incarnation != row.incarnation:
            del self._names[before.incarnation]
        self._names[row.incarnation] = key
        if before is None or before.process is not row.process:
            if before is not None:
                self._move_out(before)
            self._settle_in(row)
        super().put(key, row)

    def drop(self, key: str) -> Node | None:
        row = super().drop(key)
        self._leaving.pop(key, None)
        if row is not None:
            del self._names[row.incarnation]
            self._move_out(row)
        return row


class Checkpoints:
    """The run's committed checkpoints, in order of their commits, by digest."""

    __slots__ = ("_head", "_of_epoch", "_retired", "table")

    def __init__(self, records: Iterable[Checkpoint] = ()) -> None:
        self.table: Table[Checkpoint] = Table({record.digest: record for record in records})
        self._book()

    def _book(self) -> None:
        self._head: Checkpoint | None = None
        self._of_epoch: dict[int, int] = {}
        self._retired: dict[str, None] = {}
        for record in self.table.values():
            self._note(record)

    def _note(self, record: Checkpoint) -> None:
        self._of_epoch[record.epoch] = max(record.step, self._of_epoch.get(record.epoch, -1))
        if record.retired:
            self._retired[record.digest] = None
        elif self._head is None or record.age >= self._head.age:
            self._head = record

    def copy(self) -> Checkpoints:
        other = Checkpoints()
        other.table = self.table.copy()
        other._head, other._of_epoch = self._head, dict(self._of_epoch)
        other._retired = dict(self._retired)
        return other

    @property
    def head(self) -> Checkpoint | None:
        """The newest that is not retired: highest epoch, then highest step."""
        return self._head

    @property
    def retired(self) -> list[Checkpoint]:
        return [self.table[digest] for digest in self._retired]

    @property
    def retired_count(self) -> int:
        return len(self._retired)

    @property
    def usable(self) -> list[Checkpoint]:
        """Those that are not retired."""
        return [record for record in self.table.values() if not record.retired]

    def newest(self, count: int) -> list[Checkpoint]:
        """What was committed last, the last one first."""
        return [self.table[key] for key in islice(reversed(self.table), count)]

    def last_step(self, epoch: int) -> int:
        """The highest step that this epoch committed; -1 where it committed nothing."""
        return self._of_epoch.get(epoch, -1)

    def get(self, digest: str) -> Checkpoint | None:
        return self.table.get(digest)

    def put(self, record: Checkpoint) -> None:
        """Adds a record, or replaces the one with its digest."""
        before = self.table.get(record.digest)
        self.table.put(record.digest, record)
        if before is not None and (before.retired != record.retired or before is self._head):
            self._book()
        else:
            self._note(record)

    def drop(self, digest: str) -> None:
        if self.table.drop(digest) is not None:
            self._book()

    def __iter__(self) -> Iterator[Checkpoint]:
        return iter(self.table.values())

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Checkpoint:
        return list(self.table.values())[index]

    def __eq__(self, other: object) -> bool:
        return list(self) == (list(other) if isinstance(other, Checkpoints | list) else other)

    __hash__ = None  # type: ignore[assignment]
