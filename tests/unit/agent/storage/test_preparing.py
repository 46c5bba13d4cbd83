"""A job's directories, on a file system that fails or hangs as the agent begins."""

from __future__ import annotations

import errno
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.storage import preparing
from dalsegno.agent.storage.job_directory import JobDirectory, StorageError

Lines = list[tuple[str, bool]]


def prepared(directory: JobDirectory) -> Lines:
    said: Lines = []
    preparing.prepare(directory, lambda text, warning: said.append((text, warning)))
    return said


def fails(monkeypatch: pytest.MonkeyPatch, number: int, times: int) -> list[Path]:
    """The first touches of a file fail so; gives the paths of those that did."""
    failed: list[Path] = []
    touch = Path.touch

    def trial(path: Path, *given: Any, **named: Any) -> None:
        if len(failed) < times:
            failed.append(path)
            raise OSError(number, os.strerror(number))
        touch(path, *given, **named)

    monkeypatch.setattr(Path, "touch", trial)
    return failed


def test_a_mount_that_fails_for_a_moment_ends_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisors take exit code 2 for the end of the job, and its healthy nodes end with it."""
    monkeypatch.setattr(preparing, "FAILING_PAUSES_SECONDS", (0.01, 0.01))
    failed = fails(monkeypatch, errno.ESTALE, 2)
    line = "it does not register yet, and looks again for some seconds: [Errno 116] Stale file handle"
    assert prepared(JobDirectory(tmp_path / "ckpt", "job")) == [(line, True)] * 2
    assert len(failed) == 2


def test_one_that_fails_for_long_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "FAILING_PAUSES_SECONDS", (0.01, 0.01))
    fails(monkeypatch, errno.EIO, 99)
    with pytest.raises(StorageError, match="Input/output error"):
        prepared(JobDirectory(tmp_path / "ckpt", "job"))


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_what_does_not_pass_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    failed = fails(monkeypatch, number, 99)
    with pytest.raises(StorageError):
        prepared(JobDirectory(tmp_path / "ckpt", "job"))
    assert len(failed) == 1


def test_one_that_does_not_answer_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While nothing comes back; not where it does in time."""
    monkeypatch.setattr(preparing, "SILENCE_SECONDS", 0.05)
    said: queue.Queue[str] = queue.Queue()
    touch = Path.touch

    def hangs(path: Path, *given: Any, **named: Any) -> None:
        assert "does not answer" in said.get(timeout=60)
        touch(path, *given, **named)

    monkeypatch.setattr(Path, "touch", hangs)
    directory = JobDirectory(tmp_path / "ckpt", "job")
    preparing.prepare(directory, lambda text, warning: said.put(text))
    monkeypatch.setattr(Path, "touch", touch)
    preparing.prepare(directory, lambda text, warning: said.put(text))
    time.sleep(0.2)  # why: the second one is not to be told
    assert said.empty()


def test_without_room_for_a_thread_the_directories_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who proves the room for threads comes later, and has the line that says what to do."""

    def no_room(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_room)
    directory = JobDirectory(tmp_path / "ckpt", "job")
    assert prepared(directory) == []
    assert directory.runs.is_dir()
