"""A worker for `test_mistakes_kept`: trainings that bring something else on another rank, or at another start.

``argv[1]`` is a JSON list of cases, each with a session of its own; ``argv[2]`` gets one ``result-<rank>.json``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, StepLR

from dalsegno import elastic
from dalsegno.elastic import Batches, BatchPlan, Callback, ElasticSampler, Trainer, TrainingState
from dalsegno.elastic.trainer.deepspeed_strategy import DeepSpeed
from tests.support.workers import cases

LENGTH, GLOBAL_BATCH = 36, 6
RANK = int(os.environ["RANK"])


class Rows(torch.utils.data.Dataset[Tensor]):
    """Rows of five numbers, the last of which follows from the others; in an order, and with noise."""

    def __init__(self, order: int = 0, noise: str = "") -> None:
        self.order = torch.arange(LENGTH)
        if order:
            self.order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(order))
        self.noise = noise

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        number = int(self.order[index])
        row = torch.randn(5, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        row[4] = row[:4].sum().sin()
        if self.noise == "drawn":
            row[:4] += 0.1 * torch.randn(4)
        elif self.noise:
            row[:4] += 0.1 * int.from_bytes(os.urandom(1), "big") / 255
        return row


class Stream(torch.utils.data.IterableDataset[Tensor]):
    """The same one after the other; ``split``: each rank begins with another one."""

    def __init__(self, split: bool) -> None:
        self.split = split

    def __iter__(self) -> Iterator[Tensor]:
        rows = Rows()
        begin = RANK if self.split else 0
        return (rows[(begin + index) % LENGTH] for index in range(LENGTH))


class Model(nn.Module):
    """With a factor that grows while it trains: of a buffer, or of a plain attribute."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net, self.kind, self.calls = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)), kind, 0
        self.register_buffer("warm", torch.zeros((), dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "counts":
            self.calls += 1
        if self.kind == "warms":
            self.warm += 0.1
        return self.net(x) * (1.0 + self.calls * 0.1 + self.warm)


class Average(Callback):
    """Of the losses."""

    def __init__(self, decay: float) -> None:
        self.decay, self._value = decay, 0.0

    def on_log(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        self._value = self.decay * self._value + (1 - self.decay) * values["loss"]

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._value = state["value"]


class Notes(Callback):
    """The steps, losses and rates of this process."""

    def __init__(self) -> None:
        self.steps, self.losses, self.rates = list[int](), list[float](), list[float]()

    def on_log(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        self.steps.append(trainer.step)
        self.losses.append(values["loss"])
        self.rates.append(values["lr"])


def data_of(case: dict[str, Any]) -> Any:
    kind = case.get("data", "")
    if kind in ("stream", "split"):
        return Stream(kind == "split")
    if kind == "another rank's":
        return Rows(RANK)
    return Rows(case.get("order", 0), kind)


def make_model(case: dict[str, Any]) -> nn.Module:
    torch.manual_seed(4)
    return Model(case.get("model", "")).double()


def loss_of(model: Any, data: Tensor) -> Tensor:
    return (model(data[:, :4]) - data[:, 4:]).square().mean()


def trainer(case: dict[str, Any]) -> dict[str, Any]:
    notes, averages = Notes(), [Average(decay) for decay in case.get("averages", [])]
    base = case.get("base")
    strategy: Any = case.get("strategy", "ddp")
    made = Trainer(
        make_model(case),
        data_of(case),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.02),
        scheduler=None if base is None else lambda optimizer: LambdaLR(optimizer, lambda step: base**step),
        loss=loss_of,
        global_batch_size=GLOBAL_BATCH,
        max_micro_batch_size=3,
        max_steps=case["steps"],
        strategy=DeepSpeed({"zero_optimization": {"stage": 2}}) if strategy == "zero2" else strategy,
        shuffle=case.get("data") not in ("stream", "split"),
        loader_options={"num_workers": case.get("workers", 0)},
        checkpoint_dir=case["directory"],
        save_every=case.get("save_every", 0),
        callbacks=[*averages, notes],
        log_every=1,
        progress=False,
        **case.get("options", {}),
    )
    made.fit()
    kept = {f"{one.decay}": one._value for one in averages}
    return {"steps": notes.steps, "losses": notes.losses, "rates": notes.rates, "kept": kept}


def loop(case: dict[str, Any]) -> dict[str, Any]:
    """A loop of one's own; its ``StepLR`` is given to ``TrainingState``, or left out, or moved by the script."""
    session = elastic.session(case["directory"])
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = make_model(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    base = case.get("base")
    scheduler: Any = StepLR(optimizer, 1, gamma=0.8) if base is None else LambdaLR(optimizer, lambda step: base**step)
    given = {"scheduler": scheduler} if case["how"] == "given" else {}
    state = TrainingState(session, model=model, optimizer=optimizer, **given)
    state.load(**case.get("options", {}))
    if case["how"] == "made late":
        scheduler = StepLR(optimizer, 3)
    if case["how"] == "moved" and session.step:
        scheduler.last_epoch, scheduler._last_lr = session.step, [optimizer.param_groups[0]["lr"]]
    wrapped = DistributedDataParallel(model) if session.world_size > 1 else model
    sampler = ElasticSampler(LENGTH, GLOBAL_BATCH, seed=1)
    plan = BatchPlan(GLOBAL_BATCH, session.world_size, 3)
    data: Any = data_of(case)
    batches: Batches[Tensor] = Batches(data, sampler, plan, session.rank, resume=session.resume)
    steps, losses, rates = [], [], []
    for batch in session.steps(batches, max_steps=case["steps"], save=state.write):
        total = 0.0
        for micro in batch.micro_batches:
            loss = loss_of(wrapped, micro.data)
            micro.scale(loss).backward()
            total += float(loss.detach()) * micro.n
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        steps.append(batch.step)
        losses.append(session.sum(total) / batch.n)
        rates.append(scheduler.get_last_lr()[0])
    return {"steps": steps, "losses": losses, "rates": rates}


def engine(case: dict[str, Any]) -> dict[str, Any]:
    """A loop of one's own with a DeepSpeed engine, which steps a ``LambdaLR``."""
    import deepspeed

    from dalsegno.elastic import deepspeed as ours

    session = elastic.session(case["directory"])
    if not dist.is_initialized():
        ours.prepare()
    model, base = make_model(case), case["base"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scheduler = LambdaLR(optimizer, lambda step: base**step)
    sampler, plan = ElasticSampler(LENGTH, GLOBAL_BATCH, seed=1), BatchPlan(GLOBAL_BATCH, session.world_size, 3)
    config = ours.config({"zero_optimization": {"stage": 1}, "gradient_clipping": 0.0}, plan, session.resume)
    made, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    ours.restore(made, session.resume, **case.get("options", {}))
    batches: Batches[Tensor] = Batches(Rows(), sampler, plan, session.rank, scale="deepspeed", resume=session.resume)
    steps, rates = [], []
    for batch in session.steps(batches, max_steps=case["steps"], save=ours.save(made)):
        for micro in batch.micro_batches:
            made.backward(micro.scale(loss_of(made, micro.data)))
            made.step()
        steps.append(batch.step)
        rates.append(float(made.get_lr()[0]))
    return {"steps": steps, "rates": rates}


def given_engine(case: dict[str, Any]) -> dict[str, Any]:
    """The same, given to ``s.engine``."""
    import deepspeed

    s = elastic.session(case["directory"])
    data = s.data(data_of(case), global_batch=GLOBAL_BATCH, micro_batch=3, seed=1)
    config = s.deepspeed_config({"zero_optimization": {"stage": case["stage"]}, "gradient_clipping": 0.0}, data)
    numbers = torch.float32 if case["stage"] == 3 else torch.float64  # it takes no others
    model = make_model(case).to(numbers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    made, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    state = s.engine(made, **case.get("options", {}))
    steps, losses = [], []
    for batch in s.steps(data, state, max_steps=case["steps"], save_every=case.get("save_every", 0)):
        total = 0.0
        for micro in batch:
            loss = loss_of(made, micro.data.to(numbers))
            made.backward(micro.scale(loss))
            made.step()
            total += float(loss.detach()) * micro.n
        steps.append(batch.step)
        losses.append(s.sum(total) / batch.n)
    return {"steps": steps, "losses": losses}


def hugging_face(case: dict[str, Any]) -> dict[str, Any]:
    """A Trainer of Hugging Face, which saves each step."""
    from transformers import Trainer as TheirTrainer
    from transformers import TrainingArguments

    from dalsegno.swift_plugin.hf.options import Options
    from dalsegno.swift_plugin.hf.trainer import elastic_class

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = make_model(case).float()

        def forward(self, rows: Tensor) -> dict[str, Tensor]:
            return {"loss": loss_of(self.inside, rows)}

    elastic.session(case["directory"])
    args = TrainingArguments(
        output_dir=f"{case['directory']}/out",
        per_device_train_batch_size=3,
        max_steps=case["steps"],
        save_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    rows = Rows()
    made: Any = TheirTrainer(Loss(), args, train_dataset=[{"rows": rows[n].float()} for n in range(LENGTH)])
    made.__class__ = elastic_class(TheirTrainer)
    made.become_elastic(Options(GLOBAL_BATCH, False))
    made.train()
    return {"steps": list(range(1, made.state.global_step + 1))}


class Said(logging.Handler):
    """What people are told."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def run(case: dict[str, Any]) -> dict[str, Any]:
    """What came of one case on this rank."""
    said, found = Said(), dict[str, Any]()
    logging.getLogger("dalsegno").addHandler(said)
    try:
        kinds = {"loop": loop, "engine": engine, "given engine": given_engine, "trainer": trainer}
        kinds["hugging face"] = hugging_face
        found = {"refused": "", **kinds[case.get("kind", "trainer")](case)}
    except Exception as error:
        found = {"refused": f"{type(error).__name__}: {error}", "steps": []}
    finally:
        logging.getLogger("dalsegno").removeHandler(said)
    return {**found, "said": said.lines}


if __name__ == "__main__":
    cases.run_all(run)
