"""``dalsegno.elastic.deepspeed.config``: what it sets, what it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from dalsegno.elastic import deepspeed as elastic_ds
from dalsegno.elastic.data.plan import BatchPlan
from dalsegno.elastic.deepspeed.checks import can_reshard, check_optimizer
from dalsegno.elastic.deepspeed.engine import config
from tests.support.workers.engines_worker import Lamb


@dataclass
class Point:
    form: str
    path: Path = Path("a")
    universal: Path | None = None
    reshard: bool = False


PLAN = BatchPlan(16, 3, 4)  # two micro-steps of at most 3


@pytest.mark.parametrize(
    ("resume", "universal"),
    [(None, False), (Point("sharded"), False), (Point("universal"), True), (Point("sharded", reshard=True), True)],
)
def test_loads_by_values_where_the_resume_point_asks_for_it(resume: Point | None, universal: bool) -> None:
    base = {"checkpoint": {"load_universal": not universal, "tag_validation": "Ignore"}}
    assert config(base, PLAN, resume)["checkpoint"] == {"load_universal": universal, "tag_validation": "Ignore"}


def test_batch_sizes_are_the_plans() -> None:
    base: dict[str, Any] = {"train_batch_size": 16, "gradient_clipping": 1.0, "checkpoint": {}}
    made = config(base, PLAN, None)
    assert (made["train_micro_batch_size_per_gpu"], made["gradient_accumulation_steps"]) == (3, 2)
    assert "train_batch_size" not in made
    assert made["gradient_clipping"] == 1.0
    assert base == {"train_batch_size": 16, "gradient_clipping": 1.0, "checkpoint": {}}, "the script's own is changed"


@pytest.mark.parametrize("key", ["round_robin_gradients", "elastic_checkpoint"])
def test_refuses_what_no_change_of_the_world_survives(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        config({"zero_optimization": {"stage": 2, key: True}}, PLAN, None)


@pytest.mark.parametrize("change", ["version", "experts"])
def test_another_deepspeed_than_saved_it_does_not_reshard(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """The manifest speaks of the one that saved; this one may lay values out in another way, unseen."""
    engine = SimpleNamespace(
        load_universal_checkpoint=lambda: True,
        zero_round_robin_gradients=lambda: False,
        zero_optimization_stage=lambda: 2,
        zero_nvme_offload_optimizer=lambda: False,
        has_moe_layers=change == "experts",
        optimizer=SimpleNamespace(
            load_hp_checkpoint_state_from_checkpoint_dir=None,
            optimizer=torch.optim.AdamW([torch.zeros(1, requires_grad=True)]),
        ),
        module=SimpleNamespace(parameters=list),
    )
    if change == "version":
        assert can_reshard(engine)
        monkeypatch.setattr("deepspeed.__version__", "0.20.0")
    with pytest.raises(RuntimeError, match="must be converted"):
        elastic_ds.restore(engine, Point("sharded", reshard=True))


def test_an_optimizer_that_does_not_fit_zero_is_refused() -> None:
    """DeepSpeed's own guard with a longer list; with what DeepSpeed knows besides, and where the user wants it, not."""
    lamb, adafactor = (make([torch.ones(2, 2, requires_grad=True)]) for make in (Lamb, torch.optim.Adafactor))
    for optimizer in (lamb, adafactor):
        with pytest.raises(ValueError, match=f"{type(optimizer).__name__} with ZeRO-3: .* at every world size"):
            check_optimizer(optimizer, 3, allowed=False)
        check_optimizer(optimizer, 3, allowed=True)
        check_optimizer(optimizer, 0, allowed=False)
    check_optimizer(torch.optim.NAdam([torch.ones(2, requires_grad=True)]), 1, allowed=False)


@pytest.mark.parametrize("case", ["groups", "rate", "schedule"])
def test_an_adagrad_that_deepspeed_replaces_is_refused(case: str) -> None:
    """Its own one has the first one's defaults, one group, and no scheduler that knows it."""
    weights = [torch.ones(2, requires_grad=True) for _ in range(2)]
    groups = {"groups": [{"params": [w]} for w in weights], "rate": [{"params": weights, "lr": 0.5}]}
    optimizer = torch.optim.Adagrad(groups.get(case, weights), lr=0.1)
    with pytest.raises(ValueError, match="DeepSpeed makes another Adagrad"):
        check_optimizer(optimizer, 2, allowed=True, scheduled=case == "schedule")
    check_optimizer(torch.optim.Adagrad(weights, lr=0.1), 2, allowed=False)
