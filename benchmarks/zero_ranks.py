"""One rank of a world of `benchmarks.convert` and `benchmarks.reshard`: a transformer's shapes, two steps of AdamW.

``argv[1]`` is one JSON object: ``stage``, ``layers``, ``width``, ``words``, ``out``; and ``save``: the checkpoint to
make; or ``load``: the one to load into a fresh engine. With ``universal`` or ``reshard`` it is loaded as by `restore`,
with ``native`` by DeepSpeed alone, which needs the same number of ranks. The result says how long that took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass
class Plan:
    micro_batch_size: int = 1
    accumulation: int = 1


@dataclass
class Resume:
    path: Path
    form: str
    universal: Path | None
    reshard: bool


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.attention(self.norm(x)).chunk(3, dim=-1)
        x = x + torch.softmax(query @ key.transpose(-1, -2), dim=-1) @ value
        change: Tensor = self.down(torch.relu(self.up(x)))
        return x + change


class Model(nn.Module):
    def __init__(self, layers: int, width: int, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.norm(x)).float(), tokens)


def main() -> None:
    task = json.loads(sys.argv[1])
    import deepspeed

    from dalsegno.elastic import deepspeed as ours

    ours.prepare()
    resume = None
    if "load" in task:
        universal = Path(task["universal"]) if "universal" in task else None
        form = "sharded" if universal is None else "universal"
        resume = Resume(Path(task["load"]), form, universal, task.get("reshard", False))
    torch.manual_seed(1)
    model = Model(task["layers"], task["width"], task["words"])
    base = {
        "zero_optimization": {"stage": task["stage"]},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": True},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ours.config(base, Plan(), resume))
    result: dict[str, float] = {"parameters": sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())}
    if resume is None:
        for step in range(2):
            loss = engine(torch.arange(4) + step)
            engine.backward(loss)
            engine.step()
        ours.save(engine)(Path(task["save"]))
    else:
        dist.barrier()
        began = time.perf_counter()
        if task.get("native"):
            loaded, _ = engine.load_checkpoint(str(resume.path.parent), tag=resume.path.name)
            assert loaded is not None
        else:
            ours.restore(engine, resume)
        dist.barrier()
        result["seconds"] = time.perf_counter() - began
    (Path(task["out"]) / f"result-{dist.get_rank()}.json").write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's threads sometimes abort at the interpreter's own end


if __name__ == "__main__":
    main()
