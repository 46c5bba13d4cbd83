"""The optimizer and scheduler that a `Trainer`'s script makes: how they step, and what checkpoints note of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..checkpoint import Tracked
from ..saving.schedules import Factors, check_factors, factors, unchanged


class MadeByScript:
    """Makes both when the strategy is ready, and refuses what a `Trainer` could not step.

    Args:
        optimizer, scheduler: The script's functions.
        metric: The metric that names the best checkpoint and steps a scheduler that takes one; None: there is none, or
            no evaluation between the first and the last step.
        steps_itself: The strategy's engine steps the scheduler.

    Attributes:
        kinds: Their classes, because a strategy may load another class's state without complaint.
        by_metric: A scheduler that takes the metric of each evaluation, and steps then; None: there is none, or it
            steps with the optimizer.
    """

    def __init__(
        self,
        optimizer: Callable[[nn.Module], Optimizer],
        scheduler: Callable[[Optimizer], Any] | None,
        metric: Tracked | None,
        *,
        steps_itself: bool,
    ) -> None:
        self._optimizer, self._scheduler, self._metric, self._steps_itself = optimizer, scheduler, metric, steps_itself
        self.kinds: dict[str, str] = {}
        self.by_metric: Any = None
        self._made_scheduler: Any = None
        self._factors: Factors = {}

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Makes the script's optimizer.

        Raises:
            ValueError: It steps only with a closure.
        """
        made = self._optimizer(model)
        self.kinds["optimizer"] = type(made).__name__
        if not _callable_with(made.step):
            raise ValueError(
                f"{type(made).__name__} computes the loss several times in each step (its step() needs a closure), and"
                " the Trainer computes each micro-batch once: choose another optimizer, or write a loop of your own"
            )
        return made

    @property
    def scheduler(self) -> Callable[[Optimizer], Any] | None:
        """A function that makes the script's scheduler; None: it has none.

        Raises, when it is called:
            ValueError: Nothing here can step it.
        """
        return None if self._scheduler is None else self._make_scheduler

    def _make_scheduler(self, optimizer: Optimizer) -> Any:
        assert self._scheduler is not None
        made = self._scheduler(optimizer)
        kind = self.kinds["scheduler"] = type(made).__name__
        self._made_scheduler, self._factors = made, factors(made)
        if not steps_on_metric(made):
            return made
        if self._steps_itself:
            raise ValueError(
                f"{kind} steps on a metric, and DeepSpeed steps schedulers itself, without one: choose another"
                " scheduler, or strategy 'ddp' or 'fsdp'"
            )
        if self._metric is None:
            raise ValueError(
                f"{kind} steps on the metric of an evaluation: give evaluator=, evaluate_every= and track=Tracked(name)"
            )
        mode = getattr(made, "mode", self._metric.mode)
        if mode != self._metric.mode:
            raise ValueError(
                f"{kind} has mode {mode!r} and track {self._metric}: both are of the same metric, give the same mode"
            )
        self.by_metric = made
        return made

    @property
    def factors(self) -> Factors:
        """Values of the scheduler's functions, for checkpoints; see ``schedules.factors``."""
        return unchanged(self._factors, factors(self._made_scheduler))

    def check_factors(self, saved: Factors) -> None:
        """Checks, once the scheduler is loaded, that its functions are those of the checkpoint.

        Raises:
            ValueError: They are not.
        """
        check_factors(saved, factors(self._made_scheduler))

    def __str__(self) -> str:
        return listed(self.kinds)


def listed(kinds: Mapping[str, str]) -> str:
    """The kinds in one line, for people."""
    return " and ".join(f"{name} {kind}" for name, kind in sorted(kinds.items()))


def steps_on_metric(scheduler: Any) -> bool:
    """Whether ``step()`` asks for a metric, as that of ``ReduceLROnPlateau`` does.

    Raises:
        ValueError: It asks for something else.
    """
    if scheduler is None or _callable_with(scheduler.step):
        return False
    if _callable_with(scheduler.step, 0.0):
        return True
    raise ValueError(
        f"{type(scheduler).__name__}.step{inspect.signature(scheduler.step)} takes more than a metric, which nothing"
        " here knows: choose another scheduler"
    )


def _callable_with(function: Callable[..., Any], *arguments: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # it is written in C, and its arguments are not known
        return True
    return True
