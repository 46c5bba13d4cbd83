"""A look at a few samples of an evaluation's data set, for `same_data`: ranks may have other data of the same length.

It is taken once in a process, by whoever reads these data: this process, or one that the loader starts for it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from ..rank import rng
from .fetching import begun
from .looking import Inspected, Inspection, look_at

log = logging.getLogger(__name__)

# How often a sample is read, and for how many seconds at most; the second pair if a look finds a difference.
_AT_ONCE, _PATIENT = (2, 1.0), (12, 20.0)
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

    def told(self, length: int, *, patient: bool) -> Mapping[str, Any]:
        """What ``same_data.compared`` takes of one rank, as plain values. It raises nothing.

        Args:
            length: Samples of the data set.
            patient: Look more often than before: something differs.
        """
        if self._told is None or patient:
            look = Inspection(tuple(sorted({0, length // 2, length - 1})), *(_PATIENT if patient else _AT_ONCE))
            try:
                seen = self._look(look) if length else Inspected()
                self._told = {"prints": seen.prints, "varies": seen.varies}
            except Exception as error:  # it comes again when these data are evaluated
                log.debug("the data could not be looked at", exc_info=error)
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


class _Looked(Dataset[Inspected]):
    """A data set that is asked for looks."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, look: Inspection) -> Inspected:
        return look_at(self._dataset, self._dataset.__getitem__, look)


def _as_is(data: Any) -> Any:
    return data
