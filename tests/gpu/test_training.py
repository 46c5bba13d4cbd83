"""Trainings on a card: bit for bit the same after a resume in the same world, and at home on the CPU as well."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.scenes import CARDS, DEVICE, at_step, environment, long_without_card, needs_deepspeed, run, touches_card

pytestmark = pytest.mark.timeout(280)

STEPS, SAVED = 6, 3
CARDS_HERE = ",".join(map(str, range(max(1, CARDS))))
Cases = list[dict[str, Any]]
PLAIN: Cases = [
    {"strategy": "ddp", "precision": "fp32", "loaders": True},
    {"strategy": "ddp", "precision": "bf16"},
    {"strategy": "ddp", "precision": "fp16"},
    {"strategy": "fsdp", "precision": "fp32"},
    {"strategy": "fsdp", "precision": "bf16"},
]
# What DeepSpeed makes of fp16 on CPUs is no question of ours.
ZERO: Cases = [
    {"strategy": f"zero{stage}", "precision": precision}
    for stage in (1, 2, 3)
    for precision in ("fp32", "bf16", *(("fp16",) if DEVICE == "cuda" else ()))
]


def name_of(case: dict[str, Any]) -> str:
    return f"{case['strategy']}-{case['precision']}"


def undisturbed(tmp_path: Path, world: int, cases: Cases) -> tuple[Cases, list[list[dict[str, Any]]]]:
    """Runs all from step 0 to the end; the cases with their directories, and what came of them."""
    made = [
        {**case, "steps": STEPS, "save_every": SAVED, "directory": str(tmp_path / "whole" / name_of(case))}
        for case in cases
    ]
    return made, run(tmp_path / "first", world, made)


def resumed(tmp_path: Path, cases: Cases, **more: Any) -> Cases:
    """The same, from the checkpoint in their middle on."""
    return [
        {
            **case,
            **more,
            "save_every": 0,
            "directory": at_step(Path(case["directory"]), tmp_path / "resumed" / name_of(case), SAVED),
        }
        for case in cases
    ]


def assert_same(cases: Cases, whole: list[list[dict[str, Any]]], later: list[list[dict[str, Any]]]) -> None:
    for case, first, second in zip(cases, whole, later, strict=True):
        for rank, (one, other) in enumerate(zip(first, second, strict=True)):
            where = f"{name_of(case)}, rank {rank}"
            assert sorted(map(int, other["losses"])) == list(range(SAVED + 1, STEPS + 1)), where
            assert {**one["losses"], **other["losses"]} == one["losses"], where
            assert (other["model"], other["evaluated"]) == (one["model"], one["evaluated"]), where
            assert other["device"].startswith(DEVICE), where


def test_one_rank_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """DDP and FSDP2, fp32, bf16 with fp32 masters, fp16 with its scale; dropout, saved in the background."""
    cases, whole = undisturbed(tmp_path, 1, PLAIN)
    assert_same(cases, whole, run(tmp_path / "second", 1, resumed(tmp_path, cases)))


@long_without_card
def test_two_ranks_go_on_bit_for_bit(tmp_path: Path) -> None:
    """Each on its own card over NCCL where there are two, else both on one over gloo: DDP in three precisions."""
    cases, whole = undisturbed(tmp_path, 2, PLAIN[:3])
    assert_same(cases, whole, run(tmp_path / "second", 2, resumed(tmp_path, cases)))
    if CARDS:
        assert [rank["current"] for rank in whole[0]] == [0, 1 % CARDS], "bound by local rank"
        assert ["nccl" in rank["backend"] for rank in whole[0]] == [CARDS > 1] * 2


@long_without_card
@needs_deepspeed
def test_zero_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Stages 1 to 3, in each precision that there is here."""
    cases, whole = undisturbed(tmp_path, 1, ZERO)
    assert_same(cases, whole, run(tmp_path / "second", 1, resumed(tmp_path, cases)))


def assert_close(there: dict[str, str], here: dict[str, str], steps: range) -> None:
    """Without dropout, whose masks are others on another kind of device, the losses are the same but for rounding."""
    assert sorted(map(int, here)) == list(steps)
    for step in sorted(set(here) & set(there)):
        assert float.fromhex(here[step]) == pytest.approx(float.fromhex(there[step]), rel=1e-4), step


