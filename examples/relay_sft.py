"""A Hugging Face ``Trainer`` as people have it: it knows nothing of us. A small Llama on the standard library's source.

python examples/relay_sft.py --output_dir out                                    one process
torchrun --nproc-per-node=2 examples/relay_sft.py --output_dir out               two
dalsegno relay deploy/relay/hf-trainer.yaml                                      one pod after another

It saves every ``--save_steps``; on SIGUSR1 it saves, too, and ends.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Blocks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Blocks of source text, one byte per token."""

    def __init__(self, samples: int) -> None:
        self._text, self._samples = common.StdlibText(block_size=32), samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block = self._text[index]
        return {"input_ids": block, "labels": block}


class Watch(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Notes each step on rank 0, stretches steps so that there is something to watch, and saves and ends when asked."""

    def __init__(self, log: Path | None, pace: float) -> None:
        self._log, self._asked, self._clock = log, False, common.StepClock(pace)
        signal.signal(signal.SIGUSR1, self._ask)

    def _ask(self, *_: Any) -> None:
        self._asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock.wait()
        if self._is_asked(args.device):
            control.should_save = control.should_training_stop = True

    def _is_asked(self, device: torch.device) -> bool:
        """Whether any rank was asked: the signal reaches them in different steps, and a save is one of all ranks."""
        asked = torch.tensor(float(self._asked), device=device)
        if dist.is_initialized():
            dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        return bool(asked)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self._log is not None and state.is_world_process_zero and "loss" in logs:
            with open(self._log, "a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, "loss": logs["loss"]}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="A Hugging Face Trainer that knows nothing of us.")
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--resume_from_checkpoint")
    parser.add_argument("--batch_size", type=int, default=8, help="samples of a step, which all ranks share")
    parser.add_argument("--max_steps", type=int, default=100)
    parser.add_argument("--save_steps", type=int, default=20)
    parser.add_argument("--steps_file", type=Path, help="a line for each step: step and loss")
    parser.add_argument("--pace", type=float, default=0.0, help="least seconds of a step")
    flags = parser.parse_args()
    if flags.batch_size % (ranks := int(os.environ.get("WORLD_SIZE", 1))) or flags.batch_size < 1:
        # The next pod may have another number of cards: a batch that grew with them would bend the curve.
        parser.error(f"--batch_size={flags.batch_size} cannot be shared by {ranks} ranks: a multiple of {ranks} can")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=common.VOCABULARY, **sizes))
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=flags.output_dir,
            max_steps=flags.max_steps,
            save_steps=flags.save_steps,
            per_device_train_batch_size=flags.batch_size // ranks,
            logging_steps=1,
            seed=0,
            use_cpu=not torch.cuda.is_available(),
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=Blocks(512),
        callbacks=[Watch(flags.steps_file, flags.pace)],
    )
    trainer.train(resume_from_checkpoint=flags.resume_from_checkpoint)
    trainer.save_model()


if __name__ == "__main__":
    main()
