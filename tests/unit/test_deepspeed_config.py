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
from dalsegno.elastic.deepspeed import config
from dalsegno.elastic.plan import BatchPlan


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
        assert elastic_ds.can_reshard(engine)
        monkeypatch.setattr("deepspeed.__version__", "0.20.0")
    with pytest.raises(RuntimeError, match="must be converted"):
        elastic_ds.restore(engine, Point("sharded", reshard=True))
