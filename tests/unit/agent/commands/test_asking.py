"""Whom a command asks while another master takes the job over."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import threading
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from dalsegno.agent.commands import asking, dalsegno
from dalsegno.agent.commands.asking import AskedMaster, NoAnswer
from dalsegno.agent.commands.dalsegno import run
from dalsegno.agent.control.claim import Claim, ClaimFile
from dalsegno.agent.control.spawning import make_token
from dalsegno.elastic.checkpoint import CheckpointStore
from dalsegno.protos import control_pb2 as pb
from dalsegno.protos import control_pb2_grpc
from dalsegno.protos.contract import LEADER_METADATA
from dalsegno.protos.plain_json import plain
from tests.support.jobs.ports import free_port

pytestmark = [pytest.mark.timeout(60), pytest.mark.slow]


class Master(control_pb2_grpc.ControlServicer):
    """Stands by, and names a leader that is gone, until it was asked so often; then it leads."""

    def __init__(self, leader: str, leads_after: int) -> None:
        self.leader, self.left, self.asked = leader, leads_after, 0

    def GetStatus(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
        self.asked += 1
        if self.left >= self.asked:
            named = ((LEADER_METADATA, self.leader),) if self.leader else ()
            context.set_trailing_metadata((("grpc-retry-pushback-ms", "-1"), *named))
            context.abort(grpc.StatusCode.UNAVAILABLE, f"this master stands by: the master at {self.leader} leads")
        return pb.StatusReply(job_id="gpt")


def ask(master: Master, *first: str, gone_last: bool = False) -> pb.StatusReply:
    """As a command does that was given this master and, before or behind it, the one that is gone."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    control_pb2_grpc.add_ControlServicer_to_server(master, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    gone, here = master.leader or f"127.0.0.1:{free_port()}", f"127.0.0.1:{port}"
    try:
        return asked(*first, *((here, gone) if gone_last else (gone, here)))
    finally:
        server.stop(0).wait(5)


def asked(*addresses: str) -> pb.StatusReply:
    """The answer of the first of these masters that has one."""
    options = argparse.Namespace(
        **{"master": ",".join(addresses), "job_id": "gpt", "checkpoint_dir": ".", "token_file": None},
        **dict.fromkeys(("tls_ca", "tls_cert", "tls_key")),
    )
    answer: pb.StatusReply = AskedMaster(options).call("GetStatus", pb.StatusRequest())
    return answer


def test_a_leader_that_is_gone_has_a_successor_soon() -> None:
    """Who stands by names it until its lease is over: the command tries again, and is answered."""
    master = Master(f"127.0.0.1:{free_port()}", 3)
    assert ask(master).job_id == "gpt"
    assert master.asked == 4


