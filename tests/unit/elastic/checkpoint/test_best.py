"""The best checkpoint: what makes one, who remembers it, and that nobody deletes it; and what may be deleted at all."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dalsegno.elastic.checkpoint import (
    SHARDED,
    Best,
    CheckpointName,
    CheckpointStore,
    Manifest,
    Position,
    Ref,
    Shape,
    Tracked,
    lineage,
    retirable,
    seal,
)
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.rank.identity import Identity
from dalsegno.elastic.saving.resuming import ResumePoint, newest
from dalsegno.elastic.saving.saving import Content, Saver
from dalsegno.elastic.training import entry
from dalsegno.elastic.training.session import BareSession
from tests.unit.elastic.checkpoint.test_checkpoint import manifest_for

LOSS = Best("step-4.e1.1", "loss", "min", 1.0)


def made(name: str, resumed_from: Manifest | None = None, best: str = "", source: Manifest | None = None) -> Manifest:
    parsed = CheckpointName.parse(name)
    return Manifest(
        name=name,
        job_id="job",
        run_id="run-0001",
        step=parsed.step,
        epoch=parsed.epoch,
        generation=1,
        form=parsed.form,
        shape=Shape(1, "ddp", True),
        position=Position(),
        order=None,
        source=None if source is None else source.ref,
        resumed_from=None if resumed_from is None else resumed_from.ref,
        min_nodes=1,
        max_nodes=1,
        metric=None,
        files=(),
        best=replace(LOSS, name=best) if best else None,
    )


@pytest.mark.parametrize(
    ("mode", "delta", "value", "better"),
    [
        ("min", 0.0, 0.999, True),
        ("min", 0.0, 1.0, False),
        ("min", 0.1, 0.95, False),
        ("min", 0.1, 0.85, True),
        ("max", 0.0, 1.001, True),
        ("max", 0.0, 1.0, False),
        ("max", 0.5, 1.5, False),
        ("max", 0.5, 1.51, True),
        ("min", 0.0, float("nan"), False),
        ("min", 0.0, float("-inf"), False),
        ("min", 0.0, None, False),
    ],
)
def test_only_more_than_min_delta_is_better(mode: str, delta: float, value: float | None, better: bool) -> None:
    """By the mode's sense and by more than the minimum; what is no number never is."""
    best = replace(LOSS, mode=mode)
    assert Tracked("loss", mode, delta).improves(value, best) is better


def test_another_metric_begins_anew() -> None:
    """A best accuracy says nothing about a loss, nor a smallest value about a largest."""
    assert Tracked("accuracy", "min").improves(9.0, LOSS)
    assert Tracked("loss", "max").improves(0.1, LOSS)
    assert Tracked("loss", "min").improves(9.0, None)
    with pytest.raises(ValueError, match="'min' or 'max'"):
        Tracked("loss", "smallest")
    with pytest.raises(ValueError, match="min_delta"):
        Tracked("loss", "min", -1.0)


def test_a_manifest_carries_the_best_and_old_ones_do_not(tmp_path: Path) -> None:
    """It reads back; a manifest without it has the bytes and the digest that it always had."""
    directory = tmp_path / "step-6.e1.1"
    directory.mkdir()
    plain = manifest_for(directory)
    assert b'"best"' not in plain.to_bytes()
    assert Manifest.from_bytes(plain.to_bytes()).best is None
    with_best = replace(plain, best=LOSS)
    seal(directory, with_best)
    assert Manifest.read(directory) == with_best
    assert with_best.to_proto().best == LOSS.name
    assert plain.to_proto().best == ""
    old = replace(with_best, version=1)  # without a checksum, which would say it first
    for spoilt in (b'"value":1.0', b'"mode":"min"', b'"name":"step-4.e1.1"'):
        other = old.to_bytes().replace(spoilt, spoilt.split(b":")[0] + b":[]")
        with pytest.raises(ValueError, match="not a"):
            Manifest.from_bytes(other)


def save(saver: Saver, step: int, metric: float | None) -> Manifest:
    manifest = saver.save(
        Content(step, Position(0, step), metric=metric),
        lambda path: (path / "model.pt").write_bytes(b"x") and None,
        create_directory=True,
        drain=False,
    )
    assert manifest is not None
    return manifest


