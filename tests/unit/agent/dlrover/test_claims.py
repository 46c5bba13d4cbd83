"""Each agent of a machine has sockets and shared memory of its own."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from dalsegno.agent.dlrover import claims, names


def test_two_agents_never_share_a_name() -> None:
    """The second gets another name; what the first removes is not the second's; a removed name is free again."""
    job = f"claims-{secrets.token_hex(4)}"
    first, second = claims.claim(job), claims.claim(job)
    try:
        assert (first, second) == (job, f"{job}.2")
        assert Path(names.sockets(first)).stat().st_mode & 0o777 == 0o700
        (Path(names.sockets(first)) / "sharedlock_x.sock").touch()
        Path(f"{names.segments(first)}0").touch()
        claims.remove(first)
        assert not Path(names.sockets(first)).exists()
        assert not Path(f"{names.segments(first)}0").exists()
        assert Path(names.sockets(second)).is_dir()
        assert os.path.exists(f"{names.segments(second)}owner")
        assert claims.claim(job) == job
    finally:
        claims.remove(job)
        claims.remove(f"{job}.2")


def test_what_shares_only_one_of_the_places_is_seen() -> None:
    """Containers may share memory and not the directory of sockets, or the other way round."""
    job = f"claims-{secrets.token_hex(4)}"
    memory, directory = Path(f"{names.segments(job)}owner"), Path(names.sockets(f"{job}.2"))
    memory.touch()
    directory.mkdir(parents=True)
    try:
        assert claims.claim(job) == f"{job}.3"
    finally:
        memory.unlink()
        directory.rmdir()
        claims.remove(f"{job}.3")
