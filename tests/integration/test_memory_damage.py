"""Damage in each kind of file of a memory checkpoint, on one node or on all: found, said once, and never used."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.test_memory import (
    BESIDE_DISK,
    HELD,
    ON_DISK,
    STEPS,
    Clusters,
    assert_said_once,
    end,
    flip,
    jobs,
    together,
    wait_held,
)
from tests.support.jobs.cluster import TRAIN, Cluster, Training, Undisturbed

pytestmark = [pytest.mark.timeout(300), pytest.mark.full]

__all__ = ["jobs"]

ZERO = Training(script=TRAIN, steps=STEPS, save_every=ON_DISK, extra=("--zero-stage=1",))


def page(path: Path) -> None:
    """Clears a page in the middle, or all of a smaller file."""
    data = bytearray(path.read_bytes())
    begin = len(data) // 2 & ~4095 if len(data) > 4096 else 0
    data[begin : begin + 4096] = bytes(len(data[begin : begin + 4096]))
    overwrite(path, bytes(data))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def overwrite(path: Path, data: bytes) -> None:
    """In its place: the file stays the same one."""
    with path.open("r+b") as file:
        file.write(data)


Damage = Callable[[Path], None]

# Which file, how, and of what training.
DAMAGES = [
    ("model.pt", page, BESIDE_DISK),
    ("training.pt", flip, BESIDE_DISK),
    ("training.pt", extend, BESIDE_DISK),
    ("rng/*", flip, BESIDE_DISK),
    ("rng/*", truncate, BESIDE_DISK),
    ("MANIFEST.json", flip, BESIDE_DISK),
    ("MANIFEST.json", truncate, BESIDE_DISK),
    ("MANIFEST.json", extend, BESIDE_DISK),
    ("*_optim_states.pt", flip, ZERO),
    ("*_model_states.pt", page, ZERO),
]


def damage_all(steps: list[Path], which: str, damage: Damage) -> None:
    """The same file in each of these copies."""
    for step in steps:
        path = sorted(step.rglob(which) if "/" not in which else step.glob(which))[0]
        damage(path)


def held_and_on_disk(jobs: Clusters, training: Training) -> tuple[Cluster, int, list[Path]]:
    """Two nodes, a step in the memory of both, and an older one on the disk."""
    job, first = together(jobs, "a", "b", training=training)
    steps = wait_held(job, job.alive())
    job.wait_for(lambda: ON_DISK in {one.step for one in job.sealed()}, "the save on the disk")
    return job, first, steps


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize(("which", "damage", "training"), DAMAGES)
def test_one_copy(
    jobs: Clusters, undisturbed: Undisturbed, which: str, damage: Damage, training: Training, where: int
) -> None:
    """The other node's is used, whichever of them it is."""
    job, first, steps = held_and_on_disk(jobs, training)
    damage_all([steps[where]], which, damage)
    os.kill(job.worker_pid(job.node("b")), signal.SIGKILL)
    second = job.wait_world(2, after=first)
    assert job.change(second).resumed == HELD
    assert_said_once(job, rf"cannot load step-{HELD}\S* from its memory .*: other copies of it are tried")
    end(job, undisturbed)


@pytest.mark.parametrize(("which", "damage", "training"), DAMAGES)
def test_all_copies(jobs: Clusters, undisturbed: Undisturbed, which: str, damage: Damage, training: Training) -> None:
    """The disk's commit is used."""
    job, first, steps = held_and_on_disk(jobs, training)
    damage_all(steps, which, damage)
    os.kill(job.worker_pid(job.node("b")), signal.SIGKILL)
    second = job.wait_world(2, after=first)
    assert job.change(second).resumed == ON_DISK
    assert_said_once(job, rf"step-{HELD}\S* was in memory only, .*: going back to step-{ON_DISK}")
    end(job, undisturbed)
