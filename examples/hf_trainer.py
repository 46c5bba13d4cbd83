"""A plain Hugging Face ``Trainer``: a small Llama on the standard library's source text. One line makes it elastic.

python examples/hf_trainer.py                                  one process, as any Trainer script
torchrun --nproc-per-node 2 examples/hf_trainer.py             two
dlrover-run --nnodes=1:4 examples/hf_trainer.py                as many as there are, and they may come and go

Outside ``dlrover-run`` it is a plain Trainer: each rank computes ``--max-micro-batch-size`` samples in a step, and
``--global-batch-size``, ``--memory-every``, ``--fixed-micro-batch``, ``--stay`` and ``--step-log`` have no effect.
"""

from __future__ import annotations

import os
from typing import Any

import common
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from dalsegno.swift_plugin import hf


class Blocks(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Blocks of source text, one byte per token."""

    def __init__(self, first: int, last: int) -> None:
        self._text, self._first, self._last = common.StdlibText(block_size=64), first, last

    def __len__(self) -> int:
        return self._last - self._first

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block = self._text[self._first + index]
        return {"input_ids": block, "labels": block}


class StepLog(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """One line for each step and rank: the samples that it computed, and the loss of the step."""

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        epoch = int(os.environ.get("DALSEGNO_EPOCH", 0))
        self._log = common.StepLog(self._directory, rank=args.process_index, world_size=args.world_size, epoch=epoch)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        run = getattr(self.trainer, "elastic_run", None)
        if "loss" in logs and run is not None:
            self._log.write(
                step=state.global_step,
                data_epoch=run.batch.position.data_epoch,
                sample_ids=run.batch.sample_ids,
                loss=logs["loss"],
                grad_norm=logs["grad_norm"],
            )


class Stretch(TrainerCallback):  # type: ignore[misc]
    """Stretches steps, so that there is something to watch."""

    def __init__(self, seconds: float) -> None:
        self._clock = common.StepClock(seconds)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._clock.wait()


def main() -> None:
    parser = common.parser("A Hugging Face Trainer on the standard library's source text.", without=("checkpoint_dir",))
    parser.add_argument("--output-dir", default="out", help="where the links checkpoint-<n> are put")
    parser.add_argument("--zero-stage", type=int, choices=(1, 2, 3), help="with DeepSpeed; default: DDP")
    parser.add_argument("--evaluate-every", type=int, default=0, metavar="STEPS")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--log-every", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--fixed-micro-batch", action="store_true")
    parser.add_argument("--static-graph", action="store_true", help="of DistributedDataParallel")
    parser.add_argument("--save-total-limit", type=int)
    parser.add_argument("--stay", action="store_true", help="processes stay through changes of the world")
    parser.add_argument("--universal-checkpoint", action="store_true", help="accepted: dlrover-run may add it")
    flags = parser.parse_args()

    deepspeed = None
    if flags.zero_stage is not None:
        hf.prepare()
        zero = {"stage": flags.zero_stage, "stage3_gather_16bit_weights_on_model_save": True}
        deepspeed = {
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
        }
    torch.manual_seed(flags.seed)
    config = LlamaConfig(
        vocab_size=common.VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_dropout=flags.dropout,
        max_position_embeddings=128,
        use_cache=False,
    )
    steps = StepLog(flags.step_log)
    trainer = Trainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir=flags.output_dir,
            per_device_train_batch_size=flags.max_micro_batch_size,
            max_steps=flags.steps,
            learning_rate=flags.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=5,
            save_strategy="steps" if flags.save_every else "no",
            save_steps=flags.save_every or 500,
            save_total_limit=flags.save_total_limit,
            eval_strategy="steps" if flags.evaluate_every else "no",
            eval_steps=flags.evaluate_every or None,
            load_best_model_at_end=bool(flags.evaluate_every),
            metric_for_best_model="loss" if flags.evaluate_every else None,
            logging_steps=flags.log_every,
            seed=flags.seed,
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            deepspeed=deepspeed,
            ddp_static_graph=flags.static_graph,
        ),
        train_dataset=Blocks(0, flags.samples),
        eval_dataset=Blocks(flags.samples, flags.samples + 24),
        callbacks=[steps, Stretch(flags.step_time)],
    )
    steps.trainer = trainer
    # The line that makes it elastic.
    hf.elastic(
        trainer,
        global_batch_size=flags.global_batch_size,
        fixed_micro_batch=flags.fixed_micro_batch,
        memory_every=flags.memory_every,
        stay=flags.stay,
    )
    trainer.train()
    if trainer.is_world_process_zero():
        print(f"{trainer.state.global_step} steps, in {flags.output_dir}")


if __name__ == "__main__":
    main()
