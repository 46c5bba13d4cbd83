"""A worker for tests of loss curves at other world sizes: dropout, BatchNorm, a mixture of experts, random data.

One JSON list of cases in ``argv[1]``; each rank writes the curves of all to ``argv[2]/curve-<rank>.json``.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from dalsegno.elastic import Accumulation, Batches, BatchPlan, ElasticSampler
from dalsegno.elastic.rank import rng
from tests.support.workers import cases

LENGTH, GLOBAL_BATCH, MICRO, FEATURES = 47, 14, 4, 8


class Noisy(Dataset[Tensor]):
    """Eight features and a target, the features with an augmentation from the global generators."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        sample = torch.randn(FEATURES + 1, generator=torch.Generator().manual_seed(index))
        sample[:FEATURES] += 0.1 * torch.randn(FEATURES) + 0.1 * random.gauss(0, 1)
        return sample


class Experts(nn.Module):
    """The best of three experts for each row, and how unevenly they are used: a loss of the whole micro-batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.gate(hidden).softmax(1)
        chosen = nn.functional.one_hot(chances.argmax(1), 3).to(hidden.dtype)
        outputs = torch.stack([expert(hidden) for expert in self.experts], 1)
        mixed = (outputs * (chosen * chances).unsqueeze(2)).sum(1)
        # As in Switch Transformer (Fedus, Zoph, Shazeer, 2021): fractions chosen times mean chances.
        return mixed, 3 * (chosen.mean(0) * chances.mean(0)).sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1))
        self.experts = Experts(16)
        self.last = nn.Linear(16, 1)

    def forward(self, data: Tensor) -> Tensor:
        mixed, unevenness = self.experts(self.first(data[:, :FEATURES]))
        return (self.last(mixed) - data[:, FEATURES:]).square().mean() + 0.1 * unevenness


def wrap(model: Model, strategy: str, plan: BatchPlan) -> tuple[Any, Any]:
    """The model as it is trained, and its optimizer; an engine of DeepSpeed's has its own."""
    if strategy == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model.experts, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if strategy.startswith("zero"):
        import deepspeed

        from dalsegno.elastic import deepspeed as ours

        base = {"zero_optimization": {"stage": int(strategy[-1])}, "zero_allow_untested_optimizer": True}
        config = ours.config({**base, "gradient_clipping": 0.0}, plan, None)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        return engine, None
    return model if strategy == "fsdp" else DistributedDataParallel(model), optimizer


def curve(case: dict[str, Any]) -> list[float]:
    """The loss of each step; the last batch of a data epoch has five samples, which fill no micro-batch evenly."""
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(3)
    model = Model().double() if case.get("double") else Model()
    plan = BatchPlan(GLOBAL_BATCH, world, MICRO, fixed_micro_batch=case["fixed"])
    wrapped, optimizer = wrap(model, case.get("strategy", "ddp"), plan)
    rng.seed_rank(3, 0, rank)
    sampler = ElasticSampler(LENGTH, GLOBAL_BATCH, seed=6, drop_last=case.get("drop_last", False))
    batches: Batches[Tensor] = Batches(
        Noisy(),
        sampler,
        plan,
        rank,
        seed=9,
        data_epochs=2,
        loader_options={"num_workers": case.get("workers", 0)},
        scale="ddp" if optimizer else "deepspeed",
    )
    accumulate = Accumulation(wrapped, *[optimizer] if optimizer else [])
    losses = []
    for batch in batches:
        total = torch.zeros(1, dtype=torch.float64)
        for micro in accumulate(batch):
            data = micro.data.double() if case.get("double") else micro.data
            loss = wrapped(data)
            total += float(loss.detach()) * micro.n
            if optimizer is None:
                wrapped.backward(micro.scale(loss))
                wrapped.step()
            else:
                micro.scale(loss).backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(total)
        losses.append(float(total.item()) / batch.n)
    return losses


def main() -> None:
    from dalsegno.elastic import deepspeed as ours

    ours.prepare("gloo")
    curves = [curve(case) for case in json.loads(sys.argv[1])]
    cases.end(curves, Path(sys.argv[2]), name="curve")


if __name__ == "__main__":
    main()
