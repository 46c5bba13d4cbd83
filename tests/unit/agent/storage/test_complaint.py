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
