"""Each agent of a machine has sockets and shared memory of its own."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from dalsegno.agent.dlrover import claims, names
from dalsegno.agent.dlrover.claims import NameClaim, sweep
from dalsegno.agent.processes.lifeline import Lifeline


def job_id() -> str:
    return f"claims-{secrets.token_hex(4)}"


def fill(name: str) -> list[Path]:
    """What workers leave under a name."""
    made = [Path(names.sockets(name)) / "sharedlock_x.sock", Path(f"{names.segments(name)}0")]
    for path in made:
        path.touch()
    return [*made, Path(names.sockets(name)), Path(f"{names.segments(name)}owner")]


def test_two_agents_never_share_a_name() -> None:
    """The second gets another name; what the first removes is not the second's; a removed name is free again."""
    job = job_id()
    first, second = NameClaim(job), NameClaim(job)
    assert (first.name, second.name) == (job, f"{job}.2")
    assert Path(names.sockets(first.name)).stat().st_mode & 0o777 == 0o700
    mine, others = fill(first.name), fill(second.name)
    first.close()
    assert not any(path.exists() for path in mine)
    assert all(path.exists() for path in others)
    third = NameClaim(job)
    assert third.name == job
    third.close()
    second.close()


def test_what_shares_only_one_of_the_places_is_seen() -> None:
    """Containers may share memory and not the directory of sockets, or the other way round."""
    job = job_id()
    memory, directory = Path(f"{names.segments(job)}owner"), Path(names.sockets(f"{job}.2"))
    with memory.open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        directory.mkdir(parents=True)
        claim = NameClaim(job)
        assert claim.name == f"{job}.3"
        claim.close()
        assert memory.exists()
        assert directory.exists()
    memory.unlink()
    directory.rmdir()


def die(claim: NameClaim) -> None:
    """As the kernel does it."""
    os.close(claim._owner)
    os.close(claim._directory)


def test_what_a_dead_agent_left_is_swept() -> None:
    """Its keeper was killed with it. A living one keeps everything."""
    job = job_id()
    dead, living = NameClaim(job), NameClaim(job)
    left, kept = fill(dead.name), fill(living.name)
    die(dead)
    assert dead.name in sweep()
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in kept)
    living.close()


def test_an_agent_that_locks_only_the_file_is_alive() -> None:
    """One of an earlier version."""
    claim = NameClaim(job_id())
    kept = fill(claim.name)
    fcntl.flock(claim._directory, fcntl.LOCK_UN)
    assert claim.name not in sweep()
    assert all(path.exists() for path in kept)
    claim.close()


def told(lifeline: Lifeline, name: str) -> None:
    """Waits until the keeper knows of the claim."""
    descriptors = Path(f"/proc/{lifeline.keeper_pid}/fd")
    while not any(str(path.resolve()) == str(names.sockets(name)) for path in descriptors.iterdir()):
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["it closes", "it is killed, and another one sweeps"])
def test_a_keeper_leaves_the_next_ones_alone(how: str) -> None:
    """It comes last of all, when another agent may have the name. That one's sockets and memory went."""
    job, lifeline = job_id(), Lifeline()
    first = NameClaim(job)
    first.leave_to(lifeline)
    told(lifeline, job)
    mine = fill(job)
    if how == "it closes":
        first.close()
    else:
        die(first)
        assert job in sweep()
    assert not any(path.exists() for path in mine)
    second = NameClaim(job)
    assert second.name == job
    kept = fill(job)
    lifeline.close()
    assert all(path.exists() for path in kept)
    second.close()
    assert not any(path.exists() for path in kept)


def test_a_keeper_removes_what_a_killed_agent_left() -> None:
    """As the first keeper was told, and one that took its place."""
    job, lifeline = job_id(), Lifeline()
    claim = NameClaim(job)
    claim.leave_to(lifeline)
    told(lifeline, job)
    left = fill(job)
    os.kill(lifeline.keeper_pid, signal.SIGKILL)
    while not lifeline._respawns:
        time.sleep(0.01)
    told(lifeline, job)
    die(claim)
    lifeline.close()
    assert not any(path.exists() for path in left)


def test_a_keeper_that_hears_late_leaves_the_next_ones_alone() -> None:
    """Another keeper may have died in its place: what somebody holds is not this agent's any more."""
    claim, lifeline = NameClaim(job_id()), Lifeline()
    claim.leave_to(lifeline)
    told(lifeline, claim.name)
    kept = fill(claim.name)
    lifeline.close()
    assert all(path.exists() for path in kept)
    claim.close()


def test_an_agent_removes_no_others_claim() -> None:
    """A cleaner of temporary files was there, and then another agent."""
    job = job_id()
    first = NameClaim(job)
    for path in (Path(names.sockets(job)), Path(f"{names.segments(job)}owner")):
        path.rmdir() if path.is_dir() else path.unlink()
    second = NameClaim(job)
    assert second.name == job
    kept = fill(job)
    first.close()
    assert all(path.exists() for path in kept)
    second.close()


