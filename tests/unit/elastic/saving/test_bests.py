"""Which checkpoint is the best while better ones are on their way to the disk, and what the last save waits for."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic.checkpoint import Best, CheckpointStore, Tracked, seal
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.rank.identity import Identity
from dalsegno.elastic.saving.bests import Bests, Sight
from dalsegno.elastic.training.saves import Saves
from tests.unit.elastic.checkpoint.test_best import manifest_for

pytestmark = pytest.mark.timeout(60)


def name(step: int) -> str:
    return f"step-{step}.e3.1"


def best(step: int, value: float) -> Best:
    return Best(name(step), "loss", "min", value)


def on_disk(directory: Path, step: int) -> None:
    """As the agents bring it there."""
    path = directory / name(step)
    path.mkdir(parents=True)
    (path / "model.pt").write_bytes(b"weights")
    seal(path, manifest_for(path))


def made(directory: Path, *known: Best | None, in_memory: str = "") -> Bests:
    bests = Bests(Sight(CheckpointStore(directory)), *(known or (None,)), in_memory=in_memory)
    bests.tracked = Tracked("loss")
    return bests


def settled(bests: Bests) -> Bests:
    """Once the thread has looked."""
    bests.look()
    for thread in threading.enumerate():
        if thread.name == "dalsegno-sight":
            thread.join(20.0)
    return bests


def saved(bests: Bests, step: int, metric: float | None, *, awaits_disk: bool = True) -> tuple[str, str]:
    """Saves a step; returns what its manifest says: the names of best and candidate."""
    said, candidate = bests.as_of(name(step), metric)
    bests.note(name(step), said, awaits_disk=awaits_disk)
    return "" if said is None else said.name, "" if candidate is None else candidate.name


def test_what_is_in_memory_is_named_as_the_best_only_once_it_is_on_the_disk(tmp_path: Path) -> None:
    bests = made(tmp_path, best(1, 3.0))
    assert saved(bests, 2, 2.0) == (name(2), "")
    assert bests.best == best(1, 3.0)
    assert saved(bests, 3, None) == (name(1), name(2))
    assert not bests.improves(2.5, None), "it is no better than what is on its way"
    on_disk(tmp_path, 2)
    settled(bests)
    assert saved(bests, 4, None) == (name(2), "")
    assert bests.best == best(2, 2.0)


def test_a_candidate_that_never_comes_leaves_the_best_of_before(tmp_path: Path) -> None:
    """Whoever goes on from a checkpoint that names it has the one before, and is held up by nothing."""
    bests = made(tmp_path, best(1, 3.0), best(2, 2.0))
    settled(bests)
    assert bests.best == best(1, 3.0)
    assert bests.improves(2.5, None), "what may be lost holds nothing up"
    assert saved(bests, 3, None) == (name(1), name(2))
    assert saved(bests, 4, 2.5) == (name(4), name(2))
    on_disk(tmp_path, 4)
    settled(bests)
    assert saved(bests, 5, None) == (name(4), name(2))


def test_a_candidate_of_the_resume_point_that_came_late_is_the_best(tmp_path: Path) -> None:
    on_disk(tmp_path, 2)
    bests = settled(made(tmp_path, best(1, 3.0), best(2, 2.0)))
    assert saved(bests, 3, 2.5) == (name(3), name(2))
    assert saved(bests, 4, None) == (name(2), "")


def test_the_better_one_of_two_candidates_counts(tmp_path: Path) -> None:
    bests = made(tmp_path)
    for step, metric in ((2, 2.0), (3, 1.0)):
        saved(bests, step, metric)
    assert saved(bests, 4, None) == ("", name(3))
    on_disk(tmp_path, 2)
    settled(bests)
    assert saved(bests, 5, None) == (name(2), name(3))
    on_disk(tmp_path, 3)
    settled(bests)
    assert saved(bests, 6, None) == (name(3), "")


def test_a_step_that_is_saved_again_on_the_disk_replaces_its_candidate(tmp_path: Path) -> None:
    """The last step is the ranks' own to save: it is the best one then, and nobody waits for its copy in memory."""
    bests = made(tmp_path, best(1, 3.0))
    saved(bests, 2, 2.0)
    assert bests.awaited(2) == ""
    assert bests.awaited(9) == name(2)
    said, candidate = bests.as_of("step-2.e3.2", 2.0)
    assert (said, candidate) == (Best("step-2.e3.2", "loss", "min", 2.0), None)


def test_a_resume_point_in_memory_that_is_the_best_is_waited_for(tmp_path: Path) -> None:
    bests = made(tmp_path, best(2, 2.0), in_memory=name(2))
    assert bests.awaited(9) == name(2)
    assert made(tmp_path, best(1, 2.0), in_memory=name(2)).awaited(9) == ""


def waiting(directory: Path) -> Saves:
    found = Saves(Identity(run_dir=directory, epoch=3), Solo(), None, None, 0)
    assert found.saver is not None
    found.saver.bests.tracked = Tracked("loss")
    saved(found.saver.bests, 2, 2.0)
    return found


@pytest.mark.slow
def test_the_last_save_waits_until_the_best_is_on_the_disk(tmp_path: Path) -> None:
    found, looks = waiting(tmp_path), list[int]()

    def busy() -> None:
        looks.append(1)
        if len(looks) == 2:
            on_disk(tmp_path, 2)

    assert found.await_best(9, busy, 30.0) == ""
    assert found.saver is not None
    assert len(looks) >= 2
    assert saved(found.saver.bests, 9, None, awaits_disk=False) == (name(2), "")


@pytest.mark.slow
def test_the_last_save_waits_no_longer_than_it_says(tmp_path: Path) -> None:
    found: Any = waiting(tmp_path)
    assert found.await_best(9, lambda: None, 0.3) == name(2)
    assert saved(found.saver.bests, 9, None, awaits_disk=False) == ("", name(2))
