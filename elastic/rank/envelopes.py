"""What a message of a rank travels in: each round of messages can also carry a problem, which ends all ranks alike.

A rank that refuses something cannot know what the others exchange next. So it puts its problem into its own envelope
of that round, whatever the round is, and every rank opens all envelopes before it reads a message.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Statement:
    """What a rank says where all ranks compare, or in place of the message that the others exchange.

    Attributes:
        alike: What must be alike, by name; plain JSON values.
        problem: Why no rank may go on; "": this rank has no reason.
        final: Another start would find the same problem.
    """

    alike: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    final: bool = True


def packed(message: Any) -> bytes:
    """A message (plain JSON values, or a `Statement`) in its envelope: a list of one for what a rank only passes on."""
    return json.dumps(asdict(message) if isinstance(message, Statement) else [message], allow_nan=True).encode()


def unpacked(envelopes: Sequence[bytes]) -> list[Any]:
    """The messages of all ranks, in rank order; None for each `Statement`.

    Raises:
        Unlike, Refusal, Trouble: See `judge`.
    """
    opened = [json.loads(one) for one in envelopes]
    said = [None if isinstance(one, list) else Statement(**one) for one in opened]
    judge(said)
    return [one[0] if isinstance(one, list) else None for one in opened]


def judge(said: Sequence[Statement | None], unlike: str = "the ranks were not started alike") -> None:
    """Ends all ranks alike if one of them has said a problem, or if they were not started alike.

    Args:
        said: By each rank; None: it has only passed on a message.
        unlike: How the line begins if something differs.

    Raises:
        Unlike: Something differs, or some part of the data belongs to no rank.
        Refusal: Some rank has a problem that is final.
        Trouble: Some rank has a problem that is not final. Or some compare, while others exchange messages.
    """
    told = [{} if one is None else one.alike for one in said]
    wrong = differences(told)
    if wrong:
        more = f"; and {len(wrong) - FEW} more" if len(wrong) > FEW else ""
        raise Unlike(f"{unlike}: {'; '.join(wrong[:FEW])}{more}. Give all ranks the same")
    if (missing := missing_part(told)) is not None:
        raise Unlike(missing)
    problems = [(rank, one) for rank, one in enumerate(said) if one is not None and one.problem]
    if problems:
        # If there are several problems, prefer one that no restart mends.
        rank, first = min(problems, key=lambda one: not one[1].final)
        line = f"{first.problem} (rank {rank})" if len(said) > 1 else first.problem
        raise Refusal(line) if first.final else Trouble(line)
    apart = [rank for rank, one in enumerate(said) if one is None]
    if 0 < len(apart) < len(said):
        rest = [rank for rank, one in enumerate(said) if one is not None]
        raise Trouble(
            f"the ranks have gone apart: {_named(rest)} would compare what they were given, and {_named(apart)} would "
            "exchange something else. All ranks have to call the session in the same order"
        )


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
