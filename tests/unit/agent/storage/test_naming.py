"""What the names of a script's files tell."""

from __future__ import annotations

import pytest

from dalsegno.agent.storage.naming import (
    goes_on_from,
    is_data,
    is_log,
    is_pattern,
    matches,
    number_of,
    ranks_of,
    series_of,
)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("ckpt.pt", None),
        ("ckpt_100.pt", 100),
        ("epoch=0-step=100.ckpt", 100),
        ("epoch=3-val_loss=0.32.ckpt", 3),
        ("last-v1.ckpt", None),
        ("model_rank_1.pt", None),
        ("ckpt_100_rank1.pt", 100),
        ("model-00001-of-00003.safetensors", None),
        ("resnet50.pt", None),
        ("best_0.93.pt", None),
        ("100.pt", 100),
        ("iter_0000100.pt", 100),
        ("rl_model_1000_steps.zip", 1000),
        ("rl_model_replay_buffer_1000_steps.pkl", 1000),
        ("ppo_cartpole_10000_steps.zip", 10000),
        ("a2c-2000-iterations.zip", 2000),
        ("a2c-2000iterations.zip", None),
        ("student_4_steps.pt", None),
        ("unet_4step.safetensors", None),
        ("config_4steps.json", None),
        ("ep0-ba100-rank0.pt", 100),
        ("1ba2c3d4.pt", None),
        ("x-ba2c3d4.pt", None),
        ("epoch_3_100_steps.pt", 3),
        ("loss_0.50_steps.pt", None),
        ("resnet_90_epochs.pt", None),
        ("ppo_7_stepsize.zip", None),
        ("model_5.pth.tar", 5),
        ("model_" + "9" * 16 + ".pt", None),
        ("checkpoint0020.pth", 20),
        ("checkpoint0000.pth", 0),
        ("ckpt01.pth.tar", 1),
        ("model010000.pt", 10000),
        ("state1000.pt", 1000),
        ("model1.pt", None),
        ("model50.pt", None),
        ("ckpt0.pt", None),
        ("checkpoint12.pt", None),
        ("checkpoint512.pt", None),
        ("model_1.5.pt", None),
        ("checkpoint1.5.pt", None),
        ("checkpoint" + "9" * 16 + ".pt", None),
        ("checkpoint_3_512.pt", 3),
        ("checkpoint_100_195.pt", 100),
        ("checkpoint_last.pt", None),
        ("model", None),
    ],
)
def test_numbers_of_files(name: str, number: int | None) -> None:
    """Not those of ranks, shards, versions and losses."""
    assert number_of(name) == number


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("step_520", 520),
        ("checkpoint_3", 3),
        ("epoch=1-step=7", 7),
        ("100", 100),
        ("global_step20", 20),
        ("version_0", None),
        ("run1", None),
        ("v0-20261122-101010", None),
        ("2026-11-22", None),
        ("ppo_10000_steps", None),
        ("1ba2c3d4", None),
        ("7f-ba12", None),
        ("checkpoints", None),
        ("9" * 30, None),
    ],
)
def test_numbers_of_directories(name: str, number: int | None) -> None:
    """A place for several checkpoints may have a number, too."""
    assert number_of(name, directory=True) == number


def test_what_is_one_series() -> None:
    assert series_of("a/ckpt_100.pt") == series_of("a/ckpt_20.pt") != series_of("b/ckpt_20.pt")
    assert ranks_of(["x_rank0.pt", "x_rank_1.pt", "rng_rank_2.pt", "model.pt"]) == {0, 1}


def test_logs_and_notes_are_no_data() -> None:
    assert all(map(is_data, ["ckpt.pt", "weights", "model.safetensors", "a b\nc.bin"]))
    assert not any(map(is_data, ["train.log", "events.out.tfevents.1", "ckpt.pt.tmp", ".hidden", "args.json"]))
    assert is_log("a/train.log")
    assert not is_log("weights.json")


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("*.pt", "ckpt.pt", True),
        ("*.pt", "a/ckpt.pt", False),
        ("**/*.pt", "ckpt.pt", True),
        ("**/*.pt", "a/b/ckpt.pt", True),
        ("a/**", "a/b/c", True),
        ("step_[0-9]*", "step_5", True),
        ("step_[!0-9]*", "step_5", False),
        ("a b\n?", "a b\nc", True),
        ("x(1)+", "x(1)+", True),
    ],
)
def test_patterns(pattern: str, path: str, expected: bool) -> None:
    assert matches(pattern, path) is expected


def test_patterns_stay_below_the_directory() -> None:
    assert is_pattern("a/**/*.pt")
    assert not any(map(is_pattern, ["", "/etc/*", "../*", "a/../../b", "a//b"]))


@pytest.mark.parametrize(
    ("names", "file"),
    [
        (["x/last.pth.tar", "x/model_best.pth.tar"], "x/last.pth.tar"),
        (["checkpoint.pth", "model_best.pth"], "checkpoint.pth"),
        (["best.pt", "last.pt", "swa.pt"], "last.pt"),
        (["bestiary.pt", "best-model.pt"], "bestiary.pt"),
        (["model.pt", "optimizer.pt"], ""),
        (["model.pt", "optimizer.pt", "best.pt"], ""),
        (["model_last.pt", "optimizer_last.pt"], ""),
        (["best_a.pt", "best_b.pt"], ""),
        (["checkpoint_last.pt", "checkpoint_best.pt"], "checkpoint_last.pt"),
        (["checkpoint.pt", "checkpoint_last.pt"], "checkpoint_last.pt"),
        (["blast.pt", "model.pt"], ""),
        (["best/model.pt", "best/optimizer.pt"], ""),
    ],
)
def test_one_of_several_files_is_what_a_script_goes_on_from(names: list[str], file: str) -> None:
    """The others are copies of it at its best. Several that are one checkpoint only together have none."""
    assert goes_on_from(names) == file
