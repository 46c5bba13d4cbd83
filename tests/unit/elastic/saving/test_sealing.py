"""A save in memory in the background is sealed by the ranks' threads, while their main threads do something else."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic import background
from dalsegno.elastic.checkpoint import Manifest
from dalsegno.elastic.checkpoint.deletion import is_held_open
from dalsegno.elastic.rank.board import Board, CalledOff, LocalStore, open_board
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.saving import saving
from dalsegno.elastic.saving.outcomes import SaveError
from dalsegno.elastic.saving.saving import Saver
from tests.support.workers.threads import Threads
from tests.unit.elastic.saving.test_memory import Gate, Job, Unlucky, content, files_of

pytestmark = pytest.mark.timeout(60)

SECONDS = 20.0


def begin(saver: Saver, files: Any, step: int) -> str | None:
    def state() -> Any:
        return files() if callable(files) else files

    return saver.begin(content(step), background(state), lambda: None, drain=False, in_memory=True)


def await_end(saver: Saver, group: Threads) -> tuple[bool, bool]:
    """What the ranks tell each other in a step, once all are over."""
    until = time.monotonic() + SECONDS
    while saver.busy:
        assert time.monotonic() < until
        threading.Event().wait(0.001)
    failed, busy = saver.tells()
    return bool(group.max([failed])[0]), bool(group.max([busy])[0])


def agreed(job: Job, work: Callable[[Saver, Threads], Any]) -> list[Any]:
    """Runs ``work`` behind a save on which the ranks have agreed."""

    def run(saver: Saver, group: Threads) -> Any:
        assert begin(saver, files_of(group.rank, 5), 5) is not None
        assert saver.settle() is not None
        return work(saver, group)

    return job.run(run)


def left(job: Job) -> list[str]:
    return sorted({path.name for node in range(job.nodes) for path in job.memory(node).glob("step-*[0-9]")})


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_it_is_sealed_and_told_while_the_main_threads_do_something_else(
    tmp_path: Path, nodes: int, per_node: int
) -> None:
    """And to settle it, once all ranks have told that it is over, needs no word."""
    job = Job(tmp_path, nodes, per_node)

    def work(saver: Saver, group: Threads) -> Any:
        name = begin(saver, files_of(group.rank, 6), 6)
        failed, busy = await_end(saver, group)
        told = [one.name for agent in job.agents for one in agent.of("sealed")]
        group.barrier()
        group.gather = group.start_gather = None  # type: ignore[method-assign,assignment]
        assert (failed, busy) == (False, False)
        return name, told, saver.settle(over=True)

    for name, told, settled in agreed(job, work):
        assert name == "step-6.e3.1"
        assert sorted(told) == ["step-5.e3.1"] * nodes + [name] * nodes
        assert (settled[0], settled[1].name) == (6, name)
    digests = {one.digest for agent in job.agents for one in agent.of("sealed") if one.name == "step-6.e3.1"}
    assert len(digests) == 1


def test_what_was_not_told_of_is_settled_by_all(tmp_path: Path) -> None:
    """A save that began behind the last exchange may be anything, whatever that exchange has shown."""
    job = Job(tmp_path, 2)

    def work(saver: Saver, group: Threads) -> Any:
        assert saver.tells() == (False, False)
        files = files_of(group.rank, 6) | ({"unlucky.pt": Unlucky()} if group.rank else {})
        begin(saver, files, 6)
        return saver.settle(over=True)

    assert agreed(job, work) == [None, None]
    assert left(job) == ["step-5.e3.1"]


class Broken:
    """Nobody can copy it."""

    def __deepcopy__(self, memo: object) -> Broken:
        raise KeyError("layer")


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_that_cannot_write_fails_all(tmp_path: Path, rank: int) -> None:
    """They hear of it in a step, nobody waits for what never comes, and the next save succeeds."""
    job = Job(tmp_path, 2, 2)

    def work(saver: Saver, group: Threads) -> Any:
        files = files_of(group.rank, 6) | ({"unlucky.pt": Unlucky()} if group.rank == rank else {})
        begin(saver, files, 6)
        assert await_end(saver, group) == (True, False)
        assert saver.settle() is None
        begin(saver, files_of(group.rank, 7), 7)
        return saver.settle()

    assert {ended[1].name for ended in agreed(job, work)} == {"step-7.e3.1"}
    assert left(job) == ["step-5.e3.1", "step-7.e3.1"]


@pytest.mark.parametrize(
    ("rank", "files", "line"),
    [
        (1, {"a.pt": Broken()}, "KeyError: 'layer' (rank 1)"),
        (0, {"../a.pt": b""}, "'../a.pt' is no path below a checkpoint (rank 0)"),
        (2, {"model.pt": b"twice"}, "several ranks save model.pt, and only one may"),
    ],
    ids=["a copy", "a path", "twice"],
)
def test_a_mistake_of_a_later_save_ends_the_run_on_all_ranks(
    tmp_path: Path, rank: int, files: dict[str, Any], line: str
) -> None:
    job = Job(tmp_path, 2, 2)

    def work(saver: Saver, group: Threads) -> Any:
        begin(saver, files_of(group.rank, 6) | (files if group.rank == rank else {}), 6)
        failed, _ = await_end(saver, group)
        assert failed
        return saver.settle()

    for error in agreed(job, work):
        assert isinstance(error, SaveError), error
        assert line in str(error)
    assert left(job) == ["step-5.e3.1"]


def test_who_goes_does_not_wait_for_peers_that_are_gone(tmp_path: Path) -> None:
    """As a process that stays when its world breaks."""
    job, gate = Job(tmp_path, 2), Gate()

    def work(saver: Saver, group: Threads) -> float:
        begin(saver, files_of(group.rank, 6) | ({"gate.pt": gate} if group.rank == 1 else {}), 6)
        began = time.monotonic()
        try:
            if group.rank == 0:
                threading.Event().wait(0.3)
                assert saver.busy
                saver.close()
                took = time.monotonic() - began
            else:
                took = 0.0
        finally:
            group.barrier()
            gate.opened.set()
        return took

    took = agreed(job, work)[0]
    assert took < 10


def test_it_is_sealed_for_all_if_one_rank_knows_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its agent may have told others by then: deleted it must not be because another rank has lost the store."""
    job = Job(tmp_path, 2)
    monkeypatch.setattr(saving, "SEALING_SECONDS", 0.2)

    def work(saver: Saver, group: Threads) -> Any:
        if group.rank == 1:

            class Lost(LocalStore):
                def check(self, keys: list[str]) -> bool:
                    return not keys[0].endswith("/end") and super().check(keys)

            lost = Lost()
            lost.said = group.channel("board").said
            saver._board = Board(lost)
        begin(saver, files_of(group.rank, 6), 6)
        return saver.settle()

    assert [ended[1].name for ended in agreed(job, work)] == ["step-6.e3.1"] * 2
    assert left(job) == ["step-5.e3.1", "step-6.e3.1"]
    for agent in job.agents:
        assert [one.name for one in agent.of("sealed")] == ["step-5.e3.1", "step-6.e3.1"]


