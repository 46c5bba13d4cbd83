"""A small GPT with DeepSpeed on the standard library's source text, at any world size and through changes of it.

    python examples/train.py                                        one process
    torchrun --nproc-per-node 2 examples/train.py                   two
    dlrover-run --nnodes=1:4 --universal-checkpoint examples/train.py     as many as there are; they may come and go

Outside ``dlrover-run`` it saves only if ``--checkpoint-dir DIR`` is given.
fp32, no dropout, AdamW: so that the loss curve of a disturbed run can be compared with an undisturbed one. The lines
marked ``elastic`` are what it adds to a plain DeepSpeed script.
"""

from __future__ import annotations

import logging

import common
import deepspeed
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from dalsegno.elastic import session  # elastic

BLOCK, WIDTH, HEADS, LAYERS = 64, 128, 4, 6


class Layer(nn.Module):
    """One transformer layer: (batch, length, width) -> the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = (batch, length, self.heads, width // self.heads)
        query, key, value = (part.view(heads).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    """Blocks of bytes (batch, length + 1) -> mean loss of predicting each next byte."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(common.VOCABULARY, WIDTH), nn.Embedding(BLOCK, WIDTH)
        self.layers = nn.Sequential(*(Layer(WIDTH, HEADS) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, common.VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, blocks: Tensor) -> Tensor:
        tokens, targets = blocks[:, :-1], blocks[:, 1:]
        x = self.bytes(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        logits = self.head(self.norm(self.layers(x)))
        return cross_entropy(logits.flatten(0, 1), targets.flatten())


def make_optimizer(model: nn.Module, learning_rate: float) -> torch.optim.AdamW:
    """AdamW with weight decay for matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def main() -> None:
    parser = common.parser("A small GPT with DeepSpeed on the standard library's source text.")
    parser.add_argument("--zero-stage", type=int, choices=(0, 1, 2, 3), default=1)
    parser.add_argument("--layers", type=int, default=LAYERS, help="6: 1.3 million parameters; each has 0.2 million")
    parser.add_argument("--universal-checkpoint", action="store_true", help="accepted: dlrover-run may add it")
    flags = parser.parse_args()
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

    s = session(checkpoint_dir=flags.checkpoint_dir)  # elastic
    torch.manual_seed(flags.seed)
    # Before s.data: a node that joins makes its model while the others train.
    model = Gpt(flags.layers)
    optimizer = make_optimizer(model, flags.learning_rate)
    data = s.data(  # elastic
        common.StdlibText(BLOCK),
        global_batch=flags.global_batch_size,
        micro_batch=flags.max_micro_batch_size,
        seed=flags.seed,
    )
    config = {
        "zero_optimization": {"stage": flags.zero_stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
    }
    config = s.deepspeed_config(config, data)  # elastic: instead of batch sizes in the config
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    state = s.engine(engine)  # elastic: instead of engine.load_checkpoint(...)

    log = common.StepLog(flags.step_log, rank=s.rank, world_size=s.world_size, epoch=s.epoch)
    clock = common.StepClock(flags.step_time)
    steps = s.steps(  # elastic: instead of engine.save_checkpoint(...)
        data, state, max_steps=flags.steps, save_every=flags.save_every, memory_every=flags.memory_every
    )
    for batch in steps:
        total = 0.0
        for micro in batch:  # elastic
            loss = engine(micro.data.to(engine.device))
            engine.backward(micro.scale(loss))  # elastic: instead of engine.backward(loss)
            norm = common.gradient_norm(model.parameters()) if flags.zero_stage == 0 else 0.0
            engine.step()  # an optimizer step after the last micro-batch
            total += float(loss.detach()) * micro.n
        if flags.zero_stage > 0:
            norm = float(engine.get_global_grad_norm())
        mean = common.global_mean(total, batch.n)
        clock.wait()
        s.report(mean)  # elastic
        log.write(
            step=batch.step,
            data_epoch=batch.position.data_epoch,
            sample_ids=batch.sample_ids,
            loss=mean,
            grad_norm=norm,
        )
        if s.rank == 0 and batch.step % 10 == 0:
            print(f"step {batch.step}: loss {mean:.4f} ({s.world_size} ranks)", flush=True)
    log.close()


if __name__ == "__main__":
    main()
