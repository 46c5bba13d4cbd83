"""What people hear of a checkpoint directory that cannot be read or written."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from dalsegno.agent.storage.job_directory import JobDirectory, Storage, StorageError, Survey

# Everything is imported as root: the other users may not be able to read the interpreter's files.
PREPARES = """
import os, sys
from pathlib import Path
from dalsegno.agent.storage import job_directory

os.umask(0o077)
os.setgroups([])
os.setgid(int(sys.argv[2]))
os.setuid(int(sys.argv[2]))
try:
    job_directory.JobDirectory(Path(sys.argv[1]), sys.argv[3]).prepare()
except job_directory.StorageError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become two users")
def test_what_another_user_has_made_is_named_with_its_owner() -> None:
    """Two users share a directory that all may write; what the first one made there the second one may not enter."""

    def prepares(user: int, job: str) -> str:
        words = [sys.executable, "-c", PREPARES, str(root), str(user), job]
        return subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        root = Path(place) / "shared"
        root.mkdir()
        root.chmod(0o777)
        assert prepares(6001, "job") == ""
        rest = "and user 6002 cannot use it (Permission denied): let one user run all of a job, or give another"
        ours = root / ".dalsegno"
        assert prepares(6002, "job") == f"{ours} belongs to user 6001 (mode 700), {rest} --checkpoint-dir"
        ours.chmod(0o777)
        shutil.rmtree(ours / "job")
        runs = root / "job"
        assert prepares(6002, "job") == f"{runs} belongs to user 6001 (mode 700), {rest} --checkpoint-dir or --job-id"
        assert prepares(6002, "another") == ""
        root.chmod(0o755)
        assert prepares(6002, "third") == f"{root} belongs to user root (mode 755), {rest} --checkpoint-dir"


ASKS = """
import argparse, os, sys
from dalsegno.agent.commands.asking import AskedMaster

os.setgroups([])
os.setgid(6002)
os.setuid(6002)
try:
    AskedMaster(argparse.Namespace(master=None, checkpoint_dir=sys.argv[1], job_id=sys.argv[2]))
except ValueError as error:
    print(error)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("closed", ["job", "."])
def test_who_asks_for_the_job_of_another_is_told_whose_it_is(named: bool, closed: str) -> None:
    """As in the command that runs it, and not only that permission is denied; also if no job is named."""
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        private = Path(place) / ".dalsegno"
        (private / "finished").mkdir(parents=True)
        (private / "job").mkdir()
        (private / "job" / "claim.json").write_text("{}")
        os.chmod(private / closed, 0o700)
        os.chown(private / closed, 6001, 6001)
        words = [sys.executable, "-c", ASKS, place, "job" if named else ""]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
        other = " or --job-id" if closed == "job" else ""
        assert done.stdout == (
            f"{private / closed} belongs to user 6001 (mode 700), and user 6002 cannot use it"
            f" (Permission denied): let one user run all of a job, or give another --checkpoint-dir{other}\n"
        )


def test_a_file_in_its_place_is_still_said_of_the_directory(tmp_path: Path) -> None:
    """Nothing of another user's is in the way: the line names the checkpoint directory, as ever."""
    (tmp_path / "ck").write_text("")
    with pytest.raises(StorageError, match=r"the checkpoint directory .*/ck cannot be written \(Not a directory\)"):
        JobDirectory(tmp_path / "ck", "job").prepare()


def test_who_cannot_read_the_directory_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The master only learns that it is not seen. The reason is this machine's, so its console has it, once."""
    directory = JobDirectory(tmp_path / "ck", "job")
    directory.prepare()
    said: list[str] = []
    directory.complaint.say = lambda text, warning: said.append(text)
    storage = Storage(directory)
    tries = iter([errno.EMFILE, errno.EMFILE, errno.ENOENT, 0, errno.EMFILE])

    def look(*anything: object) -> Survey:
        if number := next(tries):
            raise OSError(number, os.strerror(number), str(directory.runs))
        return Survey("probe", (), ())

    monkeypatch.setattr(directory, "look", look)
    try:
        for _ in range(5):
            done = threading.Event()
            storage.look("run-0001", None, False, lambda survey, done=done: done.set())  # type: ignore[misc]
            assert done.wait(10)
    finally:
        storage.close()
    directory.complaint.over()
    directory.complaint(MemoryError())
    assert "checkpoint directory: there is not enough memory (" in said.pop()
    limit = "this process may have no more files open (ulimit -n: "
    assert [line.startswith(f"this node cannot read the checkpoint directory: {limit}") for line in said] == [True] * 2
