"""Accumulation: who is told what before each backward pass, how often, and what happens to half steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dalsegno.elastic import Accumulation, Batches, BatchPlan, ElasticSampler
from dalsegno.elastic.rank.clearing import Unstepped
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.rank.meetings import Meetings
from dalsegno.elastic.rank.reports import Reports
from dalsegno.elastic.training.copies import Copies
from dalsegno.elastic.training.examination import Examination
from dalsegno.elastic.training.loop import steps
from tests.unit.elastic.data.test_batches import Numbers
from tests.unit.elastic.script.test_mistakes import Lookahead


def make(micro: int, size: int = 12, world: int = 1, rank: int = 0, **options: Any) -> Batches[Tensor]:
    sampler = ElasticSampler(36, size, seed=1)
    return Batches(Numbers(36), sampler, BatchPlan(size, world, micro), rank, data_epochs=2, **options)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, -0.25], dtype=torch.float64))

    def forward(self, data: Tensor) -> Tensor:
        return (data * self.weight).sum(1).tanh().mean()


class Wrapped(Plain):
    """As DistributedDataParallel: synchronises in each backward pass but those whose forward began in `no_sync`."""

    def __init__(self) -> None:
        super().__init__()
        self.synchronising = True
        self.static_graph = False
        self.entered = 0
        self.seen: list[bool] = []

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        assert self.synchronising, "entered twice"
        self.synchronising = False
        self.entered += 1
        try:
            yield
        finally:
            self.synchronising = True

    def forward(self, data: Tensor) -> Tensor:
        self.seen.append(self.synchronising)
        return super().forward(data)


class Engine(Plain):
    """As DeepSpeed's engine: counts micro-steps by itself."""

    def __init__(self, accumulation: int) -> None:
        super().__init__()
        self.accumulation, self.micro_steps, self.stepped = accumulation, 0, 0

    def gradient_accumulation_steps(self) -> int:
        return self.accumulation

    def zero_optimization_stage(self) -> int:
        return 2

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.accumulation == 0

    def no_sync(self) -> None:
        raise AssertionError("ZeRO 2 and 3 refuse it")

    def step(self) -> None:
        self.stepped += self.is_gradient_accumulation_boundary()
        self.micro_steps += 1


@pytest.mark.parametrize("micro", [12, 6, 4, 5, 1])
def test_all_but_the_last_micro_step_are_deferred(micro: int) -> None:
    """Exactly a - 1 deferrals in each optimizer step, settled before the forward pass; none at a = 1."""
    model, batches = Wrapped(), make(micro)
    accumulate = Accumulation(model)
    a = BatchPlan(12, 1, micro).accumulation
    for number, batch in enumerate(batches, 1):
        for part in accumulate(batch):
            assert model.synchronising == part.is_last
            part.scale(model(part.data)).backward()
        assert accumulate.deferrals == model.entered == number * (a - 1)
        assert model.synchronising
    assert model.seen == ([False] * (a - 1) + [True]) * 6


@pytest.mark.parametrize("micro", [12, 6, 4, 1])
def test_a_static_graph_is_never_put_off_at_first(micro: int) -> None:
    """In no step, so that one that a resumed process begins with is added up as it was before."""
    model, batches = Wrapped(), make(micro)
    model.static_graph = True
    accumulate = Accumulation(model)
    for batch in batches:
        for part in accumulate(batch):
            part.scale(model(part.data)).backward()
    a = BatchPlan(12, 1, micro).accumulation
    assert model.seen == (([True] + [False] * (a - 2) + [True]) if a > 1 else [True]) * 6
    assert accumulate.deferrals == 6 * max(0, a - 2)


def test_a_module_that_nothing_wraps_stays_as_it_is() -> None:
    """No deferrals, no attribute more, and gradients bit by bit those of a loop without it."""
    gradients = []
    for with_it in (True, False):
        model = Plain()
        before = {key: dict(vars(model))[key] for key in vars(model)}
        accumulate = Accumulation(model)
        for batch in islice(make(5), 2):
            for part in accumulate(batch) if with_it else batch.micro_batches:
                part.scale(model(part.data)).backward()
        assert accumulate.deferrals == 0
        assert vars(model) == before
        gradients.append(model.weight.grad)
    assert torch.equal(*gradients)


def test_an_engine_keeps_its_own_count_and_both_are_compared() -> None:
    """DeepSpeed defers by itself: `no_sync` is left alone, deferrals are counted, and a different count is an error."""
    engine = Engine(3)
    accumulate = Accumulation(engine)
    for batch in islice(make(4, scale="deepspeed"), 2):
        for part in accumulate(batch):
            assert engine.is_gradient_accumulation_boundary() == part.is_last
            engine.step()
    assert (accumulate.deferrals, engine.stepped) == (4, 2)
    for wrong in (2, 4):
        engine = Engine(wrong)
        parts = Accumulation(engine)(next(iter(make(4, scale="deepspeed"))))
        with pytest.raises(RuntimeError, match=f"accumulates over {wrong}, does not take it so"):
            assert not [engine.step() for _ in parts]
    forgetful = Accumulation(Engine(3))
    with pytest.raises(RuntimeError, match=r"Call engine\.step\(\) after each"):
        list(forgetful(next(iter(make(4, scale="deepspeed")))))


