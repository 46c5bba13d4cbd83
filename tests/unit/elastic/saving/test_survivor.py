"""A memory checkpoint by one rank alone: whole, once for each node, and nothing is left of one that fails."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dalsegno.elastic.checkpoint import MANIFEST, CheckpointName, Position, Ref, verify
from dalsegno.elastic.checkpoint.layout import FIRST_OF_SURVIVORS
from dalsegno.elastic.checkpoint.parts import read_parts
from dalsegno.elastic.checkpoint.spares import keep_spares
from dalsegno.elastic.rank.identity import Identity
from dalsegno.elastic.rank.reports import Reports
from dalsegno.elastic.saving import survivor as survivor_module
from dalsegno.elastic.saving import tiers, writing
from dalsegno.elastic.saving.content import Content
from dalsegno.elastic.saving.survivor import Survivor
from dalsegno.protos.room import RESERVE_BYTES
from tests.support.workers.fake_link import FakeLink

CONTENT = Content(7, Position(0, 112))
FILES: dict[str, Any] = {"model.pt": {"weight": torch.ones(3)}, "deep/notes.txt": b"notes"}


def survivor(directory: Path, rank: int = 2, local_rank: int = 0, budget: int | None = None) -> tuple[Survivor, Any]:
    identity = Identity(
        rank=rank,
        world_size=6,
        local_rank=local_rank,
        local_world_size=2,
        epoch=4,
        job_id="job",
        run_id="run-0001",
        group_rank=1,
        nodes=3,
        memory_dir=directory,
        memory_budget=budget,
    )
    link: Any = FakeLink()
    return Survivor(identity, link, Ref("step-5.e3.1", "d" * 64), Reports(link)), link


def test_it_is_whole_and_the_agent_hears_of_it(tmp_path: Path) -> None:
    one, link = survivor(tmp_path)
    manifest = one.save(CONTENT, FILES, b"generators")
    assert manifest is not None
    path = tmp_path / manifest.name
    verify(path, manifest)
    assert {entry.path for entry in manifest.files} == {"model.pt", "deep/notes.txt", "rng/rank-2.json"}
    assert read_parts(path) == {0: (), 1: tuple(sorted(entry.path for entry in manifest.files)), 2: ()}
    assert (manifest.step, manifest.epoch, manifest.position) == (7, 4, Position(0, 112))
    assert (manifest.shape.world_size, manifest.shape.loads_at(1)) == (6, True)
    assert manifest.resumed_from == Ref("step-5.e3.1", "d" * 64)
    assert CheckpointName.parse(manifest.name).attempt == FIRST_OF_SURVIVORS + 1
    assert [message.WhichOneof("body") for message in link.said] == ["keeping", "sealed"]
    (sealed,) = link.of("sealed")
    assert (sealed.name, sealed.digest, sealed.in_memory) == (manifest.name, manifest.digest, True)


def test_one_rank_of_a_node_is_enough(tmp_path: Path) -> None:
    survivor(tmp_path)[0].save(CONTENT, FILES, b"")
    other, link = survivor(tmp_path, 3, 1)
    assert other.save(CONTENT, FILES, b"") is None
    assert not link.said


def held(path: str, begun: Any, ends: Any) -> None:
    """A rank of the same node that stands still with some of it written."""
    one, _ = survivor(Path(path))

    def save(value: Any, file: Any) -> None:
        file.write(b"half")
        begun.set()
        ends.wait(60)
        raise OSError("no room")

    with mock.patch.object(survivor_module, "save", save), contextlib.suppress(OSError):
        one.save(CONTENT, FILES, b"generators")


@pytest.mark.parametrize("killed", [True, False])
def test_the_next_rank_of_a_node_saves_it_where_one_ends_before_it_is_done(tmp_path: Path, killed: bool) -> None:
    """It waits for that one meanwhile, and what was begun is not used."""
    started = multiprocessing.get_context("spawn")
    begun, ends = started.Event(), started.Event()
    first = started.Process(target=held, args=(str(tmp_path), begun, ends))
    first.start()
    other, link = survivor(tmp_path, 3, 1)
    assert begun.wait(60)
    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(other.save, CONTENT, FILES, b"others")
        while not link.said:
            time.sleep(0.01)  # why: the other thread is to begin
        with pytest.raises(TimeoutError):
            saving.result(0.2)
        if killed:
            first.kill()
        else:
            ends.set()
        manifest = saving.result(60)
    first.join(60)
    assert manifest is not None
    path = tmp_path / manifest.name
    verify(path, manifest)
    assert {entry.path for entry in manifest.files} == {"model.pt", "deep/notes.txt", "rng/rank-3.json"}
    there = {str(one.relative_to(path)) for one in path.rglob("*") if one.is_file()}
    assert there == {entry.path for entry in manifest.files} | {MANIFEST}
    assert [message.WhichOneof("body") for message in link.said] == ["keeping", "sealed"]
    assert sorted(os.listdir(tmp_path)) == [manifest.name, f"{manifest.name}.parts"]


def test_nothing_is_left_of_one_that_fails(tmp_path: Path) -> None:
    one, link = survivor(tmp_path)
    with pytest.raises(OSError, match="too long"):
        one.save(CONTENT, {**FILES, 300 * "x": b""}, b"")
    assert not os.listdir(tmp_path)
    assert not link.of("sealed")


# What is written is looked at whenever it has grown by so much.
GROWS_BYTES = 64 << 10


@pytest.mark.parametrize("local_rank", [0, 1])
@pytest.mark.parametrize("lacks", ["budget", "memory"])
def test_it_takes_no_more_than_memory_checkpoints_may(
    tmp_path: Path, lacks: str, local_rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a save of all ranks: the kernel would end the next world's workers, or the buddies' parts have no room."""
    monkeypatch.setattr(writing, "AHEAD_BYTES", GROWS_BYTES)
    directory = tmp_path / "run-0001"
    directory.mkdir()
    others = tmp_path / "of-another-run"
    others.write_bytes(bytes(100_000))
    files = {"model.pt": {"weight": torch.ones(1 << 20)}}
    budget, most = 2_000_000, 100_000 + (4 << 20)
    if lacks == "memory":
        budget = 1 << 40
        monkeypatch.setattr(tiers, "available_bytes", lambda: 0)
    one, link = survivor(directory, 2 + local_rank, local_rank, budget)
    with pytest.raises(OSError, match=r"--memory-budget") as refused:
        one.save(CONTENT, files, b"")
    assert refused.value.errno == errno.ENOSPC
    assert not os.listdir(directory)
    assert not link.of("sealed")

    monkeypatch.undo()
    monkeypatch.setattr(writing, "AHEAD_BYTES", GROWS_BYTES)
    one, _ = survivor(directory, 2 + local_rank, local_rank, most + GROWS_BYTES)
    assert one.save(CONTENT, files, b"") is not None


