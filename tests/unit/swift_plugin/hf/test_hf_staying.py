"""What a Trainer must not have if its process is to stay, and what such a process loads all the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from dalsegno.elastic import session
from dalsegno.swift_plugin.hf import staying
from dalsegno.swift_plugin.hf.options import from_environment


class Trainer:
    """Has what is looked at, and nothing that is in the way."""

    def __init__(self, **given: Any) -> None:
        args = {"neftune_noise_alpha": None, "skip_memory_metrics": True, "debug": [], "accelerator_config": None}
        self.args = SimpleNamespace(**{**args, **given})
        self.model_init: Any = None
        self.accelerator = SimpleNamespace(scaler=None)

    def create_accelerator_and_postprocess(self) -> None:
        """Somebody's own, unless it is said to be transformers'."""


Trainer.__module__ = "transformers.trainer"


def test_a_plain_trainer_may_stay() -> None:
    with session():
        pass  # another run of a script without dlrover-run, which is over
    staying.refuse(Trainer(), "ddp")


def test_a_session_that_the_script_has_opened_before() -> None:
    with (
        session(),
        pytest.raises(ValueError, match="stay=True with a session that the script has opened by itself, perhaps"),
    ):
        staying.refuse(Trainer(), "ddp")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch_compile", True),
        ("batch_eval_metrics", True),
        ("neftune_noise_alpha", 5.0),
        ("use_liger_kernel", True),
        ("skip_memory_metrics", False),
        ("debug", ["underflow_overflow"]),
        ("accelerator_config", SimpleNamespace(gradient_accumulation_kwargs={"num_steps": 2})),
    ],
)
def test_arguments_that_it_must_not_have(name: str, value: Any) -> None:
    """What `train()` would do once more, or only once."""
    named = "gradient_accumulation_kwargs" if name == "accelerator_config" else name
    with pytest.raises(ValueError, match=f"stay=True with {named}"):
        staying.refuse(Trainer(**{name: value}), "ddp")


def test_what_else_it_must_not_have() -> None:
    with pytest.raises(ValueError, match="stay=True with deepspeed-zero-1, whose engine fits one number of ranks"):
        staying.refuse(Trainer(), "deepspeed-zero-1")
    trainer = Trainer()
    trainer.model_init = lambda: None
    with pytest.raises(ValueError, match="stay=True with model_init"):
        staying.refuse(trainer, "ddp")
    trainer = Trainer()
    trainer.accelerator.scaler = object()
    with pytest.raises(ValueError, match="stay=True with fp16"):
        staying.refuse(trainer, "ddp")
    with pytest.raises(ValueError, match="create_accelerator_and_postprocess of Own"):
        staying.refuse(Own(), "ddp")


class Own(Trainer):
    """A class of the user's."""

    def create_accelerator_and_postprocess(self) -> None:
        """Does something that nobody knows of."""


@pytest.mark.parametrize(
    ("model", "own"),
    [
        (nn.Linear(2, 2), False),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), True),
        (nn.BatchNorm1d(2, track_running_stats=False), False),
    ],
)
def test_whether_a_rank_may_have_its_own(model: nn.Module, own: bool) -> None:
    """Buffers that are saved are rank 0's."""
    assert staying._has_own(model) is own


def test_buffers_that_are_not_saved() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("beside", model.weight.detach().clone(), persistent=False)
    assert not staying._has_own(model)


def test_tied_weights_are_no_buffers() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    assert not staying._has_own(model)


def test_hooks_of_gradient_checkpointing() -> None:
    """They are as many in each world; the script's own stay."""
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=2, num_hidden_layers=1, vocab_size=16)
    model = LlamaForCausalLM(config)
    embedding = model.get_input_embeddings()
    model.enable_input_require_grads()  # as scripts do with LoRA
    for _ in range(3):
        model.gradient_checkpointing_enable()
        assert len(embedding._forward_hooks) == 2
        staying.unhook(model)
        assert len(embedding._forward_hooks) == 1


@pytest.mark.parametrize(("said", "stays"), [("1", True), ("true", True), ("", False), ("0", False), ("off", False)])
def test_what_a_variable_says(said: str, stays: bool) -> None:
    assert from_environment({"DALSEGNO_STAY": said}).stay is stays


def test_a_variable_that_says_nothing() -> None:
    with pytest.raises(ValueError, match="DALSEGNO_STAY is 'perhaps': 1 or 0 was expected"):
        from_environment({"DALSEGNO_STAY": "perhaps"})
