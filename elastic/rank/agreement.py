"""What must be alike on all ranks of a world, compared once, before the first step.

A rank with another seed, plan or cadence does not fail by itself: it trains samples that others train too, or waits in
another collective than they do. So all ranks say what they were given, and if that differs all end with the same line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .collective import Collective, OtherThread, PeerLost

PART = "part"
"""Under this name a rank says ``[number, of]``: which part of each global batch is its own, and of how many parts."""
# How many values of one thing, ranks of one value, and differing things the line names at most.
FEW = 4


class Refusal(ValueError):
    """No rank may train this, and another start would end the same way. Raised on all ranks, with the same line."""


class Unlike(Refusal):
    """The ranks were not started alike."""


class Trouble(RuntimeError):
    """Some rank cannot begin, but another start may succeed. Raised on all ranks, with the same line."""


def agree(
    collective: Collective,
    alike: Mapping[str, Any],
    problem: str = "",
    *,
    final: bool = True,
    patience_seconds: float | None = None,
) -> None:
    """Compares what the ranks were given. Collective: one gather.

    If one rank brings a problem to such a meeting of all ranks, all learn of it and none goes on. It need not be the
    same meeting for all: a rank may bring its problem to the next one that the others come to.

    Args:
        collective: The session's group.
        alike: What must be alike, by name; plain JSON values. What some rank does not mention is not compared.
        problem: Something that this rank alone has found, because of which no rank may begin.
        final: Another start would find the same problem.
        patience_seconds: What the others may take to come; default: the group's own timeout.

    Raises:
        Unlike: Something differs, or some part of the data belongs to no rank.
        Refusal: Some rank has a problem that is final.
        Trouble: Some rank has a problem that is not final.
        PeerLost: A rank ended before it came here. (Each of these is raised on all ranks.)
        OtherThread: This is not the main thread. No rank has ended.
    """
    said = {"alike": dict(alike), "problem": problem, "final": final}
    try:
        answers = (
            collective.gather(said)
            if patience_seconds is None
            else collective.gather(said, patience_seconds=patience_seconds)
        )
    except OtherThread:
        raise
    except RuntimeError as error:
        raise PeerLost(f"another rank ended before the first step; its own output says why ({error})") from error
    told = [answer["alike"] for answer in answers]
    wrong = differences(told)
    if wrong:
        more = f"; and {len(wrong) - FEW} more" if len(wrong) > FEW else ""
        raise Unlike(f"the ranks were not started alike: {'; '.join(wrong[:FEW])}{more}. Give all ranks the same")
    if (missing := missing_part(told)) is not None:
        raise Unlike(missing)
    problems = [(rank, answer) for rank, answer in enumerate(answers) if answer["problem"]]
    if problems:
        # If there are several problems, prefer one that no restart mends.
        rank, answer = min(problems, key=lambda one: not one[1]["final"])
        line = f"{answer['problem']} (rank {rank})" if len(answers) > 1 else answer["problem"]
        raise Refusal(line) if answer["final"] else Trouble(line)


def differences(told: Sequence[Mapping[str, Any]]) -> list[str]:
    """What differs, with its values and on which ranks.

    Args:
        told: What each rank was given, in order of the ranks.
    """
    names = [name for name in told[0] if name != PART and all(name in one for one in told)]
    return [
        _difference(name, [one[name] for one in told])
        for name in names
        if any(one[name] != told[0][name] for one in told)
    ]


def missing_part(told: Sequence[Mapping[str, Any]]) -> str | None:
    """A message if the ranks' parts together are not the whole of every global batch, each part equally often."""
    parts = [one[PART] for one in told if one.get(PART) is not None]
    if len(parts) < len(told):
        return None
    of = parts[0][1]
    count = Counter(number for number, _ in parts)
    if all(part[1] == of for part in parts) and set(count) == set(range(of)) and len(set(count.values())) == 1:
        return None
    has = "; ".join(f"rank {rank} has {number} of {total}" for rank, (number, total) in enumerate(parts[:FEW]))
    more = f"; and {len(parts) - FEW} ranks more" if len(parts) > FEW else ""
    return (
        f"the ranks' parts are not the whole of a global batch: {has}{more} (counted from 0). Give each rank its own "
        "number and the world's size, s.rank and s.world_size"
    )


def _difference(name: str, values: Sequence[Any]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(_shown(value), []).append(rank)
    said = [f"{value} on {_named(having)}" for value, having in list(ranks.items())[:FEW]]
    more = f" and {len(ranks) - FEW} other values" if len(ranks) > FEW else ""
    return f"{name} is {', '.join(said)}{more}"


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={part}" for name, part in value.items())
    return str(value)


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    listed = ", ".join(map(str, ranks[:FEW]))
    return f"ranks {listed}" + (f" and {len(ranks) - FEW} more" if len(ranks) > FEW else "")
