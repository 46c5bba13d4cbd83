"""Which of a script's checkpoints is the best, and that the run's manifests name it."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Container
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.agent.storage import best_watch
from dalsegno.agent.storage.best_save import BestRule, best_step, has_own_number
from dalsegno.elastic.checkpoint import Manifest, Tracked
from tests.unit.agent.storage.test_save_dir import Run, runs, save

__all__ = ["runs"]  # a fixture

LEAST = Tracked("loss", "min")
RULE = BestRule(LEAST, "metrics.jsonl")


@pytest.mark.parametrize(
    ("pairs", "tracked", "standing", "best"),
    [
        ([], LEAST, None, None),
        ([], LEAST, (5, 0.5), (5, 0.5)),
        ([(10, 0.5), (20, 0.4), (30, 0.6)], LEAST, None, (20, 0.4)),
        ([(10, 0.5), (20, 0.4), (30, 0.6)], Tracked("loss", "max"), None, (30, 0.6)),
        ([(30, 0.4), (10, 0.4)], LEAST, None, (10, 0.4)),
        ([(10, 0.5), (20, 0.45)], Tracked("loss", "min", 0.1), None, (10, 0.5)),
        ([(10, 0.5), (20, 0.35)], Tracked("loss", "min", 0.1), None, (20, 0.35)),
        ([(20, 0.45), (30, 0.41)], Tracked("loss", "min", 0.1), (10, 0.5), (10, 0.5)),
        ([(10, math.nan), (20, math.inf), (30, 9.0)], LEAST, None, (30, 9.0)),
        ([(10, math.nan)], LEAST, None, None),
        ([(10, 0.9), (20, 0.6)], LEAST, (10, 0.5), (20, 0.6)),
    ],
)
def test_which_is_best(
    pairs: list[tuple[int, float]], tracked: Tracked, standing: tuple[int, float] | None, best: object
) -> None:
    """By the mode, by more than `min_delta`; a value that came again counts, and what is no number does not."""
    assert best_step(pairs, tracked, standing) == best


@given(st.lists(st.tuples(st.integers(0, 50), st.floats(-9, 9)), unique_by=lambda pair: pair[0]), st.floats(0, 3))
def test_asked_again_it_says_the_same(pairs: list[tuple[int, float]], least: float) -> None:
    """Whichever of the others are gone meanwhile, and in whatever order they come."""
    tracked = Tracked("loss", "min", least)
    best = best_step(pairs, tracked)
    assert best_step(reversed(pairs), tracked) == best
    for gone in range(len(pairs)):
        assert best_step(pairs[gone:], tracked, best) == best


def test_a_step_of_ours_is_none_of_the_scripts() -> None:
    """Where a name has no number, steps are counted: 3 is no step of the metrics file."""
    assert has_own_number(300, {"checkpoint-#": 300, "best": None})
    assert not has_own_number(3, {"model": None})


def noted(run: Run, step: int, loss: float) -> None:
    with open(run.out / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "loss": loss}) + "\n")


def test_manifests_name_the_best(runs: Callable[..., Run]) -> None:
    """Its own value, that of one that came late, and the next epoch's go on from there. One that is gone is none."""
    run = runs(best=RULE)
    run.next()
    noted(run, 10, 0.5)
    save(run.out / "step_10.pt", step=10)
    first = run.sealed()
    assert first.metric == 0.5
    assert first.best is not None
    assert (first.best.name, first.best.metric, first.best.mode, first.best.value) == (first.name, "loss", "min", 0.5)
    save(run.out / "step_20.pt", step=20)
    second = run.sealed()
    assert (second.metric, second.best) == (None, first.best)
    noted(run, 20, 0.4)
    noted(run, 25, 0.1)  # no checkpoint has that step
    save(run.out / "step_30.pt", step=30)
    third = run.sealed()
    assert third.best is not None
    assert (third.best.name, third.best.value) == (second.name, 0.4)
    noted(run, 30, 0.3)  # after its adoption, and no other one in this epoch
    run.next()
    save(run.out / "step_40.pt", step=40)
    noted(run, 40, 0.9)
    fourth = run.sealed()
    assert fourth.best is not None
    assert (fourth.best.name, fourth.best.value) == (third.name, 0.3)
    shutil.rmtree(run.directory / third.name)
    save(run.out / "step_50.pt", step=50)
    fifth = run.sealed()
    assert fifth.best is not None
    assert (fifth.best.name, fifth.best.value) == (second.name, 0.4), "the best of what is there"
    run.taken.close()


