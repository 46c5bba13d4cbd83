"""A worker for layouts beyond data parallelism: tensor, pipeline and sequence parallelism, as DeepSpeed does them.

One JSON object in ``argv[1]``: ``kind`` (``data``, ``tensor``, ``pipeline``, ``sequence``), ``stage``, ``steps``,
``out``; ``save``, or ``load``, ``universal`` and ``step``, the resume point. Every rank sees the same batch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.workers import cases
from tests.support.workers.zero_worker import Plan, Resume

WIDTH, WORDS = 6, 13


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up_proj = nn.Linear(WIDTH, 8)
        self.down_proj = nn.Linear(8, WIDTH)
        self.frozen = nn.Parameter(torch.full((2,), 0.5), requires_grad=False)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        change: Tensor = self.down_proj(torch.tanh(self.up_proj(self.norm(x))))
        return x + change * self.frozen.mean() + 0.1 * self.calls


def loss(output: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, (tokens + 1) % WORDS)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(WORDS, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, WORDS))

    def forward(self, tokens: Tensor) -> Tensor:
        return loss(self.layers(tokens), tokens)


def make_model(kind: str) -> nn.Module:
    if kind != "pipeline":
        return Model()
    from deepspeed.pipe import LayerSpec, PipelineModule

    layers = [
        LayerSpec(nn.Embedding, WORDS, WIDTH),
        *(LayerSpec(Block) for _ in range(4)),
        LayerSpec(nn.Linear, WIDTH, WORDS),
    ]
    module: nn.Module = PipelineModule(layers, num_stages=2, loss_fn=loss)
    return module


TENSOR_PARALLEL = {
    "autotp_size": 2,
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*\.down_proj\.weight$"], "partition_type": "row"},
            {"patterns": [r".*\.up_proj\.weight$"], "partition_type": "column"},
        ],
    },
}


def main() -> None:
    task = json.loads(sys.argv[1])
    kind = task["kind"]
    import deepspeed

    from dalsegno.elastic import deepspeed as ours

    ours.prepare()
    torch.manual_seed(1 if "load" not in task else 99)
    model = make_model(kind)
    if "load" in task:  # whatever a load forgets keeps values that cannot be right
        for tensor in [*model.buffers(), *model.parameters()]:
            tensor.data.fill_(3.0)
    resume = None
    if "load" in task:
        resume = Resume(Path(task["load"]), "universal", Path(task["universal"]), task["step"])
    base: dict[str, Any] = {
        "zero_optimization": {"stage": task["stage"]},
        "zero_allow_untested_optimizer": True,
        **({"tensor_parallel": TENSOR_PARALLEL} if kind == "tensor" else {}),
        **({"sequence_parallel_size": 2} if kind == "sequence" else {}),
    }
    config = ours.config(base, Plan(micro_batch_size=4), resume)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    ours.restore(engine, resume)
    losses, first = [], resume.step if resume else 0
    for step in range(first, first + task["steps"]):
        tokens = torch.randint(0, WORDS, (4,), generator=torch.Generator().manual_seed(step))
        if kind == "pipeline":
            losses.append(float(engine.train_batch(iter([(tokens, tokens)]))))
            continue
        value = engine(tokens)
        engine.backward(value)
        engine.step()
        losses.append(float(value))
    if "save" in task:
        ours.save(engine)(Path(task["save"]))
    cases.end({"losses": losses}, Path(task["out"]))


if __name__ == "__main__":
    main()
