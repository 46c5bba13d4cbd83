"""A look at a few samples before the first step, by the process that reads the data in training, for `same_data`.

Each sample is read more than once with different seeds, which are the same on all ranks and in all starts. If two
readings of a sample differ, the sample is random, and is not compared.
"""

from __future__ import annotations

import logging
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ..rank import rng
from ..rank.contexts import cards_in_use
from .prints import print_of

log = logging.getLogger(__name__)

# How deep a data set, and how many items of one container, are searched for its own random generators.
_DEPTH, _ITEMS = 6, 64


@dataclass(frozen=True)
class Inspection:
    """What to look at, sent in place of a micro-batch.

    Attributes:
        sample_ids: Which samples of a map-style data set to look at; of an iterable one the first are read.
        reads: How often each is read.
        seconds: After so many seconds no further sample is begun.
        data_epoch: The data epoch of the samples; 0 if they are the same in all.
    """

    sample_ids: tuple[int, ...]
    reads: int
    seconds: float
    data_epoch: int = 0


@dataclass
class Inspected:
    """What was found.

    Attributes:
        prints: Prints by name of the samples that are the same in each reading.
        draws: The data set draws random numbers while it makes a sample.
        varies: Some sample was not the same in each reading; then no print is kept.
        own: Such a sample drew from a generator of its own, because no known one had moved.
    """

    prints: dict[str, str] = field(default_factory=dict)
    draws: bool = False
    varies: bool = False
    own: bool = False


def name_of(sample: int, data_epoch: int = 0) -> str:
    """A sample's name, for people and in manifests."""
    return f"sample {sample}" + (f" of data epoch {data_epoch}" if data_epoch else "")


def look_at(dataset: Any, read: Callable[[int], Any], look: Inspection) -> Inspected:
    """Looks at samples, and leaves all known random generators as they were.

    Args:
        dataset: The data set, whose own generators are restored.
        read: Reads one of its samples.
        look: Which samples.
    """
    seen, until = Inspected(), time.monotonic() + look.seconds
    with _kept(dataset):
        for index in look.sample_ids:
            found = set()
            for reading in range(look.reads):
                if time.monotonic() > until:
                    return seen
                try:
                    with rng.aside("look", index, reading):
                        before = rng.cpu_state()
                        found.add(print_of(read(index)))
                        seen.draws |= not _same(before, rng.cpu_state())
                except Exception as error:  # it comes again when the training reads that sample
                    log.debug("sample %d could not be looked at", index, exc_info=error)
                    return seen
            if len(found) > 1:
                return Inspected(draws=True, varies=True, own=not seen.draws)
            seen.prints[name_of(index, look.data_epoch)] = found.pop()
    return seen


def _same(one: tuple[Any, torch.Tensor, Any], other: tuple[Any, torch.Tensor, Any]) -> bool:
    if one[0] != other[0] or not torch.equal(one[1], other[1]):
        return False
    if one[2] is None or other[2] is None:
        return one[2] is other[2]
    return one[2][2] == other[2][2] and bool((one[2][1] == other[2][1]).all())


@contextmanager
def _kept(dataset: Any) -> Iterator[None]:
    """Restores the data set's own generators and those of the cards, so that training begins with them unchanged."""
    states: list[tuple[Callable[[Any], Any], Any]] = [_state_of(found) for found in _generators(dataset, 0, set())]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for card in {torch.cuda.current_device(), *cards_in_use()}:
            states.append((partial(torch.cuda.set_rng_state, device=card), torch.cuda.get_rng_state(card)))
    try:
        yield
    finally:
        for put_back, state in states:
            put_back(state)


def _state_of(generator: Any) -> tuple[Callable[[Any], Any], Any]:
    if isinstance(generator, torch.Generator):
        return generator.set_state, generator.get_state()
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    bits = getattr(generator, "bit_generator", None)
    if bits is None:
        return generator.set_state, generator.get_state()

    def put_back(state: Any) -> None:
        bits.state = state

    return put_back, bits.state


def _generators(thing: Any, depth: int, known: set[int]) -> Iterator[Any]:
    """Random generators that a data set holds, itself or in its parts (another data set, a transform)."""
    if depth > _DEPTH or id(thing) in known:
        return
    known.add(id(thing))
    numpy = sys.modules.get("numpy")
    kinds: tuple[type, ...] = (torch.Generator, random.Random)
    if numpy is not None:
        kinds = (*kinds, numpy.random.Generator, numpy.random.RandomState)
    if isinstance(thing, kinds):
        if type(thing) is not random.SystemRandom:
            yield thing
        return
    if isinstance(thing, Mapping | list | tuple):
        items = thing.values() if isinstance(thing, Mapping) else thing
        inside = [item for item, _ in zip(items, range(_ITEMS), strict=False)]
    else:
        inside = list(getattr(thing, "__dict__", {}).values())
    for item in inside:
        if not isinstance(item, torch.Tensor | str | bytes | int | float | type | None):
            yield from _generators(item, depth + 1, known)
