"""What a schedule's own state does not say: its functions, and that it is there."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import (
    ConstantLR,
    LambdaLR,
    LinearLR,
    MultiplicativeLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from dalsegno.elastic.saving.schedules import check_factors, factors, has_moved, left_out, place_of, unchanged


def optimizer(groups: int = 1) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(2))]} for _ in range(groups)], lr=1.0)


class Warm:
    """A function that has a state, which torch saves."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


def test_another_function_is_refused() -> None:
    """At whichever step it is another one, in whichever group, and inside of other schedules."""
    half = LambdaLR(optimizer(), lambda step: 0.5**step)
    check_factors(factors(half), factors(LambdaLR(optimizer(), lambda step: 0.5**step)))
    said = r"at its step 1 that gave 0\.5, and this gives 0\.9.*give s\.state, .* other_schedule=True"
    with pytest.raises(ValueError, match=said):
        check_factors(factors(half), factors(LambdaLR(optimizer(), lambda step: 0.9**step)))
    late = LambdaLR(optimizer(), lambda step: 0.5**step if step < 400 else 1.0)
    with pytest.raises(ValueError, match="at its step 500"):
        check_factors(factors(late), factors(half))
    groups = [lambda step: 1.0, lambda step: 1.0 / (step + 1)]
    with pytest.raises(ValueError, match="at its step 1"):
        check_factors(factors(LambdaLR(optimizer(2), groups)), factors(LambdaLR(optimizer(2), groups[::-1])))
    one, other = optimizer(), optimizer()
    nested = SequentialLR(one, [LinearLR(one), LambdaLR(one, lambda step: 0.5)], [2])
    changed = SequentialLR(other, [LinearLR(other), LambdaLR(other, lambda step: 0.6)], [2])
    with pytest.raises(ValueError, match=r"gave 0\.5, and this gives 0\.6"):
        check_factors(factors(nested), factors(changed))
    with pytest.raises(ValueError, match=r"gave 0\.5"):
        check_factors(
            factors(MultiplicativeLR(optimizer(), lambda step: 0.5)),
            factors(MultiplicativeLR(optimizer(), lambda step: 0.4)),
        )


def test_what_is_no_function_of_the_step_is_not_compared() -> None:
    """A table that ends, what fails, what changes while the training goes on; schedules without functions."""
    table = LambdaLR(optimizer(), lambda step: [1.0, 0.5, 0.25][step])
    check_factors(factors(table), factors(LambdaLR(optimizer(), lambda step: [1.0, 0.5, 0.25, 0.1][step])))
    scale = [1.0]
    moody = LambdaLR(optimizer(), lambda step: scale[0])
    before = factors(moody)
    scale[0] = 0.5
    assert unchanged(before, factors(moody)) == {}
    assert factors(StepLR(optimizer(), 3)) == factors(None) == factors(torch.nn.Linear(1, 1)) == {}


def test_a_function_with_a_state_is_compared_as_it_was_loaded() -> None:
    saved = LambdaLR(optimizer(), Warm(10))
    state, values = saved.state_dict(), factors(saved)
    again = LambdaLR(optimizer(), Warm(7))
    again.load_state_dict(state)
    check_factors(values, factors(again))


class Counts:
    """Its values depend on how often it was called."""

    def __init__(self) -> None:
        self.calls, self.top = 0, 0

    def __call__(self, step: int) -> float:
        self.calls, self.top = self.calls + 1, max(self.top, step)
        return 0.99**self.calls


def test_a_function_that_remembers_is_not_asked() -> None:
    """A look at it would change the learning rate. It is not compared, nor are values that it gave before."""
    schedule = LambdaLR(optimizer(), counts := Counts())
    before, calls = factors(schedule), counts.calls
    assert unchanged(before, factors(schedule)) == before
    assert (counts.calls, counts.top) == (calls, 0)
    check_factors(before, factors(LambdaLR(optimizer(), lambda step: 0.5**step)))
    check_factors(factors(LambdaLR(optimizer(), lambda step: 0.5**step)), before)


@pytest.mark.slow
def test_schedules_that_nobody_has_are_found() -> None:
    """Of this optimizer, alive, and not inside of what is known."""
    ours, others = optimizer(), optimizer()
    schedule: Any = StepLR(ours, 3)
    elsewhere = StepLR(others, 3)
    assert left_out(ours, []) == [schedule]
    assert left_out(ours, [elsewhere]) == [schedule]
    assert left_out(ours, [schedule]) == left_out(ours, [{"a": [schedule]}]) == []

    class Holder:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

    assert left_out(ours, [Holder(schedule)]) == []
    schedule = SequentialLR(ours, [LinearLR(ours), ConstantLR(ours)], [2])
    assert left_out(ours, []) == [schedule]
    schedule = ReduceLROnPlateau(ours)
    assert left_out(ours, []) == [schedule]
    del schedule
    assert left_out(ours, []) == []
    assert gc.isenabled()


def test_whether_a_schedule_that_is_not_saved_stands_where_the_run_does() -> None:
    """Made anew, before or after the optimizer was loaded; or moved by the script."""
    trained = optimizer()
    schedule = StepLR(trained, 1, gamma=0.5)
    for _ in range(3):
        trained.step()
        schedule.step()
    state, rates = trained.state_dict(), [0.125]
    ours = optimizer()
    early = StepLR(ours, 1, gamma=0.5)
    ours.load_state_dict(state)
    assert not has_moved(early, rates)
    late = optimizer()
    late.load_state_dict(state)
    assert not has_moved(LambdaLR(late, lambda step: 0.5**step), rates)
    steps = StepLR(late, 5, gamma=0.5)
    assert (place_of(steps), place_of(schedule)) == (["StepLR", 0], ["StepLR", 3])
    moved = optimizer()
    moved.load_state_dict(state)
    assert has_moved(LambdaLR(moved, lambda step: 0.5**step, last_epoch=2), rates)
