"""`dalsegno relay status|events|expire|release` against a real Commander."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra relay")
pytest.importorskip("yaml", reason="needs the extra relay")

from dalsegno.agent.commands import dalsegno
from tests.support.forks.forked_agents import DLROVER_RUN
from tests.support.jobs.commander import ADMIN_TOKEN, TOKEN, Commander, Worker, commander, run_file

pytestmark = pytest.mark.timeout(120)


class Person:
    """Types commands, and reads what they print."""

    def __init__(self, file: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self._file, self._capfd = str(file), capfd

    def types(self, action: str, *more: str) -> tuple[int, str, str]:
        """The exit code, and what was printed on both screens."""
        code = dalsegno.run(["relay", action, self._file, *more])
        said = self._capfd.readouterr()
        return code, said.out, said.err


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DALSEGNO_TOKEN", TOKEN)
    monkeypatch.setenv("DALSEGNO_ADMIN_TOKEN", ADMIN_TOKEN)


def file_of(one: Commander, folder: Path) -> Path:
    """The run's file as it is once the Commander's port is known."""
    return run_file(folder, commander=f"http://{one.http}")


@pytest.mark.usefixtures("token")
def test_a_run_is_shown_and_released(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What people and programs see of a run, from nobody to the end of a lease."""
    with commander(tmp_path / "c.db", [run_file(tmp_path)]) as one:
        person = Person(file_of(one, tmp_path), capfd)
        code, out, _ = person.types("status")
        assert (code, out.splitlines()[0]) == (0, "my-run: WAITING")
        worker = Worker(one, "w1")
        worker.acquire()
        hub = {"repo": "me/model", "revision": "abc"}
        worker.report(step=7, latest_ckpt="step_7", msg="all \x1b[31mis well", hf=hub)
        lines = person.types("status")[1].splitlines()
        assert lines[0] == "my-run: RUNNING, step 7"
        assert lines[1].startswith("  held by w1 in epoch 1; its lease lasts ")
        assert lines[2] == "  milestone: step 7 at me/model, revision abc"
        assert lines[3] == "  w1 says: step 7, step_7: all \\x1b[31mis well"
        code, out, _ = person.types("status", "--json")
        assert (code, json.loads(out)["holder"]) == (0, "w1")
        code, out, _ = person.types("release")
        assert (code, out) == (0, "w1 is fenced: my-run is free for the next one\n")
        code, _, err = person.types("release")
        assert (code, err) == (1, "dalsegno relay: nobody holds my-run\n")
        assert person.types("status")[1].splitlines()[0] == "my-run: PREEMPTED, step 7"
        assert worker.renew()[1]["status"] == "fenced"


def _until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    assert any(text in line for line in process.stdout), "its output has ended"


@pytest.mark.usefixtures("token")
def test_events_are_read_and_followed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """All of them, those behind a number, and those that come, also behind a restart of the Commander."""
    with commander(tmp_path / "c.db", [run_file(tmp_path)]) as one:
        person = Person(file_of(one, tmp_path), capfd)
        Worker(one, "w1").acquire()
        code, out, _ = person.types("events")
        assert (code, [line.split()[2] for line in out.splitlines()]) == (0, ["registered:", "formed:"])
        _, out, _ = person.types("events", "--after=1", "--json")
        assert [json.loads(line)["kind"] for line in out.splitlines()] == ["formed"]
        command = Path(DLROVER_RUN).with_name("dalsegno")
        words = [str(command), "relay", "events", str(file_of(one, tmp_path)), "--follow", "--after=2"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as follower:
            try:
                Worker(one, "w2").acquire(force=True, token=ADMIN_TOKEN)
                _until(follower, "w2 has come")
                one.again()
                Worker(one, "w3").acquire(force=True, token=ADMIN_TOKEN)
                _until(follower, "w3 has come")
            finally:
                follower.send_signal(signal.SIGINT)
            assert follower.wait(30) == 130
            assert follower.stderr is not None
            assert "waiting for it" in follower.stderr.read()


@pytest.mark.usefixtures("token")
def test_a_commander_that_does_not_answer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, exit code 1; bad input is 2, before anything is asked."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        person = Person(run_file(tmp_path, commander=url), capfd)
        code, out, err = person.types("status")
        assert (code, out, err.count("\n"), f"no answer from {url}" in err) == (1, "", 1, True)
    assert person.types("status", "--commander=nowhere")[0] == 2
    assert person.types("status", f"--tls-ca={tmp_path}/none.pem")[0] == 2
    assert Person(tmp_path / "none.yaml", capfd).types("events")[0] == 2
    monkeypatch.delenv("DALSEGNO_ADMIN_TOKEN")
    code, _, err = person.types("release")
    assert (code, "DALSEGNO_ADMIN_TOKEN is not set" in err) == (2, True)
    monkeypatch.setenv("DALSEGNO_TOKEN", "two words")
    assert person.types("status")[0] == 2


def test_whoever_may_not_ask_is_told_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Commander's own line, as the command's."""
    monkeypatch.setenv("DALSEGNO_TOKEN", "another-token-0123456789")
    monkeypatch.setenv("DALSEGNO_ADMIN_TOKEN", "another-token-0123456789")
    with commander(tmp_path / "c.db", [run_file(tmp_path)]) as one:
        person = Person(file_of(one, tmp_path), capfd)
        for action in ("status", "events", "expire", "release"):
            code, _, err = person.types(action)
            assert (code, "missing or wrong token" in err) == (1, True)
