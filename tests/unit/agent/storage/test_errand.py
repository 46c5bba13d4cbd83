"""Errands whose end somebody waits for: it is told whatever is raised, and people hear of it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from dalsegno.agent.decisions.events import ConversionUpdate, ManifestRead, Pruned, Sighted, VerificationDone
from dalsegno.agent.memory import tier
from dalsegno.agent.storage import job_directory as agent_storage
from dalsegno.agent.storage import room, save_dir
from dalsegno.agent.storage.job_directory import JobDirectory, Storage, Survey
from dalsegno.agent.workers import conversion_job
from dalsegno.agent.workers.conversion_job import ConversionJob
from dalsegno.protos import control_pb2 as pb
from tests.unit.agent.storage.test_storage import make_checkpoint

REF = pb.CheckpointRef(name="step-5.e2.1", digest="d")
FAULTS = [MemoryError(), RuntimeError("can't start new thread"), KeyError("odd")]
Ask = Callable[[Storage, Callable[[Any], None]], None]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def storage(tmp_path: Path, said: list[str]) -> Iterator[Storage]:
    directory = JobDirectory(tmp_path / "ck", "job")
    directory.prepare()
    directory.run("run-0001").mkdir()
    directory.complaint.say = lambda text, warning: said.append(text)
    one = Storage(directory)
    yield one
    one.close()


def raises(error: Exception) -> Callable[..., Any]:
    def raising(*args: Any, **more: Any) -> Any:
        raise error

    return raising


def survey(storage: Storage, deliver: Callable[[Any], None]) -> None:
    storage.survey(deliver, deliver)


def look(storage: Storage, deliver: Callable[[Any], None]) -> None:
    storage.look("run-0001", REF, False, deliver, seconds=0.2, failed=deliver)


def read(storage: Storage, deliver: Callable[[Any], None]) -> None:
    storage.read_manifest("run-0001", REF.name, REF.digest, deliver)


def verify(storage: Storage, deliver: Callable[[Any], None]) -> None:
    storage.verify("run-0001", pb.Verification(number=3, ref=REF), deliver)


def prune(storage: Storage, deliver: Callable[[Any], None]) -> None:
    storage.prune("run-0001", [REF], deliver)


EACH = [survey, look, read, verify, prune]


def is_an_end(ask: Ask, told: Any) -> bool:
    """Whether it tells that there is no result."""
    if ask is survey:
        return isinstance(told, str)
    if ask is look:
        return isinstance(told, str) or bool(told == Survey("", (), ()))
    if ask is read:
        return isinstance(told, ManifestRead) and told.checkpoint is None and bool(told.message)
    if ask is verify:
        return isinstance(told, VerificationDone) and told.inconclusive and told.number == 3
    return bool(told == Pruned(()))


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("ask", EACH)
def test_whatever_is_raised_an_end_is_told(
    storage: Storage, said: list[str], monkeypatch: pytest.MonkeyPatch, ask: Ask, error: Exception
) -> None:
    """The decisions begin no other one before, so an agent whose deletion crashed once would never delete again."""
    for name in ("read_sealed", "_damage_of", "prune_replaced"):
        monkeypatch.setattr(agent_storage, name, raises(error))
    for name in ("survey", "look"):
        monkeypatch.setattr(storage.directory, name, raises(error))
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(2):
        ask(storage, told.put)
        assert is_an_end(ask, told.get(timeout=30))
    assert len(said) == 1, "people hear of it once"


@pytest.mark.parametrize("ask", EACH)
def test_without_a_thread_an_end_is_told_too(
    storage: Storage, said: list[str], monkeypatch: pytest.MonkeyPatch, ask: Ask
) -> None:
    """And the agent does not end of it. What a thread that comes later would do is not done any more."""
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raises(RuntimeError("can't start new thread")))
        ask(storage, told.put)
    assert is_an_end(ask, told.get(timeout=30))
    assert len(said) == 1
    storage.sweep("run-0001", 1)
    storage._slow.shutdown(wait=True)
    assert told.empty()


def test_an_end_that_cannot_be_told_is_in_the_log(storage: Storage, caplog: pytest.LogCaptureFixture) -> None:
    """A pool keeps to itself what its work raises."""
    storage.survey(raises(KeyError("odd")), raises(MemoryError()))
    storage._quick.shutdown(wait=True)
    assert f"the end of {agent_storage._SURVEYS} cannot be told" in caplog.messages


def test_one_that_cannot_be_deleted_does_not_keep_the_others(
    storage: Storage, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is raised for it. The console names it."""
    run = storage.directory.run("run-0001")
    for name in ("step-1.e1.1", "step-2.e1.1"):
        make_checkpoint(run, name)
    original = agent_storage.prune_replaced

    def odd(store: Any, names: Any, ends: Any) -> Any:
        return raises(MemoryError())() if "step-1.e1.1" in names else original(store, names, ends)

    monkeypatch.setattr(agent_storage, "prune_replaced", odd)
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    storage.prune("run-0001", [pb.CheckpointRef(name=f"step-{step}.e1.1") for step in (1, 2)], told.put)
    assert [ref.name for ref in told.get(timeout=30).refs] == ["step-2.e1.1"]
    (line,) = said
    assert line.startswith("checkpoint step-1.e1.1 cannot be deleted: there is not enough memory")


