"""What a script saved last in a world whose first node is gone, as another node finds it."""

from __future__ import annotations

import errno
import json
import os
import queue
import shutil
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.storage import adoption, late, settling
from dalsegno.agent.storage.best_save import BestRule
from dalsegno.agent.storage.save_dir import Adoption
from dalsegno.elastic.checkpoint import Tracked, inventory
from dalsegno.protos import control_pb2

from .test_adoption import ORIGIN, ZERO_1, begun, sealed_step, states, world, written_before
from .test_best_save import StaleManifests
from .test_storage import make_checkpoint

JOIN_TIMEOUT = 60.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoption, "LOOK_EVERY_SECONDS", 0.02)


def take(run_dir: Path, of: control_pb2.World, join_timeout: float = JOIN_TIMEOUT) -> list[ev.Event]:
    """Looks as a node does that comes later; returns what it says."""
    heard: queue.Queue[ev.Event] = queue.Queue()
    Adoption(["${save_dir}"], heard.put).take_late(run_dir, of, ORIGIN, join_timeout)
    return [heard.get_nowait() for _ in range(heard.qsize())]


def steps(run_dir: Path) -> list[int]:
    return sorted(one.step for one in inventory(run_dir))


def first_node_took(run_dir: Path, monkeypatch: pytest.MonkeyPatch, of: control_pb2.World, step: int) -> None:
    """Until the first node has taken what is there, and is lost."""
    taken, heard = begun(run_dir, monkeypatch, of)
    assert sealed_step(heard.get(timeout=20)) == step
    taken.close()


def test_the_last_save_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of directories with a number the newer one; a second look finds nothing new."""
    states(tmp_path / "e1" / "global_step20", *ZERO_1)
    first_node_took(tmp_path, monkeypatch, world(1), 20)
    assert take(tmp_path, world(1)) == []
    assert steps(tmp_path) == [20]
    states(tmp_path / "e1" / "global_step40", *ZERO_1)
    assert take(tmp_path, world(1)) == []
    assert take(tmp_path, world(1)) == []
    assert steps(tmp_path) == [20, 40]


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize(("ranks", "taken"), [((0, 1), [20]), ((0,), [20, 40])])
def test_where_all_ranks_saved_the_last_one_needs_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...], taken: list[int], keeps: bool
) -> None:
    """Accelerate's, also where the script has deleted what the first node took; unless the main process saves alone."""
    monkeypatch.setattr(adoption, "PATIENCE_LOOKS", 5)
    states(tmp_path / "e1/step_20", "optimizer.bin", *(f"random_states_{rank}.pkl" for rank in ranks))
    first_node_took(tmp_path, monkeypatch, world(1), 20)
    if not keeps:
        shutil.rmtree(tmp_path / "e1/step_20")
    states(tmp_path / "e1/step_40", "optimizer.bin", "random_states_0.pkl")
    take(tmp_path, world(1))
    assert steps(tmp_path) == taken


def test_nothing_of_another_tag_comes_behind_what_was_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its larger number does not make it newer than what the first node took last, which the script has deleted."""
    states(tmp_path / "e1/epoch_0", *ZERO_1)
    first_node_took(tmp_path, monkeypatch, world(1), 1)
    written_before(tmp_path / "e1/global_step10", tmp_path / "e1/epoch_0")
    shutil.rmtree(tmp_path / "e1/epoch_0")
    assert take(tmp_path, world(1)) == []
    assert steps(tmp_path) == [1]


@pytest.mark.parametrize("links", [True, False])
def test_what_was_written_while_the_last_one_was_copied_is_newer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """A copy keeps the time of its file, with hard links as without: another tag, saved meanwhile, was passed over."""

    def none(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", none)
    states(tmp_path / "e1/global_step10", *ZERO_1)
    for name in ZERO_1:
        os.utime(tmp_path / "e1/global_step10" / name, (1000, 1000))
    first_node_took(tmp_path, monkeypatch, world(1), 10)
    states(tmp_path / "e1/epoch_20", *ZERO_1)
    for name in ZERO_1:
        os.utime(tmp_path / "e1/epoch_20" / name, (1010, 1010))
    assert take(tmp_path, world(1)) == []
    assert steps(tmp_path) == [10, 20]


def test_a_file_that_is_written_over_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts no steps: that it is another one shows in its size and time."""
    states(tmp_path / "e1", "ckpt.pt")
    first_node_took(tmp_path, monkeypatch, world(1), 1)
    assert take(tmp_path, world(1)) == []
    assert steps(tmp_path) == [1]
    states(tmp_path / "e1", "ckpt.pt")
    assert take(tmp_path, world(1)) == []
    assert take(tmp_path, world(1)) == []
    assert steps(tmp_path) == [1, 2]


