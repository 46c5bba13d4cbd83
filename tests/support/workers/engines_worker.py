"""A rank for tests of what engines, optimizers and wrappers make of an elastic run: many cases in one process.

``argv[1]``: a JSON list of cases; ``argv[2]``: where each rank writes its results, ``result-<rank>.json``. A case names
its function in ``do``; see `CASES`.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from dalsegno import elastic
from dalsegno.elastic import DDP, FSDP, Accumulation, Batches, BatchPlan, DeepSpeed, ElasticSampler, SaveError, Trainer
from dalsegno.elastic.checkpoint import inventory
from dalsegno.elastic.training import entry
from tests.support.workers import cases

GLOBAL_BATCH = 12


class Lines(logging.Handler):
    """What our loggers said while it was there."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def model(seed: int = 3, *, grows: bool = False) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), Growing() if grows else nn.Tanh(), nn.Linear(5, 3))


class Growing(nn.Tanh):
    """Makes a buffer as it is called, as lazy statistics do."""

    def forward(self, inputs: Tensor) -> Tensor:
        if "calls" not in self._buffers:
            self.register_buffer("calls", torch.zeros(()))
        return super().forward(inputs)


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(GLOBAL_BATCH, 7, generator=generator), torch.randn(GLOBAL_BATCH, 3, generator=generator)


def mean_over_ranks(loss: Tensor) -> float:
    value = loss.detach().double().reshape(1)
    dist.all_reduce(value)
    return float(value.item()) / dist.get_world_size()


class Lion(torch.optim.Optimizer):
    """Chen et al., 2023: element-wise, and nobody but its author knows it."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, (one, two) = self.state[parameter], group["betas"]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                update = state["exp_avg"].clone().mul_(one).add(parameter.grad, alpha=1 - one).sign_()
                parameter.add_(update, alpha=-group["lr"])
                state["exp_avg"].mul_(two).add_(parameter.grad, alpha=1 - two)


class Lamb(torch.optim.Optimizer):
    """A trust ratio as LAMB has it (You et al., 2019), on plain gradients: a norm of each whole parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    ratio = parameter.norm() / (parameter.grad.norm() + 1e-6)
                    parameter.add_(parameter.grad * ratio, alpha=-group["lr"])


def transformers_adafactor(parameters: Any) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    made: torch.optim.Optimizer = Adafactor(parameters, lr=0.05, relative_step=False, scale_parameter=True)
    return made


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "plain-sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.02),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.02, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.02),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "lion": Lion,
    "lamb": Lamb,
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.05),
    "muon": lambda p: torch.optim.Muon(p, lr=0.05),
    "hf-adafactor": lambda p: transformers_adafactor(p),
}


@dataclass
class Resume:
    """The part of a session's resume point that `restore` reads."""

    path: Path
    form: str = "sharded"
    universal: Path | None = None
    reshard: bool = False


@dataclass
class Plan:
    micro_batch_size: int
    accumulation: int = 1


def groups(module: nn.Module) -> list[dict[str, Any]]:
    """Weights and biases apart, as most scripts have them."""
    parameters = dict(module.named_parameters())
    return [
        {"params": [value for name, value in parameters.items() if name.endswith("weight")], "weight_decay": 0.01},
        {"params": [value for name, value in parameters.items() if name.endswith("bias")], "weight_decay": 0.0},
    ]


