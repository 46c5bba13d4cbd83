"""Ranks verify what they resume from beside their main threads, and all learn the same."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic.checkpoint import SHARDED, CheckpointName, Shape
from dalsegno.elastic.rank.board import Board, LocalStore
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.rank.exchange import Exchange
from dalsegno.elastic.rank.identity import ResumeOrder
from dalsegno.elastic.saving.resuming import Damaged, Judge, ResumePoint, Work, handed_out
from dalsegno.elastic.saving.verification import JointVerification, NobodyTold, Note
from tests.support.workers.threads import Threads, together
from tests.unit.elastic.saving.test_resuming import write


class Refused(Exception):
    """A rank has learned that it may not go on."""


def judge(notes: Sequence[Note]) -> None:
    if any(notes):
        raise Refused(str([note.get("damage", "") for note in notes]))


class Job:
    """As many ranks as have work to do."""

    def __init__(self, *work: Callable[[Callable[[int], None]], Note]) -> None:
        self.told: list[tuple[int, list[Note]]] = []
        store = LocalStore()
        self.ranks = [
            JointVerification(
                Board(store),
                rank,
                len(work),
                one,
                lambda notes, rank=rank: self.told.append((rank, list(notes))),
                judge,
            )
            for rank, one in enumerate(work)
        ]

    def outcomes(self) -> list[str]:
        def one(rank: JointVerification) -> str:
            try:
                rank.wait()
            except (Refused, RuntimeError) as error:
                return str(error)
            return "sound"

        return [one(rank) for rank in self.ranks]


def sound(go_on: Callable[[int], None]) -> Note:
    go_on(1)
    return {}


def damaged(go_on: Callable[[int], None]) -> Note:
    return {"damage": "model.pt"}


def test_all_learn_the_same() -> None:
    """Each rank waits by itself, as often as it likes."""
    assert Job(sound, sound, sound).outcomes() == ["sound"] * 3
    assert Job(sound).outcomes() == ["sound"]
    for place in range(3):
        work = [sound, sound, sound]
        work[place] = damaged
        job = Job(*work)
        found = ["model.pt" if rank == place else "" for rank in range(3)]
        assert job.outcomes() == job.outcomes() == [str(found)] * 3
        notes = [{"damage": name} if name else {} for name in found]
        assert sorted(job.told) == [(rank, notes) for rank in range(3)]
    assert Job(damaged).outcomes() == ["['model.pt']"]


def test_nobody_waits_for_ever_for_a_rank_whose_work_fails() -> None:
    """Whatever it raises, it says so: the others would look for its word."""

    def fails(go_on: Callable[[int], None]) -> Note:
        raise MemoryError("no memory")

    job = Job(sound, fails)
    assert job.outcomes() == ["['', '']"] * 2
    assert sorted(job.told) == [(rank, [{}, {"os": "MemoryError: no memory"}]) for rank in range(2)]


def test_the_main_thread_goes_on_meanwhile_and_waits_where_it_must() -> None:
    """What it does before it asks for a file costs nothing."""
    go, ended = threading.Event(), threading.Event()

    def held(go_on: Callable[[int], None]) -> Note:
        assert go.wait(30)
        return {}

    job = Job(sound, held)

    def wait() -> None:
        job.ranks[0].wait()
        ended.set()

    waiting = threading.Thread(target=wait)
    waiting.start()
    assert not ended.wait(0.2)
    go.set()
    assert ended.wait(30)
    waiting.join()


def test_one_that_is_ended_reads_no_further_and_asks_no_more() -> None:
    """A process that ends does not read a checkpoint to its end before; a peer that is gone never says anything."""
    reads, count = threading.Event(), [0]

    def long(go_on: Callable[[int], None]) -> Note:
        while True:
            count[0] += 1
            reads.set()
            go_on(1)
            time.sleep(0.001)  # a piece of a file

    silent = threading.Event()
    job = Job(lambda go_on: {"os": ""} if not silent.wait(30) else {}, long)
    assert reads.wait(30)
    for rank in job.ranks:
        rank.end()
    silent.set()
    for rank in job.ranks:
        with pytest.raises(OSError, match="could not tell each other"):
            rank.wait()
    before = count[0]
    time.sleep(0.05)  # in which it would have read on
    assert count[0] == before


def test_without_a_thread_it_is_done_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit makes it slow, not fail."""

    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert Job(sound).outcomes() == ["sound"]


