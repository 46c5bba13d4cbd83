"""The smallest script of all: a model, a data set, ``Trainer(...).fit()``.

python examples/trainer.py                                  one process
torchrun --nproc-per-node 2 examples/trainer.py             two
dlrover-run --nnodes=1:4 examples/trainer.py                as many as there are, and they may come and go

Outside ``dlrover-run`` it saves only if ``--checkpoint-dir DIR`` is given.
"""

from __future__ import annotations

from typing import Any

import common
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset

from dalsegno.elastic import Evaluator, Tracked, Trainer


def losses(model: nn.Module, blocks: Tensor) -> Tensor:
    """The loss of each next byte: (batch, length + 1) -> (batch, length)."""
    return cross_entropy(model(blocks[:, :-1]).transpose(1, 2), blocks[:, 1:], reduction="none")


def measure(model: nn.Module, blocks: Tensor) -> dict[str, Any]:
    """Totals of one batch, each with its count."""
    found = losses(model, blocks)
    return {"loss": (found, found.numel())}


def main() -> None:
    parser = common.parser("A Trainer on the standard library's source text.", without=("step_log", "step_time"))
    parser.add_argument("--strategy", choices=("ddp", "fsdp", "deepspeed"), default="ddp")
    parser.add_argument("--universal-checkpoint", action="store_true", help="accepted: dlrover-run may add it")
    flags = parser.parse_args()

    torch.manual_seed(flags.seed)
    model = nn.Sequential(nn.Embedding(common.VOCABULARY, 64), nn.GELU(), nn.Linear(64, common.VOCABULARY))
    text = common.StdlibText()
    held_out = len(text) // 10
    trainer = Trainer(
        model,
        Subset(text, range(held_out, len(text))),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=flags.learning_rate),
        loss=lambda model, blocks: losses(model, blocks).mean(),
        global_batch_size=flags.global_batch_size,
        max_micro_batch_size=flags.max_micro_batch_size,
        max_steps=flags.steps,
        strategy=flags.strategy,
        max_grad_norm=1.0,
        seed=flags.seed,
        save_every=flags.save_every,
        memory_every=flags.memory_every,
        checkpoint_dir=flags.checkpoint_dir,
        evaluator=Evaluator(Subset(text, range(held_out)), measure),
        evaluate_every=50,
        track=Tracked("loss"),
    )
    fitted = trainer.fit()
    if trainer.rank == 0:
        best = "nothing was saved" if fitted.best is None else f"best: {fitted.best.name}, loss {fitted.best.value:.4f}"
        print(f"{fitted.step} steps; {best}")


if __name__ == "__main__":
    main()
