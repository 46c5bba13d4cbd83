"""Our universal files are those of DeepSpeed's converter, tensor by tensor, in every case that both can do."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic.checkpoint import Manifest
from dalsegno.elastic.universal import Wish, convert
from dalsegno.elastic.universal.loading import load
from tests.support.checkpoints.conversions import assert_equal, target_of
from tests.support.workers.zero_runs import Sources

pytestmark = pytest.mark.timeout(300)

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
BF16 = {"bf16": {"enabled": True}}
# A loss scale that has grown by the time of the checkpoint.
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}}
CASES: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1, "world": 3},
    "zero2": {"stage": 2, "world": 2},
    "zero3": {"stage": 3, "world": 3},
    "zero2-one-rank": {"stage": 2, "world": 1},
    "zero3-four-ranks": {"stage": 3, "world": 4},
    "zero1-bf16": {"stage": 1, "world": 2, "config": BF16},
    "zero1-bf16-gradients-in-fp32": {
        "stage": 1,
        "world": 2,
        "config": {**BF16, "data_types": {"grad_accum_dtype": "fp32"}},
    },
    "zero2-bf16": {"stage": 2, "world": 3, "config": BF16},
    "zero3-bf16": {"stage": 3, "world": 2, "config": BF16},
    "zero1-fp16": {"stage": 1, "world": 2, "config": FP16},
    "zero2-fp16": {"stage": 2, "world": 2, "config": FP16},
    "zero3-fp16": {"stage": 3, "world": 2, "config": FP16},
    "zero2-offload": {
        "stage": 2,
        "world": 2,
        "config": {"zero_optimization": {"stage": 2, **OFFLOAD}, "zero_force_ds_cpu_optimizer": False},
    },
    "zero3-offload": {
        "stage": 3,
        "world": 2,
        "config": {"zero_optimization": {"stage": 3, **OFFLOAD}, "zero_force_ds_cpu_optimizer": False},
    },
    "zero3-sub-groups": {
        "stage": 3,
        "world": 2,
        "config": {"zero_optimization": {"stage": 3, "sub_group_size": 40}},
    },
    "zero2-aligned": {
        "stage": 2,
        "world": 2,
        "config": {**BF16, "zero_optimization": {"stage": 2, "parameter_alignment": True}},
    },
    "zero2-sizes": {"stage": 2, "world": 2, "model": "sizes"},
    "zero3-sizes": {"stage": 3, "world": 2, "model": "sizes"},
}


def both(source: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Ours and theirs, of a copy of ``source``."""
    copy = tmp_path / source.name
    shutil.copytree(source, copy)
    convert(copy, target_of(copy, 1))
    convert(copy, target_of(copy, 2), wish=Wish(upstream=True))
    return target_of(copy, 1), target_of(copy, 2)


def assert_same_files(ours: Path, theirs: Path) -> None:
    paths = [entry.path for entry in Manifest.read(ours).files]
    assert paths == [entry.path for entry in Manifest.read(theirs).files]
    for path in paths:
        if path != "zero/optimizer_state.pt":
            assert_equal(load(ours / path), load(theirs / path), path)
    mine, other = load(ours / "zero/optimizer_state.pt"), load(theirs / "zero/optimizer_state.pt")
    assert set(mine) == set(other) - {"fp32_flat_groups"}
    for key in set(mine) - {"optimizer_state_dict"}:
        assert_equal(mine[key], other[key], key)
    if "optimizer_state_dict" in mine:
        # What lies in the parameters' own files, which DeepSpeed leaves in and never reads.
        inner, others = mine["optimizer_state_dict"], other["optimizer_state_dict"]
        assert_equal(inner["param_groups"], others["param_groups"], "param_groups")
        for group, state in others["state"].items():
            assert_equal(inner["state"][group], {"step": state["step"]}, f"state/{group}")


FULL = ("zero2", "zero3", "zero2-one-rank", "zero3-four-ranks", "zero1-bf16", "zero1-fp16", "zero3-fp16")
FULL += ("zero3-offload", "zero2-aligned")


@pytest.mark.parametrize("case", [pytest.param(case, marks=pytest.mark.full if case in FULL else ()) for case in CASES])
def test_same_files_as_deepspeeds_own_converter(sources: Sources, tmp_path: Path, case: str) -> None:
    """File by file, bit by bit: each case has tied weights, a frozen parameter, buffers and three parameter groups."""
    made, _ = sources.get(**CASES[case])
    assert_same_files(*both(made, tmp_path))