def test_a_try_without_room_is_not_made_again_before_there_is_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is called fifty times a second, in the main thread, and each time wrote up to the budget."""
    monkeypatch.setattr(writing, "AHEAD_BYTES", GROWS_BYTES)
    directory, others = tmp_path / "run-0001", tmp_path / "of-another-run"
    directory.mkdir()
    others.write_bytes(bytes(3 << 20))
    one, link = survivor(directory, budget=(4 << 20) + 2 * GROWS_BYTES)
    one.may_keep(True)
    wrote = list[int]()
    write = one._write

    def noted(*given: Any) -> Any:
        wrote.append(len(wrote))
        return write(*given)

    monkeypatch.setattr(one, "_write", noted)
    files = {"model.pt": bytes(4 << 20)}
    for _ in range(3):
        with pytest.raises(OSError, match=r"--memory-budget") as refused:
            one.save(CONTENT, files, b"")
        assert refused.value.errno == errno.ENOSPC
        assert not os.listdir(directory)
    assert wrote == [0]
    assert len(link.of("keeping")) == 1
    assert not link.of("progress")

    monkeypatch.setattr(survivor_module, "NO_ROOM_SECONDS", 0.0)
    for _ in range(2):
        with pytest.raises(OSError, match=r"--memory-budget"):
            one.save(CONTENT, files, b"")
    assert [(said.step, said.may_keep) for said in link.of("progress")] == [(CONTENT.step, False)]

    others.write_bytes(bytes(1 << 20))
    with pytest.raises(OSError, match=r"--memory-budget"):
        one.save(CONTENT, files, b"")
    assert wrote == [0, 1], "not all of it has room yet, which only a try can show"
    others.unlink()
    assert one.save(CONTENT, files, b"") is not None


def test_so_where_the_memory_itself_is_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write ends before the memory does, by what all ranks of the node may write until they look again."""
    monkeypatch.setattr(writing, "AHEAD_BYTES", GROWS_BYTES)
    monkeypatch.setattr(tiers, "AHEAD_BYTES", GROWS_BYTES)
    monkeypatch.setattr(tiers, "FEW_BYTES", 0)
    there = 2 << 20

    def available() -> int:
        return RESERVE_BYTES + there - sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())

    monkeypatch.setattr(tiers, "available_bytes", available)
    one, _ = survivor(tmp_path, budget=1 << 40)
    wrote = list[int]()
    write = one._write

    def noted(*given: Any) -> Any:
        wrote.append(len(wrote))
        return write(*given)

    monkeypatch.setattr(one, "_write", noted)
    files = {"model.pt": bytes(4 << 20)}
    for _ in range(3):
        with pytest.raises(OSError, match="of memory can be had") as refused:
            one.save(CONTENT, files, b"")
        assert refused.value.errno == errno.ENOSPC
        assert not os.listdir(tmp_path)
    assert wrote == [0]
    there = 3 << 20
    with pytest.raises(OSError, match="of memory can be had"):
        one.save(CONTENT, files, b"")
    assert wrote == [0, 1], "not all of it has room yet, which only a try can show"
    there = 5 << 20
    assert one.save(CONTENT, files, b"") is not None


