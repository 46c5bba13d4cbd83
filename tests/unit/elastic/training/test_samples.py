"""A change of a whole tensor is in each sample, however it lies in memory; nothing else is."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dalsegno.elastic.training.samples import MOST_TENSORS, Samples

KINDS: dict[str, Callable[[], Tensor]] = {
    "one value": lambda: torch.tensor(2.0),
    "few": lambda: torch.ones(3, dtype=torch.float64),
    "many": lambda: torch.randn(300, 70),
    "turned": lambda: torch.randn(30, 70).t(),
    "channels last": lambda: torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last),
    "a view": lambda: torch.randn(50, 8)[10:20],
    "bfloat16": lambda: torch.ones(100, dtype=torch.bfloat16),
    "complex": lambda: torch.ones(9, dtype=torch.complex64),
    "a parameter": lambda: torch.nn.Parameter(torch.randn(10, 10)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_of_all_values_is_seen(kind: str) -> None:
    changed, other = KINDS[kind](), torch.randn(5, 5)
    samples = Samples([other, changed])
    for _ in range(20):
        sample = samples.take()
        assert samples.are_as(sample)
        changed.data.mul_(1.5)
        assert not samples.are_as(sample)
    assert samples.are_as(samples.take())


def test_of_very_many_tensors_each_sample_has_some_and_all_have_their_turn() -> None:
    many = [torch.zeros(4) for _ in range(2 * MOST_TENSORS + 5)]
    samples = Samples(many)
    sample = samples.take()
    for tensor in many:
        tensor.add_(1)
    assert not samples.are_as(sample)
    found = 0
    for tensor in random.sample(many, 5):
        for _ in range(200):
            sample = samples.take()
            tensor.add_(1)
            if not samples.are_as(sample):
                found += 1
                break
    assert found == 5


def test_what_has_gaps_or_no_values_is_left_out() -> None:
    gaps, none = torch.zeros(10, 10)[:, :3], torch.zeros(0, 3)
    samples = Samples([gaps, none, torch.zeros(2, device="meta")])
    sample = samples.take()
    gaps.add_(1)
    assert samples.are_as(sample)


def test_the_scripts_generators_are_not_touched() -> None:
    state = random.getstate(), torch.get_rng_state()
    Samples([torch.zeros(100)]).take()
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])


def test_tensors_live_as_long_as_their_samples() -> None:
    tensor = torch.zeros(1000)
    alive, samples = weakref.ref(tensor.untyped_storage()), Samples([tensor])
    sample = samples.take()
    del tensor
    gc.collect()
    assert samples.are_as(sample)
    del samples
    gc.collect()
    assert alive() is None
