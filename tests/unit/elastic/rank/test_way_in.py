"""What ranks call before they train, and how it is called again, by who knows it and by who follows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dalsegno.elastic.rank import guide, process_group, way_in
from dalsegno.elastic.rank.exits import EXIT_DRAINED, Drained
from dalsegno.elastic.rank.guide import Announcer, Guide, repeatable
from dalsegno.elastic.rank.way_in import SESSION, STATE, TRAINS, WayIn
from dalsegno.elastic.training.staying import none_stays
from tests.support.jobs.ports import free_port


@pytest.fixture(autouse=True)
def way(monkeypatch: pytest.MonkeyPatch) -> Iterator[WayIn]:
    """One rank, in a process that has called nothing. It counts as one of several."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    way_in.watch()
    made = WayIn()
    monkeypatch.setattr(way_in, "way_in", made)
    monkeypatch.setattr("dalsegno.elastic.training.staying.way_in", made)
    monkeypatch.setattr(process_group, "way_in", made)
    yield made
    if dist.group.WORLD is not None:
        dist.destroy_process_group()


def collectives() -> int:
    return int(dist.distributed_c10d._get_default_group()._get_sequence_number_for_group())  # type: ignore[attr-defined]


def again(way: WayIn, *stages: str) -> list[int]:
    """In the next world: how many collectives there were behind each stage."""
    if dist.is_initialized():
        dist.destroy_process_group()
    found = []
    for stage in stages:
        way.again(stage)
        found.append(collectives() if dist.is_initialized() else -1)
    return found


def test_nothing_was_called(way: WayIn) -> None:
    way.at(SESSION)
    way.at(TRAINS)
    assert (way.problem(), again(way, SESSION, TRAINS)) == ("", [-1, -1])


@pytest.mark.parametrize("given", [("gloo",), ("gloo", "env://")])
def test_a_group_and_its_barriers(way: WayIn, given: tuple[str, ...]) -> None:
    """Arguments by place and by name, and an asynchronous barrier."""
    dist.init_process_group(*given, timeout=timedelta(seconds=77), rank=0, world_size=1)
    dist.barrier()
    way.at(SESSION)
    dist.barrier(async_op=True).wait()  # type: ignore[union-attr]
    dist.barrier(dist.group.WORLD)
    way.at(TRAINS)
    assert (way.problem(), again(way, SESSION, TRAINS), dist.get_backend()) == ("", [1, 3], "gloo")


# What a slow one does, and when, in seconds.
SLOW = {2.0: "make", 4.0: "meet"}
NEWCOMER = """
import sys
from datetime import timedelta
import torch.distributed as dist
for line in sys.stdin:
    if "make" in line:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if "meet" in line:
        dist.barrier()
"""


def test_new_ones_are_waited_for(way: WayIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the script allows its ranks less than they need: those that train again have what it allows."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    monkeypatch.setenv("WORLD_SIZE", "2")
    dist.barrier()  # of two ranks, for all that this way knows
    way.at(TRAINS)
    dist.destroy_process_group()
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    environment = {**os.environ, "RANK": "1"}
    with subprocess.Popen([sys.executable, "-c", NEWCOMER], env=environment, stdin=subprocess.PIPE, text=True) as new:
        assert new.stdin is not None
        said = [threading.Timer(at, print, [line], {"file": new.stdin, "flush": True}) for at, line in SLOW.items()]
        for timer in said:
            timer.start()
        try:
            way.again(TRAINS)
            with pytest.raises(RuntimeError):
                dist.barrier()
            assert new.poll() is None
        finally:
            for timer in said:
                timer.cancel()
            new.kill()


def test_a_group_that_is_made_behind_the_session(way: WayIn) -> None:
    way.at(SESSION)
    dist.init_process_group("gloo")
    dist.barrier()
    way.at(TRAINS)
    assert again(way, SESSION, TRAINS) == [-1, 1]


def test_what_we_call_is_not_the_scripts(way: WayIn) -> None:
    """It is called in each world by ourselves."""
    way.at(SESSION)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(1))
    way.ours()
    dist.barrier()
    way.at(TRAINS)
    assert way.problem() == ""
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    way.again(TRAINS)
    assert collectives() == 1


