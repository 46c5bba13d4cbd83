"""Gradients and loss curves from real processes: at every world size those of one process with the whole batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.workers import curve_worker, gradient_worker
from tests.support.workers.zero_runs import run_world

WORLDS = [1, 2, 3, 4]
STRATEGIES = ["ddp", "fsdp1", "fsdp2", "zero0", "zero1", "zero2", "zero3"]
CLIP = {"clip": 0.1, "rate": 10.0}
"""Well below the gradients' norm; the rate makes updates as large as without."""

# Few cells, that together have each strategy, mean, precision, clipping, padding and NaN; all of them are in `full`.
DDP_TOKENS = {"strategy": "ddp", "mean": "tokens", "double": True, **CLIP}
DDP_PADDED = {"strategy": "ddp", "mean": "samples", "pad": True, "plant_nan": True}
FSDP1 = {"strategy": "fsdp1", "mean": "tokens", "plant_nan": True}
FSDP2 = {"strategy": "fsdp2", "mean": "samples", "double": True, "plant_nan": True, **CLIP}
ZERO_1 = {"strategy": "zero1", "mean": "samples", "plant_nan": True, **CLIP}
ZERO_2 = {"strategy": "zero2", "mean": "tokens"}
ZERO_3 = {"strategy": "zero3", "mean": "tokens", "plant_nan": True, **CLIP}
FEW: dict[int, list[dict[str, Any]]] = {
    1: [DDP_TOKENS, FSDP2, ZERO_2],
    2: [DDP_TOKENS, FSDP1, ZERO_1],
    3: [DDP_PADDED, FSDP2, ZERO_2],
    4: [DDP_PADDED, FSDP1, FSDP2, ZERO_1, ZERO_3],
}


def all_cases() -> list[dict[str, Any]]:
    found = []
    for strategy in STRATEGIES:
        for mean in ("samples", "tokens"):
            for options in (
                {},
                CLIP,
                {"plant_nan": True},
                {"micro": 1},
                {"micro": 13},
                {"pad": True, "plant_nan": True},
            ):
                found.append({"strategy": strategy, "mean": mean, **options})
                # DeepSpeed reduces no float64, and FSDP1 clips none.
                if strategy in ("ddp", "fsdp2") or (strategy == "fsdp1" and options is not CLIP):
                    found.append({"strategy": strategy, "mean": mean, "double": True, **options})
        if strategy == "fsdp1":
            found.append({"strategy": strategy, "mean": "samples", "plant_nan": True, "use_orig_params": False})
    return found


def run(world: int, cases: list[dict[str, Any]], out: Path, script: str, name: str) -> list[list[Any]]:
    """The results of each case, of all ranks."""
    done = run_world(world, [script, json.dumps(cases), str(out)], seconds=60 + 15 * len(cases))
    assert not any(code for code, _ in done), "\n".join(output for _, output in done)
    ranks = [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(world)]
    return [list(each) for each in zip(*ranks, strict=True)]


def check(world: int, cases: list[dict[str, Any]], out: Path) -> None:
    fillers = 0
    for case, ranks in zip(cases, run(world, cases, out, gradient_worker.__file__, "result"), strict=True):
        limit = 1e-12 if case.get("double") else 1e-6
        for result in ranks:
            a = -(-gradient_worker.GLOBAL_BATCH // (world * case.get("micro", 3)))
            assert result["accumulation"] == a
            assert len(result["errors"]) == 2
            assert all(error < limit for error in result["errors"]), (case, result)  # false for NaN
            assert result["deferrals"] == 2 * (a - 1), case
            assert result["position"] == [1, 0]
            # ZeRO 2 and 3 partition gradients as they come; FSDP2 alone has nobody to reduce with.
            if case["strategy"] not in ("zero2", "zero3") and (world > 1 or case["strategy"] != "fsdp2"):
                assert result["synchronised"] == ([False] * (a - 1) + [True]) * 2, case
            fillers += result["fillers"]
    assert fillers or world < 4, "the short last batch leaves a rank without samples"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("world", WORLDS)
def test_gradients_are_those_of_one_process(world: int, tmp_path: Path) -> None:
    """13 samples a step, then 7: updates equal to 1e-6 (fp64 1e-12), a - 1 deferrals, no NaN from what counts not."""
    check(world, FEW[world], tmp_path)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_all_cells(world: int, strategy: str, tmp_path: Path) -> None:
    """Every strategy with both means, with and without clipping, NaN, padding, and the extreme accumulations."""
    check(world, [case for case in all_cases() if case["strategy"] == strategy], tmp_path)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_curves_with_fixed_micro_batches_do_not_depend_on_the_world(tmp_path: Path) -> None:
    """Dropout 0.1, BatchNorm, a mixture of experts with its auxiliary loss, and random augmentation in workers.

    Without fixed micro-batches the same runs differ by far: the comparison can fail.
    """
    fixed, double = {"fixed": True}, {"fixed": True, "double": True, "workers": 1}
    free = {"fixed": False, "drop_last": True}
    curves = {}
    for world in WORLDS:
        cases = [fixed, double, free] if world in (1, 3) else [fixed]
        ranks = run(world, cases, tmp_path, curve_worker.__file__, "curve")
        assert all(each == curve[0] for curve in ranks for each in curve)
        curves[world] = [curve[0] for curve in ranks]
    assert len(curves[1][0]) == 8
    for world in WORLDS[1:]:
        assert curves[world][0] == pytest.approx(curves[1][0], rel=1e-5)
    assert curves[3][1] == pytest.approx(curves[1][1], rel=1e-10)
    assert max(abs(a - b) for a, b in zip(curves[3][2], curves[1][2], strict=True)) > 1e-2


CURVES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
# By world: each strategy in at least two.
COVERING = {1: ("fsdp", "zero2"), 2: ("zero1", "zero3"), 3: CURVES, 4: ("ddp", "zero2")}


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cells",
    [
        pytest.param(COVERING, id="covering"),
        pytest.param(dict.fromkeys(WORLDS, CURVES), id="all", marks=pytest.mark.full),
    ],
)
def test_fixed_micro_batches_give_every_strategy_the_same_curve(
    tmp_path: Path, cells: dict[int, tuple[str, ...]]
) -> None:
    """DDP's at one rank, at every world size: nobody else draws random numbers or sees other micro-batches."""
    [alone] = run(1, [{"fixed": True, "strategy": "ddp"}], tmp_path, curve_worker.__file__, "curve")
    for world, strategies in cells.items():
        cases = [{"fixed": True, "strategy": strategy} for strategy in strategies]
        curves = run(world, cases, tmp_path, curve_worker.__file__, "curve")
        for strategy, ranks in zip(strategies, curves, strict=True):
            for found in ranks:
                assert found == pytest.approx(alone[0], rel=1e-5), (world, strategy)