def test_where_nobody_follows_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a time: no master may come."""
    monkeypatch.setattr(asking, "CHANGE_SECONDS", 0.5)
    master = Master(f"127.0.0.1:{free_port()}", 1000)
    with pytest.raises(NoAnswer, match="stands by"):
        ask(master)
    assert master.asked > 1


def test_what_a_master_says_counts_more_than_one_that_is_gone() -> None:
    """Who stands by may know why nobody leads, as where etcd is away, in whatever order they are asked."""
    for gone_last in (False, True):
        with pytest.raises(NoAnswer) as said:
            ask(Master("", 1000), gone_last=gone_last)
        assert "this master stands by" in str(said.value)
        assert said.value.is_from_master


@pytest.mark.parametrize("alone", [False, True], ids=["one of two", "the only one"])
def test_a_master_with_another_token_is_passed_over(alone: bool) -> None:
    """One of several that stands by may have it; where no other answers, that is what is said."""

    class Refuses(Master):
        def GetStatus(self, request: pb.StatusRequest, context: Any) -> pb.StatusReply:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "missing or wrong token")
            raise AssertionError

    server = grpc.server(futures.ThreadPoolExecutor(4))
    control_pb2_grpc.add_ControlServicer_to_server(Refuses("", 0), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    other = f"127.0.0.1:{free_port()}"
    try:
        if alone:
            with pytest.raises(NoAnswer, match="missing or wrong token"):
                asked(f"127.0.0.1:{port}", other)
        else:
            assert ask(Master("", 0), f"127.0.0.1:{port}").job_id == "gpt"
    finally:
        server.stop(0).wait(5)


@pytest.mark.parametrize(
    ("code", "detail", "told"),
    [
        # As a master that stands by.
        (grpc.StatusCode.UNAVAILABLE, "this master stands by", "the order was not taken: give it again once a master"),
        (None, "", "the order was not taken: give it again once a master answers"),
        # As of one whose end closed the connection, or that hangs.
        (grpc.StatusCode.UNKNOWN, "Stream removed", "the order may have been taken: look with dalsegno events once"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "", "the order may have been taken: look with dalsegno events once"),
        # What a master has said of it is all.
        (grpc.StatusCode.FAILED_PRECONDITION, "the order was not taken, as the master cannot", "master cannot\n"),
        (grpc.StatusCode.UNAUTHENTICATED, "missing or wrong token", "missing or wrong token\n"),
    ],
)
@pytest.mark.parametrize("words", [["scale", "2"], ["stop"], ["start"], ["drain", "a"], ["checkpoint"]])
def test_an_order_without_an_answer_says_whether_it_was_taken(
    capsys: pytest.CaptureFixture[str], words: list[str], code: grpc.StatusCode | None, detail: str, told: str
) -> None:
    """One line, whatever the order is; where no master is, it was not."""

    class Fails(control_pb2_grpc.ControlServicer):
        def _fail(self, request: Any, context: Any) -> Any:
            context.set_trailing_metadata((("grpc-retry-pushback-ms", "-1"),))
            context.abort(code, detail)

        Scale = Stop = Start = DrainNode = SaveNow = _fail

    server = grpc.server(futures.ThreadPoolExecutor(4))
    control_pb2_grpc.add_ControlServicer_to_server(Fails(), server)
    port = server.add_insecure_port("127.0.0.1:0") if code is not None else free_port()
    server.start()
    try:
        assert run([*words, f"--master=127.0.0.1:{port}"]) == 1
    finally:
        server.stop(0).wait(5)
    line = capsys.readouterr().err
    assert (told in line, line.count("\n")) == (True, 1)


def test_the_variables_of_dlrover_run_name_the_master_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod or a shell that has them asks about its own job; flags win, and empty ones are none."""
    variables = {"MASTER": "m:1", "JOB_ID": "gpt", "CHECKPOINT_DIR": "/shared", "TOKEN_FILE": "token"}
    for name, value in variables.items():
        monkeypatch.setenv(f"PET_{name}", value)
    monkeypatch.setenv("DLROVER_MASTER_ADDR", "other:1")
    options = dalsegno._parser()[0].parse_args(["status"])
    assert {name: getattr(options, name.lower()) for name in variables} == variables
    options = dalsegno._parser()[0].parse_args(["status", "--master=f:2", "--job-id=own", "--checkpoint-dir=ck"])
    assert (options.master, options.job_id, options.checkpoint_dir) == ("f:2", "own", "ck")
    for name in variables:
        monkeypatch.setenv(f"PET_{name}", "")
    options = dalsegno._parser()[0].parse_args(["status"])
    assert (options.master, options.job_id, options.checkpoint_dir) == ("other:1", None, "checkpoints")


@pytest.mark.parametrize("words", [["status"], ["stop"], ["drain", "a"], ["scale", "2"], ["events"]])
@pytest.mark.parametrize("job", ["", "../other", "n" * 300])
def test_an_order_is_for_the_job_that_was_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], job: str
) -> None:
    """As of a variable of the shell that is not set: whatever job there was was stopped."""
    private = tmp_path / ".dalsegno" / "job"
    private.mkdir(parents=True, mode=0o700)
    ClaimFile(private).write(Claim("h", "b", 1, 1, 1, 1, "127.0.0.1:1"), threading.Event())
    make_token(private)
    assert run([words[0], f"--checkpoint-dir={tmp_path}", f"--job-id={job}", *words[1:]]) == 2
    assert f"argument --job-id: {job!r} is no job id" in capsys.readouterr().err


def test_numbers_of_events_and_orders_are_numbers() -> None:
    """As over HTTP; what is optional is there only where it is known."""
    event = plain(pb.Event(sequence=7, epoch=2, lost_steps=1, kind="stepped", seconds=0.5))
    assert (event["sequence"], event["epoch"], event["lost_steps"], event["seconds"]) == (7, 2, 1, 0.5)
    assert "step" not in event
    assert plain(pb.Event(step=3))["step"] == 3
    order = plain(pb.OrderReply(generation=4, step=5, number=6))
    assert (order["generation"], order["step"], order["number"]) == (4, 5, 6)


