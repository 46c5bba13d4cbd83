"""What is on this node of memory checkpoints: what counts, and what is kept."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from dalsegno.agent.memory.holdings import Holdings
from dalsegno.agent.memory.space import Space
from dalsegno.elastic.checkpoint import MANIFEST, CheckpointDamaged, Manifest, spares
from dalsegno.elastic.checkpoint.parts import write_part
from tests.support.checkpoints.memory import RUN, SMALL, manifest_of, write_own


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / RUN
    path.mkdir()
    return path


def put(holdings: Holdings, memory: Path, name: str, rank: int = 0) -> Manifest:
    """A step whose part of this node is here."""
    manifest = manifest_of(name, SMALL)
    write_own(memory, manifest, rank, SMALL[rank])
    holdings.add_own(RUN, name, manifest.digest, rank)
    return manifest


def names(holdings: Holdings) -> list[str]:
    return [held.checkpoint.ref.name for held in holdings.all()]


def test_an_own_part_counts_at_once(tmp_path: Path, memory: Path) -> None:
    """As its manifest describes it, and said to be in memory."""
    holdings = Holdings(tmp_path)
    manifest = put(holdings, memory, "step-10.e1.1", 1)
    (held,) = holdings.all()
    assert (held.run_id, held.parts, held.copies) == (RUN, (1,), ())
    assert held.checkpoint.in_memory
    held.checkpoint.in_memory = False
    assert held.checkpoint == manifest.to_proto()
    part = holdings.part(RUN, manifest.name, manifest.digest, 1)
    assert part is not None
    assert {entry.path for entry in part.entries} == set(SMALL[1])
    assert holdings.bytes() == sum(map(len, SMALL[1].values()))
    assert holdings.missing(RUN, manifest.name) == sorted({*SMALL[0], *SMALL[2]})
    assert not holdings.has(RUN, manifest.name, manifest.digest, 0)
    assert not holdings.has(RUN, manifest.name, "0" * 64, 1)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda step, parts: (parts / "0.json").unlink(),
        lambda step, parts: (parts / "0.json").write_text("[]"),
        lambda step, parts: (parts / "0.json").write_text('{"files": [1]}'),
        lambda step, parts: (parts / "0.json").write_text('{"files": ["../../etc/passwd"]}'),
        lambda step, parts: (parts / "0.json").write_text(json.dumps({"files": ["empty", "empty"]})),
        lambda step, parts: (step / MANIFEST).unlink(),
        lambda step, parts: (step / MANIFEST).write_bytes(manifest_of(step.name, {0: {"a": b""}}).to_bytes()),
    ],
    ids=["no part", "no object", "no names", "outside", "twice", "no manifest", "another manifest"],
)
def test_what_ranks_left_unfinished_does_not_count(tmp_path: Path, memory: Path, spoil: object) -> None:
    manifest = manifest_of("step-10.e1.1", SMALL)
    write_own(memory, manifest, 0, SMALL[0])
    spoil(memory / manifest.name, memory / f"{manifest.name}.parts")  # type: ignore[operator]
    holdings = Holdings(tmp_path)
    with pytest.raises((CheckpointDamaged, OSError, ValueError)):
        holdings.add_own(RUN, manifest.name, manifest.digest, 0)
    assert holdings.all() == []


def test_the_newest_of_the_epoch_and_what_is_named_are_kept(tmp_path: Path, memory: Path) -> None:
    """What was deleted is told, without parts."""
    holdings = Holdings(tmp_path)
    steps = ["step-4.e1.1", "step-8.e1.1", "step-10.e2.1", "step-12.e2.1", "step-14.e2.1", "step-16.e3.1"]
    digests = {name: put(holdings, memory, name).digest for name in steps}
    (memory / "step-6.e1.1").mkdir()  # given up, of a closed epoch
    (memory / "step-11.e2.1").mkdir()  # older than what is kept
    (memory / "step-18.e2.1.parts").mkdir()  # being written
    (memory / "not-a-checkpoint").mkdir()
    gone = holdings.keep(RUN, 2, frozenset({digests["step-4.e1.1"]}), 2)
    assert [(held.checkpoint.ref.name, held.parts) for held in gone] == [("step-10.e2.1", ()), ("step-8.e1.1", ())]
    assert names(holdings) == ["step-4.e1.1", "step-12.e2.1", "step-14.e2.1", "step-16.e3.1"]
    kept = {*names(holdings), *(f"{name}.parts" for name in names(holdings))}
    assert set(os.listdir(memory)) == kept | {"step-18.e2.1.parts", "not-a-checkpoint", spares.FOLDER}
    assert holdings.keep("another", 2, frozenset(), 2) == []


def test_the_next_step_is_written_over_the_last_that_was_replaced(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step's files, of the epoch that is open; they count as memory that is used, and go where there is no room."""
    monkeypatch.setattr(spares, "LEAST_BYTES", 1000)
    holdings, folder = Holdings(tmp_path), memory / spares.FOLDER
    size = sum(map(len, SMALL[0].values()))
    large = len(SMALL[0]["rank0.pt"])
    for number in range(1, 5):
        put(holdings, memory, f"step-{number}.e1.1")
    holdings.keep(RUN, 1, frozenset(), 2)
    assert os.listdir(folder) == ["=rank0.pt"]
    assert holdings.bytes() == 2 * size + large
    descriptor = spares.take_spare(memory, "rank0.pt", memory / "taken")
    assert descriptor is not None
    os.close(descriptor)
    assert holdings.bytes() == 2 * size
    put(holdings, memory, "step-5.e1.1")
    holdings.keep(RUN, 1, frozenset(), 2)
    holdings.keep(RUN, 1, frozenset(), 2)
    assert os.listdir(folder) == ["=rank0.pt"]
    with Space(2 * size + 1, holdings.bytes, lambda: 1 << 40, lambda: 1 << 40, holdings.clear_spares).promised(1, "it"):
        assert not folder.exists()


