"""What a universal checkpoint brings back, bit by bit: through `restore`, and where it can through DeepSpeed alone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dalsegno.elastic.universal import EnvironmentFailed, Wish, convert, convert_directory
from tests.support.checkpoints.conversions import target_of
from tests.support.workers.zero_runs import STEPS, Held, Sources, read_held, run_worker

from .test_equality import BF16, CASES, FP16

pytestmark = pytest.mark.timeout(300)
GROUPS = [(0.01, 0.1), (0.02, 0.0), (0.03, 0.0)]


def load(out: Path, world: int, stage: int, source: Path, universal: Path, **task: Any) -> Held:
    """What a fresh world of ``world`` ranks holds after it has loaded ``universal``."""
    resume = {"load": str(source), "form": "universal", "universal": str(universal), "step": STEPS}
    run_worker(world, {"stage": stage, "steps": 1, "out": str(out), **resume, **task})
    return read_held(out, "loaded", world)


def assert_values(loaded: Held, saved: Held) -> None:
    """Weights and the optimizer's states, bit by bit."""
    assert set(loaded.states) == set(saved.states)
    for name, states in saved.states.items():
        assert set(loaded.states[name]) == set(states), name
        for state, value in states.items():
            assert torch.equal(loaded.states[name][state], value), f"{name}/{state}"


def assert_all(loaded: Held, saved: Held) -> None:
    """Also what no optimizer knows, and each group's own hyperparameters and step."""
    assert_values(loaded, saved)
    reference = saved.ranks[0]
    for rank in loaded.ranks:
        for name, value in reference["module"].items():
            assert torch.equal(rank["module"][name], value), name
        for name, value in reference["buffers"].items():
            assert torch.equal(rank["buffers"][name], value), name
        assert [(group["lr"], group["weight_decay"]) for group in rank["hyper"]] == GROUPS
        assert set(rank["steps"]) == set(reference["steps"])
        assert rank["distinct_steps"], "parameter groups share one step"
        assert rank["global_steps"] == STEPS
        assert rank["loss_scale"] == reference["loss_scale"]


def converted(made: Path, tmp_path: Path) -> tuple[Path, Path]:
    source = tmp_path / made.name
    shutil.copytree(made, source)
    convert(source, target_of(source))
    return source, target_of(source)


CHANGES = {
    "names": ({"stage": 2, "world": 2, "model": "names"}, 3),
    "names-zero3": ({"stage": 3, "world": 2, "model": "names"}, 3),
    "outside": ({"stage": 2, "world": 2, "model": "outside"}, 1),
    "sgd": ({"stage": 2, "world": 2, "optimizer": "sgd"}, 3),
    "amsgrad": ({"stage": 1, "world": 2, "optimizer": "amsgrad"}, 3),
    "sgd-zero3-bf16": ({"stage": 3, "world": 2, "optimizer": "sgd", "config": BF16}, 3),
    "sgd-zero3-sub-groups": ({**CASES["zero3-sub-groups"], "optimizer": "sgd"}, 3),
    "amsgrad-zero3-fp16": ({"stage": 3, "world": 2, "optimizer": "amsgrad", "config": FP16}, 1),
    "nadam-zero1-bf16": ({**CASES["zero1-bf16-gradients-in-fp32"], "optimizer": "nadam"}, 3),
    "sgd-zero3-offload": ({**CASES["zero3-offload"], "optimizer": "sgd"}, 3),
    "nadam-zero3": ({"stage": 3, "world": 3, "optimizer": "nadam"}, 2),
    **{case: (task, 3 if task["world"] == 2 else 2) for case, task in CASES.items()},
}
DEFAULT = ("names", "names-zero3", "outside", "zero1-bf16-gradients-in-fp32", "zero3-bf16", "zero3-sub-groups")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in DEFAULT else pytest.mark.full) for case in CHANGES]
)
def test_everything_comes_back_at_another_world_size(sources: Sources, tmp_path: Path, case: str) -> None:
    """Bitwise, in every precision, with odd names, other optimizers, offload, and parameters outside the optimizer."""
    task, world = CHANGES[case]
    made, saved = sources.get(**task)
    source, universal = converted(made, tmp_path)
    task = {key: value for key, value in task.items() if key not in ("stage", "world")}
    loaded = load(tmp_path / "out", world, CHANGES[case][0]["stage"], source, universal, **task)
    assert_all(loaded, saved)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", [BF16, FP16], ids=["bf16", "fp16"])