def save_with(directory: Path, step: int, loss: float) -> None:
    states(directory, f"step_{step}.pt")
    with open(directory / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"step": step, "loss": loss}) + "\n")


@pytest.mark.parametrize(("last", "best"), [(0.9, 50), (0.05, 60)])
@pytest.mark.parametrize("resumed", [False, True])
def test_who_comes_late_knows_the_best_of_that_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool, last: float, best: int
) -> None:
    """Else a worse one names itself, and the best one may be deleted as an old one."""
    monkeypatch.setattr(adoption, "UNSURE_LOOKS", 1)
    heard: queue.Queue[ev.Event] = queue.Queue()
    rule = BestRule(Tracked("loss", "min"), "metrics.jsonl")
    of, saves = world(1), [(1, 50, 0.1)]
    if resumed:
        of, saves = world(2, "step-20.e1.1"), [(1, 20, 0.5), (2, 50, 0.1)]
    for epoch, step, loss in saves:
        save_with(tmp_path / f"e{epoch}", step, loss)
        first = Adoption(["${save_dir}"], heard.put, best=rule)
        first.begin(tmp_path, of if epoch == of.epoch else world(epoch), ORIGIN, [], first=True)
        assert sealed_step(heard.get(timeout=20)) == step
        first.close()
    save_with(tmp_path / f"e{of.epoch}", 60, last)
    Adoption(["${save_dir}"], heard.put, best=rule).take_late(tmp_path, of, ORIGIN, JOIN_TIMEOUT)
    (newest,) = [one for one in inventory(tmp_path) if one.step == 60]
    assert newest.metric == last
    assert newest.best is not None
    assert newest.best.name.startswith(f"step-{best}.e{of.epoch}.")
    assert heard.empty()


def test_who_comes_late_takes_no_value_of_a_lost_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one file for all epochs the step was noted before, and is not noted again yet."""
    monkeypatch.setattr(adoption, "UNSURE_LOOKS", 1)
    heard: queue.Queue[ev.Event] = queue.Queue()
    file = tmp_path / "all.jsonl"
    file.write_text('{"step": 60, "loss": 0.01}\n', encoding="utf-8")
    rule = BestRule(Tracked("loss", "min"), str(file))
    first = Adoption(["${save_dir}"], heard.put, best=rule)
    first.begin(tmp_path, world(1), ORIGIN, [], first=True)
    states(tmp_path / "e1", "step_50.pt")
    assert sealed_step(heard.get(timeout=20)) == 50
    first.close()
    with open(file, "a", encoding="utf-8") as more:
        more.write('{"step": 50, "loss": 0.1}\n')
    states(tmp_path / "e1", "step_60.pt")
    Adoption(["${save_dir}"], heard.put, best=rule).take_late(tmp_path, world(1), ORIGIN, JOIN_TIMEOUT)
    newest = inventory(tmp_path)[-1]
    assert newest.best is not None
    assert (newest.step, newest.metric, newest.best.value) == (60, None, 0.1)


@pytest.mark.parametrize("ahead", [0, 3600])
def test_a_copy_of_the_resume_point_is_no_new_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int) -> None:
    """The script found it in its directory, and was lost before it saved anything; also where a clock was set back."""
    states(tmp_path / "e1", "ckpt.pt")
    os.utime(tmp_path / "e1" / "ckpt.pt", (time.time() + ahead,) * 2)
    first_node_took(tmp_path, monkeypatch, world(1), 1)
    (sealed,) = inventory(tmp_path)
    resumed = world(2, sealed.name)
    resumed.resume.source.step, resumed.resume.source.ref.digest = 1, sealed.digest
    done: queue.Queue[str] = queue.Queue()
    placing = Adoption(["${save_dir}"], lambda event: None)
    assert placing.place(tmp_path, resumed, lambda problem, damage: done.put(problem), first=True)
    assert done.get(timeout=20) == ""
    placing.close()
    assert (tmp_path / "e2" / "ckpt.pt").exists()
    assert take(tmp_path, resumed) == []
    assert steps(tmp_path) == [1]
    states(tmp_path / "e2", "ckpt.pt")
    assert take(tmp_path, resumed) == []
    assert steps(tmp_path) == [1, 2]


def test_a_leaver_commits_what_the_first_node_seals_in_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the master hears of it when the next world has been opened, and refuses it."""
    states(tmp_path / "e1" / "global_step20", *ZERO_1)
    heard: queue.Queue[ev.Event] = queue.Queue()
    looked = adoption.is_taken

    def sealed_meanwhile(*asked: Any) -> bool | None:
        if not steps(tmp_path):
            take(tmp_path, world(1))
        return looked(*asked)

    monkeypatch.setattr(adoption, "is_taken", sealed_meanwhile)
    leaver = Adoption(["${save_dir}"], heard.put)
    leaver.take_late(tmp_path, world(1), ORIGIN, JOIN_TIMEOUT, heard.put, since=1)
    assert sealed_step(heard.get_nowait()) == 20
    assert heard.empty()
    assert steps(tmp_path) == [20]


