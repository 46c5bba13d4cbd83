"""Memory checkpoints of real processes, each of which is a node of its own: written, drained to, and resumed from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic.checkpoint import CheckpointStore, Manifest, verify
from dalsegno.elastic.checkpoint.parts import read_parts, write_part
from tests.support.jobs.programs import wait_for
from tests.support.workers import trainer_worker
from tests.support.workers.fake_agent import FakeAgent

pytestmark = pytest.mark.timeout(120)

WAYS = pytest.mark.parametrize("flags", [(), ("--background",)], ids=["waiting", "background"])


def spread(agent: FakeAgent, name: str, *, to: int | None = None) -> Manifest:
    """What the agents do: each node gets the parts of the others, and so does a newcomer."""
    nodes = [agent.memory(rank) / name for rank in range(agent.world)]
    for target in [agent.memory(rank) / name for rank in range(to or agent.world)]:
        for source in nodes:
            for part, files in read_parts(source).items():
                for file in files:
                    if not (target / file).exists():
                        (target / file).parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(source / file, target / file)
                write_part(target, part, files)
        if not (target / "MANIFEST.json").exists():
            shutil.copyfile(nodes[0] / "MANIFEST.json", target / "MANIFEST.json")
        manifest = Manifest.read(target)
        verify(target, manifest)
    return manifest


@WAYS
def test_the_ranks_save_to_memory_and_the_last_step_to_the_disk(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Each node tells its agent, and which ones it is to bring to the disk; only the last one is there at once."""
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        agent.start("--steps", "12", "--save-every", "5", "--memory-every", "2", *flags)
        assert agent.wait() == [0, 0], agent.outputs
        sealed = agent.of("sealed")
        assert [one.step for one in sealed if not one.in_memory] == [12]
        assert sorted(one.step for one in sealed if one.in_memory) == sorted(2 * [2, 4, 5, 6, 8, 10])
        assert sorted(one.step for one in sealed if one.make_durable) == [5, 5, 10, 10]
        assert len(CheckpointStore(agent.run_dir).sealed()) == len(list(agent.run_dir.glob("step-*"))) == 1
        for name in {one.name for one in sealed if one.in_memory}:
            spread(agent, name)


def test_a_save_in_the_background_is_sealed_within_the_next_step(tmp_path: Path) -> None:
    """Not at the end of a later one: a crash in a long step loses no more than that step."""
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        agent.start("--steps", "6", "--memory-every", "2", "--background", "--step-time", "1.5")
        assert agent.wait() == [0, 0], agent.outputs
        said = [(m.WhichOneof("body"), getattr(m, m.WhichOneof("body"))) for m in agent.messages]
    for step in (2, 4):
        sealed = [
            at for at, (kind, one) in enumerate(said) if kind == "sealed" and (one.in_memory, one.step) == (True, step)
        ]
        next_step = [at for at, (kind, one) in enumerate(said) if kind == "progress" and one.step == step + 1]
        assert len(sealed) == 2
        assert max(sealed) < min(next_step)


@WAYS
@pytest.mark.parametrize("reaches", [True, False], ids=["written", "lost"])
def test_the_best_goes_to_memory_and_is_named_once_it_is_on_the_disk(
    tmp_path: Path, flags: tuple[str, ...], reaches: bool
) -> None:
    """Until then the one before is, on all ranks; the last save waits for it. If it is lost, the one before stays."""
    if not reaches:
        flags = (*flags, "--best-wait", "1")
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        agent.start("--steps", "12", "--save-every", "4", "--memory-every", "2", "--improves-at", "8", *flags)
        # The first value of all is the best, too.
        for step in (1, 8) if reaches else (1,):
            agent.wait_until(lambda step=step: sum(one.step == step for one in agent.of("sealed")) == 2)
            name = next(one.name for one in agent.of("sealed") if one.step == step)
            spread(agent, name)
            shutil.copytree(agent.memory(0) / name, agent.run_dir / name)
        assert agent.wait() == [0, 0], agent.outputs
        sealed = agent.of("sealed")
        assert sorted(one.step for one in sealed if not one.in_memory) == [12]
        assert sorted(one.step for one in sealed if one.make_durable) == [1, 1, 4, 4, 8, 8]
        names = {one.step: one.name for one in sealed}
        last = CheckpointStore(agent.run_dir).sealed()[-1]
        assert last.best is not None
        assert (last.step, last.best.name) == (12, names[8 if reaches else 1])
        assert json.loads((agent.run_dir / "best.json").read_text())["name"] == last.best.name
        assert (last.candidate is not None and last.candidate.name) == (False if reaches else names[8])
        between = spread(agent, names[10])
        assert names[8] in [one.name for one in (between.best, between.candidate) if one is not None]
        assert spread(agent, names[4]).metric == 0.0
    assert ("does not count; see the agents' lines" in "".join(agent.outputs)) is not reaches


