"""Memory checkpoints: each node has what its own ranks wrote, and all parts together are an ordinary checkpoint."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dalsegno.elastic import background
from dalsegno.elastic.checkpoint import MANIFEST, SHARDED, CheckpointStore, Manifest, Position, Ref, Tracked, verify
from dalsegno.elastic.checkpoint import files as reading
from dalsegno.elastic.checkpoint.parts import part_path, parts_directory, read_parts, write_part
from dalsegno.elastic.checkpoint.spares import keep_spares
from dalsegno.elastic.rank.identity import Identity, ResumeOrder, from_environment
from dalsegno.elastic.saving import resuming, tiers
from dalsegno.elastic.saving.background_save import Background
from dalsegno.elastic.saving.content import Content
from dalsegno.elastic.saving.outcomes import SaveError
from dalsegno.elastic.saving.resuming import Damaged, ResumePoint, handed_out
from dalsegno.elastic.saving.saving import Saver
from dalsegno.elastic.saving.writing import write_files
from dalsegno.elastic.training.memory import MemorySaves
from dalsegno.elastic.training.saves import Saves
from dalsegno.protos import worker_pb2
from dalsegno.protos.reads import Reads
from dalsegno.protos.room import RESERVE_BYTES
from tests.support.workers.threads import Gone, Threads, together
from tests.unit.elastic.checkpoint.test_best import start

pytestmark = pytest.mark.timeout(60)

Space = namedtuple("Space", ["f_bavail", "f_frsize"])


@dataclass
class Agent:
    """Stands for the link: keeps what is said."""

    ending: int = 0
    alive: bool = True
    drain: bool = False
    to_memory: bool = False
    said: list[worker_pb2.ToAgent] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    def send(self, message: worker_pb2.ToAgent, *, droppable: bool = False) -> None:
        with self.lock:
            self.said.append(message)

    def of(self, kind: str) -> list[Any]:
        return [getattr(message, kind) for message in self.said if message.HasField(kind)]  # type: ignore[arg-type]


@dataclass
class Job:
    """Some nodes with some ranks each, and the directory that all of them see."""

    directory: Path
    nodes: int
    per_node: int = 1
    epoch: int = 3
    budget: int | None = None

    def __post_init__(self) -> None:
        self.agents = [Agent() for _ in range(self.nodes)]
        for node in range(self.nodes):
            self.memory(node).mkdir(parents=True, exist_ok=True)

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    def memory(self, node: int) -> Path:
        return self.directory / f"memory-{node}"

    def identity(self, rank: int) -> Identity:
        node, local_rank = divmod(rank, self.per_node)
        return Identity(
            rank=rank,
            world_size=self.world,
            local_rank=local_rank,
            local_world_size=self.per_node,
            epoch=self.epoch,
            socket="socket",
            job_id="job",
            run_id="run-0001",
            run_dir=self.directory / "run-0001",
            group_rank=node,
            memory_dir=self.memory(node),
            memory_budget=self.budget,
        )

    def run(self, work: Callable[[Saver, Threads], Any]) -> list[Any]:
        def one(group: Threads) -> Any:
            identity = self.identity(group.rank)
            assert identity.run_dir is not None
            agent: Any = self.agents[identity.group_rank]
            with closing(Saver(identity, group, CheckpointStore(identity.run_dir), agent, None)) as saver:
                return work(saver, group)

        return together(self.world, one)

    def gather(self, name: str) -> Path:
        """What the agents do: puts all parts together, on the first node."""
        whole = self.memory(0) / name
        for node in range(1, self.nodes):
            for files in read_parts(self.memory(node) / name).values():
                for file in files:
                    (whole / file).parent.mkdir(parents=True, exist_ok=True)
                    assert not (whole / file).exists()
                    shutil.copyfile(self.memory(node) / name / file, whole / file)
        return whole


def content(step: int = 5) -> Content:
    return Content(step, Position(0, 16 * step))


def writes(rank: int, step: int = 5) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        if rank == 0:
            (path / "model.pt").write_bytes(bytes([step]) * 5000)
        (path / "shards").mkdir(exist_ok=True)
        (path / "shards" / f"{rank}.pt").write_bytes(bytes([rank]) * (1000 + rank))

    return write


def files_of(rank: int, step: int = 5) -> dict[str, Any]:
    model = {"model.pt": bytes([step]) * 5000} if rank == 0 else {}
    return {**model, f"shards/{rank}.pt": bytes([rank]) * (1000 + rank)}


def save(saver: Saver, group: Threads, *, waits: bool, step: int = 5, drain: bool = False) -> Manifest | None:
    if waits:
        options = {"create_directory": True, "drain": drain, "in_memory": True}
        return saver.save(content(step), writes(group.rank, step), **options)  # type: ignore[arg-type]
    state = background(lambda: files_of(group.rank, step))
    name = saver.begin(content(step), state, lambda: None, drain=drain, in_memory=True)
    ended = saver.settle()
    if ended is None:
        return None
    assert ended[1].name == name
    return Manifest.read(saver._tier(True).store.path(ended[1].name))


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "background"])
@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_all_parts_together_are_an_ordinary_checkpoint(tmp_path: Path, nodes: int, per_node: int, waits: bool) -> None:
    """Every node has its own ranks' files, the same manifest, and the note of its part; nothing is on the disk."""
    job = Job(tmp_path, nodes, per_node)
    manifests = job.run(lambda saver, group: save(saver, group, waits=waits))
    first = manifests[0]
    assert isinstance(first, Manifest)
    assert {one.digest for one in manifests} == {first.digest}
    assert first.name == "step-5.e3.1"
    assert not (tmp_path / "run-0001" / first.name).exists()
    for node in range(nodes):
        directory, ranks = job.memory(node) / first.name, range(node * per_node, (node + 1) * per_node)
        own = {*(f"shards/{rank}.pt" for rank in ranks), *(f"rng/rank-{rank}.json" for rank in ranks)}
        assert read_parts(directory) == {node: tuple(sorted(own | ({"model.pt"} if node == 0 else set())))}
        assert Manifest.read(directory) == first
        (sealed,) = job.agents[node].of("sealed")
        assert (sealed.name, sealed.digest, sealed.step, sealed.in_memory) == (first.name, first.digest, 5, True)
    verify(job.gather(first.name), first)


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "background"])
def test_a_save_on_the_disk_beside_it_has_another_name(tmp_path: Path, waits: bool) -> None:
    """So what an agent makes durable under its own name meets nobody. Each is known as what it is."""
    job = Job(tmp_path, 2)

    def work(saver: Saver, group: Threads) -> Any:
        held = save(saver, group, waits=waits)
        kept = saver.save(content(), writes(group.rank), create_directory=True, drain=False)
        assert held is not None
        assert kept is not None
        assert saver.saved.of(5) == kept.ref
        assert saver.saved.of(5, in_memory=True) == held.ref
        assert saver.saved.of(4) is None
        return held.name, kept

    for name, kept in job.run(work):
        assert (name, kept.name) == ("step-5.e3.1", "step-5.e3.2")
        verify(tmp_path / "run-0001" / kept.name, kept)
    assert [one.in_memory for one in job.agents[0].of("sealed")] == [True, False]
    assert [one.in_memory for one in job.agents[1].of("sealed")] == [True]


