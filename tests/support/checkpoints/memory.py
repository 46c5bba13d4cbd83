"""Memory checkpoints made by hand, as the ranks of one node leave them, and tiers that hold them."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import mock

import xxhash

from dalsegno.agent.memory import service
from dalsegno.agent.memory.arrivals import Arrival
from dalsegno.agent.memory.calls import SendPace
from dalsegno.agent.memory.connection import Connection
from dalsegno.agent.memory.holdings import StepPart
from dalsegno.agent.memory.tier import HeldParts, MemoryTier
from dalsegno.agent.memory.wire import Wire
from dalsegno.elastic.checkpoint import CheckpointName, FileEntry, Manifest, Position, Shape
from dalsegno.protos import control_pb2

JOB, RUN = "job", "run-0001"
TOKEN = "0123456789abcdef0123456789abcdef"
Files = Mapping[str, bytes]

SMALL: dict[int, Files] = {
    0: {"rank0.pt": b"zero" * 100_000, "deep/er/rank0.pt": b"0", "empty": b""},
    1: {"rank1.pt": b"one" * 700_001, "deep/rank1.pt": os.urandom(3000)},
    2: {"rank2.pt": b"two"},
}
"""What each of three nodes writes."""


def manifest_of(name: str, nodes: Mapping[int, Files], run_id: str = RUN, job_id: str = JOB) -> Manifest:
    parsed = CheckpointName.parse(name)
    files = {path: data for part in nodes.values() for path, data in part.items()}
    return Manifest(
        name=name,
        job_id=job_id,
        run_id=run_id,
        step=parsed.step,
        epoch=parsed.epoch,
        generation=1,
        form="sharded",
        shape=Shape(len(nodes), "ddp", any_world_size=True),
        position=Position(0, 8 * parsed.step),
        order=None,
        source=None,
        resumed_from=None,
        min_nodes=1,
        max_nodes=4,
        metric=None,
        files=tuple(
            FileEntry(path, len(files[path]), xxhash.xxh3_128_hexdigest(files[path])) for path in sorted(files)
        ),
    )


def write_own(memory: Path, manifest: Manifest, group_rank: int, files: Files) -> None:
    """What the ranks of a node do: their files, then which they are, then the manifest."""
    step, parts = memory / manifest.name, memory / f"{manifest.name}.parts"
    step.mkdir(exist_ok=True)
    parts.mkdir(exist_ok=True)
    for path, data in files.items():
        (step / path).parent.mkdir(parents=True, exist_ok=True)
        (step / path).write_bytes(data)
    (step / "MANIFEST.json").write_bytes(manifest.to_bytes())
    (parts / f"{group_rank}.json").write_text(json.dumps({"files": list(files)}))


@contextmanager
def links(bytes_per_second: float, piece_bytes: int) -> Iterator[Counter[Path]]:
    """What each node serves is held back to the speed of a link, all of it together.

    Gives how often each has begun to hand on what still came to it, by its folder of the step.
    """
    paces: dict[Path, SendPace] = {}
    handed_on: Counter[Path] = Counter()
    of_parts, of_arrivals = service.read_part, Arrival.read

    def paced(files: Path, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
        pace = paces.setdefault(files, SendPace(bytes_per_second))
        for piece in pieces:
            pace.wait(len(piece))
            yield piece

    def read_part(part: StepPart, manifest: bytes) -> Iterator[memoryview]:
        return paced(part.place.files, of_parts(part, manifest, piece_bytes))

    def read(arrival: Arrival, *, unwanted: Callable[[], bool]) -> Iterator[memoryview]:
        handed_on[arrival.files] += 1
        return paced(arrival.files, of_arrivals(arrival, piece_bytes, unwanted))

    with mock.patch.object(service, "read_part", read_part), mock.patch.object(Arrival, "read", read):
        yield handed_on


class Node:
    """A tier, and what it has told. What its ranks have written it sends as soon as it is held."""

    def __init__(self, root: Path, **options: object) -> None:
        self.changes: list[HeldParts] = []
        self.said: list[str] = []
        self._told = threading.Condition()
        # What the ranks have written: the run, the digest and the part.
        self._own: set[tuple[str, str, int]] = set()
        arguments: dict[str, object] = {
            "job_id": JOB,
            "host": "127.0.0.1",
            "token": lambda: TOKEN,
            "budget_bytes": None,
        }
        self.tier = MemoryTier(
            **{**arguments, "on_change": self._changed, "say": self._say, "root": root, **options}  # type: ignore[arg-type]
        )

    def _changed(self, held: HeldParts) -> None:
        ref = held.checkpoint.ref
        own = {(held.run_id, ref.digest, part) for part in held.parts} & self._own
        self._own -= own
        if own:
            self.tier.send(held.run_id, ref.name, ref.digest)
        with self._told:
            self.changes.append(held)
            self._told.notify_all()

    def _say(self, text: str, warning: bool) -> None:
        with self._told:
            self.said.append(text)
            self._told.notify_all()

    def wait_for(self, what: Callable[[], object], seconds: float = 60.0) -> None:
        """Until that is so; it is asked whenever the tier tells something, and now and then."""
        deadline = time.monotonic() + seconds
        with self._told:
            while not what():
                assert time.monotonic() < deadline, (self.changes, self.said)
                self._told.wait(0.1)

    def parts(self, name: str) -> tuple[int, ...]:
        return next((held.parts for held in self.tier.held() if held.checkpoint.ref.name == name), ())

    def holds(self, name: str, *parts: int) -> None:
        self.wait_for(lambda: self.parts(name) == parts)

    def memory(self, run_id: str = RUN) -> Path:
        path = self.tier.directory(run_id)
        assert path is not None, self.tier.problem
        return path

    def writes(self, manifest: Manifest, group_rank: int, files: Files, urgent: bool = False) -> None:
        """Its ranks have written a step, and say so."""
        write_own(self.memory(manifest.run_id), manifest, group_rank, files)
        self._own.add((manifest.run_id, manifest.digest, group_rank))
        self.tier.sealed(manifest.run_id, manifest.name, manifest.digest, urgent)

    def gathers(
        self, manifest: Manifest, where: Mapping[int, list[str]], seconds: float = 60.0
    ) -> control_pb2.Checkpoint | str:
        parts = [control_pb2.HeldPart(group_rank=rank, addresses=addresses) for rank, addresses in where.items()]
        found: list[control_pb2.Checkpoint | str] = []
        done = threading.Event()

        def then(result: control_pb2.Checkpoint | str) -> None:
            found.append(result)
            done.set()

        self.tier.gather(manifest.run_id, manifest.ref.to_proto(), parts, then)
        assert done.wait(seconds)
        return found[0]

    def makes_durable(
        self, manifest: Manifest, run_dir: Path, parts: tuple[int, ...] | None = None, seconds: float = 60.0
    ) -> str:
        """All that is here, and the seal; or only these parts; or, with none of them, only the seal."""
        run_id, ref = manifest.run_id, manifest.ref.to_proto()
        if parts is None:
            return answered(lambda then: self.tier.make_durable(run_id, ref, run_dir, then), seconds)
        return answered(lambda then: self.tier.write_parts(run_id, ref, run_dir, parts, then), seconds)

    def looks(self, manifest: Manifest, run_dir: Path, seconds: float = 60.0) -> str:
        """Whether anything that is not here is on the disk."""
        ref = manifest.ref.to_proto()
        return answered(lambda then: self.tier.look_for(manifest.run_id, ref, run_dir, then), seconds)


def answered(ask: Callable[[Callable[[str], None]], None], seconds: float) -> str:
    """What something says once, on another thread."""
    found, done = list[str](), threading.Event()

    def then(problem: str) -> None:
        found.append(problem)
        done.set()

    ask(then)
    assert done.wait(seconds)
    return found[0]


@contextmanager
def called(node: Node) -> Iterator[Connection]:
    """A connection to a node, of somebody who has the token and has said nothing yet."""
    own = Wire(lambda: TOKEN)
    with closing(own.connect(node.tier.address)) as connection:
        own.greet(connection, node.tier.address)
        yield connection


@contextmanager
def nodes(root: Path, count: int, **options: object) -> Iterator[list[Node]]:
    """So many tiers in this process, each with a root of its own, closed at the end."""
    made: list[Node] = []
    try:
        for number in range(count):
            made.append(Node(root / f"node-{number}", **options))
            assert not made[-1].tier.problem, made[-1].tier.problem
        yield made
    finally:
        for node in made:
            node.tier.close()