def test_every_precision_at_every_world_size(
    sources: Sources, tmp_path: Path, precision: dict[str, Any], stage: int, world: int
) -> None:
    """As `test_world_changes` has it for fp32."""
    made, saved = sources.get(stage, 2, config=precision)
    assert_all(load(tmp_path / "out", world, stage, *converted(made, tmp_path), config=precision), saved)


# From a stage to a stage, from ranks to ranks.
ACROSS: list[tuple[int, int, int, int, dict[str, Any]]] = [
    (2, 3, 2, 1, FP16),
    (3, 2, 2, 3, {}),
    (3, 1, 1, 2, FP16),
    (1, 3, 3, 2, BF16),
    (1, 3, 2, 3, {}),
]


across = pytest.mark.parametrize(
    ("old", "new", "ranks", "others", "config"),
    [pytest.param(*change, marks=() if number < 2 else pytest.mark.full) for number, change in enumerate(ACROSS)],
)


@across
def test_the_stage_changes_too(
    sources: Sources, tmp_path: Path, old: int, new: int, ranks: int, others: int, config: dict[str, Any]
) -> None:
    """DeepSpeed's own converter and loaders cannot do this. The script's next stage need not be known before."""
    made, saved = sources.get(old, ranks, config=config)
    source, universal = converted(made, tmp_path)
    assert_all(load(tmp_path / "out", others, new, source, universal, config=config), saved)


EVEN = {"model": "even"}
STOCK = [(2, 2, 3, 1), (3, 2, 2, 2), (2, 2, None, 3), (3, 2, None, 4)]
EVERYWHERE = [
    (stage, 2, into, world)
    for stage in (1, 2, 3)
    for into in (None, 3 if stage < 3 else 2)
    for world in (1, 2, 3, 4)
    if (stage, 2, into, world) not in STOCK
]


@pytest.mark.parametrize(
    ("stage", "old", "into", "new"), [*STOCK, *(pytest.param(*cell, marks=pytest.mark.full) for cell in EVERYWHERE)]
)
def test_a_stock_deepspeed_loads_it(
    sources: Sources, tmp_path: Path, stage: int, old: int, into: int | None, new: int
) -> None:
    """Without any of our repairs weights and moments are right; also where the files were made for the other stage."""
    made, saved = sources.get(stage, old, **EVEN)
    target = tmp_path / "universal"
    convert_directory(made, target, wish=Wish(stage=into))
    loaded = load(tmp_path / "out", new, into or stage, made, target, stock=True, **EVEN)
    assert_values(loaded, saved)


@pytest.mark.parametrize(
    ("stage", "name"),
    [
        (2, "body.weight/fp32.pt"),
        pytest.param(2, "body.weight/exp_avg.pt", marks=pytest.mark.full),
        pytest.param(3, "body.weight/fp32.pt", marks=pytest.mark.full),
        pytest.param(3, "body.weight/exp_avg_sq.pt", marks=pytest.mark.full),
    ],
)
def test_a_missing_file_is_an_error(sources: Sources, tmp_path: Path, stage: int, name: str) -> None:
    """DeepSpeed goes on with random weights, or with moments that are zero."""
    source, universal = converted(sources.get(stage, 2)[0], tmp_path)
    (universal / "zero" / name).unlink()
    state = Path(name).stem
    with pytest.raises(AssertionError, match=rf"body\.weight( has no {state} in the|/{state}\.pt is missing)"):
        load(tmp_path / "out", 1, stage, source, universal)


