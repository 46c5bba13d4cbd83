"""Logs on the machine's own disk, copied to the volume as far as that takes them."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from pathlib import Path

import pytest

from dalsegno.protos.shortage import CannotStartError
from dalsegno.relay import logs as module
from dalsegno.relay.logs import Logs, copy_news, forget_old


def test_what_is_new_is_appended(tmp_path: Path) -> None:
    """Nothing twice; a log that was cut begins anew."""
    source, target = tmp_path / "a", tmp_path / "deep" / "b"
    for text, copied in ((b"one", b"one"), (b"one two", b"one two"), (b"new", b"new")):
        source.write_bytes(text)
        copy_news(source, target)
        assert target.read_bytes() == copied


def test_all_is_copied_in_the_end(tmp_path: Path) -> None:
    """Files in any depth; the own directory is gone then."""
    logs = Logs(tmp_path / "volume", print)
    (logs.directory / "agent-1" / "0").mkdir(parents=True)
    (logs.directory / "agent-1" / "0" / "stderr.log").write_text("a word\n")
    logs.close()
    (copy,) = (tmp_path / "volume").glob("agent-1-*/0/stderr.log")
    assert copy.read_text() == "a word\n"
    assert not logs.directory.exists()


def test_the_logs_of_a_pod_that_comes_again_stay(tmp_path: Path) -> None:
    """Under the same host name and process number, as in a container: the copies of the pod before are not its own."""
    for text in ("a long word\n", "short\n"):
        logs = Logs(tmp_path / "volume", print)
        (logs.directory / "pod-0-7").mkdir()
        (logs.directory / "pod-0-7" / "agent.log").write_text(text)
        logs.close()
    copies = (tmp_path / "volume").glob("pod-0-7-*/agent.log")
    assert sorted(one.read_text() for one in copies) == ["a long word\n", "short\n"]


def test_a_volume_that_takes_nothing_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The logs stay on the machine then; with room they are copied."""
    monkeypatch.setattr(module, "_EVERY_SECONDS", 0.02)
    said: list[str] = []
    target = tmp_path / "volume"
    target.write_text("a file where the folder should be")
    logs = Logs(target, said.append)
    (logs.directory / "agent.log").write_text("a word\n")
    until = time.monotonic() + 10
    while not said:
        assert time.monotonic() < until
        time.sleep(0.01)  # why: a thread says it
    time.sleep(0.2)  # why: nothing more may be said in it
    (line,) = said
    assert "the logs cannot be copied" in line
    assert str(logs.directory) in line
    target.unlink()
    logs.close()
    assert (target / "agent.log").read_text() == "a word\n"


def test_no_room_for_a_thread_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which limit was reached, as all else that cannot be started; nothing is left on the machine."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(CannotStartError, match="the thread that copies the logs cannot be started: no more processes"):
        Logs(tmp_path / "volume", print)
    assert list(tmp_path.iterdir()) == []


def test_the_logs_of_old_pods_do_not_fill_the_volume(tmp_path: Path) -> None:
    """A run may go through hundreds of machines. What its trainer has written stays, and what people put there."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "empty").touch()
    for number in range(module.KEPT + 2):
        ranks = tmp_path / f"pod-{number}" / "run" / "attempt_1" / "0"
        ranks.mkdir(parents=True)
        (ranks / "stdout.log").write_text("loss 1.0\n" if number == 0 else "")
        log = tmp_path / f"pod-{number}" / "agent.log"
        log.write_text("a line\n")
        os.utime(log, (1000 + number, 1000 + number))
    for _ in forget_old(tmp_path, threading.Event()):
        pass
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    kept = {
        f"pod-{number}/{file}"
        for number in range(2, module.KEPT + 2)
        for file in ("agent.log", "run/attempt_1/0/stdout.log")
    }
    assert left == {"notes/empty", "pod-0/run/attempt_1/0/stdout.log", *kept}
    assert not (tmp_path / "pod-1").exists()


def old_pods(target: Path, more: int) -> list[Path]:
    """The logs of `more` pods than stay."""
    logs = [target / f"pod-{number:03}" / "agent.log" for number in range(module.KEPT + more)]
    for number, log in enumerate(logs):
        log.parent.mkdir(parents=True)
        log.write_text("a line\n")
        os.utime(log, (1000 + number, 1000 + number))
    return logs[:more]


def test_what_cannot_be_removed_stays_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other pods' logs are removed all the same."""
    first, second = old_pods(tmp_path, 2)
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == first:
            raise PermissionError(1, "Operation not permitted")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    for _ in forget_old(tmp_path, threading.Event()):
        pass
    assert (first.exists(), second.exists()) == (True, False)


def test_logs_are_copied_before_old_ones_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow volume a short run had copied nothing."""
    old = old_pods(tmp_path / "volume", 20)
    monkeypatch.setattr(module, "_EVERY_SECONDS", 0.01)
    entered, leave = threading.Event(), threading.Event()

    def unlink(path: Path, missing_ok: bool = False) -> None:
        entered.set()
        assert leave.wait(30)
        os.unlink(path)

    monkeypatch.setattr(Path, "unlink", unlink)
    logs = Logs(tmp_path / "volume", print)
    (logs.directory / "agent-1").mkdir()
    (logs.directory / "agent-1" / "agent.log").write_text("a word\n")
    assert entered.wait(30)
    logs._over.set()
    leave.set()
    logs.close()
    (copy,) = (tmp_path / "volume").glob("agent-1-*/agent.log")
    assert copy.read_text() == "a word\n"
    assert sum(not log.exists() for log in old) == 1


def test_nothing_is_copied_of_an_empty_file(tmp_path: Path) -> None:
    """Each rank of each epoch has some, and most stay empty."""
    logs = Logs(tmp_path / "volume", print)
    (logs.directory / "agent-1").mkdir()
    (logs.directory / "agent-1" / "stderr.log").touch()
    (logs.directory / "agent-1" / "agent.log").write_text("a word\n")
    logs.close()
    assert [path.name for path in (tmp_path / "volume").glob("agent-1-*/*")] == ["agent.log"]
