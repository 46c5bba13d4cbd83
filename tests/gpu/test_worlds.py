"""Worlds change with trainings on cards: both ranks on one card over gloo, and each over NCCL.

NCCL refuses two ranks of one host on one card. Where there is only one, each node is a host of its own for NCCL
(`NCCL_HOSTID`), and they talk over sockets, as nodes do.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.history import KeptStep, StepLogReader, compare, kept_history
from tests.gpu import scenes
from tests.gpu.scenes import CARDS, DEVICE, environment, long_without_card, needs_deepspeed, needs_transformers
from tests.support.forks.forked_agents import DLROVER_RUN
from tests.support.jobs.cluster import HF, HOOKED, LIMIT, TRAIN, Cluster, Training, Undisturbed
from tests.support.pages.sources import ROOT

pytestmark = pytest.mark.timeout(290)

HERE = Path(__file__).parent
# Seconds that a killed peer may cost the survivor: less than any timeout of NCCL's, more than a slow machine needs.
SECONDS = 60.0
# What numbers of 16 bits make of another order of the same sums.
LIMIT_OF_HALVES = 2e-2


@dataclass(frozen=True)
class OnCards(Training):
    """The script by its path: it may be no example."""

    script: Path = HERE / "train.py"
    steps: int = 60
    save_every: int = 5
    limit: float = LIMIT

    def words(self, *, hooked: bool) -> list[str]:
        return [str(HOOKED), str(self.script)] if hooked else [str(self.script)]


class Alone(Undisturbed):
    """Executed, where nothing is forked."""

    def history(self, training: Training) -> dict[int, KeptStep]:
        if not scenes.EXECUTED:
            return super().history(training)
        if training not in self._known:
            place = Path(tempfile.mkdtemp(dir=self._directory))
            script = [*training.words(hooked=False), *training.flags(place / "steps")]
            directory = f"--checkpoint-dir={place / 'checkpoints'}"
            if training.needs_agent:
                line = [DLROVER_RUN, "--nnodes=1", directory, *script]
            else:
                line = [sys.executable, *script, directory]
            subprocess.run(line, env=environment(), timeout=scenes.PATIENCE, check=True, cwd=place)
            self._known[training] = kept_history(StepLogReader(place / "steps").poll())
        return self._known[training]


Jobs = Callable[..., Cluster]


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Makes one job. On a card every agent is executed, as a user does it."""
    made: list[Cluster] = []

    def make(training: OnCards, **more: Any) -> Cluster:
        more = {"universal": "", **({"executed": 99} if scenes.EXECUTED else {}), **more}
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        told = {"DALSEGNO_TEST_STEPS": "4", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": path}
        told |= {"DS_ACCELERATOR": DEVICE}
        made.append(Cluster(tmp_path / "job", training, nnodes="1:3", agent_environment=told, **more))
        return made[-1]

    yield make
    for job in made:
        job.close()


def over_nccl(node: int) -> dict[str, str]:
    """For an agent: a card of its own, or a host of its own."""
    if CARDS > 1:
        return {"CUDA_VISIBLE_DEVICES": str(node % CARDS)}
    return {"NCCL_HOSTID": f"node-{node}", "NCCL_SOCKET_IFNAME": "lo"} if CARDS else {}


def lose(job: Cluster, name: str, after: int) -> int:
    """A node is killed in the middle of its steps, and the survivor goes on alone within seconds; returns the epoch."""
    killed = job.node(name)
    job.kill_node(killed)
    alone = job.wait_world(1, steps=3, after=after, seconds=SECONDS + 60)
    told = job.assert_crash(alone)
    assert told.paused < SECONDS, told
    assert killed.process.poll() == -signal.SIGKILL
    return alone


def assert_undisturbed(job: Cluster, training: OnCards, tmp_path: Path) -> None:
    """Every sample once, and the losses of the run that nobody disturbed."""
    kept, whole = kept_history(job.poll()), Alone(tmp_path).history(training)
    comparison = compare(kept, whole)
    assert not comparison.problems, "\n".join([*comparison.problems[:5], job.diagnosis()])
    apart = [f"{step}: {kept[step].loss:.6f} {whole[step].loss:.6f}" for step in sorted(whole)]
    assert comparison.largest_difference <= training.limit, f"{comparison}\n{job.diagnosis()}\n{apart}"


@long_without_card
def test_one_two_one_on_one_card(jobs: Jobs, tmp_path: Path) -> None:
    """Both ranks on the first card, over gloo, and one line says so. The losses are the undisturbed run's."""
    training = OnCards()
    job = jobs(training)
    card = {"CUDA_VISIBLE_DEVICES": "0"} if DEVICE == "cuda" else {}
    job.open("a", environment=card)
    job.start("b", environment=card)
    lose(job, "b", job.wait_world(2, steps=3))
    job.finish(job.node("a"))
    assert_undisturbed(job, training, tmp_path)
    assert ("2 ranks share 1 card" in job.node("a").text()) == (DEVICE == "cuda")


def trained(*extra: str, limit: float = LIMIT) -> OnCards:
    return OnCards(HERE / "trained.py", extra=extra, limit=limit)


TRAININGS = {
    "loop": OnCards(),
    "wrapped": OnCards(HERE / "wrapped.py"),
    "fsdp-fp32": trained("--strategy=fsdp"),
    "fsdp-bf16": trained("--strategy=fsdp", "--precision=bf16", limit=LIMIT_OF_HALVES),
    "ddp-bf16": trained("--precision=bf16", limit=LIMIT_OF_HALVES),
}
ENGINES = {
    "zero-1": OnCards(TRAIN, extra=("--zero-stage=1",)),
    "zero-3": OnCards(TRAIN, extra=("--zero-stage=3",)),
    "zero-1-bf16": trained("--strategy=zero1", "--precision=bf16", limit=LIMIT_OF_HALVES),
    "zero-2-bf16": trained("--strategy=zero2", "--precision=bf16", limit=LIMIT_OF_HALVES),
}


def change(job: Cluster) -> None:
    """1, 2, 1 after a kill, 2, 1 after a leave: all over NCCL where there are cards."""
    job.open("a", environment=over_nccl(0))
    job.start("b", environment=over_nccl(1))
    third = lose(job, "b", job.wait_world(2, steps=3))
    job.start("c", environment=over_nccl(2))
    fourth = job.wait_world(2, steps=3, after=third)
    job.leave(job.node("c"))
    job.wait_world(1, steps=2, after=fourth)
    job.finish()
    assert "share 1 card" not in job.node("a").text()


@long_without_card
@pytest.mark.parametrize("name", TRAININGS)
def test_worlds_change_over_nccl(jobs: Jobs, tmp_path: Path, name: str) -> None:
    """A survivor of a kill is in a collective that can never end: its process is gone within seconds."""
    job = jobs(TRAININGS[name])
    change(job)
    assert_undisturbed(job, TRAININGS[name], tmp_path)


@long_without_card
@needs_deepspeed
@pytest.mark.parametrize("universal", ["", "beside", "gate"])
@pytest.mark.parametrize("name", ENGINES)
def test_engines_change_worlds_over_nccl(jobs: Jobs, tmp_path: Path, name: str, universal: str) -> None:
    """DeepSpeed's shards are re-sharded, or universal files made of them, by a converter that sees no card."""
    if universal and "bf16" in name and "2" in name:
        pytest.skip("one stage is enough")
    job = jobs(ENGINES[name], universal=universal)
    change(job)
    assert_undisturbed(job, ENGINES[name], tmp_path)


@long_without_card
def test_processes_stay_through_changes_over_nccl(jobs: Jobs, tmp_path: Path) -> None:
    """1, 2, 1 after a leave, 2: the first node's process keeps its card and all that it has built."""
    training = OnCards(HERE / "wrapped.py", extra=("--stay",))
    job = jobs(training)
    job.open("a", environment=over_nccl(0))
    first = job.worker_pid(job.node("a"))
    job.start("b", environment=over_nccl(1))
    second = job.wait_world(2, steps=3)
    job.leave(job.node("b"))
    third = job.wait_world(1, steps=3, after=second)
    job.start("c", environment=over_nccl(2))
    job.wait_world(2, steps=3, after=third)
    assert job.worker_pid(job.node("a")) == first
    job.finish()
    assert_undisturbed(job, training, tmp_path)


@long_without_card
def test_memory_checkpoints_of_cards(jobs: Jobs, tmp_path: Path) -> None:
    """A killed node costs a step or two, not all since the last save on the disk."""
    training = OnCards(HERE / "wrapped.py", save_every=50, extra=("--memory-every=1",))
    job = jobs(training, agent_flags=("--memory-replicas=1",))
    job.open("a", environment=over_nccl(0))
    job.start("b", environment=over_nccl(1))
    second = job.wait_world(2, steps=3)
    # What both have done and noted down: the survivor saves what it holds.
    job.wait_standing()
    job.kill_node(job.node("b"))
    third = job.wait_world(1, steps=2, after=second, seconds=SECONDS + 60)
    job.finish(job.node("a"))
    told = job.change(third)
    assert told.lost <= 2, told
    assert_undisturbed(job, training, tmp_path)


@long_without_card
@needs_transformers
@pytest.mark.parametrize("extra", [(), pytest.param(("--zero-stage=2",), marks=needs_deepspeed)], ids=["ddp", "zero-2"])
def test_hugging_faces_trainer_changes_worlds_over_nccl(jobs: Jobs, tmp_path: Path, extra: tuple[str, ...]) -> None:
    """As the example has it."""
    flags = ("--samples=152", "--output-dir=out", *extra)
    preloaded = "tests.support.forks.preloaded_hf"
    training = OnCards(HF, save_every=10, extra=flags, needs_agent=True, preloaded=preloaded)
    job = jobs(training)
    change(job)
    assert_undisturbed(job, training, tmp_path)
