"""A worker for tests of gradients: every strategy's update beside that of one process with the whole global batch.

One JSON list of cases in ``argv[1]``, one result each in ``argv[2]/result-<rank>.json``. Each rank computes the
reference by itself: a plain module, all samples at once, no accumulation.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from dalsegno.elastic import Accumulation, Batches, BatchPlan, ElasticSampler, MicroBatch
from tests.support.workers import cases

VOCABULARY, WIDTH, LENGTH, GLOBAL_BATCH = 11, 6, 20, 13
IGNORED = -100


class Sentences(Dataset[Tensor]):
    """20 sentences of 1 to 9 tokens: two batches of 13 in a data epoch, the second of them short."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, VOCABULARY, (1 + index * 7 % 9,), generator=generator)


def collate(samples: list[Tensor]) -> dict[str, Tensor]:
    tokens = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    labels = nn.utils.rnn.pad_sequence([(s * 3 + 1) % VOCABULARY for s in samples], True, IGNORED)
    return {"tokens": tokens, "labels": labels, "offset": torch.zeros(len(samples), 1, 1)}


def count_tokens(data: dict[str, Tensor], mask: Tensor | None = None) -> int:
    real = data["labels"] != IGNORED
    return int((real if mask is None else real[mask]).sum())


class Model(nn.Module):
    """Tokens (rows, length) and an offset that is 0, or NaN where a test plants one -> logits of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.LayerNorm(9))
        self.head = nn.Linear(9, VOCABULARY)

    def forward(self, tokens: Tensor, offset: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        return self.head(self.body(embedded + offset.to(embedded.dtype)))


def row_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over each row's own tokens: (rows,)."""
    losses = cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.reshape(labels.shape).sum(1) / (labels != IGNORED).sum(1)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


@dataclass
class Strategy:
    """A model as one way of training wraps it."""

    wrapped: Any
    optimizer: Any
    weights: Callable[[], dict[str, Tensor]]
    synchronised: list[int] = field(default_factory=lambda: [0])
    clip: Callable[[float], Any] | None = None
    engine: bool = False


def plain_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def make_ddp(model: nn.Module, rate: float, case: dict[str, Any]) -> Strategy:
    if dist.get_world_size() == 1 and case.get("unwrapped"):
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        return Strategy(model, optimizer, lambda: plain_weights(model))
    wrapped = DistributedDataParallel(model)
    count = [0]

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations as objects, not as text
        count[0] += 1
        return allreduce_hook(state, bucket)

    wrapped.register_comm_hook(None, hook)
    return Strategy(
        wrapped, torch.optim.SGD(model.parameters(), lr=rate), lambda: plain_weights(model), synchronised=count
    )


def make_fsdp2(model: nn.Module, rate: float, case: dict[str, Any]) -> Strategy:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.body, mesh=mesh)  # type: ignore[attr-defined]
    fully_shard(model, mesh=mesh)

    def weights() -> dict[str, Tensor]:
        return {name: value.full_tensor().detach().clone() for name, value in model.named_parameters()}  # type: ignore

    return Strategy(model, torch.optim.SGD(model.parameters(), lr=rate), weights)


def make_fsdp1(model: nn.Module, rate: float, case: dict[str, Any]) -> Strategy:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    wrapped = FullyShardedDataParallel(
        model,
        device_id=torch.device("cpu"),
        use_orig_params=case.get("use_orig_params", True),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
    )

    def weights() -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(wrapped, writeback=False):
            return {
                name.replace("_fsdp_wrapped_module.", ""): value.detach().clone()
                for name, value in wrapped.named_parameters()
            }

    optimizer = torch.optim.SGD(wrapped.parameters(), lr=rate)
    return Strategy(wrapped, optimizer, weights, clip=wrapped.clip_grad_norm_)


def make_zero(model: nn.Module, rate: float, case: dict[str, Any], plan: BatchPlan) -> Strategy:
    import deepspeed

    from dalsegno.elastic import deepspeed as ours

    base: dict[str, Any] = {
        "zero_optimization": {"stage": int(case["strategy"][-1])},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": case.get("clip", 0.0),  # left out it would be 1.0
    }
    config = ours.config(base, plan, None)
    if case.get("wrong_accumulation"):
        config["gradient_accumulation_steps"] += 1
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def weights() -> dict[str, Tensor]:
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            return plain_weights(engine.module)

    return Strategy(engine, None, weights, engine=True)


def total_of(value: float) -> float:
    found = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(found)
    return float(found.item())


