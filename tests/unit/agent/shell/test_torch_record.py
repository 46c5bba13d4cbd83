"""What torch's launcher leaves of a run is there, too."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server import api
from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup, WorkerSpec, WorkerState

from dalsegno.agent.decisions.events import EXIT_FAILED, EXIT_FINISHED, EXIT_LEFT_UNSAVED, WorkerExited
from dalsegno.agent.shell import torch_record
from dalsegno.agent.shell.rendezvous import NamedRendezvous
from dalsegno.agent.shell.torch_record import TorchRecord, recorded


def group_of(handler: str = "null") -> WorkerGroup:
    """Ranks 4 and 5, on a node with two."""
    spec = WorkerSpec("default", 2, NamedRendezvous("job"), entrypoint="python")
    spec.event_log_handler = handler
    group = WorkerGroup(spec)
    group.workers = [Worker(local, 4 + local, 4 + local, 6, 6) for local in range(2)]
    return group


def recorded_error(text: str, timestamp: int) -> str:
    """As torch's `@record` writes it."""
    extra = {"py_callstack": "", "timestamp": str(timestamp)}
    return json.dumps({"message": {"message": text, "extraInfo": extra}})


@pytest.fixture
def context(tmp_path: Path) -> Any:
    files = {local: str(tmp_path / f"{local}.json") for local in range(2)}
    return SimpleNamespace(error_files=files, pids=lambda: {0: 100, 1: 101})


@pytest.fixture
def reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that a scheduler looks for."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "reply.json"))
    return tmp_path / "reply.json"


def test_the_first_error_of_a_failed_job_is_where_its_launcher_looks(context: Any, reply: Path) -> None:
    """torchrun leaves it there, and the scheduler that has named the file reads why the job failed."""
    record = TorchRecord()
    Path(context.error_files[0]).write_text(recorded_error("it lost a peer", 20))
    Path(context.error_files[1]).write_text(recorded_error("out of luck", 10))
    record.exited(WorkerExited(1, 0, 1), context)
    record.exited(WorkerExited(1, 1, 3), context)
    result = record.result(EXIT_FAILED, group_of())
    assert result.state is WorkerState.FAILED
    assert {rank: failure.exitcode for rank, failure in result.failures.items()} == {4: 1, 5: 3}
    told = json.loads(reply.read_text())["message"]
    assert (told["message"], told["errorCode"]) == ("out of luck", 3)


@pytest.mark.parametrize("code", [EXIT_FINISHED, EXIT_LEFT_UNSAVED])
def test_a_job_that_has_not_failed_leaves_no_error(context: Any, reply: Path, code: int) -> None:
    """Whatever its workers met."""
    record = TorchRecord()
    Path(context.error_files[0]).write_text(recorded_error("out of luck", 10))
    record.exited(WorkerExited(1, 0, 1), context)
    record.result(code, group_of())
    assert not reply.exists()


def test_what_failed_in_an_earlier_world_is_forgotten(context: Any, reply: Path) -> None:
    """Another world has opened behind it."""
    record = TorchRecord()
    Path(context.error_files[0]).write_text(recorded_error("out of luck", 10))
    record.exited(WorkerExited(1, 0, 1), context)
    record.begin()
    assert not record.result(EXIT_FAILED, group_of()).failures
    assert not reply.exists()


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}"])
def test_a_file_that_is_none_of_torchs_costs_nothing(context: Any, reply: Path, text: str | None) -> None:
    """The script has no `@record`, or was killed while it wrote."""
    record = TorchRecord()
    if text is not None:
        Path(context.error_files[0]).write_text(text)
    record.exited(WorkerExited(1, 0, -9), context)
    assert record.result(EXIT_FAILED, group_of()).failures[4].exitcode == -9
    assert not reply.exists()


def test_a_reply_that_cannot_be_written_costs_nothing(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exit code is the job's."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "reply.json"))
    record = TorchRecord()
    Path(context.error_files[0]).write_text(recorded_error("out of luck", 10))
    record.exited(WorkerExited(1, 0, 1), context)
    with pytest.warns(UserWarning, match="Unable to write error to file"):
        assert record.result(EXIT_FAILED, group_of()).failures


class Agent(api.SimpleElasticAgent):
    """Runs nothing by itself."""

    _start_workers = _stop_workers = _monitor_workers = _shutdown = lambda *_, **__: None  # type: ignore[assignment]

    def __init__(self, group: WorkerGroup) -> None:
        super().__init__(group.spec)
        self._worker_group = group


@pytest.mark.parametrize(("handler", "heard"), [("console", True), ("null", False)])
def test_torchs_events_are_recorded(context: Any, monkeypatch: pytest.MonkeyPatch, handler: str, heard: bool) -> None:
    """Each worker's start, how it ended, and the agent's own end, for whoever wants them; else no name is asked for."""
    told = []
    for module in (api, torch_record):
        monkeypatch.setattr(module, "record", lambda event, to: told.append((event.metadata, to)))
    if not heard:
        monkeypatch.setattr(api, "_get_fq_hostname", lambda: pytest.fail("asked for a name"))
    record, agent = TorchRecord(), Agent(group_of(handler))
    with recorded(agent):
        record.started(agent)
    with pytest.raises(OSError, match="no room"), recorded(agent):
        raise OSError("no room")
    assert [found["state"] for found, _ in told] == (["START", "START", "SUCCEEDED", "FAILED"] if heard else [])
    assert {to for _, to in told} <= {handler}
    if heard:
        record.exited(WorkerExited(1, 1, 3), context)
        told.clear()
        agent._record_worker_events(record.result(EXIT_FAILED, agent.get_worker_group()))
        assert [found["state"] for found, _ in told] == ["TERMINATED", "FAILED"]
