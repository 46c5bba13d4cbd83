"""Compares a few samples: do all ranks have the same data, and are they those of the checkpoint's run? Pure.

A data set in another order (a directory in the system's order, a shuffle without a seed), or from another file, may
have the same length, so nothing else would notice. Ranks would train the same samples, and a restart would repeat some.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .prints import Likeness, likeness

# The most prints that a checkpoint carries.
MOST = 8
ALLOW = "if that is intended, give check_data=False"


class Comparison(NamedTuple):
    """The result of a comparison.

    Attributes:
        likeness: That of the least alike samples.
        text: A message about them; "": nothing to say.
    """

    likeness: Likeness
    text: str = ""


def compared(
    told: Sequence[Mapping[str, Any]], saved: Mapping[str, str], checkpoint: str = "", *, used: str = "trained"
) -> Comparison:
    """Compares what the ranks have seen with each other, and with what a checkpoint says.

    Args:
        told: For each rank ``prints`` by name, and whether some sample ``varies``: then nothing is compared.
        saved: The checkpoint's prints.
        checkpoint: Its name.
        used: What is done with samples, for the message.
    """
    if any(one["varies"] for one in told):
        return Comparison(Likeness.SAME)
    worst = Comparison(Likeness.SAME)
    for name in dict.fromkeys(name for one in told for name in one["prints"]):
        having = [(rank, one["prints"][name]) for rank, one in enumerate(told) if name in one["prints"]]
        first, text = having[0]
        for rank, other in having[1:]:
            how = likeness(text, other)
            if how > worst.likeness:
                worst = Comparison(how, _between_ranks(how, name, (first, rank), used))
        if name in saved and (how := likeness(text, saved[name])) > worst.likeness:
            worst = Comparison(how, _between_starts(how, name, checkpoint))
    return worst


def merged(told: Sequence[Mapping[str, Any]], saved: Mapping[str, str]) -> dict[str, str]:
    """The prints for the next checkpoints: those that the run began with, else those of the first rank that has any."""
    if any(one["varies"] for one in told):
        return dict(saved)
    found: dict[str, str] = {}
    for one in reversed(told):
        found.update(one["prints"])
    both = {**found, **saved}
    return {name: both[name] for name in list(both)[:MOST]}


def _between_ranks(how: Likeness, name: str, ranks: tuple[int, int], used: str) -> str:
    one, other = ranks
    dealing, allow = ("Batches", ALLOW) if used == "trained" else ("the Evaluator", f"{ALLOW} to the Evaluator")
    if how is Likeness.CLOSE:
        return f"{name} is not quite the same on ranks {one} and {other}: do they have other versions of a decoder?"
    return (
        f"the ranks have other data: {name} is not the same on rank {one} and rank {other}, so some samples would be "
        f"{used} twice and others never. Give all ranks the same data set in the same order (sort what a directory "
        f"lists, give a shuffle a seed, leave the dealing to {dealing}); {allow}"
    )


def _between_starts(how: Likeness, name: str, checkpoint: str) -> str:
    if how is Likeness.CLOSE:
        return f"{name} is not quite what it was for {checkpoint}: has a decoder, or how samples are made, changed?"
    return (
        f"these are not the data of {checkpoint}: {name} is another one, so some samples would be trained twice and "
        "others never. Give the data set that the run began with, in its order (sort what a directory lists, give a "
        f"shuffle a seed); {ALLOW}"
    )


def of_a_stream(text: str, *, used: str = "trained") -> str:
    """The message if an iterable data set is not the same on all ranks, nor when it is read once more.

    Args:
        text: What ``compared`` said at first.
        used: What is done with samples.
    """
    return (
        f"{text.partition(',')[0]}, nor when it is read once more: right if samples are augmented at random; where it "
        f"shuffles, give it a seed that all ranks have, else samples are {used} twice or never"
    )
