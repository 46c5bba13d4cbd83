"""A real Commander under callers that have no token, that lie, or that send nonsense; and its command line."""

from __future__ import annotations

import base64
import json
import socket
import ssl
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest

pytest.importorskip("fastapi", reason="needs the extra relay")
pytest.importorskip("yaml", reason="needs the extra relay")

from tests.support.jobs.commander import ADMIN_TOKEN, TOKEN, Commander, Worker, commander, run_file
from tests.support.jobs.master_process import Agent, open_world, settings
from tests.support.pages.sources import ROOT

pytestmark = pytest.mark.timeout(120)

PAGE = (ROOT / "docs" / "relay-protocol.md").read_text(encoding="utf-8")
ACQUIRE = {"worker_id": "w1", "run_id": "my-run"}
RENEW = {"worker_id": "w1", "lease_token": "x"}
REPORT = {"run_id": "my-run", "lease_token": "x"}
MADE = {"repo": "a/b", "revision": "c", "step": 3, "checkpoint": "step-3.e1.0", "digest": f"{3:064d}"}


def forged(run_id: str = "my-run") -> str:
    """Of the shape of a token."""
    return base64.urlsafe_b64encode(b"\x01" + b"x" * 48 + run_id.encode()).decode()


def refused(one: Commander, method: str, path: str, body: object = None, **more: Any) -> tuple[int, str]:
    """The code and the line of a refusal."""
    code, said = one.ask(method, path, body, **more)
    assert isinstance(said["detail"], str), said
    assert "\n" not in said["detail"]
    assert "Traceback" not in said["detail"]
    return code, said["detail"]


NONSENSE: list[tuple[str, object, int, str]] = [
    ("lease/acquire", {**ACQUIRE, "run_id": "other"}, 404, "no run is called 'other' here: there is my-run"),
    ("lease/acquire", {**ACQUIRE, "worker": "w"}, 422, "worker: there is no such key, did you mean worker_id?"),
    ("lease/acquire", {**ACQUIRE, "cap": {"gpus": 1}}, 422, "cap.gpus: there is no such key, did you mean gpu?"),
    ("lease/acquire", {**ACQUIRE, "cap": {"count": -1}}, 422, "cap.count"),
    ("lease/acquire", {**ACQUIRE, "cap": {"count": 1e308}}, 422, "cap.count"),
    ("lease/acquire", {**ACQUIRE, "worker_id": "../w"}, 422, "no slashes"),
    ("lease/acquire", {**ACQUIRE, "worker_id": "\ud800"}, 422, "worker_id"),
    ("lease/acquire", {**ACQUIRE, "worker_id": "a\nb"}, 422, "worker_id"),
    ("lease/acquire", {**ACQUIRE, "worker_id": ""}, 422, "worker_id"),
    ("lease/acquire", {"run_id": "my-run"}, 422, "worker_id: Field required"),
    ("lease/acquire", b"{", 422, "the body is no JSON"),
    ("lease/acquire", b"[" * 60_000, 400, "body"),
    ("lease/acquire", b"\xff\xfe", 422, "the body is no JSON"),
    ("lease/acquire", [1], 422, "the body"),
    ("lease/acquire", None, 422, "the body"),
    ("lease/acquire", b" " * (65 << 10), 413, "a body of at most 65536 bytes is read"),
    ("lease/renew", RENEW, 400, "lease_token is no token of a lease"),
    ("lease/renew", {**RENEW, "lease_token": "\u00e9" * 10}, 400, "lease_token is no token of a lease"),
    ("lease/renew", {**RENEW, "lease_token": "A" * 60_000}, 400, "lease_token is no token of a lease"),
    ("lease/renew", {**RENEW, "lease_token": forged("other")}, 404, "no run is called 'other'"),
    ("lease/renew", {**RENEW, "lease_token": forged()}, 409, "the lease is over"),
    ("lease/renew", {**RENEW, "lease_token": None}, 422, "lease_token"),
    ("job/report", {**REPORT, "lease_token": forged()}, 409, "the lease is over"),
    ("job/report", {**REPORT, "lease_token": forged("other")}, 404, "no run is called 'other'"),
    ("job/report", b'{"run_id": "my-run", "lease_token": "x", "step": NaN}', 422, "step"),
    ("job/report", b'{"run_id": "my-run", "lease_token": "x", "hf": {"last_synced": Infinity}}', 422, "hf.last_synced"),
    ("job/report", {**REPORT, "step": 2**70}, 422, "step"),
    ("job/report", {**REPORT, "status": "DONE"}, 422, "status"),
    ("job/report", {**REPORT, "lease_token": forged(), "status": "WAITING"}, 422, "status"),
    ("job/report", {**REPORT, "msg": "x" * 5000}, 422, "msg"),
    ("relay/my-run/milestones", {**MADE, "digest": "no digest"}, 400, "digest"),
    ("relay/my-run/milestones", {**MADE, "checkpoint": "a name"}, 400, "name"),
    ("relay/my-run/milestones", {**MADE, "repo": "a\x1bb"}, 400, "repo"),
    ("relay/my-run/milestones", MADE, 409, "step-3.e1.0 was never committed"),
    ("relay/other/milestones", MADE, 404, "no run is called 'other'"),
    ("relay/my-run/expire", None, 403, "only the admin's token"),
    ("relay/other/release", None, 403, "only the admin's token"),
]


