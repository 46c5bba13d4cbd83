"""Starts ZeRO worlds for the tests and reads what their ranks wrote down."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dalsegno.elastic.checkpoint import Manifest, Position, Shape, describe, seal

from ..jobs.ports import free_port
from .ranks import Rank, wait_all

WORKER = Path(__file__).with_name("zero_worker.py")
STEPS = 3
"""Optimizer steps behind every checkpoint of `Sources`."""


def worker_environment(**extra: str) -> dict[str, str]:
    """The environment of a training process: one thread, CPU, nothing of an agent that may have started the tests."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DALSEGNO_", "TORCHELASTIC_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **extra}


def run_world(world: int, command: Sequence[str], *, seconds: float = 120.0, **how: Any) -> list[tuple[int, str]]:
    """Runs ``command`` as ``world`` ranks; exit codes and outputs, in order of rank. Kills all if one hangs.

    ``how``: see ``Rank``.
    """
    port = str(free_port())
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    each = [worker_environment(RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(world)]
    ranks = [Rank(command, environment, **how) for environment in each]
    try:
        return wait_all(ranks, seconds)
    finally:
        for rank in ranks:
            rank.close()


def run_worker(
    world: int, task: dict[str, Any], *, worker: Path = WORKER, seconds: float = 120.0
) -> list[dict[str, Any]]:
    """Runs one task of the ZeRO worker; returns each rank's result, and fails with the ranks' output if one failed."""
    Path(task["out"]).mkdir(parents=True, exist_ok=True)
    results = run_world(world, [str(worker), json.dumps(task)], seconds=seconds)
    failed = [f"rank {rank}: {code}\n{output}" for rank, (code, output) in enumerate(results) if code != 0]
    assert not failed, "\n".join(failed)
    return [json.loads((Path(task["out"]) / f"result-{rank}.json").read_text()) for rank in range(world)]


@dataclass(frozen=True)
class Held:
    """What all ranks of a world held together."""

    states: dict[str, dict[str, Tensor]]  # name -> state -> flat values
    ranks: list[dict[str, Any]]


def read_held(directory: Path, which: str, world: int) -> Held:
    """Puts together the ranks' pieces of every parameter, in the order of where they say they belong."""
    ranks = [torch.load(directory / f"{which}-{rank}.pt") for rank in range(world)]
    shapes = {name: tuple(value.shape) for name, value in ranks[0]["module"].items()}
    states: dict[str, dict[str, Tensor]] = {}
    for name in sorted({name for rank in ranks for name in rank["parameters"]}):
        states[name] = {}
        for state in next(rank["parameters"][name] for rank in ranks if name in rank["parameters"]):
            numel = torch.Size(shapes[name]).numel()
            whole, seen = torch.full((numel,), float("nan"), dtype=torch.float64), 0
            for rank in ranks:
                if name in rank["parameters"]:
                    start, values = rank["parameters"][name][state]
                    values = values[: max(0, numel - start)]
                    whole[start : start + len(values)] = values
                    seen += len(values)
            assert seen == numel, f"{name}/{state}: {seen} of {numel}"
            states[name][state] = whole
    return Held(states, ranks)


def seal_sharded(directory: Path, *, stage: int, world: int, step: int) -> Manifest:
    """Seals what the worker saved, as a session would."""
    manifest = Manifest(
        name=directory.name,
        job_id="job",
        run_id="run-0001",
        step=step,
        epoch=1,
        generation=1,
        form="sharded",
        shape=Shape(world, f"deepspeed-zero-{stage}", stage == 0),
        position=Position(0, step * 12),
        order=None,
        source=None,
        resumed_from=None,
        min_nodes=1,
        max_nodes=4,
        metric=None,
        files=describe(directory, sync=False),
    )
    seal(directory, manifest)
    return manifest


class Sources:
    """Sealed checkpoints after ``STEPS`` steps, one for each way of making one, made when first asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._made: dict[str, tuple[Path, Held]] = {}

    def get(self, stage: int, world: int, **task: Any) -> tuple[Path, Held]:
        """A checkpoint of so many ranks, and what they held; ``task`` says more to the worker."""
        key = json.dumps([stage, world, task])
        if key not in self._made:
            directory = self._root / f"{len(self._made)}"
            path = directory / f"step-{STEPS}.e1.0"
            run_worker(world, {"stage": stage, "steps": STEPS, "save": str(path), "out": str(directory), **task})
            seal_sharded(path, stage=stage, world=world, step=STEPS)
            self._made[key] = path, read_held(directory, "saved", world)
        return self._made[key]
