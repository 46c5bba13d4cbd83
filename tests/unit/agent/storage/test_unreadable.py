"""Checkpoints that are there, but not for this user: nobody goes on without them, and their owner is named."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dalsegno.agent.storage.complaint import UnreadableError
from dalsegno.agent.storage.job_directory import JobDirectory, Storage, Survey
from dalsegno.agent.storage.private import NotPrivateError
from dalsegno.elastic.checkpoint import Manifest
from dalsegno.elastic.checkpoint.inventory import Inventory, inspect
from tests.unit.agent.storage.test_storage import Pauses
from tests.unit.agent.storage.test_survey import put, told

Close = Callable[..., None]
UNREAD = "is there, and may be the newest checkpoint, but this agent cannot read it"


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
    with pytest.raises(UnreadableError, match=f"^{new.name} {UNREAD}"):
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
        assert said.get(timeout=30).startswith(f"step-1.e1.1 {UNREAD}")
    finally:
        storage.close()


def test_a_registration_waits_out_what_is_over_in_a_moment(
    directory: JobDirectory, close: Close, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `chown -R` that goes through the files, or a ticket that is renewed: exit 2 is final for a supervisor."""
    new = put(directory.run("run-0001"), "step-1.e1.1")
    close(new.name)
    looks = []
    survey = directory.survey

    def surveys() -> Survey:
        looks.append(1)
        if len(looks) == 1:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory.runs))
        if len(looks) == 4:
            close()
        return survey()

    monkeypatch.setattr(directory, "survey", surveys)
    storage = Storage(directory)
    said: queue.SimpleQueue[Survey | str] = queue.SimpleQueue()
    try:
        storage.survey(said.put, said.put)
        seen = said.get(timeout=30)
        assert isinstance(seen, Survey), seen
        assert told(seen) == {new.name}
    finally:
        storage.close()


@pytest.mark.parametrize(("mended", "ended"), [(4, 1000), (1000, 1000), (1000, 2)])
def test_a_registration_waits_out_a_file_system_that_fails(
    directory: JobDirectory, spoil: Close, monkeypatch: pytest.MonkeyPatch, mended: int, ended: int
) -> None:
    """For about twenty seconds, or until the agent ends: one stale handle, or one error of a disk, ended it for good.

    Args:
        mended: the look that finds it mended.
        ended: the pause in which the agent ends.
    """
    new = put(directory.run("run-0001"), "step-1.e1.1")
    spoil(new.name)
    looks, survey = list[int](), directory.survey

    def surveys() -> Survey:
        looks.append(1)
        if len(looks) == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(directory.runs))
        if len(looks) == mended:
            spoil()
        return survey()

    monkeypatch.setattr(directory, "survey", surveys)
    storage, pauses = Storage(directory), Pauses(ended)
    storage._closing = pauses  # type: ignore[assignment]
    said: queue.SimpleQueue[Survey | str] = queue.SimpleQueue()
    again: list[str] = []
    storage.survey(said.put, said.put, again=again.append)
    seen = said.get(timeout=30)
    storage.close()
    assert len(again) >= len(pauses.seconds)
    assert "Stale file handle" in again[0]
    assert again[1].startswith("step-1.e1.1 is there")
    if mended == 4:
        assert isinstance(seen, Survey), seen
        assert told(seen) == {new.name}
        assert pauses.seconds == [1.0, 3.0, 6.0]
    else:
        assert isinstance(seen, str)
        assert "the file system does not let it be read (Input/output error)" in seen
        assert pauses.seconds == [1.0, 3.0, 6.0, 10.0][:ended]


