"""What ranks do in the default process group before they train, and how it is done again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from dalsegno.elastic.rank import group_calls
from dalsegno.elastic.rank.group_calls import Calls, again, so_far
from dalsegno.elastic.training.staying import none_stays


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One rank alone, in a process that has called nothing."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    group_calls.watch()
    monkeypatch.setattr(group_calls, "_made", [])
    monkeypatch.setattr(group_calls, "_barriers", [0])
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def collectives() -> int:
    return int(dist.distributed_c10d._get_default_group()._get_sequence_number_for_group())  # type: ignore[attr-defined]


def test_nothing_was_called() -> None:
    assert so_far() == Calls()
    again(so_far())
    assert not dist.is_initialized()


@pytest.mark.parametrize("given", [("gloo",), ("gloo", "env://")])
def test_a_group_and_its_barriers(given: tuple[str, ...]) -> None:
    """Arguments by place and by name; an asynchronous barrier, and one of another group, which is none of these."""
    dist.init_process_group(*given, timeout=timedelta(seconds=77), rank=0, world_size=1)
    early = so_far()
    dist.barrier()
    dist.barrier(async_op=True).wait()  # type: ignore[union-attr]
    dist.barrier(dist.group.WORLD)
    other = dist.new_group([0])
    before = collectives()
    dist.barrier(group=other)
    assert collectives() == before
    late = so_far()
    assert (early.barriers, late.barriers, late.problem(made_anew=False)) == (0, 3, "")
    dist.destroy_process_group()
    again(early)
    assert (dist.get_backend(), collectives()) == ("gloo", 0)
    again(late, behind=early)
    assert collectives() == 3


def test_the_next_worlds_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script hands on from the environment is of one world."""
    dist.init_process_group("gloo", rank=0, world_size=1)
    calls = so_far()
    dist.destroy_process_group()
    asked: list[object] = []
    monkeypatch.setattr(dist, "init_process_group", lambda **given: asked.append(given))
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    again(calls)
    assert asked == [{"backend": "gloo", "rank": 2, "world_size": 3}]


def test_what_cannot_be_called_again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One line says why no process stays."""
    monkeypatch.setenv("DALSEGNO_SOCKET", "an agent's")

    def said(*, made_anew: bool = False) -> str:
        assert none_stays("fit()", so_far(), made_anew=made_anew)
        line = capsys.readouterr().out
        assert "stay=True has no effect: before fit() the ranks of this script " in line
        return line

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert "make the default process group with a store or an init_method" in said(made_anew=True)
    monkeypatch.setattr(group_calls, "_made", [])
    assert "before dalsegno.elastic is imported: import that first" in said()
    assert not none_stays("train()", so_far(), made_anew=True)
    dist.barrier()
    assert not none_stays("train()", so_far(), made_anew=True)
    dist.all_reduce(torch.ones(1))
    assert "talk in more ways than barriers" in said(made_anew=True)
