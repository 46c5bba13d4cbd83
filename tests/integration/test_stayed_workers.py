"""Workers that have drained and wait for their next place: which place they take, and how they end without one."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.agent.standby.nursery_client import StandbyProcess
from dalsegno.protos.contract import WORKER_DRAINED, Variable

from .test_run_ahead import Ahead, stop

pytestmark = pytest.mark.timeout(120)

HELD = {Variable.RESUME_NAME: "step-7.e1.1", Variable.RESUME_DIGEST: "d7"}
FIRST = {"RANK": "1", "WORLD_SIZE": "2", "DALSEGNO_EPOCH": "1", "MASTER_PORT": "7"}
SECOND = {"RANK": "0", "WORLD_SIZE": "1", "DALSEGNO_EPOCH": "2", **HELD}
# Trains in world after world until there is no place, and says at last that it ends.
SCRIPT = f"""
import os, sys
from dalsegno.protos.staying import offered
try:
    while True:
        print(os.getpid(), *(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "DALSEGNO_EPOCH", "MASTER_PORT")))
        print("careful", os.environ["RANK"], file=sys.stderr)
        if not offered()({HELD!r}):
            break
finally:
    print("closed", flush=True)
sys.exit({WORKER_DRAINED})
"""


class Stays:
    """A node of one worker, as its agent has it."""

    def __init__(self, directory: Path) -> None:
        self.node = Ahead(directory)
        self.node.script.write_text(SCRIPT)
        self.node.pool.fill(low_priority=False)
        assert self.node.warm.wait(60)
        self._worlds = 0

    def start(self, place: dict[str, str], *arguments: str) -> tuple[StandbyProcess, Path]:
        """The worker of a new world, and its output."""
        self._worlds += 1
        out, errors = (self.node.directory / f"{name}-{self._worlds}" for name in ("out", "errors"))
        wanted = vars(self.node.assignment(**place)) | {"stdout": str(out), "stderr": str(errors)}
        wanted["arguments"] = [*wanted["arguments"], *arguments]
        self._assignment = type(self.node.assignment())(**wanted)
        worker = self.node.pool.start_worker(self._assignment, 0)
        assert worker is not None
        return worker, out

    def drained(self, worker: StandbyProcess) -> None:
        """Until it has ended for its agent, which keeps what its process becomes."""
        assert worker.wait(60) == WORKER_DRAINED
        assert worker.successor is not None
        self.node.pool.keep(0, self._assignment, worker)


@pytest.fixture
def stays(tmp_path: Path) -> Iterator[Stays]:
    made = Stays(tmp_path)
    yield made
    made.node.close()


def gone(worker: StandbyProcess) -> bool:
    try:
        return worker.wait(60) == WORKER_DRAINED
    except subprocess.TimeoutExpired:
        return False


def test_it_takes_the_place_of_a_world_that_resumes_from_what_it_holds(stays: Stays) -> None:
    """The same process, the new world's variables and files, and none of the old world's."""
    worker, out = stays.start(FIRST)
    stays.drained(worker)
    assert out.read_text() == f"{worker.pid} 1 2 1 7\n"
    again, second = stays.start(SECOND)
    stays.drained(again)
    assert again.pid == worker.pid
    assert again.taken
    assert second.read_text() == f"{worker.pid} 0 1 2 None\n"
    assert out.read_text() == f"{worker.pid} 1 2 1 7\n"
    assert (second.parent / "errors-2").read_text() == "careful 0\n"


@pytest.mark.parametrize("other", [{Variable.RESUME_DIGEST: "d8"}, {"OWN": "1"}], ids=["checkpoint", "variable"])
def test_it_ends_in_order_where_another_one_is_wanted(stays: Stays, other: dict[str, str]) -> None:
    """Its script reaches its end, and a new process trains."""
    worker, out = stays.start(FIRST)
    stays.drained(worker)
    again, _ = stays.start({**SECOND, **other})
    stays.drained(again)
    assert again.pid != worker.pid
    assert worker.successor is not None
    assert gone(worker.successor[1])
    assert out.read_text().splitlines()[-1] == "closed"


def test_other_arguments_are_another_worker(stays: Stays) -> None:
    worker, _ = stays.start(FIRST)
    stays.drained(worker)
    again, _ = stays.start(SECOND, "--more")
    assert again.pid != worker.pid


@pytest.mark.parametrize("end", ["dismiss", "close"])
def test_it_ends_in_order_where_there_is_no_place(stays: Stays, end: str) -> None:
    worker, out = stays.start(FIRST)
    stays.drained(worker)
    getattr(stays.node.pool, end)()
    assert worker.successor is not None
    assert gone(worker.successor[1])
    assert out.read_text().splitlines()[-1] == "closed"


def test_it_is_killed_if_it_does_not_end(stays: Stays) -> None:
    """Stopped: nothing of it is left when its agent ends."""
    worker, _ = stays.start(FIRST)
    stays.drained(worker)
    stop(worker.pid)
    stays.node.pool.close()
    assert worker.successor is not None
    assert worker.successor[1].wait(60) == -signal.SIGKILL


def test_one_that_was_killed_has_no_place_to_take(stays: Stays) -> None:
    worker, _ = stays.start(FIRST)
    stays.drained(worker)
    assert worker.successor is not None
    worker.successor[1].discard()
    worker.successor[1].wait(60)
    again, _ = stays.start(SECOND)
    stays.drained(again)
    assert again.pid != worker.pid


def test_one_that_does_not_take_its_place_is_replaced(stays: Stays) -> None:
    """Who waits for it hears in time that it never was a worker."""
    stays.node.pool._stayed._placing._patience_seconds = 0.2
    worker, _ = stays.start(FIRST)
    stays.drained(worker)
    stop(worker.pid)
    again, _ = stays.start(SECOND)
    assert again.wait(60) == -signal.SIGKILL
    assert again.abandoned


def test_who_stops_a_worker_stops_one_that_has_just_stayed(stays: Stays) -> None:
    """Whichever comes first, the agent's SIGKILL or the word that it stays: nothing trains on unseen."""
    worker, _ = stays.start(FIRST)
    worker.signal_group(signal.SIGKILL)
    assert worker.wait(60) in (WORKER_DRAINED, -signal.SIGKILL)
    stays.node.pool.keep(0, stays._assignment, worker)
    stays.node.pool.close()
    if worker.successor is not None:
        assert worker.successor[1].wait(60) in (WORKER_DRAINED, -signal.SIGKILL)
