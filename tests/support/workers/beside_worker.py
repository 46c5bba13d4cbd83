"""A DeepSpeed loop with a part beside the engine, which may take another optimizer along. Ranks of torchrun's world.

``argv``: the stage, the optimizer, the step to end at, whether only weights count (0 or 1), bf16 (0 or 1), where the
checkpoints are, and where each rank writes ``result-<rank>.json``. ``BESIDE_SEED``: of the script's first weights;
``BESIDE_FIRST``: its first layer is ``frozen``, ``left`` out of the optimizer, ``renamed`` or
``turned``; or a last one is ``grown``, and frozen.
"""

from __future__ import annotations

import json
import os
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn

from dalsegno.elastic import session

OPTIMIZERS = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-2),
    "sgd": lambda weights: torch.optim.SGD(weights, lr=1e-2, momentum=0.9),
}


class Average:
    """Of the losses, slowly."""

    def __init__(self) -> None:
        self.value = torch.zeros(2, dtype=torch.float64)

    def state_dict(self) -> dict[str, Tensor]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.value = state["value"].clone()

    def take(self, loss: float) -> None:
        self.value = 0.9 * self.value + 0.1 * torch.tensor([loss, 1.0], dtype=torch.float64)


def weights(engine: Any) -> dict[str, list[float]]:
    """All weights as the optimizer has them; where it has no copy of its own, as the model has them."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            whole = parameter.detach().clone()
        stage_3 = getattr(parameter, "_z3_optimizer", None)
        unknown = stage_3 is not None and stage_3.get_param_id(parameter) not in stage_3.grad_position
        own = None if unknown else safe_get_full_fp32_param(parameter)
        found[name] = (whole if own is None else own).detach().float().flatten().tolist()
        assert own is None or torch.equal(own.to(whole.dtype), whole), f"{name}: the model's and the optimizer's part"
    return found


def make_model() -> nn.Module:
    first, others = nn.Linear(7, 5), [nn.Tanh(), nn.Linear(5, 7)]
    if os.environ.get("BESIDE_FIRST") == "turned":
        first.weight = nn.Parameter(first.weight.detach().t().contiguous())
    if os.environ.get("BESIDE_FIRST") == "frozen":
        first.requires_grad_(False)
    layers = [first, *others]
    if os.environ.get("BESIDE_FIRST") == "renamed":
        return nn.Sequential(OrderedDict(zip(("one", "two", "three"), layers, strict=True)))
    if os.environ.get("BESIDE_FIRST") == "grown":
        layers.append(nn.Linear(7, 7).requires_grad_(False))
    return nn.Sequential(*layers)


def main() -> None:
    stage, optimizer, steps, alone, half, directory, out = sys.argv[1:]
    s = session(directory)
    # Sizes that no number of ranks divides.
    data = s.data(torch.randn(160, 7, generator=torch.Generator().manual_seed(0)), global_batch=12, micro_batch=4)
    config = {
        "zero_optimization": {"stage": int(stage)},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": half == "1"},
    }
    config = s.deepspeed_config(config, data)
    torch.manual_seed(int(os.environ.get("BESIDE_SEED", "3")))
    model = make_model()
    left = os.environ.get("BESIDE_FIRST") == "left"
    trained = [weight for name, weight in model.named_parameters() if not (left and name.startswith("0."))]
    engine, *_ = deepspeed.initialize(model=model, optimizer=OPTIMIZERS[optimizer](trained), config=config)
    average = Average()
    name = os.environ.get("BESIDE_NAME", "average")
    state = s.engine(engine, weights_only=alone == "1", **{name: average})
    began = {"weights": weights(engine), "average": average.value.tolist(), "step": s.step}
    losses = []
    for batch in s.steps(data, state, max_steps=int(steps), save_every=2):
        total = 0.0
        for micro in batch:
            rows = micro.data.to(next(engine.module.parameters()).dtype)
            loss = (engine(rows) - rows.roll(1, dims=1)).square().mean()
            engine.backward(micro.scale(loss))
            engine.step()
            total += float(loss.detach()) * micro.n
        losses.append(s.sum(total) / batch.n)
        average.take(losses[-1])
    ended = {"weights": weights(engine), "average": average.value.tolist()}
    states = sorted({key for one in engine.optimizer.optimizer.state.values() for key in one}) if int(stage) else []
    result = {"began": began, "losses": losses, "ended": ended, "states": states}
    Path(out, f"result-{s.rank}.json").write_text(json.dumps(result))
    deepspeed.comm.barrier()
    os._exit(0)  # DeepSpeed's threads sometimes abort in the interpreter's own end


if __name__ == "__main__":
    main()
