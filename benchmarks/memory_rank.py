"""One rank of a world of `benchmarks.memory`: saves the same state in several ways, and trains with and without saves.

One JSON object in ``argv[1]``: ``strategy`` (``"ddp"``, ``"zero1"``, or ``"hf"``: a Trainer of transformers),
``megabytes`` of state, ``saves`` of each kind,
``steps`` of one stretch of the loop and ``stretches`` of each kind, ``step`` (seconds of work), ``out``.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dalsegno.elastic import background, session
from dalsegno.elastic.checkpoint import CheckpointName
from dalsegno.elastic.checkpoint.files import list_files
from dalsegno.elastic.checkpoint.parts import parts_directory
from dalsegno.elastic.checkpoint.spares import keep_spares
from dalsegno.elastic.training.session import BareSession

LAYERS = 48
# From the third save on each is written over the files of an older one, as in all of a long run.
PRIMING_SAVES = 2
# Model and the two moments of Adam, four bytes each.
BYTES_PER_PARAMETER = 12


def model_of(megabytes: int) -> nn.Module:
    width = int((megabytes * 1e6 / BYTES_PER_PARAMETER / LAYERS) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))


def ddp(megabytes: int, s: BareSession) -> tuple[Any, Any, list[torch.Tensor]]:
    """What writes, what is written in the background, and the tensors of this rank."""
    model = model_of(megabytes)
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()

    def state() -> dict[str, Any]:
        return {"model.pt": {"model": model.state_dict(), "optimizer": optimizer.state_dict()}} if s.rank == 0 else {}

    def write(path: Path) -> None:
        for name, content in state().items():
            torch.save(content, path / name)

    tensors = [value for one in optimizer.state.values() for value in one.values()] + list(model.parameters())
    return write, background(state), tensors if s.rank == 0 else []


def zero1(megabytes: int, s: BareSession) -> tuple[Any, Any, list[torch.Tensor]]:
    """The same of a DeepSpeed engine, which writes by itself."""
    import deepspeed

    from dalsegno.elastic import BatchPlan
    from dalsegno.elastic import deepspeed as ours

    ours.prepare("gloo")
    model = model_of(megabytes)
    base = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    config = ours.config(base, BatchPlan(2, s.world_size, 1), None)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=config)
    engine.backward(engine(torch.ones(1, model[0].in_features)).sum())  # type: ignore[index]
    engine.step()
    tensors = [*model.parameters()] if s.rank == 0 else []
    for one in engine.optimizer.optimizer.state.values():
        tensors += [value for value in one.values() if isinstance(value, torch.Tensor)]
    save = ours.save(engine)
    return save, background(save), tensors + list(engine.optimizer.single_partition_of_fp32_groups)


def hf(megabytes: int, s: BareSession) -> tuple[Any, Any, list[torch.Tensor]]:
    """The same of a Trainer of transformers with DDP, whose checkpoint has a dozen small files besides."""
    from transformers import Trainer, TrainingArguments

    from dalsegno.elastic.saving.background_save import Background
    from dalsegno.swift_plugin.hf import elastic
    from dalsegno.swift_plugin.hf.checkpoints import TrainerWrite, Unfinished

    args = TrainingArguments(str(s.run_dir), per_device_train_batch_size=1, report_to="none", use_cpu=True, max_steps=9)
    trainer: Any = elastic(Trainer(model_of(megabytes), args, train_dataset=[{}] * 16))
    trainer.create_optimizer_and_scheduler(9)
    model, optimizer = trainer.model, trainer.optimizer
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()

    def made() -> TrainerWrite:
        save = partial(Trainer._save_checkpoint, trainer, model, None)
        trainer.elastic_run.writing = TrainerWrite(save, Unfinished(), s.rank, reshards=False)
        return trainer.elastic_run.writing

    def write(path: Path) -> None:
        made()(path)

    state = Background(lambda copy, path: made().copies(copy, path), copies=True)
    tensors = [value for one in optimizer.state.values() for value in one.values()] + list(model.parameters())
    return write, state, tensors if s.rank == 0 else []


class Saves:
    """One session's, one step after the other."""

    def __init__(self, s: BareSession, strategy: str) -> None:
        self._session, self._strategy = s, strategy
        self._memory = s._identity.memory_dir

    def step(self, work: Callable[[], None] = lambda: None) -> None:
        self._session.begin_step()
        work()
        self._session.end_step()

    def save(self, write: Any, *, in_memory: bool, wait: bool = True) -> None:
        self._session.save(write, in_memory=in_memory, wait=wait, strategy=self._strategy)

    def save_over(self, what: Any) -> None:
        """To memory, in the background, over the files of the step before the last one: the agents keep two steps."""
        self.replace(1)
        self.save(what, in_memory=True, wait=False)

    def settled(self) -> float:
        """Seconds by which the end of a step is longer that settles a save, once that is over on all ranks."""
        while self._session.saves.busy:
            time.sleep(0.001)  # why: nothing of a thread's end is to be measured
        return self._step_end() - self._step_end()

    def _step_end(self) -> float:
        dist.barrier()
        self._session.begin_step()
        time.sleep(0.005)  # why: a step, in which the ranks tell each other that it is over
        began = time.perf_counter()
        self._session.end_step()
        return time.perf_counter() - began

    def tidy(self) -> None:
        """What the agents do; not part of what is measured."""
        self._session.settle()
        dist.barrier()
        self.replace(0)
        for path in sorted(self._session.run_dir.glob("step-*")) if self._session.rank == 0 else ():
            shutil.rmtree(path)
        dist.barrier()

    def replace(self, stay: int) -> None:
        """The agents keep the files of the last step that was replaced, and delete the others."""
        assert self._memory is not None
        steps = sorted(self._memory.glob("step-*[0-9]"), key=lambda path: CheckpointName.parse(path.name).age)
        for path in steps[: len(steps) - stay]:
            keep_spares(self._memory, path, list_files(path))
            shutil.rmtree(path)
            shutil.rmtree(parts_directory(path), ignore_errors=True)


