"""One rank has a problem while the others exchange something else: all end with the same line, whatever that is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dalsegno.elastic import Batches, BatchPlan, ElasticSampler
from dalsegno.elastic.rank.agreement import Refusal, Trouble, agree
from dalsegno.elastic.rank.collective import Collective
from dalsegno.elastic.rank.identity import Identity
from dalsegno.elastic.rank.meetings import Meetings
from dalsegno.elastic.trainer.callbacks import Console
from dalsegno.elastic.trainer.hooks import Hooks
from dalsegno.elastic.training.saves import Saves
from tests.support.jobs.ports import free_port
from tests.support.workers.threads import Gone, Threads, together

pytestmark = pytest.mark.timeout(120)

# What the others may come to next.
NEXT: dict[str, Callable[[Collective], Any]] = {
    "gather": lambda group: group.gather({"alike": "a script's own"}),
    "a list": lambda group: group.gather([1, 2]),
    "nothing": lambda group: group.gather(None),
    "what is long": lambda group: group.gather("x" * 5000),
    "broadcast": lambda group: group.broadcast(7),
    "start_gather": lambda group: group.start_gather("a name").wait(),
    "sum": lambda group: group.sum(0.5),
    "max": lambda group: group.max([1, 2, 3]),
    "barrier": lambda group: group.barrier(),
    "agree": lambda group: agree(group, {"seed": 3}),
}
LINE = "another model"


def meets(group: Collective, bad: int, name: str, line: str = LINE) -> str:
    """Rank `bad` refuses in a block in which the others go on to something else."""
    with Meetings(group, None).telling():
        if group.rank == bad:
            raise KeyError(line)
        NEXT[name](group)
    return "went on"


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("name", NEXT)
def test_all_end_alike_whatever_the_others_exchange(monkeypatch: pytest.MonkeyPatch, name: str, bad: int) -> None:
    """No rank goes on, or stumbles over a message of another form; the one that refuses keeps its own error."""
    monkeypatch.setattr("dalsegno.elastic.rank.meetings.check_main_thread", lambda: None)
    ends = together(3, lambda group: meets(group, bad, name))
    own = ends.pop(bad)
    assert repr(own) == repr(KeyError(LINE))
    assert [(type(end), str(end)) for end in ends] == [(Refusal, f"'{LINE}' (rank {bad})")] * 2


def loads_callbacks(group: Threads) -> None:
    """As a `Trainer` that has loaded its model."""
    saved: dict[str, Any] = {"callbacks": {}, "callback_settings": {"Console": ["Console", "x"]}}
    Hooks([Console()]).load_state_dict(saved, group)  # type: ignore[arg-type]


def compares_samples(group: Threads) -> None:
    """As a `Trainer` that has made its data."""
    session: Any = SimpleNamespace(step=0, resume=None, gather=group.gather, rank=group.rank)
    Batches(list(range(8)), ElasticSampler(8, 8, seed=0), BatchPlan(8, 2, 4), group.rank).check_samples(session)


def asks_for_memory(group: Threads) -> None:
    """As the loop with ``memory_every``."""
    identity = Identity(rank=group.rank, world_size=2, local_rank=0, local_world_size=1, epoch=1, socket="socket")
    Saves(identity, group, None, None, 0).has_memory()


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("goes_on", [loads_callbacks, compares_samples, asks_for_memory])
def test_what_comes_next_in_a_training_ends_alike(
    monkeypatch: pytest.MonkeyPatch, goes_on: Callable[[Threads], None], bad: int
) -> None:
    """One rank refuses what it loads, while the others are a step further."""
    monkeypatch.setattr("dalsegno.elastic.rank.meetings.check_main_thread", lambda: None)

    def one(group: Threads) -> None:
        with Meetings(group, None).telling():
            if group.rank == bad:
                raise ValueError(LINE)
            goes_on(group)

    ends = together(2, one)
    assert (type(ends[bad]), str(ends[bad])) == (ValueError, LINE)
    assert (type(ends[1 - bad]), str(ends[1 - bad])) == (Refusal, f"{LINE} (rank {bad})")


def test_what_a_told_problem_was_made_into_is_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody would come to hear it."""
    monkeypatch.setattr("dalsegno.elastic.rank.meetings.check_main_thread", lambda: None)

    def one(group: Threads) -> None:
        with Meetings(group, None).telling():
            if group.rank == 0:
                raise ValueError(LINE)
            try:
                group.gather(1)
            except ValueError as error:
                raise TypeError("this does not fit") from error

    ends = together(2, one)
    assert [type(end) for end in ends] == [ValueError, TypeError]


def test_ranks_that_have_gone_apart_end_alike() -> None:
    """Some compare, others exchange: none takes a message for what it is not, and none goes on."""
    ends = together(3, lambda group: agree(group, {"seed": 1}) if group.rank else group.gather({"seed": 1}))
    assert {type(end) for end in ends} == {Trouble}
    (line,) = {str(end) for end in ends}
    assert "ranks 1, 2 would compare what they were given, and rank 0 would exchange" in line


def test_threads_do_not_take_a_reduction_for_a_message() -> None:
    """As gloo does not: the one beside the steps carries bare numbers."""
    ends = together(2, lambda group: group.start_max([1]) if group.rank else group.max([1]))
    assert {type(end) for end in ends} == {Gone}


RANK = """
import json, sys
from dalsegno.elastic.rank.collective import GlooCollective
from tests.unit.elastic.rank.test_envelopes import NEXT, meets
rank, ends = int(sys.argv[1]), []
group = GlooCollective(rank, 2, 0)
for line in ("short", "long " * 1000):
    for bad in (0, 1):
        for name in NEXT:
            try:
                ends.append(meets(group, bad, name, line))
            except Exception as end:
                ends.append([type(end).__name__, str(end)])
group.barrier()
print(json.dumps([ends, group.sum(0.1 + rank), group.max([rank, -rank]), group.gather(rank)]))
"""


def test_real_ranks_end_alike() -> None:
    """And the rounds that follow are whole."""
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank)],
            # Whose modules the ranks share.
            cwd=Path(__file__).parents[4],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    for rank, process in enumerate(ranks):
        output, _ = process.communicate(timeout=100)
        ends, *after = json.loads(output)
        assert after == [0.1 + 1.1, [1, 0], [0, 1]]
        expected = []
        for line in ("short", ("long " * 1000).strip()):
            for bad in (0, 1):
                own, others = ["KeyError", repr(line)], ["Refusal", f"{line!r} (rank {bad})"]
                expected += [own if rank == bad else others] * len(NEXT)
        assert [[kind, text.replace(" '", "'")] for kind, text in ends] == expected
