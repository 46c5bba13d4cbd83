"""Ranks that a script starts unlike, or whose data are not ours: each case with a session of its own.

``argv[1]`` is a JSON list of ``{"case", "store", "directory", "options"}``; ``argv[2]`` is where ranks' results go.
Of each case: what refused it, the samples of each step that was made, and the warnings.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from dalsegno import elastic
from dalsegno.elastic import Batches, BatchPlan, ElasticSampler, Evaluator, Position, Trainer, background
from dalsegno.elastic.training.session import BareSession
from tests.support.workers import cases

LENGTH, GLOBAL_BATCH = 40, 12
ORDERS = itertools.count()


class Kept(logging.Handler):
    """Warnings of one case."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Case:
    """One case on one rank."""

    def __init__(self, directory: Path, rank: int, world: int, options: dict[str, Any]) -> None:
        self.directory, self.rank, self.world, self.options = directory, rank, world, options
        self.steps: list[list[int]] = []
        self.losses: list[str] = []

    def here(self, name: str, default: Any = None) -> Any:
        """An option of this rank: a list has one value for each of the first ranks, and the last for all others."""
        value = self.options.get(name, default)
        return value[min(self.rank, len(value) - 1)] if isinstance(value, list) else value

    def open(self) -> BareSession:
        if self.rank == 0 and self.options.get("lose"):  # which rank 0 alone looks for
            for path in self.directory.glob(f"step-{self.options['lose']}.*"):
                shutil.rmtree(path)
        return elastic.session(self.directory if self.here("directory", True) else None)

    def batches(self, s: BareSession) -> Batches[Any]:
        length, stream = self.here("length", LENGTH), self.here("stream", False)
        sampler = ElasticSampler(
            None if stream else length,
            self.here("global_batch", GLOBAL_BATCH),
            seed=self.here("seed", 3),
            shuffle=not stream,
            drop_last=self.here("drop_last", False),
        )
        plan = BatchPlan(
            self.here("global_batch", GLOBAL_BATCH),
            self.here("plan_world", self.world),
            self.here("micro", 3),
            self.here("fixed", False),
            self.here("pad", False),
        )
        tokens: Callable[..., int] | None = len if self.here("tokens", False) else None
        rows = torch.arange(length)
        return Batches(
            Counted(rows) if stream else rows,
            sampler,
            plan,
            self.here("rank", self.rank),
            resume=s.resume if self.here("resume", True) else None,
            data_epochs=self.here("data_epochs"),
            seed=self.here("random_seed"),
            count_tokens=tokens,
            reduce=None if tokens is None else s.sum,
        )

    def saving(self) -> Any:
        if not self.here("save", True):
            return None
        return background(lambda: {}) if self.here("background", False) else self.write

    def write(self, path: Path) -> None:
        """Something, as of a replicated training."""
        if self.rank == 0:
            (path / "model.pt").write_bytes(b"weights")

    def loop(self, s: BareSession, data: Any, **options: Any) -> None:
        given = {
            "max_steps": self.here("max_steps", 4),
            "any_world_size": self.here("any_world_size"),
            "save": self.saving(),
            "save_every": self.here("save_every", 2),
            "memory_every": self.here("memory_every", 0),
            "strategy": self.here("strategy", "ddp"),
        }
        for batch in s.steps(data, **{**given, **options}):
            if hasattr(batch, "micro_batches"):
                self.steps.append([n for micro in batch.micro_batches if micro.loss_scale for n in micro.sample_ids])
            else:
                self.steps.append(batch.tolist())


def ours(case: Case) -> None:
    """The loop around `Batches`."""
    s = case.open()
    if metric := case.here("track"):
        s.track(metric)
    case.loop(s, case.batches(s))


def own_loop(case: Case) -> None:
    """A loop of the script's own, around `Batches`."""
    s = case.open()
    batches = case.batches(s)
    s.meet(2, batches.alike if case.here("told", True) else {"learning rate": case.here("rate")})
    for batch in batches:
        s.begin_step(1)
        list(batch.micro_batches)
        case.steps.append(list(batch.sample_ids))
        s.end_step()
        place = Position(0, case.here("place", batch.position_after.samples))
        s.save(
            case.write,
            position=place,
            order=batches.order,
            cut=batches.cut,
            strategy=case.here("strategy", "ddp"),
        )
        if s.step == 2:
            break
    s.finish()


