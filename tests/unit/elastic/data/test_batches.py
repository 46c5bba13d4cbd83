"""Batches: factors that make the global gradient, fillers that count for nothing, token means, generators."""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dalsegno.elastic import Batches, BatchPlan, ElasticSampler, Position


class Numbers(torch.utils.data.Dataset[Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), 1.0 + index % 5], dtype=torch.float64)


def make(size: int, world: int, micro: int, rank: int, length: int = 50, **options: Any) -> Batches[Tensor]:
    plan = BatchPlan(size, world, micro, options.pop("fixed", False), options.pop("pad", False))
    return Batches(Numbers(length), ElasticSampler(length, size, seed=4), plan, rank, **options)


def mean_loss(weight: Tensor, data: Tensor) -> Tensor:
    return (weight * data[:, 0]).sin().mean()


@pytest.mark.parametrize(
    ("size", "world", "micro"), [(16, 1, 4), (16, 3, 4), (16, 3, 1), (5, 4, 1), (2, 3, 8), (7, 2, 2)]
)
@pytest.mark.parametrize("scale", ["ddp", "deepspeed"])
def test_factors_give_the_gradient_of_the_whole_batch(size: int, world: int, micro: int, scale: str) -> None:
    """Averaged as the framework does, scaled slices give the plain mean over the batch, short last batches included."""
    accumulation = BatchPlan(size, world, micro).accumulation
    ranks = [iter(make(size, world, micro, rank, length=23, scale=scale)) for rank in range(world)]
    whole = iter(make(size, 1, size, 0, length=23))
    for _ in range(23 // size + 2):
        weight = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        for rank in ranks:
            batch = next(rank)
            for part in batch.micro_batches:
                factor = 1.0 / world / (accumulation if scale == "deepspeed" else 1)
                (part.scale(mean_loss(weight, part.data)) * factor).backward()  # type: ignore[no-untyped-call]
        expected = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        for part in next(whole).micro_batches:
            mean_loss(expected, part.data).backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        assert torch.allclose(weight.grad, expected.grad, rtol=1e-12, atol=0)


def test_filler_counts_for_nothing_even_with_nan_inside() -> None:
    """A model that has no finite derivative on a filler leaves a zero gradient, and later real slices count again."""
    batch = next(iter(make(1, 2, 1, 1)))
    weight = torch.tensor(0.0, dtype=torch.float64, requires_grad=True)
    for part in batch.micro_batches:
        assert part.filler
        assert part.is_last
        assert part.sample_ids == ()
        part.scale((weight.sqrt() / 0.0).sum() * part.data.mean(), [weight]).backward()  # type: ignore[no-untyped-call]
    assert batch.sample_ids == ()
    assert weight.grad is not None
    assert weight.grad.item() == 0.0
    for part in next(iter(make(1, 1, 1, 0))).micro_batches:
        part.scale(weight * 2.0, [weight]).backward()  # type: ignore[no-untyped-call]
    assert weight.grad.item() == 2.0


def test_token_means_weigh_by_real_tokens_of_all_ranks() -> None:
    """Factors come from the tokens of the whole step; a filler's tokens are not counted."""
    collected: list[float] = []

    def count(data: Tensor) -> int:
        return int(data[:, 1].sum())

    def ranks(reduce: Any) -> list[Any]:
        return [next(iter(make(5, 4, 1, rank, count_tokens=count, reduce=reduce))) for rank in range(4)]

    for batch in ranks(lambda value: collected.append(value) or value):
        list(batch.micro_batches)
    total = sum(collected)
    scales = []
    for batch in ranks(lambda value: total):
        for part in batch.micro_batches:
            scales.append((part.loss_scale, part.filler, count(part.data)))
        assert batch.tokens == total
    assert sum(scale for scale, _, _ in scales) == pytest.approx(4.0)
    assert all(scale == (0.0 if filler else pytest.approx(tokens * 4 / total)) for scale, filler, tokens in scales)


class Sums:
    """As a session: a sum that can be begun, and says when it is waited for."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def sum(self, value: float) -> float:
        raise AssertionError("it blocks")

    def start_sum(self, value: int) -> Sums:
        self.events.append(f"begin {value}")
        return self

    def wait(self) -> list[int]:
        self.events.append("wait")
        return [24]


def test_tokens_are_summed_behind_the_first_forward_pass() -> None:
    """Begun with the step, waited for once, when the first loss is scaled; or behind the step where none counts."""
    events: list[str] = []
    made = make(8, 2, 2, 0, count_tokens=lambda data: 3, reduce=Sums(events).sum)
    batch = next(iter(made))
    assert batch.tokens == 0
    for part in batch.micro_batches:
        assert not part.silent
        events.append("forward")
        assert float(part.scale(torch.tensor(1.0))) == 3 * 2 / 24
    assert events == ["begin 6", "forward", "wait", "forward"]
    assert batch.tokens == 24
    events.clear()
    for part in next(iter(make(8, 2, 2, 0, count_tokens=lambda data: 0, reduce=Sums(events).sum))).micro_batches:
        assert part.silent
        assert float(part.scale(torch.tensor(math.nan))) == 0.0
    assert events == ["begin 0", "wait"]


def test_a_step_in_which_no_token_counts_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """On one rank; where another rank has one it is no such step."""
    for rank, total, wanted in ((1, 0, []), (0, 3, []), (0, 0, [1])):
        made = make(8, 2, 2, rank, count_tokens=lambda data: 0, reduce=lambda value, total=total: total)
        for batch in islice(made, 2):
            for micro in batch.micro_batches:
                assert float(micro.scale(torch.tensor(1.0))) == 0.0
            batch.check_complete()
        told = [one.getMessage() for one in caplog.records]
        assert [
            text.startswith("step 1 learns nothing: no token of its global batch counts") for text in told
        ] == wanted


def test_slice_without_a_real_token_leaves_no_nan() -> None:
    """The mean over no tokens is NaN; it must not reach the gradient of the step."""
    batch = next(iter(make(4, 1, 1, 0, count_tokens=lambda data: int(data[0, 0]) % 2, reduce=lambda value: value)))
    weight = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    for part in batch.micro_batches:
        loss = weight * (3.0 if int(part.data[0, 0]) % 2 else math.nan)
        part.scale(loss, [weight]).backward()  # type: ignore[no-untyped-call]
    assert 0 < batch.tokens < 4
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx(3.0)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_position_is_what_was_trained_not_what_was_fetched(workers: int) -> None:
    """With prefetching workers too, a batch names its own position; going on from it repeats and misses nothing."""
    options = {"loader_options": {"num_workers": workers, "prefetch_factor": 4} if workers else {}}
    whole = [b.sample_ids for b in islice(make(16, 1, 4, 0, **options), 8)]
    batches = list(islice(make(16, 1, 4, 0, **options), 3))
    assert batches[-1].position_after == Position(0, 48)
    sampler = ElasticSampler(50, 16, seed=4)
    sampler.seek(batches[-1].position_after)
    rest = Batches(Numbers(50), sampler, BatchPlan(16, 1, 4), 0, **options)
    assert [b.sample_ids for b in batches] + [b.sample_ids for b in islice(rest, 5)] == whole
    assert sampler.position == Position(0, 48)


def go_through(batch: Any) -> list[int]:
    """As a training does; the samples that were computed."""
    return [sample for part in batch.micro_batches for sample in part.sample_ids]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_sampler_stands_where_the_training_stands(workers: int) -> None:
    """Its state between two steps goes on with the next batch, however much was fetched; iterating again does too."""
    options = {"num_workers": workers, "prefetch_factor": 4} if workers else {}
    sampler = ElasticSampler(50, 16, seed=4)
    batches = Batches(Numbers(50), sampler, BatchPlan(16, 1, 3), 0, data_epochs=2, loader_options=options)
    history, states = [], []
    for batch in batches:
        states.append(sampler.state_dict())
        history.append(go_through(batch))
        if batch.step == 3:
            break
    assert [(state["data_epoch"], state["samples"]) for state in states] == [(0, 0), (0, 16), (0, 32)]
    assert sampler.position == Position(0, 48)
    assert batches.left == 5
    for batch in batches:
        assert batch.step == len(history) + 1
        history.append(go_through(batch))
    assert batches.left == 0
    assert not list(batches), "nothing is repeated"
    undisturbed = make(16, 1, 3, 0, data_epochs=2)
    assert history == [list(batch.sample_ids) for batch in undisturbed]


def test_a_step_that_was_left_in_the_middle_is_an_error() -> None:
    """Half a gradient is not taken for a whole one, and the position does not move over what was not trained."""
    batches = make(16, 1, 4, 0)
    each = iter(batches)
    assert go_through(next(each))
    batch = next(each)
    for _ in zip(range(3), batch.micro_batches, strict=False):
        pass
    assert (batch.handed_out, batch.accumulation) == (3, 4)
    with pytest.raises(RuntimeError, match="step 2 ended after 3 of its 4 micro-batches"):
        next(each)
    again = next(iter(batches))
    assert (again.step, again.position, again.handed_out) == (2, Position(0, 16), 0)
    with pytest.raises(RuntimeError, match="step 2 ended after 0 of its 4"):
        again.check_complete()


@pytest.mark.parametrize("micro", [4, 16])
def test_a_step_that_was_left_in_its_last_micro_batch_is_an_error(micro: int) -> None:
    """By a break, or by an exception that was caught behind the loop; also where it is the only one."""
    batches = make(16, 1, micro, 0)
    each = iter(batches)
    batch = next(each)
    with contextlib.suppress(MemoryError):
        for part in batch.micro_batches:
            if part.is_last:
                raise MemoryError
    with pytest.raises(RuntimeError, match="step 1 ended in the last of its micro-batches"):
        next(each)
    assert batches.position == Position(0, 0)


class Noisy(torch.utils.data.Dataset[Tensor]):
    """Draws at random."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index + random.random(), float(torch.rand(())), float(np.random.random())])


@pytest.mark.slow
def test_what_workers_draw_does_not_depend_on_when_they_were_started() -> None:
    """A run that resumes in the same world draws what the undisturbed one does."""

    def drawn(first: int, count: int) -> list[Any]:
        sampler = ElasticSampler(48, 8, seed=1)
        sampler.seek(Position(0, 8 * first))
        batches = Batches(Noisy(), sampler, BatchPlan(8, 1, 4), 0, loader_options={"num_workers": 2})
        return [[micro.data.tolist() for micro in batch.micro_batches] for batch in islice(batches, count)]

    whole = drawn(0, 5)
    assert drawn(0, 2) + drawn(2, 3) == whole
    assert len({row[1] for batch in whole for micro in batch for row in micro}) > 30


@pytest.mark.slow
@settings(max_examples=60)
@given(
    length=st.integers(1, 90),
    size=st.integers(1, 20),
    lives=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=7),
    micro=st.integers(1, 6),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(-3, 2**70),
)
def test_any_lives_and_worlds_give_the_undisturbed_history(
    length: int,
    size: int,
    lives: list[tuple[int, int, int]],
    micro: int,
    flags: tuple[bool, bool, bool, bool],
    seed: int,
) -> None:
    """Worlds, drains and crashes at any points, n resumes within a data epoch: each sample once, in the same order.

    A life is (world size, steps, steps of them that a crash loses). All that lives share is a state as JSON.
    """
    fixed, pad, drop_last, shuffle = flags
    drop_last = drop_last and length >= size
    history: list[list[int]] = []
    saved = json.dumps(ElasticSampler(length, size, seed=seed, drop_last=drop_last, shuffle=shuffle).state_dict())
    for world, steps, lost in lives:
        ranks = []
        for rank in range(world):
            sampler = ElasticSampler(length, size, seed=seed, drop_last=drop_last, shuffle=shuffle)
            sampler.load_state_dict(json.loads(saved))
            plan = BatchPlan(size, world, micro, fixed, pad)
            ranks.append((sampler, iter(Batches(Numbers(length), sampler, plan, rank))))
        kept = max(0, steps - lost)
        for number in range(steps):
            computed = [(part.number, part.sample_ids) for _, each in ranks for part in next(each).micro_batches]
            if number < kept:
                history.append([sample for _, ids in sorted(computed) for sample in ids])
                saved = json.dumps(ranks[number % world][0].state_dict())
    undisturbed = ElasticSampler(length, size, seed=seed, drop_last=drop_last, shuffle=shuffle)
    assert history == [list(batch.sample_ids) for batch in islice(undisturbed, len(history))]
    per_epoch = undisturbed.batches_per_data_epoch
    for first in range(0, len(history) - per_epoch + 1, per_epoch):
        seen = [sample for step in history[first : first + per_epoch] for sample in step]
        assert len(seen) == len(set(seen)) == (length // size * size if drop_last else length)


def test_data_epochs_end_and_are_counted() -> None:
    """``left`` counts down to the end of the last data epoch, and a second pass begins anew."""
    batches = make(16, 3, 4, 1, data_epochs=2)
    for _ in range(2):
        seen = [batches.left for _ in batches]
        assert seen == [7, 6, 5, 4, 3, 2, 1, 0]
    assert make(16, 1, 4, 0).left is None


def test_loader_leaves_the_global_generator_alone() -> None:
    """Fetching draws nothing from the generators that must run on bit-exactly."""
    before = torch.get_rng_state()
    list(islice(make(16, 1, 4, 0, loader_options={"num_workers": 1}), 2))
    assert torch.equal(torch.get_rng_state(), before)


def test_disagreeing_sizes_and_orders_are_refused() -> None:
    """Nothing starts that would repeat or miss samples."""
    sampler = ElasticSampler(50, 16)
    with pytest.raises(ValueError, match="the sampler deals 16"):
        Batches(Numbers(50), sampler, BatchPlan(8, 1, 4), 0)
    with pytest.raises(ValueError, match="need both"):
        Batches(Numbers(50), sampler, BatchPlan(16, 1, 4), 0, count_tokens=len)

    class Resume:
        step, position = 4, Position(0, 48)

        class manifest:
            order = replace(sampler.order, seed=9)

    with pytest.raises(ValueError, match="seed was 9 and is 0"):
        Batches(Numbers(50), sampler, BatchPlan(16, 1, 4), 0, resume=Resume)
    Resume.manifest.order = sampler.order
    first = next(iter(Batches(Numbers(50), sampler, BatchPlan(16, 1, 4), 0, resume=Resume)))
    assert (first.step, first.position, len(first.sample_ids)) == (5, Position(0, 48), 2)


def test_what_would_change_the_order_is_refused() -> None:
    """Data set and sampler agree on the length, and the DataLoader is told nothing that is decided elsewhere."""
    sampler, plan = ElasticSampler(50, 16), BatchPlan(16, 1, 4)
    with pytest.raises(ValueError, match="the data set has 49 samples, the sampler 50"):
        Batches(Numbers(49), sampler, plan, 0)
    with pytest.raises(ValueError, match="a map-style data set has a length"):
        Batches(Numbers(50), ElasticSampler(None, 16, shuffle=False), plan, 0)
    with pytest.raises(ValueError, match="rank 1 of 1"):
        Batches(Numbers(50), sampler, plan, 1)
    for name in ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "collate_fn", "generator"):
        with pytest.raises(ValueError, match=f"loader_options cannot have '{name}'"):
            Batches(Numbers(50), sampler, plan, 0, loader_options={name: None})


