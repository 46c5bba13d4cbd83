"""trl's trainers on a tiny model, made elastic by the one line that `docs/ms-swift.md` has for any `Trainer`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from trl import DPOConfig, DPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from dalsegno.swift_plugin import hf

ROOT = Path(__file__).resolve().parents[3]
sys.path += [str(ROOT), str(ROOT / "examples")]

import common  # noqa: E402
import hf_trainer  # noqa: E402

KINDS = {
    "sft": (SFTTrainer, SFTConfig, "sft.jsonl"),
    "dpo": (DPOTrainer, DPOConfig, "dpo.jsonl"),
    "reward": (RewardTrainer, RewardConfig, "dpo.jsonl"),
}


def parsed() -> argparse.Namespace:
    flags = common.parser("trl's trainers.")
    flags.add_argument("--kind", choices=KINDS, required=True)
    flags.add_argument("--stay", action="store_true", help="its process stays at a change of the world")
    flags.add_argument("--made", type=Path, required=True, help="where the tiny model and its data are")
    return flags.parse_args()


def main() -> None:
    flags = parsed()
    trainer_class, config_class, data = KINDS[flags.kind]
    steps = hf_trainer.StepLog(flags.step_log)
    torch.manual_seed(flags.seed)  # the head that a reward needs is new
    if flags.kind == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(flags.made / "model", num_labels=1)
    else:
        model = AutoModelForCausalLM.from_pretrained(flags.made / "model")
    trainer = trainer_class(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(flags.made / "model"),
        train_dataset=load_dataset(
            "json", data_files=str(flags.made / data), split="train", cache_dir=os.environ["TRL_CACHE"]
        ),
        args=config_class(
            output_dir="out",
            per_device_train_batch_size=flags.max_micro_batch_size,
            max_steps=flags.steps,
            learning_rate=flags.learning_rate,
            save_steps=flags.save_every,
            logging_steps=1,
            seed=flags.seed,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=flags.stay,
        ),
        callbacks=[steps, hf_trainer.Stretch(flags.step_time)],
    )
    steps.trainer = trainer
    hf.elastic(trainer, global_batch_size=flags.global_batch_size, stay=flags.stay)
    trainer.train()


if __name__ == "__main__":
    main()