def test_nonsense_is_answered_with_one_line(tmp_path: Path) -> None:
    """Whatever is sent: a line says what is wrong with it, and nothing of it reaches the log or the run."""
    with commander(tmp_path / "c.db", [run_file(tmp_path)]) as one:
        for path, body, code, line in NONSENSE:
            answer = refused(one, "POST", f"/api/{path}", body)
            assert (answer[0], line in answer[1]) == (code, True), (path, str(body)[:100], answer)
        assert refused(one, "GET", "/api/relay/other")[0] == 404
        plain = {"content-type": "application/x-www-form-urlencoded"}
        line = refused(one, "POST", "/api/lease/acquire", ACQUIRE, **plain)
        assert line == (422, "the body: send JSON, and `content-type: application/json` with it")
        with socket.create_connection(("127.0.0.1", int(one.http.rpartition(":")[2])), 10) as stranger:
            stranger.sendall(b"what is no HTTP\r\n\r\n")
            assert stranger.recv(100).startswith(b"HTTP/1.1 400 ")
        assert (one.run()["state"], one.run()["epoch"]) == ("WAITING", 0)
        assert Worker(one, "w1").acquire()[0] == 200
        assert (one.end(), one.errors) == (0, "")


def test_nobody_is_let_in_without_the_token(tmp_path: Path) -> None:
    """Reads, leases, reports and milestones: none of it without, and nothing of others' pages."""
    posts = ["lease/acquire", "lease/renew", "job/report", "relay/my-run/milestones"]
    posts += ["relay/my-run/release", "relay/my-run/expire"]
    with commander(tmp_path / "c.db", [run_file(tmp_path)]) as one:
        for token in (None, "wrong", "\u00e9"):
            for path in ("relay", "relay/my-run", "relay/my-run/events", "relay/my-run/metrics"):
                assert refused(one, "GET", f"/api/{path}", token=token)[0] == 401, path
            for path in posts:
                # Before anything of the body is looked at.
                assert refused(one, "POST", f"/api/{path}", ACQUIRE, token=token)[0] == 401, path
        assert refused(one, "POST", "/api/lease/acquire", ACQUIRE, origin="https://evil.example")[0] == 403
        assert one.ask("GET", "/api/relay/my-run", token=ADMIN_TOKEN)[0] == 200
        assert (one.end(), one.errors) == (0, "")


