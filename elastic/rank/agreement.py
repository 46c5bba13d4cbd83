"""What must be alike on all ranks of a world, compared before the first step, and at the end where more is known.

A rank with another seed, plan or cadence does not fail by itself: it trains samples that others train too, or waits in
another collective than they do. So all ranks say what they were given, and if that differs all end with the same line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .collective import Collective, OtherThread, PeerLost
from .envelopes import PART, Refusal, Statement, Trouble, Unlike, differences, missing_part

__all__ = ["PART", "Refusal", "Trouble", "Unlike", "agree", "differences", "missing_part"]


def agree(
    collective: Collective,
    alike: Mapping[str, Any],
    problem: str = "",
    *,
    final: bool = True,
    patience_seconds: float | None = None,
) -> None:
    """Compares what the ranks were given. Collective: one gather.

    If one rank brings a problem, all learn of it and none goes on. The others need not have come to compare: whatever
    collective of messages they are in, see `Collective`, it ends on all ranks with this problem.

    Args:
        collective: The session's group.
        alike: What must be alike, by name; plain JSON values. What some rank does not mention is not compared.
        problem: Something that this rank alone has found, because of which no rank may begin.
        final: Another start would find the same problem.
        patience_seconds: What the others may take to come; default: the group's own timeout.

    Raises:
        Unlike: Something differs, or some part of the data belongs to no rank.
        Refusal: Some rank has a problem that is final.
        Trouble: Some rank has a problem that is not final; or others are in another collective.
        PeerLost: A rank ended before it came here. (Each of these is raised on all ranks.)
        OtherThread: This is not the main thread. No rank has ended.
    """
    try:
        collective.meet(Statement(alike, problem, final), patience_seconds=patience_seconds)
    except (OtherThread, Trouble):
        raise
    except RuntimeError as error:
        raise PeerLost(
            f"another rank ended before it came to compare what the ranks were given; its own output says why ({error})"
        ) from error