@pytest.mark.parametrize("gone", [0, 1])
@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "background"])
def test_a_directory_that_somebody_deleted_is_not_made_anew(
    tmp_path: Path, waits: bool, gone: int, caplog: pytest.LogCaptureFixture
) -> None:
    """All could read a directory that ranks make, and no agent would use it. The run goes on, and saves on the disk."""
    job = Job(tmp_path, 2)

    def work(saver: Saver, group: Threads) -> Any:
        first = save(saver, group, waits=waits, step=1)
        group.barrier()
        if group.rank == gone:
            shutil.rmtree(job.memory(gone))
        group.barrier()
        second = save(saver, group, waits=waits, step=2)
        options: dict[str, Any] = {"create_directory": True, "drain": False}
        return first, second, saver.save(content(3), writes(group.rank, 3), **options)

    for first, second, third in job.run(work):
        assert (first.step, second, third.step) == (1, None, 3)
    assert not job.memory(gone).exists()
    assert "the directory of this node in memory is gone" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "background"])
def test_no_room_on_one_node_fails_on_all_and_leaves_nothing(
    tmp_path: Path, waits: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found before a byte is written, by what the last one took; the next one, with room again, succeeds."""
    job, full = Job(tmp_path, 2), threading.Event()
    plain = os.statvfs

    def space(path: Any) -> Any:
        small = full.is_set() and Path(path) == job.memory(1)
        return Space(tiers.SPARE_BYTES + 500, 1) if small else plain(path)

    monkeypatch.setattr(tiers.os, "statvfs", space)

    def work(saver: Saver, group: Threads) -> Any:
        results = [save(saver, group, waits=waits, step=1)]
        group.barrier()
        full.set()
        results.append(save(saver, group, waits=waits, step=2))
        assert not list(job.memory(group.rank).glob("step-2*"))
        group.barrier()
        full.clear()
        return [*results, save(saver, group, waits=waits, step=3)]

    for first, second, third in job.run(work):
        assert (first.step, second, third.step) == (1, None, 3)
    assert "MiB are free in memory, and a checkpoint takes 1 MiB on this node" in caplog.text
    assert not any(agent.of("save_failed") for agent in job.agents), "it is no durable save that has failed"


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "background"])
@pytest.mark.parametrize("node", [0, 1])
def test_no_rank_begins_what_one_has_no_room_for(tmp_path: Path, waits: bool, node: int) -> None:
    """The others would be in a collective of the script's own, and this one here: all hear of it first.

    Also where the ranks have agreed, and what the script gives makes its copies itself. What rank 0 has named goes.
    """
    job, called = Job(tmp_path, 2, per_node=2), [set[int]() for _ in range(2)]

    def work(saver: Saver, group: Threads) -> Any:
        assert save(saver, group, waits=waits, step=1) is not None

        def write(path: Path) -> None:
            called[0].add(group.rank)
            writes(group.rank, 2)(path)

        def state(copy: Any, path: Path) -> dict[str, Any]:
            called[1].add(group.rank)
            return files_of(group.rank, 2)

        # As large as no node is.
        memory = saver._tier(True)
        assert isinstance(memory, tiers.Memory)
        memory._bytes = 1 << 60 if group.rank == 2 * node else memory._bytes
        if waits:
            return saver.save(content(2), write, create_directory=True, drain=False, in_memory=True)
        made = Background(state, copies=True)
        return saver.begin(content(2), made, lambda: None, drain=False, in_memory=True)

    assert job.run(work) == [None] * 4
    assert called == [set(), set()]
    assert not [path for each in range(2) for path in job.memory(each).glob("step-2*")]


LARGE_BYTES = 80 << 20


def save_large(saver: Saver, *, waits: bool, step: int) -> Manifest | None:
    """A save of one rank to memory, of a file that takes some time to grow."""
    files = {"model.pt": bytes([step]) * LARGE_BYTES}
    if waits:
        options: dict[str, Any] = {"create_directory": True, "drain": False, "in_memory": True}
        return saver.save(content(step), lambda path: write_files(path, files), **options)
    saver.begin(content(step), background(lambda: files), lambda: None, drain=False, in_memory=True)
    ended = saver.settle()
    return None if ended is None else Manifest.read(saver._tier(True).store.path(ended[1].name))


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "background"])
@pytest.mark.parametrize("first", [True, False], ids=["the first", "a later one"])
def test_a_save_leaves_memory_to_the_training(
    tmp_path: Path, waits: bool, first: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a file system in memory takes is the container's; with too little of it the kernel ends the training.

    How much the first save takes, it finds while it writes; the next one then knows what that had at least.
    """
    job, looks = Job(tmp_path, 1), list[int]()

    def available() -> int:
        written = sum(file.stat().st_size for file in job.memory(0).rglob("*") if file.is_file())
        looks.append(written)
        return RESERVE_BYTES + (LARGE_BYTES if first else LARGE_BYTES + LARGE_BYTES // 2) - written

    def work(saver: Saver, group: Threads) -> Any:
        results = [] if first else [save_large(saver, waits=waits, step=1)]
        monkeypatch.setattr(tiers, "available_bytes", available)
        results.append(save_large(saver, waits=waits, step=2))
        assert not list(job.memory(0).glob("step-2*"))
        before = len(looks)
        results.append(save_large(saver, waits=waits, step=3))
        assert first or set(looks[before:]) <= {looks[0]}, "nothing more is written in vain"
        monkeypatch.undo()
        return [*results, save_large(saver, waits=waits, step=4)]

    (results,) = job.run(work)
    assert [one if one is None else one.step for one in results] == [*([] if first else [1]), None, None, 4]
    assert "of memory can be had, beside 268 MB for the training" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "background"])
