"""The example of a Hugging Face Trainer as people write theirs; its flags, and

--odd WORDS    with commas, of these:

optimizer      a class that makes its optimizer whenever it is asked
scheduler      one that makes its schedule so, which sets the optimizer's betas
wraps          a model whose class has something wrapped around its forward
patches        a model that has it around its own
arguments      arguments that are set behind elastic()
barrier        ranks that meet there
evaluates      an evaluation there
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

import hf_trainer
import torch
from transformers import Trainer

from dalsegno.swift_plugin import hf


class OwnOptimizer(Trainer):  # type: ignore[misc]  # transformers is not typed
    """Makes one each time."""

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.95)
        return self.optimizer


class OwnScheduler(Trainer):  # type: ignore[misc]
    """Makes one each time."""

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        total = {"total_steps": num_training_steps}
        self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.001, **total)
        return self.lr_scheduler


def tripled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A model's, with three times its loss."""

    @functools.wraps(forward)
    def around(*arguments: Any, **options: Any) -> Any:
        found = forward(*arguments, **options)
        found.loss = 3 * found.loss
        return found

    return around


class Wrapped(hf_trainer.LlamaForCausalLM):  # type: ignore[misc]
    """Has it in its class."""

    forward = tripled(hf_trainer.LlamaForCausalLM.forward)


class Patched(hf_trainer.LlamaForCausalLM):  # type: ignore[misc]
    """Has it in itself."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.forward = tripled(self.forward)


def behind(odd: list[str]) -> Callable[..., Any]:
    """``hf.elastic``, and what such a script does next."""
    plain = hf.elastic

    def elastic(trainer: Any, **options: Any) -> Any:
        plain(trainer, **options)
        if "arguments" in odd:
            trainer.args.max_grad_norm = 0.05
        if "barrier" in odd:
            with trainer.args.main_process_first():
                pass
        if "evaluates" in odd:
            trainer.evaluate()
        return trainer

    return elastic


def main() -> None:
    given = next(flag for flag in sys.argv if flag.startswith("--odd="))
    sys.argv.remove(given)
    odd = given.partition("=")[2].split(",")
    if "optimizer" in odd:
        hf_trainer.Trainer = OwnOptimizer
    if "scheduler" in odd:
        hf_trainer.Trainer = OwnScheduler
    if "wraps" in odd:
        hf_trainer.LlamaForCausalLM = Wrapped
    if "patches" in odd:
        hf_trainer.LlamaForCausalLM = Patched
    if "wraps" in odd or "patches" in odd:
        hf_trainer.TrainingArguments = functools.partial(hf_trainer.TrainingArguments, bf16=True)
    hf.elastic = behind(odd)
    hf_trainer.main()


if __name__ == "__main__":
    main()
