"""What torch's documents do to a map-style data set in a loader's processes reaches it in the training, too."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

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
