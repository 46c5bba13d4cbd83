"""A loop of one's own through `s.data`, `s.state` and `s.steps`: what is refused in it, and what one line says."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from dalsegno.elastic import Batches, BatchPlan, ElasticSampler, session
from tests.support.pages.mistakes import Comes, brings


class Script:
    """A script up to its loop."""

    def __init__(self, micro_batch: int = 4) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.s = session()
        self.state = self.s.state(self.model, self.optimizer)
        self.data = self.s.data(torch.randn(100, 5), global_batch=16, micro_batch=micro_batch)

    def loss(self, rows: Tensor) -> Tensor:
        return (self.model(rows[:, :4]) - rows[:, 4:]).square().mean()

    def first(self) -> Any:
        """The first batch of a loop."""
        return next(iter(self.s.steps(self.data, self.state, max_steps=2)))

    def step(self, batch: Any) -> None:
        for micro in batch:
            micro.scale(self.loss(micro.data)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def step_inside(script: Script, batch: Any) -> None:
    for micro in batch:
        micro.scale(script.loss(micro.data)).backward()
        script.optimizer.step()


def clear_inside(script: Script, batch: Any) -> None:
    for micro in batch:
        script.optimizer.zero_grad()
        micro.scale(script.loss(micro.data)).backward()
    script.optimizer.step()


def leave_inside(script: Script, batch: Any) -> None:
    for micro in batch:
        micro.scale(script.loss(micro.data)).backward()
        break
    script.optimizer.step()


def zero_inside(script: Script, batch: Any) -> None:
    for micro in batch:
        script.optimizer.zero_grad(set_to_none=False)
        micro.scale(script.loss(micro.data)).backward()
    script.optimizer.step()


def zero_the_model_inside(script: Script, batch: Any) -> None:
    for micro in batch:
        micro.scale(script.loss(micro.data)).backward()
        script.model.zero_grad(set_to_none=False)
    script.optimizer.step()


def clear_at_first(script: Script, batch: Any) -> None:
    for number, micro in enumerate(batch):
        if number == 0:
            script.optimizer.zero_grad()
        micro.scale(script.loss(micro.data)).backward()
    script.optimizer.step()


@pytest.mark.parametrize("micro_batch", [16, 4])
@brings(
    "`optimizer.step()` inside `for micro in batch`, also where a rank has only one micro-batch",
    Comes.REFUSED,
    "the gradient is that of a part of the global batch; with fewer ranks there are more micro-batches",
    "call it behind that loop",
)
def test_a_step_inside(micro_batch: int) -> None:
    """Before the weights have moved. The line names what else belongs there."""
    refused(micro_batch, step_inside, r"call optimizer\.step\(\) behind that loop, with clipping, zero_grad\(\) and")


@brings(
    "`optimizer.zero_grad()` or `model.zero_grad()` inside `for micro in batch`",
    Comes.REFUSED,
    "only the last micro-batch's gradient would be left. Seen in the first step that has several, where its optimizer "
    "steps; in later ones a line says it (a script may drop a loss that is no number). What no optimizer steps then "
    "may be cleared, such as the other half of a GAN. What a script writes to gradients by itself "
    "(`p.grad.zero_()`, clipping) nobody sees",
    "call it behind that loop",
)
@pytest.mark.parametrize("body", [clear_inside, zero_inside, zero_the_model_inside])
def test_gradients_cleared_inside(body: Any) -> None:
    """Before the optimizer steps."""
    refused(4, body, r"cleared between its micro-batches: call optimizer\.zero_grad\(\) behind")


def test_gradients_cleared_before_the_first_micro_batch() -> None:
    """Nothing of the step is lost."""
    script = Script(4)
    for batch in script.s.steps(script.data, script.state, max_steps=3):
        clear_at_first(script, batch)


def test_other_gradients_may_be_cleared_inside() -> None:
    """Of another model, which is trained in between."""
    script = Script(4)
    other = nn.Linear(4, 1)
    beside = torch.optim.SGD(other.parameters(), lr=0.1)
    for micro in script.first():
        beside.zero_grad()
        other(micro.data[:, :4]).sum().backward()
        beside.step()
        micro.scale(script.loss(micro.data)).backward()


@pytest.mark.parametrize("parity", [0, 1])
@pytest.mark.parametrize("judge_first", [False, True])
def test_a_part_that_no_optimizer_steps_may_be_cleared_inside(
    caplog: pytest.LogCaptureFixture, parity: int, judge_first: bool
) -> None:
    """Two parts that take turns, as those of a GAN: in one's turn the other's gradients are nobody's."""
    torch.manual_seed(1)
    maker, judge, s = nn.Linear(4, 4), nn.Linear(4, 1), session()
    turns = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (maker, judge)]
    state = s.state(nn.ModuleList([judge, maker] if judge_first else [maker, judge]), turns[0], judge=turns[1])
    data = s.data(torch.randn(100, 4), global_batch=16, micro_batch=4)
    before = [one.weight.detach().clone() for one in (maker, judge)]
    for batch in s.steps(data, state, max_steps=4):
        turn = (batch.step + parity) % 2
        for micro in batch:
            (maker, judge)[1 - turn].zero_grad()
            micro.scale(judge(maker(micro.data)).square().mean()).backward()
        turns[turn].step()
        for one in turns:
            one.zero_grad()
    assert not any(torch.equal(one.weight, old) for one, old in zip((maker, judge), before, strict=True))
    assert not [line for line in caplog.messages if "cleared" in line]