@WAYS
def test_what_memory_has_no_room_for_the_ranks_save_to_the_disk(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """At once, or at the next boundary behind a save in the background; one line says so, and the training goes on."""
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        more = ("--save-every", "5", "--memory-every", "100", "--fail-rank", "1", "--step-time", "0.1")
        agent.start("--steps", "12", *more, *flags)
        assert agent.wait() == [0, 0], agent.outputs
        sealed = agent.of("sealed")
        durable = sorted(one.step for one in sealed if not one.in_memory)
        assert durable[1:] == [12]
        assert durable[0] == 5 if not flags else 5 <= durable[0] < 10
        assert sorted(one.step for one in sealed if one.make_durable) == [10, 10]
        assert not agent.of("save_failed")
    said = "".join(agent.outputs)
    assert said.count("\ndalsegno: saving step-5.e1.1 in memory failed, the ranks save to the disk: ") == 1
    assert said.count("\ndalsegno: step 10 was saved in memory again\n") == 1


def test_a_copy_that_fails_before_a_barrier_is_said(tmp_path: Path) -> None:
    """From the second save in memory on no rank waits for the others' copies: they wait for this one in the barrier."""
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        more = ("--memory-every", "2", "--fail-rank", "1", "--fail-behind", "3", "--barrier", "--background")
        agent.start("--steps", "1000", *more)
        line = "\ndalsegno: rank 1 could not copy its part of step 4: OSError: [Errno 12] Cannot allocate memory. "
        wait_for(lambda: line in agent.ranks[1].said(), 60, "nothing is said")


def directly(agent: FakeAgent) -> list[int]:
    """The steps that the ranks have saved on the disk by themselves."""
    return sorted(one.step for one in agent.of("sealed") if not one.in_memory)


@WAYS
def test_without_a_master_the_ranks_save_to_the_disk(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """The agents wait for its word. What they had in hand is made good at once; once it is back all is as before."""
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        pace = ("--step-time", "0.2")
        agent.start("--steps", "40", "--save-every", "8", "--memory-every", "2", *pace, *flags)
        agent.wait_until(lambda: sum(one.step == 8 for one in agent.of("sealed")) == 2)
        agent.hear(False)
        agent.wait_until(lambda: 16 in directly(agent))
        agent.hear(True, ranks=1)  # One that hears it will do.
        assert agent.wait() == [0, 0], agent.outputs
        made_good, *rest = directly(agent)
        assert 8 < made_good < 16
        assert rest == [16, 40]
        assert sorted(one.step for one in agent.of("sealed") if one.make_durable) == [8, 8, 24, 24, 32, 32]
        assert {18, 20} <= {one.step for one in agent.of("sealed") if one.in_memory}
        for found in CheckpointStore(agent.run_dir).sealed():
            verify(agent.run_dir / found.name, found)


def test_without_a_master_what_is_on_the_disk_is_not_saved_again(tmp_path: Path) -> None:
    """An outage alone is no reason for a save."""
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        agent.start("--steps", "24", "--save-every", "8", "--memory-every", "2", "--step-time", "0.2")
        agent.wait_until(lambda: sum(one.step == 8 for one in agent.of("sealed")) == 2)
        name = next(one.name for one in agent.of("sealed") if one.step == 8)
        spread(agent, name)
        shutil.copytree(agent.memory(0) / name, agent.run_dir / name)
        agent.hear(False)
        assert agent.wait() == [0, 0], agent.outputs
        assert directly(agent) == [16, 24]


@WAYS
def test_memory_that_fails_again_and_again_is_said_once(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """Others may have filled it, and it is tried ever more rarely; that it takes one again is said, too."""
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        agent.start("--steps", "14", "--memory-every", "1", "--fail-rank", "1", "--fail-saves", "2", *flags)
        assert agent.wait() == [0, 0], agent.outputs
        first = min(one.step for one in agent.of("sealed") if one.in_memory)
    said = "".join(agent.outputs)
    assert first > 2
    assert said.count("\ndalsegno: saving step-1.e1.1 in memory failed, commits stand: ") == 1
    assert said.count(" in memory failed") == 2  # it is in the rank's log, too
    assert said.count(f"\ndalsegno: step {first} was saved in memory again\n") == 1


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, ()),
        pytest.param(2, (), marks=pytest.mark.full),
        (2, ("--background",)),
        pytest.param(3, ("--background",), marks=pytest.mark.full),
    ],
)
def test_a_drain_to_memory_resumes_bit_identical(tmp_path: Path, flags: tuple[str, ...], world: int) -> None:
    """Nothing of it is on the disk; at the same size no bit of a loss differs, at another one the curve is the same."""
    more = ("--steps", "14", "--fixed", *flags)
    with FakeAgent(tmp_path / "alone", world=2, epoch=1) as agent:
        agent.start(*more)
        assert agent.wait() == [0, 0], agent.outputs
        wanted = agent.history()
    with FakeAgent(tmp_path / "a", world=2, epoch=1, memory=True) as agent:
        agent.start(*more, "--step-time", "0.05")
        agent.wait_for_step(4)
        agent.drain(to_memory=True)
        assert agent.wait() == [83, 83], agent.outputs
        told = agent.wait_for("drained", 2)
        assert all(one.in_memory for one in told)
        assert not list(agent.run_dir.glob("step-*/*"))
        assert len({(one.name, one.digest, one.step) for one in told}) == 1
        manifest = spread(agent, told[0].name, to=world)
        assert manifest.digest == told[0].digest
    with FakeAgent(tmp_path / "a", world=world, epoch=2, resume=manifest, memory=True, held=True) as agent:
        agent.start(*more)
        assert agent.wait() == [0] * world, agent.outputs
        found = agent.history()
    assert sorted(found) == list(range(manifest.step + 1, 15))
    for step, (loss, ids) in found.items():
        assert sorted(ids) == sorted(wanted[step][1])
        assert loss == wanted[step][0] if world == 2 else abs(loss - wanted[step][0]) <= 1e-5 * abs(loss)
    (last,) = CheckpointStore(agent.run_dir).sealed()
    assert last.resumed_from == manifest.ref


