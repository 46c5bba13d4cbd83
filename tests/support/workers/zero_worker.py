"""A worker for the ZeRO tests: trains a small awkward model, saves, loads, and writes down what it holds.

Awkward on purpose: three parameter groups with hyperparameters of their own, one of them smaller than a world, tied
weights, a frozen parameter, buffers that training changes, and a parameter that never gets a gradient.

Run by torchrun-like environment variables; one JSON object in ``argv[1]`` says what to do:

- ``stage``, ``steps`` and ``out``, where results go; ``save``: the checkpoint to write at the end;
  ``beside``: where to write the same from a copy, behind one more step;
- ``load``, ``form``, ``universal``, ``reshard``, ``step``: the resume point; ``stock``: DeepSpeed loads it alone,
  unrepaired;
- ``config``: more of DeepSpeed's configuration; ``afterwards``: of ``zero_optimization``, unseen by `config` of ours;
- ``model``: ``"names"`` adds parameters whose names are traps for paths and patterns, and some of one or no element;
  ``"sizes"`` only those of them that DeepSpeed's converter survives;
  ``"outside"`` one that the optimizer does not know; ``"even"`` has groups of which every rank owns something, which
  stock DeepSpeed needs;
- ``copies``: DeepSpeed makes all that is flat by copies, and in memory of its own, as it does by itself;
- ``optimizer``: ``"adamw"``, ``"amsgrad"``, ``"nadam"`` or ``"sgd"`` with momentum.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.workers import cases

SAMPLES = 12  # divisible by 1, 2, 3 and 4: every world sees the same global batch
FEATURES = 7


@dataclass
class Resume:
    """The part of a session's resume point that `restore` reads."""

    path: Path
    form: str
    universal: Path | None
    step: int
    reshard: bool = False


@dataclass
class Plan:
    micro_batch_size: int
    accumulation: int = 1


NAMES = {"a/b.c": (3, 5), "d[0]": (4, 2), "e+f": (9,), "one": (1,), "*g?": (2, 2)}
"""Of the additional parameters in the model ``"names"``, with their shapes; what comes before a dot is a module."""
EXTRA: dict[str, dict[str, tuple[int, ...]]] = {
    "names": NAMES,
    "sizes": {name: NAMES[name] for name in ("a/b.c", "one")},
}


class Factor(nn.Module):
    """The parameters with odd names. Each module uses its own: ZeRO-3 gathers them as it is called."""

    def forward(self) -> Tensor:
        result = torch.ones(())
        for parameter in self.parameters(recurse=False):
            result = result * (0.5 + parameter.mean())
        for child in self.children():
            result = result * child()
        return result


class Model(nn.Module):
    seen: Tensor
    average: Tensor

    def __init__(self, frozen_value: float, kind: str, stage: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, FEATURES)
        self.body = nn.Linear(FEATURES, FEATURES)
        self.scale = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(FEATURES, 13, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.full((5,), frozen_value), requires_grad=kind == "trained")
        self.idle = nn.Parameter(torch.full((2, 3), 0.5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(4))
        self.more = Factor()
        for name, shape in EXTRA.get(kind, {}).items():
            *modules, last = name.split(".")
            owner = self.more
            for module in modules:
                owner.add_module(module, Factor())
                owner = owner.get_submodule(module)
            owner.register_parameter(last, nn.Parameter(torch.full(shape, 0.5)))
        # DeepSpeed's ZeRO-3 cannot gather a parameter without elements.
        self.empty = nn.Parameter(torch.zeros(0, 3)) if kind in EXTRA and stage < 3 else None
        self.outside = nn.Parameter(torch.full((3,), frozen_value)) if kind == "outside" else None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
            self.average.mul_(0.9).add_(0.1 * float(self.seen))
        hidden = self.embedding(tokens)
        hidden = torch.tanh(self.body(hidden)) * self.scale.mean() + 0.1 * self.frozen.sum() + self.average.mean()
        hidden = hidden * self.more().to(hidden.dtype)
        if self.outside is not None:
            hidden = hidden + self.outside.sum()
        return nn.functional.cross_entropy(self.head(hidden), (tokens * 5 + 1) % 13)


def groups(model: Model, kind: str) -> list[dict[str, Any]]:
    large = [model.embedding.weight, model.body.weight, model.idle, *model.more.parameters()]
    if model.empty is not None:
        large.append(model.empty)
    if kind == "trained":
        large.append(model.frozen)
    if kind == "even":
        large = [parameter for parameter in large if parameter is not model.idle]
        small = [model.body.bias, model.scale, model.idle]  # 16 values: something for each of four ranks
        return [
            {"params": large, "weight_decay": 0.1, "lr": 0.01},
            {"params": small, "weight_decay": 0.0, "lr": 0.02},
        ]
    return [
        {"params": large, "weight_decay": 0.1, "lr": 0.01},
        {"params": [model.body.bias], "weight_decay": 0.0, "lr": 0.02},
        {"params": [model.scale], "weight_decay": 0.0, "lr": 0.03},
    ]


OPTIMIZERS: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "amsgrad": lambda groups: torch.optim.AdamW(groups, amsgrad=True),
    "nadam": torch.optim.NAdam,
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
}