def test_a_world_that_only_drains_to_memory_has_no_spares(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saves there once: nothing is held back for that. Its files may be others than those of the world before."""
    monkeypatch.setattr(spares, "LEAST_BYTES", 1000)
    holdings, folder = Holdings(tmp_path), memory / spares.FOLDER
    for number in range(1, 4):
        put(holdings, memory, f"step-{number}.e1.1")
    holdings.keep(RUN, 1, frozenset(), 2)
    assert os.listdir(folder)
    resumed = frozenset({holdings.all()[-1].checkpoint.ref.digest})
    holdings.keep(RUN, 2, resumed, 2)
    assert names(holdings) == ["step-3.e1.1"]
    assert not folder.exists()
    holdings.keep(RUN, 2, frozenset(), 2)
    assert names(holdings) == []
    assert not folder.exists()


def test_a_world_that_saves_there_goes_on_over_what_it_began_with(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New files would cost their pages anew, just behind a change."""
    monkeypatch.setattr(spares, "LEAST_BYTES", 1000)
    holdings, folder = Holdings(tmp_path), memory / spares.FOLDER
    begun = put(holdings, memory, "step-3.e1.1")
    inode = (memory / "step-3.e1.1" / "rank0.pt").stat().st_ino
    holdings.keep(RUN, 2, frozenset({begun.digest}), 2)
    put(holdings, memory, "step-4.e2.1")
    holdings.keep(RUN, 2, frozenset(), 2)
    assert names(holdings) == ["step-4.e2.1"]
    assert (folder / "=rank0.pt").stat().st_ino == inode


def test_nothing_at_work_and_nothing_that_may_be_written_is_deleted(tmp_path: Path, memory: Path) -> None:
    """A step that is being sent, copied or received stays; of the epoch that is open all that was not sealed."""
    holdings = Holdings(tmp_path)
    put(holdings, memory, "step-4.e1.1")
    (memory / "step-6.e2.1").mkdir()
    with holdings.at_work(RUN, "step-4.e1.1"):
        assert holdings.keep(RUN, 2, frozenset(), 0) == []
    assert [held.checkpoint.step for held in holdings.keep(RUN, 2, frozenset(), 0)] == [4]
    assert os.listdir(memory) == ["step-6.e2.1"]


def test_a_part_may_come_while_its_step_is_being_deleted(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting ten thousand files takes long; it must not take those of the new one."""
    holdings = Holdings(tmp_path)
    put(holdings, memory, "step-4.e1.1", 0)
    delete = shutil.rmtree

    def slow(path: Path, **options: bool) -> None:
        if not holdings.all():
            put(holdings, memory, "step-4.e1.1", 1)
        delete(path, **options)

    monkeypatch.setattr(shutil, "rmtree", slow)
    assert [held.parts for held in holdings.keep(RUN, 2, frozenset(), 2)] == [()]
    assert [held.parts for held in holdings.all()] == [(1,)]
    assert {path.name for path in memory.iterdir()} == {"step-4.e1.1", "step-4.e1.1.parts"}
    assert (memory / "step-4.e1.1" / "rank1.pt").read_bytes() == SMALL[1]["rank1.pt"]


def test_a_part_that_proved_bad_is_not_here_any_more(tmp_path: Path, memory: Path) -> None:
    """Neither for this agent nor for a rank that looks which parts there are."""
    holdings = Holdings(tmp_path)
    manifest = put(holdings, memory, "step-4.e1.1")
    part = holdings.part(RUN, manifest.name, manifest.digest, 0)
    assert part is not None
    assert holdings.drop_part(part).parts == ()
    assert holdings.all() == []
    assert os.listdir(memory / f"{manifest.name}.parts") == []
    assert holdings.drop_part(part).parts == ()


def test_a_manifest_is_put_once(tmp_path: Path, memory: Path) -> None:
    """The same one twice is fine, another is refused, and what is no manifest is replaced."""
    holdings = Holdings(tmp_path)
    manifest = put(holdings, memory, "step-4.e1.1")
    place = holdings.place(RUN, manifest.name)
    place.publish_manifest(manifest.to_bytes())
    with pytest.raises(CheckpointDamaged, match="another one"):
        place.publish_manifest(manifest_of(manifest.name, {0: SMALL[0]}).to_bytes())
    flipped = bytearray(manifest.to_bytes())
    flipped[100] ^= 4
    for spoilt in (b"", bytes(flipped)):
        (place.files / MANIFEST).write_bytes(spoilt)
        place.publish_manifest(manifest.to_bytes())
        assert (place.files / MANIFEST).read_bytes() == manifest.to_bytes()
    assert os.listdir(place.parts) == ["0.json"]


def test_only_sharded_checkpoints_are_in_memory(tmp_path: Path) -> None:
    for name in ("step-4.e1.1.universal.1", "../step-4.e1.1", "step-4"):
        with pytest.raises(ValueError, match=r"not a checkpoint name|later form"):
            Holdings(tmp_path).place(RUN, name)


def test_what_a_rank_has_saved_alone_is_all_of_it(tmp_path: Path, memory: Path) -> None:
    """The other nodes' parts have no files, and are here as well."""
    holdings, name = Holdings(tmp_path), "step-10.e1.1001"
    files = {path: data for part in SMALL.values() for path, data in part.items()}
    manifest = manifest_of(name, {1: files})
    write_own(memory, manifest, 1, files)
    for other in (0, 2):
        write_part(memory / name, other, ())
    holdings.add_own(RUN, name, manifest.digest, 1)
    (held,) = holdings.all()
    assert held.parts == (0, 1, 2)
    assert not holdings.missing(RUN, name)
    empty = holdings.part(RUN, name, manifest.digest, 2)
    assert empty is not None
    assert not empty.entries