@pytest.mark.full
def test_a_token_is_of_one_worker(tmp_path: Path) -> None:
    """Another worker that has it is told whose it is, and a token that is changed anywhere is nobody's."""
    with commander(tmp_path / "c.db", [run_file(tmp_path)]) as one:
        first, thief = Worker(one, "w1"), Worker(one, "w2")
        first.acquire()
        thief.token = first.token
        assert thief.renew() == (409, {"detail": "this is the lease of 'w1', not of 'w2'", "status": "fenced"})
        data = bytearray(base64.urlsafe_b64decode(first.token))
        for place in (5, 30, 48):
            changed = bytes(data[:place]) + bytes([data[place] ^ 1]) + bytes(data[place + 1 :])
            thief = Worker(one, "w1", token=base64.urlsafe_b64encode(changed).decode())
            assert thief.renew()[1]["status"] == "fenced"
        assert first.renew()[0] == 200


def test_pods_of_ours_share_the_run_with_workers_that_are_not(tmp_path: Path) -> None:
    """One authority: an agent holds it against workers and they against agents; only commits are published."""
    with commander(tmp_path / "c.db", [run_file(tmp_path, "job")]) as one:
        agent = Agent(one.runs["job"]["address"], "pod")
        # The agent shows the token as every call must.
        agent.stub = Authorized(agent.channel)
        epoch = open_world([agent], settings((1, 1)))
        agent.commit(epoch, 3)
        worker = Worker(one, "w1", "job")
        code, said = worker.acquire()
        assert (code, said["by"]) == (409, "pod")
        path = "/api/relay/job/milestones"
        for _ in range(2):
            assert one.ask("POST", path, MADE) == (200, {"status": "ok"})
        shown = one.run("job")
        assert shown["milestones"] == [MADE]
        assert shown["head"] == {"name": "step-3.e1.0", "step": 3, "digest": f"{3:064d}"}
        assert (shown["holder"], shown["grpc_port"]) == ("pod", int(one.runs["job"]["address"].rpartition(":")[2]))
        assert worker.acquire(force=True, token=ADMIN_TOKEN)[0] == 200
        with pytest.raises(grpc.RpcError) as fenced:
            agent.commit(epoch, 6)
        assert fenced.value.code() is grpc.StatusCode.NOT_FOUND
        late = {**MADE, "step": 6, "checkpoint": f"step-6.e{epoch}.0", "digest": f"{6:064d}"}
        assert one.ask("POST", path, late)[0] == 409
        # The worker's epoch began where the agent's commit was, and a milestone of its own is the holder's word.
        assert worker.report(step=8, hf={"repo": "a/b", "revision": "d"})[0] == 200
        assert [made["revision"] for made in one.run("job")["milestones"]] == ["d", "c"]
        one.again()
        assert [made["revision"] for made in one.run("job")["milestones"]] == ["d", "c"]
        assert worker.renew()[0] == 200


class Authorized:
    """A stub whose calls show the token."""

    def __init__(self, channel: grpc.Channel) -> None:
        from dalsegno.protos import control_pb2_grpc

        self._stub = control_pb2_grpc.ControlStub(channel)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._stub, name)

        def with_token(request: Any, timeout: float) -> Any:
            return call(request, timeout=timeout, metadata=(("authorization", f"Bearer {TOKEN}"),))

        return with_token