def test_one_file_for_all_epochs(runs: Callable[..., Run], tmp_path: Path) -> None:
    """Where its path is absolute, a value of an epoch that was lost is none of the step that is made again."""
    file = tmp_path / "all.jsonl"
    file.write_text('{"step": 10, "loss": 0.5}\n{"step": 20, "loss": 0.1}\n')
    run = runs(best=BestRule(LEAST, str(file)))
    run.next()
    save(run.out / "step_10.pt", step=10)
    assert run.sealed().best is None, "it was noted before the run began"
    with open(file, "a", encoding="utf-8") as more:
        more.write('{"step": 10, "loss": 0.5}\n{"step": 20, "loss": 0.1}\n')
    run.next()
    save(run.out / "step_20.pt", step=20)
    manifest = run.sealed()
    assert manifest.metric is None
    assert manifest.best is not None
    assert manifest.best.value == 0.5
    run.taken.close()


class StaleManifests:
    """In the place of `Manifest`: some reads fail, as where an NFS server was started again; or one directory's all."""

    def __init__(self, fails: Container[int], directory: str = "") -> None:
        self._fails, self._directory, self._reads = fails, directory, itertools.count()

    def read(self, directory: Path) -> Manifest:
        if next(self._reads) in self._fails or directory.name == self._directory:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(directory))
        return Manifest.read(directory)


@pytest.mark.parametrize("late", [False, True])
def test_a_stale_read_makes_nobody_forget_the_best(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Else the next one counted as the best, however bad it was, and the master deleted the real one in time.

    Neither what the resume point names nor, if `late`, what has a value since then.
    """
    run = runs(best=RULE)
    run.next()
    if not late:
        noted(run, 10, 0.5)
    save(run.out / "step_10.pt", step=10)
    first = run.sealed()
    if late:
        noted(run, 10, 0.5)
    monkeypatch.setattr(best_watch, "Manifest", StaleManifests([0, 1, 2]))
    run.next()
    noted(run, 20, 0.9)
    save(run.out / "step_20.pt", step=20)
    second = run.sealed()
    assert second.metric == 0.9
    assert second.best is not None
    assert (second.best.name, second.best.value) == (first.name, 0.5)
    run.taken.close()


def test_a_best_that_stays_unknown_is_said_and_holds_up_nothing(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume point that nobody can read any more costs the best one, not what is saved from then on."""
    monkeypatch.setattr(best_watch, "_PATIENCE_SECONDS", 0.3)
    run = runs(best=RULE)
    run.next()
    noted(run, 10, 0.5)
    save(run.out / "step_10.pt", step=10)
    first = run.sealed()
    monkeypatch.setattr(best_watch, "Manifest", StaleManifests(range(1_000_000)))
    run.next()
    noted(run, 20, 0.9)
    save(run.out / "step_20.pt", step=20)
    run.taken.settle(20)
    assert f"which checkpoint until {first.name} is the best (" in run.said()
    assert run.sealed().step == 20
    run.quiet()
    run.taken.close()


def test_an_earlier_one_that_cannot_be_read_holds_up_nothing(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bad block in one old manifest, for good. What the resume point names as the best is known."""
    monkeypatch.setattr(best_watch, "_PATIENCE_SECONDS", 60.0)
    run = runs(best=RULE)
    run.next()
    noted(run, 10, 0.5)
    save(run.out / "step_10.pt", step=10)
    first = run.sealed()
    noted(run, 20, 0.9)
    save(run.out / "step_20.pt", step=20)
    assert run.sealed().step == 20
    monkeypatch.setattr(best_watch, "Manifest", StaleManifests((), first.name))
    run.next()
    noted(run, 30, 0.7)
    save(run.out / "step_30.pt", step=30)
    third = run.sealed()
    assert third.best is not None
    assert (third.best.name, third.best.value) == (first.name, 0.5)
    run.quiet()
    run.taken.close()


def test_a_save_of_stopped_workers_does_not_wait_for_the_best(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that saves only at its notice would lose that: the agent waits a few seconds for what was saved last."""
    monkeypatch.setattr(best_watch, "_PATIENCE_SECONDS", 60.0)
    run = runs(best=RULE)
    run.next()
    noted(run, 10, 0.5)
    save(run.out / "step_10.pt", step=10)
    first = run.sealed()
    monkeypatch.setattr(best_watch, "Manifest", StaleManifests(range(1_000_000)))
    run.next()
    noted(run, 20, 0.9)
    save(run.out / "step_20.pt", step=20)
    run.taken.interrupt()
    run.taken.settle(5)
    assert not run.heard.empty()
    assert f"which checkpoint until {first.name} is the best (" in run.said()
    assert run.sealed().step == 20
    run.taken.close()
