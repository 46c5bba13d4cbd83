"""What torch's documents do to a map-style data set in a loader's processes reaches it in the training, too."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset, get_worker_info

from dalsegno.elastic import Batches, BatchPlan, ElasticSampler
from dalsegno.elastic.data.epochs import DataEpoch
from dalsegno.elastic.data.fetching import Fetcher, Maker

from .test_evaluated_alike import Opened, opens


@pytest.mark.timeout(60)
@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_process_that_reads_for_the_training_finds_the_data_set(context: str) -> None:
    """It opens there what each process opens for itself, as for an evaluation."""
    options = {"num_workers": 2, "worker_init_fn": opens, "multiprocessing_context": context}
    sampler, plan = ElasticSampler(20, 10, shuffle=False), BatchPlan(10, 1, 5)
    data: Any = Opened(20, turned=False)
    batches = Batches(data, sampler, plan, 0, data_epochs=1, loader_options=options)
    seen = [len(micro.data) for batch in batches for micro in batch.micro_batches]
    assert seen == [5] * 4
    assert data.shift is None


def opens_as_before(worker: int) -> None:
    """As scripts do that were written for what a loader read in earlier versions."""
    info: Any = get_worker_info()
    found = info.dataset.dataset
    found = found.dataset if isinstance(found, Subset) else found
    found.open()
    found.shift = 100


@pytest.mark.timeout(60)
@pytest.mark.parametrize("context", ["fork", "spawn"])
@pytest.mark.parametrize("part", [False, True])
def test_it_finds_the_data_set_where_it_was_before(context: str, *, part: bool) -> None:
    """A part of a data set is what the script has given, too."""
    options = {"num_workers": 2, "worker_init_fn": opens_as_before, "multiprocessing_context": context}
    sampler, plan = ElasticSampler(20, 10, shuffle=False), BatchPlan(10, 1, 5)
    data: Any = Opened(20, turned=False)
    given = Subset(data, range(20)) if part else data
    batches = Batches(given, sampler, plan, 0, data_epochs=1, loader_options=options)
    seen = [len(micro.data) for batch in batches for micro in batch.micro_batches]
    assert seen == [5] * 4


class Samples(list[Tensor]):
    """A data set whose names are those of what reads it."""

    dataset = _samples = epoch = "its own"


def test_what_reads_a_data_set_has_no_names_of_its_own() -> None:
    """Also as a copy; what is set on it is set there, and nothing of what it reads with is changed."""
    data, maker = Samples(torch.arange(4.0)), Maker[Tensor](None, None)
    made: Any = Fetcher(data, maker, DataEpoch(data))
    for fetcher in (made, pickle.loads(pickle.dumps(made))):
        assert len(fetcher) == 4
        assert fetcher.dataset == fetcher._samples == fetcher.epoch == "its own"
        fetcher.maker = fetcher._together = "set"
        assert (fetcher.maker, fetcher._together) == ("set", "set")
        with pytest.raises(AttributeError):
            _ = fetcher.another
    assert vars(data) == {"maker": "set", "_together": "set"}
