"""The data of a loop: `Batches` made with the words of torch's ``DataLoader``, and with what the session knows."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from ..data.batches import Batches
from ..data.evaluated_alike import known_length
from ..data.fetching import is_iterable
from ..data.plan import BatchPlan
from ..data.sampler import ElasticSampler
from ..training.session import BareSession

# What people give a DataLoader, and what says it here.
_OTHERWISE = {
    "batch_size": "global_batch= is the samples of one optimizer step of all ranks, micro_batch= of one forward pass",
    "sampler": "samples are dealt to the ranks by the session; shuffle= and seed= say in which order",
    "batch_sampler": "samples are dealt to the ranks by the session; shuffle= and seed= say in which order",
    "generator": "seed= makes the order, alike on all ranks and after each restart",
    "in_order": "batches always come in order",
    "epochs": "data_epochs= says after how many passes over the data the training ends",
    "resume": "the session knows where the data go on",
    "rank": "the session knows the rank",
}


@dataclass(frozen=True)
class DataWish:
    """What a script says of its data, see ``Session.data``."""

    global_batch: int
    micro_batch: int
    seed: int
    shuffle: bool | None
    drop_last: bool
    data_epochs: int | None
    collate_fn: Callable[[list[Any]], Any] | None
    count_tokens: Callable[..., int] | None
    fixed_micro_batch: bool
    pad: bool
    check_data: bool
    loader_options: Mapping[str, Any]


def batches_of(session: BareSession, dataset: Any, wish: DataWish) -> Batches[Any]:
    """The data, from where the run goes on.

    Raises:
        ValueError: See ``Session.data``.
    """
    _check_dataset(dataset)
    _check_options(wish.loader_options)
    sizes = {"global_batch": wish.global_batch, "micro_batch": wish.micro_batch}
    for name, size in sizes.items():
        if _whole(size) is None or size < 1:
            raise ValueError(f"s.data({name}={size!r}): a number of samples is wanted, at least 1")
    if _whole(wish.seed) is None:
        raise ValueError(f"s.data(seed={wish.seed!r}): a whole number is wanted, the same on all ranks")
    if wish.data_epochs is not None and (_whole(wish.data_epochs) is None or wish.data_epochs < 1):
        raise ValueError(f"s.data(data_epochs={wish.data_epochs!r}): a number of passes over the data, at least 1")
    stream = is_iterable(dataset)
    if stream and wish.shuffle:
        raise ValueError(
            "s.data(shuffle=True): an iterable data set has an order of its own; shuffle inside it, with a seed that "
            "is the same on all ranks"
        )
    length = known_length(dataset)
    _check_length(length, wish)
    shuffle = not stream if wish.shuffle is None else bool(wish.shuffle)
    sampler = ElasticSampler(length, wish.global_batch, seed=wish.seed, shuffle=shuffle, drop_last=wish.drop_last)
    return Batches(
        dataset,
        sampler,
        plan_of(session, wish),
        session.rank,
        collate=wish.collate_fn,
        resume=session.resume,
        data_epochs=wish.data_epochs,
        seed=wish.seed,
        count_tokens=wish.count_tokens,
        reduce=None if wish.count_tokens is None else session.sum,
        loader_options=dict(wish.loader_options),
        check_data=wish.check_data,
    )


def plan_of(session: BareSession, wish: DataWish) -> BatchPlan:
    """How batches are dealt in the session's world."""
    return BatchPlan(wish.global_batch, session.world_size, wish.micro_batch, wish.fixed_micro_batch, wish.pad)


def _whole(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _check_dataset(dataset: Any) -> None:
    if isinstance(dataset, DataLoader):
        raise ValueError(
            "s.data wants the data set, not a DataLoader: s.data(loader.dataset, collate_fn=..., num_workers=...)"
        )
    if isinstance(dataset, Batches):
        raise ValueError("these are Batches already: give them to s.steps(batches, state)")
    if isinstance(dataset, Iterator):
        raise ValueError(
            f"s.data wants a data set that can be read again from its beginning, and a {type(dataset).__name__} can "
            "be read once: give what makes it (an IterableDataset, or a list of its samples)"
        )
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
        raise ValueError(f"{type(dataset).__name__} is no data set: it has neither __getitem__ nor __iter__")
    if hasattr(dataset, "__getitem__") and not hasattr(dataset, "__len__") and not is_iterable(dataset):
        raise ValueError(f"{type(dataset).__name__} has no length: give it __len__, or make it an IterableDataset")


def _check_options(options: Mapping[str, Any]) -> None:
    known = set(inspect.signature(DataLoader.__init__).parameters) - {"self", "dataset"}
    for name in options:
        if name in _OTHERWISE:
            raise ValueError(f"s.data({name}=...): {_OTHERWISE[name]}")
        if name not in known:
            raise ValueError(f"s.data({name}=...): neither s.data nor torch's DataLoader has such an option")


def _check_length(length: int | None, wish: DataWish) -> None:
    if length == 0:
        raise ValueError("the data set is empty")
    if length is not None and wish.drop_last and length < wish.global_batch:
        raise ValueError(
            f"the data set has {length} samples, and drop_last=True leaves out all that do not fill a global batch of "
            f"{wish.global_batch}: nothing is left to train on"
        )