def test_data_sets_that_fetch_together_are_asked_together() -> None:
    """``__getitems__`` is used as torch's own loader uses it."""

    class Together(Numbers):
        def __getitems__(self, indices: list[int]) -> list[Tensor]:
            return [torch.tensor([float(index), -1.0]) for index in indices]

    part = next(iter(next(iter(Batches(Together(50), ElasticSampler(50, 16), BatchPlan(16, 1, 4), 0))).micro_batches))
    assert part.data[:, 1].tolist() == [-1.0] * 4
    assert part.data[:, 0].tolist() == list(part.sample_ids)


@pytest.mark.parametrize(("length", "fixed"), [(50, False), (50, True), (19, False), (19, True)])
def test_padded_micro_batches_have_one_shape_and_count_the_same(length: int, fixed: bool) -> None:
    """All have b rows, real ones first; the gradient is that without padding, from rows or whatever pads hold."""
    for world in (1, 2, 3, 5):
        plain = [iter(make(13, world, 3, rank, length=length, fixed=fixed)) for rank in range(world)]
        padded = [iter(make(13, world, 3, rank, length=length, fixed=fixed, pad=True)) for rank in range(world)]
        rows = BatchPlan(13, world, 3, fixed).micro_batch_size
        for _ in range(length // 13 + 2):
            gradients = []
            for ranks in (plain, padded):
                weight = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
                for rank in ranks:
                    for part in next(rank).micro_batches:
                        inner = weight * part.data[:, 0]
                        assert part.data[: part.n, 0].tolist() == list(part.sample_ids)
                        if ranks is padded:
                            assert part.data.shape == (rows, 2)
                            inner = part.guard(inner) * torch.where(part.mask, 1.0, torch.nan)
                        part.scale(inner.sin()).backward()  # type: ignore[no-untyped-call]
                gradients.append(weight.grad)
            assert torch.allclose(*gradients, rtol=1e-12, atol=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "world", "rank", "real"), [(6, 4, 0, 2), (6, 4, 3, 1), (4, 5, 3, 1), (4, 5, 4, 0)])