def test_a_drain_that_some_node_is_told_otherwise_goes_to_the_disk(tmp_path: Path) -> None:
    """One whose agent has nobody to hold its part: then no rank saves to memory."""
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        agent.start("--steps", "1000", "--step-time", "0.05")
        agent.wait_for_step(2)
        agent.drain()
        assert agent.wait() == [83, 83], agent.outputs
        assert [one.in_memory for one in agent.wait_for("drained", 2)] == [False, False]
        assert len(CheckpointStore(agent.run_dir).sealed()) == 1


def test_a_drain_for_which_memory_has_no_room_goes_to_the_disk_at_once(tmp_path: Path) -> None:
    """Nobody trains on, or leaves unsaved, for want of memory."""
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        agent.start("--steps", "1000", "--step-time", "0.05", "--fail-rank", "1")
        agent.wait_for_step(2)
        agent.drain(to_memory=True)
        assert agent.wait() == [83, 83], agent.outputs
        assert [one.in_memory for one in agent.wait_for("drained", 2)] == [False, False]
        (durable,) = CheckpointStore(agent.run_dir).sealed()
        assert {one.step for one in agent.of("draining")} == {durable.step}
        assert not agent.of("save_failed")
        assert not [path for rank in range(2) for path in agent.memory(rank).glob("step-*")]


