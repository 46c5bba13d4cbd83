"""What a `Trainer` was told that all ranks must have been told alike."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .plan import BatchPlan

if TYPE_CHECKING:
    from .trainer import Trainer

_PLAIN = (
    *("seed", "shuffle", "drop_last", "max_steps", "data_epochs", "max_grad_norm", "check_data"),
    *("save_every", "save_in_background", "evaluate_every", "log_every"),
)
_OPTIONAL = ("count_tokens", "scheduler", "grad_scaler", "evaluator")


def alike_of(trainer: Trainer, plan: BatchPlan, strategy: str) -> dict[str, Any]:
    """By name, for ``Session.compare``. To be compared first: what follows it meets in collectives.

    Args:
        trainer: Not opened yet.
        plan: Of this world.
        strategy: Its name.
    """
    return {
        **plan.alike,
        **{name: getattr(trainer, name) for name in _PLAIN},
        **{f"{name} is given": getattr(trainer, name) is not None for name in _OPTIONAL},
        "length of the data set": len(trainer.dataset) if hasattr(trainer.dataset, "__len__") else None,
        "strategy": strategy,
        "track": None if trainer.track is None else asdict(trainer.track),
    }
