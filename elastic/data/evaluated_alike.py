"""Ranks that evaluate together must have the same data: compared before the first batch, and of a stream before each.

Each rank deals the samples by itself. With another length it would measure some that another rank measures too, leave
others out, and go to another collective than the others where its batches end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..rank.envelopes import Refusal, Statement, Trouble, Unlike, judge
from ..rank.meetings import is_mistake
from .counts import gather_over_ranks, max_over_ranks, world_size_of
from .evaluated_samples import NOTHING, PATIENCE_SECONDS, EvaluatedSamples
from .prints import Likeness
from .same_data import compared

# The name under which a length is compared; None: it is not known.
LENGTH = "length of the data set"
_UNLIKE = "the ranks do not evaluate alike"


def compare(
    tell: Callable[[], Mapping[str, Any]],
    device: torch.device,
    samples: EvaluatedSamples | None = None,
    *,
    busy: Callable[[], None] = lambda: None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Mapping[str, Any]:
    """Compares what the ranks evaluate. Collective over the default group: one gather; none if there is one rank.

    Args:
        tell: Returns what must be alike, by name: plain JSON values. If it fails on one rank, all learn of it.
        device: As of ``Counts``.
        samples: Of the data set whose length ``tell`` says: a few are compared, too. Then a second gather follows if
            they differ.
        busy: Called before and behind each look at them.
        patience_seconds: As of ``EvaluatedSamples.told``.

    Returns:
        What ``tell`` has returned.

    Raises:
        Unlike: A ValueError: something differs.
        Refusal: A ValueError: ``tell`` has failed on some rank.
        Trouble: A RuntimeError: the same, and another start may succeed. (Each of these is raised on all ranks.)
    """
    if world_size_of() == 1:
        return tell()
    told, failed = dict[str, Any](), None
    try:
        told.update(tell())
    except Exception as error:  # raised below, on all ranks
        failed = error
    problem = "" if failed is None else f"{type(failed).__name__}: {' '.join(str(failed).split())}"
    if problem:
        problem = f"what is to be evaluated cannot say its length: {problem}"

    def seen(*, patient: bool) -> Mapping[str, Any]:
        length = told.get(LENGTH)
        if samples is None or length is None:
            return NOTHING
        busy()
        found = samples.told(length, patient=patient, patience_seconds=patience_seconds)
        busy()
        return found

    said = {"alike": told, "problem": problem, "final": failed is None or is_mistake(failed)}
    answers = gather_over_ranks({**said, "samples": seen(patient=False)}, device)
    try:
        judge([Statement(one["alike"], one["problem"], one["final"]) for one in answers], _UNLIKE)
    except (Refusal, Trouble) as refused:
        raise refused from failed
    found = compared([answer["samples"] for answer in answers], {}, used="measured")
    if found.likeness is Likeness.OTHER:
        found = compared(gather_over_ranks(seen(patient=True), device), {}, used="measured")
    if found.likeness is Likeness.OTHER:
        raise Unlike(found.text)
    return told


def length_of(dataset: Any, *, stream: bool) -> int | None:
    """Samples of a data set; None: a stream that does not know, or cannot say.

    Raises:
        Exception: Whatever the data set raises, if it is no stream.
    """
    if not stream:
        return len(dataset)
    try:
        return len(dataset) if hasattr(dataset, "__len__") else None
    except Exception:  # nobody needs it to read a stream
        return None


class ReadTogether:
    """Where the ranks' readings of a stream stand. All of them come to `meet` together, or have come to its end.

    Args:
        device: As of ``Counts``.

    Attributes:
        samples: What this rank has read of it.
    """

    def __init__(self, device: torch.device) -> None:
        self.samples, self._device = 0, device

    def meet(self, *, end: bool) -> None:
        """Compares how much has been read. Called before each batch, and at the end.

        Collective over the default group: one reduction of two numbers; where they differ `compare` follows, which says
        who has read what.

        Args:
            end: This rank has read all.

        Raises:
            Unlike: It is not the same. On all ranks.
        """
        number = 2 * self.samples + end
        most, least = max_over_ranks([number, -number], self._device)
        # All ranks see the same here, so they go on to the same collective.
        if most == -least:
            return
        read = f"{self.samples} (its end)" if end else str(self.samples)
        compare(lambda: {"number of samples read of the iterable data set": read}, self._device)