def test_a_look_for_a_commit_goes_on_whatever_is_raised(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_storage, "_SIGHT_PAUSES_SECONDS", (0.01, 0.01))
    looks = iter([MemoryError(), KeyError("odd")])

    def odd(*args: Any) -> None:
        if (error := next(looks, None)) is not None:
            raise error

    monkeypatch.setattr(agent_storage, "read_sealed", odd)
    told: queue.SimpleQueue[Any] = queue.SimpleQueue()
    storage.sight("run-0001", REF, told.put)
    assert told.get(timeout=30) == Sighted(REF)


def test_a_look_at_the_room_goes_on_whatever_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LOOK_EVERY_SECONDS", 0.01)
    usage = room.shutil.disk_usage(tmp_path)._replace(free=0)
    looks = iter([MemoryError()])

    def odd(*args: Any) -> Any:
        if (error := next(looks, None)) is not None:
            raise error
        return usage

    monkeypatch.setattr(room.shutil, "disk_usage", odd)
    told: queue.SimpleQueue[int] = queue.SimpleQueue()
    watch = room.RoomWatch(1, threading.Lock(), told.put)
    watch.committed(tmp_path, pb.Checkpoint(ref=REF, bytes=1))
    assert told.get(timeout=30) > 0
    watch.close()


def test_workers_that_wait_for_their_resume_point_hear_that_it_cannot_be_placed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was raised: an agent whose copy had crashed would wait for ever."""
    monkeypatch.setattr(save_dir._Placing, "_put", raises(MemoryError()))
    placing: Any = object.__new__(save_dir._Placing)
    told: list[Any] = []
    placing._first, placing._over, placing._source = True, threading.Event(), tmp_path
    placing._slow, placing._then = lambda text: monkeypatch.context(), lambda *end: told.append(end)
    placing._run()
    assert told == [("the last checkpoint cannot be put into the script's new directory: MemoryError()", None)]


def test_a_doubt_about_what_is_in_memory_has_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was raised: no Join is prepared before it."""
    memory: Any = object.__new__(tier.MemoryTier)
    memory.problem, memory._ending, memory._holdings = "", threading.Event(), MagicMock()
    memory._holdings.held.return_value.parts = (0,)
    memory._slow = SimpleNamespace(put=lambda work: work() is None)
    monkeypatch.setattr(tier, "read_manifest", raises(MemoryError()))
    told: list[str] = []
    memory.doubt("run-0001", REF, told.append)
    assert told == ["step-5.e2.1 cannot be read: MemoryError()"]


def test_a_converter_that_cannot_be_followed_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed, and the master hears why there is no form."""
    ended = threading.Event()

    class Converter:
        pid = 1

        def give_up(self) -> None:
            ended.set()

    monkeypatch.setattr(ConversionJob, "_followed", raises(UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd")))
    lifeline: Any = type("Lifeline", (), {"drop_group": lambda self, pid: None})()
    told: list[ConversionUpdate] = []
    job = conversion_job.ConversionJob(lifeline, tmp_path / "log", told.append)
    converter: Any = Converter()
    job._converter, job._lease = converter, 4
    job._follow(converter, 4, tmp_path / "step-5.e2.1.universal.4")
    assert ended.is_set()
    (update,) = told
    assert (update.lease, update.state) == (4, pb.CONVERSION_STATE_ENVIRONMENT)
    assert "the converter cannot be followed" in update.message
    assert job._converter is None


@pytest.fixture
def converting(tmp_path: Path) -> Iterator[tuple[ConversionJob, list[ConversionUpdate], Callable[..., Any]]]:
    """A job, what it tells, and how it comes to follow a process of its own."""
    told: list[ConversionUpdate] = []
    job = ConversionJob(MagicMock(), tmp_path / "log", told.append)
    processes: list[subprocess.Popen[str]] = []

    def follow(*command: str, silence: int | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        processes.append(process)
        assert process.stdout is not None
        converter = job._converter = conversion_job._Converter(process, process.stdout, silence)
        job._lease = 4
        job._follow(converter, 4, tmp_path / "step-5.e2.1.universal.4")
        return process

    yield job, told, follow
    for process in processes:
        process.kill()
        process.wait(30)


def test_a_converter_that_is_reaped_is_not_killed_by_its_number(
    converting: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another group may have that by now. The refusal of its owner ended the thread, and nobody heard of an end."""
    _, told, follow = converting
    original = conversion_job.kill_group

    def kill_group(pid: int, *more: int) -> bool:
        if not os.path.exists(f"/proc/{pid}"):
            raise PermissionError("another user's")
        return original(pid, *more)

    killed = MagicMock(side_effect=kill_group)
    monkeypatch.setattr(conversion_job, "kill_group", killed)
    monkeypatch.setattr(conversion_job.Manifest, "read", raises(MemoryError()))
    follow("true")
    assert [update.state for update in told] == [pb.CONVERSION_STATE_ENVIRONMENT]
    assert killed.call_count == 1, "only before it was reaped"


def test_a_converter_is_gone_when_its_end_is_told(converting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no thread can be had that waits for it. It lived on, with a descriptor of ours."""
    _, told, follow = converting
    reader, writer = os.pipe()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", raises(RuntimeError("can't start new thread")))
        process = follow("sleep", "60", silence=writer)
    assert [update.state for update in told] == [pb.CONVERSION_STATE_ENVIRONMENT]
    assert process.returncode == -signal.SIGKILL
    assert os.read(reader, 1) == b"", "our end of its pipe is closed"
    os.close(reader)
