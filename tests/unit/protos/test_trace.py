"""What happens when is noted in files that do not grow with steps, and costs nothing where nobody asks."""

from __future__ import annotations

import os
import threading
from collections import deque
from pathlib import Path

import pytest

from dalsegno.protos import trace
from dalsegno.protos.contract import Variable


@pytest.fixture(autouse=True)
def not_looked(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has not asked its environment yet, and is left so."""
    monkeypatch.setattr(trace, "_directory", None)
    monkeypatch.setattr(trace, "_own", None)


@pytest.fixture
def marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that this process traces into."""
    directory = tmp_path / "marks"
    monkeypatch.setenv(Variable.TRACE, "")  # put back at the end
    trace.trace_into(str(directory))
    for name in ("RANK", Variable.RUN_ID, Variable.NODE, Variable.EPOCH):
        monkeypatch.delenv(name, raising=False)
    return directory


def test_off_nothing_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable no file is made, no clock is read, and the environment is asked once."""
    monkeypatch.delenv(Variable.TRACE, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trace.time, "monotonic", lambda: pytest.fail("the clock was read"))
    trace.mark("sealed", epoch=1)
    monkeypatch.setattr(trace, "_look", lambda: pytest.fail("the environment was asked again"))
    trace.mark("sealed", epoch=1)
    assert list(tmp_path.iterdir()) == []


def test_a_mark_says_who_and_when(marks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is what its environment says; an agent says it itself."""
    trace.mark("formed", run="run-0001", node="n0", epoch=2)
    own = (("RANK", "1"), (Variable.RUN_ID, "run-0001"), (Variable.NODE, "n1"), (Variable.EPOCH, "2"))
    for name, value in own:
        monkeypatch.setenv(name, value)
    trace.mark("loaded", step=7)
    agent, worker = trace.read(marks)
    assert (agent.name, agent.node, agent.rank, agent.epoch, agent.step) == ("formed", "n0", -1, 2, -1)
    assert (worker.name, worker.node, worker.rank, worker.epoch, worker.step) == ("loaded", "n1", 1, 2, 7)
    assert agent.run == worker.run == "run-0001"
    assert agent.at <= worker.at
    assert (agent.process, agent.clock) == (worker.process, worker.clock)


def test_steps_in_a_row_take_the_room_of_two(marks: Path) -> None:
    """Of each row the first and the last stay, and what stands before and behind it."""
    for first in (1, 1001):
        trace.mark("ready")
        for step in range(first, first + 1000):
            trace.mark(trace.STEP, step=step)
    trace.mark("told")
    found = [(one.name, one.step) for one in trace.read(marks)]
    rows = [[("ready", -1), ("step", first), ("step", first + 999)] for first in (1, 1001)]
    assert found == [*rows[0], *rows[1], ("told", -1)]
    (file,) = marks.iterdir()
    assert file.stat().st_size < 1500


def test_a_long_line_of_a_step_takes_no_other_s_room(marks: Path) -> None:
    """What does not fit into its place is appended."""
    for node in ("a", "b", "c" * 300, "d"):
        trace.mark(trace.STEP, node=node, step=1)
    assert [one.node[:1] for one in trace.read(marks)] == ["a", "b", "c", "d"]


def test_a_forked_process_asks_its_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nursery that traces nothing may have a worker that does."""
    monkeypatch.delenv(Variable.TRACE, raising=False)
    trace.mark("ready")
    pid = os.fork()
    if pid == 0:
        try:
            os.environ[Variable.TRACE] = str(tmp_path / "marks")
            trace.mark("session")
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert [one.name for one in trace.read(tmp_path / "marks")] == ["session"]


def test_threads_do_not_mix_their_lines(marks: Path) -> None:
    """Many at once: each line is whole."""
    threads = [
        threading.Thread(target=lambda name: [trace.mark(name) for _ in range(200)], args=(f"t{number}",))
        for number in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    found = [one.name for one in trace.read(marks)]
    assert {name: found.count(name) for name in set(found)} == {f"t{number}": 200 for number in range(4)}


def test_two_threads_may_bring_what_was_kept(marks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them sees the last mark, and one takes it: the other goes on."""

    class Taken(deque[object]):
        def popleft(self) -> object:
            self.clear()
            raise IndexError

    monkeypatch.setattr(trace, "_kept", Taken([(1.0, "first", {})]))
    trace.mark("second")
    assert [one.name for one in trace.read(marks)] == ["second"]


def test_a_forked_process_has_a_file_of_its_own(marks: Path) -> None:
    """A nursery's workers do not write over each other's steps."""
    trace.mark(trace.STEP, step=1)
    pid = os.fork()
    if pid == 0:
        try:
            trace.mark(trace.STEP, step=2)
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    trace.mark(trace.STEP, step=3)
    found = trace.read(marks)
    assert [one.step for one in found] == [1, 2, 3]
    assert found[0].process == found[2].process != found[1].process


def test_a_directory_that_cannot_be_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on without a trace; a person is told once."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(Variable.TRACE, str(tmp_path / "file" / "below"))
    warned: list[str] = []
    monkeypatch.setattr(trace.logger, "warning", lambda text, *_: warned.append(text))
    for _ in range(3):
        trace.mark("sealed")
    assert len(warned) == 1


def test_what_is_no_mark_is_passed_over(marks: Path) -> None:
    """A writer that was killed, another program's file: the rest counts."""
    trace.mark("told")
    (marks / "ab-1-cd.jsonl").write_bytes(b'{"at": 1.0, "mark": "sealed"}\n{"at": 2.\n[1]\n{"mark": "x"}\n\0\0\n')
    assert [one.name for one in trace.read(marks)] == ["sealed", "told"]