def main() -> None:
    task = json.loads(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    import deepspeed

    from dalsegno.elastic import deepspeed as ours
    from dalsegno.elastic.saving.staging import HostBuffers
    from dalsegno.elastic.saving.writing import write_files

    if task.get("copies"):
        in_copies()
    ours.prepare()
    fresh = "load" not in task
    torch.manual_seed(1 if fresh else 99)  # whatever a load forgets keeps values that cannot be right
    kind = task.get("model", "")
    model = Model(frozen_value=0.25 if fresh else -3.0, kind=kind, stage=task["stage"])
    if not fresh:
        model.average.fill_(77.0)
        for group_parameter in model.parameters():
            group_parameter.data.normal_()
    parameter_groups = groups(model, kind)
    if not fresh:
        for group in parameter_groups:
            group.update(lr=5.0, weight_decay=0.7)
    optimizer = OPTIMIZERS[task.get("optimizer", "adamw")](parameter_groups)
    resume = None
    if not fresh:
        resume = Resume(
            path=Path(task["load"].replace("{rank}", str(rank))),
            form=task["form"],
            universal=Path(task["universal"]) if task.get("universal") else None,
            step=task["step"],
            reshard=task.get("reshard", False),
        )
    base: dict[str, Any] = {
        "zero_optimization": {"stage": task["stage"]},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        **task.get("config", {}),
    }
    if "fp16" in base:
        # Few CPUs are fast at it, so DeepSpeed refuses; torch computes it on all.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    config = ours.config(base, Plan(micro_batch_size=SAMPLES // world), resume)
    config["zero_optimization"].update(task.get("afterwards", {}))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if resume is not None and task.get("stock"):
        assert resume.universal is not None
        loaded, _ = engine.load_checkpoint(str(resume.universal.parent), tag=resume.universal.name)
        assert loaded is not None
    elif resume is not None:
        ours.restore(engine, resume)
    out = Path(task["out"])
    # Before its first step an optimizer holds nothing to look at, and stage 0 partitions nothing.
    partitioned = task["stage"] > 0
    if partitioned and resume is not None and resume.step > 0:
        torch.save(held(engine), out / f"loaded-{rank}.pt")
    losses, first = [], resume.step if resume else 0
    for step in range(first, first + task["steps"]):
        losses.append(train(engine, step, rank, world))
    result: dict[str, Any] = {"losses": losses}
    if task.get("save"):
        if partitioned and engine.global_steps > 0:
            torch.save(held(engine), out / f"saved-{rank}.pt")
        save_error = None
        if task.get("fail_rank") == rank:
            engine.checkpoint_engine.save = no_space
        write = ours.save(engine)
        result["reads"] = None if write.reads is None else asdict(write.reads)
        result["by_place"] = write.by_place
        try:
            write(Path(task["save"]))
        except OSError as error:
            if "fail_rank" not in task:
                raise
            save_error = str(error)
        result["save_error"] = save_error
    if task.get("beside"):
        buffers = HostBuffers()
        with counted("barrier", "all_reduce") as calls:
            files = buffers.copy(ours.save(engine).files())
        result["waits"] = calls
        train(engine, first + task["steps"], rank, world)  # which changes what was copied
        write_files(Path(task["beside"]), files)
    cases.end(result, out)


def in_copies() -> None:
    """What is spared here of DeepSpeed's copies it makes again."""
    from dalsegno.elastic.deepspeed import engine

    engine.flatten_in_place = lambda made: None


@contextlib.contextmanager
def counted(*names: str) -> Iterator[list[str]]:
    """Collectives of these names that are called through `deepspeed.comm` inside, as a list that fills."""
    import deepspeed

    calls: list[str] = []

    def noted(name: str, call: Any) -> Any:
        return lambda *arguments, **options: (calls.append(name), call(*arguments, **options))[1]

    with contextlib.ExitStack() as patches:
        for name in names:
            patches.enter_context(mock.patch.object(deepspeed.comm, name, noted(name, getattr(deepspeed.comm, name))))
        yield calls


def train(engine: Any, step: int, rank: int, world: int) -> float:
    """One step; the mean loss of all ranks."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, 13, (SAMPLES,), generator=generator)
    share = SAMPLES // world
    loss = engine(tokens[rank * share : (rank + 1) * share])
    engine.backward(loss)
    engine.step()
    mean = loss.detach().double().reshape(1)
    dist.all_reduce(mean)
    return float(mean.item()) / world


def no_space(state_dict: Any, path: str) -> None:
    """Stands in for a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def held(engine: Any) -> dict[str, Any]:
    """What this rank holds, read from the live engine: not through any file format.

    ``parameters[name][state]`` is ``(start, values)``: the flat range of the parameter that this rank owns.
    """
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

    optimizer, inner = engine.optimizer, engine.optimizer.optimizer
    bf16 = hasattr(optimizer, "bf16_groups")  # another class of DeepSpeed's, with other names for the same
    groups = optimizer.bf16_groups if bf16 else getattr(optimizer, "bit16_groups", ())
    flats = optimizer.fp32_groups_flat_partition if bf16 else getattr(optimizer, "single_partition_of_fp32_groups", ())
    parameters: dict[str, dict[str, tuple[int, Tensor]]] = {}
    for name, parameter in engine.module.named_parameters():
        numel = getattr(parameter, "ds_numel", parameter.numel())
        if not parameter.requires_grad or numel == 0 or name == "outside":
            continue
        if hasattr(parameter, "ds_id"):
            part = safe_get_local_fp32_param(parameter)
            start = part.numel() * dist.get_rank()
            gathered = next(iter(inner.state.values()))
            keys = [key for key, value in gathered.items() if getattr(value, "ndim", 0) > 0]
            states = {key: safe_get_local_optimizer_state(parameter, key) for key in keys}
            entry = {"fp32": part, **states}
        elif getattr(parameter, "_hp_mapping", None) is not None:
            mapping, start = parameter._hp_mapping, parameter._hp_mapping.lp_fragment_address.start
            where = mapping.hp_fragment_address
            owner = next(i for i, group in enumerate(groups) if any(p is parameter for p in group))
            flat = {key: value for key, value in inner.state[flats[owner]].items() if getattr(value, "ndim", 0) > 0}
            entry = {key: value.narrow(0, where.start, where.numel) for key, value in flat.items()}
            entry["fp32"] = mapping.hp_fragment
        else:
            continue
        parameters[name] = {key: (start, value.detach().clone()) for key, value in entry.items()}
    steps = [state["step"] for state in inner.state.values() if "step" in state]
    hyper = [{k: v for k, v in g.items() if k in ("lr", "weight_decay", "betas")} for g in inner.param_groups]
    with_gather = {}
    for name, parameter in engine.module.named_parameters():
        if hasattr(parameter, "ds_id"):
            import deepspeed

            with deepspeed.zero.GatheredParameters([parameter]):
                with_gather[name] = parameter.detach().clone()
        else:
            with_gather[name] = parameter.detach().clone()
    return {
        "parameters": parameters,
        "steps": [float(step) for step in steps],
        "distinct_steps": len({id(step) for step in steps}) == len(steps),
        "hyper": hyper,
        "module": with_gather,
        "buffers": {name: value.clone() for name, value in engine.module.named_buffers()},
        "global_steps": engine.global_steps,
        "loss_scale": {} if bf16 else dict(vars(optimizer.loss_scaler)),
    }


if __name__ == "__main__":
    main()
