"""Checkpoints on a disk whose files are those of older ones, written over: real processes, killed at any moment."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint import durability
from dalsegno.elastic.checkpoint.spares import FOLDER
from tests.support.jobs.attacks import Attacks
from tests.support.jobs.cluster import Cluster, Undisturbed
from tests.support.jobs.odd import OddTraining

pytestmark = [pytest.mark.timeout(600)]

Clusters = Callable[..., Cluster]

# The state of the model is large enough that its files are kept.
WIDTH = 2000
ALONE = """
import os, sys, torch
from dalsegno.elastic import session
s = session(sys.argv[1], keep=1)
model = torch.nn.Linear(300, 300)
optimizer = torch.optim.AdamW(model.parameters())
state = s.state(model, optimizer)
data = torch.ones(8, 300)
for batch in s.steps(s.data(data, global_batch=4, micro_batch=4), state, max_steps=8, save_every=1):
    for micro in batch:
        micro.scale(model(micro.data).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()
    print("files", *(entry.inode() for folder, _, files in os.walk(sys.argv[1]) for entry in os.scandir(folder)
            if entry.is_file() and entry.stat().st_size > 1 << 18), flush=True)
s.close()
"""


@pytest.fixture
def of_this_machine(tmp_path: Path) -> None:
    if not durability.is_of_this_machine(tmp_path):
        pytest.skip("the file system of the tests may be used by other machines: no file is kept")


def kept(root: Path) -> list[Path]:
    while True:
        try:
            return [path for path in root.rglob(FOLDER) if path.is_dir()]
        except FileNotFoundError:
            continue  # an agent has deleted a checkpoint meanwhile


@pytest.mark.usefixtures("of_this_machine")
def test_a_script_without_a_master(tmp_path: Path) -> None:
    """Eight saves use the files of three, and the end leaves none of them behind."""
    command = [sys.executable, "-c", ALONE, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    used = {number for line in done.stdout.splitlines() if line.startswith("files ") for number in line.split()[1:]}
    files = [path for path in (tmp_path / "run").rglob("*.pt") if os.stat(path).st_size > 1 << 18]
    assert files
    assert 2 * len(files) <= len(used) <= 3 * len(files), done.stdout
    assert kept(tmp_path) == []


@pytest.mark.full
@pytest.mark.usefixtures("of_this_machine")
def test_a_job_whose_world_changes(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """It goes on from files that were written over, behind a join and a kill, and leaves none of them behind."""
    training = OddTraining(odd="average", width=WIDTH, steps=60, save_every=2)
    flags = ("--keep-checkpoints=1",)
    job = clusters(training=training, nnodes="1:2", step_time=0.1, universal=False, agent_flags=flags)
    job.start("a")
    job.wait_world(1)
    job.wait_step(8)
    assert kept(job.checkpoints), "no file was kept"
    job.start("b")
    job.wait_world(2)
    job.wait_step(max(line.step for line in job.poll()) + 8)
    job.kill_node(job.node("b"))
    job.finish()
    job.assert_undisturbed(undisturbed)
    assert kept(job.checkpoints) == []


@pytest.mark.full
@pytest.mark.usefixtures("of_this_machine")
@pytest.mark.parametrize("seed", range(6))
def test_anything_at_any_moment(clusters: Clusters, undisturbed: Undisturbed, seed: int) -> None:
    """Ranks, agents, nodes, keepers and masters are killed or stopped while every step writes over older files."""
    training = OddTraining(odd="average", width=WIDTH, steps=120, save_every=1, whole=3)
    flags = (f"--keep-checkpoints={1 + seed % 2}", "--max-restarts=1000")
    job = clusters(training=training, nnodes="1:4", step_time=0.1, universal=False, agent_flags=flags)
    attacks = Attacks(job, seed, size=3)
    attacks.begin()
    ways = [attacks.worker, attacks.agent, attacks.node, attacks.leave, attacks.keeper, attacks.master, attacks.stop]
    try:
        while len(attacks.said) < 10 and max(line.step for line in job.poll()) < training.steps // 2:
            attacks.one(ways)
    finally:
        print("\n".join(attacks.said))
    assert len(attacks.said) >= 5
    job.finish()
    job.assert_undisturbed(undisturbed)
