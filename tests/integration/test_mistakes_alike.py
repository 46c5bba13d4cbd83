"""What is the same only in distribution after a change of the world, and what keeps it exact: with real ranks."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.pages.mistakes import Comes, brings
from tests.support.workers import alike_worker as worker
from tests.support.workers.zero_runs import run_world

pytestmark = [pytest.mark.timeout(240), pytest.mark.full]

STOP = 3


def losses(world: int, directory: Path, model: str, *, fixed: bool = False) -> dict[int, float]:
    """Of the steps that this start makes: to the end, or where nothing is there yet, to the stop."""
    told = {"model": model, "fixed": fixed, "directory": str(directory), "stop": STOP}
    if directory.exists():
        told["stop"] = worker.STEPS
    output = run_world(world, [worker.__file__, json.dumps(told)])[0][1]
    (line,) = [line for line in output.splitlines() if line.startswith("losses ")]
    return {int(step): loss for step, loss in json.loads(line.removeprefix("losses ")).items()}


def curves(tmp_path: Path, model: str, *, fixed: bool = False) -> tuple[Mapping[int, float], Mapping[int, float]]:
    """Two ranks to step 3, then on: by two ranks again, and by one."""
    begun = tmp_path / "begun"
    losses(2, begun, model, fixed=fixed)
    found = []
    for world in (2, 1):
        shutil.copytree(begun, tmp_path / f"by-{world}")
        found.append(losses(world, tmp_path / f"by-{world}", model, fixed=fixed))
    for curve in found:
        assert sorted(curve) == list(range(STOP + 1, worker.STEPS + 1))
    return found[0], found[1]


def whole(tmp_path: Path, model: str, *, fixed: bool = False) -> dict[int, float]:
    """Two ranks without a stop."""
    told = {"model": model, "fixed": fixed, "directory": str(tmp_path / "whole"), "stop": worker.STEPS}
    output = run_world(2, [worker.__file__, json.dumps(told)])[0][1]
    return {int(k): v for k, v in json.loads(output.split("losses ")[1].splitlines()[0]).items() if int(k) > STOP}


@brings(
    "dropout, stochastic depth and whatever else a model draws at random, resumed by as many ranks",
    Comes.BITWISE,
    "each rank's generators (Python's, NumPy's, torch's, its card's) are saved with every checkpoint and go on",
)
@brings(
    "dropout and whatever else a model draws at random, resumed by another number of ranks",
    Comes.ALIKE,
    "each rank draws by itself, and there are other ranks with other samples: the generators are seeded anew from the"
    " seed, the step and the rank",
    "`fixed_micro_batch=True`: micro-batches are the same in every world, and the generators are set for each of them",
)
def test_random_draws(tmp_path: Path) -> None:
    same, other = curves(tmp_path, "dropout")
    assert same == whole(tmp_path, "dropout")
    assert all(abs(same[step] - other[step]) > 1e-4 for step in same)


@brings(
    "BatchNorm and other statistics of a micro-batch, resumed by another number of ranks",
    Comes.ALIKE,
    "a rank's micro-batches have other samples there, and perhaps another size; and of the running statistics rank 0's"
    " are saved",
    "`fixed_micro_batch=True` keeps what is computed in training; or LayerNorm, GroupNorm",
)
def test_statistics_of_a_micro_batch(tmp_path: Path) -> None:
    same, other = curves(tmp_path, "statistics")
    assert same == whole(tmp_path, "statistics")
    assert any(abs(same[step] - other[step]) > 1e-5 for step in same)


@brings(
    "dropout, BatchNorm and losses of a micro-batch as a whole, with `fixed_micro_batch=True`",
    Comes.ROUNDED,
    "each global batch is cut into the same micro-batches in every world, and the generators are set for each of them",
)
@pytest.mark.parametrize("model", list(worker.MODELS))
def test_fixed_micro_batches(tmp_path: Path, model: str) -> None:
    same, other = curves(tmp_path, model, fixed=True)
    assert same == pytest.approx(whole(tmp_path, model, fixed=True), rel=1e-5)
    assert other == pytest.approx(same, rel=1e-5)


@brings(
    "a generator of your own (`torch.Generator`, `numpy.random.default_rng`, `random.Random`), also with"
    " `fixed_micro_batch`",
    Comes.ALIKE,
    "only the global generators are saved, and set for each micro-batch: yours begins anew at each start, and draws for"
    " other samples where there are other ranks",
    "draw from the global ones (`torch.rand` without `generator=`); or seed yours for each micro-batch, from a seed,"
    " `batch.step` and `micro.number`",
)
def test_a_generator_of_the_scripts_own(tmp_path: Path) -> None:
    same, other = curves(tmp_path, "own generator", fixed=True)
    undisturbed = whole(tmp_path, "own generator", fixed=True)
    assert all(abs(same[step] - undisturbed[step]) > 1e-4 for step in same)
    assert all(abs(other[step] - same[step]) > 1e-4 for step in same)


@brings(
    "parameter groups in another order than they were saved in, with any strategy",
    Comes.REFUSED,
    "states and hyperparameters go by their place in the optimizer: each would get another one's momentum",
    "make the groups as they were, from lists in a fixed order, not from sets",
)
@brings(
    "other parameters trained than when the checkpoint was saved: frozen, unfrozen, added",
    Comes.REFUSED,
    "the optimizer's states belong to other parameters",
    "freeze and group them as they were, or start a new run from the weights",
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "deepspeed"])
def test_other_groups_than_were_saved(tmp_path: Path, strategy: str) -> None:
    """In the same world; on all ranks, before a step. The same groups go on."""
    told = {"model": "dropout", "fixed": False, "strategy": strategy, "stop": STOP}
    begun = tmp_path / "begun"

    def start(groups: list[int], directory: Path, stop: int) -> list[tuple[int, str]]:
        each = {**told, "groups": groups, "directory": str(directory), "stop": stop}
        return run_world(2, [worker.__file__, json.dumps(each)])

    start([0, 3], begun, STOP)
    for name, groups, says in (("turned", [3, 0], "another order"), ("fewer", [0], "other parameters|other than")):
        shutil.copytree(begun, tmp_path / name)
        for code, output in start(groups, tmp_path / name, worker.STEPS):
            assert code != 0, output
            assert re.search(f"ValueError.*({says}|groups with other parameters)", output), output
            assert '"4"' not in output, "a step was made"
    ended = start([0, 3], begun, worker.STEPS)
    assert '"6"' in ended[0][1], ended[0][1]