def started(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Commander that does not start."""
    command = [sys.executable, "-m", "dalsegno.master", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment, cwd=folder)


@pytest.mark.full
def test_mistakes_end_it_before_a_port_is_bound(tmp_path: Path) -> None:
    """One line for each, exit code 2, nothing on stdout, no record."""
    good = run_file(tmp_path)
    bad, same = tmp_path / "bad.yaml", tmp_path / "same.yaml"
    bad.write_text(json.dumps({**json.loads(good.read_text()), "kommand": 1, "run_id": "a/b"}))
    same.write_text(good.read_text())
    store, edge = "--store=sqlite:///c.db", "--http-port=0"
    for arguments, lines in [
        (
            [f"--relay={bad}", store, edge],
            ["run_id: 'a/b' is no name", "did you mean command?"],
        ),
        ([f"--relay={tmp_path}/none.yaml", store, edge], ["none.yaml cannot be read"]),
        ([f"--relay={good}", f"--relay={same}", store, edge], ["there is another run 'my-run'"]),
        ([f"--relay={good}", store], ["--relay needs --http-port"]),
        ([f"--relay={good}", store, edge, "--job-id=x"], ["--job-id and --relay do not go together"]),
        ([f"--relay={good}", store, edge, "--embedded"], ["--embedded and --relay do not go together"]),
        ([f"--relay={good}", store, edge, "--nnodes=1:2"], ["--nnodes and --relay do not go together"]),
        ([f"--relay={good}", "--store=etcd://localhost:1", edge], ["with --relay each run has a file"]),
        ([f"--relay={good}", "--store=sqlite:////", edge], ["names no file"]),
        ([f"--relay={good}", store, edge, "--host=0.0.0.0"], ["give --token-file"]),
        ([store, edge], ["--job-id is missing"]),
    ]:
        done = started(*arguments, folder=tmp_path)
        said = done.stderr.splitlines()
        assert (done.returncode, done.stdout) == (2, ""), (arguments, done.stderr)
        assert len(said) == len(lines), done.stderr
        for line in lines:
            assert any(line in one for one in said), (line, done.stderr)
    done = started(f"--relay={good}", store, edge, folder=tmp_path, DALSEGNO_ADMIN_TOKEN="short")
    assert (done.returncode, "DALSEGNO_ADMIN_TOKEN is shorter" in done.stderr) == (2, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml", "my-run.yaml", "same.yaml"]


@pytest.mark.full
def test_as_a_page_prints_it(tmp_path: Path) -> None:
    """With certificates, its ports and store chosen by a person: HTTP speaks TLS, and so do agents."""
    (page,) = (line for line in PAGE.splitlines() if line.startswith("    dlrover-master --relay run.yaml"))
    more = PAGE.split(page)[1].splitlines()[1]
    key = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem"]
    key += ["-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(key, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    run_file(tmp_path, "run", lease_seconds=60)
    typed = f"{page.strip().removesuffix(chr(92))} {more.strip()}"
    here = {"sqlite:////var/lib/dalsegno/": "sqlite:///", "8443": "0", "29400": "0", "0.0.0.0": "127.0.0.1"}
    for printed, ours in here.items():
        assert printed in typed
        typed = typed.replace(printed, ours)
    command = [sys.executable, "-m", "dalsegno.master", *typed.split()[1:]]
    one = Commander(command, {"DALSEGNO_TOKEN": TOKEN}, tmp_path)
    one.start()
    try:
        context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        url = f"https://localhost:{one.http.rpartition(':')[2]}/api/relay/run"
        request = urllib.request.Request(url, headers={"authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=20, context=context) as answer:
            assert json.loads(answer.read())["state"] == "WAITING"
        assert (tmp_path / "commander.run.db").exists()
    finally:
        one.end()


@pytest.mark.full
def test_a_taken_port_ends_it_in_one_line(tmp_path: Path) -> None:
    """A second Commander on the same ports takes nothing over from one that serves well."""
    with commander(tmp_path / "c.db", [run_file(tmp_path)]) as one:
        worker = Worker(one, "w1")
        worker.acquire()
        port = one.http.rpartition(":")[2]
        own = one.runs["my-run"]["address"].rpartition(":")[2]
        arguments = [f"--relay={tmp_path}/my-run.yaml", f"--store=sqlite:///{tmp_path}/c.db"]
        for more, line in (
            ([f"--http-port={port}"], f"cannot listen on 127.0.0.1 port {port} (--http-port)"),
            (["--http-port=0", f"--port={own}"], f"cannot listen on 127.0.0.1 port {own}"),
            (["--http-port=0"], f"my-run had port {own} last"),
        ):
            done = started(*arguments, *more, folder=tmp_path)
            assert (done.returncode, len(done.stderr.splitlines()), line in done.stderr) == (2, 1, True), done.stderr
        assert worker.renew()[0] == 200
        assert one.run()["epoch"] == 1
