"""The trainer and the evaluator in real worlds: strategies, world sizes, resumes, a leave in an evaluation."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dalsegno.elastic import ElasticSampler
from dalsegno.elastic.checkpoint import CheckpointStore, Manifest
from tests.support.jobs.ports import free_port
from tests.support.pages.sources import ROOT
from tests.support.workers import trainer_worker as worker
from tests.support.workers.fake_agent import FakeAgent
from tests.support.workers.zero_runs import run_world

pytestmark = pytest.mark.timeout(180)

WORKER = Path(worker.__file__)
STEPS = 7


def run(directory: Path, world: int, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Results of each case on each rank."""
    directory.mkdir(parents=True, exist_ok=True)
    cases = [{**case, "port": free_port()} for case in cases]
    ended = run_world(world, [str(WORKER), "--cases", json.dumps(cases), "--out", str(directory)])
    assert [code for code, _ in ended] == [0] * world, "\n".join(output for _, output in ended)
    ranks = [json.loads((directory / f"result-{rank}.json").read_text()) for rank in range(world)]
    return [list(of_case) for of_case in zip(*ranks, strict=True)]


def plain(steps: int, dtype: torch.dtype, case: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a loop without any of ours gives: one process, each global batch at once.

    Args:
        case: With a loss scale: its "overflows".
    """
    torch.manual_seed(5)
    model = worker.Model().to(dtype)
    optimizer = worker.make_optimizer(model)
    scheduler = worker.make_scheduler(optimizer)
    data, sampler = worker.Points(dtype=dtype), ElasticSampler(worker.LENGTH, worker.GLOBAL_BATCH, seed=3)
    scaler = torch.amp.grad_scaler.GradScaler("cpu", init_scale=256.0, growth_interval=2, enabled=case is not None)
    found: dict[str, Any] = {"loss": [], "grad_norm": [], "lr": [], "evaluations": [], "loss_scale": []}
    for step, batch in zip(range(1, steps + 1), sampler, strict=False):
        samples = [data[i] for i in batch.sample_ids]
        together = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
        loss = worker.scaled_losses(model, together, case or {}, step, 0).mean()
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        found["grad_norm"].append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        scaler.step(optimizer)
        scaler.update()
        if step not in (case or {}).get("overflows", ()):
            scheduler.step()
        optimizer.zero_grad()
        found["loss"].append(float(loss.detach()))
        found["loss_scale"].append(scaler.get_scale())
        found["lr"].append(optimizer.param_groups[0]["lr"])
        if step % 3 == 0 or step == steps:
            found["evaluations"].append([step, evaluate_plainly(model, 5, dtype, 1000)])
    return found


def evaluate_plainly(model: nn.Module, length: int, dtype: torch.dtype, first: int = 0) -> dict[str, float]:
    held_out = worker.Points(length, dtype, first=first)
    model.eval()
    with torch.no_grad():
        pairs = [(model(x[None])[0].double(), y.double()) for x, y in (held_out[i] for i in range(length))]
    model.train()
    if not pairs:
        return {}
    squares = [float((output - wanted).square().item()) for output, wanted in pairs]
    right = [bool((output.sign() == wanted).item()) for output, wanted in pairs]
    return {"loss": sum(squares) / length, "accuracy": sum(right) / length, "samples": float(length)}


def assert_close(found: dict[str, Any], wanted: dict[str, Any], tolerance: float, first: int = 0) -> None:
    assert len(found["logs"]) == len(wanted["loss"]) - first
    for index, logged in enumerate(found["logs"], start=first):
        for name in ("loss", "grad_norm", "lr"):
            assert logged[name] == pytest.approx(wanted[name][index], rel=tolerance), (index, name)
    expected = [(step, metrics) for step, metrics in wanted["evaluations"] if step > first]
    assert [step for step, _ in found["evaluations"]] == [step for step, _ in expected]
    for (_, metrics), (_, other) in zip(found["evaluations"], expected, strict=True):
        assert metrics == pytest.approx(other, rel=tolerance)


@pytest.mark.parametrize("world", [3, *(pytest.param(world, marks=pytest.mark.full) for world in (1, 2, 4))])
def test_every_strategy_gives_the_curve_of_a_plain_loop(tmp_path: Path, world: int) -> None:
    """Losses, clipped gradients' norms, learning rates and evaluations, with a rank that has nothing to evaluate."""
    names = ["ddp", "fsdp", "zero1", "zero2", "zero3"]
    cases: list[dict[str, Any]] = [
        {"strategy": name, "steps": STEPS, "double": not name.startswith("zero"), "directory": str(tmp_path / name)}
        for name in names
    ]
    exact, single = plain(STEPS, torch.float64), plain(STEPS, torch.float32)
    for case, ranks in zip(cases, run(tmp_path, world, cases), strict=True):
        assert all(rank["logs"][-1]["loss"] == ranks[0]["logs"][-1]["loss"] for rank in ranks)
        assert all(rank["evaluations"] == ranks[0]["evaluations"] for rank in ranks)
        assert ranks[0]["steps"] == list(range(1, STEPS + 1))
        tolerance = 1e-10 if case["double"] else 2e-5
        assert_close(ranks[0], exact if case["double"] else single, tolerance)
        best = min(ranks[0]["evaluations"], key=lambda pair: pair[1]["loss"])[0]
        assert ranks[0]["best"].startswith(f"step-{best}.")


def test_without_a_norm_no_strategy_clips(tmp_path: Path) -> None:
    """DeepSpeed would, by itself: at 1, which these gradients are beyond."""
    cases: list[dict[str, Any]] = [
        {"strategy": name, "steps": 3, "unclipped": True, "directory": str(tmp_path / name)}
        for name in ("ddp", "zero1", "zero3")
    ]
    ((wanted, *_), *others) = run(tmp_path, 2, cases)
    assert plain(1, torch.float32)["grad_norm"][0] > 1.0
    for found, *_ in others:
        losses = [[logged["loss"] for logged in one["logs"]] for one in (found, wanted)]
        assert losses[0] == pytest.approx(losses[1], rel=2e-5)


@pytest.mark.full
def test_same_world_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """Stopped after step 4 and started again: with dropout, momentum and a scheduler, not one bit differs."""
    cases = []
    # In fp16 two steps are left out before the cut and one behind it, where the scale is about to grow.
    scaled = {"scaled": True, "fp16": True, "overflows": [2, 3, 6]}
    kinds: list[tuple[str, dict[str, Any]]] = [
        *((name, {}) for name in ("ddp", "fsdp", "zero1")),
        *((name, scaled) for name in ("ddp", "fsdp")),
    ]
    for number, (name, options) in enumerate(kinds):
        common = {"strategy": name, "dropout": 0.3, "in_background": name != "ddp", "save_every": 3, **options}
        cases += [
            {**common, "steps": STEPS, "directory": str(tmp_path / f"{number}-whole")},
            {**common, "steps": 4, "directory": str(tmp_path / f"{number}-cut")},
            {**common, "steps": STEPS, "directory": str(tmp_path / f"{number}-cut")},
        ]
    results = run(tmp_path, 2, cases)
    for index in range(0, len(cases), 3):
        for whole, first, second in zip(*results[index : index + 3], strict=True):
            assert (first["steps"], second["steps"]) == ([1, 2, 3, 4], [5, 6, 7])
            found = [{**entry, "seconds_per_step": 0} for entry in first["logs"] + second["logs"]]
            # As text, where a norm that is not a number is equal to itself.
            assert json.dumps(found) == json.dumps([{**entry, "seconds_per_step": 0} for entry in whole["logs"]]), (
                cases[index]
            )
            if cases[index].get("scaled"):
                assert [entry["loss_scale"] for entry in found] == [256, 128, 64, 64, 128, 64, 64]
                assert found[-1]["skipped_steps"] == 3
            assert second["evaluations"] == whole["evaluations"][1:]


@pytest.mark.full
def test_another_world_goes_on_with_the_same_curve(tmp_path: Path) -> None:
    """2 ranks, then 3, then 1: DDP as it is, FSDP by reading only each rank's own rows; and a run at its end."""
    wanted = plain(STEPS, torch.float64)
    last = 0
    for world, steps in ((2, 3), (3, 5), (1, STEPS), (2, STEPS)):
        cases = [
            {"strategy": name, "steps": steps, "double": True, "directory": str(tmp_path / name), "evaluate_every": 100}
            for name in ("ddp", "fsdp")
        ]
        for ranks in run(tmp_path / f"{world}-{steps}", world, cases):
            assert ranks[0]["steps"] == list(range(last + 1, steps + 1))
            for logged, index in zip(ranks[0]["logs"], range(last, steps), strict=True):
                for name in ("loss", "grad_norm", "lr"):
                    assert logged[name] == pytest.approx(wanted[name][index], rel=1e-10), (world, name)
        last = steps


@pytest.mark.parametrize(
    ("stage", "form"),
    [
        (1, "sharded"),
        *(
            pytest.param(*cell, marks=pytest.mark.full)
            for cell in ((1, "universal"), (2, "sharded"), (3, "sharded"), (3, "universal"))
        ),
    ],
)
def test_deepspeed_goes_on_in_another_world_with_the_same_curve(tmp_path: Path, stage: int, form: str) -> None:
    """ZeRO with 1 rank, then 2, then 3: losses, norms, rates, evaluations and the best checkpoint of a plain loop."""
    wanted, evaluations, last = plain(9, torch.float32), list[Any](), 0
    for epoch, (world, steps) in enumerate(((1, 3), (2, 6), (3, 9)), start=1):
        resume = newest(tmp_path) if last else None
        later = None if resume is None or form == "sharded" else universal(tmp_path / "run-0001" / resume.name)
        case = json.dumps([{"strategy": f"zero{stage}", "steps": steps}])
        with FakeAgent(tmp_path, world=world, epoch=epoch, resume=resume, universal=later) as agent:
            agent.start("--cases", case, "--out", str(tmp_path), script=WORKER)
            assert agent.wait(120) == [0] * world, agent.outputs
        ranks = [json.loads((tmp_path / f"result-{rank}.json").read_text())[0] for rank in range(world)]
        assert all(rank["evaluations"] == ranks[0]["evaluations"] for rank in ranks)
        assert ranks[0]["steps"] == list(range(last + 1, steps + 1))
        # Where all load the same next, nothing is sent.
        assert {rank["sent"] for rank in ranks} == {int(resume is None)}
        for logged, index in zip(ranks[0]["logs"], range(last, steps), strict=True):
            assert logged["loss"] == pytest.approx(wanted["loss"][index], rel=1e-5), (world, index)
            assert logged["grad_norm"] == pytest.approx(wanted["grad_norm"][index], rel=1e-4), (world, index)
            assert logged["lr"] == pytest.approx(wanted["lr"][index], rel=1e-12), (world, index)
        evaluations += ranks[0]["evaluations"]
        last = steps
    assert [step for step, _ in evaluations] == [3, 6, 9]
    for (_, metrics), (_, other) in zip(evaluations, wanted["evaluations"], strict=True):
        assert metrics == pytest.approx(other, rel=1e-5)
    assert min(wanted["evaluations"], key=lambda pair: pair[1]["loss"])[0] == 6
    assert ranks[0]["best"].startswith("step-6."), "the world before made it, and this one remembers"


def universal(checkpoint: Path) -> Manifest:
    """What an agent may have made before it starts another number of ranks."""
    target = checkpoint.with_name(f"{checkpoint.name}.universal.1")
    command = [sys.executable, "-m", "dalsegno.elastic.universal", f"--source={checkpoint}", f"--target={target}"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return Manifest.read(target)


@pytest.mark.full
def test_a_gradient_that_overflows_on_one_rank_is_left_out_on_all(tmp_path: Path) -> None:
    """In 3 ranks, then 2, then 1: the batch is consumed, weights, moments and learning rate stay, the scale is halved.

    Gradients are the loss's own before they are clipped: their norms are those of a plain loop.
    """
    scaled = {"scaled": True, "overflows": [2, 4, 5]}
    wanted = plain(STEPS, torch.float64, scaled)
    assert wanted["loss_scale"] == [256, 128, 128, 64, 32, 32, 64]
    last = 0
    for world, steps in ((3, 3), (2, 5), (1, STEPS)):
        cases = [
            {"strategy": name, "steps": steps, "double": True, "directory": str(tmp_path / name), **scaled}
            for name in ("ddp", "fsdp")
        ]
        for ranks in run(tmp_path / f"{world}-{steps}", world, cases):
            assert all(rank["logs"][-1]["loss_scale"] == ranks[0]["logs"][-1]["loss_scale"] for rank in ranks)
            assert ranks[0]["steps"] == list(range(last + 1, steps + 1))
            for logged, index in zip(ranks[0]["logs"], range(last, steps), strict=True):
                assert logged["skipped_steps"] == sum(step <= index + 1 for step in scaled["overflows"])
                for name in ("loss", "grad_norm", "lr", "loss_scale"):
                    if math.isfinite(wanted[name][index]):
                        assert logged[name] == pytest.approx(wanted[name][index], rel=1e-10), (world, index, name)
                    else:
                        assert not math.isfinite(logged[name])
        last = steps


# What is otherwise, and the reason: ours, or what DeepSpeed says of it.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other names": ({"model": "other"}, "another model: none of its 13 names|does not fit this training .*Missing key"),
    "more names": ({"model": "wide"}, "another model: .* only in the model|does not fit this training .*Missing key"),
    "other groups": (
        {"optimizer": "one group"},
        "2 groups|number of parameter groups|does not fit this training|saved in another order",
    ),
    "other optimizer": (
        {"optimizer": "another kind"},
        "has optimizer AdamW and scheduler .*this one has optimizer Adam ",
    ),
    "no scheduler": ({"unscheduled": True}, "scheduler LambdaLR, this one has optimizer AdamW:|has one scheduler"),
    "length": ({"length": 51}, "length was 50 and is 51"),
    "global batch": ({"global_batch": 12}, "global_batch_size was 13 and is 12"),
    "seed": ({"seed": 4}, "seed was 3 and is 4"),
    "strategy": ({"strategy": "ddp"}, "written with strategy .*, and this run has ddp"),
}


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["fsdp", "zero1", pytest.param("zero3", marks=pytest.mark.full)])
def test_every_strategy_refuses_what_is_not_the_same_training(tmp_path: Path, strategy: str) -> None:
    """On all ranks, before the first step, in one line with the reason; and the right one still goes on."""
    right = {"strategy": strategy, "steps": 2, "directory": str(tmp_path / "a")}
    wrong = [{**right, "steps": 3, "refused": True, **options} for options, _ in REFUSED.values()]
    other = {**right, "directory": str(tmp_path / "b")}
    new = [{**other, "unscheduled": True}, {**other, "steps": 3, "refused": True}]
    _, *refused, last, _, scheduled = run(tmp_path, 2, [right, *wrong, {**right, "steps": 3}, *new])
    for (name, (_, reason)), ranks in zip(REFUSED.items(), refused, strict=True):
        for rank in ranks:
            assert re.search(rf"^ValueError: .*({reason})", rank["refused"]), (name, rank["refused"])
            assert (rank["steps"], rank["refused"].count("\n")) == ([], 0)
    for rank in scheduled:
        assert re.search("ValueError: .*(has no scheduler|does not fit .*scheduler LambdaLR)", rank["refused"])
    assert last[0]["steps"] == [3]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_loop_of_ones_own_leaves_the_same_steps_out(tmp_path: Path, sharded: bool) -> None:
    """DDP with TrainingState, cut and resumed with another world; FSDP1 with torch's sharded scaler."""
    case = {"kind": "by hand", "sharded": sharded, "scaled": True, "overflows": [2, 4, 5]}
    # FSDP1 clips in float32 only.
    dtype, tolerance = (torch.float32, 2e-5) if sharded else (torch.float64, 1e-10)
    wanted = plain(STEPS, dtype, case)
    found: dict[str, list[float]] = {"loss": [], "loss_scale": [], "grad_norm": []}
    for world, steps in ((3, STEPS),) if sharded else ((2, 4), (3, STEPS)):
        directory = None if sharded else str(tmp_path / "checkpoints")
        (ranks,) = run(tmp_path / str(world), world, [{**case, "steps": steps, "directory": directory}])
        for name, values in found.items():
            assert all(str(rank[name]) == str(ranks[0][name]) for rank in ranks)
            values += ranks[0][name]
    assert found["loss_scale"] == wanted["loss_scale"]
    assert found["loss"] == pytest.approx(wanted["loss"], rel=tolerance)
    finite = [norm for norm in found["grad_norm"] if math.isfinite(norm)]
    assert finite == pytest.approx([norm for norm in wanted["grad_norm"] if math.isfinite(norm)], rel=tolerance)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_evaluation_is_the_same_in_every_world(tmp_path: Path, world: int) -> None:
    """Any length, any batch size, streams too; every rank makes the same collectives; nothing gives nothing."""
    cases: list[dict[str, Any]] = [
        {"kind": "evaluate", "length": length, "batch": batch, "stream": stream}
        for length, batch in ((0, 2), (1, 3), (5, 1), (5, 2), (23, 4), (23, 64))
        for stream in (False, True)
    ]
    if world > 2:
        cases.append({"kind": "evaluate", "own_shards": True, "length": 0})
    results = run(tmp_path, world, cases)
    torch.manual_seed(5)
    model = worker.Model().double()
    for case, ranks in zip(cases, results, strict=True):
        assert all(rank == ranks[0] for rank in ranks), case
        # What the ranks have, before each batch of a stream and at its end, the metrics' names, and their sums.
        compared, gathered, reduced = ["all_gather", "all_gather"], ["all_gather", "all_gather"], ["all_reduce"]
        rounds = 1 + -(-case["length"] // (case["batch"] * world)) if case.get("stream") else 0
        told = compared if not case.get("own_shards") else []
        sums = reduced if case["length"] or case.get("own_shards") else []
        # Behind the first batch of a stream, what it began with.
        first = compared if rounds > 1 else []
        expected = [*told, *reduced[:rounds], *first, *reduced * (rounds - 1), *gathered, *sums]
        assert ranks[0]["calls"] == (expected if world > 1 else [])
        if case.get("own_shards"):
            wanted = {"loss": 10 / 6, "errors": 3.0, "late": 0.5}
        else:
            wanted = evaluate_plainly(model, case["length"], torch.float64)
        assert ranks[0]["metrics"] == pytest.approx(wanted, rel=1e-12), case


def wait_until(happened: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # why: a file of another process appears without a word


def newest(directory: Path) -> Manifest:
    manifest = CheckpointStore(directory / "run-0001").newest()
    assert manifest is not None
    return manifest


def test_a_leave_cuts_an_evaluation_short_and_the_next_world_makes_it(tmp_path: Path) -> None:
    """The notice is for saving: the ranks leave at once; the evaluation of that step is made where they resume."""
    marker = tmp_path / "evaluating"
    case = {"strategy": "ddp", "steps": 6, "held_out": 60, "batch": 1, "slow": 0.5, "marker": str(marker)}
    case["best"] = "max"  # the loss falls: the first step that is evaluated stays the best
    with FakeAgent(tmp_path, world=2, epoch=1) as agent:
        agent.start("--cases", json.dumps([case]), "--out", str(tmp_path), script=WORKER)
        wait_until(marker.exists, 30)
        agent.drain()
        assert agent.wait(10) == [83, 83], agent.outputs
    assert newest(tmp_path).step == 3
    with FakeAgent(tmp_path, world=1, epoch=2, resume=newest(tmp_path)) as agent:
        agent.start("--cases", json.dumps([{**case, "slow": 0.0}]), "--out", str(tmp_path), script=WORKER)
        assert agent.wait() == [0], agent.outputs
    result = json.loads((tmp_path / "result-0.json").read_text())[0]
    (first, before), (last, after) = result["evaluations"]
    assert (first, last) == (3, 6)
    assert before["loss"] > after["loss"]
    assert result["best"].startswith("step-3.")
    assert result["steps"] == [4, 5, 6]


def test_the_example_runs_and_runs_again(tmp_path: Path) -> None:
    """`examples/trainer.py`, and once more: it has nothing left to do and says the same."""
    command = [str(ROOT / "examples" / "trainer.py"), "--steps=4", f"--checkpoint-dir={tmp_path}"]
    said = []
    for first in (True, False):
        ((code, output),) = run_world(1, command)
        assert code == 0, output
        assert re.findall(r"^step (\d+)/4: loss", output, re.MULTILINE) == (["4", "4"] if first else [])
        said.append(re.findall(r"^4 steps; best: step-4\..*$", output, re.MULTILINE))
    assert said[0] == said[1] != []
