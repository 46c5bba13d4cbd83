"""One rank alone meets an error beside the script's writing: all hear of it, nobody waits, and a lack is no mistake."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic import background
from dalsegno.elastic.checkpoint import SHARDED, CheckpointName, CheckpointStore, Manifest, Shape
from dalsegno.elastic.rank.identity import ResumeOrder
from dalsegno.elastic.saving import background_save, resuming, saving, tiers
from dalsegno.elastic.saving.background_save import Flight
from dalsegno.elastic.saving.outcomes import SaveError
from dalsegno.elastic.saving.resuming import handed_out, newest
from dalsegno.elastic.saving.saving import Saver
from dalsegno.elastic.saving.saving_reports import Count
from dalsegno.elastic.saving.sealing import Sealing
from tests.support.workers.threads import Gone, Threads, together
from tests.unit.elastic.saving.test_memory import Job, content, files_of, writes
from tests.unit.elastic.saving.test_resuming import write

pytestmark = pytest.mark.timeout(60)

LACKS = [MemoryError("no memory"), RuntimeError("can't start new thread"), OSError("the disk is gone")]
HERE = threading.local()


def on_rank(rank: int, original: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    """The function, which raises on this rank."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if getattr(HERE, "rank", None) == rank:
            raise error
        return original(*args, **kwargs)

    return call


def saved(saver: Saver, group: Threads) -> Manifest | None:
    HERE.rank = group.rank
    return saver.save(content(), writes(group.rank), create_directory=True, drain=False)


def held(saver: Saver, group: Threads) -> Any:
    """Saves in memory, beside the training."""
    saver.begin(content(), background(lambda: files_of(group.rank)), lambda: None, drain=False, in_memory=True)
    return saver.settle()


# What raises, and on which rank.
PLACES = [
    (saving, "list_files", 0),
    (saving, "checksums", 1),
    (tiers.Disk, "seal", 0),
    (CheckpointStore, "next_name", 0),
]


@pytest.mark.parametrize("error", LACKS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(("owner", "name", "rank"), PLACES, ids=[name for _, name, _ in PLACES])
def test_a_save_fails_for_all_and_the_next_one_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, rank: int, error: Exception
) -> None:
    """A lack of memory, threads or disk of one rank costs this save, and not a process."""
    job = Job(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, on_rank(rank, getattr(owner, name), error))
        assert job.run(saved) == [None, None]
    (failed, *_) = job.agents[0].of("save_failed")
    assert str(error) in failed.reason
    assert all(isinstance(one, Manifest) for one in job.run(saved))


@pytest.mark.parametrize(("owner", "name", "rank"), PLACES, ids=[name for _, name, _ in PLACES])
def test_a_mistake_ends_all_with_the_same_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, rank: int
) -> None:
    """What every save would meet again is no warning: the whole run would have no checkpoint."""
    monkeypatch.setattr(owner, name, on_rank(rank, getattr(owner, name), TypeError("no such thing")))
    first, second = Job(tmp_path, 1, 2).run(saved)
    assert isinstance(first, SaveError)
    assert "TypeError: no such thing" in str(first)
    assert str(first) == str(second)


def test_what_rank_0_never_sees_costs_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount is gone from one node, which writes where it was. Rank 0 looked for ever, and the others waited."""
    monkeypatch.setattr(background_save, "OUT_OF_SIGHT_SECONDS", 0.3)
    job, read = Job(tmp_path, 1, 2), background_save._read_part

    def beside(saver: Saver, group: Threads) -> Any:
        saver.begin(content(), background(lambda: files_of(group.rank)), lambda: None, drain=False)
        return saver.settle()

    def unseen(path: Path) -> Any:
        return None if path.name == "rank-1.json" else read(path)

    with monkeypatch.context() as patch:
        patch.setattr(background_save, "_read_part", unseen)
        assert job.run(beside) == [None, None]
    (failed, *_) = job.agents[0].of("save_failed")
    assert "rank 1 has written its files, and rank 0 has not seen parts/rank-1.json within 0.3 s" in failed.reason
    first, second = job.run(beside)
    assert first == second
    assert first is not None


def test_one_look_at_the_parts_is_for_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number is that of the ranks: a look for each took 41 s with 8,000 of them."""
    looks = 0
    listdir = os.listdir

    def counted(path: Path) -> list[str]:
        nonlocal looks
        looks += Path(path).name == "parts"
        return listdir(path)

    monkeypatch.setattr(os, "listdir", counted)
    (tmp_path / "parts").mkdir()
    for rank in range(1, 100):
        (tmp_path / f"parts/rank-{rank}.json").write_bytes(b'{"files": []}\n')
    flight = Flight(tmp_path, 0, 100, {}, lambda: None, lambda entries: "digest", Count(0), 0.0, nullcontext())
    assert flight.written() is None
    assert flight.sealed() == ("digest", None)
    assert 1 <= looks < 10


