"""Ranks that evaluate together must have the same data: compared before the first batch, and of a stream before each.

Each rank deals the samples by itself. With another length it would measure some that another rank measures too, leave
others out, and go to another collective than the others where its batches end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..rank.envelopes import Refusal, Statement, Trouble, Unlike, judge
from ..rank.meetings import is_mistake
from ..rank.remarks import remark
from .counts import gather_over_ranks, max_over_ranks, world_size_of
from .evaluated_samples import FIRST, NOTHING, PATIENCE_SECONDS, EvaluatedSamples, FirstSamples
from .fetching import is_iterable
from .prints import Likeness
from .same_data import compared, of_a_stream

# The name under which a length is compared; None: it is not known.
LENGTH = "length of the data set"
_UNLIKE = "the ranks do not evaluate alike"


def compare(
    tell: Callable[[], Mapping[str, Any]],
    device: torch.device,
    samples: EvaluatedSamples | None = None,
    *,
    problem: str = "",
    busy: Callable[[], None] = lambda: None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Mapping[str, Any]:
    """Compares what the ranks evaluate. Collective over the default group: one gather; none if there is one rank.

    Args:
        tell: Returns what must be alike, by name: plain JSON values. If it fails on one rank, all learn of it.
        device: As of ``Counts``.
        samples: Of the data set whose length ``tell`` says: a few are compared, too. Then a second gather follows if
            they differ.
        problem: Why this rank may not evaluate; "": there is no reason. All learn of it.
        busy: Called before and behind each look at them.
        patience_seconds: As of ``EvaluatedSamples.told``.

    Returns:
        What ``tell`` has returned.

    Raises:
        Unlike: A ValueError: something differs.
        Refusal: A ValueError: ``tell`` has failed on some rank, or it has a problem.
        Trouble: A RuntimeError: the same, and another start may succeed. (Each of these is raised on all ranks.)
    """
    if world_size_of() == 1:
        return tell()
    told, failed = dict[str, Any](), None
    try:
        told.update(tell())
    except Exception as error:  # raised below, on all ranks
        failed = error
    if failed is not None:
        why = f"{type(failed).__name__}: {' '.join(str(failed).split())}"
        problem = f"what is to be evaluated cannot say its length: {why}"

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


def known_length(dataset: Any) -> int | None:
    """Samples of a data set of the training; None: nobody knows."""
    stream = is_iterable(dataset)
    return length_of(dataset, stream=stream) if stream or hasattr(dataset, "__len__") else None


class ReadTogether:
    """Where the ranks' readings of a stream stand. All of them come to `meet` together, or have come to its end.

    Args:
        device: As of ``Counts``.
        dataset: The stream, whose first samples are compared; None: this rank does not show its own.
        rank: This rank's number; the first one speaks.
        busy, patience_seconds: As of `compare`, for a look at samples that differ.

    Attributes:
        varies: Some rank's first samples were other ones when they were read again. On all ranks alike.
    """

    def __init__(
        self,
        device: torch.device,
        dataset: Any = None,
        rank: int = 0,
        busy: Callable[[], None] = lambda: None,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self._samples, self._device = 0, device
        self._dataset, self._rank, self._busy, self._patience = dataset, rank, busy, patience_seconds
        self._first: FirstSamples | None = None
        self._compared = False
        # What is said of them, if they are not the same on all ranks. On all ranks alike.
        self._unlike = ""
        self.varies = False

    def read(self, samples: Sequence[Any]) -> None:
        """This rank has read these, one at least."""
        if not self._samples and world_size_of() > 1:
            self._first = FirstSamples(self._dataset, () if self._dataset is None else samples[:FIRST])
        self._samples += len(samples)

    def meet(self, *, end: bool) -> None:
        """Compares how much has been read, and what at first. Called before each batch, and at the end.

        Collective over the default group: one reduction of two numbers; where they differ `compare` follows, which says
        who has read what. Before the first batch one gather more, and at the end a second one if the samples differed:
        then each rank reads its first ones again. Earlier that would move a stream that has only one place.

        Args:
            end: This rank has read all.

        Raises:
            Unlike: It is not the same; of the first samples it is raised at the end. On all ranks.
        """
        number = 2 * self._samples + end
        most, least = max_over_ranks([number, -number], self._device)
        # All ranks see the same here, so they go on to the same collective.
        if most != -least:
            read = f"{self._samples} (its end)" if end else str(self._samples)
            compare(lambda: {"number of samples read of the iterable data set": read}, self._device)
        if self._first is not None and not self._compared:
            self._compared = True
            found = compared(gather_over_ranks(self._first.told(), self._device), {}, used="measured")
            self._unlike = found.text if found.likeness is Likeness.OTHER else ""
        if end and self._first is not None and self._unlike:
            self._compare_again(self._first)

    def _compare_again(self, first: FirstSamples) -> None:
        self._busy()
        again = first.told_again(self._patience)
        self._busy()
        if compared(gather_over_ranks(again, self._device), {}, used="measured").likeness is Likeness.OTHER:
            raise Unlike(self._unlike)
        self.varies = True
        if self._rank == 0:
            remark("%s", of_a_stream(self._unlike, used="measured"))