def foreign(case: Case) -> None:
    """An iterable of the script's own."""
    s = case.open()
    case.loop(s, loader(case), advanced=case.here("advanced", False))


def loader(case: Case) -> Any:
    data, workers = list(range(LENGTH)), case.here("workers", 0)
    kind = case.here("loader", "plain")
    spread = DistributedSampler(
        data, case.here("plan_world", case.world), case.here("rank", case.rank), seed=case.here("seed", 3)
    )
    if kind == "spread":
        return DataLoader(data, batch_size=3, sampler=spread, num_workers=workers)
    if kind == "bar":
        return (batch for batch in case.batches(case.open()))
    if kind == "list":
        values = [torch.tensor([number]) for number in range(case.here("begins", 0), LENGTH)]
        return values if case.rank == 0 else iter(values)
    if kind in ("stateful", "stateful, spread", "stateful, drawn"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        torch.manual_seed(next(ORDERS))  # as in a process that sets no seed
        if kind == "stateful":
            return StatefulDataLoader(data, batch_size=3, shuffle=True, num_workers=workers)
        drawn = RandomSampler(data)
        return StatefulDataLoader(data, batch_size=3, sampler=drawn if kind == "stateful, drawn" else spread)
    assert kind == "plain"
    return DataLoader(data, batch_size=3)


def accelerated(case: Case) -> None:
    """The loader that Accelerate prepares."""
    from accelerate import Accelerator, DataLoaderConfiguration

    how = DataLoaderConfiguration(use_stateful_dataloader=case.here("stateful", False))
    torch.manual_seed(next(ORDERS))
    prepared = Accelerator(cpu=True, dataloader_config=how).prepare(
        DataLoader(range(LENGTH), batch_size=3, shuffle=True)
    )
    case.loop(case.open(), prepared)


def trained(case: Case) -> Trainer:
    held_out = case.here("held_out")
    rows = torch.arange(case.here("length", LENGTH), dtype=torch.float32).reshape(-1, 1)
    trainer = Trainer(
        nn.Linear(1, 1),
        Counted(rows) if case.here("streamed") else rows,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-4),
        loss=lambda model, rows: note(case, model(rows)),
        global_batch_size=case.here("global_batch", GLOBAL_BATCH),
        max_micro_batch_size=case.here("micro", 3),
        fixed_micro_batch=case.here("fixed", False),
        max_steps=case.here("max_steps", 2),
        data_epochs=case.here("data_epochs"),
        seed=case.here("seed", 3),
        shuffle=not case.here("streamed"),
        save_every=case.here("save_every", 0),
        checkpoint_dir=case.directory if case.here("directory", True) else None,
        max_grad_norm=case.here("max_grad_norm"),
        evaluator=None if held_out is None else evaluator(case, held_out),
        evaluate_every=case.here("evaluate_every", 0),
        check_data=case.here("check_data", True),
        progress=False,
    )
    trainer.fit()
    return trainer


