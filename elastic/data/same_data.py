"""Whether all ranks have the same data, and those that the checkpoint's run had: a few samples say so. Pure.

A data set in another order (a directory as the system lists it, a shuffle without a seed), or of another file, has the
same length, so nothing else would tell. Ranks would train the same samples, and a new start would train some again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .prints import Likeness, likeness

# Prints that a checkpoint carries.
MOST = 8
ALLOW = "where that is meant, say check_data=False"


class Found(NamedTuple):
    """What a comparison came to.

    Attributes:
        likeness: That of the samples that are the least alike.
        text: What is said of them; "": nothing.
    """

    likeness: Likeness
    text: str = ""


def compared(told: Sequence[Mapping[str, Any]], saved: Mapping[str, str], checkpoint: str = "") -> Found:
    """Compares what the ranks have seen with each other, and with what a checkpoint says.

    Args:
        told: Of each rank ``prints`` by name, and whether some sample ``varies``: then nothing is compared.
        saved: The checkpoint's prints.
        checkpoint: Its name.
    """
    if any(one["varies"] for one in told):
        return Found(Likeness.SAME)
    worst = Found(Likeness.SAME)
    for name in dict.fromkeys(name for one in told for name in one["prints"]):
        having = [(rank, one["prints"][name]) for rank, one in enumerate(told) if name in one["prints"]]
        first, text = having[0]
        for rank, other in having[1:]:
            how = likeness(text, other)
            if how > worst.likeness:
                worst = Found(how, _between_ranks(how, name, first, rank))
        if name in saved and (how := likeness(text, saved[name])) > worst.likeness:
            worst = Found(how, _between_starts(how, name, checkpoint))
    return worst


def merged(told: Sequence[Mapping[str, Any]], saved: Mapping[str, str]) -> dict[str, str]:
    """What the next checkpoints say: what the run began with, and else what the first rank that has it says."""
    if any(one["varies"] for one in told):
        return dict(saved)
    found: dict[str, str] = {}
    for one in reversed(told):
        found.update(one["prints"])
    both = {**found, **saved}
    return {name: both[name] for name in list(both)[:MOST]}


def _between_ranks(how: Likeness, name: str, one: int, other: int) -> str:
    if how is Likeness.CLOSE:
        return f"{name} is not quite the same on ranks {one} and {other}: do they have other versions of a decoder?"
    return (
        f"the ranks have other data: {name} is not the same on rank {one} and rank {other}, so some samples would be "
        "trained twice and others never. Give all ranks the same data set in the same order (sort what a directory "
        f"lists, give a shuffle a seed, leave the dealing to Batches); {ALLOW}"
    )


def _between_starts(how: Likeness, name: str, checkpoint: str) -> str:
    if how is Likeness.CLOSE:
        return f"{name} is not quite what it was for {checkpoint}: has a decoder, or how samples are made, changed?"
    return (
        f"these are not the data of {checkpoint}: {name} is another one, so some samples would be trained twice and "
        "others never. Give the data set that the run began with, in its order (sort what a directory lists, give a "
        f"shuffle a seed); {ALLOW}"
    )


def of_a_stream(text: str) -> str:
    """What is said where an iterable data set is not the same on all ranks, nor when it is read once more."""
    return (
        f"{text.partition(',')[0]}, nor when it is read once more: right if samples are augmented at random; where it "
        "shuffles, give it a seed that all ranks have, else samples are trained twice or never"
    )
