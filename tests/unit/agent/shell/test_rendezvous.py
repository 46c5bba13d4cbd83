"""Plain torchrun's rendezvous handler, without a master."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousParameters

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions import handling
from dalsegno.agent.shell import effects
from dalsegno.agent.shell.rendezvous import Rendezvous, create
from dalsegno.protos.contract import CONNECT_TIMEOUT_SECONDS
from tests.support.jobs.programs import wait_for

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def kept_environment() -> Iterator[None]:
    """What a rendezvous does to its environment is undone."""
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture
def rendezvous(tmp_path: Path, kept_environment: None) -> Iterator[Rendezvous]:
    """Of a node whose master does not answer."""
    places = {"checkpoint_dir": str(tmp_path / "ck"), "log_dir": str(tmp_path / "logs")}
    one = create(RendezvousParameters("dalsegno", "127.0.0.1:1", "job", 1, 2, **places))
    assert isinstance(one, Rendezvous)
    yield one
    one.shutdown()


@pytest.mark.usefixtures("kept_environment")
def test_a_master_that_has_no_address_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it was waited for; torch would show its own stack."""

    def never(
        masters: Sequence[str], local_addr: str | None, several: bool, seconds: float, say: object, others: bool
    ) -> str:
        wanted = ("node0:1",), None, True, CONNECT_TIMEOUT_SECONDS, False
        assert (masters, local_addr, several, seconds, others) == wanted
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(effects, "first_address", never)
    places = {"checkpoint_dir": str(tmp_path / "ck"), "log_dir": str(tmp_path / "logs")}
    wanted = "^torchrun: error: node0:1 cannot be reached: Name or service not known; check --rdzv-endpoint$"
    with pytest.raises(SystemExit, match=wanted):
        create(RendezvousParameters("dalsegno", "node0:1", "job", 1, 2, **places))


@pytest.mark.usefixtures("kept_environment")
def test_an_address_of_its_own_that_means_nothing_is_named(tmp_path: Path) -> None:
    """Not the master's, which may be well."""
    places = {"checkpoint_dir": str(tmp_path / "ck"), "log_dir": str(tmp_path / "logs"), "local_addr": "mine.invalid"}
    with pytest.raises(SystemExit, match=r"^torchrun: error: --local-addr=mine\.invalid has no address: "):
        create(RendezvousParameters("dalsegno", "127.0.0.1:1", "job", 1, 2, **places))


@pytest.mark.usefixtures("kept_environment")
def test_a_directory_for_logs_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    """torch would show a stack."""
    (tmp_path / "file").touch()
    places = {"checkpoint_dir": str(tmp_path / "ck"), "log_dir": str(tmp_path / "file" / "logs")}
    with pytest.raises(
        SystemExit, match=r"^torchrun: error: log_dir in --rdzv-conf: .*/logs cannot be written \(Not a"
    ):
        create(RendezvousParameters("dalsegno", "127.0.0.1:1", "job", 1, 2, **places))


@pytest.mark.slow
def test_what_cannot_be_decided_ends_the_node(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its thread ends by a mistake of ours: torch's agent stops the workers and hears why, and does not go on deaf."""

    def fails(*_: object) -> None:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(handling, "handle", fails)
    rendezvous._mailbox.put(ev.Tick())
    wait_for(rendezvous.is_closed, 20, "it goes on")
    assert rendezvous.num_nodes_waiting() == 1, "torch's agent stops its workers"
    with pytest.raises(RendezvousClosedError, match="a mistake"):
        rendezvous.next_rendezvous()
    began = time.monotonic()
    rendezvous.shutdown()
    assert time.monotonic() - began < 25, "it waits for a thread that has ended"
    said = capfd.readouterr().err
    assert "torchrun: warning: the agent cannot go on (RuntimeError('a mistake'))" in said
    assert "Traceback" not in said