def test_factors_for_another_kind_of_model_are_refused() -> None:
    """DeepSpeed divides by a, DDP does not: mixed up, every gradient would be wrong by that."""
    with pytest.raises(ValueError, match=r"give scale='ddp'"):
        Accumulation(Wrapped())(next(iter(make(4, scale="deepspeed"))))
    with pytest.raises(ValueError, match=r"give scale='deepspeed'"):
        Accumulation(Engine(3))(next(iter(make(4))))


def test_an_optimizer_refuses_half_a_step() -> None:
    """It does not step with some of the micro-batches; with all of them it does, inside the loop or after it."""
    model = Plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate = Accumulation(model, optimizer)
    optimizer.step()  # nothing has begun
    each = iter(make(4))
    for part in accumulate(next(each)):
        part.scale(model(part.data)).backward()
        if part.is_last:
            optimizer.step()
    moved = model.weight.detach().clone()
    for part in accumulate(next(each)):
        part.scale(model(part.data)).backward()
        with pytest.raises(RuntimeError, match="step 2 ended after 1 of its 3 micro-batches"):
            optimizer.step()
        break
    assert torch.equal(model.weight, moved)
    with pytest.raises(RuntimeError, match="step 2 ended after 1 of its 3 micro-batches"):
        next(each)


def test_a_batch_that_was_left_is_an_error_before_the_next_one() -> None:
    """Also where no optimizer was given; and what it had switched off is on again."""
    model = Wrapped()
    accumulate = Accumulation(model)
    first, second = islice(make(4), 2)
    loop = accumulate(first)
    next(loop)
    assert not model.synchronising
    with pytest.raises(RuntimeError, match="step 1 ended after 1 of its 3"):
        accumulate(second)
    assert model.synchronising
    assert len(list(accumulate(second))) == 3


class Alone:
    """As much of a session as the training loop asks for, in a world of one."""

    rank, world_size, resume, can_save = 0, 1, None, True
    left_in_a_step, loop = False, None

    def __init__(self) -> None:
        self.examination = Examination(0, False, 1, 1, False)
        self.copies, self.meetings, self.reports = Copies(Solo()), Meetings(Solo(), None), Reports(None)
        self.step, self.saved, self.unstepped = 0, 0, Unstepped()

    def meet(self, ahead: int) -> int:
        return ahead

    def compare(self, alike: Any, *, problem: str = "", final: bool = True) -> None: ...

    def gather(self, message: Any) -> list[Any]:
        return [message]

    def restore_rng(self, seed: int | None) -> None: ...
    def begin_step(self, ahead: int) -> None: ...
    def abandon_step(self, *, trained: bool) -> None: ...

    def end_step(self) -> Any:
        raise AssertionError("the step is not to be counted")

    def save(self, *_: Any, **__: Any) -> None:
        raise AssertionError("half a step is not to be saved")


@pytest.mark.parametrize("take", [0, 1, 2])
def test_the_training_loop_counts_and_saves_no_half_step(take: int) -> None:
    """The last step too: no next batch has to be asked for."""
    session: Any = Alone()
    loop = steps(session, make(4), max_steps=1, save=lambda path: None)
    list(islice(next(loop).micro_batches, take))
    with pytest.raises(RuntimeError, match=f"step 1 ended after {take} of its 3 micro-batches"):
        next(loop)


def test_micro_batches_with_factor_0_leave_zero_gradients_by_themselves() -> None:
    """A filler whose derivative is infinite, without parameters given to `scale`; the next real one counts again."""

    class Steep(Plain):
        def forward(self, data: Tensor) -> Tensor:
            return ((data - data.detach()) * self.weight).abs().sqrt().sum() * data.mean()

    model = Steep()
    accumulate = Accumulation(model)
    for part in accumulate(next(iter(make(1, size=1, world=2, rank=1)))):
        assert part.filler
        part.scale(model(part.data)).backward()
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [0.0, 0.0]
    for part in accumulate(next(iter(make(1, size=1, world=2, rank=0)))):
        part.scale(Plain.forward(model, part.data)).backward()
    assert model.weight.grad.abs().sum() > 0


def test_an_optimizer_whose_steps_cannot_be_seen_is_refused() -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match=r"^Lookahead does not call super\(\)\.__init__\(\)"):
        Accumulation(model, Lookahead(torch.optim.SGD(model.parameters())))