def test_what_a_save_writes_over_has_its_memory(tmp_path: Path, waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that has been saving goes on, however little is left; and keeps what it writes over."""
    job = Job(tmp_path, 1)

    def work(saver: Saver, group: Threads) -> Any:
        results = [save_large(saver, waits=waits, step=1), save_large(saver, waits=waits, step=2)]
        run_dir = job.memory(0)
        first = run_dir / "step-1.e3.1"
        keep_spares(run_dir, first, ["model.pt"])
        shutil.rmtree(first)
        monkeypatch.setattr(tiers, "available_bytes", lambda: 1 << 20)
        return [*results, save_large(saver, waits=waits, step=3)]

    (results,) = job.run(work)
    assert [one if one is None else one.step for one in results] == [1, 2, 3]


@pytest.mark.parametrize("fits", [True, False])
def test_a_nodes_own_parts_are_within_its_budget(tmp_path: Path, fits: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Together with what it holds for others, of whatever run: `--memory-budget`."""
    job = Job(tmp_path, 1)
    others = job.memory(0).with_name("of-another-run") / "step-1.e1.1" / "file"
    others.parent.mkdir(parents=True)
    others.write_bytes(bytes(2_000_000))

    def taken() -> int:
        return sum(path.stat().st_size for path in job.memory(0).parent.rglob("*") if path.is_file())

    job.run(lambda saver, group: save(saver, group, waits=True, step=1))
    size = taken() - 2_000_000
    job.budget = 2_000_000 + 3 * size - (0 if fits else size // 2)
    (saved,) = job.run(lambda saver, group: [save(saver, group, waits=True, step=step) is not None for step in (2, 3)])
    assert saved == [True, fits]
    assert taken() <= job.budget
    said = "of --memory-budget are in use, and a checkpoint takes 0.0 MB on this node: a node holds two"
    assert (said in caplog.text) is not fits


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "background"])
def test_the_first_save_of_a_process_is_within_the_budget(
    tmp_path: Path, waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """How much it takes is found while it is written; the next one is not begun."""
    job = Job(tmp_path, 1)
    job.budget = LARGE_BYTES // 2

    def work(saver: Saver, group: Threads) -> Any:
        first = save_large(saver, waits=waits, step=1)
        found = "and this one takes more: a node holds two" in caplog.text
        return first, found, save_large(saver, waits=waits, step=2), os.listdir(job.memory(0))

    assert job.run(work) == [(None, True, None, [])]
    job.budget = LARGE_BYTES + (1 << 20)
    (saved,) = job.run(lambda saver, group: save_large(saver, waits=waits, step=3))
    assert saved is not None


@pytest.mark.slow
@pytest.mark.parametrize("waits", [pytest.param(True, marks=pytest.mark.full), False], ids=["waiting", "background"])
@pytest.mark.parametrize("at", ["a file", "the manifest", "the note"])
def test_memory_that_ends_in_the_middle_fails_on_all_and_leaves_nothing(
    tmp_path: Path, waits: bool, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it ends: in a rank's file, at the manifest, at the note of the part."""
    job = Job(tmp_path, 2, 2)
    plain = tiers.write_exclusive, tiers.write_part

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    def manifest(path: Path, data: bytes, **options: Any) -> None:
        (full if path.is_relative_to(job.memory(1)) else plain[0])(path, data, **options)

    def note(path: Path, *arguments: Any) -> None:
        (full if path.is_relative_to(job.memory(1)) else plain[1])(path, *arguments)

    if at == "the manifest":
        monkeypatch.setattr(tiers, "write_exclusive", manifest)
    if at == "the note":
        monkeypatch.setattr(tiers, "write_part", note)

    def work(saver: Saver, group: Threads) -> Any:
        def write(path: Path) -> None:
            writes(group.rank)(path)
            if group.rank == 3:
                full()

        if at != "a file":
            return save(saver, group, waits=waits)
        if waits:
            return saver.save(content(), write, create_directory=True, drain=False, in_memory=True)
        files = files_of(group.rank) | ({"unlucky.pt": Unlucky()} if group.rank == 3 else {})
        saver.begin(content(), background(lambda: files), lambda: None, drain=False, in_memory=True)
        return saver.settle()

    assert job.run(work) == [None] * 4
    assert not [path for node in range(2) for path in job.memory(node).glob("step-*")]
    assert not any(agent.of("sealed") for agent in job.agents)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory that has room for a megabyte."""
    directory = tmp_path / "small"
    directory.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", directory], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode()}")
    yield directory
    # What holds a file open still holds its memory: then this fails.
    subprocess.run(["umount", directory], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "background"])
def test_a_state_that_is_larger_than_the_memory_is_no_mistake(
    tmp_path: Path, small: Path, waits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As torch writes it, into what is really full: the run goes on, and memory is as empty as before."""
    job = Job(tmp_path, 2)
    job.memory(1).rmdir()
    job.memory(1).symlink_to(small)
    weights = torch.zeros(1 << 19)

    def work(saver: Saver, group: Threads) -> Any:
        def write(path: Path) -> None:
            torch.save({"w": weights}, path / f"{group.rank}.pt")

        if waits:
            return saver.save(content(), write, create_directory=True, drain=False, in_memory=True)
        state = {f"{group.rank}.pt": {"w": weights}}
        saver.begin(content(), background(lambda: state), lambda: None, drain=False, in_memory=True)
        return saver.settle()

    assert job.run(work) == [None, None]
    assert "No space left on device" in caplog.text
    assert list(small.iterdir()) == list(job.memory(0).iterdir()) == []


class Unlucky:
    """Cannot be written."""

    def __deepcopy__(self, memo: object) -> Unlucky:
        return self

    def __reduce__(self) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_mistake_in_the_scripts_save_ends_the_run_as_on_the_disk(tmp_path: Path) -> None:
    """On all ranks, with the same line, and nothing is left."""
    job = Job(tmp_path, 2)

    def work(saver: Saver, group: Threads) -> Any:
        def write(path: Path) -> None:
            if group.rank == 1:
                raise KeyError("layer")

        return saver.save(content(), write, create_directory=True, drain=False, in_memory=True)

    for error in job.run(work):
        assert isinstance(error, SaveError)
        assert "saving step 5 failed: KeyError: 'layer' (rank 1)" in str(error)
    assert not [path for node in range(2) for path in job.memory(node).glob("step-*")]


@pytest.mark.parametrize("summed", [False, True], ids=["read", "summed"])
def test_of_a_file_that_several_nodes_write_the_first_ones_counts(tmp_path: Path, summed: bool) -> None:
    """As on the disk, where one is left of them: the others are taken away, so that the part can come in its place."""
    job = Job(tmp_path, 3)

    def work(saver: Saver, group: Threads) -> Any:
        def write(path: Path) -> None:
            writes(group.rank)(path)
            if group.rank > 0 and summed:
                write_files(path, {"arguments.json": f"rank {group.rank}".encode()})
            elif group.rank > 0:
                (path / "arguments.json").write_text(f"rank {group.rank}")

        return saver.save(content(), write, create_directory=True, drain=False, in_memory=True)

    manifests = job.run(work)
    name = manifests[0].name
    assert "arguments.json" in read_parts(job.memory(1) / name)[1]
    assert not (job.memory(2) / name / "arguments.json").exists()
    whole = job.gather(name)
    verify(whole, manifests[2])
    assert (whole / "arguments.json").read_text() == "rank 1"


def test_nobody_reads_back_what_was_summed_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one rank alone, whatever rank of a node lists it."""
    job, read = Job(tmp_path, 2, per_node=2), set[str]()
    summing = reading.checksum

    def noted(root: Path, path: str, **options: Any) -> Any:
        read.add(path)
        return summing(root, path, **options)

    monkeypatch.setattr(reading, "checksum", noted)

    def work(saver: Saver, group: Threads) -> Any:
        def write(path: Path) -> None:
            writes(group.rank)(path)
            write_files(path, {f"own/{group.rank}.pt": bytes([group.rank]) * 2000})

        return saver.save(content(), write, create_directory=True, drain=False, in_memory=True)

    manifest = job.run(work)[0]
    assert {f"own/{rank}.pt" for rank in range(4)} == {entry.path for entry in manifest.files} - read
    verify(job.gather(manifest.name), manifest)


def test_a_rank_that_dies_in_the_middle_is_a_lost_peer(tmp_path: Path) -> None:
    """Without what it had there is no checkpoint: nobody completes it, also in a drain, and no part is noted."""
    job = Job(tmp_path, 2)

    def work(saver: Saver, group: Threads) -> Any:
        def write(path: Path) -> None:
            if group.rank == 1:
                raise SystemExit(1)
            writes(group.rank)(path)

        return saver.save(content(), write, create_directory=True, drain=True, in_memory=True)

    results = job.run(work)
    assert isinstance(results[0], Gone)
    assert isinstance(results[1], SystemExit)
    assert not list(tmp_path.glob("memory-*/*.parts"))


def resumed(job: Job, manifest: Manifest) -> list[Any]:
    """What each rank of another world finds, which has the checkpoint in the memory of each node."""

    def one(group: Threads) -> Any:
        identity = job.identity(group.rank)
        assert identity.memory_dir is not None
        assert identity.run_dir is not None
        order = ResumeOrder(manifest.ref, SHARDED, None, identity.memory_dir / manifest.name)
        return handed_out(order, identity.run_dir, group, identity=identity)

    return together(job.world, one)


def test_each_node_verifies_its_own_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, among its own ranks; a bit that has flipped on one node is found by that node, and told to all."""
    writer = Job(tmp_path, 2)
    manifest = writer.run(lambda saver, group: save(saver, group, waits=True))[0]
    whole = writer.gather(manifest.name)
    job = Job(tmp_path / "next", 2, 2, epoch=4)
    for node in range(2):
        shutil.copytree(whole, job.memory(node) / manifest.name)
    read: list[tuple[str, str]] = []
    plain, lock = handed_out.__globals__["verify_files"], threading.Lock()

    def counted(directory: Path, entries: Any, **options: Any) -> None:
        with lock:
            read.extend((directory.parent.name, entry.path) for entry in entries)
        plain(directory, entries, **options)

    monkeypatch.setitem(handed_out.__globals__, "verify_files", counted)
    for rank, point in enumerate(resumed(job, manifest)):
        assert isinstance(point, ResumePoint)
        assert point.path == job.memory(rank // 2) / manifest.name
        assert point.in_memory
    assert sorted(read) == sorted((f"memory-{node}", entry.path) for node in range(2) for entry in manifest.files)

    file = job.memory(1) / manifest.name / "shards/1.pt"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    found = resumed(job, manifest)
    assert [(one.file, one.ref) for one in found] == [("shards/1.pt", manifest.ref)] * 4
    assert all(isinstance(one, Damaged) for one in found)
    assert [one.found_here for one in found].count(True) == 1
    assert any(one.found_here for one in found[2:])


def test_what_nobody_of_a_node_reads_is_not_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On node 0 both ranks have what is in two files, on node 1 one of them; in a shared directory all must."""
    writer = Job(tmp_path, 2)
    manifest = writer.run(lambda saver, group: save(saver, group, waits=True))[0]
    whole = writer.gather(manifest.name)
    job = Job(tmp_path / "next", 2, 2, epoch=4)
    for node in range(2):
        shutil.copytree(whole, job.memory(node) / manifest.name)
    both = {"shards/0.pt", "shards/1.pt"}
    told = [both, both, both, {"shards/1.pt"}]
    read: set[tuple[str, str]] = set()
    plain = handed_out.__globals__["verify_files"]

    def counted(directory: Path, entries: Any, **options: Any) -> None:
        read.update((directory.parent.name, entry.path) for entry in entries)
        plain(directory, entries, **options)

    def one(group: Threads, directory: Path | None, unread: Any) -> Any:
        identity = job.identity(group.rank)
        assert identity.memory_dir is not None
        order = ResumeOrder(manifest.ref, SHARDED, None, directory or identity.memory_dir / manifest.name)
        return handed_out(order, tmp_path, group, identity=identity, unread=unread[group.rank])

    monkeypatch.setitem(handed_out.__globals__, "verify_files", counted)
    every = {entry.path for entry in manifest.files}
    assert all(isinstance(p, ResumePoint) for p in together(job.world, lambda group: one(group, None, told)))
    assert {path for node, path in read if node == "memory-0"} == every - both
    assert {path for node, path in read if node == "memory-1"} == every - {"shards/1.pt"}
    for unread, left_out in ((told, {"shards/1.pt"}), ([both, both, both, set()], set())):
        read.clear()
        together(job.world, lambda group, unread=unread: one(group, whole, unread))  # type: ignore[misc]
        assert {path for _, path in read} == every - left_out


def with_parts(tmp_path: Path, *, by_place: bool = True, reads: Reads | None = None) -> tuple[Job, Manifest]:
    """A step of four nodes; in the next world each of them has its own part, the first, and that of the one before."""
    writer = Job(tmp_path, 4)

    def saved(saver: Saver, group: Threads) -> Manifest | None:
        made = replace(content(), by_place=by_place, reads=reads)
        return saver.save(made, writes(group.rank), create_directory=True, drain=False, in_memory=True)

    manifest = writer.run(saved)[0]
    job = Job(tmp_path / "next", 4, epoch=4)
    for node in range(4):
        copied = job.memory(node) / manifest.name
        copied.mkdir()
        shutil.copyfile(writer.memory(node) / manifest.name / MANIFEST, copied / MANIFEST)
        for part in {0, node, (node - 1) % 4}:
            bring(writer, job, manifest, node, part)
    return job, manifest


def bring(writer: Job, job: Job, manifest: Manifest, node: int, part: int) -> None:
    """One part comes to one node."""
    source, copied = writer.memory(part) / manifest.name, job.memory(node) / manifest.name
    for file in read_parts(source)[part]:
        (copied / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / file, copied / file)
    write_part(copied, part, read_parts(source)[part])


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_by_place_each_node_verifies_what_it_loads(tmp_path: Path) -> None:
    """Its own part and the first one, as far as it has not all of them: what it keeps for others is theirs."""
    job, manifest = with_parts(tmp_path)
    assert all(isinstance(point, ResumePoint) for point in resumed(job, manifest))
    flip(job.memory(2) / manifest.name / "shards/1.pt")
    assert all(isinstance(point, ResumePoint) for point in resumed(job, manifest))
    flip(job.memory(2) / manifest.name / "shards/2.pt")
    assert {one.file for one in resumed(job, manifest)} == {"shards/2.pt"}
    flip(job.memory(2) / manifest.name / "shards/2.pt")
    flip(job.memory(2) / manifest.name / "model.pt")
    assert {one.file for one in resumed(job, manifest)} == {"model.pt"}
    # Node 0 has 0 and 3. With the others it has all of them.
    flip(job.memory(2) / manifest.name / "model.pt")
    bring(Job(tmp_path, 4), job, manifest, 0, 1)
    bring(Job(tmp_path, 4), job, manifest, 0, 2)
    assert all(isinstance(point, ResumePoint) for point in resumed(job, manifest))
    flip(job.memory(0) / manifest.name / "shards/1.pt")
    assert {one.file for one in resumed(job, manifest)} == {"shards/1.pt"}


@pytest.mark.parametrize("part", [0, 1])
def test_by_place_a_part_that_lacks_is_damage(tmp_path: Path, part: int) -> None:
    """The files alone do not show that they are here: so says the note."""
    job, manifest = with_parts(tmp_path)
    part_path(job.memory(1) / manifest.name, part).unlink()
    assert {one.message for one in resumed(job, manifest)} == {
        f"{manifest.name}/MANIFEST.json: MISSING_FILE (the part of node {part} is not here) (rank 1)"
    }


@pytest.mark.parametrize("case", ["not by place", "not said", "not by place, and said"])
def test_all_files_must_be_here_otherwise(tmp_path: Path, case: str) -> None:
    """In a world of another size that is where the checkpoint does not say what is read there."""
    reads = Reads() if case == "not by place, and said" else None
    job, manifest = with_parts(tmp_path, by_place=case == "not said", reads=reads)
    if case != "not by place":
        job.nodes = 3
    assert all(isinstance(one, Damaged) for one in resumed(job, manifest))


def messages(job: Job, manifest: Manifest) -> set[str]:
    return {getattr(one, "message", "") for one in resumed(job, manifest)}


ELSEWHERE = [(0, 1), (1, 2), (2, 3)]
HALVES = [(0, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize(
    ("nodes", "per_node", "length", "lack"),
    [
        (3, 1, 12, ELSEWHERE),
        (3, 2, 12, ELSEWHERE),
        (2, 1, 12, HALVES),
        (3, 1, 0, []),
        # As many ranks on fewer nodes: each loads what the rank of its number has saved.
        (2, 2, 12, HALVES),
        (2, 2, 0, HALVES),
    ],
)
def test_at_another_size_the_parts_that_are_read_must_be_here(
    tmp_path: Path, nodes: int, per_node: int, length: int, lack: list[tuple[int, int]]
) -> None:
    """`lack`: nodes, and parts that they need and do not have; each part is one rank's."""
    job, manifest = with_parts(tmp_path, reads=Reads((length,) if length else ()))
    job.nodes, job.per_node = nodes, per_node
    for node, part in lack:
        bring(Job(tmp_path, 4), job, manifest, node, part)
    assert messages(job, manifest) == {""}
    for node, part in [*lack, (1, 0)]:
        note = part_path(job.memory(node) / manifest.name, part)
        note.rename(tmp_path / "aside")
        (message,) = messages(job, manifest)
        assert f"the part {f'with the files of rank {part}' if part else 'of node 0'} is not here" in message
        (tmp_path / "aside").rename(note)


def test_at_another_size_whatever_is_here_is_verified(tmp_path: Path) -> None:
    """Who loads more than it said finds no other bits than were saved."""
    job, manifest = with_parts(tmp_path, reads=Reads())
    job.nodes, job.per_node = 3, 2
    for node, part in ((0, 3), (2, 1), (2, 2)):
        flip(job.memory(node) / manifest.name / f"shards/{part}.pt")
        assert {one.file for one in resumed(job, manifest)} == {f"shards/{part}.pt"}
        flip(job.memory(node) / manifest.name / f"shards/{part}.pt")
    assert messages(job, manifest) == {""}


def test_a_part_that_arrives_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of a node sees some parts and the other all of them: no file that is needed is left to nobody."""
    job, manifest = with_parts(tmp_path, reads=Reads((12,)))
    job.nodes, job.per_node = 1, 2
    for part in (1, 2):
        bring(Job(tmp_path, 4), job, manifest, 0, part)
    looks, lock = 0, threading.Lock()

    def read(directory: Path) -> dict[int, tuple[str, ...]]:
        nonlocal looks
        with lock:
            looks += 1
            there = dict(read_parts(directory))
            if looks == 1:
                del there[3]
            return there

    monkeypatch.setattr(resuming, "read_parts", read)
    monkeypatch.setattr(resuming, "ranks_read", lambda *_: frozenset({0, 1}))
    for file in [file for part in (0, 1) for file in read_parts(job.memory(0) / manifest.name)[part]]:
        looks = 0
        flip(job.memory(0) / manifest.name / file)
        assert {one.file for one in resumed(job, manifest)} == {file}
        flip(job.memory(0) / manifest.name / file)


def test_the_environment_says_where_to_resume_from(tmp_path: Path) -> None:
    """Also outside the run's directory; without the variable it is there, under its name."""
    environment = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "DALSEGNO_SOCKET": "socket",
        "DALSEGNO_EPOCH": "4",
        "DALSEGNO_JOB_ID": "job",
        "DALSEGNO_RUN_ID": "run-0001",
        "DALSEGNO_NODE": "node",
        "DALSEGNO_GENERATION": "1",
        "DALSEGNO_MIN_NODES": "1",
        "DALSEGNO_MAX_NODES": "2",
        "DALSEGNO_RUN_DIR": str(tmp_path / "run-0001"),
        "DALSEGNO_RESUME_NAME": "step-5.e3.1",
        "DALSEGNO_RESUME_DIGEST": "0" * 64,
        "DALSEGNO_RESUME_FORM": "sharded",
    }
    plain = from_environment(environment)
    assert plain.resume is not None
    assert (plain.resume.directory, plain.memory_dir, plain.group_rank) == (None, None, 1)
    memory = tmp_path / "memory"
    place = {"DALSEGNO_RESUME_DIR": str(memory / "step-5.e3.1"), "DALSEGNO_MEMORY_DIR": str(memory)}
    identity = from_environment(environment | place)
    assert identity.resume is not None
    assert identity.resume.directory is not None
    assert identity.in_memory(identity.resume.directory)
    assert not identity.in_memory(tmp_path / "memory-of-another" / "step-5.e3.1")
    later = {"DALSEGNO_RESUME_FORM": "universal", "DALSEGNO_UNIVERSAL_NAME": "step-5.e3.1.universal.1"}
    later |= {"DALSEGNO_UNIVERSAL_DIGEST": "1" * 64, "DALSEGNO_UNIVERSAL_DIR": str(memory / "step-5.e3.1.universal.1")}
    identity = from_environment(environment | place | later)
    assert identity.resume is not None
    assert identity.resume.universal_directory == memory / "step-5.e3.1.universal.1"


def test_memory_is_written_without_a_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is gone with the machine anyway, and a sync would wait for what others write."""
    job = Job(tmp_path, 1)

    def never(descriptor: int) -> None:
        raise AssertionError("synced")

    monkeypatch.setattr(os, "fsync", never)
    for waits in (True, False):
        (manifest,) = job.run(lambda saver, group, way=waits: save(saver, group, waits=way))
        assert isinstance(manifest, Manifest), manifest


def test_the_copy_is_of_the_moment(tmp_path: Path) -> None:
    """In the background: what the training does to the tensors meanwhile is not in it."""
    job = Job(tmp_path, 1)
    weights = torch.ones(1000)

    def work(saver: Saver, group: Threads) -> Any:
        state = background(lambda: {"model.pt": {"w": weights}})
        saver.begin(content(), state, lambda: None, drain=False, in_memory=True)
        weights.zero_()
        assert saver.under_way is not None
        assert not read_parts(job.memory(0) / "step-5.e3.1"), "no part is noted before all ranks know of it"
        ended = saver.settle()
        assert not saver.busy
        return ended

    (ended,) = job.run(work)
    loaded = torch.load(job.memory(0) / ended[1].name / "model.pt", weights_only=True)
    assert torch.equal(loaded["w"], torch.ones(1000))
    assert parts_directory(job.memory(0) / ended[1].name).is_dir()


def test_a_save_in_the_background_is_settled_without_another_one(tmp_path: Path) -> None:
    """At the first exchange behind its end: until then its part is not noted, and a crash would lose it."""
    gate = Gate()
    with start(tmp_path) as session:
        session.begin_step()
        session.end_step()
        session.save(background(lambda: {"gate.pt": gate}), wait=False)
        for _ in range(3):
            session.begin_step()
            session.end_step()
            assert session.saves.under_way(in_memory=False)
        gate.opened.set()
        for _ in range(10_000):
            session.begin_step()
            session.end_step()
            if not session.saves.under_way(in_memory=False):
                break
            threading.Event().wait(0.001)
        assert session.saves.of(1) is not None


class Gate:
    """Cannot be written before it is open."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __deepcopy__(self, memo: object) -> Gate:
        return self

    def __reduce__(self) -> Any:
        assert self.opened.wait(30)
        return int, (0,)


@pytest.mark.parametrize(
    ("told", "where"),
    [
        ([(True, True), (True, True)], True),
        # Of a drain that another agent began a rank may hear from the others only.
        ([(True, True), (False, False)], True),
        ([(True, True), (True, False)], False),
        # Nobody has said so.
        ([(False, False), (False, False)], False),
        ([(True, True), None], False),
    ],
)
def test_a_drain_goes_to_memory_if_all_agents_that_speak_of_it_say_so(
    tmp_path: Path, told: list[tuple[bool, bool] | None], where: bool
) -> None:
    """And every rank has where to save to; all ranks come to the same."""
    job = Job(tmp_path, 2)

    def one(group: Threads) -> bool:
        said, identity = told[group.rank], job.identity(group.rank)
        link: Any = Told(*(said or (True, True)))
        if said is None:
            identity = replace(identity, memory_dir=None)
        return Saves(identity, group, link, None, 0).drains_to_memory()

    assert together(2, one) == [where, where]


def saves_of(job: Job, group: Threads) -> Saves:
    identity = job.identity(group.rank)
    agent: Any = job.agents[identity.group_rank]
    return Saves(identity, group, agent, None, 0)


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "background"])
def test_a_step_in_memory_that_is_wanted_on_the_disk_is_saved_anew(tmp_path: Path, waits: bool) -> None:
    """What was saved for the case of a crash alone nobody brings there. Once it is for the disk, it stays that."""
    job = Job(tmp_path, 2)

    def one(group: Threads) -> list[str]:
        with closing(saves_of(job, group)) as saves:

            def saved(make_durable: bool) -> str:
                write: Any = writes(group.rank) if waits else background(lambda: files_of(group.rank))
                options: Any = {"create_directory": True, "wait": True, "drain": False, "in_memory": True}
                ref = saves.save(replace(content(), make_durable=make_durable), write, **options)
                assert ref is not None
                return ref.name

            return [saved(wanted) for wanted in (False, False, True, True, False)]

    alone, wanted = "step-5.e3.1", "step-5.e3.2"
    assert together(2, one) == [[alone, alone, wanted, wanted, wanted]] * 2
    for agent in job.agents:
        assert [(one.name, one.make_durable) for one in agent.of("sealed")] == [(alone, False), (wanted, True)]