class Counted(IterableDataset[Any]):
    """Rows that nobody knows the number of."""

    def __init__(self, rows: Iterable[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def evaluator(case: Case, length: int) -> Evaluator:
    rows = torch.arange(length, dtype=torch.float32).reshape(-1, 1)
    if case.here("turned"):
        rows = rows.flip(0)
    return Evaluator(
        Counted(rows) if case.here("stream") else rows,
        lambda model, data: {"loss": (model(data).square(), len(data))},
        batch_size=case.here("batch_size", 4),
        interrupt_every=2,
    )


def note(case: Case, rows: torch.Tensor) -> torch.Tensor:
    case.steps.append([0] * len(rows))
    return rows.square().mean()


def twice(case: Case) -> None:
    """Two trainings in one process; ``second`` says of what kind the second one is, and where."""
    trained(case)
    case.steps.clear()
    if case.here("second") == "trainer":
        trained(case)
    elif case.here("second") == "elsewhere":
        case.directory = case.directory / "other"
        trained(case)
    elif case.here("second") == "sum":
        case.steps.append([int(elastic.session().sum(case.rank + 1.0)) for _ in range(2)])
    else:
        s = case.open()
        case.loop(s, case.batches(s))


def prepared(case: Case) -> None:
    """DeepSpeed is prepared where nothing says which rank of its node this is."""
    from dalsegno.elastic import deepspeed as engine

    local = os.environ.pop("LOCAL_RANK")
    try:
        engine.prepare()
    finally:
        os.environ["LOCAL_RANK"] = local


def hugging_face(case: Case) -> None:
    """A Trainer of Hugging Face."""
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
    from transformers import Trainer as TheirTrainer
    from transformers.trainer_utils import EvalLoopOutput

    from dalsegno.swift_plugin.hf.options import Options
    from dalsegno.swift_plugin.hf.trainer import elastic_class

    class Mine(TheirTrainer):  # type: ignore[misc]  # transformers is not typed
        """Evaluates in its own way: rank 0 alone, or other data than it has been given."""

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            if case.here("evaluates") == "other data":
                eval_dataset = rows(case.here("own_held_out"))
            return super().get_eval_dataloader(eval_dataset)

        def evaluation_loop(self, dataloader: Any, *given: Any, **options: Any) -> Any:
            if case.here("evaluates") != "alone":
                return super().evaluation_loop(dataloader, *given, **options)
            return EvalLoopOutput(None, None, {"eval_loss": float(case.rank)}, len(dataloader.dataset))

        def evaluate(self, *given: Any, **options: Any) -> Any:
            if case.here("evaluates") != "alone" or case.rank == 0:
                return super().evaluate(*given, **options)
            return {"eval_loss": 0.0}

    case.open()
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, use_cache=False)
    args = TrainingArguments(
        output_dir=str(case.directory / "out"),
        per_device_train_batch_size=case.here("micro", 3),
        max_steps=case.here("max_steps", 2),
        save_strategy="steps" if case.here("save_every", 5) else "no",
        save_steps=case.here("save_every", 5),
        seed=case.here("seed", 3),
        eval_strategy="steps" if case.here("evaluate_every") else "no",
        eval_steps=case.here("evaluate_every"),
        learning_rate=case.here("rate", 1e-3),
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )

    def rows(length: int) -> list[dict[str, torch.Tensor]]:
        return [{"input_ids": torch.tensor([n % 16] * 4), "labels": torch.tensor([n % 16] * 4)} for n in range(length)]

    held_out, given = case.here("held_out"), rows(case.here("length", LENGTH))
    data = {
        "train_dataset": Counted(given) if case.here("stream") else given,
        "eval_dataset": held_out and rows(held_out),
    }
    kind = Mine if case.here("evaluates") else TheirTrainer
    trainer: Any = kind(model=LlamaForCausalLM(config), args=args, **data)
    trainer.__class__ = elastic_class(kind)
    trainer.become_elastic(Options(GLOBAL_BATCH, case.here("fixed", False)))
    try:
        if held_out and not case.here("evaluate_every"):
            trainer.evaluate()
        trainer.train()
    finally:
        case.steps.extend([] for _ in range(trainer.state.global_step))


CASES: dict[str, Callable[[Case], object]] = {
    one.__name__: one for one in (ours, own_loop, foreign, accelerated, trained, twice, prepared, hugging_face)
}


def run(task: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    cases.begin(task["store"])
    case = Case(Path(task["directory"]), rank, world, task["options"])
    kept = Kept()
    logging.getLogger("dalsegno").addHandler(kept)
    refused = ""
    try:
        CASES[task["case"]](case)
    except (ValueError, RuntimeError, TypeError) as error:
        refused = f"{type(error).__name__}: {error}"
    finally:
        logging.getLogger("dalsegno").removeHandler(kept)
        cases.close()
    return {"refused": refused, "steps": case.steps, "losses": case.losses, "warnings": kept.lines}


def main() -> None:
    # The tests hold the stores, so no rank has to find a port.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    # Else each new group asks for this machine's address by its name, which may take seconds.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    results: list[dict[str, Any]] = [run(task, rank, world) for task in json.loads(sys.argv[1])]
    cases.end(results, Path(sys.argv[2]))


if __name__ == "__main__":
    main()