def test_what_was_being_written_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive without its end, one with a hole, and what says nothing of its end: the one before is."""
    monkeypatch.setattr(adoption, "UNSURE_LOOKS", 1)
    states(tmp_path / "e1", "step_10.pt", "step_20.pt", "step_30.pt")
    os.truncate(tmp_path / "e1" / "step_30.pt", (tmp_path / "e1" / "step_30.pt").stat().st_size - 10)
    with open(tmp_path / "e1" / "step_20.pt", "r+b") as file:
        file.seek(file.read().index(b"step_20"))
        file.write(bytes(7))
    (said,) = take(tmp_path, world(1))
    assert isinstance(said, ev.ManifestRead)
    assert said.message == "step_20.pt is not whole: its node was lost while it was written"
    assert steps(tmp_path) == [10]
    (tmp_path / "e1" / "step_90").mkdir()
    (tmp_path / "e1" / "step_90" / "weights.raw").write_bytes(b"x")
    take(tmp_path, world(1))
    assert steps(tmp_path) == [10]


def test_what_the_first_node_has_said_is_not_said_again(tmp_path: Path) -> None:
    """Of files that are no checkpoints, and of a script that began anew."""
    (tmp_path / "e1").mkdir()
    (tmp_path / "e1" / "notes.bin").write_bytes(bytes(2 << 20))
    assert take(tmp_path, world(1)) == []
    older = world(2)
    older.resume.source.ref.name, older.resume.source.step = "step-20.e1.1", 20
    states(tmp_path / "e2" / "global_step10", *ZERO_1)
    assert take(tmp_path, older) == []
    assert steps(tmp_path) == []


def test_nothing_is_looked_at_without_a_directory(tmp_path: Path) -> None:
    """The world was lost before its workers started; and a script that does not save there."""
    assert take(tmp_path, world(1)) == []
    states(tmp_path / "e1" / "global_step20", *ZERO_1)
    Adoption(["train"], lambda event: None).take_late(tmp_path, world(1), ORIGIN, JOIN_TIMEOUT)
    assert steps(tmp_path) == []


def test_what_stands_still_for_long_is_taken_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of the volume: a whole world waits. What was written just now is looked at twice."""
    monkeypatch.setattr(adoption, "LOOK_EVERY_SECONDS", 30.0)
    states(tmp_path / "e1", "step_10.pt", "step_20.pt")
    before = (tmp_path / "e1" / "step_10.pt").stat().st_mtime_ns - 40 * 10**9
    os.utime(tmp_path / "e1" / "step_10.pt", ns=(before, before))
    assert take(tmp_path, world(1), join_timeout=2.0) == []
    assert steps(tmp_path) == [], "the newest was waited for"
    os.utime(tmp_path / "e1" / "step_20.pt", ns=(before, before))
    began = time.monotonic()
    assert take(tmp_path, world(1)) == []
    assert steps(tmp_path) == [20]
    assert time.monotonic() - began < 15, "of the 30 s that it would have to be seen"


def fails(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, number: int, times: int = 1) -> None:
    """The first calls of a function fail, as where an NFS server was started again."""
    whole, left = getattr(module, name), [OSError(number, os.strerror(number))] * times

    def tried(*args: Any, **options: Any) -> Any:
        if left:
            raise left.pop()
        return whole(*args, **options)

    monkeypatch.setattr(module, name, tried)
    monkeypatch.setattr(late, "_PAUSES_SECONDS", (0.05, 0.05))
    monkeypatch.setattr(settling, "_PAUSES_SECONDS", (0.05, 0.05))


@pytest.mark.parametrize(
    ("module", "name", "number", "said"),
    [
        (late, "is_directory", errno.ESTALE, 0),
        (late, "_newest_sealed", errno.EIO, 0),
        (late, "now_at", errno.ESTALE, 0),
        (late, "now_at", errno.EROFS, 0),
        (adoption, "survey", errno.ESTALE, 1),
        (adoption, "adopt", errno.ESTALE, 1),
    ],
)
def test_one_failure_does_not_cost_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, number: int, said: int
) -> None:
    """Wherever it comes. A mark that cannot be written only means that all must be seen to stand still."""
    states(tmp_path / "e1" / "global_step20", *ZERO_1)
    fails(monkeypatch, module, name, number)
    assert len(take(tmp_path, world(1))) == said
    assert steps(tmp_path) == [20]


