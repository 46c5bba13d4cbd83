"""Ranks compare what they all have a copy of: the numbers of tensors, and what is made of their differences."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dalsegno.elastic.rank.agreement import Unlike
from dalsegno.elastic.rank.collective import PendingGather
from dalsegno.elastic.saving.optimizers import check_kept
from dalsegno.elastic.trainer import alike
from dalsegno.elastic.training import copies, digest
from dalsegno.elastic.training.copies import Copies
from dalsegno.elastic.training.hyperparameters import told_of
from dalsegno.elastic.training.wrappers import Frozen
from tests.support.workers.threads import Meeting, Threads

SECONDS = 60


class Counted(Threads):
    """Counts how often the ranks tell each other something."""

    gathers = 0

    def start_gather(self, message: Any) -> PendingGather:
        self.gathers += 1
        return super().start_gather(message)


def each(train: Callable[[int, Copies], Any], world_size: int = 2) -> list[Any]:
    """What comes of it on each rank: what it gives, or the error."""
    meeting, found = Meeting(world_size), [None] * world_size

    def one(rank: int) -> None:
        try:
            found[rank] = train(rank, Copies(Counted(rank, meeting)))
        except Unlike as error:
            found[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return found


def model(seed: int = 1, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Of ranks that are threads: not from the global generator."""
    made = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 7)).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype)
    return made


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(copies, "remark", lambda text, *values: lines.append(text % values))
    return lines


# Numbers of tensors.

