"""How a Trainer's optimizer and scheduler are stepped, and which it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from dalsegno.elastic.checkpoint import Tracked
from dalsegno.elastic.trainer.made import MadeByScript, steps_on_metric


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


class Closed(torch.optim.SGD):
    """Asks for a closure without being LBFGS."""

    def step(self, closure: Any) -> Any:
        return super().step(closure)


def test_optimizers_that_need_a_closure_are_refused() -> None:
    """By what their `step` takes; those that may have one are not."""
    for make in (lambda m: torch.optim.LBFGS(m.parameters()), lambda m: Closed(m.parameters(), lr=0.1)):
        with pytest.raises(ValueError, match=r"(LBFGS|Closed) computes the loss several times"):
            MadeByScript(make, None, None, steps_itself=False).optimizer(nn.Linear(2, 2))
    made = MadeByScript(adam, None, None, steps_itself=False)
    assert isinstance(made.optimizer(nn.Linear(2, 2)), torch.optim.Adam)
    assert (str(made), made.by_metric) == ("optimizer Adam", None)


def test_a_schedule_is_stepped_by_what_it_takes() -> None:
    """Nothing, a metric, or more than anybody knows."""
    optimizer = adam(nn.Linear(2, 2))
    assert not steps_on_metric(None)
    assert not steps_on_metric(LambdaLR(optimizer, lambda step: 1.0))
    assert steps_on_metric(ReduceLROnPlateau(optimizer))

    class Odd:
        def step(self, loss: float, accuracy: float) -> None: ...

    with pytest.raises(ValueError, match=r"Odd\.step\(loss: .*, accuracy: .*takes more than a metric"):
        steps_on_metric(Odd())


@pytest.mark.parametrize(
    ("metric", "engine", "line"),
    [
        (None, False, "give evaluator=, evaluate_every= and track="),
        (Tracked("accuracy", "max"), False, "ReduceLROnPlateau has mode 'min' and track .*'max'"),
        (Tracked("loss"), True, "DeepSpeed steps schedulers itself"),
        (Tracked("loss"), False, ""),
    ],
)
def test_a_plateau_needs_a_metric_that_means_the_same(metric: Tracked | None, engine: bool, line: str) -> None:
    """And somebody who steps it."""
    made = MadeByScript(adam, ReduceLROnPlateau, metric, steps_itself=engine)
    optimizer = made.optimizer(nn.Linear(2, 2))
    assert made.scheduler is not None
    if not line:
        assert made.scheduler(optimizer) is made.by_metric
        return
    with pytest.raises(ValueError, match=line):
        made.scheduler(optimizer)
