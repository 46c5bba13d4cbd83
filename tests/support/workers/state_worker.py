"""A worker for `test_mistakes_state`: trainings whose state is not what it looks like, one after the other.

``argv[1]`` is a JSON list of cases, each with a session of its own; ``argv[2]`` gets one ``result-<rank>.json``.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dalsegno import elastic
from dalsegno.elastic import (
    DDP,
    FSDP,
    Batches,
    BatchPlan,
    Callback,
    ElasticSampler,
    Evaluator,
    Session,
    Tracked,
    Trainer,
    TrainingState,
    background,
)
from dalsegno.elastic.trainer.deepspeed_strategy import DeepSpeed
from tests.support.workers import cases

LENGTH, GLOBAL_BATCH, STEPS = 24, 6, 4


class Points(torch.utils.data.Dataset[Tensor]):
    """Rows of five numbers, the last of which follows from the others."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        row = torch.randn(5, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        row[4] = row[:4].sum().sin()
        return row


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.blocks(self.first(x)))
        return out


class Extra(Model):
    """Keeps an object that no checkpoint may have."""

    def get_extra_state(self) -> Any:
        return Path("somewhere")

    def set_extra_state(self, state: Any) -> None:
        return None


class Keeps(Callback):
    """A callback with something in its state, made when the model is ready."""

    def __init__(self, make: Callable[[Trainer], Any]) -> None:
        self._make, self._kept = make, None

    def on_fit_begin(self, trainer: Trainer) -> None:
        self._kept = self._make(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self._kept}


class Steps(Callback):
    """The optimizer steps, losses and learning rates of this process."""

    def __init__(self) -> None:
        self.steps, self.losses, self.rates = list[int](), list[float](), list[float]()

    def on_step(self, trainer: Trainer, batch: Any) -> None:
        self.steps.append(trainer.step)

    def on_log(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        self.losses.append(values["loss"])
        self.rates.append(values["lr"])


def make_model(kind: type[nn.Module] = Model) -> nn.Module:
    torch.manual_seed(4)
    return kind().double()


def loss_of(model: Any, data: Tensor) -> Tensor:
    weight = next(iter(model.parameters()))
    data = data.to(weight.dtype)
    return (model(data[:, :4]) - data[:, 4:]).square().mean()


def make_adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.02)


# With a loop of one's own.


def loop(case: dict[str, Any], build: Callable[[Session], tuple[nn.Module, dict[str, Any]]]) -> dict[str, Any]:
    """A training of ``TrainingState``; ``build`` gives what is called, and what is given to it."""
    session = elastic.session(case["directory"])
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    wrapped, parts = build(session)
    optimizer = parts["optimizer"]
    state = TrainingState(session, **parts)
    if case.get("load", True):
        state.load(cast=case.get("cast", False))
    plan = BatchPlan(GLOBAL_BATCH, session.world_size, GLOBAL_BATCH)
    batches = Batches(Points(), ElasticSampler(LENGTH, GLOBAL_BATCH), plan, session.rank, resume=session.resume)

    def consolidated(path: Path) -> None:
        optimizer.consolidate_state_dict(to=0)
        state.write(path)

    save: Any = {"background": background(state.files), "consolidated": consolidated}.get(case.get("how", ""))
    steps, losses = [], []
    for batch in session.steps(batches, max_steps=case.get("steps", STEPS), save=save or state.write):
        (micro,) = batch.micro_batches
        loss = loss_of(wrapped, micro.data)
        micro.scale(loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(batch.step)
        losses.append(session.sum(float(loss.detach()) * micro.n) / batch.n)
    return {"steps": steps, "losses": losses}


def sharded(session: Session) -> tuple[nn.Module, dict[str, Any]]:
    model = make_model()
    fully_shard(model)
    return model, {"model": model, "optimizer": make_adam(model)}


def sharded_1(session: Session) -> tuple[nn.Module, dict[str, Any]]:
    model = FullyShardedDataParallel(make_model(), device_id=torch.device("cpu"), use_orig_params=True)
    return model, {"model": model, "optimizer": make_adam(model)}


def inside_sharded_1(session: Session) -> tuple[nn.Module, dict[str, Any]]:
    inner = make_model()
    model = FullyShardedDataParallel(inner, device_id=torch.device("cpu"), use_orig_params=True)
    return model, {"model": inner, "optimizer": make_adam(model)}


def sharded_part(session: Session) -> tuple[nn.Module, dict[str, Any]]:
    model, shadow = make_model(), make_model()
    fully_shard(shadow)
    return plain_ddp(model), {"model": model, "optimizer": make_adam(model), "average": shadow}


def plain_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model) if dist.get_world_size() > 1 else model


def wrapped_early(session: Session) -> tuple[nn.Module, dict[str, Any]]:
    model = plain_ddp(make_model())
    return model, {"model": model, "optimizer": make_adam(model)}


def partitioned(session: Session) -> tuple[nn.Module, dict[str, Any]]:
    model = make_model()
    wrapped = DistributedDataParallel(model)
    return wrapped, {
        "model": model,
        "optimizer": ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.02),
    }


def extra(session: Session) -> tuple[nn.Module, dict[str, Any]]:
    model = make_model(Extra)
    return plain_ddp(model), {"model": model, "optimizer": make_adam(model)}


def one_meta(session: Session) -> tuple[nn.Module, dict[str, Any]]:
    with torch.device("meta"):
        model = make_model()
    return model, {"model": model, "optimizer": make_adam(model)}


def half(session: Session) -> tuple[nn.Module, dict[str, Any]]:
    model = make_model().bfloat16()
    return plain_ddp(model), {"model": model, "optimizer": make_adam(model)}


