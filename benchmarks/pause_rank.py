"""One rank of `benchmarks.pause`: a model of given bytes and tensors, trained by DDP, FSDP2, ZeRO-1 or ZeRO-3.

Under `dlrover-run` it is a script with a session. With `--own DIR` it is a script for torchrun: it saves every few
steps with its framework's own means (`torch.save`, torch's distributed checkpoint, DeepSpeed's `save_checkpoint`), and
begins with the newest save. Another number of ranks then needs DeepSpeed's own conversion to universal files.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import common

from benchmarks.pause_steps import note_step, number_of_start
from dalsegno.elastic import (
    FSDP,
    Accumulation,
    Batches,
    BatchPlan,
    Callback,
    ElasticSampler,
    Trainer,
    TrainingState,
    session,
)
from dalsegno.protos.contract import Variable
from dalsegno.protos.trace import mark

SAMPLES, GLOBAL_BATCH, SEED = 1 << 16, 4, 1
# Number of parts of the model that FSDP gathers one by one.
BLOCKS = 8


class Layer(nn.Module):
    """Two tensors, a weight and a bias; adds a little to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.tanh(self.linear(x))


class Rows(torch.utils.data.Dataset[Tensor]):
    """Rows of numbers, each computed from its index."""

    def __init__(self, width: int) -> None:
        self._places = torch.arange(1.0, width + 1)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.sin(self._places * (index + 1))


class Block(nn.Sequential):
    """Layers that FSDP gathers together."""