def begun(board: Callable[[], Board], group: Any) -> Callable[[Work, Judge], JointVerification]:
    """As a session does it, without an agent."""

    def judged(judge: Judge, notes: Sequence[Note]) -> None:
        if isinstance(found := judge(notes), Damaged):
            raise Refused(f"{found.file} {found.found_here}")

    def begin(work: Work, judge: Judge) -> JointVerification:
        return JointVerification(
            board(), group.rank, group.world_size, work, lambda notes: None, lambda notes: judged(judge, notes)
        )

    return begin


def test_a_resume_point_gives_its_files_once_they_are_sound(tmp_path: Path) -> None:
    """Its name, step and place are there at once. Damage ends all ranks where they ask, and not before."""
    source = write(tmp_path, CheckpointName(4, 2, 1), shape=Shape(2, "ddp", True))
    store = LocalStore()

    def one(group: Threads) -> Any:
        begin = begun(lambda: Board(store), group)
        point = handed_out(ResumeOrder(source.ref, SHARDED, None), tmp_path, group, beside=begin)
        if isinstance(point, Damaged):
            return point
        assert (point.step, point.saved_at) == (4, tmp_path / source.name)
        group.barrier()
        return point.path

    assert together(2, one) == [tmp_path / source.name] * 2
    store.said.clear()
    data = (tmp_path / source.name / "model.pt").read_bytes()
    (tmp_path / source.name / "model.pt").write_bytes(bytes([data[0] ^ 1]) + data[1:])
    first, second = together(2, one)
    assert isinstance(first, Refused)
    assert isinstance(second, Refused)
    assert sorted([str(first), str(second)]) == ["model.pt False", "model.pt True"]
    (tmp_path / source.name / "MANIFEST.json").unlink()
    assert all(isinstance(point, Damaged) for point in together(2, one)), "what is read at once"


