"""Random numbers: generators that go on across saves, and data that depend on the seed, not on the world."""

from __future__ import annotations

import json
import math
import random
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dalsegno.elastic import Batches, BatchPlan, ElasticSampler, sample_generator
from dalsegno.elastic.data import looking
from dalsegno.elastic.rank import rng

from ..training.test_unsaved import opened
from .test_batches import Numbers, make


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


class Devices:
    """The generators of two GPUs where there is none: as many states as torch has, and who asked for which."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, current: int) -> None:
        self.states = [torch.full((16,), 10 + device, dtype=torch.uint8) for device in range(2)]
        self.current: int | None = current
        # Those that the process uses.
        self.used = {current}
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.states))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.bound)
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda number: number in self.used, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: self.current is not None)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.current is not None)
        monkeypatch.setattr(torch.cuda, "get_rng_state", self.get)
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set)

    def get(self, device: int | None = None) -> Tensor:
        return self.states[self.bound if device is None else device].clone()

    def set(self, state: Tensor, device: int | None = None) -> None:
        self.states[self.bound if device is None else device] = state.clone()

    @property
    def bound(self) -> int:
        assert self.current is not None, "there is none"
        return self.current


def test_of_the_devices_only_the_bound_one_has_its_generator_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks train on the others. Whoever loads it may be bound to another one, or to none."""
    Devices(monkeypatch, current=1)
    state = rng.capture()
    assert json.loads(state)["cuda"] == bytes([11] * 16).hex()
    there = Devices(monkeypatch, current=0)
    there.states = [torch.zeros(16, dtype=torch.uint8) for _ in range(2)]
    rng.restore(state)
    assert [int(held[0]) for held in there.states] == [11, 0]
    there.current = None
    rng.restore(state)
    assert "cuda" not in json.loads(rng.capture())


def drawn(devices: Devices) -> list[int]:
    """As draws and seeds change the states."""
    found = [int(state[0]) for state in devices.states]
    devices.states = [state + 1 for state in devices.states]
    return found


def test_a_script_that_binds_no_device_draws_on_where_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """`model.to(rank)` alone, as torch's own tutorial had it: the current device is the first one all the time."""
    devices = Devices(monkeypatch, current=0)
    devices.used = {0, 1}
    state = rng.capture()
    wanted = drawn(devices)
    drawn(devices)
    rng.restore(state)
    assert drawn(devices) == wanted


def test_generators_of_devices_that_are_not_there_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch, current=0)
    devices.used = {0, 1}
    state = rng.capture()
    alone = Devices(monkeypatch, current=0)
    alone.states = [torch.zeros(16, dtype=torch.uint8)]
    rng.restore(state)
    assert drawn(alone) == [10]
    # Whoever is bound to a device that another number had: its own state counts.
    other = Devices(monkeypatch, current=1)
    rng.restore(state)
    assert drawn(other) == [10, 10]


def test_samples_that_are_looked_at_leave_the_generators_of_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are read before the training begins; a data set may draw where the script trains."""
    devices = Devices(monkeypatch, current=0)
    devices.used = {1}
    with looking._kept([]):
        drawn(devices)
    assert drawn(devices) == [10, 11]


def test_an_older_state_has_the_bound_devices_generator_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch, current=1)
    devices.used = {0, 1}
    older = json.loads(rng.capture())
    del older["cards"]
    drawn(devices)
    rng.restore(json.dumps(older).encode())
    assert drawn(devices) == [11, 11]


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


class Augmented(Numbers):
    """Adds noise from every global generator, as augmentations do."""

    def __getitem__(self, index: int) -> Tensor:
        noise = random.random() + np.random.rand() + torch.rand(1).item()
        return super().__getitem__(index) + noise


def masked(samples: list[Tensor]) -> Tensor:
    """A collate function that draws, as those of masked language models do."""
    data = torch.stack(samples)
    return data * (torch.rand(data.shape) + random.random() + np.random.rand())


@pytest.mark.slow
def test_random_data_are_the_same_at_every_world_size() -> None:
    """With fixed micro-batches augmentation and collate depend on seed, data epoch and samples; nothing else draws."""

    def history(world: int, workers: int = 0) -> list[dict[int, Any]]:
        found: list[dict[int, Any]] = [{} for _ in range(5)]
        plan = BatchPlan(16, world, 3, fixed_micro_batch=True)
        for rank in range(world):
            sampler = ElasticSampler(40, 16, seed=4)
            options = {"num_workers": workers}
            data = Batches(
                Augmented(40), sampler, plan, rank, collate=masked, seed=8, data_epochs=2, loader_options=options
            )
            for step, batch in enumerate(islice(data, 5)):
                for part in batch.micro_batches:
                    if not part.filler:
                        found[step][part.number] = part.data.tolist()
        return found

    rng.seed_all(1)
    before = rng.capture()
    with rng.aside("anything"):
        random.random(), np.random.rand(), torch.rand(1)
    assert rng.capture() == before
    alone = history(1)
    assert history(3) == alone
    assert history(2, workers=2) == alone


def test_augmentation_is_drawn_anew_in_each_data_epoch() -> None:
    """The same sample, the same seed, another data epoch: other noise."""
    plan = BatchPlan(40, 1, 40, fixed_micro_batch=True)
    batches = Batches(Augmented(40), ElasticSampler(40, 40, shuffle=False), plan, 0, seed=8, data_epochs=2)
    first, second = (part.data[:, 0] - torch.arange(40.0) for batch in batches for part in batch.micro_batches)
    assert not set(first.tolist()) & set(second.tolist())
    assert len(set(first.tolist())) == 40


@pytest.mark.parametrize("around", [False, True])
def test_what_was_fetched_ahead_is_drawn_anew_behind_a_resume(tmp_path: Path, around: bool) -> None:
    """Behind `enumerate` the loop fetches a batch ahead, whose draws are in no checkpoint; all others are the same."""

    def trained(directory: Path, until: int) -> list[list[float]]:
        seen = []
        rng.seed_all(1)
        with opened(directory) as session:
            sampler, plan = ElasticSampler(40, 4, seed=4), BatchPlan(4, 1, 4)
            batches = Batches(Augmented(40), sampler, plan, 0, resume=session.resume)
            data: Any = enumerate(batches) if around else batches
            loop = session.steps(data, max_steps=6, save=lambda path: path.joinpath("x").touch(), save_every=1, seed=5)
            for given in loop:
                batch = given[1] if around else given
                if batch.step > until:
                    break
                (part,) = batch.micro_batches
                seen.append([*part.data[:, 0].tolist(), random.random()])
        return seen

    whole = trained(tmp_path / "whole", 6)
    resumed = trained(tmp_path / "resumed", 3) + trained(tmp_path / "resumed", 6)
    assert [one == other for one, other in zip(whole, resumed, strict=True)] == [True] * 3 + [not around, True, True]
    # The training's own draws are.
    assert [one[-1] for one in whole] == [other[-1] for other in resumed]
