"""What a rank saves that has lost its peer: the last boundary bit for bit, or nothing if that is not sure."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dalsegno.elastic.checkpoint import MANIFEST, Manifest, Position, verify
from dalsegno.elastic.checkpoint.layout import FIRST_OF_SURVIVORS
from dalsegno.elastic.checkpoint.parts import read_parts
from dalsegno.elastic.training.reading_state import read_tensors
from dalsegno.elastic.training.training_state import MODEL_FILE, TRAINING_FILE
from tests.support.workers import survivor_worker
from tests.support.workers.fake_agent import FakeAgent

pytestmark = pytest.mark.timeout(180)

STEPS, STEP = 20, 12


def run(agent: FakeAgent, **told: Any) -> None:
    """Rank 1 is lost in step 12, unless told otherwise."""
    given = {"steps": STEPS, "step": STEP, "who": 1, "place": "gradients", **told}
    agent.start(json.dumps(given), script=Path(survivor_worker.__file__))


def kept(agent: FakeAgent, rank: int) -> Manifest | None:
    """What a rank has saved by itself."""
    found = list(agent.memory(rank).glob(f"step-*.{FIRST_OF_SURVIVORS + rank}"))
    assert len(found) <= 1
    if not found:
        return None
    manifest = Manifest.read(found[0])
    verify(found[0], manifest)
    # All of it is here, and the other node's part is empty.
    parts = read_parts(found[0])
    assert {node: bool(files) for node, files in parts.items()} == {node: node == rank for node in range(agent.world)}
    assert set(parts[rank]) == {entry.path for entry in manifest.files}
    assert [one.digest for one in agent.of("sealed") if one.name == manifest.name] == [manifest.digest]
    return manifest


def same(one: Any, other: Any) -> bool:
    """Equal bit for bit, in plain containers."""
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def assert_boundary(agent: FakeAgent, rank: int, manifest: Manifest) -> None:
    """It is what this rank had at the boundary, and what rank 0 had, but for the random generators."""
    directory = agent.memory(rank) / manifest.name
    training = read_tensors(directory / TRAINING_FILE)
    found = {"model": read_tensors(directory / MODEL_FILE), **{name: part["state"] for name, part in training.items()}}
    name = f"{agent.epoch}-{manifest.step}.pt"
    boundaries = [torch.load(agent.logs / f"boundary-{one}-{name}", weights_only=True) for one in (0, rank)]
    for boundary in boundaries:
        assert same(
            {key: dict(part) for key, part in found.items()}, {k: dict(v) for k, v in boundary["state"].items()}
        )
    assert (directory / f"rng/rank-{rank}.json").read_bytes() == boundaries[1]["rng"]
    assert {path.name for path in (directory / "rng").iterdir()} == {f"rank-{rank}.json"}


@pytest.mark.parametrize("who", [1, 0])
@pytest.mark.parametrize(
    "told",
    [{}, {"dropout": 0.5}, {"fused": 1}, {"background": 1, "every": 2}, {"every": STEP - 1}, {"place": "forward"}],
    ids=lambda told: "-".join(map(str, told)) or "plain",
)
def test_a_rank_that_loses_its_peer_in_the_step_saves_the_boundary(
    tmp_path: Path, who: int, told: dict[str, Any]
) -> None:
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        run(agent, who=who, **told)
        codes = agent.wait()
        assert (codes[who], codes[1 - who]) == (-signal.SIGKILL, 1), agent.outputs
        manifest = kept(agent, 1 - who)
        assert manifest is not None, agent.outputs
        # A data epoch of 100 samples is seven steps.
        assert (manifest.step, manifest.position) == (STEP - 1, Position(1, 4 * 16))
        assert_boundary(agent, 1 - who, manifest)
        assert [one.step for one in agent.of("keeping")] == [STEP - 1]
        assert agent.of("progress")[-1].may_keep


def test_a_step_that_is_done_is_not_lost(tmp_path: Path) -> None:
    """The peer is lost behind its last collective in the step: the others end that, and fail in the next one."""
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        run(agent, place="ended")
        assert agent.wait() == [1, -signal.SIGKILL], agent.outputs
        manifest = kept(agent, 0)
        assert manifest is not None, agent.outputs
        assert manifest.step == STEP


def test_the_run_goes_on_from_there_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """By as many ranks no bit of a loss differs; each sample comes once."""
    with FakeAgent(tmp_path / "alone", world=2, epoch=1, memory=True) as agent:
        run(agent, place="")
        assert agent.wait() == [0, 0], agent.outputs
        wanted = agent.history()
    with FakeAgent(tmp_path / "a", world=2, epoch=1, memory=True) as agent:
        run(agent)
        agent.wait()
        manifest = kept(agent, 0)
        assert manifest is not None, agent.outputs
    for epoch, world in ((2, 2), (3, 1)):
        with FakeAgent(tmp_path / "a", world=world, epoch=epoch, resume=manifest, memory=True, held=True) as agent:
            there = agent.memory(world - 1) / manifest.name
            if not there.exists():
                shutil.copytree(agent.memory(0) / manifest.name, there)
            run(agent, place="")
            assert agent.wait() == [0] * world, agent.outputs
            found = agent.history()
        assert sorted(found) == list(range(STEP, STEPS + 1))
        for step, (loss, ids) in found.items():
            assert sorted(ids) == sorted(wanted[step][1])
            assert loss == wanted[step][0] if world == 2 else abs(loss - wanted[step][0]) <= 1e-5 * abs(loss)


@pytest.mark.parametrize(
    "told",
    [
        {"place": "stepped"},
        {"change": "weight"},
        {"change": "moment"},
        {"change": "optimizer"},
        {"change": "optimizer", "fused": 1},
        {"change": "schedule"},
        {"norm": 1},
        {"average": "seen"},
        {"average": "unseen"},
        {"step": 2},
        {"every": 0},
    ],
    ids=lambda told: "-".join(f"{key}={value}" for key, value in told.items()),
)
def test_nothing_is_saved_where_something_has_changed_or_may_have(tmp_path: Path, told: dict[str, Any]) -> None:
    """The statistics and averages change before the optimizer's step; in step 2 nothing was tried out yet."""
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        run(agent, **told)
        assert agent.wait() == [1, -signal.SIGKILL], agent.outputs
        assert "RuntimeError" in agent.outputs[0]
        assert kept(agent, 0) is None
        assert not agent.of("keeping")
        if told.get("average") == "unseen" or "step" in told or "every" in told:
            assert not agent.of("progress")[-1].may_keep


