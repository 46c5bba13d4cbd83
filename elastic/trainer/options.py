"""What a `Trainer`'s options make of the data, and which options go together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..data.batches import Batches
from ..data.evaluated_alike import known_length
from ..data.plan import BatchPlan
from ..data.sampler import ElasticSampler
from ..saving.cadence import checked
from ..training.session import BareSession
from .strategies import DDP, Strategy

if TYPE_CHECKING:
    from .trainer import Trainer


def check(trainer: Trainer, strategy: Strategy) -> None:
    """Checks the options of a Trainer that is being made.

    Raises:
        ValueError: Some of them do not go together.
    """
    if trainer.max_steps is None and trainer.data_epochs is None:
        raise ValueError("when does the training end? Give max_steps or data_epochs")
    if trainer.evaluator is None and (trainer.evaluate_every or trainer.track):
        raise ValueError("evaluate_every and track need an evaluator")
    if min(trainer.log_every - 1, trainer.evaluate_every, trainer.save_every) < 0:
        raise ValueError("log_every must be at least 1; save_every and evaluate_every cannot be negative")
    checked(trainer.memory_every)
    if trainer.grad_scaler is not None and strategy.loss_scale is None:
        raise ValueError(
            f"grad_scaler: strategy {strategy.name} takes none (DeepSpeed scales by itself, with fp16 in its config)"
        )
    if trainer.stay and not strategy.stays:
        raise ValueError(
            f"stay=True: what strategy {strategy.name} builds fits one number of ranks, so nothing of it can stay: "
            "leave it out, or take strategy 'ddp'"
        )


def strategy_of(given: Strategy | str) -> Strategy:
    """The strategy of a Trainer, which may be given by its name.

    Raises:
        ValueError: It is none.
    """
    if isinstance(given, Strategy):
        return given
    if given == "ddp":
        return DDP()
    if given == "fsdp":
        from .fsdp import FSDP

        return FSDP()
    if given == "deepspeed":
        from .deepspeed_strategy import DeepSpeed

        return DeepSpeed()
    raise ValueError(f"strategy is 'ddp', 'fsdp', 'deepspeed' or a Strategy, not {given!r}")


def plan_of(trainer: Trainer, world_size: int) -> BatchPlan:
    """How batches are dealt in a world of so many ranks."""
    return BatchPlan(
        trainer.global_batch_size, world_size, trainer.max_micro_batch_size, trainer.fixed_micro_batch, trainer.pad
    )


def batches_of(trainer: Trainer, session: BareSession, plan: BatchPlan, scale: str) -> Batches[Any]:
    """The Trainer's data, from where the session resumes.

    Args:
        scale: The strategy's.

    Raises:
        ValueError: See `Batches`.
    """
    sampler = ElasticSampler(
        known_length(trainer.dataset),
        trainer.global_batch_size,
        seed=trainer.seed,
        shuffle=trainer.shuffle,
        drop_last=trainer.drop_last,
    )
    return Batches(
        trainer.dataset,
        sampler,
        plan,
        session.rank,
        collate=trainer.collate,
        scale=scale,
        resume=session.resume,
        data_epochs=trainer.data_epochs,
        seed=trainer.seed,
        count_tokens=trainer.count_tokens,
        reduce=None if trainer.count_tokens is None else session.sum,
        loader_options=trainer.loader_options,
        check_data=trainer.check_data,
    )