def make_model(flags: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(SEED)
    layers = [Layer(flags.width) for _ in range(flags.layers)]
    size = -(-flags.layers // BLOCKS)
    return nn.Sequential(*(Block(*layers[at : at + size]) for at in range(0, flags.layers, size)))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def loss_of(model: Any, rows: Tensor) -> Tensor:
    loss: Tensor = (model(rows) - rows.flip(-1)).square().mean()
    return loss


def shard(model: nn.Sequential) -> nn.Module:
    """Shards the model with FSDP2, block by block."""
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block)
    fully_shard(model)
    return model


def configuration(flags: argparse.Namespace) -> dict[str, Any]:
    """DeepSpeed's configuration, without batch sizes."""
    return {
        "zero_optimization": {"stage": int(flags.framework.removeprefix("zero"))},
        "zero_allow_untested_optimizer": True,
    }


def device() -> torch.device:
    """This rank's card, if there is one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    found = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(found)
    return found


def join() -> None:
    dist.init_process_group("cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo")


# ---- with a session --------------------------------------------------------------------------------------------------


class Paced(Callback):
    """Writes each step, and paces it."""

    def __init__(self, flags: argparse.Namespace) -> None:
        self._directory, self._clock, self.loss = flags.step_log, common.StepClock(flags.step_time), 0.0

    def on_fit_begin(self, trainer: Trainer) -> None:
        epoch = int(os.environ[Variable.EPOCH])
        self._log = common.StepLog(self._directory, rank=trainer.rank, world_size=trainer.world_size, epoch=epoch)
        mark("engine built")

    def on_step(self, trainer: Trainer, batch: Any) -> None:
        self._clock.wait()
        note_step(self._log, batch.step, self.loss)

    def on_fit_end(self, trainer: Trainer) -> None:
        self._log.close()


def by_trainer(flags: argparse.Namespace) -> None:
    """The same training by a Trainer: of FSDP2, or of DDP in processes that stay."""
    model, paced = make_model(flags), Paced(flags)
    mark("model built")

    def loss(called: Any, rows: Tensor) -> Tensor:
        found = loss_of(called, rows)
        paced.loss = float(found.detach())
        return found

    Trainer(
        model,
        Rows(flags.width),
        optimizer=make_optimizer,
        loss=loss,
        strategy=FSDP(blocks=(Block,)) if flags.framework == "fsdp2" else flags.framework,
        global_batch_size=GLOBAL_BATCH,
        max_micro_batch_size=GLOBAL_BATCH,
        max_steps=flags.steps,
        seed=SEED,
        stay=flags.stay,
        callbacks=[paced],
        log_every=flags.steps,
        progress=False,
        **cadence(flags),
    ).fit()


def elastic(flags: argparse.Namespace) -> None:
    """The script that `dlrover-run` runs."""
    if flags.framework == "hf":
        by_hugging_face(flags)
    elif flags.stay or flags.framework == "fsdp2":
        by_trainer(flags)
    elif flags.framework.startswith("zero"):
        engines(flags)
    else:
        lower(flags)


def by_hugging_face(flags: argparse.Namespace) -> None:
    """The same training of DDP by a Trainer of transformers, with a session and without."""
    from benchmarks.pause_hf import train

    directory = flags.own or flags.step_log.parent / "links"
    train(flags, make_model(flags), Rows(flags.width), GLOBAL_BATCH, SEED, directory)


def lower(flags: argparse.Namespace) -> None:
    """DDP, with calls of the lower layer."""
    s = session()
    # Before the first need of a place, so that a newcomer has it when the others stop.
    model = make_model(flags).to(device())
    mark("model built")
    rows = Rows(flags.width)
    sampler = ElasticSampler(len(rows), GLOBAL_BATCH, seed=SEED)
    plan = BatchPlan(GLOBAL_BATCH, s.world_size, GLOBAL_BATCH)
    train, accumulate, state = _elastic_ddp(s, model)
    batches: Batches[Tensor] = Batches(rows, sampler, plan, s.rank, scale="ddp", resume=s.resume)
    log = common.StepLog(flags.step_log, rank=s.rank, world_size=s.world_size, epoch=s.epoch)
    # As the steps of a model on a card are long beside what surrounds them.
    clock = common.StepClock(flags.step_time)
    for batch in s.steps(batches, max_steps=flags.steps, seed=SEED, save=state.write, **cadence(flags)):
        loss = 0.0
        for micro in accumulate(batch):
            loss += train(micro)
        accumulate.step()
        clock.wait()
        note_step(log, batch.step, loss)


def _elastic_ddp(s: Any, model: nn.Sequential) -> tuple[Any, Any, TrainingState]:
    where = device()
    join()
    optimizer = make_optimizer(model)
    state = TrainingState(s, model=model, optimizer=optimizer)
    state.load()
    wrapped = DistributedDataParallel(model)
    mark("engine built")

    def train(micro: Any) -> float:
        loss = loss_of(wrapped, micro.data.to(where))
        micro.scale(loss).backward()
        return float(loss.detach())

    accumulate = Accumulation(wrapped, optimizer)
    return train, _Stepping(accumulate, optimizer), state


class _Stepping:
    """`Accumulation`, followed by the optimizer's step."""

    def __init__(self, accumulate: Accumulation, optimizer: torch.optim.Optimizer) -> None:
        self._accumulate, self._optimizer = accumulate, optimizer

    def __call__(self, batch: Any) -> Iterator[Any]:
        return iter(self._accumulate(batch))

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


def engines(flags: argparse.Namespace) -> None:
    """The same training by an engine of DeepSpeed."""
    import deepspeed

    s = session()
    model = make_model(flags)
    optimizer = make_optimizer(model)
    mark("model built")
    data = s.data(Rows(flags.width), global_batch=GLOBAL_BATCH, micro_batch=GLOBAL_BATCH, seed=SEED)
    config = s.deepspeed_config(configuration(flags), data)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    state = s.engine(engine)
    log = common.StepLog(flags.step_log, rank=s.rank, world_size=s.world_size, epoch=s.epoch)
    clock = common.StepClock(flags.step_time)
    for batch in s.steps(data, state, max_steps=flags.steps, **cadence(flags)):
        loss = 0.0
        for micro in batch:
            own = loss_of(engine, micro.data.to(engine.device))
            engine.backward(micro.scale(own))
            engine.step()
            loss += float(own.detach())
        clock.wait()
        log.follow(s)
        note_step(log, batch.step, loss)


def cadence(flags: argparse.Namespace) -> dict[str, int]:
    return {"save_every": flags.save_every, "memory_every": flags.memory_every}


# ---- with torchrun alone ---------------------------------------------------------------------------------------------


def own(flags: argparse.Namespace) -> None:
    """The script that torchrun runs."""
    mark("session")
    if flags.framework == "hf":
        by_hugging_face(flags)
        return
    if flags.framework.startswith("zero"):
        import deepspeed
        import deepspeed.ops

        # Not used under torchrun, and its compilation takes a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", verbose=False)
        step, done, save = _own_zero(flags)
    else:
        join()
        step, done, save = _own_torch(flags)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    number = number_of_start(device())
    os.environ[Variable.EPOCH] = str(number)
    log = common.StepLog(flags.step_log, rank=rank, world_size=world_size, epoch=number)
    clock, rows = common.StepClock(flags.step_time), Rows(flags.width)
    mark("ready")
    for count in itertools.count(done + 1):
        first = count * GLOBAL_BATCH % SAMPLES
        mine = torch.stack([rows[first + place] for place in range(rank, GLOBAL_BATCH, world_size)])
        loss = step(mine)
        clock.wait()
        note_step(log, count, loss)
        mark("step", step=count)
        if count % flags.save_every == 0:
            save(count)


Own = tuple[Callable[[Tensor], float], int, Callable[[int], None]]


def _own_torch(flags: argparse.Namespace) -> Own:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    where = device()
    model: Any = make_model(flags).to(where)
    mark("model built")
    ddp = flags.framework == "ddp"
    wrapped: Any = DistributedDataParallel(model) if ddp else shard(model)
    optimizer = make_optimizer(wrapped)
    mark("built")
    newest = flags.own / "newest"
    done = int(newest.read_text()) if newest.exists() else 0
    if done and ddp:
        found = torch.load(flags.own / f"{done}.pt", map_location=where, weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
    elif done:
        weights, moments = get_state_dict(wrapped, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=flags.own / str(done))
        set_state_dict(wrapped, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    if done:
        mark("loaded")

    def step(rows: Tensor) -> float:
        loss = loss_of(wrapped, rows.to(where))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    def save(count: int) -> None:
        if not ddp:
            weights, moments = get_state_dict(wrapped, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=flags.own / str(count))
        elif dist.get_rank() == 0:
            flags.own.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, flags.own / f"{count}.pt")
        _note(newest, count)

    return step, done, save


def _note(newest: Path, count: int) -> None:
    """Once all have written: notes which save to begin with."""
    dist.barrier()
    if dist.get_rank() == 0:
        aside = newest.with_suffix(".new")
        aside.write_text(str(count))
        aside.replace(newest)


def _own_zero(flags: argparse.Namespace) -> Own:
    import deepspeed
    from deepspeed.checkpoint.constants import UNIVERSAL_CHECKPOINT_INFO, UNIVERSAL_CHECKPOINT_VERSION_KEY

    ranks, newest = dist.get_world_size(), flags.own / "newest"
    config = configuration(flags)
    config |= {"train_micro_batch_size_per_gpu": GLOBAL_BATCH // ranks, "gradient_accumulation_steps": 1}
    done = int(newest.read_text()) if newest.exists() else 0
    tag = f"{done}"
    if done and int((flags.own / f"{tag}.ranks").read_text()) != ranks:
        tag = f"{done}-universal-{ranks}"
        config["checkpoint"] = {"load_universal": True}
        if dist.get_rank() == 0:
            _convert(flags.own / f"{done}", flags.own / tag)
        dist.barrier()
        mark("converted by the script")
    model = make_model(flags)
    mark("model built")
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=config)
    mark("built")
    if done:
        loaded, _ = engine.load_checkpoint(str(flags.own), tag=tag)
        assert loaded is not None
        mark("loaded")

    def step(rows: Tensor) -> float:
        loss = loss_of(engine, rows.to(engine.device))
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    def save(count: int) -> None:
        state = {UNIVERSAL_CHECKPOINT_INFO: {UNIVERSAL_CHECKPOINT_VERSION_KEY: 0.4}}
        engine.save_checkpoint(str(flags.own), tag=str(count), client_state=state)
        if dist.get_rank() == 0:
            (flags.own / f"{count}.ranks").write_text(str(ranks))
        _note(newest, count)

    return step, done, save


def _convert(source: Path, target: Path) -> None:
    """DeepSpeed's own converter, with its own defaults."""
    words = ["--input_folder", str(source), "--output_folder", str(target), "--inject_missing_state"]
    subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", choices=("ddp", "hf", "fsdp2", "zero1", "zero3"), default="ddp")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--memory-every", type=int, default=0)
    parser.add_argument("--step-time", type=float, default=0.0)
    parser.add_argument("--step-log", type=Path, required=True)
    parser.add_argument("--stay", action="store_true")
    parser.add_argument("--own", type=Path)
    flags = parser.parse_args()
    if flags.own is None:
        elastic(flags)
    else:
        own(flags)


if __name__ == "__main__":
    main()
