"""What running ahead is decided by: which worker can take a place, and whether there is memory."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from dalsegno.agent.script import Script, runs_ahead
from dalsegno.agent.standby import room
from dalsegno.agent.standby.placing import place_of
from dalsegno.agent.standby.run_ahead import _Environ
from dalsegno.agent.standby.worker_main import Assignment
from dalsegno.agent.workers.worker_env import job_environment
from dalsegno.protos.contract import Variable, is_of_a_world
from dalsegno.protos.room import available_bytes

AHEAD = Assignment(["train.py", "--steps=3"], False, {"HOME": "/root", "LOCAL_RANK": "0", "RANK": "7"}, "/work")


def wanted(**changes: object) -> Assignment:
    return Assignment(**{**vars(AHEAD), "stdout": "out", **changes})  # type: ignore[arg-type]


def test_a_variable_is_read_while_its_place_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the first and the second line of the look the mapping becomes a plain one again."""

    class Placed:
        def meet(self, need: str) -> None:
            """It has its place."""

    monkeypatch.setattr(_Environ, "ahead", Placed(), raising=False)
    monkeypatch.setenv("RANK", "3")
    assert _Environ.__getitem__(os.environ, "RANK") == "3"  # type: ignore[arg-type]
    _Environ.__setitem__(os.environ, "RANK", "4")  # type: ignore[arg-type]
    assert os.environ["RANK"] == "4"
    _Environ.__delitem__(os.environ, "RANK")  # type: ignore[arg-type]
    assert "RANK" not in os.environ


def test_a_place_is_what_differs() -> None:
    environment = {"HOME": "/root", "LOCAL_RANK": "0", "WORLD_SIZE": "2", Variable.EPOCH: "3"}
    place = {"environment": {"WORLD_SIZE": "2", Variable.EPOCH: "3"}, "drop": ["RANK"], "stdout": "out", "stderr": None}
    assert place_of(AHEAD, wanted(environment=environment)) == place


@pytest.mark.parametrize(
    "changes",
    [
        {"arguments": ["train.py", "--steps=4"]},
        {"module": True},
        {"cwd": "/elsewhere"},
        {"environment": {**AHEAD.environment, "LOCAL_RANK": "1"}},
        {"environment": {**AHEAD.environment, "OWN": "1"}},
        {"environment": {"LOCAL_RANK": "0"}},
    ],
    ids=["arguments", "module", "directory", "local rank", "variable", "variable that is gone"],
)
def test_another_start_is_no_place_to_take(changes: dict[str, object]) -> None:
    """What the script may have read or done by then was another one's."""
    assert place_of(AHEAD, wanted(**changes)) is None


def test_what_is_the_same_in_every_world_is_known_ahead() -> None:
    """And nothing else that an agent tells: a script that reads it ahead would read another world's."""
    told = job_environment("job", "trainer", 2, {})
    assert not [name for name in told if is_of_a_world(name)]
    names = {value for name, value in vars(Variable).items() if name.isupper()}
    ahead = {Variable.TOKEN, Variable.MASTER, Variable.FLAG, Variable.MASTER_FLAG, Variable.DOCTOR, Variable.TRACE}
    ahead |= {Variable.SOCKET, Variable.JOB_ID, Variable.NOTICES, Variable.LIFELINE}
    ahead |= {Variable.HOOKS, Variable.DLROVER_FIXES, Variable.ADMIN_TOKEN}
    assert {name for name in names if not is_of_a_world(name)} == ahead
    assert all(is_of_a_world(f"TORCHELASTIC_{name}") for name in ("RESTART_COUNT", "ERROR_FILE", "MAX_RESTARTS"))


@pytest.mark.skipif(sys.version_info < (3, 11), reason="nothing runs ahead on Python 3.10")
def test_which_scripts_run_ahead(tmp_path: Path) -> None:
    """Of themselves those with a session; none that is a program of its own."""
    ours, other = tmp_path / "ours.py", tmp_path / "other.py"
    ours.write_text("from dalsegno.elastic import session\n")
    other.write_text("import torch\n")
    scripts = [Script(sys.executable, ("-u", str(path))) for path in (ours, other)]
    program = Script("/bin/true", ())
    ahead = {wanted: [runs_ahead(one, wanted) for one in (*scripts, program)] for wanted in ("auto", "always", "never")}
    assert ahead == {"auto": [True, False, False], "always": [True, True, False], "never": [False, False, False]}


@pytest.mark.parametrize(("available", "needed", "enough"), [(150, 100, True), (149, 100, False), (0, 0, True)])
def test_a_reserve_is_left(available: int, needed: int, enough: bool) -> None:
    assert room.is_enough(available, needed) is enough


def test_memory_is_measured_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    own = room.private_bytes(os.getpid())
    assert 1 << 20 < own < available_bytes() * 100
    held = bytearray(64 << 20)
    held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
    assert room.private_bytes(os.getpid()) > own + (32 << 20)
    assert room.private_bytes(2**22 + 1) == 0
    assert room.has_room_beside([])
    monkeypatch.setattr(room, "available_bytes", lambda: own)
    assert not room.has_room_beside([os.getpid()])
