"""Each agent of a machine has sockets and shared memory of its own."""

from __future__ import annotations

import fcntl
import os
import secrets
from pathlib import Path

from dalsegno.agent.dlrover import names
from dalsegno.agent.dlrover.claims import NameClaim, sweep


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


def test_what_a_dead_agent_left_is_swept() -> None:
    """Its keeper was killed with it. A living one keeps everything."""
    job = job_id()
    dead, living = NameClaim(job), NameClaim(job)
    left, kept = fill(dead.name), fill(living.name)
    os.close(dead._lock)  # as the kernel does it
    assert dead.name in sweep()
    assert not any(path.exists() for path in left)
    assert all(path.exists() for path in kept)
    living.close()
