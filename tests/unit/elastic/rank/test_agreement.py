"""What ranks tell one another: what differs is named with its values and ranks."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dalsegno.elastic.rank.agreement import PART, Unlike, agree, differences, missing_part
from dalsegno.elastic.rank.collective import GlooCollective, OtherThread, PeerLost, Solo
from dalsegno.elastic.rank.envelopes import Statement, judge


class Table(Solo):
    """Ranks of which one is asked; the others have said what they have to say."""

    def __init__(self, *told: dict[str, Any], problems: dict[int, str] | None = None) -> None:
        self.answers = [Statement(one, (problems or {}).get(rank, "")) for rank, one in enumerate(told)]

    def meet(self, said: Statement, *, patience_seconds: float | None = None) -> None:
        judge(self.answers)


def test_what_differs_is_named_with_its_values_and_ranks() -> None:
    """Of many ranks and values the first few, so that the line stays one."""
    told = [{"seed": 3 + (rank in (2, 5)), "steps": rank, "same": [1, {"a": None}]} for rank in range(9)]
    seed, steps = differences(told)
    assert seed == "seed is 3 on ranks 0, 1, 3, 4 and 3 more, 4 on ranks 2, 5"
    assert steps == "steps is 0 on rank 0, 1 on rank 1, 2 on rank 2, 3 on rank 3 and 5 other values"
    many = [{str(name): (name, rank) for name in range(7)} for rank in range(2)]
    with pytest.raises(Unlike, match=r"3 is .*; and 3 more\. Give all ranks the same"):
        agree(Table(*many), {})


def test_what_only_some_ranks_mention_is_not_compared() -> None:
    """One of them tracks a metric, as only rank 0's counts; or has another kind of loader, which is compared itself."""
    assert differences([{"a": 1, "metric": "loss"}, {"a": 1}]) == []
    agree(Table({"a": 1, PART: [0, 2]}, {"a": 1}), {})


@pytest.mark.parametrize(
    ("parts", "whole"),
    [
        ([[0, 1]], True),
        ([[1, 3], [0, 3], [2, 3]], True),
        ([[0, 1], [0, 1]], True),  # tensor parallelism: one replica of two ranks
        ([[0, 2], [0, 2], [1, 2], [1, 2]], True),
        ([[0, 2], [0, 2]], False),
        ([[0, 2], [1, 3]], False),
        ([[0, 2], [1, 2], [1, 2]], False),  # an average of gradients would count one half twice
        ([[0, 2]], False),
        ([[0, 3], [1, 3]], False),
    ],
)
def test_ranks_parts_make_a_whole(parts: list[list[int]], whole: bool) -> None:
    """Each part of a global batch by as many ranks as the others."""
    assert (missing_part([{PART: part} for part in parts]) is None) == whole


def test_a_problem_of_one_rank_is_told_to_all() -> None:
    """With its number; a difference, from which it may come, is said first."""
    with pytest.raises(ValueError, match=r"^its disk is upside down \(rank 1\)$"):
        agree(Table({}, {}, problems={1: "its disk is upside down"}), {})
    with pytest.raises(Unlike, match="seed is 1 on rank 0, 2 on rank 1"):
        agree(Table({"seed": 1}, {"seed": 2}, problems={1: "the seed was 1"}), {})


def test_a_rank_that_ended_is_said_to_have() -> None:
    """At any step: the ends of loops and drains compare, too."""

    class Gone(Table):
        def meet(self, said: Any, *, patience_seconds: float | None = None) -> None:
            raise RuntimeError("Connection closed by peer")

    line = "another rank ended before it came to compare what the ranks were given; its own output says why (Connection"
    with pytest.raises(PeerLost, match=f"^{re.escape(line)}"):
        agree(Gone({}, {}), {})


def test_another_thread_is_not_taken_for_a_rank_that_ended() -> None:
    """The line has the real reason, and nothing of other ranks."""
    with ThreadPoolExecutor(1) as thread, pytest.raises(OtherThread, match="belongs to the main thread") as caught:
        thread.submit(agree, GlooCollective(0, 2, 0), {}).result()
    assert "another rank" not in str(caught.value)