class Fetched:
    """What takes a state from a card, and what the agent had heard then."""

    def __init__(self, link: Any) -> None:
        self._link = link
        self.heard: list[list[str]] = []

    def __call__(self, content: Any) -> Any:
        self.heard.append([message.WhichOneof("body") for message in self._link.said])
        return content


def test_the_agent_hears_of_it_before_anything_is_copied_from_a_card(tmp_path: Path) -> None:
    """It gives a second for that word and ten behind it, and the copy takes a second for each GB."""
    one, link = survivor(tmp_path)
    fetch = Fetched(link)
    manifest = one.save(CONTENT, FILES, b"generators", fetch=fetch)
    assert manifest is not None
    assert fetch.heard
    assert all(heard == ["keeping"] for heard in fetch.heard)
    verify(tmp_path / manifest.name, manifest)


def test_one_rank_of_a_node_copies_it_from_its_card(tmp_path: Path) -> None:
    """The others would each ask the host for memory of the whole state."""
    survivor(tmp_path)[0].save(CONTENT, FILES, b"")
    other, link = survivor(tmp_path, 3, 1)
    fetch = Fetched(link)
    assert other.save(CONTENT, FILES, b"", fetch=fetch) is None
    assert not fetch.heard


@pytest.mark.parametrize("there", [0, 9, 13])
def test_nothing_is_copied_from_a_card_where_the_copy_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int
) -> None:
    """The file takes 6 MiB, and its copy 8: torch rounds a pinned block up to a power of two."""
    monkeypatch.setattr(tiers, "AHEAD_BYTES", GROWS_BYTES)
    monkeypatch.setattr(tiers, "FEW_BYTES", 0)
    monkeypatch.setattr(tiers, "available_bytes", lambda: RESERVE_BYTES + (there << 20))
    one, link = survivor(tmp_path, budget=1 << 40)
    one.may_keep(True)
    weight = torch.ones(3 << 19)
    fetch, files = Fetched(link), {"model.pt": {"weight": weight, "tied": weight[:5]}}
    for _ in range(3):
        with pytest.raises(OSError, match="of memory can be had") as refused:
            one.save(CONTENT, files, b"", fetch=fetch)
        assert refused.value.errno == errno.ENOSPC
        assert not os.listdir(tmp_path)
    assert not fetch.heard
    assert len(link.of("keeping")) == 1
    there = 15
    assert one.save(CONTENT, files, b"", fetch=fetch) is not None


def test_spares_give_their_room_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "AHEAD_BYTES", GROWS_BYTES)
    directory, old = tmp_path / "run-0001", tmp_path / "run-0001" / "step-1.e4.1"
    old.mkdir(parents=True)
    (old / "other.pt").write_bytes(bytes(1 << 20))
    keep_spares(directory, old, ["other.pt"])
    old.rmdir()
    one, _ = survivor(directory, budget=(2 << 20) + GROWS_BYTES)
    manifest = one.save(CONTENT, {"model.pt": bytes(2 << 20)}, b"")
    assert manifest is not None
    assert sorted(os.listdir(directory)) == [manifest.name, f"{manifest.name}.parts"]


def test_the_agent_hears_with_each_progress_whether_it_may() -> None:
    one, _ = survivor(Path("/nowhere"))
    reports: Any = one._reports
    assert [reports._progress(1, 0.1).progress.may_keep] == [False]
    one.may_keep(True)
    assert reports._progress(2, 0.1).progress.may_keep