@pytest.mark.parametrize("to_disk", [True, False])
def test_a_step_that_has_no_room_in_memory_once_more_is_the_disks(tmp_path: Path, to_disk: bool) -> None:
    """The older copy is for a crash alone: nobody brings it to the disk."""
    job = Job(tmp_path, 2, budget=1 << 20)
    full = [job.memory(node).with_name("of-another-run") for node in range(2)]

    def one(group: Threads) -> list[bool]:
        with closing(saves_of(job, group)) as saves:

            def save(make_durable: bool) -> Ref | None:
                options: Any = {"create_directory": True, "wait": True, "drain": False, "in_memory": True}
                what = replace(content(), make_durable=make_durable)
                return saves.save(what, writes(group.rank), **options)

            learned: dict[str, Any] = {}
            learns = SimpleNamespace(learn=learned.update)
            session: Any = SimpleNamespace(
                can_save_in_memory=True, settle=saves.settle, saves=saves, examination=learns
            )
            memory = MemorySaves(session, 5, save)
            assert learned == {"memory_every": 5}
            first = memory.at(5, saved=False)
            assert saves.of(5, in_memory=True) is not None
            full[group.rank].write_bytes(bytes(1 << 20))
            group.barrier()
            return [first, memory.at(5, saved=not to_disk, to_disk=to_disk)]

    assert together(2, one) == [[False, to_disk]] * 2