SHAPES = [(), (1,), (1023,), (1024,), (1025,), (3, 5, 700), (300, 1100)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool], ids=str)
def test_one_changed_value_changes_the_number(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    one = (torch.randn(shape, generator=generator) * 100).to(dtype)
    other = one.clone()
    flat = other.view(-1)
    flat[-1] = 1 - flat[-1].to(torch.int64) if dtype in (torch.int64, torch.bool) else flat[-1] * 1.5 + 1
    same, changed = digest.numbers([one, one.clone()]), digest.numbers([one, other])
    assert same[0] == same[1]
    assert changed[0] != changed[1]


def test_places_count_and_layouts_do_not() -> None:
    """Two rows that change places are seen; how a tensor lies in memory is not."""
    one = torch.randn(2048, 1024, generator=torch.Generator().manual_seed(3))
    turned = one.flip(0)
    first, second, third = digest.numbers([one, turned, one.t().contiguous().t()])
    assert first != second
    assert first == third


def test_the_numbers_do_not_depend_on_how_much_is_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU and a card read other amounts; so the number is the same up to rounding in double precision."""
    one = torch.randn(3_000_000, generator=torch.Generator().manual_seed(3))
    (first,) = digest.numbers([one])
    monkeypatch.setattr(digest, "_CPU_VALUES", digest._CARD_VALUES)
    (second,) = digest.numbers([one])
    assert second == pytest.approx(first, rel=1e-12)


@pytest.mark.parametrize("far", [1e-7, 1e-4, 1e-1])
def test_numbers_are_as_far_apart_as_their_tensors(far: float) -> None:
    """Within a factor of ten, also where each value differs with another sign."""
    generator = torch.Generator().manual_seed(3)
    one = torch.randn(200_000, generator=generator, dtype=torch.float64)
    other = one + far * torch.randn(200_000, generator=generator, dtype=torch.float64)
    first, second = digest.numbers([one, other])
    assert 0.1 * far < abs(first - second) / digest.norms([one])[0] < 10 * far


def test_tensors_of_one_size_together_have_the_numbers_that_each_has_alone() -> None:
    """All sizes around a row, dtypes, layouts, more than one batch; and what is wrong with one is not the others'."""
    sizes = (0, 1, 5, digest._COLUMNS - 1, digest._COLUMNS, digest._COLUMNS + 1, 3 * digest._COLUMNS + 7)
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.complex64)
    tensors = [torch.randn(size).mul(9).to(dtype) for size in sizes for dtype in dtypes for _ in range(3)]
    tensors += [torch.randn(6, 8).t() for _ in range(5)] + [torch.randn(digest._CPU_VALUES // 3) for _ in range(7)]
    tensors.append(torch.full((5,), float("nan")))
    together = digest.numbers(tensors)
    alone = [digest.numbers([tensor])[0] for tensor in tensors]
    assert together[:-1] == pytest.approx(alone[:-1], rel=1e-12, abs=1e-9)
    assert together[-1] != together[-1]
    # Twice the same is the same, to the last bit: as on two ranks.
    assert list(map(repr, together)) == list(map(repr, digest.numbers([tensor.clone() for tensor in tensors])))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64], ids=str
)
@pytest.mark.parametrize("shape", [(), (1,), (1025,), (3, 5, 7)], ids=str)
def test_one_changed_value_changes_the_letters(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """On CPUs they are of the bytes; how a tensor lies in memory is not seen."""
    one = (torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 100).to(dtype)
    other = one.clone()
    flat = other.view(-1)
    flat[-1] = 1 - flat[-1].to(torch.int64) if dtype in (torch.int64, torch.bool) else flat[-1] * 1.5 + 1
    turned = one.t().contiguous().t() if one.dim() == 2 else one.transpose(0, -1).contiguous().transpose(0, -1)
    first, same, changed = digest.digests([one, turned if one.dim() else one.clone(), other])
    assert first == same != changed


def test_letters_of_views_that_are_computed() -> None:
    """A conjugate or a negative that torch has not written down yet."""
    one = torch.randn(5, dtype=torch.complex64)
    assert digest.digests([one.conj()]) == digest.digests([one.conj().resolve_conj()]) != digest.digests([one])
    assert digest.digests([torch.empty(0, 3)]) == digest.digests([torch.empty(0)])


def test_what_is_no_plain_tensor_is_left_out() -> None:
    class Packed(Tensor):
        pass

    assert digest.is_plain(nn.Parameter(torch.ones(2)))
    assert not digest.is_plain(torch.ones(2).as_subclass(Packed))
    assert not digest.is_plain(torch.ones(2, device="meta"))
    assert not digest.is_plain(torch.eye(2).to_sparse())
    assert not digest.is_plain(1.0)


# What comes of differences.


def start(own: nn.Module, copies: Copies, **known: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.01)
    copies.know(own, optimizer, **{"saved": True, **known})
    copies.before()
    return optimizer


def test_ranks_that_are_alike_compare_once(said: list[str]) -> None:
    def train(rank: int, copies: Copies) -> list[int]:
        own = model()
        optimizer = start(own, copies)
        counts = []
        for step in range(1, 4):
            for parameter in own.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            copies.behind(step)
            counts.append(copies._collective.gathers)  # type: ignore[attr-defined]
        return counts

    assert each(train) == [[3, 3, 3]] * 2
    assert said == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounding_is_said_and_not_refused(said: list[str], dtype: torch.dtype) -> None:
    """Devices of different kinds round differently: every value by one unit in its last place."""

    def train(rank: int, copies: Copies) -> str:
        own = model(dtype=dtype)
        start(own, copies)
        if rank:
            for parameter in own.parameters():
                parameter.data = parameter.data * (1 + torch.finfo(dtype).eps)
        copies.behind(1)
        return "goes on"

    assert each(train) == ["goes on"] * 2
    (line,) = said
    assert line.startswith("after step 1 the ranks differ by rounding in 0.weight, 0.bias, 1.weight and 1 more; by ")


@pytest.mark.parametrize("saved", [True, False])
def test_what_is_trained_apart_is_refused(said: list[str], saved: bool) -> None:
    """Also where only the script itself saves it, if nothing at all is kept alike."""

    def train(rank: int, copies: Copies) -> str:
        own = model()
        optimizer = start(own, copies, saved=saved)
        generator = torch.Generator().manual_seed(rank)
        for parameter in own.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
        copies.behind(1)
        return "goes on"

    lines = {str(error) for error in each(train)}
    (line,) = lines
    assert line.startswith("after step 1 the ranks have different weights or states of the optimizer (0.weight, ")
    assert said == []


def test_a_part_that_differs_may_be_meant(said: list[str]) -> None:
    """A model that the script saves by itself, of which each rank has one layer of its own."""

    def train(rank: int, copies: Copies) -> str:
        own = model()
        own[1].weight.data += rank  # type: ignore[operator]
        start(own, copies, saved=False)
        copies.behind(1)
        return "goes on"

    assert each(train) == ["goes on"] * 2
    assert all("the ranks have different values of 1.weight" in line for line in said)
    assert said


def test_buffers_may_differ(said: list[str]) -> None:
    def train(rank: int, copies: Copies) -> str:
        own = nn.BatchNorm1d(4)
        own.running_mean = torch.full((4,), float(rank))
        start(own, copies)
        copies.behind(1)
        return "goes on"

    assert each(train) == ["goes on"] * 2
    assert said == []


def test_nothing_is_known_on_some_rank(said: list[str]) -> None:
    """Ranks that know nothing of each other's models are not compared."""

    def train(rank: int, copies: Copies) -> str:
        if rank:
            start(model(), copies)
        else:
            copies.before()
        copies.behind(1)
        return "goes on"

    assert each(train) == ["goes on"] * 2
    assert said == []


def test_while_nothing_moves_they_compare_again(said: list[str]) -> None:
    """Behind steps 1, 2 and 4: a loss scale that is too large at first, or a learning rate of 0."""

    def train(rank: int, copies: Copies) -> list[int]:
        own = model()
        copies.know(own, torch.optim.SGD(own.parameters(), lr=0.1), saved=True)
        copies.before()
        compared = []
        for step in range(1, 9):
            before = copies._collective.gathers  # type: ignore[attr-defined]
            if step == 4:
                own[0].weight.data += 1  # type: ignore[operator]
            copies.behind(step)
            compared += [step] * (copies._collective.gathers > before)  # type: ignore[attr-defined]
        return compared

    assert each(train) == [[1, 2, 4]] * 2


def test_values_that_are_not_finite_are_alike(said: list[str]) -> None:
    def train(rank: int, copies: Copies) -> str:
        own = model()
        own[0].weight.data[0, 0] = float("nan")  # type: ignore[index]
        start(own, copies)
        copies.behind(1)
        return "goes on"

    assert each(train) == ["goes on"] * 2
    assert said == []


def test_a_world_of_one_keeps_and_compares_nothing() -> None:
    (copies,) = each(lambda rank, copies: (start(model(), copies), copies.behind(1), copies)[-1], 1)
    assert copies._known == {}
    assert copies._collective.gathers == 0


# Hyperparameters.


def test_what_may_differ_is_not_told() -> None:
    """Ranks' numbers, devices, and how it is computed; what moves the curve is."""
    own = model()
    optimizer = torch.optim.AdamW(own.parameters(), lr=torch.tensor(0.5), fused=False, foreach=False)
    optimizer.param_groups[0].update(rank=1, device="cuda:1", buffer=torch.ones(3))
    told = told_of(own, [optimizer], None)
    assert told["lr of AdamW"] == "0.5"
    assert told["betas of AdamW"] == "[0.9, 0.999]"
    assert not [name for name in told if name.split()[0] in ("rank", "device", "buffer", "fused", "foreach")]
    assert told["the model"].startswith("Sequential with 4 parameters, 4 of them trained (")


def test_many_groups_are_told_in_short() -> None:
    own = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
    optimizer = torch.optim.SGD([{"params": layer.parameters(), "lr": n / 7} for n, layer in enumerate(own)], lr=1.0)
    told = told_of(own, [optimizer], None)
    assert all(len(str(value)) < 250 for value in told.values())
    optimizer.param_groups[99]["lr"] = 5.0
    assert told_of(own, [optimizer], None)["lr of SGD"] != told["lr of SGD"]


def test_schedules_are_told() -> None:
    own = model()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    linear = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5)
    assert told_of(own, [optimizer], linear)["the scheduler"].startswith("LinearLR start_factor=0.5 end_factor=1.0")
    chained = torch.optim.lr_scheduler.SequentialLR(
        optimizer, [linear, torch.optim.lr_scheduler.ConstantLR(optimizer)], milestones=[3]
    )
    told = told_of(own, [optimizer], chained)["the scheduler"]
    assert told.startswith("SequentialLR ")
    linear.end_factor = 0.75
    assert told_of(own, [optimizer], chained)["the scheduler"] != told