def zero(case: dict[str, Any]) -> dict[str, Any]:
    """Trains with DeepSpeed: from ``load`` (``form``, ``universal``, ``reshard``) for ``steps``, saving at ``save``.

    With ``grows`` its model gets a buffer in its first step.
    """
    import deepspeed

    from dalsegno.elastic import deepspeed as ours

    rank, world = dist.get_rank(), dist.get_world_size()
    module = model(grows=case.get("grows", False))
    one_group = case["optimizer"] == "adagrad"  # of more DeepSpeed makes one
    optimizer = OPTIMIZERS[case["optimizer"]](module.parameters() if one_group else groups(module))
    resume = None
    if "load" in case:
        universal = Path(case["universal"]) if "universal" in case else None
        resume = Resume(Path(case["load"]), case["form"], universal, case.get("reshard", False))
    base = {"zero_optimization": {"stage": case["stage"]}, "zero_allow_untested_optimizer": True}
    config = ours.config({**base, "gradient_clipping": 0.0}, Plan(GLOBAL_BATCH // world), resume)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    ours.restore(engine, resume)
    save = ours.save(engine)
    losses, promised = [], []
    for step in range(case.get("first", 0), case["steps"]):
        if step == case.get("save_after"):
            save(Path(case["save"]))
            promised.append(save.reshards)
        inputs, wanted = data(step)
        share = slice(rank * GLOBAL_BATCH // world, (rank + 1) * GLOBAL_BATCH // world)
        loss = nn.functional.mse_loss(engine(inputs[share]), wanted[share])
        engine.backward(loss)
        engine.step()
        losses.append(mean_over_ranks(loss))
    return {"losses": losses, "reshards": promised, "before": case["optimizer"]}


class Points(Dataset[Tensor]):
    """Seven numbers and three to be found."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(10, generator=torch.Generator().manual_seed(index))


class Sometimes(nn.Module):
    """A model with a part that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.unused = model(), nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.body(inputs)
        return output


def ddp(case: dict[str, Any]) -> dict[str, Any]:
    """DDP with ``options``, a ``hook``, compiled or within ``join``: how far weights are from the whole batch's.

    After step ``again`` all is made anew from what there is, as by a process that resumes.
    """
    world = dist.get_world_size()
    options = case.get("options", {})
    make = Sometimes if "find_unused_parameters" in options or "static_graph" in options else model
    module, reference = make(), make()

    def wrap() -> tuple[Any, Any, torch.optim.Optimizer, Accumulation]:
        wrapped: Any = nn.parallel.DistributedDataParallel(module, **options)
        if case.get("hook"):
            HOOKS[case["hook"]](wrapped)
        called: Any = torch.compile(wrapped, backend="eager") if case.get("compiled") else wrapped
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        return wrapped, called, optimizer, Accumulation(called, optimizer)

    wrapped, called, optimizer, accumulate = wrap()
    other = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    sampler = ElasticSampler(64, GLOBAL_BATCH, seed=2)
    batches: Batches[Tensor] = Batches(
        Points(), sampler, BatchPlan(GLOBAL_BATCH, world, case.get("micro", 2)), dist.get_rank(), data_epochs=1
    )
    points, errors = Points(), []
    with wrapped.join() if case.get("join") else nullcontext():
        for batch in batches:
            for micro in accumulate(batch):
                loss = nn.functional.mse_loss(called(micro.data[:, :7]), micro.data[:, 7:])
                micro.scale(loss).backward()
            whole = torch.stack([points[i] for i in sampler.batch_at(batch.position).sample_ids])
            nn.functional.mse_loss(reference(whole[:, :7]), whole[:, 7:]).backward()
            for one in (optimizer, other):
                one.step()
                one.zero_grad()
            errors.append(apart(module, reference))
            if batch.step == case.get("again"):
                module, state = copy.deepcopy(module), optimizer.state_dict()
                wrapped, called, optimizer, accumulate = wrap()
                optimizer.load_state_dict(state)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in module.parameters())
    return {"errors": errors, "deferrals": accumulate.deferrals, "weights": weights.hex()}


def apart(one: nn.Module, other: nn.Module) -> float:
    ours, theirs = (torch.cat([p.detach().flatten() for p in module.parameters()]) for module in (one, other))
    return float((ours - theirs).norm() / theirs.norm())


def power_sgd(wrapped: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    wrapped.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1), powerSGD_hook)


def fp16_compress(wrapped: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped.register_comm_hook(None, fp16_compress_hook)


HOOKS = {"power-sgd": power_sgd, "fp16": fp16_compress}


def fsdp(case: dict[str, Any]) -> dict[str, Any]:
    """FSDP2 (or ``flat``, FSDP1) with an optimizer: losses, which are those of DDP if it sees whole parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, world = dist.get_rank(), dist.get_world_size()
    module = model()
    if case.get("flat"):
        from torch.distributed.fsdp import FullyShardedDataParallel

        module = FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)
    elif case["sharded"]:
        fully_shard(module, mesh=init_device_mesh("cpu", (world,)))
    parameters = [p for p in module.parameters() if p.dim() == 2 or case["optimizer"] != "muon"]
    optimizer = OPTIMIZERS[case["optimizer"]](parameters)
    Accumulation(module, optimizer)
    losses = []
    for step in range(case["steps"]):
        inputs, wanted = data(step)
        share = slice(rank * GLOBAL_BATCH // world, (rank + 1) * GLOBAL_BATCH // world)
        loss = nn.functional.mse_loss(module(inputs[share]), wanted[share])
        loss.backward()  # type: ignore[no-untyped-call]
        if not case["sharded"]:
            for parameter in parameters:
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        optimizer.step()
        module.zero_grad()
        losses.append(mean_over_ranks(loss))
    return {"losses": losses}


def declared(case: dict[str, Any]) -> dict[str, Any]:
    """A loop that saves as ``save`` says, with ``strategy`` (or nothing said): steps made, and what was sealed."""
    import deepspeed

    from dalsegno.elastic import deepspeed as ours

    s = new_session(case)
    module = model()
    config: dict[str, Any] = {"zero_optimization": {"stage": case["stage"]}}
    config = ours.config(config, Plan(GLOBAL_BATCH // s.world_size), None)
    engine, *_ = deepspeed.initialize(model=module, optimizer=torch.optim.AdamW(module.parameters()), config=config)
    ways: dict[str, Any] = {
        "lambda": lambda path: engine.save_checkpoint(path),
        "partial": functools.partial(engine.save_checkpoint, save_latest=False),
        "hidden": functools.partial(hidden, {"engine": engine}),
        "ours": ours.save(engine),
        "plain": lambda path: s.rank == 0 and torch.save(module.state_dict(), path / "model.pt"),
        "of each rank": lambda path: torch.save([s.rank], path / f"shard-rank{s.rank}.pt"),
        "dcp": lambda path: save_with_dcp(module, path),
    }
    options = {"strategy": case["strategy"]} if "strategy" in case else {}
    if case["save"] in ("plain", "of each rank", "dcp"):
        options["create_directory"] = True
    made = 0
    try:
        for _ in s.steps(range(3), save=ways[case["save"]], save_every=1, advanced=True, **options):
            made += 1
            outputs = engine(torch.ones(2, 7))
            engine.backward(outputs.mean())
            engine.step()
    except (ValueError, SaveError) as error:
        refused = str(error)
    else:
        refused = ""
    found = inventory(Path(case["directory"])) if s.rank == 0 else []
    left = sorted(path.name for path in Path(case["directory"]).glob("step-*")) if s.rank == 0 else []
    shapes = [[m.shape.strategy, m.shape.any_world_size, m.shape.reshards] for m in found]
    return {"made": made, "refused": refused, "sealed": shapes, "left": left}


def tokens(case: dict[str, Any]) -> dict[str, Any]:
    """Means over tokens, summed by a session in the middle of its exchange: how far weights are from the batch's."""
    s = new_session(case)
    module, reference = model(), model()
    wrapped = nn.parallel.DistributedDataParallel(module)
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (module, reference))
    accumulate = Accumulation(wrapped, optimizer)
    sampler, points = ElasticSampler(64, GLOBAL_BATCH, seed=2), Points()
    batches: Batches[Tensor] = Batches(
        points,
        sampler,
        BatchPlan(GLOBAL_BATCH, s.world_size, 2),
        s.rank,
        data_epochs=1,
        count_tokens=lambda batch: int((batch[:, 0] > 0).sum()),
        reduce=s.sum,
    )
    errors, under_way = [], []
    for batch in s.steps(batches):
        for micro in accumulate(batch):
            loss = token_mean(wrapped, micro.data)
            if batch.handed_out == 1:
                assert batch._total is not None
                under_way.append(batch._total._pending is not None)
            micro.scale(loss).backward()
        whole = torch.stack([points[i] for i in sampler.batch_at(batch.position).sample_ids])
        assert batch.tokens == int((whole[:, 0] > 0).sum())
        token_mean(reference, whole).backward()
        for one in (optimizer, other):
            one.step()
            one.zero_grad()
        errors.append(apart(module, reference))
    close_session(case)
    s = new_session({**case, "port": case["port again"]})
    s.begin_step()
    (found,) = s.start_sum(2**60 + s.rank).wait()
    s.end_step()
    return {"errors": errors, "under way": under_way, "sum": found, "double": s.sum(0.1 * (s.rank + 1)).hex()}


def token_mean(module: nn.Module, batch: Tensor) -> Tensor:
    """The mean over rows that count; 0 / 0 where none does."""
    losses = ((module(batch[:, :7]) - batch[:, 7:]) ** 2).mean(1)
    return losses[batch[:, 0] > 0].mean()


def fit(case: dict[str, Any]) -> dict[str, Any]:
    """A Trainer with a ``strategy`` and an ``optimizer``: losses, or why it refused, and after how many steps."""
    strategies: dict[str, Any] = {
        "deepspeed": lambda: DeepSpeed({"zero_optimization": {"stage": case["stage"]}, **case.get("config", {})}),
        "fsdp": FSDP,
        "ddp": lambda: DDP(**case.get("options", {})),
    }
    close_session(case)
    logs: list[tuple[int, Any]] = []
    trainer = Trainer(
        model(grows=case.get("grows", False)),
        Points(),
        optimizer=lambda module: OPTIMIZERS[case["optimizer"]](module.parameters()),
        loss=lambda module, batch: nn.functional.mse_loss(module(batch[:, :7]), batch[:, 7:]),
        global_batch_size=GLOBAL_BATCH,
        max_micro_batch_size=case.get("micro", GLOBAL_BATCH),
        max_steps=case["steps"],
        strategy=strategies[case["strategy"]](),
        checkpoint_dir=case.get("directory"),
        save_every=case.get("save_every", 0),
        loggers=[lambda step, values: logs.append((step, values["loss"]))],
        log_every=1,
        progress=False,
    )
    refused = ""
    try:
        trainer.fit()
    except ValueError as error:
        refused = str(error)
    found = inventory(Path(case["directory"])) if "directory" in case else []
    shapes = [[m.shape.strategy, m.shape.any_world_size, m.shape.reshards] for m in found]
    return {"steps": trainer.step, "refused": refused, "losses": [loss for _, loss in logs], "sealed": shapes}


def hidden(holder: dict[str, Any], path: Path) -> None:
    """Nobody who looks at it sees an engine."""
    getattr(holder["engine"], "save" + "_checkpoint")(path)


def save_with_dcp(module: nn.Module, path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save({"model": module.state_dict()}, checkpoint_id=str(path))


def close_session(case: dict[str, Any]) -> None:
    """One per process is open, and the next one's group needs a store that nobody used before."""
    os.environ["MASTER_PORT"] = str(case["port"])
    while entry._sessions:
        entry._sessions.pop().close()


def new_session(case: dict[str, Any]) -> Any:
    """A session of the case's own."""
    close_session(case)
    return elastic.session(case.get("directory"))


CASES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "zero": zero,
    "ddp": ddp,
    "fsdp": fsdp,
    "declared": declared,
    "fit": fit,
    "tokens": tokens,
}


def main() -> None:
    from dalsegno.elastic import deepspeed as ours

    ours.prepare("gloo")
    warnings.simplefilter("ignore", FutureWarning)
    results = []
    for case in json.loads(sys.argv[1]):
        lines = Lines()
        logging.getLogger("dalsegno").addHandler(lines)
        try:
            found = CASES[case["do"]](case)
        except Exception as error:
            if not case.get("may_fail"):
                raise
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        finally:
            logging.getLogger("dalsegno").removeHandler(lines)
        results.append({**found, "said": lines.lines})
    cases.end(results, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