def test_a_rank_killed_between_two_leaves_the_one_before_whole(tmp_path: Path) -> None:
    """What it had of the next one is without a note, and nobody takes it for a part."""
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        agent.start("--steps", "1000", "--step-time", "0.02", "--memory-every", "5")
        agent.wait_for("sealed", 2)
        first = agent.of("sealed")[0].name
        agent.ranks[1].kill()
        codes = agent.wait()
        assert codes[1] == -9
        assert codes[0] != 0
        spread(agent, first)
        for rank in range(2):
            for path in agent.memory(rank).glob("step-*.parts"):
                name = path.name.removesuffix(".parts")
                assert (agent.memory(rank) / name / "MANIFEST.json").exists()


def trained(agent: FakeAgent, case: dict[str, Any], out: Path) -> None:
    out.mkdir(exist_ok=True)
    agent.start("--cases", json.dumps([case]), "--out", str(out), script=Path(trainer_worker.__file__))


FRAMEWORKS = [
    pytest.param(*framework, marks=[] if framework in (("ddp", 3), ("zero1", 1)) else pytest.mark.full)
    for framework in (("ddp", 3), ("fsdp", 1), ("fsdp", 2), ("zero1", 1), ("zero1", 3), ("zero3", 3))
]


@pytest.mark.parametrize(("strategy", "world"), FRAMEWORKS)
def test_every_framework_goes_on_from_memory_as_from_the_disk(tmp_path: Path, strategy: str, world: int) -> None:
    """Two nodes of one rank save to memory; what another number of ranks loads of it is that of a copy on the disk.

    Bit by bit: what the loss of each later step is.
    """
    case = {"strategy": strategy, "memory_every": 2, "evaluate_every": 0, "in_background": strategy == "fsdp"}
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        trained(agent, {**case, "steps": 2000}, tmp_path / "first")
        agent.wait_for("sealed", 2, 60.0)
        agent.drain(to_memory=True)
        assert agent.wait() == [83, 83], agent.outputs
        told = agent.wait_for("drained", 2)
        assert all(one.in_memory for one in told), agent.outputs
        assert not list(agent.run_dir.glob("step-*"))
        manifest = spread(agent, told[0].name, to=world)
    losses = []
    for epoch, held in enumerate((True, False), start=2):
        if not held:
            shutil.copytree(agent.memory(0) / manifest.name, agent.run_dir / manifest.name)
        out = tmp_path / str(epoch)
        with FakeAgent(tmp_path, world=world, epoch=epoch, resume=manifest, memory=True, held=held) as agent:
            trained(agent, {**case, "steps": manifest.step + 3}, out)
            assert agent.wait(90.0) == [0] * world, agent.outputs
        result = json.loads((out / "result-0.json").read_text())[0]
        losses.append([entry["loss"] for entry in result["logs"] if "loss" in entry])
        assert result["steps"] == list(range(manifest.step + 1, manifest.step + 4))
    assert losses[0] == losses[1]


def test_without_a_memory_directory_there_are_none(tmp_path: Path) -> None:
    """The agents keep none: the loop is what it was, and says nothing of it."""
    with FakeAgent(tmp_path, world=2, epoch=1) as agent:
        agent.start("--steps", "6", "--save-every", "4", "--memory-every", "2")
        assert agent.wait() == [0, 0], agent.outputs
        assert [one.step for one in agent.of("sealed")] == [4, 6]
    assert not any("memory" in output for output in agent.outputs)


def test_as_often_as_costs_little(tmp_path: Path) -> None:
    """With "auto" there are some, and fewer than steps; all ranks agree when."""
    with FakeAgent(tmp_path, world=2, epoch=1, memory=True) as agent:
        agent.start("--steps", "60", "--step-time", "0.01", "--memory-every", "auto")
        assert agent.wait() == [0, 0], agent.outputs
        held = [one.step for one in agent.of("sealed") if one.in_memory]
    assert 2 <= len(held) < 80
    assert sorted(held) == sorted(2 * list(set(held)))