def test_numbers_of_the_status_are_numbers() -> None:
    """Wherever they stand: `jq '.step - .head.step'` is arithmetic. What is missing stays out."""
    status = pb.StatusReply(generation=3, step=2**53, epoch=2)
    status.head.step, status.head.bytes, status.head.position.samples = 7, 10**10, 80
    status.checkpoints.add(epoch=2)
    status.history.add(epoch=1, last_step=9)
    found = plain(status)
    assert (found["generation"], found["step"], found["epoch"]) == (3, 2**53, 2)
    head = found["head"]
    assert (head["step"], head["bytes"], head["position"]["samples"]) == (7, 10**10, 80)
    assert found["checkpoints"][0]["epoch"] == 2
    assert (found["history"][0]["last_step"], found["history"][0]["lost_steps"]) == (9, 0)
    assert "held" not in found
    assert plain(pb.ScaleReply(generation=5, limit=2))["generation"] == 5


def test_whoever_follows_hears_that_no_master_answers() -> None:
    """Once: it may come back, or the address is wrong."""
    words = [sys.executable, "-m", "dalsegno.agent.commands.dalsegno", "events", "--follow"]
    address = f"127.0.0.1:{free_port()}"
    with subprocess.Popen([*words, f"--master={address}"], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert line.startswith(f"dalsegno: the master at {address} does not answer: ")
            assert line.endswith("; waiting for it\n")
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2)
        finally:
            process.kill()
        assert process.stderr.read() == ""


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["events", "--after=-1"], "argument --after: '-1' is no number of an event"),
        (["events", f"--after={'9' * 20}"], "is no number of an event"),
        (["drain", "a", "--timeout=-1"], "argument --timeout: '-1' is no number of seconds"),
        (["stop", "--timeout=nan"], "argument --timeout: 'nan' is no number of seconds"),
        (["scale", "0"], "a world has 1 to 1048576 nodes, not 0"),
        (["scale", "9" * 20], "a world has 1 to 1048576 nodes, not 9999"),
        (["status", "--master=foo"], "argument --master: 'foo' is not HOST:PORT"),
        (["drain", "a", "--master=http://h:1"], "argument --master: 'http://h:1' is not HOST:PORT"),
        # It would be port 34463.
        (["stop", "--master=h:1,h:99999"], "argument --master: 'h:99999' is not HOST:PORT"),
    ],
)
def test_a_wrong_number_is_named(capsys: pytest.CaptureFixture[str], words: list[str], line: str) -> None:
    """Before anybody is asked."""
    assert run(words) == 2
    assert line in capsys.readouterr().err


@pytest.mark.parametrize("others", [[], ["other"]], ids=["one job", "several"])
@pytest.mark.parametrize("words", [["status"], ["events"], ["stop"], ["drain", "a"], ["scale", "2"]])
def test_a_copied_directory_has_no_master(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], others: list[str]
) -> None:
    """The master of the directory that it was copied from was asked, and stopped."""
    server = grpc.server(futures.ThreadPoolExecutor(4))
    master = Master("", 0)
    control_pb2_grpc.add_ControlServicer_to_server(master, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    for name in ("job", *others):
        private = tmp_path / "first" / ".dalsegno" / name
        private.mkdir(parents=True, mode=0o700)
        file = ClaimFile(private)
        address = f"127.0.0.1:{port}"
        file.write(Claim("h", "b", 1, 1, 1, 1, address, "", "", "", *file.place()), threading.Event())
        make_token(private)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    assert asking.is_served(tmp_path / "first" / ".dalsegno" / "job")
    assert not asking.is_served(tmp_path / "copy" / ".dalsegno" / "job")
    try:
        assert run([words[0], f"--checkpoint-dir={tmp_path / 'copy'}", "--job-id=job", *words[1:]]) == 1
        assert capsys.readouterr().err == (
            "dalsegno: nobody runs job job just now, and nothing of it was saved: its dlrover-run command begins at"
            " step 0\n"
        )
        # Of several jobs none has a master.
        assert run([words[0], f"--checkpoint-dir={tmp_path / 'copy'}", *words[1:]]) == (2 if others else 1)
        # One that has reached its end, as in an archive.
        run_dir = tmp_path / "copy" / "job" / "run-0001"
        run_dir.mkdir(parents=True)
        CheckpointStore(run_dir).mark_finished(7, None)
        ends = 0 if words[0] in ("status", "events") else 1
        assert run([words[0], f"--checkpoint-dir={tmp_path / 'copy'}", "--job-id=job", *words[1:]]) == ends
        told = capsys.readouterr()
        assert "job job, run-0001: finished" in (told.out if words[0] == "status" else told.err)
        assert master.asked == 0
    finally:
        server.stop(0).wait(5)
