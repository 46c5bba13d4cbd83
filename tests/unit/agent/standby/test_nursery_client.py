"""The agent's side of a nursery, whose messages are written here."""

from __future__ import annotations

import os
import queue
import signal
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest

from dalsegno.agent.processes import lifeline as lifelines
from dalsegno.agent.processes.lifeline import Lifeline
from dalsegno.agent.processes.proc import is_stopped
from dalsegno.agent.standby import nursery_client
from dalsegno.agent.standby.nursery import receive, send
from dalsegno.agent.standby.nursery_client import Nursery, StandbyProcess
from dalsegno.agent.standby.nursery_start import reap
from dalsegno.agent.standby.stayed_workers import StayedWorkers, held_by
from dalsegno.agent.standby.worker_main import Assignment
from dalsegno.protos.contract import WORKER_DRAINED
from tests.support.jobs.master_process import eventually

TRAIN = Assignment(["train.py"], False, {}, "/")
# Of no process.
NUMBER = 1 << 22


class Scene:
    """A nursery's end of the channel, and what the agent has of it."""

    def __init__(self, killed: list[int], pid: int = NUMBER) -> None:
        ours, self.channel = socket.socketpair()
        self.killed = killed
        self.lifeline = MagicMock()
        process = self.process = MagicMock(pid=pid, returncode=None)
        process.poll.return_value = None
        before = set(threading.enumerate())
        self.said: queue.Queue[str] = queue.Queue()
        self.nursery = Nursery(process, ours, self.lifeline, False, MagicMock(), self._say)
        (self._listener,) = {thread for thread in threading.enumerate() if thread.name == "nursery"} - before

    def _say(self, text: str, warning: bool) -> None:
        assert warning
        self.said.put(text)

    def end(self) -> None:
        """Waits too: what still listens ends its workers by a name that is something else in the next test."""
        self.channel.close()
        self._listener.join(30)
        assert not self._listener.is_alive()

    def started(self, number: int) -> None:
        assert receive(self.channel)
        send(self.channel, {"started": number, "pid": NUMBER + number})


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    killed: list[int] = []
    monkeypatch.setattr(nursery_client, "kill_group", lambda pgid, *_: killed.append(pgid))
    made = Scene(killed)
    yield made
    made.end()


def test_an_error_beside_the_channel_ends_no_worker(scene: Scene) -> None:
    """Without a descriptor for the look at a new process, all ranks of the nursery were killed."""
    trains = scene.nursery.start_worker(TRAIN)
    scene.started(1)
    scene.lifeline.add_group.side_effect = OSError(24, os.strerror(24))
    second = scene.nursery.start_worker(TRAIN)
    scene.started(2)
    scene.lifeline.drop_group.side_effect = MemoryError
    send(scene.channel, {"exited": 1, "code": 0})
    assert trains.wait(30) == 0
    assert scene.killed == []
    assert scene.nursery.usable
    # It is known, so it can be ended.
    assert second.pid == NUMBER + 2
    second.signal_group(signal.SIGKILL)
    assert scene.killed == [second.pid]


def test_a_worker_whose_place_was_cut_takes_none(scene: Scene) -> None:
    """Another one has it then. The nursery, once it went on, read the rest in front of the order to leave."""
    worker = scene.nursery.start_worker(TRAIN)
    scene.started(1)
    wanted = Assignment(["train.py"], False, {"RANK": "1"}, "/", stdout="x" * (1 << 20))
    send(scene.channel, {"of": 1, "stays": held_by(wanted)})
    assert worker.wait(30) == WORKER_DRAINED
    stayed, successor = StayedWorkers(), worker.successor
    assert successor is not None
    stayed.add(0, TRAIN, successor)
    scene.nursery._channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", 0, 200_000))
    place = scene.nursery.place
    asked: list[dict[str, object]] = []

    def placed(worker: StandbyProcess, order: dict[str, object]) -> bool:
        asked.append(order)
        return place(worker, order)

    scene.nursery.place = placed  # type: ignore[method-assign]
    assert stayed.take(0, wanted) is None
    assert scene.killed == [NUMBER + 1]
    assert ["leave" in order for order in asked] == [False]


def test_the_end_of_the_channel_is_the_end_of_its_workers(scene: Scene) -> None:
    worker = scene.nursery.start_worker(TRAIN)
    scene.started(1)
    scene.channel.close()
    assert worker.wait(30) == -9
    assert scene.killed == [NUMBER + 1]


@pytest.mark.parametrize(("code", "leader", "times"), [(None, 5, 1), (1, None, 1), (1, 5, 0)])
def test_the_group_of_a_nursery_that_was_reaped_may_be_anothers(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, code: int | None, leader: int | None, times: int
) -> None:
    """Nobody else gets its number while something of its group lives; but then somebody may."""
    monkeypatch.setattr(nursery_client, "start_time", lambda pid: leader)
    scene.process.returncode = code
    scene.nursery.end()
    assert scene.killed == [NUMBER] * times
    scene.nursery.give_up()
    assert scene.killed == [NUMBER] * 2 * times