@long_without_card
def test_checkpoints_go_from_card_to_cpus_and_back(tmp_path: Path) -> None:
    """What one rank saved on a card two ranks load on CPUs (FSDP re-shards), and what they save the card loads."""
    plain = [{**case, "dropout": 0.0, "loaders": False} for case in (PLAIN[0], PLAIN[3])]
    cases, whole = undisturbed(tmp_path, 1, plain)
    on_cpus = [{**case, "device": "cpu", "steps": STEPS + 2, "save_every": 1} for case in resumed(tmp_path, cases)]
    moved = run(tmp_path / "cpus", 2, on_cpus)
    for ranks, before in zip(moved, whole, strict=True):
        assert [rank["device"] for rank in ranks] == ["cpu", "cpu"]
        assert [rank["started cuda"] for rank in ranks] == [False, False], "a training on CPUs leaves cards alone"
        assert_close(before[0]["losses"], ranks[0]["losses"], range(SAVED + 1, STEPS + 3))
    back = [
        {**case, "device": None, "directory": at_step(Path(case["directory"]), tmp_path / "back" / name_of(case), 5)}
        for case in on_cpus
    ]
    for ranks, before in zip(run(tmp_path / "card", 1, back), moved, strict=True):
        assert ranks[0]["device"].startswith(DEVICE)
        assert_close(before[0]["losses"], ranks[0]["losses"], range(STEPS, STEPS + 3))


@needs_deepspeed
def test_zero_of_a_card_converts_and_reshards(tmp_path: Path) -> None:
    """Its shards become universal files where no card is in sight, and two ranks on CPUs take their parts of them."""
    from dalsegno.elastic.universal import convert

    cases, _ = undisturbed(tmp_path, 1, [{"strategy": "zero2", "precision": "fp32"}])
    (case,) = resumed(tmp_path, cases)
    (source,) = Path(case["directory"]).glob("step-*")
    convert(source, tmp_path / f"{source.name}.universal.1")
    universal = tmp_path / f"{source.name}.universal.1"
    values = torch.load(next(universal.rglob("first.weight/fp32.pt")), weights_only=True, map_location="cpu")
    shards = next(source.rglob("*model_states.pt"))
    saved = torch.load(shards, weights_only=False, map_location="cpu")["module"]["first.weight"]
    assert torch.equal((values["param"] if isinstance(values, dict) else values).reshape(saved.shape), saved)
    two = run(tmp_path / "cpus", 2, [case], CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    assert sorted(map(int, two[0][0]["losses"])) == list(range(SAVED + 1, STEPS + 1))


# The converter as it is executed, with all that it imports; then it says what it sees, and waits.
CONVERTER = """
import json, os, runpy, sys, torch
sys.argv = ["universal", "--standby"]
try:
    runpy.run_module("dalsegno.elastic.universal", run_name="__main__")
except SystemExit as end:
    said = {"code": end.code, "started": torch.cuda.is_initialized(), "cards": torch.cuda.device_count()}
    said["visible"] = os.environ["CUDA_VISIBLE_DEVICES"]
    os.write(int(os.environ["SAY"]), json.dumps(said).encode())
os.read(int(os.environ["HELD"]), 1)
"""


@needs_deepspeed
def test_a_converter_leaves_cards_alone() -> None:
    """It runs beside trainings: it sees no card, and not a byte of its memory is on one."""
    held, let_go = os.pipe()
    answer, say = os.pipe()
    told = environment(HELD=str(held), SAY=str(say), CUDA_VISIBLE_DEVICES=CARDS_HERE)
    process = subprocess.Popen(
        [sys.executable, "-c", CONVERTER], env=told, stdin=subprocess.DEVNULL, pass_fds=[held, say]
    )
    try:
        os.close(say)
        # Nothing comes of one that has died.
        said = json.loads(os.read(answer, 4096) or b"null")
        assert said == {"code": 0, "started": False, "cards": 0, "visible": ""}
        assert not touches_card(process.pid)
        os.close(let_go)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait(60)
        os.close(held)
        os.close(answer)