def scaled_loss(case: dict[str, Any], micro: MicroBatch[dict[str, Tensor]], forward: Callable[..., Tensor]) -> Tensor:
    """The loss of one micro-batch, with NaN planted in all that must not count where the case wants it."""
    data = dict(micro.data)
    if case.get("plant_nan"):
        offset = data["offset"].clone()
        if micro.filler:
            offset[:] = torch.nan
        data["offset"] = offset
    logits = forward(data["tokens"], data["offset"])
    if case.get("pad"):
        logits = micro.guard(logits)
    if case.get("plant_nan"):
        logits = logits * torch.where(micro.mask[:, None, None], 1.0, torch.nan)
    if case["mean"] == "tokens":
        labels = data["labels"].masked_fill(~micro.mask[:, None], IGNORED) if case.get("pad") else data["labels"]
        return micro.scale(token_loss(logits, labels))
    losses = row_losses(logits, data["labels"])
    return micro.scale(losses if case.get("pad") else losses.mean())


def reference_step(case: dict[str, Any], model: nn.Module, optimizer: Any, ids: list[int]) -> float:
    data = collate([Sentences()[i] for i in ids])
    logits = model(data["tokens"], data["offset"])
    by_tokens = case["mean"] == "tokens"
    loss = token_loss(logits, data["labels"]) if by_tokens else row_losses(logits, data["labels"]).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    if case.get("clip"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), case["clip"])
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def update(before: dict[str, Tensor], after: dict[str, Tensor]) -> Tensor:
    return torch.cat([(after[name] - before[name]).double().flatten() for name in sorted(before)])


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Steps of one case: errors of the update relative to the reference's, and where gradients were synchronised."""
    world, rank = dist.get_world_size(), dist.get_rank()
    dtype = torch.float64 if case.get("double") else torch.float32
    torch.manual_seed(5)
    reference = Model().to(dtype)
    rate = case.get("rate", 1.0)
    plan = BatchPlan(GLOBAL_BATCH, world, case.get("micro", 3), pad=case.get("pad", False))
    model = copy.deepcopy(reference)
    kind = case["strategy"]
    if kind.startswith("zero"):
        made = make_zero(model, rate, case, plan)
    else:
        made = {"ddp": make_ddp, "fsdp1": make_fsdp1, "fsdp2": make_fsdp2}[kind](model, rate, case)
    tokens = {"count_tokens": count_tokens, "reduce": total_of} if case["mean"] == "tokens" else {}
    sampler = ElasticSampler(LENGTH, GLOBAL_BATCH, seed=2)
    batches: Batches[dict[str, Tensor]] = Batches(
        Sentences(),
        sampler,
        plan,
        rank,
        collate=collate,
        scale="deepspeed" if made.engine else "ddp",
        data_epochs=1,
        **tokens,  # type: ignore[arg-type]
    )
    accumulate = Accumulation(made.wrapped, *[] if made.engine else [made.optimizer])
    optimizer = torch.optim.SGD(reference.parameters(), lr=rate)
    errors, synchronised, fillers = [], [], 0
    for batch in batches:
        start, wanted = made.weights(), plain_weights(reference)
        for micro in accumulate(batch):
            loss, seen = scaled_loss(case, micro, made.wrapped), made.synchronised[0]
            with CommDebugMode() as communication:
                made.wrapped.backward(loss) if made.engine else loss.backward()
            reductions = sum(n for kind, n in communication.get_comm_counts().items() if "reduce" in str(kind))
            synchronised.append(reductions + made.synchronised[0] - seen > 0)
            fillers += micro.filler
            if made.engine:
                made.wrapped.step()
        if not made.engine:
            if case.get("clip"):
                clip = made.clip or (lambda norm: torch.nn.utils.clip_grad_norm_(made.wrapped.parameters(), norm))
                clip(case["clip"])
            made.optimizer.step()
            made.optimizer.zero_grad()
        ids = list(sampler.batch_at(batch.position).sample_ids)
        reference_step(case, reference, optimizer, ids)
        ours, theirs = update(start, made.weights()), update(wanted, plain_weights(reference))
        errors.append(float((ours - theirs).norm() / theirs.norm()))
    return {
        "errors": errors,
        "synchronised": synchronised,
        "deferrals": accumulate.deferrals,
        "fillers": fillers,
        "accumulation": plan.accumulation,
        "position": [sampler.position.data_epoch, sampler.position.samples],
    }


def main() -> None:
    from dalsegno.elastic import deepspeed as ours

    ours.prepare("gloo")
    results = []
    for case in json.loads(sys.argv[1]):
        try:
            results.append(run(case))
        except (RuntimeError, ValueError) as error:
            if not case.get("may_fail"):
                raise
            results.append({"error": str(error)})
    cases.end(results, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