def test_a_process_that_cannot_be_looked_at_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever started it goes on: the keeper finds it by what it carries."""
    monkeypatch.setattr(lifelines, "start_time", MagicMock(side_effect=OSError(24, os.strerror(24))))
    lifeline: Any = object.__new__(Lifeline)
    lifeline._groups = {}
    lifeline.add_group(NUMBER)
    assert lifeline._groups == {}


def test_a_start_that_is_cut_off_leaves_no_process(scene: Scene) -> None:
    """It was given up, and is carried out once the nursery goes on."""
    scene.nursery._channel.settimeout(0.1)
    large = Assignment(["train.py"], False, {"LARGE": "x" * (1 << 20)}, "/")
    with pytest.raises(OSError, match="timed out"):
        scene.nursery.start_worker(large, ahead=True)
    scene.nursery._channel.settimeout(30)
    reading = threading.Thread(target=lambda: [scene.started(1), scene.started(2)], daemon=True)
    reading.start()
    trains = scene.nursery.start_worker(TRAIN)
    reading.join(30)
    send(scene.channel, {"exited": 1, "code": -9})
    send(scene.channel, {"exited": 2, "code": 0})
    assert trains.wait(30) == 0
    assert scene.killed == [NUMBER + 1]


class Stopped:
    """A nursery's process, which can be stopped, and looks at it that come soon."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process, self.pid = process, process.pid
        self.scene = Scene([], process.pid)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)
        eventually(self.is_stopped)

    def is_stopped(self) -> bool:
        return is_stopped(self._process.pid)

    def wakes(self) -> str:
        """What is said, once it goes on."""
        text = self.scene.said.get(timeout=30)
        eventually(lambda: not self.is_stopped())
        return text.replace(str(self._process.pid), "N")


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stopped]:
    monkeypatch.setattr(nursery_client, "LOOK_SECONDS", 0.1)
    process = subprocess.Popen(["sleep", "600"])
    made = Stopped(process)
    yield made
    made.scene.end()
    monkeypatch.undo()
    process.kill()
    process.wait(30)


WAKES = "the process that this node's workers are forked from (process N) was stopped (SIGSTOP): it is told to go on"


def test_a_nursery_that_is_stopped_is_told_to_go_on(stopped: Stopped) -> None:
    """Its node waited for --stall-timeout, several times, until the job had failed. No line named the process."""
    stopped.stop()
    assert stopped.wakes() == WAKES
    assert stopped.scene.nursery.usable
    eventually(lambda: stopped.scene.nursery._stopped == 0)
    stopped.stop()
    assert stopped.wakes() == WAKES
    send(stopped.scene.channel, {"ready": {}})
    assert stopped.scene.nursery.ready.wait(30)


def test_who_stops_it_again_and_again_is_told_once(stopped: Stopped, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor, or a person, who means it."""
    sent: queue.Queue[int] = queue.Queue()
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.put(number))
    monkeypatch.setattr(nursery_client, "is_stopped", lambda pid: True)
    first, second = (stopped.scene.said.get(timeout=30) for _ in range(2))
    assert first.endswith("it is told to go on")
    ends = "which ends its workers, too"
    assert second.endswith(f"is stopped again: `kill -CONT {stopped.pid}`, or `kill -9 {stopped.pid}`, {ends}")
    with pytest.raises(queue.Empty):
        stopped.scene.said.get(timeout=0.5)
    assert [sent.get(timeout=30), sent.empty()] == [signal.SIGCONT, True]


def test_one_that_forks_nobody_is_named_as_what_it_is(stopped: Stopped, monkeypatch: pytest.MonkeyPatch) -> None:
    """It becomes a worker itself, so nobody else ends with it."""
    stopped.scene.nursery.single = True
    monkeypatch.setattr(os, "kill", lambda *_: None)
    monkeypatch.setattr(nursery_client, "is_stopped", lambda pid: True)
    first, second = (stopped.scene.said.get(timeout=30) for _ in range(2))
    who = f"the process that is to become a worker of this node (process {stopped.pid})"
    assert first == f"{who} was stopped (SIGSTOP): it is told to go on"
    assert second == f"{who} is stopped again: `kill -CONT {stopped.pid}`, or `kill -9 {stopped.pid}`"


def test_who_is_stopped_with_its_agent_is_left_alone(stopped: Stopped, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm suspends all processes of a job, and has them go on one after another."""
    monkeypatch.setattr(nursery_client, "STOOD_STILL_SECONDS", -0.1)
    stopped.stop()
    with pytest.raises(queue.Empty):
        stopped.scene.said.get(timeout=1.0)
    assert stopped.is_stopped()


@pytest.mark.parametrize("error", [OSError(24, os.strerror(24)), PermissionError(1, "hidden")])
def test_a_look_at_it_that_fails_ends_no_worker(
    stopped: Stopped, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    """Without a descriptor /proc cannot be read."""
    looked = threading.Event()
    monkeypatch.setattr(nursery_client, "is_stopped", lambda pid: looked.set() or raising(error))
    assert looked.wait(30)
    looked.clear()
    assert looked.wait(30)
    assert stopped.scene.nursery.usable


def raising(error: OSError) -> bool:
    raise error


@pytest.mark.parametrize("ends", [True, False])
def test_only_a_nursery_that_is_gone_leaves_the_list(
    scene: Scene, caplog: pytest.LogCaptureFixture, ends: bool
) -> None:
    """Whoever does not end within some seconds of SIGKILL is left to the keeper, and named."""
    if not ends:
        scene.process.wait.side_effect = subprocess.TimeoutExpired("nursery", 5.0)
    reap(scene.process, scene.lifeline)
    assert scene.lifeline.drop_group.called == ends
    assert (f"nursery {NUMBER} did not end within 5 s of SIGKILL" in caplog.text) != ends
