"""The two kinds of rows of a job: its registered nodes and its committed checkpoints. See `state`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from dalsegno.protos.processes import Process
from dalsegno.protos.reads import Reads

from .table import Table

__all__ = ("Checkpoint", "Checkpoints", "Joined", "Node", "Nodes")


@dataclass(frozen=True)
class Joined:
    """A node's answer to one round: the fresh store that it offers, and digests of the checkpoints that it sees."""

    round: int
    resume: str
    store_host: str
    store_port: int
    seen: frozenset[str] = frozenset()
    # Names of directories that it sees, but whose manifest is not the recorded one.
    unusable: frozenset[str] = frozenset()
    # Which parts of the resume point it has, where it was asked for some of them only.
    parts: frozenset[int] | None = None


@dataclass(frozen=True)
class Node:
    """A registered agent."""

    name: str
    incarnation: str
    host: str
    nproc: int
    # Registrations are numbered: newcomers keep the order of their arrival.
    order: int
    # SHA-256 of the secret that only the agent and the master know, hex; empty if an older master let it in.
    secret: str = ""
    sees_directory: bool = True
    # Content of the probe file as this node reads it.
    probe: str = ""
    joined: Joined | None = None
    warm: bool = False
    leaving: bool = False
    # Digest of a resume point that only this node could not read.
    unreadable: str = ""
    # Its ranks made a step of this run in a world that is over.
    trained: bool = False
    # Why its ranks cannot train with those that trained before it came.
    refused: str = ""
    # What its agent tells its user about this registration.
    remark: str = ""
    # Its workers import dalsegno.elastic: they may call session(), however late.
    expects_session: bool = False
    # Its workers use DLRover's trainer classes.
    dlrover: bool = False
    # It takes over what its script saves, see `taking`.
    adopts: bool = False
    # None if an older agent did not say.
    process: Process | None = None
    # HOST:PORT where other agents reach what it holds in memory; empty: it holds nothing for others.
    peer_address: str = ""
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
    # Ranks of another world can read their ranges of it. False once such a world failed before its first step.
    reshards: bool = False
    # Ranks load what stands in their node's place, see `places`.
    by_place: bool = False
    # What ranks of a world of another size load of it; None: perhaps all.
    reads: Reads | None = None
    data_epoch: int = 0
    samples: int = 0
    resumed_from: str = ""
    bytes: int = 0
    # Bytes of its largest file; 0: not known.
    largest_file: int = 0
    metric: float | None = None
    # Name of the run's best checkpoint as of this one; empty if no metric is tracked.
    best: str = ""
    # Name of a better one that was on its way to the disk as of this one; empty if there was none.
    candidate: str = ""
    # How many checkpoints the script wants kept; None: the job's setting.
    keep: int | None = None
    # Why it has no universal form; empty if it may have one.
    unconvertible: str = ""
    universal_name: str = ""
    universal_digest: str = ""
    # Digests of damaged later forms, which are never adopted again.
    dropped: tuple[str, ...] = ()
    retired: bool = False
    # Retired because of damage: its files stay until a newer checkpoint is committed.
    damaged: bool = False
    # Retired because the run went back behind it: its files stay.
    aside: bool = False
    # Name of the node that committed it, until another node sees it, too.
    unseen: str = ""
    # In how many parts it is in the memory of nodes, see `memory`; 0: it is in the checkpoint directory.
    parts: int = 0
    # How many ranks each part's node had, in order; (): not known, and parts of it are not enough for a node.
    layout: tuple[int, ...] = ()

    @property
    def age(self) -> tuple[int, int]:
        """Sort key: greater is newer."""
        return self.epoch, self.step


class Nodes(Table[Node]):
    """The registered agents by name; they can also be found by incarnation and machine. Knows which are leaving."""

    __slots__ = ("_leaving", "_machines", "_names")

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        super().__init__({node.name: node for node in nodes})
        self._names = {node.incarnation: node.name for node in self.values()}
        self._leaving = {node.name: None for node in self.values() if node.leaving}
        # Nodes by machine, as far as that is known.
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
        """The nodes whose agents say that they run on a machine; none if `machine` is empty."""
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
        """The nodes that are leaving, in the order in which they said so."""
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
    """The run's committed checkpoints by digest, in the order of their commits: what is newer comes last."""

    __slots__ = ("_head", "_in_memory", "_of_epoch", "_retired", "table")

    def __init__(self, records: Iterable[Checkpoint] = ()) -> None:
        self.table: Table[Checkpoint] = Table({record.digest: record for record in records})
        self._book()

    def _book(self) -> None:
        self._head: Checkpoint | None = None
        self._of_epoch: dict[int, int] = {}
        self._retired: dict[str, None] = {}
        self._in_memory: dict[str, None] = {}
        for record in self.table.values():
            self._note(record)

    def _note(self, record: Checkpoint) -> None:
        self._of_epoch[record.epoch] = max(record.step, self._of_epoch.get(record.epoch, -1))
        if record.retired:
            self._retired[record.digest] = None
            return
        if record.parts:
            self._in_memory[record.digest] = None
        if self._head is None or record.age >= self._head.age:
            self._head = record

    def copy(self) -> Checkpoints:
        other = Checkpoints()
        other.table = self.table.copy()
        other._head, other._of_epoch = self._head, dict(self._of_epoch)
        other._retired, other._in_memory = dict(self._retired), dict(self._in_memory)
        return other

    @property
    def head(self) -> Checkpoint | None:
        """The newest checkpoint that is not retired: highest epoch, then highest step."""
        return self._head

    @property
    def retired(self) -> list[Checkpoint]:
        return [self.table[digest] for digest in self._retired]

    @property
    def retired_count(self) -> int:
        return len(self._retired)

    @property
    def in_memory(self) -> list[Checkpoint]:
        """Those that are not in the checkpoint directory yet, and not retired."""
        return [self.table[digest] for digest in self._in_memory]

    @property
    def usable(self) -> list[Checkpoint]:
        """Checkpoints that are not retired."""
        return [record for record in self.table.values() if not record.retired]

    def newest(self, count: int) -> list[Checkpoint]:
        """The last `count` commits, the last one first."""
        return [self.table[key] for key in islice(reversed(self.table), count)]

    def last_step(self, epoch: int) -> int:
        """The highest step that this epoch committed; -1 if it committed nothing."""
        return self._of_epoch.get(epoch, -1)

    def get(self, digest: str) -> Checkpoint | None:
        return self.table.get(digest)

    def put(self, record: Checkpoint) -> None:
        """Adds a record, or replaces the one with its digest."""
        before = self.table.get(record.digest)
        self.table.put(record.digest, record)
        moved = before is not None and (before.retired, before.parts) != (record.retired, record.parts)
        if moved or (before is not None and before is self._head):
            self._book()
        else:
            self._note(record)

    def put_in_order(self, record: Checkpoint) -> None:
        """`put` where newer ones may be there: they come behind it, as where all of them are read from the store."""
        newer = [] if record.digest in self.table else [known for known in self if known.age > record.age]
        for known in newer:
            self.table.drop(known.digest)
        self.put(record)
        for known in newer:
            self.table.put(known.digest, known)

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
