"""A script that sets the store's address, as tutorials do, finds the world's all the same."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

from dalsegno.elastic.rank import address, way_in
from dalsegno.protos.contract import Variable


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(address, "remark", lambda text, *values: lines.append(text % values))
    monkeypatch.setenv(Variable.STORE, "fe80::1:2900")
    monkeypatch.setenv("RANK", "0")
    return lines


def now() -> tuple[str | None, str | None]:
    return os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")


@pytest.mark.parametrize("theirs", [("localhost", "12355"), ("fe80::1", "12355"), ("localhost", "2900")])
def test_what_the_script_has_set_is_put_back_and_said_once(
    said: list[str], monkeypatch: pytest.MonkeyPatch, theirs: tuple[str, str]
) -> None:
    for name, value in zip(("MASTER_ADDR", "MASTER_PORT"), theirs, strict=True):
        monkeypatch.setenv(name, value)
    for _ in range(2):
        address.put_back()
    assert now() == ("fe80::1", "2900")
    assert len(said) == 1
    assert ":".join(theirs) in said[0]


def test_another_rank_says_nothing(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "12355")  # else nobody would take away what is put there
    address.put_back()
    assert now() == ("fe80::1", "2900")
    assert not said


def test_without_an_agent_it_is_the_scripts(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(Variable.STORE)
    monkeypatch.setenv("MASTER_PORT", "12355")
    address.put_back()
    assert os.environ["MASTER_PORT"] == "12355"
    assert not said


@pytest.mark.parametrize(
    ("options", "put"),
    [
        *(({}, True), ({"init_method": "env://"}, True), ({"rank": 0, "world_size": 2}, True)),
        *(({"init_method": "tcp://h:1"}, False), ({"store": object()}, False)),
        *(({"rank": 1, "world_size": 2}, False), ({"rank": 0, "world_size": 4}, False)),
    ],
)
def test_the_groups_making_puts_it_back(
    said: list[str], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], put: bool
) -> None:
    """Unless it goes elsewhere anyway."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "12355")
    monkeypatch.setenv("WORLD_SIZE", "2")

    def make(backend: str, init_method: Any = None, world_size: int = -1, rank: int = -1, store: Any = None) -> None:
        """As torch's."""

    monkeypatch.setattr(dist, "init_process_group", make)
    monkeypatch.setattr(way_in, "way_in", way_in.WayIn())
    way_in._noted_making(dist.init_process_group)(backend="gloo", **options)
    assert bool(said) == put
