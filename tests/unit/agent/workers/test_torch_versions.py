"""Versions of torch that know less, or other things, than the newest one."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from dalsegno.agent.workers.torch_versions import filtered_of, known, set_local_rank, tails_of


def old(name: str, envs: dict[str, str]) -> None:
    """As torch 2.6 has it."""


def new(name: str, envs: dict[str, str], numa_options: object = None) -> None:
    """As torch 2.13 has it."""


@dataclass
class Spec:
    role: str
    numa_options: object = None


def test_what_nobody_asked_for_is_left_out() -> None:
    assert known(old, numa_options=None) == {}
    assert known(new, numa_options=None) == {"numa_options": None}
    assert known(Spec, numa_options=3, filters=[]) == {"numa_options": 3}


def test_what_was_asked_for_and_is_not_known_is_refused() -> None:
    with pytest.raises(TypeError, match="no numa_options"):
        known(old, numa_options="node")


def test_tails_and_filters_are_found_under_either_name() -> None:
    assert tails_of(SimpleNamespace(_stdout_tail=1, _stderr_tail=2)) == [1, 2]
    assert tails_of(SimpleNamespace(_tail_logs=[1, 2, 3])) == [1, 2, 3]
    assert filtered_of(SimpleNamespace()) == []
    assert filtered_of(SimpleNamespace(filtered_stdout=None, filtered_stderr=4)) == [4]


def test_a_local_rank_is_told_by_torch_or_by_us() -> None:
    told: dict[str, str] = {}
    set_local_rank(SimpleNamespace(), told, 3, None)
    assert told == {"LOCAL_RANK": "3"}
    virtual = SimpleNamespace(_set_local_rank_env=lambda environment, local, spec: environment.update(LOCAL_RANK=spec))
    set_local_rank(virtual, told, 3, "0")
    assert told == {"LOCAL_RANK": "0"}
