"""A look at a few samples of an evaluation's data set, for `same_data`: ranks may have other data of the same length.

It is taken once in a process, by whoever reads these data: this process, or one that the loader starts for it.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from ..rank import rng
from .fetching import begun
from .looking import Inspected, Inspection, look_at, name_of
from .prints import print_of
from .stand_in import StandIn, parts_of

log = logging.getLogger(__name__)

# Seconds for which a look that has found a difference reads more samples at most; and where a leave may wait for it.
PATIENCE_SECONDS, SHORT_PATIENCE_SECONDS = 20.0, 5.0
# How often a sample is read, and for how many seconds at most, at first; how often if that finds a difference.
_AT_ONCE, _OFTEN = (2, 1.0), 12
# So many samples of a stream are looked at, its first ones; and how often they are read once more if they differ.
FIRST, _ONCE_MORE = 3, 4
# Of a rank that has not looked.
NOTHING: Mapping[str, Any] = {"prints": {}, "varies": False}


class EvaluatedSamples:
    """What is known of a map-style data set's samples.

    Args:
        dataset: The data set.
        options: Of the loader that reads it.
    """

    def __init__(self, dataset: Any, options: Mapping[str, Any]) -> None:
        self._dataset, self._options = dataset, options
        self._told: Mapping[str, Any] | None = None

    def told(self, length: int, *, patient: bool, patience_seconds: float = PATIENCE_SECONDS) -> Mapping[str, Any]:
        """What ``same_data.compared`` takes of one rank, as plain values. It raises nothing.

        Args:
            length: Samples of the data set.
            patient: Look more often than before: something differs.
            patience_seconds: For so long at most.
        """
        if self._told is None or patient:
            often = (_OFTEN, patience_seconds) if patient else _AT_ONCE
            look = Inspection(tuple(sorted({0, length // 2, length - 1})), *often)
            try:
                seen = self._look(look) if length else Inspected()
                self._told = {"prints": seen.prints, "varies": seen.varies}
            except Exception as error:  # it comes again when these data are evaluated
                log.debug("the data could not be looked at", exc_info=error)
                # What they hold goes now: an error of a reading process holds itself, and what reads from that process.
                # The collector would find it in the middle of a step, and wait 5 s for the process.
                traceback.clear_frames(error.__traceback__)
                self._told = {"prints": {}, "varies": patient}
        return self._told

    def _look(self, look: Inspection) -> Inspected:
        data = _Looked(self._dataset)
        if not self._options.get("num_workers", 0):
            return data[look]
        # This process must not open anything that its reading processes, which start later, must not share.
        options: dict[str, Any] = {**self._options, "num_workers": 1, "persistent_workers": False}
        generator = torch.Generator().manual_seed(rng.derive("evaluation-look"))
        sampler: Any = [look]
        loader = DataLoader(data, batch_size=None, sampler=sampler, collate_fn=_as_is, generator=generator, **options)
        (seen,) = begun(loader)
        assert isinstance(seen, Inspected)
        return seen


class FirstSamples:
    """What is known of a stream's first samples, which one evaluation has read. It raises nothing.

    Args:
        dataset: The stream.
        samples: As they were read; they are not kept. Without any nothing is known, and nothing read again.
    """

    def __init__(self, dataset: Any, samples: Sequence[Any]) -> None:
        self._dataset, self._number = dataset, len(samples)
        try:
            self._prints, self._all = {name_of(i): print_of(one) for i, one in enumerate(samples)}, print_of([*samples])
        except Exception as error:
            log.debug("the data could not be looked at", exc_info=error)
            self._prints, self._all = {}, ""

    def told(self) -> Mapping[str, Any]:
        """As ``EvaluatedSamples.told``: what was read."""
        return {"prints": self._prints, "varies": False}

    def told_again(self, patience_seconds: float) -> Mapping[str, Any]:
        """The same, and whether it is another one where the stream is read from its beginning again, several times.

        Args:
            patience_seconds: After so many no reading is begun.
        """
        if not self._prints:
            return NOTHING
        look = Inspection((0,), _ONCE_MORE, patience_seconds)
        seen = look_at(self._dataset, lambda _: [*islice(iter(self._dataset), self._number)], look)
        # What cannot be read again is not known to be the same each time.
        return {"prints": self._prints, "varies": seen.prints != {name_of(0): self._all}}


class _Looked(StandIn[Inspected]):
    """A data set that is asked for looks."""

    def __getitem__(self, look: Inspection) -> Inspected:
        dataset, _ = parts_of(self)
        return look_at(dataset, dataset.__getitem__, look)


def _as_is(data: Any) -> Any:
    return data