def test_the_best_is_known_after_each_save_and_survives_restarts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each manifest names the best as of itself; best.json follows; the next saver goes on from the resume point's."""
    store = CheckpointStore(tmp_path)
    saver = Saver(Identity(epoch=1), Solo(), store, None, None)
    assert save(saver, 1, 0.1).best is None, "nothing is tracked"
    saver.bests.tracked = Tracked("loss")
    bests = [save(saver, step, metric).best for step, metric in enumerate([3.0, 2.0, 2.5, None], 2)]
    assert [best and best.name for best in bests] == ["step-2.e1.1", *["step-3.e1.1"] * 3]
    assert json.loads((tmp_path / "best.json").read_text()) == {
        "name": "step-3.e1.1",
        "metric": "loss",
        "mode": "min",
        "value": 2.0,
    }
    with caplog.at_level(logging.WARNING):
        assert save(saver, 6, float("nan")).metric is None
    assert "the metric of step 6 is nan" in caplog.text
    again = Saver(Identity(epoch=2), Solo(), store, None, None, bests[-1])
    again.bests.tracked = Tracked("loss")
    assert save(again, 7, 2.0).best == bests[-1]
    assert not again.improves(2.0)
    assert again.improves(1.9)
    gone_back = Saver(Identity(epoch=3), Solo(), store, None, None, None)
    save(gone_back, 2, None)
    assert not (tmp_path / "best.json").exists(), "what was best lies in the part that was left"


def test_a_save_that_failed_is_not_the_best(tmp_path: Path) -> None:
    """The value counts only once its checkpoint is sealed."""
    saver = Saver(Identity(epoch=1), Solo(), CheckpointStore(tmp_path), None, None)
    saver.bests.tracked = Tracked("loss")

    def fails(path: Path) -> None:
        raise OSError("no space")

    assert saver.save(Content(1, Position(), metric=0.5), fails, create_directory=True, drain=False) is None
    assert saver.bests.best is None
    assert saver.improves(0.6)


def test_lineage_is_read_back_through_resume_points() -> None:
    """What was left by going back is not part of it, and of two attempts the later counts."""
    one = [made("step-2.e1.1"), made("step-4.e1.1"), made("step-4.e1.2"), made("step-6.e1.1")]
    two = made("step-5.e2.1", one[2])
    assert [m.name for m in lineage([*one, two])] == ["step-2.e1.1", "step-4.e1.2", "step-5.e2.1"]
    assert lineage([]) == []


def test_left_steps_go_only_once_they_were_made_again() -> None:
    """Back from 8 to 2: before the first new save nothing goes; at 5, 4 stays and 6 and 8 go, forms first."""
    old = [made(f"step-{step}.e1.1") for step in (2, 4, 6, 8)]
    form = made("step-8.e1.1.universal.1", source=old[3])
    assert retirable([*old, form], 0).left == ()
    new = made("step-5.e2.1", old[0])
    gone = retirable([*old, form, new], 0)
    assert gone.left == ("step-8.e1.1.universal.1", "step-6.e1.1", "step-8.e1.1")
    assert gone.old == ()
    assert retirable([*old, form, new], 1, ["step-2.e1.1"]).old == ("step-4.e1.1",)
    assert retirable([*old, new], 0, ["step-8.e1.1"]).left == ("step-6.e1.1",)


def test_damaged_ones_are_none_of_those_kept() -> None:
    """As many sound ones stay, and the damaged ones between them; with too few nothing goes, nor what was left."""
    old = [made(f"step-{step}.e1.1") for step in (2, 4, 6, 8)]
    assert retirable(old, 1).old == ("step-2.e1.1", "step-4.e1.1", "step-6.e1.1")
    assert retirable(old, 1, damaged=["step-8.e1.1"]).old == ("step-2.e1.1", "step-4.e1.1")
    assert retirable(old, 2, damaged=["step-6.e1.1"]).old == ("step-2.e1.1",)
    assert retirable(old, 3, damaged=["step-6.e1.1", "step-8.e1.1"]).old == ()
    found = [*old, made("step-5.e2.1", old[0])]
    assert retirable(found, 0).left == ("step-6.e1.1", "step-8.e1.1")
    assert retirable(found, 0, damaged=["step-5.e2.1"]).left == ()