@pytest.mark.parametrize(("in_memory", "cut"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("error", [None, ValueError("another model"), RuntimeError("no such storage")])
@pytest.mark.parametrize("broken", [True, False])
def test_memory_is_read_beside_its_verification(
    tmp_path: Path, in_memory: bool, cut: bool, error: Exception | None, broken: bool
) -> None:
    """Before it ends, and only there: nobody gets what is not sound, or an error that only damage has caused."""
    beside = in_memory and not cut
    source = write(tmp_path, CheckpointName(4, 2, 1), shape=Shape(1, "ddp", True))
    reads, verified = threading.Event(), []

    def work(go_on: Callable[[int], None]) -> Note:
        in_time = reads.wait(30 if beside else 0.2)
        verified.append(in_time)
        return {"damage": "model.pt"} if broken else {}

    if cut:
        os.truncate(tmp_path / source.name / "model.pt", 2)
    board = Board(LocalStore())
    point = handed_out(ResumeOrder(source.ref, SHARDED, None), tmp_path, Solo(), verify=False)
    assert isinstance(point, ResumePoint)
    verification = JointVerification(board, 0, 1, work, lambda notes: None, judge)
    point = dataclasses.replace(point, verification=verification, in_memory=in_memory)

    def load() -> str:
        with point.loading() as files:
            assert files.path == tmp_path / source.name
            reads.set()
            if error is not None:
                raise error
        return "loaded"

    if broken:
        with pytest.raises(Refused, match=r"model\.pt"):
            load()
    elif error is not None:
        with pytest.raises(type(error), match=str(error)):
            load()
    else:
        assert load() == "loaded"
    assert verified == [beside]
    assert reads.is_set() is (beside or not broken)


def test_a_lost_store_does_not_hide_why_a_load_failed(tmp_path: Path) -> None:
    """The host of the store took a rank with it, for which the others' loads wait: that error names a lost peer."""
    source = write(tmp_path, CheckpointName(4, 2, 1), shape=Shape(1, "ddp", True))
    point = handed_out(ResumeOrder(source.ref, SHARDED, None), tmp_path, Solo(), verify=False)
    assert isinstance(point, ResumePoint)

    class Gone(Board):
        def say(self, key: str, value: Any) -> None:
            raise RuntimeError("the store is gone")

    verification = JointVerification(Gone(LocalStore()), 1, 2, sound, lambda notes: None, judge)
    point = dataclasses.replace(point, verification=verification, in_memory=True)
    with pytest.raises(RuntimeError, match="Connection closed by peer"), point.loading():
        raise RuntimeError("Connection closed by peer")
    with pytest.raises(NobodyTold, match="could not tell each other"), point.loading():
        raise ValueError("another model")
    with pytest.raises(NobodyTold, match="could not tell each other"), point.loading():
        pass


def test_no_step_begins_before_all_is_sound(tmp_path: Path) -> None:
    """Also of a script that loads by itself what it likes, or nothing."""
    source = write(tmp_path, CheckpointName(4, 2, 1), shape=Shape(1, "ddp", True))
    os.truncate(tmp_path / source.name / "model.pt", 2)
    begin = begun(lambda: Board(LocalStore()), Solo())
    point = handed_out(ResumeOrder(source.ref, SHARDED, None), tmp_path, Solo(), beside=begin)
    assert isinstance(point, ResumePoint)
    exchange = Exchange(Solo(), before=point.wait)
    for begins in (lambda: exchange.meet(1), lambda: exchange.begin(5, Any, 1)):  # type: ignore[arg-type]
        with pytest.raises(Refused):
            begins()


@pytest.mark.parametrize("stayed", [0, 1])
def test_ranks_that_wait_at_once_meet_those_that_build(tmp_path: Path, stayed: int) -> None:
    """A process that stays for its next world has nothing to build, and others of that world may be new."""
    source = write(tmp_path, CheckpointName(4, 2, 1), shape=Shape(2, "ddp", True))
    store = LocalStore()

    def one(group: Threads) -> Any:
        begin = begun(lambda: Board(store), group)
        point = handed_out(ResumeOrder(source.ref, SHARDED, None), tmp_path, group, beside=begin)
        assert isinstance(point, ResumePoint)
        if group.rank == stayed:
            point.wait()
        group.barrier()
        return point.path

    assert together(2, one) == [tmp_path / source.name] * 2


def test_a_copy_of_a_resume_point_needs_no_thread(tmp_path: Path) -> None:
    """A DataLoader's processes may be given one, and dataclasses.asdict copies it."""
    source = write(tmp_path, CheckpointName(4, 2, 1), shape=Shape(1, "ddp", True))
    begin = begun(lambda: Board(LocalStore()), Solo())
    point = handed_out(ResumeOrder(source.ref, SHARDED, None), tmp_path, Solo(), beside=begin)
    assert isinstance(point, ResumePoint)
    assert point.verification is not None
    for again in (copy.deepcopy(point), pickle.loads(pickle.dumps(point))):
        assert (again, again.verification, again.path) == (point, None, point.path)
    assert dataclasses.asdict(point)["verification"] is None


# A pool's thread reads piece by piece and would never end; rank 1 says nothing. Then the script fails.
FAILS = """
import time
from concurrent.futures import ThreadPoolExecutor
from dalsegno.elastic.rank.board import Board, LocalStore
from dalsegno.elastic.saving.verification import JointVerification

def reads(go_on):
    while {reads}:
        go_on(1)
        time.sleep(0.001)
    return {{}}

def work(go_on):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(reads, go_on).result()

verification = JointVerification(Board(LocalStore()), 0, 2, work, print, print)
time.sleep(0.2)
raise ValueError("no such layer")
"""


@pytest.mark.parametrize("reads", [True, False])
def test_a_script_that_fails_meanwhile_ends(reads: bool) -> None:
    """With its own error, and not once a large share is read: its peers and its agent wait for its end."""
    done = subprocess.run(
        [sys.executable, "-c", FAILS.format(reads=reads)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: no such layer")


# A child that is forked while it is verified, as a DataLoader's process may be, asks for it and ends.
FORKS = """
import os, sys, threading
from dalsegno.elastic.rank.board import Board, LocalStore
from dalsegno.elastic.saving.verification import JointVerification

go = threading.Event()
work = lambda go_on: {} if go.wait(30) else {}
verification = JointVerification(Board(LocalStore()), 0, 1, work, print, lambda notes: None)
with verification._off._cond:
    child = os.fork()
if child == 0:
    try:
        verification.wait()
    except OSError as error:
        print(error, flush=True)
    sys.exit(7)
_, status = os.waitpid(child, 0)
go.set()
verification.wait()
print("parent", os.waitstatus_to_exitcode(status), flush=True)
"""


def test_a_child_that_was_forked_meanwhile_waits_for_nothing() -> None:
    """It has no thread that verifies, and perhaps a lock that nobody in it will ever give back."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[0].startswith("this process was forked while")
    assert done.stdout.splitlines()[1] == "parent 7"
