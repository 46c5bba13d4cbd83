"""`dalsegno status` by a person who names no job: which one is meant, and one line where nobody answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.agent.commands.dalsegno import run
from dalsegno.agent.commands.status import status_lines
from dalsegno.elastic.checkpoint import CheckpointStore
from dalsegno.protos import control_pb2 as pb
from tests.unit.agent.storage.test_storage import make_checkpoint


@pytest.fixture
def listener() -> Iterator[str]:
    """Where somebody listens (who closes every connection at once, so that nobody waits)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def gone() -> str:
    """Where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def claim(directory: Path, job: str, address: str) -> None:
    private = directory / ".dalsegno" / job
    private.mkdir(parents=True)
    fields = {"host": "h", "boot_id": "b", "pid": 1, "start_time": 1, "generation": 1, "counter": 1}
    (private / "claim.json").write_text(json.dumps({**fields, "address": address}), encoding="utf-8")
    (private / "token").write_text("x" * 32, encoding="ascii")
    (private / "token").chmod(0o600)


def ask(directory: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = run(["status", f"--checkpoint-dir={directory}"])
    return code, capsys.readouterr().err


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("run", ["", "run-0010"])
def test_a_job_that_nobody_runs_is_said_to_be_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], run: str, checkpoint: bool
) -> None:
    """Not a word of gRPC's; how far it came, and what to do."""
    claim(tmp_path, "job-1", gone())
    if run:
        (tmp_path / "job-1" / "run-0009").mkdir(parents=True)
        (tmp_path / "job-1" / run).mkdir()
        if checkpoint:
            make_checkpoint(tmp_path / "job-1" / run, "step-12.e1.1")
    code, said = ask(tmp_path, capsys)
    assert code == 1
    assert len(said.splitlines()) == 1
    assert "nobody runs job job-1 just now" in said
    assert "dlrover-run command" in said
    assert ("run-0010 is not finished" in said) == bool(run)
    assert ("goes on from step 12" in said) == bool(run and checkpoint)
    assert ("nothing of it was saved" in said) == (not run), "it may have failed before its first save"
    assert "UNAVAILABLE" not in said


@pytest.mark.slow
def test_a_finished_job_says_so_from_what_it_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its master is gone, and that is no failure; a limit can no longer be set."""
    claim(tmp_path, "job-1", gone())
    directory = tmp_path / "job-1" / "run-0001"
    directory.mkdir(parents=True)
    make_checkpoint(directory, "step-12.e1.1")
    CheckpointStore(directory).mark_finished(12, None)
    assert run(["status", f"--checkpoint-dir={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "job job-1, run-0001: finished; its newest checkpoint is step-12.e1.1" in said
    assert "--new-run" in said
    assert run(["status", "--json", f"--checkpoint-dir={tmp_path}"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["phase"], answer["reason"]) == ("PHASE_SUCCEEDED", said.strip())
    assert (answer["run_id"], answer["step"], answer["epoch"]) == ("run-0001", 12, 1)
    assert run(["scale", "2", f"--checkpoint-dir={tmp_path}"]) == 1
    assert "finished" in capsys.readouterr().err


@pytest.mark.slow
def test_of_several_jobs_the_one_that_runs_is_meant(
    tmp_path: Path, listener: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are over, and their claims stay."""
    monkeypatch.setattr("dalsegno.agent.commands.asking.TIMEOUT_SECONDS", 0.1)
    claim(tmp_path, "before", gone())
    claim(tmp_path, "now", listener)
    code, said = ask(tmp_path, capsys)
    assert code == 1
    assert listener in said


def test_of_several_that_run_none_is_meant(tmp_path: Path, listener: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The person has to say which, and hears their names; so where none runs."""
    for name, address in (("one", listener), ("two", listener)):
        claim(tmp_path / "both", name, address)
        claim(tmp_path / "neither", name, gone())
    for directory in ("both", "neither"):
        code, said = ask(tmp_path / directory, capsys)
        assert code == 2
        assert "--job-id" in said
        assert "known here: one, two" in said


def test_where_no_job_was_the_directory_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ask(tmp_path, capsys)
    assert code == 2
    assert "--checkpoint-dir" in said


def test_the_open_epoch_goes_on() -> None:
    """Its record in the history has the first of its steps only; how far it is by now, the job says."""
    history = [
        pb.EpochRecord(epoch=1, cause="a joined", nodes=1, first_step=1, last_step=28),
        pb.EpochRecord(epoch=2, cause="b joined", nodes=2, first_step=29, last_step=29, lost_steps=1),
    ]
    reply = pb.StatusReply(job_id="job", epoch=2, step=97, phase=pb.PHASE_RUNNING, history=history)
    _, first, second = status_lines(reply)
    assert "1 node, steps 1 to 28, paused 0.0 s, lost 0 steps" in first
    assert "2 nodes, steps 29 to now, paused 0.0 s, lost 1 step" in second
    reply.phase = pb.PHASE_WAITING
    assert "steps 29 to 97," in status_lines(reply)[2]
    # A master that took the record of a finished run over has heard of no step.
    reply.phase, reply.step, reply.history[1].last_step = pb.PHASE_SUCCEEDED, 28, 120
    assert "succeeded, epoch 2, step 120" in status_lines(reply)[0]


def test_a_master_that_can_record_nothing_says_so() -> None:
    """Beside who leads: else all looks well but for a commit that gets older."""
    reply = pb.StatusReply(job_id="job", phase=pb.PHASE_RUNNING, store_trouble="cannot write the store in etcd: full")
    assert (
        "  the master cannot record anything now: cannot write the store in etcd: full; changes wait, training goes on"
        in (status_lines(reply))
    )
    reply.store_trouble = ""
    assert not any("cannot record" in line for line in status_lines(reply))


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("b is a spare: the world has 1 node", ": the world has 1 node"),
        ("b does not see the job's checkpoint directory", ": does not see the job's checkpoint directory"),
        ("another node has failed with b", ": another node has failed with b"),
        ("", ""),
    ],
)
def test_a_spare_says_why_it_is_one(reason: str, said: str) -> None:
    """Behind its name, which the reason begins with, too."""
    reply = pb.StatusReply(job_id="job", phase=pb.PHASE_RUNNING)
    reply.nodes.add(node="b", role="spare", host="h", nproc=2, reason=reason)
    assert status_lines(reply)[1] == f"  spare  b on h, 2 workers{said}"
