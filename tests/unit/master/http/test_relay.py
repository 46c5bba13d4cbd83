"""What a Commander refuses before anything is started."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra relay")
pytest.importorskip("yaml", reason="needs the extra relay")

from dalsegno.master import cli
from dalsegno.master.brain.events import Called
from dalsegno.master.brain.state import Settings
from dalsegno.master.commander import Commander
from dalsegno.master.http import leases
from dalsegno.master.record.codec import JobCodec
from dalsegno.master.record.store import Store, StoreError
from dalsegno.master.server.job_brain import JobBrain
from dalsegno.master.server.server import ServerOptions
from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.failing import fails_now
from dalsegno.protos.options import UsageError
from dalsegno.protos.run_file import read_run_file
from tests.support.jobs.commander import run_file


def never(store: Store) -> None:
    """No record is looked at."""
    raise AssertionError


def test_bad_files_and_stores_are_one_line(tmp_path: Path) -> None:
    """Each says what to change."""
    good, other = run_file(tmp_path), run_file(tmp_path, "b")
    bad = tmp_path / "bad.yaml"
    bad.write_text(json.dumps({**json.loads(good.read_text()), "kommand": 1}), encoding="utf-8")
    same = tmp_path / "same.yaml"
    same.write_text(good.read_text(), encoding="utf-8")
    for files, store, port, line in [
        ([bad], "sqlite:///c.db", 0, "kommand: there is no such key, did you mean command?"),
        ([good, same], "sqlite:///c.db", 0, "there is another run 'my-run'"),
        ([tmp_path / "none.yaml"], "sqlite:///c.db", 0, "none.yaml cannot be read"),
        ([good], "etcd://localhost:1", 0, "with --relay each run has a file"),
        ([good], "sqlite:////", 0, "names no file"),
        ([good, other], "sqlite:///c.db", 65535, "each of 2 runs needs a port"),
    ]:
        with pytest.raises(UsageError, match=r"\A[^\n]+\Z") as refused:
            Commander(files, store, ServerOptions(port=port), wait=never)
        assert line in str(refused.value)
    assert not list(tmp_path.glob("c.*"))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--relay=r.yaml"], "--relay needs --http-port"),
        (["--relay=r.yaml", "--http-port=0", "--job-id=x"], "--job-id and --relay do not go together"),
        (["--relay=r.yaml", "--http-port=0", "--embedded"], "--embedded and --relay do not go together"),
        (["--relay=r.yaml", "--http-port=0", "--nnodes=2"], "--nnodes and --relay do not go together"),
        ([], "--job-id is missing"),
    ],
)
def test_flags_that_do_not_go_together(arguments: list[str], line: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, and one line."""
    assert cli.main([*arguments, "--store=sqlite:///c.db"]) == 2
    said = capfd.readouterr()
    assert (said.out, said.err.count("\n"), line in said.err) == ("", 1, True)


def test_the_run_file_decides_not_the_agents(tmp_path: Path) -> None:
    """Whatever the first agent's flags are; and a file that was changed counts from the next start on."""
    timeouts = []
    rows: dict[str, bytes] = {}
    for generation, lease in ((1, 20.0), (2, 40.0)):
        file = read_run_file(run_file(tmp_path, lease_seconds=lease))
        own = Settings(**asdict(leases.settings_of(file)))
        brain = JobBrain(file.run_id, (1, 1), settings=own)
        state = brain.begin(rows, generation, 100.0)
        request = pb.RegisterRequest(
            job_id=file.run_id,
            incarnation=f"i{generation}",
            node=f"n{generation}",
            host="h",
            nproc=1,
            settings=pb.Settings(min_nodes=1, max_nodes=1, node_unit=1, node_timeout=7.0),
            secret=b"x" * 32,
        )
        state, (reply,) = brain.handle_all(state, [Called(request)], 100.0)
        assert reply is not None
        assert isinstance(reply.message, pb.RegisterReply)
        timeouts.append(reply.message.settings.node_timeout)
        rows = JobCodec.everything(state.job)
    assert timeouts == [20.0, 40.0]


class Started:
    """A master that listens."""

    def __init__(self, port: int) -> None:
        self.address = f"127.0.0.1:{port}"

    async def start(self) -> None:
        """At once."""


def test_a_port_that_is_noted_is_not_written_again(tmp_path: Path) -> None:
    """A full disk, or a kill in the middle, would lose what agents that run know."""
    path, noted = run_file(tmp_path), tmp_path / "c.my-run.port"
    commander = Commander([path], f"sqlite:///{tmp_path}/c.db", ServerOptions(port=0), wait=never)
    file = read_run_file(path)
    asyncio.run(commander._start(Started(4711), file))  # type: ignore[arg-type]
    assert noted.read_text() == "4711\n"
    os.utime(noted, (1, 1))
    asyncio.run(commander._start(Started(4711), file))  # type: ignore[arg-type]
    assert (noted.read_text(), noted.stat().st_mtime) == ("4711\n", 1)


def test_a_noted_port_that_cannot_be_read_now_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other port would be noted in its place, and agents that run would have no master."""
    path, noted = run_file(tmp_path), tmp_path / "c.my-run.port"
    noted.write_text("4711\n")
    read = Path.read_text

    def fails(one: Path, *given: Any, **named: Any) -> str:
        if one == noted:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read(one, *given, **named)

    monkeypatch.setattr(Path, "read_text", fails)
    commander = Commander([path], f"sqlite:///{tmp_path}/c.db", ServerOptions(port=0), wait=lambda store: None)
    with pytest.raises(StoreError, match="Stale file handle") as found:
        commander._server(read_run_file(path), 0)
    assert fails_now(found.value)