class Deaf(LocalStore):
    """Nobody hears what is said."""

    def check(self, keys: list[str]) -> bool:
        return False


class Silent(LocalStore):
    """It does not answer until the end."""

    def __init__(self) -> None:
        super().__init__()
        self.end = threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.end.wait(SECONDS)
        raise RuntimeError("the store is gone")


class Lost(LocalStore):
    """The connection to it is."""

    def set(self, key: str, value: str) -> None:
        raise RuntimeError("Broken pipe")


@pytest.mark.parametrize("store", [Deaf, Silent, Lost])
@pytest.mark.parametrize("where", ["all", "one"])
def test_main_threads_seal_what_the_others_cannot(
    tmp_path: Path, store: type[LocalStore], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for a silent store for long, every agent is told once, and the next saves do without it."""
    job = Job(tmp_path, 2)
    monkeypatch.setattr(saving, "SEALING_SECONDS", 0.5)

    def work(saver: Saver, group: Threads) -> Any:
        broken = store()
        if where == "all" or group.rank == 1:
            saver._board = Board(broken)
        began = time.monotonic()
        begin(saver, files_of(group.rank, 6), 6)
        first = saver.settle()
        took = time.monotonic() - began
        saver._board = None
        begin(saver, files_of(group.rank, 7), 7)
        assert saver._under_way.sealing is None  # type: ignore[union-attr]
        failed, busy = await_end(saver, group)
        second = saver.settle(over=True)
        getattr(broken, "end", threading.Event()).set()
        return first, second, took, (failed, busy)

    for first, second, took, told in agreed(job, work):
        assert (first[1].name, second[1].name, told) == ("step-6.e3.1", "step-7.e3.1", (False, False))
        assert took < 10
    for agent in job.agents:
        assert [one.name for one in agent.of("sealed")] == ["step-5.e3.1", "step-6.e3.1", "step-7.e3.1"]
    assert left(job) == ["step-5.e3.1", "step-6.e3.1", "step-7.e3.1"]


def test_a_store_that_cannot_be_reached_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one rank. All seal by themselves then."""
    job = Job(tmp_path, 2)

    def unreachable(group: Threads, use: str) -> Any:
        if group.rank == 1:
            raise RuntimeError("Connection refused")
        return group._meeting.stores.setdefault(use, LocalStore())

    monkeypatch.setattr(Threads, "channel", unreachable)
    assert [ended[1].name for ended in agreed(job, lambda saver, group: (begin(saver, {}, 6), saver.settle())[1])] == [
        "step-6.e3.1"
    ] * 2


def test_a_save_that_agents_were_told_of_stays(tmp_path: Path) -> None:
    """A rank that gives up a write that stands, which then goes on, and is sealed before the ranks have compared."""
    job, gate = Job(tmp_path, 2), Gate()

    def work(saver: Saver, group: Threads) -> Any:
        begin(saver, files_of(group.rank, 6) | ({"gate.pt": gate} if group.rank == 1 else {}), 6)
        ending = saver._under_way
        assert ending is not None
        assert ending.sealing is not None
        if group.rank == 1:
            ending.flight._patience = 0.2
            plain = ending.sealing.stop
            stopped: list[int] = []

            def stop() -> None:
                if not stopped:
                    stopped.append(1)
                    gate.opened.set()
                    assert ending.sealing.over.wait(SECONDS)  # type: ignore[union-attr]
                plain()

            ending.sealing.stop = stop  # type: ignore[method-assign]
        else:
            assert ending.sealing.over.wait(SECONDS)
        return saver.settle()

    assert [ended[1].name for ended in agreed(job, work)] == ["step-6.e3.1"] * 2
    assert left(job) == ["step-5.e3.1", "step-6.e3.1"]


@pytest.mark.parametrize("what", ["files", "end"])
def test_a_thread_that_hears_too_late_does_nothing(tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was in the store's hands as the main threads gave it up, and sealed by themselves."""
    job = Job(tmp_path, 2)
    monkeypatch.setattr(saving, "SEALING_SECONDS", 0.2)

    class Slow(LocalStore):
        def __init__(self) -> None:
            super().__init__()
            self.go = threading.Event()

        def multi_get(self, keys: list[str]) -> list[bytes]:
            found = super().multi_get(keys)
            if keys[0].endswith(f"/{what}"):
                assert self.go.wait(SECONDS)
            return found

    def work(saver: Saver, group: Threads) -> Any:
        slow = Slow()
        slow.said = group.channel("board").said
        if group.rank == 1:
            saver._board = Board(slow)
        begin(saver, files_of(group.rank, 6), 6)
        sealing = saver._under_way.sealing  # type: ignore[union-attr]
        assert sealing is not None
        ended = saver.settle()
        slow.go.set()
        assert sealing.over.wait(SECONDS)
        return ended, sealing.error

    found = agreed(job, work)
    assert [ended[1].name for ended, _ in found] == ["step-6.e3.1"] * 2
    assert [type(error) for _, error in found] == [CalledOff if what == "files" else type(None), CalledOff]
    for agent in job.agents:
        assert [one.name for one in agent.of("sealed")] == ["step-5.e3.1", "step-6.e3.1"]


def test_a_write_that_stands_costs_the_save_and_no_more(tmp_path: Path) -> None:
    """The threads seal the next ones as before."""
    job, gate = Job(tmp_path, 2), Gate()

    def work(saver: Saver, group: Threads) -> Any:
        begin(saver, files_of(group.rank, 6) | ({"gate.pt": gate} if group.rank == 1 else {}), 6)
        if group.rank == 1:
            saver._under_way.flight._patience = 0.2  # type: ignore[union-attr]
        assert saver.settle() is None
        gate.opened.set()
        begin(saver, files_of(group.rank, 7), 7)
        await_end(saver, group)
        assert saver._under_way.sealing.digest  # type: ignore[union-attr]
        return saver.settle()

    assert [ended[1].name for ended in agreed(job, work)] == ["step-7.e3.1"] * 2


def test_a_thread_that_ends_by_any_exception_has_failed(tmp_path: Path) -> None:
    class Exits:
        def __deepcopy__(self, memo: object) -> Exits:
            return self

        def __reduce__(self) -> Any:
            raise SystemExit(3)

    def work(saver: Saver, group: Threads) -> Any:
        begin(saver, files_of(group.rank, 6) | {f"exits-{group.rank}.pt": Exits()}, 6)
        assert await_end(saver, group) == (True, False)
        return saver.settle()

    for error in agreed(Job(tmp_path, 2), work):
        assert isinstance(error, SaveError), error
        assert "SystemExit: 3" in str(error)


@pytest.mark.parametrize("who", [0, 1])
def test_failed_saves_are_forgotten_too(tmp_path: Path, who: int) -> None:
    def work(saver: Saver, group: Threads) -> int:
        for step in range(6, 20):
            files = files_of(group.rank, step) | ({"unlucky.pt": Unlucky()} if group.rank == who else {})
            begin(saver, files, step)
            await_end(saver, group)
            assert saver.settle() is None
        group.barrier()
        return len(group.channel("board").said)

    assert max(agreed(Job(tmp_path, 2), work)) <= 8


class Careless:
    """Cannot be written, and leaves a cycle that holds one of the save's files open, as frameworks do."""

    def __init__(self, directory: Path, maps: bool) -> None:
        self.directory, self.maps = directory, maps

    def __deepcopy__(self, memo: object) -> Careless:
        return self

    def __reduce__(self) -> Any:
        (path,) = self.directory.glob("step-6*/careless.pt")
        cycle: list[Any] = [open(path, "rb")]  # noqa: SIM115
        if self.maps:
            os.truncate(path, 4096)
            cycle = [mmap.mmap(cycle[0].fileno(), 4096, prot=mmap.PROT_READ)]
        cycle.append(cycle)
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("careless", ["", "opens", "maps"])
def test_what_a_failed_save_held_open_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, careless: str) -> None:
    """Its memory would stay taken. And garbage is collected for that alone."""
    job, collect, collected = Job(tmp_path, 2), gc.collect, list[int]()
    monkeypatch.setattr("dalsegno.elastic.saving.outcomes.gc.collect", lambda: collected.append(collect()))
    unlucky = Careless(job.memory(0), careless == "maps") if careless else Unlucky()

    def work(saver: Saver, group: Threads) -> None:
        begin(saver, files_of(group.rank, 6) | ({"careless.pt": unlucky} if group.rank == 0 else {}), 6)
        await_end(saver, group)
        assert saver.settle() is None

    gc.disable()
    try:
        assert agreed(job, work) == [None, None]
    finally:
        gc.enable()
    assert not is_held_open(job.memory(0))
    assert bool(collected) is bool(careless)


def test_a_board_takes_no_message_that_would_cost_it_its_store() -> None:
    store = LocalStore()
    with pytest.raises(RuntimeError, match="files has 8000002 bytes, and the store takes 7340032 at most"):
        Board(store).say("files", "a" * 8_000_000)
    assert store.said == {}


def test_the_board_holds_the_last_save_only(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, 2)

    def work(saver: Saver, group: Threads) -> set[str]:
        for step in range(6, 20):
            begin(saver, files_of(group.rank, step), step)
            assert saver.settle() is not None
        group.barrier()
        return set(group.channel("board").said)

    for keys in agreed(job, work):
        assert {key.split("/")[0] for key in keys} == {"step-19.e3.1"}
        assert len(keys) == 4 + 2 + 2  # ranks, those that lead, and what rank 0 says


def test_a_board_waits_until_it_is_called_off() -> None:
    store, asked = LocalStore(), list[float]()

    def off(seconds: float) -> bool:
        asked.append(seconds)
        return len(asked) == 12

    with pytest.raises(CalledOff, match="a is not waited for"):
        Board(store).hear(["a"], off)
    assert asked[0] < asked[5] < asked[-1] <= 0.05
    Board(store).say("a", {"b": [1, None]})
    assert Board(store).hear(["a"], off) == [{"b": [1, None]}]
    Board(store).forget("a")
    assert store.said == {}


def test_a_world_of_one_has_a_board() -> None:
    board = open_board(Solo())
    board.say("a", 1)
    assert board.hear(["a"], lambda _: True) == [1]
    board.forget("a")
    with pytest.raises(CalledOff):
        board.hear(["a"], lambda _: True)


@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "disk"])
def test_ranks_that_save_different_things_end_and_leave_nothing(tmp_path: Path, in_memory: bool) -> None:
    """What rank 0 has made by then is gone as well; unlike metrics are no difference, rank 0's counts."""
    job = Job(tmp_path, 2)

    def work(saver: Saver, group: Threads) -> Any:
        given = {"drain": False, "in_memory": in_memory}
        one = replace(content(6), metric=[0.5, float("nan")][group.rank])
        saver.begin(one, background(lambda: files_of(group.rank, 6)), lambda: None, **given)  # type: ignore[arg-type]
        ended = saver.settle()
        assert ended is not None
        other = replace(content(7), keep=group.rank)
        return saver.begin(other, background(lambda: files_of(group.rank, 7)), lambda: None, **given)  # type: ignore[arg-type]

    for error in job.run(work):
        assert isinstance(error, SaveError), error
        assert "the ranks were told to save different things: keep is 0 on rank 0, 1 on rank 1" in str(error)
    there = left(job) if in_memory else [path.name for path in (tmp_path / "run-0001").glob("step-*")]
    assert there == ["step-6.e3.1"]
    assert Manifest.read((job.memory(0) if in_memory else tmp_path / "run-0001") / there[0]).metric == 0.5