def test_gradients_cleared_inside_without_an_optimizer() -> None:
    """Nobody knows which step would take them: the first parameter counts."""
    s = session()
    model = nn.Linear(4, 1)
    state = s.state(model)
    batch = next(iter(s.steps(s.data(torch.randn(100, 4), global_batch=16, micro_batch=4), state, max_steps=2)))
    micros = iter(batch)
    for _ in range(2):
        micro = next(micros)
        model.zero_grad()
        micro.scale(model(micro.data).mean()).backward()
    with pytest.raises(RuntimeError, match="cleared between its micro-batches"):
        next(micros)


def test_gradients_cleared_behind_all_micro_batches_are_others() -> None:
    """What a script computes there of its own may be stepped."""
    model, judge, s = nn.Linear(4, 4), nn.Linear(4, 1), session()
    optimizer, beside = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, judge))
    state = s.state(nn.ModuleList([model, judge]), optimizer, judge=beside)
    data = s.data(torch.randn(100, 4), global_batch=16, micro_batch=4)
    for batch in s.steps(data, state, max_steps=2):
        for micro in batch:
            judge.zero_grad()
            micro.scale(judge(model(micro.data)).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        beside.zero_grad()
        judge(torch.ones(4)).sum().backward()
        beside.step()


def test_gradients_cleared_inside_later(caplog: pytest.LogCaptureFixture) -> None:
    """A loss that is no number, say: one line, and the training goes on."""
    script = Script(4)
    for batch in script.s.steps(script.data, script.state, max_steps=4):
        for number, micro in enumerate(batch):
            micro.scale(script.loss(micro.data)).backward()
            if batch.step > 1 and number == 2:
                script.optimizer.zero_grad()
        script.optimizer.step()
        script.optimizer.zero_grad()
    said = [line for line in caplog.messages if "were cleared between its micro-batches" in line]
    assert len(said) == 1
    assert said[0].startswith("the gradients of step 2 were cleared between its micro-batches")


@brings(
    "`scheduler.step()` inside `for micro in batch`, of a scheduler of `s.state`",
    Comes.REFUSED,
    "it would step once for each micro-batch, whose number depends on the number of ranks",
    "call it behind that loop",
)
@pytest.mark.parametrize("micro_batch", [16, 4])
def test_a_schedule_that_steps_inside(micro_batch: int) -> None:
    """Before the optimizer steps."""
    script = Script(micro_batch)
    script.s.close()
    s = session()
    schedule = torch.optim.lr_scheduler.StepLR(script.optimizer, 1)
    state = s.state(script.model, script.optimizer, schedule)
    data = s.data(torch.randn(100, 5), global_batch=16, micro_batch=micro_batch)
    batch = next(iter(s.steps(data, state, max_steps=2)))
    micros = iter(batch)
    micro = next(micros)
    micro.scale(script.loss(micro.data)).backward()
    with pytest.warns(UserWarning, match="before"):
        schedule.step()
    with pytest.raises(RuntimeError, match=r"StepLR steps inside .* \(step 1\).*call it behind that loop"):
        next(micros)


@brings(
    "`s.save(…)` in the body of `for batch in s.steps(…)`",
    Comes.REFUSED,
    "the step is not over: it would be saved as the one before, without a place in the data, and no start could go on",
    "`save=` and `save_every=` of `steps()`",
)
def test_a_save_in_the_middle_of_a_step(tmp_path: Path) -> None:
    script = Script()
    script.s.close()
    s = session(tmp_path)
    state = s.state(script.model, script.optimizer)
    data = s.data(torch.randn(100, 5), global_batch=16, micro_batch=4)
    loop = iter(s.steps(data, state, max_steps=2))
    next(loop)
    with pytest.raises(RuntimeError, match=r"save\(\) in the middle of a step.*give steps\(\) save= and save_every="):
        s.save(state.write)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_of_gradients_are_none_that_were_cleared() -> None:
    """With `create_graph=True` torch makes a new tensor of each sum."""
    script = Script(4)
    for micro in script.first():
        micro.scale(script.loss(micro.data)).backward(create_graph=True)
    script.optimizer.step()


def test_a_loop_that_is_left() -> None:
    """As in the lower layer."""
    refused(4, leave_inside, "its gradient is not the global batch's")


def refused(micro_batch: int, body: Any, line: str) -> None:
    script = Script(micro_batch)
    batch = script.first()
    before = [p.detach().clone() for p in script.model.parameters()]
    with pytest.raises(RuntimeError, match=line):
        body(script, batch)
    assert all(torch.equal(a, b) for a, b in zip(before, script.model.parameters(), strict=True))


@brings(
    "a model that is moved, or converted to another dtype, after `s.state(model, optimizer)`",
    Comes.REFUSED,
    "the optimizer's state would stay where it was loaded: no harm at the first start, but at the next one",
    "move it before",
)
def test_a_model_that_moves() -> None:
    """At the first start already."""
    script = Script()
    script.model.double()
    with pytest.raises(ValueError, match=r"moved after s\.state.*from cpu, torch\.float32 to cpu, torch\.float64"):
        script.first()


@brings(
    "`model.eval()` for an evaluation in between, and no `model.train()` behind it",
    Comes.SAID,
    "dropout and BatchNorm compute otherwise from then on, which may be meant",
    "`model.train()`",
)
def test_an_evaluation_that_leaves_its_mode_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Once."""
    script = Script()
    for batch in script.s.steps(script.data, script.state, max_steps=4):
        script.step(batch)
        script.model.eval()
    lines = [one for one in caplog.messages if "evaluation mode" in one]
    assert len(lines) == 1
    assert lines[0].startswith("step 2 was computed with the model in evaluation mode")


@brings(
    "an optimizer that steps the model and is not in `s.state`, such as one that takes another's place in mid-run",
    Comes.SAID,
    "what it keeps (momentum) is lost at each change of the world. (Plain SGD keeps nothing, and is not named)",
    "make it at the start, and give it to `s.state` or `TrainingState` as well",
)
def test_an_optimizer_that_is_not_in_the_state(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    for batch in script.s.steps(script.data, script.state, max_steps=6):
        if batch.step > 3:
            script.optimizer = torch.optim.SGD(script.model.parameters(), lr=0.01, momentum=0.9)
        script.step(batch)
    said = [line for line in caplog.messages if "is not in the state that is saved" in line]
    assert len(said) == 1
    assert said[0].startswith("SGD steps parameters of the model")


@brings(
    "a `GradScaler` that steps the model's optimizer and is not in `s.state`",
    Comes.SAID,
    "its loss scale begins anew at each change of the world, and steps are left out until it fits again",
    "give it to `s.state` or `TrainingState` as well",
)
def test_a_scaler_that_is_not_in_the_state(caplog: pytest.LogCaptureFixture) -> None:
    for given in (True, False):
        script, scaler = Script(), torch.amp.grad_scaler.GradScaler("cpu", init_scale=8.0)
        script.s.close()
        script.s = session()
        script.state = script.s.state(script.model, script.optimizer, scaler=scaler if given else None)
        for batch in script.s.steps(script.data, script.state, max_steps=3):
            for micro in batch:
                scaler.scale(micro.scale(script.loss(micro.data))).backward()  # type: ignore[no-untyped-call]
            scaler.step(script.optimizer)
            scaler.update()
            script.optimizer.zero_grad()
        said = [line for line in caplog.messages if "is not in the state that is saved" in line]
        assert len(said) == (not given)
        script.s.close()
    assert said[0].startswith("GradScaler steps AdamW")


@brings(
    "gradients that are carried over the end of a step, such as an optimizer's step behind every second batch",
    Comes.SAID,
    "no checkpoint has them, so saves and drains come behind the next step of the optimizer, and who is left after a"
    " crash saves the last boundary that had none. A drain waits 20 s at most, and half of a leaver's notice; a save"
    " for the best metric does not wait: a part of a step is lost where the run goes on from such ones",
    "give each step of the optimizer a batch: a larger global batch, in micro-batches",
)
def test_gradients_that_are_carried_over_steps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = Script()
    script.s.close()
    script.s = session(tmp_path)
    script.state = script.s.state(script.model, script.optimizer)
    for batch in script.s.steps(script.data, script.state, max_steps=6):
        for micro in batch:
            micro.scale(script.loss(micro.data)).backward()
        if batch.step % 2 == 0:
            script.optimizer.step()
            script.optimizer.zero_grad()
    said = [line for line in caplog.messages if "carried over" in line]
    assert len(said) == 1
    assert said[0].startswith("gradients were carried over the end of step 1, and no checkpoint has them")


@pytest.mark.parametrize("late", [False, True])
@brings(
    "a buffer that comes, or grows, in the first step",
    Comes.REFUSED,
    "a new process makes the model without it, and cannot load what is saved. Later than that one line says so with"
    " the first save, because the script may make it before it loads",
    "make it in `__init__`, as large as it becomes, or with `persistent=False`; or load it by a hook of its module",
)
def test_a_buffer_that_grows(tmp_path: Path, caplog: pytest.LogCaptureFixture, late: bool) -> None:
    script = Script()
    script.s.close()
    s = session(tmp_path)
    script.model.register_buffer("bank", torch.zeros(0))
    state = s.state(script.model, script.optimizer)
    refused = ""
    try:
        data = s.data(torch.randn(100, 5), global_batch=16, micro_batch=4)
        for batch in s.steps(data, state, max_steps=6, save_every=2):
            script.step(batch)
            if batch.step > (3 if late else 0):
                script.model.bank = torch.cat([script.model.bank, torch.ones(1)])
    except RuntimeError as error:
        refused = str(error)
    assert ("the model's bank has the shape [1] now" in refused) is not late, refused
    said = [line for line in caplog.messages if "before it loads, the run goes on at no other start" in line]
    assert len(said) == late


def batches_of(s: Any, length: int = 40, *, seed: int = 1, anew: bool = False) -> Batches[Any]:
    """Four samples in a step; ``anew``: at the beginning in each start."""
    sampler, plan = ElasticSampler(length, 4, seed=seed), BatchPlan(4, s.world_size, 4)
    return Batches(torch.arange(float(length)), sampler, plan, s.rank, resume=None if anew else s.resume)


class Bar:
    """A progress bar, as tqdm's."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Any:
        yield from self.iterable


def zipped(directory: Path | None, beside: Callable[[Any], Any], steps: int, around: Any = iter) -> list[Any]:
    """The samples of each step of a loop over ``zip``, and what comes beside them."""
    seen: list[Any] = []
    with session(directory) as s:
        data = around(zip(batches_of(s), beside(s), strict=False))
        for batch, other in s.steps(data, max_steps=steps, save=lambda path: path.joinpath("x").touch()):
            seen.append([sample for micro in batch.micro_batches for sample in micro.data.tolist()])
            if hasattr(other, "micro_batches"):
                seen.append([sample for micro in other.micro_batches for sample in micro.data.tolist()])
    return seen


def loader(_: Any) -> Any:
    return cycle(DataLoader(torch.arange(12.0), batch_size=2))


@brings(
    "`zip` of `Batches` and a second loader (unlabelled samples, another task's)",
    Comes.SAID,
    "the run's place is that of the `Batches`; what comes beside them begins anew at each start. (Numbers beside them, "
    "`zip(batches, range(n))`, are not named)",
    "one data set of both (torch's `StackDataset`), or draw the other's samples by `batch.step`",
)
@pytest.mark.parametrize("around", [iter, Bar])
def test_a_loader_beside_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture, around: Any) -> None:
    """At the run's start, once."""
    zipped(tmp_path, loader, 2, around)
    (line,) = [one for one in caplog.messages if "begins anew at each start" in one]
    assert line.startswith("what zip gives beside the batches")
    caplog.clear()
    zipped(tmp_path, loader, 4, around)
    assert not [one for one in caplog.messages if "begins anew" in one]


