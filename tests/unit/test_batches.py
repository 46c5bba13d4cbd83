"""Batches: factors that make the global gradient, fillers that count for nothing, token means, generators."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dalsegno.elastic import Batches, BatchPlan, ElasticSampler, Position, rng, sample_generator


class Numbers(torch.utils.data.Dataset[Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), 1.0 + index % 5], dtype=torch.float64)


def make(size: int, world: int, micro: int, rank: int, length: int = 50, **options: Any) -> Batches[Tensor]:
    plan = BatchPlan(size, world, micro, options.pop("fixed", False))
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


def test_generators_run_on_bit_exactly_from_a_saved_state() -> None:
    """Python, numpy and torch continue as if nothing had happened."""

    def draw() -> tuple[Any, ...]:
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(3).tolist()

    rng.seed_rank(1, 2, 3)
    draw()
    state = rng.capture()
    wanted = draw()
    draw()
    rng.restore(state)
    assert draw() == wanted
    with pytest.raises(ValueError, match="not a saved generator state"):
        rng.restore(b"{}")


def test_seeds_differ_where_they_must() -> None:
    """Ranks, steps, seeds and micro-batches get seeds of their own; a sample's generator knows only the sample."""
    seeds = {
        rng.derive(kind, *parts) for kind in ("rank", "micro-batch") for parts in [(1, 2, 3), (1, 3, 2), (2, 1, 3)]
    }
    assert len(seeds) == 6
    draws = [
        torch.rand(1, generator=sample_generator(1, data_epoch, sample))
        for data_epoch, sample in [(0, 5), (0, 5), (1, 5)]
    ]
    assert draws[0] == draws[1] != draws[2]
    assert math.isfinite(draws[0].item())


def test_fixed_micro_batches_seed_each_one_by_its_number() -> None:
    """Whoever computes a micro-batch draws the same numbers for it."""

    def draws(world: int) -> dict[int, float]:
        found = {}
        for rank in range(world):
            batch = next(iter(make(16, world, 3, rank, fixed=True, seed=8)))
            found.update({p.number: torch.rand(1).item() for p in batch.micro_batches if not p.filler})
        return found

    assert draws(1) == draws(2) == draws(3)
    assert len(set(draws(1).values())) == 6


def test_public_surface_is_pinned() -> None:
    """What ``dalsegno.elastic`` offers, no more and no less, and that each name is there."""
    import dalsegno.elastic as elastic

    assert set(elastic.__all__) == {
        *("EXIT_BAD_CHECKPOINT", "EXIT_DRAINED", "BadResumePoint", "Batch", "BatchPlan", "Batches", "Boundary"),
        *("CheckpointStore", "Drained", "ElasticSampler", "MicroBatch", "Order", "Position", "ResumePoint"),
        *("SaveError", "Session", "sample_generator", "session"),
    }
    for name in elastic.__all__:
        assert getattr(elastic, name) is not None
    assert callable(elastic.session)
    assert (elastic.EXIT_DRAINED, elastic.EXIT_BAD_CHECKPOINT) == (83, 84)
    with pytest.raises(AttributeError):
        _ = elastic.no_such_name
    assert not (Path(elastic.__file__).parent / "session.py").exists(), "would shadow session()"