def test_who_registers_again_passes_over_what_fails(directory: JobDirectory, spoil: Close, close: Close) -> None:
    """At once, and sees the directory still: without its probe the node would only be a spare.

    What this user may not read is passed over by nobody.
    """
    run = directory.run("run-0001")
    old, new = put(run, "step-1.e1.1"), put(run, "step-2.e1.1")
    spoil(new.name)
    storage, pauses = Storage(directory), Pauses(1000)
    storage._closing = pauses  # type: ignore[assignment]
    said: queue.SimpleQueue[Survey | str] = queue.SimpleQueue()
    storage.survey(said.put, said.put, patient=False)
    seen = said.get(timeout=30)
    assert isinstance(seen, Survey), seen
    assert (told(seen), seen.probe) == ({old.name}, directory.probe())
    assert pauses.seconds == []
    spoil()
    close(new.name)
    storage.survey(said.put, said.put, patient=False)
    seen = said.get(timeout=30)
    assert isinstance(seen, str)
    assert seen.startswith(f"{new.name} {UNREAD}")
    storage.close()
    assert sum(pauses.seconds) == pytest.approx(2.0)


@pytest.mark.parametrize("patient", [False, True])
def test_a_limit_of_this_process_is_no_file_system_that_fails(
    directory: JobDirectory, monkeypatch: pytest.MonkeyPatch, patient: bool
) -> None:
    """It is not waited for so long, and `mv` would not mend it."""
    put(directory.run("run-0001"), "step-1.e1.1")

    def starved(path: Path) -> Manifest:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(Manifest, "read", starved)
    storage, pauses = Storage(directory), Pauses(1000)
    storage._closing = pauses  # type: ignore[assignment]
    said: queue.SimpleQueue[Survey | str] = queue.SimpleQueue()
    storage.survey(said.put, said.put, patient=patient)
    seen = said.get(timeout=30)
    storage.close()
    assert sum(pauses.seconds) <= 2.0 + 1e-6
    if patient:
        assert isinstance(seen, str)
        assert seen.startswith("the checkpoint directory cannot be read: ")
        assert "Too many open files" in seen
    else:
        assert isinstance(seen, Survey), seen
        assert (told(seen), seen.probe) == (set(), directory.probe())


