"""Nodes come and one is killed, with trainings on cards: both on one card over gloo, and each on its own over NCCL."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.history import KeptStep, StepLogReader, kept_history
from tests.gpu import scenes
from tests.gpu.scenes import DEVICE, environment, needs_two
from tests.support.jobs.cluster import HOOKED, Cluster, Training, Undisturbed
from tests.support.pages.sources import ROOT

pytestmark = pytest.mark.timeout(290)

SCRIPT = Path(__file__).with_name("train.py")
# Seconds that a killed peer may cost the survivor: less than any timeout of NCCL's, more than a slow machine needs.
SECONDS = 60.0


@dataclass(frozen=True)
class OnCards(Training):
    """The script by its path: it is no example."""

    script: Path = SCRIPT
    steps: int = 60
    save_every: int = 5

    def words(self, *, hooked: bool) -> list[str]:
        return [str(HOOKED), str(self.script)] if hooked else [str(self.script)]


class Alone(Undisturbed):
    """Executed, where nothing is forked."""

    def history(self, training: Training) -> dict[int, KeptStep]:
        if not scenes.EXECUTED:
            return super().history(training)
        if training not in self._known:
            place = Path(tempfile.mkdtemp(dir=self._directory))
            flags = [*training.flags(place / "steps"), f"--checkpoint-dir={place / 'checkpoints'}"]
            line = [sys.executable, *training.words(hooked=False), *flags]
            subprocess.run(line, env=environment(), timeout=scenes.PATIENCE, check=True)
            self._known[training] = kept_history(StepLogReader(place / "steps").poll())
        return self._known[training]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Cluster]:
    """On a card every agent is executed, as a user does it."""
    more: dict[str, Any] = {"executed": 99} if scenes.EXECUTED else {}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    told = {"DALSEGNO_TEST_STEPS": "4", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": path}
    with Cluster(tmp_path / "job", OnCards(), nnodes="1:2", universal="", agent_environment=told, **more) as one:
        yield one


def grow_and_lose(job: Cluster, *cards: str) -> None:
    """1, 2, and 1 again, as the newcomer's worker is killed in the middle of its steps."""
    first, second = ({"CUDA_VISIBLE_DEVICES": card} if card else {} for card in (cards or ("", "")))
    job.start("a", environment=first)
    job.wait_world(1, steps=3)
    job.start("b", environment=second)
    both = job.wait_world(2, steps=3)
    killed = job.node("b")
    job.kill_node(killed)
    alone = job.wait_world(1, steps=2, after=both, seconds=SECONDS + 60)
    job.finish(job.node("a"))
    told = job.assert_crash(alone)
    assert told.paused < SECONDS, told
    assert killed.process.poll() == -signal.SIGKILL


def test_one_two_one_on_one_card(job: Cluster, tmp_path: Path) -> None:
    """Both ranks on the first card, over gloo, and one line says so. The losses are the undisturbed run's."""
    card = "0" if DEVICE == "cuda" else ""
    grow_and_lose(job, card, card)
    job.assert_undisturbed(Alone(tmp_path))
    shares = "2 ranks share 1 card" in job.node("a").text()
    assert shares == (DEVICE == "cuda")


@needs_two
def test_a_peers_death_under_nccl(job: Cluster, tmp_path: Path) -> None:
    """The survivor is in a collective that can never end: its process is gone within seconds, and the run goes on."""
    grow_and_lose(job, "0", "1")
    job.assert_undisturbed(Alone(tmp_path))