@pytest.mark.parametrize(("times", "names"), [(1, ["step-20.e1.1"]), (1000, ["step-20.e1.1", "step-20.e1.2"])])
def test_one_stale_manifest_does_not_have_a_save_taken_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int, names: list[str]
) -> None:
    """It is read again. One that stays unreadable is none, as a damaged one, and the run goes on from another copy."""
    monkeypatch.setattr(late, "_PAUSES_SECONDS", (0.05, 0.05))
    states(tmp_path / "e1" / "global_step20", *ZERO_1)
    first_node_took(tmp_path, monkeypatch, world(1), 20)
    monkeypatch.setattr(late, "Manifest", StaleManifests(range(times)))
    assert take(tmp_path, world(1)) == []
    assert sorted(path.name for path in tmp_path.glob("step-*")) == names


def test_what_nobody_can_look_at_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are lost, which only a log told. The node joins then."""
    states(tmp_path / "e1" / "global_step20", *ZERO_1)
    fails(monkeypatch, late, "is_directory", errno.ESTALE, times=9)
    (said,) = take(tmp_path, world(1))
    assert isinstance(said, ev.Remark)
    assert said.text.startswith("nobody can tell here what the script saved last in epoch 1 (Stale file handle): ")
    assert steps(tmp_path) == []


def test_one_failure_as_workers_end_does_not_cost_their_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody looks once more at the directory of an epoch that is over."""
    taken, _ = begun(tmp_path, monkeypatch, world(1))
    fails(monkeypatch, adoption, "adopt", errno.ESTALE)
    states(tmp_path / "e1" / "global_step20", *ZERO_1)
    taken.settle(20)
    taken.close()
    assert steps(tmp_path) == [20]


class Leaver:
    """A node that is not the first one, and whose workers have got their notice."""

    def __init__(self, run_dir: Path, heard: queue.Queue[ev.Event]) -> None:
        self._adoption = Adoption(["${save_dir}"], heard.put)
        self._adoption.begin(run_dir, world(1), ORIGIN, ["${save_dir}"], first=False)
        self._heard = heard

    def noticed(self) -> None:
        self._adoption.notice()

    def took(self) -> list[int]:
        """What it takes when they are gone."""
        self._adoption.stopped(JOIN_TIMEOUT, 0.0, noticed=True)
        events = [self._heard.get_nowait() for _ in range(self._heard.qsize())]
        return [event.message.sealed.step for event in events if isinstance(event, ev.WorkerSaid)]


def test_a_leaver_takes_what_came_behind_its_notice(tmp_path: Path) -> None:
    """And says so. What was there is the first node's business, which is there; so is all without a notice."""
    leaver = Leaver(tmp_path, queue.Queue())
    states(tmp_path / "e1", "step_10.pt")
    time.sleep(0.05)  # why: some file systems count time in ticks
    leaver.noticed()
    assert leaver.took() == []
    states(tmp_path / "e1", "step_20.pt")
    assert leaver.took() == [20]
    assert leaver.took() == []
    without = Leaver(tmp_path, queue.Queue())
    states(tmp_path / "e1", "step_30.pt")
    assert without.took() == []
    assert steps(tmp_path) == [20]


@pytest.mark.slow
def test_a_save_is_not_taken_by_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first node is about to: the leaver waits until it has, takes nothing then, and has that committed."""
    leaver = Leaver(tmp_path, queue.Queue())
    leaver.noticed()
    states(tmp_path / "e1", "step_20.pt")
    (tmp_path / "step-20.e1.1").mkdir()
    found: list[list[int]] = []
    looks = threading.Thread(target=lambda: found.append(leaver.took()))
    looks.start()
    time.sleep(1.0)
    assert looks.is_alive()
    # The name is there all the time, as it is where an agent writes.
    make_checkpoint(tmp_path / "aside", "step-20.e1.1")
    (tmp_path / "aside" / "step-20.e1.1").rename(tmp_path / "step-20.e1.1")
    looks.join(20)
    assert found == [[20]]
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-20.e1.1"]
    # The other way round: the first node's workers are gone, and the leaver was quicker.
    heard: queue.Queue[ev.Event] = queue.Queue()
    taken = Adoption(["${save_dir}"], heard.put)
    taken.begin(tmp_path, world(1), ORIGIN, ["${save_dir}"], first=True)
    taken.interrupt()
    taken.stopped(JOIN_TIMEOUT, 0.0)
    assert sealed_step(heard.get_nowait()) == 20
    assert heard.empty()
    taken.close()
