"""What a worker imports: the session, the order of samples, the batch plan, and how they meet the data.

Importing this costs nothing; each name loads its module, and torch, when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .checkpoint import CheckpointStore, Order, Position, Tracked
    from .data.batch import Batch
    from .data.batches import Batches
    from .data.counts import Counts
    from .data.evaluator import Evaluator
    from .data.micro_batch import MicroBatch
    from .data.plan import BatchPlan
    from .data.sampler import ElasticSampler
    from .rank.exchange import Boundary
    from .rank.exits import EXIT_BAD_CHECKPOINT, EXIT_DRAINED, BadResumePoint, Drained
    from .rank.rng import sample_generator
    from .saving.background_save import background
    from .saving.outcomes import SaveError
    from .saving.resuming import ResumePoint
    from .script.session import Session, session
    from .trainer.callbacks import Callback, EarlyStopping
    from .trainer.deepspeed_strategy import DeepSpeed
    from .trainer.fsdp import FSDP
    from .trainer.strategies import DDP, Strategy
    from .trainer.trainer import Trainer
    from .training.accumulation import Accumulation
    from .training.training_state import TrainingState

__all__ = (
    "DDP",
    "EXIT_BAD_CHECKPOINT",
    "EXIT_DRAINED",
    "FSDP",
    "Accumulation",
    "BadResumePoint",
    "Batch",
    "BatchPlan",
    "Batches",
    "Boundary",
    "Callback",
    "CheckpointStore",
    "Counts",
    "DeepSpeed",
    "Drained",
    "EarlyStopping",
    "ElasticSampler",
    "Evaluator",
    "MicroBatch",
    "Order",
    "Position",
    "ResumePoint",
    "SaveError",
    "Session",
    "Strategy",
    "Tracked",
    "Trainer",
    "TrainingState",
    "background",
    "sample_generator",
    "session",
)

_MODULES = {
    "DDP": "trainer.strategies",
    "EXIT_BAD_CHECKPOINT": "rank.exits",
    "EXIT_DRAINED": "rank.exits",
    "FSDP": "trainer.fsdp",
    "Accumulation": "training.accumulation",
    "BadResumePoint": "rank.exits",
    "Batch": "data.batch",
    "BatchPlan": "data.plan",
    "Batches": "data.batches",
    "Boundary": "rank.exchange",
    "Callback": "trainer.callbacks",
    "CheckpointStore": "checkpoint",
    "Counts": "data.counts",
    "DeepSpeed": "trainer.deepspeed_strategy",
    "Drained": "rank.exits",
    "EarlyStopping": "trainer.callbacks",
    "ElasticSampler": "data.sampler",
    "Evaluator": "data.evaluator",
    "MicroBatch": "data.micro_batch",
    "Order": "checkpoint",
    "Position": "checkpoint",
    "ResumePoint": "saving.resuming",
    "SaveError": "saving.outcomes",
    "Session": "script.session",
    "Strategy": "trainer.strategies",
    "Tracked": "checkpoint",
    "Trainer": "trainer.trainer",
    "TrainingState": "training.training_state",
    "background": "saving.background_save",
    "sample_generator": "rank.rng",
    "session": "script.session",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
