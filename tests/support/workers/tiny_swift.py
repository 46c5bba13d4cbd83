"""A tiny model with its tokenizer, and data, as ms-swift wants them: made here, nothing is fetched."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = [
    "step",
    "save",
    "drain",
    "rank",
    "node",
    "epoch",
    "world",
    "sample",
    "batch",
    "loss",
    "join",
    "leave",
    "mark",
    "run",
    "shard",
]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def make_model(directory: Path) -> Path:
    """A Qwen2 of two layers with a byte-level tokenizer."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *specials])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=TEMPLATE,
    )
    config = Qwen2Config(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=512,
        eos_token_id=vocabulary["<|im_end|>"],
        pad_token_id=vocabulary["<|endoftext|>"],
        bos_token_id=None,
        use_cache=False,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(directory)
    wrapped.save_pretrained(directory)
    return directory


def make_data(path: Path, samples: int, *, pairs: bool = False, labels: bool = False) -> Path:
    """Conversations of one question and one answer, of different lengths.

    With `pairs` also an answer that is worse; with `labels` a class at random in place of the answer.
    """
    draw = random.Random(3)

    def words(most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, most)))

    def line() -> dict[str, Any]:
        asked, answered = {"role": "user", "content": words(6)}, {"role": "assistant", "content": words(9)}
        if labels:
            # Nothing to learn: where a model is nearly always sure, its loss on the others magnifies rounding.
            return {"messages": [asked], "label": draw.randrange(2)}
        worse = {"rejected_response": words(9)} if pairs else {}
        return {"messages": [asked, answered], **worse}

    path.write_text("".join(json.dumps(line()) + "\n" for _ in range(samples)))
    return path


def flags(model: Path, data: Path, **options: Any) -> list[str]:
    """A command line that works on a CPU, without a network."""
    given = {
        "model": model,
        "model_type": "qwen2",
        "template": "chatml",
        "dataset": data,
        "tuner_type": "full",
        "torch_dtype": "float32",
        "fp16": "false",
        "bf16": "false",
        "use_cpu": "true",
        "ddp_backend": "gloo",
        "attn_impl": "eager",
        "learning_rate": "1e-3",
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "max_length": 256,
        "gradient_checkpointing": "false",
        "split_dataset_ratio": 0,
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,
        "report_to": "none",
        "check_model": "false",
        "seed": 7,
        "data_seed": 7,
        **options,
    }
    return [text for name, value in given.items() for text in (f"--{name}", str(value))]


OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
