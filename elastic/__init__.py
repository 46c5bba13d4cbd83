"""What a worker imports: the session, the order of samples, the batch plan, and how they meet the data.

Importing this costs nothing; each name loads its module, and torch, when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accumulation import Accumulation
    from .background_save import background
    from .batches import Batch, Batches
    from .callbacks import Callback, EarlyStopping
    from .checkpoint import CheckpointStore, Order, Position, Tracked
    from .counts import Counts
    from .deepspeed_strategy import DeepSpeed
    from .evaluator import Evaluator
    from .exchange import Boundary
    from .exits import EXIT_BAD_CHECKPOINT, EXIT_DRAINED, BadResumePoint, Drained
    from .fsdp import FSDP
    from .micro_batch import MicroBatch
    from .plan import BatchPlan
    from .resuming import ResumePoint
    from .rng import sample_generator
    from .sampler import ElasticSampler
    from .saving import SaveError
    from .sessions import session
    from .strategies import DDP, Strategy
    from .trainer import Trainer
    from .training_state import TrainingState
    from .worker_session import Session

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
    "DDP": "strategies",
    "EXIT_BAD_CHECKPOINT": "exits",
    "EXIT_DRAINED": "exits",
    "FSDP": "fsdp",
    "Accumulation": "accumulation",
    "BadResumePoint": "exits",
    "Batch": "batches",
    "BatchPlan": "plan",
    "Batches": "batches",
    "Boundary": "exchange",
    "Callback": "callbacks",
    "CheckpointStore": "checkpoint",
    "Counts": "counts",
    "DeepSpeed": "deepspeed_strategy",
    "Drained": "exits",
    "EarlyStopping": "callbacks",
    "ElasticSampler": "sampler",
    "Evaluator": "evaluator",
    "MicroBatch": "micro_batch",
    "Order": "checkpoint",
    "Position": "checkpoint",
    "ResumePoint": "resuming",
    "SaveError": "saving",
    "Session": "worker_session",
    "Strategy": "strategies",
    "Tracked": "checkpoint",
    "Trainer": "trainer",
    "TrainingState": "training_state",
    "background": "background_save",
    "sample_generator": "rng",
    "session": "sessions",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