@pytest.mark.parametrize("beside", [range(9), count(), np.arange(9), torch.linspace(1, 0, 9), ["a"] * 9, [None] * 9])
def test_numbers_beside_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture, beside: Any) -> None:
    """Nobody trains with them what a place in the data would say."""
    seen = zipped(tmp_path, lambda _: beside, 2) + zipped(tmp_path, lambda _: beside, 10)
    assert sorted(sample for step in seen for sample in step) == list(map(float, range(40)))
    assert caplog.messages == []


def apart(caplog: pytest.LogCaptureFixture) -> int:
    """How many lines say that two batches do not go on together."""
    return len([one for one in caplog.messages if "gives batches of 2 Batches at a time" in one])


@brings(
    "`zip` of two `Batches` of other lengths, seeds or places",
    Comes.SAID,
    "one place in the data is saved, and no start could go on with both: a run that goes on is refused",
    "one data set of both (torch's `StackDataset`), or draw the other's samples by `batch.step`",
)
@pytest.mark.parametrize("other", [{"length": 80}, {"seed": 2}])
def test_two_batches_at_a_time(tmp_path: Path, caplog: pytest.LogCaptureFixture, other: Any) -> None:
    """At the run's start, once; where the run is to go on it is refused."""
    zipped(tmp_path, lambda s: batches_of(s, **other), 2)
    assert apart(caplog) == 1
    with pytest.raises(ValueError, match="sample order is another one"):
        zipped(tmp_path, lambda s: batches_of(s, **other), 4)
    assert apart(caplog) == 1