def test_best_resume_point_and_the_last_n_stay() -> None:
    """A best older than the last N stays, also one that is best only as of a checkpoint that stays."""
    found = [made(f"step-{step}.e1.1", best="step-2.e1.1" if step < 8 else "step-8.e1.1") for step in range(1, 10)]
    assert retirable(found, 3).old == tuple(f"step-{step}.e1.1" for step in (1, 3, 4, 5, 6))
    assert retirable(found, 2).old == tuple(f"step-{step}.e1.1" for step in range(1, 8))
    assert "step-5.e1.1" not in retirable(found, 1, ["step-5.e1.1"]).old
    form = made("step-4.e1.1.universal.2", source=found[3])
    assert {"step-4.e1.1"} & set(retirable([*found, form], 1, [form.name]).old) == set()
    assert retirable([], 1).old == ()


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=20), st.integers(0, 4))
def test_the_newest_and_its_best_always_stay(saves: list[tuple[int, bool]], keep: int) -> None:
    """Whatever the history of saves and goings back: the head, what it names as best, and what is in use stay."""
    found: list[Manifest] = []
    epoch, resumed, step, best = 1, None, 0, ""
    for forward, back in saves:
        if back and found:
            resumed = found[forward % len(found)]
            epoch, step, best = epoch + 1, resumed.step, "" if resumed.best is None else resumed.best.name
        step += forward
        name = f"step-{step}.e{epoch}.1"
        best = name if forward % 3 == 0 else best
        found.append(made(name, resumed, best))
        gone = retirable(found, keep, [] if resumed is None else [resumed.name])
        deleted = {*gone.old, *gone.left}
        assert found[-1].name not in deleted
        assert best not in deleted
        assert resumed is None or resumed.name not in deleted
        found = [m for m in found if m.name not in deleted]


@contextmanager
def start(run_dir: Path, keep: int = 0, *, verify: bool = True) -> Iterator[BareSession]:
    """What ``session(checkpoint_dir=...)`` makes, without the process-wide one and its signal handler."""
    handler = signal.getsignal(signal.SIGTERM)
    session = entry._open(BareSession, Identity(run_dir=run_dir), keep, verify)
    try:
        yield session
    finally:
        session.close()
        signal.signal(signal.SIGTERM, handler)


def advance(session: BareSession, to: int) -> None:
    while session.step < to:
        session.begin_step()
        session.end_step()


def write(path: Path) -> None:
    (path / "model.pt").write_bytes(path.name.encode())


def names(run_dir: Path) -> list[str]:
    return [m.name for m in CheckpointStore(run_dir).sealed(SHARDED)]


def test_a_metric_of_the_resume_point_that_comes_late_counts(tmp_path: Path) -> None:
    """Those who saved it had no time to measure: what is saved from now on names it, and it stays."""
    with start(tmp_path, keep=1) as first:
        first.track("loss")
        advance(first, 2)
        first.save(write, metric=3.0)
        advance(first, 4)
        first.save(write)
    with start(tmp_path) as second:
        second.track("loss")
        assert not second.measured(3.5)
        assert second.measured(2.0)
        advance(second, 6)
        second.save(write, keep=1)
        advance(second, 8)
        second.save(write)
    # The resume point stays while it is in use, and what was best as of it.
    assert names(tmp_path) == ["step-2.e0.1", "step-4.e0.1", "step-8.e1.1"]
    with start(tmp_path) as third:
        assert third.best is not None
        assert (third.best.name, third.best.value) == ("step-4.e0.1", 2.0)


def test_a_metric_that_comes_late_before_the_step_is_saved(tmp_path: Path) -> None:
    """Nothing could say so yet: the step is saved with it."""
    with start(tmp_path) as session:
        session.track("loss")
        advance(session, 2)
        assert session.measured(1.0)
        assert session.best is None
        session.save(write, metric=1.0)
        assert session.best is not None
        assert not session.measured(1.5)


