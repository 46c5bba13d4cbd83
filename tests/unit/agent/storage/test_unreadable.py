"""Checkpoints that are there, but not for this user: nobody goes on without them, and their owner is named."""

from __future__ import annotations

import errno
import logging
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.agent.storage.complaint import UnreadableError
from dalsegno.agent.storage.job_directory import JobDirectory, Storage, Survey
from dalsegno.elastic.checkpoint import Manifest
from tests.unit.agent.storage.test_survey import put, told

Close = Callable[..., None]


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    one = JobDirectory(tmp_path / "ck", "job")
    one.prepare()
    return one


@pytest.fixture
def close(monkeypatch: pytest.MonkeyPatch) -> Close:
    """Lets the manifests of these names be read no more, as root's are not by a user; of no names: all again."""
    closed: set[str] = set()
    read = Manifest.read.__func__  # type: ignore[attr-defined]

    def trying(cls: type[Manifest], path: Path) -> Manifest:
        if path.name in closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path / "MANIFEST.json"))
        manifest: Manifest = read(cls, path)
        return manifest

    def close(*names: str) -> None:
        closed.clear()
        closed.update(names)

    monkeypatch.setattr(Manifest, "read", classmethod(trying))
    return close


def another(directory: JobDirectory) -> JobDirectory:
    """As an agent sees it that has read nothing of it yet."""
    return JobDirectory(directory.root, directory.job_id)


def test_who_may_not_read_the_newest_does_not_register(directory: JobDirectory, close: Close) -> None:
    """A master that has lost its record would go back to the one before, and give an epoch a second time."""
    run = directory.run("run-0001")
    old, middle, new = put(run, "step-1.e1.1"), put(run, "step-2.e1.1"), put(run, "step-3.e2.1")
    close(new.name)
    with pytest.raises(UnreadableError, match=f"^{new.name} is there, but this agent cannot read it"):
        directory.survey()
    close(old.name, middle.name, new.name)
    with pytest.raises(UnreadableError, match=f"^{new.name} is there"):
        directory.survey()
    close(middle.name)
    assert told(directory.survey()) == {old.name, new.name}
    close()
    assert told(directory.survey()) == {old.name, middle.name, new.name}


def test_an_older_run_that_nobody_may_read_stops_no_newer_one(directory: JobDirectory, close: Close) -> None:
    """But where the newer one has nothing yet, a master without a record would go on with the older one."""
    old, run = put(directory.run("run-0001"), "step-1.e1.1"), directory.run("run-0002")
    close(old.name)
    run.mkdir()
    with pytest.raises(UnreadableError, match=f"^{old.name} is there"):
        directory.survey()
    new = put(run, "step-1.e2.1")
    assert told(directory.survey()) == {new.name}


def test_the_registration_is_refused_in_one_line(directory: JobDirectory, close: Close) -> None:
    """It names the checkpoint; that of the whole directory was wrong."""
    close(put(directory.run("run-0001"), "step-1.e1.1").name)
    storage = Storage(directory)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    try:
        storage.survey(lambda survey: said.put("registers"), said.put)
        assert said.get(timeout=30).startswith("step-1.e1.1 is there, but this agent cannot read it")
    finally:
        storage.close()


def test_a_join_tells_nothing_without_what_may_be_the_newest(directory: JobDirectory, close: Close) -> None:
    """Neither without the resume point nor without what was sealed behind it; an older one or a form lacks nobody."""
    run = directory.run("run-0001")
    old, resume, late = put(run, "step-1.e1.1"), put(run, "step-2.e1.1"), put(run, "step-3.e1.1")
    form = put(run, f"{resume.name}.universal.1", source=resume.ref)
    ref = resume.to_proto().ref
    close(resume.name)
    with pytest.raises(UnreadableError, match=f"^{resume.name} is there"):
        another(directory).look("run-0001", ref, (1, 3))
    close(late.name)
    for asked in (ref, None):
        with pytest.raises(UnreadableError, match=f"^{late.name} is there"):
            another(directory).look("run-0001", asked, (1, 2))
    assert told(another(directory).look("run-0001", ref, (1, 3))) == {old.name, resume.name, form.name}
    close(old.name, form.name)
    assert told(another(directory).look("run-0001", ref, (1, 2))) == {resume.name, late.name}
    assert told(another(directory).look("run-0001", late.to_proto().ref, None)) == {resume.name, late.name}
    close(old.name)
    late_ref = late.to_proto().ref
    for path in (run / resume.name, run / form.name):
        (path / "MANIFEST.json").unlink()
    assert told(another(directory).look("run-0001", late_ref, None)) == {late.name}