def test_all_moments_missing_is_an_error(sources: Sources, tmp_path: Path) -> None:
    """DeepSpeed begins Adam anew without a word."""
    source, universal = converted(sources.get(2, 2)[0], tmp_path)
    for path in [*universal.glob("zero/*/exp_avg*.pt")]:
        path.unlink()
    with pytest.raises(AssertionError, match="has no exp_avg in the checkpoint"):
        load(tmp_path / "out", 1, 2, source, universal)


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_stale_latest_universal_is_not_followed(sources: Sources, tmp_path: Path, stage: int) -> None:
    """DeepSpeed without a tag reads nothing else, and goes back silently; or fails where it is not there."""
    made, saved = sources.get(stage, 2)
    source, universal = converted(made, tmp_path)
    (tmp_path / "latest_universal").write_text("step-1.e1.0.universal.1")
    assert_all(load(tmp_path / "out", 1, stage, source, universal), saved)


def test_an_engine_with_round_robin_gradients_is_refused(sources: Sources, tmp_path: Path) -> None:
    """Its weights would be wrong at once. A config that was not made by ours still meets `restore`."""
    source, universal = converted(sources.get(2, 2)[0], tmp_path)
    with pytest.raises(AssertionError, match="round_robin_gradients"):
        load(tmp_path / "out", 2, 2, source, universal, afterwards={"round_robin_gradients": True})


class Bomb:
    """Unpickled, it makes a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


UNSAFE = ["zero/body.weight/fp32.pt", "zero/optimizer_state.pt", "mp_rank_00_model_states.pt"]


@pytest.mark.parametrize("name", [UNSAFE[0], *(pytest.param(name, marks=pytest.mark.full) for name in UNSAFE[1:])])
def test_loading_runs_nothing(sources: Sources, tmp_path: Path, name: str) -> None:
    """DeepSpeed's own loads unpickle whatever there is; in ours they do not, and one line says what was in the way."""
    source, universal = converted(sources.get(2, 2)[0], tmp_path)
    (universal / name).unlink()
    torch.save({"param": Bomb(tmp_path / "boom")}, universal / name)
    with pytest.raises(
        AssertionError, match="not on the list of what is loaded from checkpoints: it is not safe to load"
    ):
        load(tmp_path / "out", 1, 2, source, universal)
    assert not (tmp_path / "boom").exists()


OPTIMIZER, MODEL = "zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"


@pytest.mark.parametrize(("name", "upstream"), [(OPTIMIZER, False), (MODEL, False), (OPTIMIZER, True)])
def test_converting_runs_nothing(sources: Sources, tmp_path: Path, name: str, upstream: bool) -> None:
    """Nor does DeepSpeed's converter, which unpickles all there is, behind our guards."""
    source = unsealed(sources.get(2, 2)[0], tmp_path)
    if upstream:
        describe_parameters(source)
    rewrite(source / name, lambda content: content.update(bomb=Bomb(tmp_path / "boom")))
    with pytest.raises(EnvironmentFailed, match=r"holds posix\.mkdir, which is not on the list"):
        convert_directory(source, tmp_path / "universal")
    assert not (tmp_path / "boom").exists()
    assert not (tmp_path / "universal" / "CONVERTED.json").exists()


def unsealed(made: Path, tmp_path: Path) -> Path:
    """A copy, as a script without ours leaves one."""
    source = tmp_path / "global_step3"
    shutil.copytree(made, source, ignore=shutil.ignore_patterns("MANIFEST.json"))
    return source


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def describe_parameters(source: Path) -> None:
    """Makes it a checkpoint that only DeepSpeed's converter knows, as Megatron's are."""
    patterns = {"universal_checkpoint_version": 0.4, "tp_replicated_parameter_patterns": [".*bias"]}
    rewrite(source / MODEL, lambda content: content.update(universal_checkpoint_info=patterns))