def test_an_error_of_its_own_saves_nothing(tmp_path: Path) -> None:
    """And the other rank, which has lost a peer, does: how often that may happen is the master's affair."""
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        run(agent, who=-1, change="error")
        assert agent.wait() == [1, 1], agent.outputs
        assert "KeyError" in agent.outputs[0]
        assert kept(agent, 0) is None
        manifest = kept(agent, 1)
        assert manifest is not None
        assert manifest.step == STEP - 1


def test_an_average_that_only_all_ranks_keep_is_rank_0s_to_save(tmp_path: Path) -> None:
    """Nobody knows whether other ranks keep it as rank 0 does."""
    for who, saves in ((1, True), (0, False)):
        with FakeAgent(tmp_path / str(who), world=2, epoch=1, memory=True) as agent:
            run(agent, who=who, average="seen", late=1)
            agent.wait()
            assert (kept(agent, 1 - who) is not None) is saves, agent.outputs


def standing(agent: FakeAgent) -> None:
    deadline = time.monotonic() + 60
    while not all((agent.logs / f"standing-{rank}").exists() for rank in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("place", ["forward", "gradients"])
def test_ranks_that_are_told_save_at_once(tmp_path: Path, place: str) -> None:
    """Out of a sleep in the script, and end: each node has all of it."""
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        run(agent, place=place, stands="never")
        standing(agent)
        agent.keep()
        assert agent.wait() == [1, 1], agent.outputs
        for rank in range(2):
            manifest = kept(agent, rank)
            assert manifest is not None
            assert manifest.step == STEP - 1
            assert_boundary(agent, rank, manifest)


@pytest.mark.parametrize(("place", "boundary"), [("gradients", STEP - 1), ("ended", STEP)])
def test_a_rank_that_waits_for_a_silent_peer_saves_all_the_same(tmp_path: Path, place: str, boundary: int) -> None:
    """A host without power closes no connection: who waits for it in a collective returns from there no more."""
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        run(agent, place=place, hangs=True)
        deadline = time.monotonic() + 60
        while not (agent.logs / "hangs-1").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.5)  # until the other one waits for it
        agent.keep()
        assert agent.ranks[0].wait(30)[0] == 1
        agent.ranks[1].kill()
        agent.wait()
        manifest = kept(agent, 0)
        assert manifest is not None, agent.outputs
        assert manifest.step == boundary
        if place == "gradients":
            assert_boundary(agent, 0, manifest)


def test_behind_the_optimizers_step_they_end_their_step_first(tmp_path: Path) -> None:
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        run(agent, place="stepped", stands="go on")
        standing(agent)
        agent.keep()
        time.sleep(0.3)  # they find that they hold no boundary
        assert not agent.of("keeping")
        (agent.logs / "go on").touch()
        assert agent.wait() == [1, 1], agent.outputs
        found = [kept(agent, rank) for rank in range(2)]
        # Who has ended its step first may have gone when the other one still waits for it.
        assert {one.step for one in found if one is not None} == {STEP}


def test_a_sealed_one_has_its_manifest(tmp_path: Path) -> None:
    """What was begun and not sealed does not count: the note on the parts comes last."""
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        run(agent)
        agent.wait()
        manifest = kept(agent, 0)
        assert manifest is not None
        assert (agent.memory(0) / manifest.name / MANIFEST).exists()
        assert manifest.shape.any_world_size
        assert manifest.resumed_from is None


@pytest.mark.parametrize("background", [0, 1])
@pytest.mark.parametrize("who", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_trainer_saves_its_boundary_too(tmp_path: Path, who: int, background: int) -> None:
    """With a schedule and a loss scale; the run goes on from there without another bit."""
    told = {"trainer": 1, "background": background}
    with FakeAgent(tmp_path / "alone", world=2, epoch=1, memory=True) as agent:
        run(agent, place="", **told)
        assert agent.wait() == [0, 0], agent.outputs
        wanted = agent.history()
    with FakeAgent(tmp_path / "a", world=2, epoch=1, memory=True) as agent:
        run(agent, who=who, **told)
        agent.wait()
        manifest = kept(agent, 1 - who)
        assert manifest is not None, agent.outputs
        assert manifest.step == STEP - 1
    with FakeAgent(tmp_path / "a", world=2, epoch=2, resume=manifest, memory=True, held=True) as agent:
        shutil.copytree(agent.memory(1 - who) / manifest.name, agent.memory(who) / manifest.name)
        run(agent, place="", **told)
        assert agent.wait() == [0, 0], agent.outputs
        found = agent.history()
    assert found == {step: wanted[step] for step in range(STEP, STEPS + 1)}


@pytest.mark.parametrize("who", [1, 0])
def test_a_callbacks_state_is_rank_0s_to_save(tmp_path: Path, who: int) -> None:
    """Callbacks hear things on rank 0 that others do not."""
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        run(agent, who=who, trainer=1, counts=1)
        agent.wait()
        assert (kept(agent, 1 - who) is not None) is (who == 1), agent.outputs