def test_a_file_system_that_fails_is_another_matter(directory: JobDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad sector below one manifest ends no run: nobody could make it be read again."""
    run = directory.run("run-0001")
    old, new = put(run, "step-1.e1.1"), put(run, "step-2.e1.1")
    read = Manifest.read.__func__  # type: ignore[attr-defined]

    def failing(cls: type[Manifest], path: Path) -> Manifest:
        if path.name == new.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        manifest: Manifest = read(cls, path)
        return manifest

    monkeypatch.setattr(Manifest, "read", classmethod(failing))
    assert told(directory.survey()) == {old.name}
    assert told(directory.look("run-0001", new.to_proto().ref, None)) == {old.name}


def test_the_console_says_why_and_a_look_goes_on(
    directory: JobDirectory, close: Close, caplog: pytest.LogCaptureFixture
) -> None:
    """Once each, also in the log, however often it is looked; with an empty probe, so that it is not called deleted."""
    resume = put(directory.run("run-0001"), "step-2.e1.1")
    close(resume.name)
    said: list[str] = []
    directory.complaint.say = lambda text, warning: said.append(text)
    storage = Storage(directory)
    seen: queue.SimpleQueue[Survey] = queue.SimpleQueue()
    try:
        with caplog.at_level(logging.WARNING):
            storage.look("run-0001", resume.to_proto().ref, False, seen.put, seconds=1.0)
            assert seen.get(timeout=30) == Survey("", (), ())
        storage.look("run-0001", resume.to_proto().ref, True, seen.put)
        close()
        assert told(seen.get(timeout=30)) == {resume.name}
    finally:
        storage.close()
    assert len(said) == 1
    assert said[0].startswith("step-2.e1.1 is there, but this agent cannot read it (Permission denied)")
    assert [record.getMessage().count(resume.name) > 0 for record in caplog.records] == [True]


def test_what_is_passed_over_is_logged_once(
    directory: JobDirectory, close: Close, caplog: pytest.LogCaptureFixture
) -> None:
    """Each Join reads it again: five lines a second filled the log."""
    run = directory.run("run-0001")
    old = put(run, "step-1.e1.1")
    put(run, "step-2.e1.1")
    close(old.name)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            directory.look("run-0001", None, None)
    assert [record.getMessage().count(old.name) > 0 for record in caplog.records] == [True]


SURVEYS = """
import encodings.ascii, os, sys
from pathlib import Path
from dalsegno.agent.storage import job_directory

os.setgroups([])
os.setgid(6001)
os.setuid(6001)
directory = job_directory.JobDirectory(Path(sys.argv[1]), "job")
directory.prepare()
try:
    print([one.ref.name for one in directory.survey().inventory])
except OSError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_what_root_has_saved_is_named_with_its_owner() -> None:
    """A user's job whose newest two checkpoints root has made, with its umask of 077: no line said more than "gone"."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        directory = JobDirectory(Path(place), "job")
        directory.prepare()
        run = directory.run("run-0001")
        mine, roots = put(run, "step-1.e1.1"), put(run, "step-2.e1.1")
        for path in (directory.private, directory.runs, run, run / mine.name, run / mine.name / "MANIFEST.json"):
            os.chown(path, 6001, 6001)
        os.chmod(run / roots.name, 0o700)
        os.chmod(directory.private.parent, 0o755)

        def surveys() -> str:
            words = [sys.executable, "-c", SURVEYS, place]
            return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout.strip()

        assert surveys() == (
            f"step-2.e1.1 is there, but this agent cannot read it (Permission denied): {run / roots.name} belongs to"
            " user root (mode 700), this agent is of user 6001. The run does not go on without it: let one user run"
            " all of a job, and give that user what is there (as root: `chown -R"
            f" --reference={run} {run / roots.name}`); another --job-id begins anew"
        )
        os.chown(run / roots.name, 6001, 6001)
        os.chmod(run / roots.name, 0o000)
        assert "belongs to user 6001 (mode 0), this agent is of user 6001." in surveys()
        assert f"`chmod -R u+rwX {run / roots.name}`" in surveys()
        os.chmod(run / roots.name, 0o700)
        assert surveys() == "['step-2.e1.1', 'step-1.e1.1']"


def test_a_run_of_another_user_is_named_with_its_owner(
    directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a whole, where no name in it can be read: the line said no more than that permission is denied."""
    run = directory.run("run-0001")
    run.mkdir(mode=0o700)
    listed = os.listdir

    def listing(path: Path) -> list[str]:
        if path == run:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listed(path)

    monkeypatch.setattr(os, "listdir", listing)
    monkeypatch.setattr(os, "geteuid", lambda: 6001)
    storage = Storage(directory)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    try:
        storage.survey(lambda survey: said.put("registers"), said.put)
        line = said.get(timeout=30)
    finally:
        storage.close()
    assert line.startswith(f"{run} belongs to user ")
    assert "(mode 700), and user 6001 cannot use it (Permission denied): let one user run all of a job, or" in line