def test_who_sweeps_takes_only_what_it_has_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one swept first, and an agent took the name: between the opening of the owner's file and its lock."""
    job, lock = job_id(), fcntl.flock
    dead, taken = NameClaim(job), list[NameClaim]()
    die(dead)

    def flock(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        assert job in sweep()
        taken.append(NameClaim(job))
        lock(descriptor, how)

    monkeypatch.setattr(claims, "_names_in", lambda place: [f"{job}_ckpt_shm_owner"] if "shm" in place else [])
    monkeypatch.setattr(fcntl, "flock", flock)
    assert sweep() == []
    assert taken[0].name == job
    assert Path(names.sockets(job)).exists()
    assert Path(f"{names.segments(job)}owner").exists()
    taken[0].close()


def test_who_sweeps_finds_no_claim_without_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that is just being made: two agents would have one name."""
    job, lock = job_id(), fcntl.flock

    def flock(descriptor: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        assert job not in sweep()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    claim = NameClaim(job)
    assert claim.name == job
    assert Path(f"{names.segments(job)}owner").exists()
    claim.close()


@pytest.fixture
def left() -> Iterator[Path]:
    """A directory of sockets as a power cut leaves it: without its claim, which was in memory."""
    directory = Path(names.sockets(job_id()))
    directory.parent.mkdir(exist_ok=True)
    directory.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(directory / "sharedlock_x.sock"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def test_sockets_without_a_claim_are_swept(left: Path) -> None:
    """They stayed for ever, and the next agent of the job got another name."""
    segment = Path(f"{names.segments(left.name)}0")
    segment.touch()
    assert left.name in sweep()
    assert not left.exists()
    assert not segment.exists(), "the next agent that has the name would find it"


def test_an_agent_that_begins_is_left_alone(left: Path) -> None:
    """In a container with another shared memory, and of a version that held no lock here: no socket is there yet."""
    for path in left.iterdir():
        path.unlink()
    assert left.name not in sweep()
    assert left.exists()


def test_sockets_of_somebody_else_stay(left: Path) -> None:
    """DLRover's own launcher makes such directories, too: others may enter it, or somebody listens."""
    left.chmod(0o755)
    assert left.name not in sweep()
    left.chmod(0o700)
    with socket.socket(socket.AF_UNIX) as living:
        living.bind(str(left / "sharedqueue_x.sock"))
        living.listen()
        living.settimeout(0)
        assert left.name not in sweep()
        with pytest.raises(BlockingIOError):
            living.accept()  # it heard nothing of that
    descriptor = os.open(left, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as an agent in a container with shared memory of its own
    assert left.name not in sweep()
    os.close(descriptor)
    assert left.exists()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for /tmp/ckpt_sock; nothing is there yet."""
    for module in (names, claims):
        monkeypatch.setattr(module, "SOCKETS", PurePosixPath(tmp_path / "ckpt_sock"))
    return tmp_path / "ckpt_sock"


def test_a_place_that_others_can_change_is_refused(place: Path, tmp_path: Path) -> None:
    """Whoever can rename a directory there can put another in its place, and DLRover reads pickle from its sockets."""
    claim = NameClaim(job_id())
    claim.close()
    assert place.stat().st_mode & 0o7777 == 0o1777
    for mode in (0o777, 0o775):  # DLRover's classes make it as the umask says
        place.chmod(mode)
        NameClaim(job_id()).close()
        assert place.stat().st_mode & 0o7777 == mode | 0o1000
    place.rmdir()
    (tmp_path / "elsewhere").mkdir()
    place.symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "x").mkdir(mode=0o700)
    with pytest.raises(PermissionError, match="is a link or a file: delete it"):
        NameClaim(job_id())
    assert "x" not in sweep()
    assert (tmp_path / "elsewhere" / "x").exists()


def test_a_place_of_roots_that_others_can_change_is_refused() -> None:
    why = claims._unsafe(os.stat_result((0o040777, 1, 1, 2, 0, 0, 0, 0, 0, 0)))
    assert "can be changed by all users (mode 777)" in why
    assert "`chmod +t " in why


@pytest.mark.parametrize(("owner", "is_safe"), [(0, True), (1000, True), (1001, False)])
def test_a_place_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch, owner: int, is_safe: bool) -> None:
    """Its owner may rename what is in it, whatever its mode is. Root's is everybody's."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = os.stat_result((0o041777, 1, 1, 2, owner, owner, 0, 0, 0, 0))
    why = claims._unsafe(found)
    assert (why == "") == is_safe
    if why:
        assert "belongs to user 1001" in why
        assert "have root own it, `chown root: /tmp/ckpt_sock; chmod 1777 /tmp/ckpt_sock`" in why