def test_a_part_that_comes_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as another one came just now; and while ranks still write nobody counts."""
    monkeypatch.setattr(background_save, "OUT_OF_SIGHT_SECONDS", 0.8)
    monkeypatch.setattr(background_save, "LAST_LOOK_SECONDS", 0.05)
    flight = Flight(tmp_path, 0, 3, {}, lambda: None, lambda entries: "digest", Count(0), 0.0, nullcontext())
    assert flight.written() is None
    assert not flight.wait(1.0)
    for rank in (1, 2):
        late = threading.Timer(0.5 * rank, (tmp_path / f"parts/rank-{rank}.json").write_bytes, [b'{"files": []}\n'])
        late.start()
    assert flight.sealed() == ("digest", None)


def test_a_part_out_of_sight_is_given_up_before_the_ranks_count_as_stuck(tmp_path: Path) -> None:
    """Under an agent, whose patience with a disk may be shorter. Of many lists one is named."""
    flight = Flight(tmp_path, 0, 4, {}, lambda: None, lambda entries: "digest", Count(0), 0.3, nullcontext())
    assert flight.written() is None
    digest, error = flight.sealed()
    assert digest == ""
    assert isinstance(error, TimeoutError)
    assert "rank 0 has not seen parts/rank-1.json within 0.3 s, nor the lists of 2 more" in str(error)


def test_an_interrupt_is_no_problem_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends its rank, and others find it gone."""
    monkeypatch.setattr(saving, "checksums", on_rank(1, saving.checksums, KeyboardInterrupt()))
    first, second = Job(tmp_path, 1, 2).run(saved)
    assert isinstance(first, Gone)
    assert isinstance(second, KeyboardInterrupt)


@pytest.mark.parametrize("error", LACKS, ids=lambda error: type(error).__name__)
def test_one_node_cannot_seal_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Its thread says so: all give the step up, and the next one is held."""
    job = Job(tmp_path, 2)
    seal = tiers.Memory.seal

    def fails(self: Any, *args: Any) -> None:
        if self.store.run_dir == job.memory(1):
            raise error
        seal(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(tiers.Memory, "seal", fails)
        assert job.run(held) == [None, None]
    assert f"{error} (rank 1)" in caplog.text
    first, second = job.run(held)
    assert first == second
    assert first is not None


@pytest.mark.parametrize("error", LACKS, ids=lambda error: type(error).__name__)
def test_what_is_resumed_from_is_read_by_all_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Others hear what one rank met as it read, and do not wait for it."""
    source = write(tmp_path, CheckpointName(4, 2, 1), shape=Shape(2, "ddp", True))

    def one(group: Threads) -> Any:
        HERE.rank = group.rank
        return handed_out(ResumeOrder(source.ref, SHARDED, None), tmp_path, group)

    monkeypatch.setattr(resuming, "verify_files", on_rank(1, resuming.verify_files, error))
    for met in together(2, one):
        assert isinstance(met, OSError)
        assert str(error) in str(met)


def test_the_newest_is_looked_for_by_all_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 looks, and the others hear what it met."""
    write(tmp_path, CheckpointName(4, 2, 1), shape=Shape(2, "ddp", True))

    def one(group: Threads) -> Any:
        HERE.rank = group.rank
        return newest(CheckpointStore(tmp_path), group, 2)

    monkeypatch.setattr(resuming, "inspect", on_rank(0, resuming.inspect, MemoryError("no memory")))
    assert [str(met) for met in together(2, one)] == ["MemoryError: no memory"] * 2


def test_who_did_not_hear_the_end_tells_what_it_has_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 says that all have sealed. A rank whose store was gone by then need not read its own files again."""
    job, heard = Job(tmp_path, 2), Sealing._heard

    def hears(self: Any, name: str) -> Any:
        if self._identity.rank == 1 and name == self._end:
            raise RuntimeError("the store is gone")
        return heard(self, name)

    monkeypatch.setattr(Sealing, "_heard", hears)
    monkeypatch.setattr(Manifest, "read", lambda path: pytest.fail("it is read"))
    first, second = job.run(held)
    assert first == second
    assert [agent.of("sealed")[0].name for agent in job.agents] == ["step-5.e3.1"] * 2
