"""Trains a mixture of experts with DeepSpeed by a session: STAGE STEPS CHECKPOINTS OUT."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import Tensor, nn

from dalsegno.elastic import session


class Model(nn.Module):
    """Four experts, each sample's one without a limit, so that samples do not depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        expert = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
        self.experts = MoE(16, expert, num_experts=4, k=1, min_capacity=0, use_rts=False, drop_tokens=False)

    def forward(self, rows: Tensor) -> Any:
        """The loss of rows (batch, 8)."""
        hidden = torch.tanh(self.first(rows))
        chosen, _, _ = self.experts(hidden)
        return (self.last(hidden + chosen) - rows.sum(1, keepdim=True)).square().mean()


def main() -> None:
    stage, steps, checkpoints, out = sys.argv[1:]
    s = session(checkpoints)
    torch.manual_seed(1)
    model = Model()
    data = s.data(torch.randn(64, 8, generator=torch.Generator().manual_seed(2)), global_batch=8, micro_batch=4, seed=0)
    config = s.deepspeed_config({"zero_optimization": {"stage": int(stage)}}, data)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=torch.optim.AdamW(groups, lr=1e-2))
    state = s.engine(engine)
    for batch in s.steps(data, state, max_steps=int(steps), save_every=2):
        for micro in batch:
            engine.backward(micro.scale(engine(micro.data)))
            engine.step()
    weights = {name: value.detach().double().sum().item() for name, value in engine.module.named_parameters()}
    Path(out).write_text(json.dumps({"step": s.step, "weights": weights}), encoding="utf-8")


if __name__ == "__main__":
    main()
