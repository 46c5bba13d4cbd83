"""The job's private directory: what others put there, or could have, is not believed."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest

from dalsegno.agent.control.claim import ClaimFile
from dalsegno.agent.control.spawning import TokenLostError, make_token, read_token
from dalsegno.agent.storage import private
from dalsegno.agent.storage.job_directory import JobDirectory, StorageError
from dalsegno.agent.storage.private import NotPrivateError, check_private, open_private, put_aside, read_private

STRANGER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to somebody else")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    one = tmp_path / "job"
    one.mkdir(mode=0o700)
    return one


def test_a_directory_of_ours_is_taken(tmp_path: Path) -> None:
    """As the agent makes it, again and again, and nothing is left behind."""
    job = JobDirectory(tmp_path / "checkpoints", "job")
    for _ in range(2):
        job.prepare()
    assert list(job.private.iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o1777, 0o702])
def test_a_directory_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    """Token and claim could be anybody's; the line says what to do."""
    job = JobDirectory(tmp_path, "job")
    job.prepare()
    job.private.chmod(mode)
    with pytest.raises(StorageError, match=f"mode {mode:o}.*chmod go-w"):
        job.prepare()


@needs_root
def test_a_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """Made before the job's first start, in a checkpoint directory that many can write."""
    job = JobDirectory(tmp_path, "job")
    job.prepare()
    os.chown(job.private, STRANGER, STRANGER)
    with pytest.raises(StorageError) as refused:
        job.prepare()
    # Not to delete it: what else runs the job would train on, and this agent begin it a second time.
    assert str(refused.value) == (
        f"{job.private} belongs to user {STRANGER}, what this agent makes there to user 0: let one user run all of a"
        f" job, so run this as user {STRANGER}, or give another --job-id or --checkpoint-dir"
    )


@needs_root
def test_a_directory_that_is_put_in_its_place_is_not_believed(tmp_path: Path) -> None:
    """Who owns `.dalsegno` can move a job's directory away in mid-run, and make one with a token and claim of his."""
    job = JobDirectory(tmp_path, "job")
    job.prepare()
    token = job.private / "token"
    job.private.rename(tmp_path / "away")
    job.private.mkdir()
    token.write_text("0123456789abcdef")
    token.chmod(0o600)
    for path in (job.private, token):
        os.chown(path, STRANGER, STRANGER)
    with pytest.raises(NotPrivateError, match=f"belonged to user 0, and belongs to user {STRANGER} now"):
        read_token(job.private)


@needs_root
def test_root_reads_what_a_user_has_made(directory: Path) -> None:
    """As `dalsegno status` does: only who has made the directory knows that it is its own."""
    (directory / "claim.json").write_text("{}")
    for path in (directory, directory / "claim.json"):
        os.chown(path, STRANGER, STRANGER)
    assert read_private(directory / "claim.json") == b"{}"


@needs_root
def test_root_squash_makes_us_somebody_else(directory: Path) -> None:
    """Everything that root makes there is nobody's: that is ours, as the file system has it."""
    os.chown(directory, STRANGER, STRANGER)
    with mock.patch.object(private, "_owner_of_ours", return_value=STRANGER):
        check_private(directory)


def test_a_link_to_a_directory_is_refused(tmp_path: Path, directory: Path) -> None:
    """It would have the agent write among other files of its user."""
    (tmp_path / "link").symlink_to(directory)
    with pytest.raises(NotPrivateError, match="is a link"):
        check_private(tmp_path / "link")


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "directory"])
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY | os.O_APPEND | os.O_CREAT, os.O_RDWR | os.O_CREAT])
def test_only_regular_files_are_opened(tmp_path: Path, directory: Path, kind: str, flags: int) -> None:
    """At once, and nothing is written through a link."""
    victim, path = tmp_path / "victim", directory / "master.log"
    match kind:
        case "link":
            victim.write_bytes(b"mine")
            path.symlink_to(victim)
        case "dangling":
            path.symlink_to(victim)
        case "pipe":
            os.mkfifo(path)
        case _:
            path.mkdir()
    with pytest.raises(NotPrivateError, match="no regular file"):
        open_private(path, flags)
    assert victim.exists() == (kind == "link")


@needs_root
def test_a_file_of_somebody_else_is_not_read(directory: Path) -> None:
    """A planted token lets its owner in, a planted claim names any process."""
    for name in ("token", "claim.json"):
        (directory / name).write_text("x" * 64)
        (directory / name).chmod(0o600)
        os.chown(directory / name, STRANGER, STRANGER)
    with pytest.raises(NotPrivateError, match=f"belongs to user {STRANGER}"):
        read_token(directory)
    with pytest.raises(NotPrivateError, match=f"belongs to user {STRANGER}.*while no node runs the job, delete it"):
        ClaimFile(directory).read()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_token_that_others_know_is_refused(directory: Path, mode: int) -> None:
    """The line says how to keep it, and how to get another."""
    make_token(directory)
    (directory / "token").chmod(mode)
    with pytest.raises(NotPrivateError, match=f"mode {mode:o}.*chmod 600.*delete"):
        read_token(directory)


@pytest.mark.parametrize(
    "damage", [b"\n", b"short", b"\xff" * 40, "ä".encode() * 40, b"two words of a token.", b"\0" * 64]
)
def test_a_damaged_token_is_put_aside(directory: Path, damage: bytes) -> None:
    """Said once; the old bytes stay under another name; the new one is good."""
    assert make_token(directory) == ""
    first = read_token(directory)
    assert make_token(directory) == ""
    assert read_token(directory) == first
    (directory / "token").write_bytes(damage)
    with pytest.raises(TokenLostError, match="damaged"):
        read_token(directory)
    assert "put aside as token.damaged-1" in make_token(directory)
    assert (directory / "token.damaged-1").read_bytes() == damage
    assert read_token(directory) != first
    assert sorted(path.name for path in directory.iterdir()) == ["token", "token.damaged-1"]


def test_an_empty_token_is_waited_for_and_put_aside(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the mount has no links it is empty for a moment; for longer, it is damaged."""
    monkeypatch.setattr(private, "PUBLISHED_TRIES", 2)
    (directory / "token").touch(mode=0o600)
    assert "put aside" in make_token(directory)
    assert len(read_token(directory)) == 64


def test_a_missing_token_is_made_without_a_word(directory: Path) -> None:
    """A job's first start."""
    with pytest.raises(TokenLostError, match="there is no"):
        read_token(directory)
    assert make_token(directory) == ""
    assert read_token(directory)


def test_what_is_put_aside_does_not_pile_up(directory: Path) -> None:
    """The first few stay as they are; then the last name is used again."""
    for number in range(12):
        (directory / "token").write_text(str(number))
        put_aside(directory / "token")
    kept = {path.name: path.read_text() for path in directory.iterdir()}
    assert kept == {f"token.damaged-{number + 1}": str(number) for number in range(8)} | {"token.damaged-9": "11"}


def test_a_large_file_is_not_read_whole(directory: Path) -> None:
    """Nothing of ours is large."""
    (directory / "token").write_bytes(b"x" * (1 << 20))
    assert len(read_private(directory / "token")) == 1 << 16
