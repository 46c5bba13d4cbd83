"""What a script does beside what it has told the session: a schedule of its own, tensor parallelism, a second engine.

``argv``: the case, the step to end at, where the checkpoints are. Ranks of torchrun's world.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import StepLR

from dalsegno.elastic import Accumulation, Batches, BatchPlan, ElasticSampler, Evaluator, session

ROWS = torch.randn(48, 9, generator=torch.Generator().manual_seed(0))


def made() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 1))


def loss_of(model: Any, rows: Tensor) -> Tensor:
    kind = next(model.parameters()).dtype
    found: Tensor = (model(rows[:, :8].to(kind)) - rows[:, 8:].to(kind)).square().mean()
    return found


def with_engine(case: str, steps: int, directory: str) -> None:
    import deepspeed

    s = session(directory)
    data = s.data(ROWS, global_batch=12, micro_batch=4, seed=0)
    fp16 = {"enabled": case.startswith("fp16"), "initial_scale_power": 4, "loss_scale": 8 * (case == "fp16, fixed")}
    config = s.deepspeed_config({"zero_optimization": {"stage": 1}, "fp16": fp16}, data)
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = StepLR(optimizer, 1, gamma=0.5) if "schedule" in case else None
    made_so = {"lr_scheduler": schedule} if case == "schedule, initialize" else {}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, **made_so)
    critic = None
    if "critic" in case:
        judge = made()
        frozen = case == "critic, frozen"
        trained = {} if frozen else {"optimizer": torch.optim.AdamW(judge.parameters(), lr=0.1)}
        zero = {"zero_optimization": {"stage": 1 - frozen}}
        critic, *_ = deepspeed.initialize(model=judge, config={**config, **zero}, **trained)
    beside = {"schedule": schedule} if case == "schedule, given" else {}
    if case == "critic, given":
        beside = {"critic": critic}
    if case == "schedule, moved" and schedule is not None:
        # Before the optimizer is loaded: it multiplies what it finds.
        for _ in range(s.step):
            schedule.step()
    state = s.engine(engine, **beside)
    for batch in s.steps(data, state, max_steps=steps, save_every=3):
        for micro in batch:
            engine.backward(micro.scale(loss_of(engine, micro.data)))
            engine.step()
            if critic is not None and case != "critic, frozen":
                critic.backward(micro.scale(loss_of(critic, micro.data)))
                critic.step()
        if schedule is not None and made_so == {}:
            schedule.step()
        print(f"step {batch.step} rate {engine.get_lr()[0]:.6g}", flush=True)


def with_dcp(case: str, steps: int, directory: str) -> None:
    s = session(checkpoint_dir=directory)
    dist.init_process_group("gloo")
    model, place = made(), (s.world_size, s.rank)
    if case.startswith("tensor"):
        groups = s.world_size // 2
        mesh = init_device_mesh("cpu", (groups, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if groups > 1:
            fully_shard(model, mesh=mesh["dp"])
        if "dealt" in case:
            place = (groups, mesh["dp"].get_local_rank())
        if "crosswise" in case:
            place = (groups, s.rank % groups)
    else:
        fully_shard(model)
    if "evaluated" in case:
        Evaluator(ROWS, lambda model, rows: {"loss": (loss_of(model, rows) * len(rows), len(rows))}).run(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts: dict[str, Any] = {}
    schedule = StepLR(optimizer, 1, gamma=0.5) if "schedule" in case else None
    if case == "loop's schedule, saved":
        parts["schedule"] = schedule

    class Training:
        def state_dict(self) -> dict[str, Any]:
            weights, moments = get_state_dict(model, optimizer)
            return {"model": weights, "optimizer": moments, **{n: part.state_dict() for n, part in parts.items()}}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
            for name, part in parts.items():
                part.load_state_dict(state[name])

    def save(path: Path) -> None:
        dcp.save({"training": Training()}, checkpoint_id=path)

    if s.resume is not None:
        dcp.load({"training": Training()}, checkpoint_id=s.resume.path)
    plan = BatchPlan(12, place[0], 4)
    batches = Batches(ROWS, ElasticSampler(len(ROWS), 12), plan, place[1], resume=s.resume)
    accumulate = Accumulation(model, optimizer)
    for batch in s.steps(batches, max_steps=steps, save=save, save_every=3, strategy="dcp", any_world_size=True):
        for micro in accumulate(batch):
            micro.scale(loss_of(model, micro.data)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        print(f"step {batch.step} rate {optimizer.param_groups[0]['lr']:.6g}", flush=True)
    total = sum(float(value.full_tensor().double().sum()) for value in model.state_dict().values())
    print(f"weights {total:.5f}", flush=True)


def main() -> None:
    case, steps, directory = sys.argv[1:]
    by_loop = case.startswith(("tensor", "loop"))
    (with_dcp if by_loop else with_engine)(case, int(steps), directory)


if __name__ == "__main__":
    main()
