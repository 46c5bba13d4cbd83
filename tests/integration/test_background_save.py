"""Saves in the background, with real processes, gloo and an agent's socket; and the best checkpoint off the cadence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint import CheckpointStore, Manifest, verify
from tests.support.workers.fake_agent import FakeAgent

pytestmark = pytest.mark.timeout(120)


def sealed(agent: FakeAgent) -> list[Manifest]:
    """What was saved, in the order of the messages; each verifies, and nothing else is there."""
    store = CheckpointStore(agent.run_dir)
    names = [message.name for message in agent.of("sealed")]
    assert {m.name for m in store.sealed()} == set(names) == {p.name for p in agent.run_dir.glob("step-*")}
    found = [Manifest.read(agent.run_dir / name) for name in names]
    for manifest in found:
        verify(agent.run_dir / manifest.name, manifest)
    return found


def test_training_goes_on_while_a_save_is_written_and_a_drain_waits_for_it(tmp_path: Path) -> None:
    """Steps are made beside a write that cannot end; a drain seals it first, then its own, and saves no step twice."""
    release = tmp_path / "release"
    with FakeAgent(tmp_path, world=2, epoch=1) as agent:
        agent.start(
            *("--steps", "1000", "--save-every", "60", "--step-time", "0.05"), "--background", f"--hold={release}"
        )
        # Long before the next save, which would wait for this one.
        agent.wait_for_step(62)
        assert not agent.of("sealed"), "the save of step 60 cannot have ended"
        agent.drain()
        agent.wait_for("draining", 2)
        assert not agent.of("sealed")
        assert not agent.of("drained")
        release.touch()
        assert agent.wait() == [83, 83], agent.outputs
        drained = agent.wait_for("drained", 2)
        found = sealed(agent)
    steps = [m.step for m in found]
    assert steps[0] == 60
    assert steps == sorted(set(steps))
    assert {(d.name, d.digest, d.step) for d in drained} == {(found[-1].name, found[-1].digest, steps[-1])}
    assert json.loads((agent.run_dir / "latest.json").read_text())["step"] == steps[-1]
    assert {f.path for f in found[0].files} == {
        *("model.pt", "part-0.json", "part-1.json", "held/0.pt", "held/1.pt"),
        *("rng/rank-0.json", "rng/rank-1.json", "parts/rank-0.json", "parts/rank-1.json"),
    }


def test_the_state_saved_is_that_of_its_step(tmp_path: Path) -> None:
    """Though steps were made while it was written: resumed from it, not one bit differs, dropout included."""
    flags = ("--dropout", "0.3", "--background", "--save-every", "3")
    release = tmp_path / "release"
    with FakeAgent(tmp_path / "a", world=2, epoch=1) as agent:
        agent.start("--steps", "9", *flags, f"--hold={release}", "--step-time", "0.05")
        agent.wait_for_step(5)
        release.touch()
        assert agent.wait() == [0, 0], agent.outputs
        wanted = agent.history()
        assert [m.step for m in sealed(agent)] == [3, 6, 9]
    first = CheckpointStore(agent.run_dir).sealed()[0]
    assert (first.position.data_epoch, first.position.samples) == (0, 48)
    with FakeAgent(tmp_path / "a", world=2, epoch=2, resume=first) as agent:
        agent.start("--steps", "9", *flags)
        assert agent.wait() == [0, 0], agent.outputs
        found = agent.history()
    assert found == {step: wanted[step] for step in range(4, 10)}


def test_one_ranks_disk_error_is_known_to_all_at_the_next_exchange(tmp_path: Path) -> None:
    """In the background on rank 1 only: both ranks say so, nothing is left of it, the run goes on and saves again."""
    with FakeAgent(tmp_path, world=2, epoch=1) as agent:
        agent.start(*("--steps", "14", "--save-every", "4", "--step-time", "0.1"), "--background", "--fail-rank", "1")
        failed = agent.wait_for("save_failed", 2)
        told_at = max(m.step for m in agent.of("progress"))
        assert agent.wait() == [0, 0], agent.outputs
        assert [m.step for m in sealed(agent)] == [8, 12, 14]
    assert {(f.name, f.step, f.drain) for f in failed} == {("step-4.e1.1", 4, False)}
    assert all("No space left" in f.reason and "rank 1" in f.reason for f in failed)
    assert told_at < 8, "not only when the next save was due"


def test_a_drains_save_in_the_background_that_fails_is_tried_again(tmp_path: Path) -> None:
    """Nobody leaves unsaved."""
    with FakeAgent(tmp_path, world=2, epoch=1) as agent:
        agent.start("--steps", "1000", "--step-time", "0.05", "--background", "--fail-rank", "0")
        agent.wait_for_step(2)
        agent.drain()
        assert all(f.drain for f in agent.wait_for("save_failed", 2))
        assert agent.wait() == [83, 83], agent.outputs
        assert len(sealed(agent)) == 1


@pytest.mark.parametrize(("how", "said"), [("mistake", "TypeError: a mistake"), ("same", "several ranks save same.pt")])
def test_a_mistake_in_the_state_ends_the_run_on_all_ranks(tmp_path: Path, how: str, said: str) -> None:
    """What every later save would repeat is not a failed save, and no rank waits for another."""
    with FakeAgent(tmp_path, world=2, epoch=1) as agent:
        flags = ("--fail-rank", "1") if how == "mistake" else ()
        agent.start("--steps", "50", "--save-every", "2", "--background", "--fail-with", how, *flags)
        assert agent.wait() == [1, 1], agent.outputs
    assert all("SaveError" in output and said in output for output in agent.outputs)


@pytest.mark.parametrize("flags", [(), ("--background",)])
def test_the_best_step_is_saved_off_the_cadence_as_rank_0_says(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Ranks measure different values: rank 0's decides for all, and each manifest names the best so far."""
    with FakeAgent(tmp_path, world=2, epoch=1) as agent:
        agent.start("--steps", "8", "--save-every", "6", "--improves-at", "5", *flags)
        assert agent.wait() == [0, 0], agent.outputs
        found = sealed(agent)
    assert [(m.step, m.best and m.best.name) for m in found] == [
        (1, "step-1.e1.1"),
        (5, "step-5.e1.1"),
        (6, "step-5.e1.1"),
        (8, "step-5.e1.1"),
    ]
    best = json.loads((agent.run_dir / "best.json").read_text())
    assert best == {"name": "step-5.e1.1", "metric": "score", "mode": "max", "value": 1.0}