def test_after_the_end_a_late_metric_is_noted_for_people(tmp_path: Path) -> None:
    with start(tmp_path) as session:
        session.track("loss")
        advance(session, 2)
        session.save(write)
        session.finish()
        assert session.measured(1.0)
        noted = json.loads((tmp_path / "best.json").read_text())
    assert (noted["name"], noted["value"]) == ("step-2.e0.1", 1.0)


def test_a_late_metric_needs_something_tracked(tmp_path: Path) -> None:
    with start(tmp_path) as session, pytest.raises(RuntimeError, match="nothing is tracked"):
        session.measured(1.0)


def test_alone_the_best_stays_and_what_was_left_goes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A session without a master: best across restarts; a damaged newest; new steps replace those left, with a line."""
    with start(tmp_path, keep=2) as first:
        first.track("loss")
        for step, loss in ((2, 3.0), (4, 1.0), (6, 2.0), (8, 2.0)):
            advance(first, step)
            first.save(write, metric=loss)
    assert names(tmp_path) == ["step-4.e0.1", "step-6.e0.1", "step-8.e0.1"]
    (tmp_path / "step-8.e0.1" / "model.pt").write_bytes(b"step-8.e0.?")
    with start(tmp_path, keep=2) as second:
        assert second.resume is not None
        assert second.resume.ref.name == "step-6.e0.1"
        assert second.best is not None
        assert second.best.name == "step-4.e0.1"
        assert (second.epoch, second.step) == (0, 6)
        assert "step-8.e0.1" in names(tmp_path), "it stays until its step is made again"
        advance(second, 7)
        second.save(write)
        assert "step-8.e0.1" not in names(tmp_path)
        assert "step-8.e0.1: of steps that the run has made again since it went back" in caplog.text
        second.track("loss")
        second.begin_step()
        assert not second.improved(1.0)
        assert second.improved(0.5)
        assert not second.worth_saving, "not before the step has ended"
        second.end_step()
        assert second.worth_saving
        second.save(write)
        assert second.best.name == "step-8.e1.1"
        advance(second, 9)
        assert not second.worth_saving
        second.save(write)
    assert names(tmp_path) == ["step-4.e0.1", "step-6.e0.1", "step-8.e1.1", "step-9.e1.1"], (
        "the resume point and its best"
    )
    assert json.loads((tmp_path / "best.json").read_text())["value"] == 0.5


def test_going_back_again_stays_in_the_lineage(tmp_path: Path) -> None:
    """When the newest is damaged too, the one before it in its own lineage is next, not a later step that was left."""
    chain = [made(f"step-{step}.e0.1") for step in (2, 4)]
    found = [*chain, made("step-3.e1.1", chain[0])]
    for manifest in found:
        directory = tmp_path / manifest.name
        directory.mkdir()
        write(directory)
        seal(directory, replace(manifest_for(directory), resumed_from=manifest.resumed_from and _sealed(tmp_path)))
    (tmp_path / "step-3.e1.1" / "model.pt").write_bytes(b"")
    point = newest(CheckpointStore(tmp_path), Solo(), 1)
    assert isinstance(point, ResumePoint)
    assert point.ref.name == "step-2.e0.1"


def _sealed(run_dir: Path) -> Ref:
    return Manifest.read(run_dir / "step-2.e0.1").ref


def test_a_mixed_directory_is_refused_and_other_runs_are_not_pruned(tmp_path: Path) -> None:
    """Two runs never touch each other's checkpoints: nor mix where they lie in one directory."""
    for run in ("a", "b"):
        with start(tmp_path / run, keep=1) as session:
            for step in (1, 2):
                advance(session, step)
                session.save(write)
    assert names(tmp_path / "a") == names(tmp_path / "b") == ["step-2.e0.1"]
    with start(tmp_path / "a", keep=1) as session:
        foreign = tmp_path / "a" / "step-1.e0.9"
        foreign.mkdir()
        write(foreign)
        seal(foreign, manifest_for(foreign))
        advance(session, 3)
        session.save(write)
    assert names(tmp_path / "a") == ["step-1.e0.9", "step-2.e0.1", "step-3.e1.1"], "the other run's stays"
    with pytest.raises(RuntimeError, match=r"several runs \(/, job/run-0001\).*directory of its own"):
        start(tmp_path / "a").__enter__()