@pytest.mark.parametrize("other", [{"length": 80}, {}])
def test_two_batches_of_which_one_begins_anew(tmp_path: Path, other: Any) -> None:
    """Nothing told of it as it went on, and its samples came once more in each world."""
    zipped(tmp_path, lambda s: batches_of(s, **other, anew=True), 2)
    with pytest.raises(ValueError, match="2 Batches at a time, which do not begin at one place"):
        zipped(tmp_path, lambda s: batches_of(s, **other, anew=True), 4)


def test_two_batches_at_a_time_of_which_nothing_is_saved(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing will go on."""
    assert len(zipped(None, lambda s: batches_of(s, seed=2), 2)) == 4
    assert not apart(caplog)


def test_two_batches_that_stand_alike_go_on_alike(tmp_path: Path) -> None:
    """Two views of the same samples: where the first one goes on, so does the other."""
    seen = zipped(tmp_path, batches_of, 2) + zipped(tmp_path, batches_of, 10)
    assert seen[::2] == seen[1::2]
    assert sorted(sample for step in seen[::2] for sample in step) == list(map(float, range(40)))


class Endless(IterableDataset[Any]):
    """A stream without an end."""

    def __iter__(self) -> Any:
        return map(float, count())


def test_two_endless_streams_go_on_alike(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In lockstep, as long as both take as many samples in a step."""

    def run(steps: int) -> list[Any]:
        with session(tmp_path) as s:
            plan = BatchPlan(4, s.world_size, 4)
            data = [
                Batches(Endless(), ElasticSampler(None, 4, shuffle=False), plan, s.rank, resume=s.resume)
                for _ in range(2)
            ]
            both = s.steps(zip(*data, strict=False), max_steps=steps, save=lambda path: path.joinpath("x").touch())
            return [[x for micro in one.micro_batches for x in micro.data.tolist()] for pair in both for one in pair]

    seen = run(2) + run(4)
    assert seen[::2] == seen[1::2]
    assert sorted(sample for step in seen[::2] for sample in step) == list(map(float, range(16)))
    assert not apart(caplog)


def test_a_batch_and_the_one_behind_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Whoever looks ahead trains the first one: its place is saved, and right."""

    def run(steps: int) -> list[Any]:
        with session(tmp_path) as s:
            pairs = s.steps(pairwise(batches_of(s)), max_steps=steps, save=lambda path: path.joinpath("x").touch())
            return [x for batch, _ in pairs for micro in batch.micro_batches for x in micro.data.tolist()]

    seen = run(2) + run(9)
    assert len(seen) == len(set(seen)) == 36
    assert not apart(caplog)