def test_a_group_that_we_make_is_not_followed(way: WayIn, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever stays makes it as new ones do. On cards it has a store of its own, with which nobody could follow it."""
    options: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    monkeypatch.setattr(process_group, "_init_on_cards", lambda _: dist.init_process_group("gloo", **options))
    announcer(monkeypatch)
    way.at(STATE)
    process_group.init_process_group(torch.device("cuda", 0))
    way.at(TRAINS)
    assert (store.num_keys(), [json.loads(store.get(f"1/{n}"))[0] for n in range(2)]) == (2, [STATE, TRAINS])


def test_the_next_worlds_place(way: WayIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script hands on from the environment is of one world."""
    dist.init_process_group("gloo", rank=0, world_size=1)
    monkeypatch.setenv("WORLD_SIZE", "2")  # not alone, so it knows
    way.at(TRAINS)
    dist.destroy_process_group()
    asked: list[object] = []
    monkeypatch.setattr(dist, "init_process_group", lambda **given: asked.append(given))
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    way.again(TRAINS)
    assert asked == [{"backend": "gloo", "rank": 2, "world_size": 3}]


@pytest.mark.parametrize(
    ("odd", "line"),
    [
        ("store", "make the default process group with a store, an init_method or options of their own"),
        ("sum", "exchange data, or make other process groups"),
        ("unseen sum", "exchange data, or make other process groups"),
        ("subgroup", "exchange data, or make other process groups"),
        ("destroy", "make the default process group more than once, or destroy it"),
        ("destroy and make", "make the default process group more than once, or destroy it"),
        (
            "unseen",
            "make the default process group before dalsegno.elastic is imported, or by another function than "
            "init_process_group: import that first, and call this behind it",
        ),
    ],
)
def test_what_cannot_be_called_again(
    way: WayIn, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, odd: str, line: str
) -> None:
    """One line says why no process stays. A group that nobody saw is none of it where somebody else makes it anew."""
    monkeypatch.setenv("DALSEGNO_SOCKET", "an agent's")
    if odd == "unseen":
        dist.distributed_c10d.init_process_group.__wrapped__("gloo")  # type: ignore[attr-defined]
    elif odd == "store":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    if odd == "sum":
        dist.all_reduce(torch.ones(1))
    if odd == "unseen sum":
        dist.distributed_c10d._get_default_group().allreduce([torch.ones(1)]).wait()  # type: ignore[attr-defined]
    if odd == "subgroup":
        dist.destroy_process_group(dist.new_group([0]))
    if "destroy" in odd:
        dist.destroy_process_group()
    way.at(SESSION)
    if odd == "destroy and make":
        dist.init_process_group("gloo")
    way.at(TRAINS)
    assert none_stays("fit()")
    assert f"stay=True has no effect: before fit() the ranks of this script {line}\n" in capsys.readouterr().out
    assert none_stays("train()", made_anew=True) is (odd != "unseen")


def test_what_ranks_do_once_they_train(way: WayIn) -> None:
    """It is no part of the way."""
    way.at(SESSION)
    way.at(TRAINS)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    way.at(TRAINS)
    assert (way.problem(), again(way, SESSION, TRAINS)) == ("", [-1, -1])


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, {}),
        ({"backend": "gloo", "timeout": timedelta(minutes=1)}, {"backend": "gloo", "timeout": 60.0}),
        ({"rank": 1, "world_size": 2, "store": None, "group_name": ""}, {}),
        ({"device_id": torch.device("cuda", 1)}, {"device_id": "cuda"}),
        ({"device_id": torch.device("cuda", 0)}, None),
        ({"store": object()}, None),
        ({"init_method": "tcp://127.0.0.1:1"}, None),
        ({"pg_options": object()}, None),
    ],
)
def test_how_a_group_can_be_made(given: dict[str, Any], found: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert repeatable(given) == found


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The world's, between two processes: this one is the new one, of rank 1, or who follows it, of rank 0."""
    made = dist.HashStore()
    monkeypatch.setattr(guide, "_store", lambda: made)
    monkeypatch.setenv("DALSEGNO_SOCKET", "an agent's")
    monkeypatch.setattr(guide, "PATIENCE_SECONDS", 0.2)
    return made


def announcer(monkeypatch: pytest.MonkeyPatch, rank: int = 1) -> Announcer:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", str(rank))
    return Announcer()


def test_who_began_alone_follows(way: WayIn, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes the group and meets where the new one does, and then knows it."""
    way.at(SESSION)
    way.at(TRAINS)
    new = announcer(monkeypatch)
    new.group({"backend": "gloo", "timeout": timedelta(minutes=55)})
    new.barrier()
    new.stage(SESSION)
    new.barrier()
    new.barrier()
    new.stage(TRAINS)
    new.end()
    new.barrier()
    monkeypatch.setenv("RANK", "0")
    asked: list[object] = []
    there = [False]
    monkeypatch.setattr(dist, "is_initialized", lambda: there[0])
    monkeypatch.setattr(dist, "init_process_group", lambda **given: (asked.append(given), there.__setitem__(0, True)))
    monkeypatch.setattr(dist, "barrier", lambda: asked.append("meets"))
    group = {"backend": "gloo", "timeout": timedelta(minutes=55)}
    way.again(SESSION)
    assert asked == [group, "meets"]
    way.again(TRAINS)
    assert asked == [group, "meets", "meets", "meets"]
    asked.clear()
    there[0] = False
    way.again(SESSION)
    way.again(TRAINS)
    assert asked == [group, "meets", "meets", "meets"]


@pytest.mark.parametrize("word", ["", "other", "state", "twice", "talk"])
def test_who_cannot_follow(
    way: WayIn, store: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    """One line, instead of a wait without an end; a new process takes its place."""
    way.at(SESSION)
    way.at(TRAINS)
    new = announcer(monkeypatch)
    if word == "other":
        new.group({"store": object()})
    elif word == "twice":
        new.group({})
        new.group({})
    elif word == "talk":
        new.talk()
    elif word:
        new.stage(word)
    monkeypatch.setenv("RANK", "0")
    where = {
        "": "which is not at 'session' after 0.2 s",
        "other": "which makes the default process group with a store, an init_method or options of its own",
        "twice": "which makes the default process group more than once",
        "talk": "which exchanges data there, or makes other process groups",
        "state": "which is at 'state', where it should come to 'session'",
    }[word]
    monkeypatch.setattr(dist, "init_process_group", lambda **given: None)
    insisted: list[int] = []
    monkeypatch.setattr(way_in, "insist", insisted.append)
    with pytest.raises(Drained):
        way.again(SESSION)
    assert insisted == [EXIT_DRAINED]
    assert f"cannot follow a new one to the training, {where}" in capsys.readouterr().out


def test_who_says_nothing(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is alone, or not of the first two ranks, or no agent's; and nobody says more than a little."""
    monkeypatch.setattr(guide, "_store", lambda: pytest.fail("nobody listens"))
    announcer(monkeypatch, rank=2).barrier()
    new = announcer(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "1")
    new.barrier()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("DALSEGNO_SOCKET")
    new.barrier()
    monkeypatch.setenv("DALSEGNO_SOCKET", "an agent's")
    monkeypatch.setattr(guide, "_store", lambda: store)
    for _ in range(2 * guide.MOST_WORDS):
        new.barrier()
    assert store.num_keys() == guide.MOST_WORDS


def test_a_guide_of_the_other_rank(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has stayed may be rank 1."""
    announcer(monkeypatch, rank=0).stage(SESSION)
    monkeypatch.setenv("RANK", "1")
    assert Guide().until(SESSION) == (None, 0)


def test_a_group_that_cannot_be_made(way: WayIn) -> None:
    """As where a script tries another backend then: the second one has other names."""
    with pytest.raises((RuntimeError, ValueError)):
        dist.init_process_group("nccl", timeout=timedelta(seconds=1))
    dist.init_process_group("gloo")
    way.at(SESSION)
    way.at(TRAINS)
    assert way.problem() == "make the default process group more than once, or destroy it"


def test_who_follows_cannot_make_it_either(way: WayIn, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    announcer(monkeypatch).group({"backend": "nccl"})
    monkeypatch.setenv("RANK", "0")

    def make(**given: Any) -> None:
        raise ValueError("there is no card")

    monkeypatch.setattr(dist, "init_process_group", make)
    with pytest.raises(guide.CannotFollow, match=r"cannot be made here \(there is no card\)"):
        Guide().until(SESSION)


def test_torch_is_as_it_was_once_ranks_train(way: WayIn) -> None:
    """And its own errors are those of wrong arguments."""
    ours = dist.barrier, dist.all_reduce, dist.init_process_group
    for given in ({"timeout": 60}, {"what": 1}):
        with pytest.raises(TypeError) as wrong:
            dist.init_process_group("gloo", **given)  # type: ignore[arg-type]
        assert "total_seconds" not in str(wrong.value)
    way.at(TRAINS)
    theirs = dist.barrier, dist.all_reduce, dist.init_process_group
    assert all(one.__wrapped__ is other for one, other in zip(ours, theirs, strict=True))  # type: ignore[attr-defined]
    assert dist.distributed_c10d.barrier is dist.barrier