def test_who_owns_the_directory_is_looked_at_once(directory: JobDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody changes that in a moment."""
    looks = []

    def surveys() -> Survey:
        looks.append(1)
        raise NotPrivateError("it belongs to user 1")

    monkeypatch.setattr(directory, "survey", surveys)
    storage = Storage(directory)
    said: queue.SimpleQueue[Survey | str] = queue.SimpleQueue()
    storage.survey(said.put, said.put)
    assert said.get(timeout=30) == "the checkpoint directory cannot be read: it belongs to user 1"
    storage.close()
    assert len(looks) == 1


def test_a_registration_looks_no_more_once_the_agent_ends(
    directory: JobDirectory, close: Close, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it then."""
    close(put(directory.run("run-0001"), "step-1.e1.1").name)
    storage = Storage(directory)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()
    looks: list[bool] = []
    begun, survey = threading.Event(), directory.survey

    def surveys() -> Survey:
        begun.set()
        looks.append(storage._closing.wait(30))
        return survey()

    monkeypatch.setattr(directory, "survey", surveys)
    storage.survey(lambda survey: said.put("registers"), said.put)
    assert begun.wait(30)
    storage.close()
    assert said.get(timeout=30).startswith("step-1.e1.1 is there")
    assert looks == [True, True]


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


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Close:
    """Lets nobody read the manifests of these names, as on a bad sector; of no names: all again."""
    spoiled: set[str] = set()
    read = Manifest.read.__func__  # type: ignore[attr-defined]

    def failing(cls: type[Manifest], path: Path) -> Manifest:
        if path.name in spoiled:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        manifest: Manifest = read(cls, path)
        return manifest

    def spoil(*names: str) -> None:
        spoiled.clear()
        spoiled.update(names)

    monkeypatch.setattr(Manifest, "read", classmethod(failing))
    return spoil


def test_a_file_system_that_fails_lets_no_run_go_back(directory: JobDirectory, spoil: Close) -> None:
    """A master that has lost its record would, and give an epoch twice. To rename a checkpoint nobody has to read it.

    A Join goes on: the record says where the run stands.
    """
    run = directory.run("run-0001")
    old, new = put(run, "step-1.e1.1"), put(run, "step-2.e1.1")
    spoil(new.name)
    aside = run / f"aside-{new.name}"
    with pytest.raises(UnreadableError) as refused:
        directory.survey()
    assert str(refused.value) == (
        f"{new.name} is there, and may be the newest checkpoint, but the file system does not let it be read"
        " (Input/output error). This node does not start without it: mend the mount or disk. If other nodes cannot read"
        f" it either, and none trains, the run goes back without it after `mv {run / new.name} {aside}`; another"
        " --job-id begins anew"
    )
    assert told(directory.look("run-0001", new.to_proto().ref, None)) == {old.name}
    (run / new.name).rename(aside)
    assert told(directory.survey()) == {old.name}
    # An older one lacks nobody.
    aside.rename(run / new.name)
    spoil(old.name)
    assert told(another(directory).survey()) == {new.name}


def test_a_run_that_cannot_be_looked_at_is_not_passed_over(
    directory: JobDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is a directory, and whether it is finished: a stale handle said "no" to both."""
    old, new = put(directory.run("run-0001"), "step-1.e1.1"), put(directory.run("run-0002"), "step-1.e2.1")
    stale: set[Path] = set()
    stat = os.stat

    def stat_of(path: Path, *rest: object, **more: object) -> os.stat_result:
        if path in stale:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return stat(path, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", stat_of)
    for path in (directory.run("run-0002"), directory.run("run-0002") / "FINISHED.json"):
        stale.add(path)
        with pytest.raises(OSError, match="Stale file handle"):
            directory.survey()
        stale.clear()
    # Behind a newer run it matters to nobody.
    for path in (directory.run("run-0001"), directory.run("run-0001") / "FINISHED.json"):
        stale.add(path)
        assert told(directory.survey()) == {new.name}
        stale.clear()
    assert told(directory.survey()) == {old.name, new.name}


def test_a_join_waits_for_what_may_be_newer_and_passes_it_over(directory: JobDirectory, spoil: Close) -> None:
    """While the file system fails: it may work again in a moment. Then a line says what the run goes on without."""
    run = directory.run("run-0001")
    resume, late = put(run, "step-2.e1.1"), put(run, "step-3.e1.1")
    spoil(late.name)
    said: list[str] = []
    directory.complaint.say = lambda text, warning: said.append(text)
    storage = Storage(directory)
    seen: queue.SimpleQueue[Survey] = queue.SimpleQueue()
    try:
        for patient in (False, True):
            storage.look("run-0001", resume.to_proto().ref, patient, seen.put, seconds=0.5)
            assert told(seen.get(timeout=30)) == {resume.name}
        assert said == [
            f"{late.name} may have been saved last, but the file system does not let it be read (Input/output error):"
            " the run goes on without it"
        ]
        storage.look("run-0001", resume.to_proto().ref, False, seen.put, seconds=60.0)
        with pytest.raises(queue.Empty):
            seen.get(timeout=1.0)
        spoil()
        assert told(seen.get(timeout=30)) == {resume.name, late.name}
    finally:
        storage.close()


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
    assert said[0].startswith(f"step-2.e1.1 {UNREAD} (Permission denied)")
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


def surveys(place: str) -> str:
    """What user 6001's agent sees there, or the line that it ends with."""
    words = [sys.executable, "-c", SURVEYS, place]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, timeout=60).stdout.strip()


@contextlib.contextmanager
def job_of_a_user() -> Iterator[tuple[str, JobDirectory, Manifest, Manifest]]:
    """Where it is, that directory, and of its two checkpoints the user's, and the newer one that root has closed."""
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
        yield place, directory, mine, roots


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_what_root_has_saved_is_named_with_its_owner() -> None:
    """A user's job whose newest two checkpoints root has made, with its umask of 077: no line said more than "gone"."""
    with job_of_a_user() as (place, directory, _, roots):
        run = directory.run("run-0001")
        newest, manifest = run / roots.name, run / roots.name / "MANIFEST.json"
        beginning = f"step-2.e1.1 {UNREAD}"
        give = f"let one user run all of a job, and give that user what is there (as root: `chown -R --reference={run}"
        back = f"or, to go back without it: `mv {newest} {run}/aside-step-2.e1.1`; another --job-id begins anew"
        assert surveys(place) == (
            f"{beginning} (Permission denied): {newest} belongs to user root (mode 700), this agent is of user 6001."
            f" The run does not go on without it: {give} {newest}`), {back}"
        )
        # A checkpoint that can be entered, with files of its owner's alone: all of them are to be given.
        os.chmod(newest, 0o755)
        os.chmod(manifest, 0o600)
        assert surveys(place) == (
            f"{beginning} (Permission denied): {manifest} belongs to user root (mode 600), this agent is of user 6001."
            f" The run does not go on without it: {give} {newest}`), {back}"
        )
        os.chmod(newest, 0o700)
        # In a run of root's, too, its user can neither be given it nor move it.
        os.chown(run, 0, 0)
        os.chmod(run, 0o755)
        assert surveys(place).endswith(": let user root run all of the job, as before; another --job-id begins anew")
        os.chown(run, 6001, 6001)
        # The agent's own, of a mode that is wrong.
        os.chown(newest, 6001, 6001)
        os.chown(manifest, 6001, 6001)
        os.chmod(manifest, 0o000)
        assert f"{manifest} belongs to user 6001 (mode 0), this agent is of user 6001." in surveys(place)
        assert surveys(place).endswith(f" let it be read (`chmod -R u+rwX {newest}`), {back}")
        os.chmod(newest, 0o000)
        assert f"{newest} belongs to user 6001 (mode 0), this agent is of user 6001." in surveys(place)
        assert surveys(place).endswith(f" let it be read (`chmod -R u+rwX {newest}`), {back}")
        os.chmod(newest, 0o700)
        os.chmod(manifest, 0o600)
        assert surveys(place) == "['step-2.e1.1', 'step-1.e1.1']"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_who_moves_it_aside_goes_back_without_it() -> None:
    """As the line says, without root: a directory of another's can be renamed where it is. Nobody deletes it then."""
    with job_of_a_user() as (place, directory, mine, roots):
        run = directory.run("run-0001")
        line = surveys(place)
        move = line.partition("to go back without it: `")[2].partition("`")[0]
        assert move.startswith("mv ")
        subprocess.run(["sh", "-c", move], check=True, user=6001, group=6001, extra_groups=[], cwd="/")
        aside = run / f"aside-{roots.name}"
        assert aside.is_dir()
        assert surveys(place) == "['step-1.e1.1']"
        # Root, who may delete everything, deletes all but that.
        os.chmod(aside, 0o755)
        (run / "step-1.e1.2").mkdir()
        storage = Storage(directory)
        try:
            storage.sweep("run-0001", 9)
            done = threading.Event()
            storage.prune("run-0001", [mine.to_proto().ref, roots.to_proto().ref], lambda pruned: done.set())
            assert done.wait(30)
        finally:
            storage.close()
        assert inspect(run) == Inventory((), ())
        assert {path.name for path in aside.iterdir()} >= {"MANIFEST.json"}


def test_what_a_rule_of_the_mount_forbids_no_mode_mends(
    directory: JobDirectory, close: Close, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the agent's own file of mode 600 the line told its owner to let him read it by `chmod`."""
    run = directory.run("run-0001")
    new = put(run, "step-1.e1.1")
    close(new.name)
    rule = "The run does not go on without it: let it be read (a rule of the mount forbids it: ACL, SELinux), or"
    with pytest.raises(UnreadableError, match=re.escape(rule)):
        directory.survey()
    os.chmod(run / new.name / "MANIFEST.json", 0o200)
    with pytest.raises(UnreadableError, match=re.escape(f"let it be read (`chmod -R u+rwX {run / new.name}`), or")):
        directory.survey()


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