def test_a_drain_with_a_metric_that_fits_nowhere_ends_in_what_is_in_memory(tmp_path: Path) -> None:
    """It is not the best, and all of the step is in it."""
    job = Job(tmp_path, 2)
    for agent in job.agents:
        agent.drain = agent.to_memory = True

    def fails(path: Path) -> None:
        raise OSError(errno.ENOSPC, "no room")

    def one(group: Threads) -> list[str]:
        with closing(saves_of(job, group)) as saves:
            options: Any = {"create_directory": True, "wait": True, "in_memory": True}
            found = [saves.save(content(), writes(group.rank), drain=False, **options)]
            found += [saves.save(replace(content(), metric=1.0), fails, drain=True, **options)]
            job.agents[group.rank].to_memory = False
            found += [saves.save(replace(content(), metric=1.0), fails, drain=True, **options)]
            return ["" if ref is None else ref.name for ref in found]

    assert together(2, one) == [["step-5.e3.1", "step-5.e3.1", ""]] * 2


@pytest.mark.parametrize("metric", [None, 1.0])
def test_a_drain_with_a_metric_does_not_end_in_what_has_none(tmp_path: Path, metric: float | None) -> None:
    """What is in memory alone is not the best: the drain's save of the same step may be."""
    job = Job(tmp_path, 2)
    for agent in job.agents:
        agent.drain = agent.to_memory = True

    def one(group: Threads) -> list[str]:
        with closing(saves_of(job, group)) as saves:
            assert saves.saver is not None
            saves.saver.bests.tracked = Tracked("loss")
            found = []
            for drain in (False, True, True):
                options: Any = {"create_directory": True, "wait": True, "drain": drain, "in_memory": True}
                ref = saves.save(replace(content(), metric=metric), writes(group.rank), **options)
                assert ref is not None
                best = Manifest.read(job.memory(group.rank) / ref.name).best
                found.append(f"{ref.name} {best.name if best is not None else ''}")
            return found

    alone, drained = "step-5.e3.1 ", "step-5.e3.2 step-5.e3.2"
    assert together(2, one) == [[alone, *([alone] * 2 if metric is None else [drained] * 2)]] * 2


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "background"])
def test_what_is_in_memory_alone_is_never_the_best(tmp_path: Path, waits: bool) -> None:
    """Else no later commit would name the best one of those on the disk, which the master then deletes."""
    job = Job(tmp_path, 2)

    def work(saver: Saver, group: Threads) -> list[tuple[float | None, str]]:
        saver.bests.tracked = Tracked("loss")
        found = []

        def saved(step: int, metric: float | None, **options: Any) -> None:
            in_memory, what = options.get("in_memory", False), replace(content(step), metric=metric)
            options = {"drain": False, **options}
            if in_memory and not waits:
                saver.begin(what, background(lambda: files_of(group.rank, step)), lambda: None, **options)
                ended = saver.settle()
                assert ended is not None
                manifest = Manifest.read(job.memory(group.rank) / ended[1].name)
            else:
                made = saver.save(what, writes(group.rank, step), create_directory=True, **options)
                assert made is not None
                manifest = made
            assert manifest.best is not None
            found.append((manifest.metric, manifest.best.name))

        saved(5, 2.0)
        saved(6, 1.0, in_memory=True)
        assert saver.bests.best is not None
        assert saver.bests.best.name == "step-5.e3.1"
        assert saver.improves(1.5)
        saved(7, None)
        saved(8, 1.0, in_memory=True, drain=True)
        return found

    best, last = "step-5.e3.1", "step-8.e3.1"
    assert job.run(work) == [[(2.0, best), (1.0, best), (None, best), (1.0, last)]] * 2


@dataclass
class Told:
    """The link, as far as a drain is known."""

    drain: bool
    to_memory: bool