def test_rows_that_do_not_count_leave_no_nan(size: int, world: int, rank: int, real: int) -> None:
    """What pads and fillers compute is replaced, forwards and backwards, not multiplied: outputs, losses, means."""
    for part in next(iter(make(size, world, 2, rank, pad=True))).micro_batches:
        rows = part.rows
        assert (part.n, part.filler, rows) == (real, not real, -(-size // world))
        assert part.mask.tolist() == [True] * real + [False] * (rows - real)
        poison = torch.where(part.mask[:, None], 1.0, torch.nan)
        output = torch.ones(rows, 3, dtype=torch.float64, requires_grad=True)
        guarded = part.guard(output, 9.0)
        assert guarded.tolist() == [[1.0] * 3] * real + [[9.0] * 3] * (rows - real)
        losses = (guarded * poison).sum(1)
        assert part.mean(losses).item() == (3.0 if real else 0.0)
        part.scale(losses, [output]).backward()  # type: ignore[no-untyped-call]
        assert output.grad is not None
        wanted = part.loss_scale / max(1, real)
        assert output.grad.tolist() == [[wanted] * 3] * real + [[0.0] * 3] * (rows - real)


def test_a_mean_that_would_count_pads_is_refused() -> None:
    """With padding a scalar cannot be told from a mean over all rows; shapes that are neither are named."""
    part = next(iter(next(iter(make(7, 2, 2, 0, pad=True))).micro_batches))
    with pytest.raises(ValueError, match="give the loss of each row"):
        part.scale(torch.tensor(1.0))
    plain = next(iter(next(iter(make(7, 2, 2, 0))).micro_batches))
    for shape in [(3,), (2, 2)]:
        with pytest.raises(ValueError, match=r"one value for each of 2 rows, not \("):
            plain.scale(torch.ones(shape))
    with pytest.raises(ValueError, match="this micro-batch has 2 rows"):
        plain.guard(torch.ones(3, 2))
    with pytest.raises(ValueError, match="one loss for each of 2 rows"):
        plain.mean(torch.ones(2, 2))
    tokens = make(7, 2, 2, 0, count_tokens=lambda data: 3, reduce=lambda value: 2 * value)
    with pytest.raises(ValueError, match="mean over the micro-batch's real tokens"):
        next(iter(next(iter(tokens)).micro_batches)).scale(torch.ones(2))


def test_padded_token_means_count_real_rows_only() -> None:
    """The counting function gets the mask; a scalar loss is then the mean over real tokens."""
    masks = []

    def count(data: Tensor, mask: Tensor) -> int:
        masks.append(mask.tolist())
        return int(data[mask, 1].sum())

    batch = next(iter(make(5, 2, 2, 1, pad=True, count_tokens=count, reduce=lambda value: value)))
    parts = list(batch.micro_batches)
    assert masks == [part.mask.tolist() for part in parts] == [[True, False], [True, False]]
    assert [part.tokens for part in parts] == [int(part.data[0, 1]) for part in parts]
    assert sum(part.loss_scale for part in parts) == pytest.approx(2.0)
    assert parts[0].scale(torch.tensor(1.0).double()).item() == parts[0].loss_scale


def test_a_shuffled_stream_of_hugging_face_goes_on_in_its_order() -> None:
    """In the middle of a later data epoch. What its `skip` gives there is something else."""
    datasets = pytest.importorskip("datasets")

    def stream() -> Any:
        return datasets.Dataset.from_dict({"n": list(range(20))}).to_iterable_dataset().shuffle(seed=5, buffer_size=8)

    def taken(steps: int, position: Position) -> list[list[int]]:
        sampler = ElasticSampler(None, 4, shuffle=False)
        sampler.seek(position)
        batches = Batches(stream(), sampler, BatchPlan(4, 1, 4), 0, collate=lambda rows: [row["n"] for row in rows])
        return [micro.data for batch, _ in zip(batches, range(steps), strict=False) for micro in batch.micro_batches]

    whole = taken(10, Position())
    assert sorted(chain(*whole[:5])) == sorted(chain(*whole[5:])) == list(range(20))
    assert whole[:5] != whole[5:], "the epochs should have orders of their own"
    assert taken(3, Position(1, 8)) == whole[7:]


class Failing(torch.autograd.Function):
    """Its backward pass fails, as one does that finds no memory."""

    @staticmethod
    def forward(_: Any, values: Tensor) -> Tensor:
        return values * 1.0

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise RuntimeError("out of memory")


def _swallow(batches: Iterator[Any], where: str, steps: int, at: tuple[int, int]) -> None:
    """Trains, and catches the error of one micro-batch, the `at[1]`-th of step `at[0]`."""
    weight = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    for batch in islice(batches, steps):
        for place, micro in enumerate(batch.micro_batches):
            fails = where if (batch.step, place) == at else ""
            with contextlib.suppress(RuntimeError):
                if fails == "forward":
                    raise RuntimeError("out of memory")
                loss = micro.scale(mean_loss(weight * 2.0, micro.data))
                (Failing.apply(weight) * loss if fails == "backward" else loss).backward()
        batch.check_complete()


@pytest.mark.parametrize("where", ["forward", "backward", ""])
def test_an_error_that_the_script_swallows_is_said(where: str, caplog: pytest.LogCaptureFixture) -> None:
    """Once, by step and micro-batch, on the rank that it happens on; nothing where there was no error."""
    _swallow(iter(make(16, 2, 2, 1)), where, 4, (2, 1))
    said = [record.getMessage() for record in caplog.records]
    wanted = ["step 2 has no gradient, or a part of one, from micro-batch 3 of its global batch"] if where else []
    assert [line.partition(":")[0] for line in said] == wanted


@pytest.mark.parametrize("size", [5, 6])
def test_a_step_of_one_micro_batch_whose_backward_fails_is_said(size: int, caplog: pytest.LogCaptureFixture) -> None:
    """With fillers beside it, too, which count for nothing."""
    _swallow(iter(make(size, 4, 4, 0)), "backward", 3, (2, 0))
    assert [record.getMessage()[:35] for record in caplog.records] == ["step 2 has no gradient, or a part o"]


def test_other_ways_to_compute_a_gradient_are_not_blamed(caplog: pytest.LogCaptureFixture) -> None:
    """One backward pass for all; autograd.grad; by the factor alone; several losses; slices without tokens."""

    def sums(losses: list[Tensor], weight: Tensor) -> None:
        sum(losses, torch.zeros(())).backward()  # type: ignore[no-untyped-call]

    def by_function(losses: list[Tensor], weight: Tensor) -> None:
        for loss in losses:
            torch.autograd.grad(loss, weight, retain_graph=True)

    for finish in (sums, by_function):
        for batch in islice(make(16, 2, 4, 0), 3):
            weight = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
            finish([micro.scale(mean_loss(weight, micro.data)) for micro in batch.micro_batches], weight)
            batch.check_complete()
    for batch in islice(make(16, 2, 4, 0), 2):
        weight = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        for micro in batch.micro_batches:
            (mean_loss(weight, micro.data) * micro.loss_scale).backward()  # type: ignore[no-untyped-call]
        batch.check_complete()
    empty = make(16, 2, 4, 0, count_tokens=lambda data: int(data[0, 1] > 2), reduce=lambda value: value)
    for batch in islice(empty, 4):
        for micro in batch.micro_batches:
            if not micro.silent:
                (micro.scale(mean_loss(weight, micro.data)) + micro.scale(weight)).backward()
        batch.check_complete()
    for _ in range(2):
        _swallow(iter(make(16, 2, 4, 0)), "", 2, (0, 0))
    assert caplog.records == []


@pytest.mark.parametrize(
    ("counted", "has"), [(3.7, 0), (torch.tensor(0.9), 0), (float("nan"), 0), (3.0, 3), (torch.tensor(4.0), 4)]
)
def test_weights_that_are_not_whole_are_refused(counted: Any, has: int) -> None:
    """They were cut to whole numbers: 3.7 weighed as much as 3, and 0.9 nothing."""
    batch = next(iter(make(8, 2, 4, 0, count_tokens=lambda data: counted, reduce=lambda value: value)))
    if has:
        assert [part.tokens for part in batch.micro_batches] == [has]
        return
    with pytest.raises(
        ValueError, match=rf"count_tokens returned {float(counted):g}, and counts are whole .*\[37, 9\]"
    ):
        list(batch.micro_batches)
