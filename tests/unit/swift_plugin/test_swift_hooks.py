"""What is changed of ms-swift, and what of its trainings is refused."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dalsegno.swift_plugin import PLUGIN

swift_hooks: Any = None
Options: Any = None
deepspeed_engine: Any = None


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Imports ms-swift, which takes seconds, where one of these tests runs, and not wherever they are collected."""
    package, why = "dalsegno.swift_plugin", "the extra `swift` is not installed"
    globals().update(
        swift_hooks=pytest.importorskip(f"{package}.swift_hooks", reason=why),
        Options=pytest.importorskip(f"{package}.hf.options").Options,
        deepspeed_engine=pytest.importorskip(f"{package}.hf.deepspeed_engine"),
    )


def arguments(**changes: Any) -> Any:
    given = {"callbacks": ["dalsegno"], "task_type": "causal_lm", "packing": False, "init_weights": "true"}
    return SimpleNamespace(**{**given, "gradient_accumulation_steps": None, **changes})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"task_type": "embedding"}, "--task_type embedding cannot be trained elastically"),
        ({"init_weights": "pissa_niter_16"}, "use another one"),
        ({"rlhf_type": "grpo"}, "--rlhf_type grpo cannot be trained elastically; what can: dpo, rm"),
        ({"rlhf_type": "dpo", "packing": True}, "leave out --packing"),
        ({"rlhf_type": "dpo", "loss_type": ["bco_pair"]}, "--loss_type bco_pair cannot"),
        ({"rlhf_type": "dpo", "rpo_alpha": 0.5}, "add --fixed_micro_batch true"),
        ({"rlhf_type": "orpo"}, "add --fixed_micro_batch true"),
        ({"tuner_type": "adalora"}, "in no checkpoint; use lora"),
        ({"tuner_type": "llamapro"}, "ms-swift loads no checkpoint of it; use lora"),
        ({"use_swift_lora": True}, "--use_swift_lora cannot be trained elastically"),
        ({"sequence_parallel_size": 2}, "leave out --sequence_parallel_size"),
        ({"tuner_backend": "unsloth"}, "never tried: use peft"),
        ({"lisa_activated_layers": 2}, "draws other layers; leave it out"),
        ({"use_ray": True}, "leave it out, dlrover-run starts it"),
    ],
)
def test_what_cannot_be_exact_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        swift_hooks._refuse(arguments(**change), Options())


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"task_type": "seq_cls"},
        {"rlhf_type": "dpo", "loss_type": ["sigmoid"]},
        {"rlhf_type": "dpo", "loss_type": "sigmoid"},  # what ms-swift makes of one
        {"rlhf_type": "rm"},
    ],
)
def test_what_can_be_is_not(change: dict[str, Any]) -> None:
    swift_hooks._refuse(arguments(**change), Options())
    swift_hooks._refuse(arguments(rlhf_type="orpo"), Options(fixed_micro_batch=True))


def test_the_global_batch_of_ms_swift(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 is usual where it is not told how many steps to accumulate, also to a process that has stayed."""

    def sizes(**change: Any) -> tuple[int | None, int | None]:
        found = swift_hooks.options_of(arguments(**change))
        return found.global_batch_size, found.usual_batch_size

    assert sizes() == (None, 16)
    assert sizes(global_batch_size=24) == (24, None)
    assert sizes(gradient_accumulation_steps=2) == (None, None)
    assert swift_hooks.options_of(arguments(rlhf_type="dpo")).mean_over_samples
    monkeypatch.setenv("DALSEGNO_RESUME_NAME", "step-1.e1.1")
    assert sizes() == (None, 16)


@pytest.mark.parametrize("name", ["deepspeed_elastic", "graceful_exit"])
def test_what_does_the_same_is_to_be_left_out(name: str) -> None:
    given = arguments(callbacks=["dalsegno", name], deepspeed=None)
    with pytest.raises(ValueError, match=f"leave {name} out"):
        swift_hooks._init_deepspeed(lambda args: None, given)


def test_one_output_directory_for_all_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DALSEGNO_JOB_ID", "sft-1")
    monkeypatch.setenv("DALSEGNO_RUN_ID", "run-0002")
    seen = []
    given = arguments(output_dir="out", add_version=True)
    swift_hooks._add_version(lambda args: seen.append((args.output_dir, args.add_version)), given)
    assert seen == [("out/sft-1-run-0002", False)]
    assert given.add_version
    plain = arguments(output_dir="out", add_version=True, callbacks=[])
    swift_hooks._add_version(lambda args: seen.append((args.output_dir, args.add_version)), plain)
    assert seen[1] == ("out", True)


def test_a_training_that_has_not_ended_is_not_told_of() -> None:
    def original(pipeline: Any, trainer: Any) -> dict[str, int]:
        return {"told": 1}

    for run, told in ((None, True), (SimpleNamespace(finished=True), True), (SimpleNamespace(finished=False), False)):
        found = swift_hooks._save_trainer_state(original, None, SimpleNamespace(elastic_run=run))
        assert bool(found) is told


def test_the_plugins_path_is_printed() -> None:
    """As a shell is to be given it."""
    done = subprocess.run([sys.executable, "-m", "dalsegno.swift_plugin"], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == PLUGIN
    assert PLUGIN.is_file()
    # ms-swift puts its directory on the path: nothing else of ours is to be found there.
    assert {path.name for path in PLUGIN.parent.iterdir() if path.suffix == ".py"} == {"__init__.py", PLUGIN.name}


def test_with_deepspeed_too_collectives_have_ms_swifts_timeout_and_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's own would be 10 minutes, and the accelerator's backend."""
    given: list[Any] = []
    monkeypatch.setattr(
        "dalsegno.elastic.deepspeed.prepare", lambda backend, *, timeout: given.append((backend, timeout))
    )
    own = arguments(deepspeed={"zero_optimization": {"stage": 1}}, ddp_backend="gloo", ddp_timeout=18000)
    swift_hooks._init_deepspeed(lambda args: None, own)
    assert given == [("gloo", timedelta(hours=5))]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor])
def test_the_guard_that_the_trainer_switches_off_is_kept(kind: Any) -> None:
    """Of the optimizer that the engine was given, before the first step."""
    optimizer = kind([torch.ones(2, 2, requires_grad=True)])
    engine = SimpleNamespace(
        basic_optimizer=optimizer,
        lr_scheduler=object(),
        zero_optimization_stage=lambda: 2,
        zero_nvme_offload_optimizer=lambda: False,
        optimizer=SimpleNamespace(load_hp_checkpoint_state_from_checkpoint_dir=None, optimizer=optimizer),
        module=SimpleNamespace(parameters=list),
    )
    if kind is torch.optim.AdamW:
        deepspeed_engine.check(engine, allowed=False)
        return
    with pytest.raises(ValueError, match="Adafactor with ZeRO-2"):
        deepspeed_engine.check(engine, allowed=False)
    deepspeed_engine.check(engine, allowed=True)