def saved(task: dict[str, Any], saves: Saves, write: Any, state: Any) -> dict[str, list[float]]:
    """Seconds that the loop waits for each kind of save."""
    ways: dict[str, tuple[Any, bool]] = {"disk, waiting": (write, False), "memory, waiting": (write, True)}
    if state is not None:
        ways |= {"disk, background": (state, False), "memory, background": (state, True)}
    waited: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(task["saves"] + 1):
        for way, (what, in_memory) in ways.items():
            saves.step()
            dist.barrier()
            began = time.perf_counter()
            saves.save(what, in_memory=in_memory, wait="waiting" in way)
            waited[way].append(time.perf_counter() - began + saves.settled())
            saves.tidy()
    return {way: each[1:] for way, each in waited.items()}  # the first one makes buffers


def copied(tensors: list[torch.Tensor], times: int) -> list[float]:
    """Seconds for a plain copy of them into memory that is there already."""
    targets = [torch.empty_like(tensor) for tensor in tensors]
    taken = []
    for _ in range(times + 1):
        dist.barrier()
        began = time.perf_counter()
        for target, tensor in zip(targets, tensors, strict=True):
            target.copy_(tensor.detach())
        taken.append(time.perf_counter() - began)
    return taken[1:]


def trained(task: dict[str, Any], saves: Saves, what: Any) -> dict[str, list[tuple[float, float]]]:
    """Seconds of stretches of the loop, in turn without a save and with one in memory every ten steps.

    Of each how long it took, and what processors this process took for it, with what writes in the background.
    """
    a = torch.randn(400, 400)
    # A new result each time would be memory that is given back and asked for again: what that costs changes.
    b = torch.empty_like(a)
    # Of a processor: how long a step takes on a machine that others load says nothing about its work.
    began, products = time.process_time(), 0
    while time.process_time() - began < 2.0:
        torch.mm(a, a, out=b)
        products += 1
    each = max(1, int(products * task["step"] / 2.0))

    def work() -> None:
        for _ in range(each):
            torch.mm(a, a, out=b)

    taken: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    for _ in range(task["stretches"]):
        for way, times in taken.items():
            saves.tidy()
            for _ in range(PRIMING_SAVES if way == "with" else 0):
                saves.step()
                saves.save_over(what)
                saves.settled()
            began, busy = time.perf_counter(), time.process_time()
            for number in range(task["steps"]):
                saves.step(work)
                if way == "with" and number % 10 == 0:
                    saves.save_over(what)
            saves.settled()
            times.append((time.perf_counter() - began, time.process_time() - busy))
    saves.tidy()
    return taken


def main() -> None:
    task = json.loads(sys.argv[sys.argv.index("--task") + 1])
    s = session()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    torch.set_num_threads(1)  # why: the ranks share the cores, and what a rank is forked from read no variable
    write, state, tensors = {"ddp": ddp, "zero1": zero1, "hf": hf}[task["strategy"]](task["megabytes"], s)
    s.compare({})
    s.meet(1)
    saves = Saves(s, "deepspeed-zero-1" if task["strategy"] == "zero1" else "ddp")
    result: dict[str, Any] = {"bytes": sum(tensor.nbytes for tensor in tensors)}
    result["copy"] = copied(tensors, task["saves"])
    result["saves"] = saved(task, saves, write, state)
    result["loop"] = trained(task, saves, write if state is None else state) if task["stretches"] else {}
    (Path(task["out"]) / f"result-{s.rank}.json").write_text(json.dumps(result), encoding="utf-8")
    print({way: round(statistics.median(each), 4) for way, each in result["saves"].items()}, flush=True)
    s.finish()


if __name__ == "__main__":
    main()