def whole(session: Session) -> tuple[nn.Module, dict[str, Any]]:
    model = make_model()
    return plain_ddp(model), {"model": model, "optimizer": make_adam(model)}


BUILDS = {
    build.__name__: build
    for build in (
        *(sharded, sharded_1, inside_sharded_1, sharded_part, wrapped_early, partitioned),
        *(extra, one_meta, half, whole),
    )
}


def own_save(case: dict[str, Any]) -> dict[str, Any]:
    """A save of the script's own that cannot succeed, or leaves nothing."""
    session = elastic.session(case["directory"])
    steps: list[int] = []

    def save(path: Path) -> None:
        if case["how"] == "outside":
            torch.save(1, Path(case["directory"]) / "nowhere" / "model.pt")
        elif case["how"] == "below":
            (path / "weights" / "model.bin").write_bytes(b"x")
        elif case["how"] == "one rank" and session.rank == 1:
            raise RuntimeError("a part that is not ready")

    try:
        for batch in session.steps(range(10), save=save, save_every=2):
            steps.append(batch)
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}", "steps": steps}
    return {"refused": "", "steps": steps}


def with_dcp(case: dict[str, Any]) -> dict[str, Any]:
    """torch's distributed checkpoint, whose writer finds the disk full in the first saves on the last rank."""
    session = elastic.session(case["directory"])
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = make_model()
    fully_shard(model)
    calls, steps = 0, []

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan: Any, planner: Any) -> Any:
            if session.rank == session.world_size - 1 and calls <= case["failures"]:
                raise OSError(errno.ENOSPC, "No space left on device") if case["how"] == "full" else KeyError("plan")
            return super().write_data(plan, planner)

    def save(path: Path) -> None:
        nonlocal calls
        calls += 1
        dcp.save({"model": model.state_dict()}, storage_writer=Writer(path))

    try:
        options: Any = {"strategy": "fsdp-dcp", "any_world_size": True}
        for batch in session.steps(range(3), save=save, save_every=1, **options):
            steps.append(batch)
    except Exception as error:
        return {"refused": f"{type(error).__name__}: {error}", "steps": steps}
    return {"refused": "", "steps": steps}


# With a Trainer.


def plateau(optimizer: Any) -> Any:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.2)


class Remembers(torch.optim.SGD):
    """Keeps something of each parameter from its first step on."""

    def __init__(self, model: nn.Module, kept: Any) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self._kept = kept

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = self._kept
        return super().step(closure)


def closing(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters())


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": make_adam,
    "lbfgs": closing,
    "whole": lambda model: Remembers(model, torch.zeros(3)),
    "object": lambda model: Remembers(model, Path("somewhere")),
}


def strategy_of(case: dict[str, Any]) -> Any:
    name, cast = case.get("strategy", "ddp"), case.get("cast", False)
    if name == "fsdp":
        fill = {"fill": lambda model: model.apply(reset_all)}.get(case.get("init", ""))
        return FSDP(blocks=(Block,), init=fill, cast=cast)
    return DDP(cast=cast) if name == "ddp" else DeepSpeed({"zero_optimization": {"stage": 1}})


def reset_all(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.3)


KEEPS: dict[str, Callable[[Trainer], Any]] = {
    "lambda": lambda trainer: lambda: 1,
    "sharded": lambda trainer: fully_shard(make_model()).state_dict(),  # type: ignore[attr-defined]
}


def model_of(case: dict[str, Any]) -> nn.Module:
    kind = case.get("model", "")
    if kind == "sharded":
        model = make_model()
        fully_shard(model)
        return model
    if kind == "wrapped":
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return plain_ddp(make_model())
    if kind.startswith("meta"):
        torch.manual_seed(4)
        with torch.device("meta"):
            made = Model().double()
            if kind == "meta odd":
                made.register_buffer("odd", torch.ones(3), persistent=False)
        return made
    return make_model().to(torch.bfloat16 if kind == "half" else torch.float64)


def trainer(case: dict[str, Any]) -> dict[str, Any]:
    notes = Steps()
    evaluated = case.get("evaluate_every", 0)
    hooks = [Keeps(KEEPS[case["keeps"]])] if "keeps" in case else []
    made = Trainer(
        model_of(case),
        Points(),
        optimizer=OPTIMIZERS[case.get("optimizer", "adam")],
        scheduler=plateau if case.get("plateau") else None,
        loss=loss_of,
        global_batch_size=GLOBAL_BATCH,
        max_micro_batch_size=3,
        max_steps=case.get("steps", STEPS),
        strategy=strategy_of(case),
        checkpoint_dir=case["directory"],
        save_every=case.get("save_every", 0),
        save_in_background=case.get("in_background", False),
        evaluator=Evaluator(Points(), lambda model, data: {"loss": (loss_of(model, data) * len(data), len(data))})
        if evaluated
        else None,
        evaluate_every=evaluated,
        track=Tracked("loss", case.get("mode", "min")) if evaluated else None,
        callbacks=[notes, *hooks],
        log_every=1,
        progress=False,
    )
    found: dict[str, Any] = {}
    try:
        made.fit()
    except Exception as error:
        found["refused"] = f"{type(error).__name__}: {error}"
    return {"refused": "", **found, "steps": notes.steps, "losses": notes.losses, "rates": notes.rates}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """What came of one case on this rank."""
    kind = case["kind"]
    if kind in BUILDS:
        try:
            return {"refused": "", **loop(case, BUILDS[kind])}
        except Exception as error:
            return {"refused": f"{type(error).__name__}: {error}", "steps": []}
    return {"own save": own_save, "dcp": with_dcp, "trainer": trainer}[kind](case)


if __name__ == "__main__":
    cases.run_all(run)
