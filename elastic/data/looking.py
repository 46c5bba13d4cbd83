"""A look at a few samples before the first step, by the process that reads the data in training, for `same_data`.

Each sample is read more than once with different seeds, which are the same on all ranks and in all starts. If two
readings of a sample differ, the sample is random, and is not compared.
"""

from __future__ import annotations

import copy
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..rank import rng
from .prints import print_of
from .untouched import kept, kept_whole, states_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Inspection:
    """What to look at, sent in place of a micro-batch.

    Attributes:
        sample_ids: Which samples of a map-style data set to look at; of an iterable one the first are read.
        reads: How often each is read.
        seconds: After so many seconds no further sample is begun.
        data_epoch: The data epoch of the samples; 0 if they are the same in all.
        rows: How many samples the collate function is given.
    """

    sample_ids: tuple[int, ...]
    reads: int
    seconds: float
    data_epoch: int = 0
    rows: int = 1


@dataclass
class Inspected:
    """What was found.

    Attributes:
        prints: Prints by name of the samples that are the same in each reading.
        draws: The data set draws random numbers while it makes a sample.
        varies: Some sample was not the same in each reading; then no print is kept.
        own: Such a sample drew from a generator of its own, because no known one had moved.
        collate_draws: The collate function draws random numbers from global generators.
        collate_own: It draws from a generator of its own.
    """

    prints: dict[str, str] = field(default_factory=dict)
    draws: bool = False
    varies: bool = False
    own: bool = False
    collate_draws: bool = False
    collate_own: bool = False


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
    with kept(dataset):
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


def look_at_collate(collate: Callable[[list[Any]], Any], samples: list[Any], rows: int, seen: Inspected) -> None:
    """Lets a collate function work twice, on copies and with the same seed, and leaves it as it was.

    Args:
        collate: The function.
        samples: Samples of the data set; none: nothing is looked at.
        rows: How many it is given.
        seen: What it draws is noted there.
    """
    try:
        with kept_whole(collate):
            found = set()
            for _ in range(2 if samples else 0):
                # Some take apart what they are given, which the data set may hold.
                given = [copy.deepcopy(sample) for sample in itertools.islice(itertools.cycle(samples), rows)]
                with rng.aside("look at the collate function"):
                    before = rng.cpu_state()
                    made = print_of(collate(given))
                    seen.collate_draws |= not _same(before, rng.cpu_state())
                # A generator of its own that it seeds for each micro-batch is in the same state after both.
                found.add((made, states_of(collate)))
            seen.collate_own = len(found) > 1
    except Exception as error:  # it comes again when the training makes a micro-batch
        log.debug("the collate function could not be looked at", exc_info=error)


def _same(one: tuple[Any, torch.Tensor, Any], other: tuple[Any, torch.Tensor, Any]) -> bool:
    if one[0] != other[0] or not torch.equal(one[1], other[1]):
        return False
    if one[2] is None or other[2] is None:
        return one[2] is other[2]
    return one[2][2] == other[2][2] and bool((one[2][1] == other[2][1]).all())