# Functions of a Trainer.


def test_functions_are_told_apart_by_what_they_do() -> None:
    def made(factor: float) -> Callable[[float], float]:
        return lambda x: factor * x

    other: Any = [lambda x: x + 1, lambda x: x + 2]
    assert alike.coded(made(1.0)) == alike.coded(made(2.0))  # a device or rank may be among this
    assert alike.coded(other[0]) != alike.coded(other[1])
    assert alike.coded(nn.MSELoss()) == "MSELoss"
    assert alike.coded(None) is None


@pytest.mark.full
@pytest.mark.slow
def test_functions_are_the_same_in_every_process() -> None:
    """Also where a set's order depends on the process."""
    source = (
        "from dalsegno.elastic.trainer.alike import coded\n"
        "def f(x):\n    return x in {'a', 'b', 'c', 'd', 'e'} or [lambda: (1, x)]\n"
        "print(coded(f))"
    )
    told = {
        subprocess.run(
            [sys.executable, "-c", source],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=SECONDS,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


# Parameters that are not the model's, or become trainable.


def test_an_optimizers_parameter_is_kept_somewhere() -> None:
    own, extra = model(), nn.Parameter(torch.randn(3))
    optimizer = torch.optim.SGD([*own.parameters(), extra], lr=0.1)
    with pytest.raises(ValueError, match=r"SGD trains parameters that are not the model's, 1 of them \(shape \(3,\)\)"):
        check_kept(optimizer, own)
    check_kept(optimizer, own, [extra.detach()])
    check_kept(optimizer, own, [torch.zeros(3), extra.detach().clone()])
    with pytest.raises(ValueError, match="not the model's"):
        check_kept(optimizer, own, [torch.zeros(3), torch.zeros(4)])
    extra.requires_grad_(False)
    check_kept(optimizer, own)
    check_kept(torch.optim.SGD([nn.Parameter(own[0].bias.detach().clone())]), own)  # type: ignore[operator]


def test_what_becomes_trainable_is_said_once_where_it_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr("dalsegno.elastic.training.wrappers.remark", lambda text, *values: lines.append(text % values))
    own = model()
    own[0].requires_grad_(False)
    frozen = Frozen(own)
    frozen.check(1)
    own.requires_grad_(True)
    frozen.check(2)
    frozen.check(3)
    (line,) = lines
    assert line.startswith("0.weight, 0.bias became trainable by step 2: with more than one rank")
