"""Token and TLS with the real programs: a job over them from end to end, and one line for all that cannot work."""

from __future__ import annotations

import http.client
import re
import secrets
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.control.connection import Credentials
from dalsegno.agent.memory.connection import BrokenOff, Stranger
from dalsegno.agent.memory.identity import caller_context, digest_of
from dalsegno.agent.memory.place import root_of_user
from dalsegno.agent.memory.wire import Wire
from dalsegno.protos import control_pb2
from dalsegno.protos.addresses import host_and_port
from dalsegno.protos.peer_address import PeerAddress
from tests.support.jobs import local_processes as processes
from tests.support.jobs.certificates import Keys, as_flags, make_keys
from tests.support.jobs.cluster import ROOT, Training, Undisturbed
from tests.support.jobs.faults import Service
from tests.support.jobs.master_process import master_process
from tests.support.jobs.shell import Ended, Shell, expect_one_line

pytestmark = pytest.mark.timeout(300)

SCRIPT = str(ROOT / "examples" / "ddp.py")
SHORT = ("--steps=3", "--save-every=0", "--global-batch-size=4")
# Long enough on a busy machine; `hurry` ends it.
TRAINING = Training(steps=160, save_every=5)
# The agent's own default would let an endless wait pass for a long one.
CONNECT_TIMEOUT = 60.0


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return make_keys(tmp_path / "keys")


@pytest.fixture
def others(tmp_path: Path) -> Keys:
    """Of another operator."""
    return make_keys(tmp_path / "others")


def as_variables(prefix: str, values: dict[str, str]) -> dict[str, str]:
    return {f"{prefix}_{name.upper().replace('-', '_')}": value for name, value in values.items()}


# ---- what works ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[pytest.param("TLS by flags", marks=pytest.mark.full), "mutual TLS by variables"])
def job(request: pytest.FixtureRequest, tmp_path: Path, keys: Keys) -> Iterator[Service]:
    """A job whose master asks for all of it, and which tells its agents by flags or by environment variables."""
    mutual = request.param == "mutual TLS by variables"
    server, client = keys.server(mutual), keys.client(mutual)
    own = keys.agent if mutual else None
    service = Service(
        tmp_path / "job",
        TRAINING,
        master_flags=() if mutual else as_flags(server),
        master_environment=as_variables("DALSEGNO_MASTER", server) if mutual else {},
        agent_flags=() if mutual else as_flags(client),
        agent_environment=as_variables("PET", client) if mutual else {},
        credentials=Credentials(
            keys.token, keys.ca, None if own is None else own.path, None if own is None else own.key
        ),
    )
    with service:
        service.start_master()
        yield service


@pytest.mark.full
def test_a_second_node_joins_and_the_master_comes_back(job: Service, undisturbed: Undisturbed) -> None:
    """The run grows over TLS; after a kill of the master the same workers go on, and both agents find the next one."""
    (a,) = job.start("a")
    job.wait_world(1, 3)
    (b,) = job.start("b")
    epoch = job.wait_world(2, 3)
    before = job.wait_status(lambda status: status.epoch == epoch, "the status over TLS")
    workers = [job.worker_pid(a), job.worker_pid(b)]
    job.masters[-1].kill()
    job.wait_line("the master cannot be reached", a)
    job.wait_line("the master cannot be reached", b)
    job.start_master()
    after = job.wait_status(
        lambda status: status.generation > before.generation and status.head.step > before.head.step,
        "a commit under the next master",
    )
    assert (after.epoch, after.phase) == (epoch, control_pb2.PHASE_RUNNING)
    assert [job.worker_pid(a), job.worker_pid(b)] == workers
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)
    for node in (a, b):
        assert "the master is back" in node.said()
        # Neither token nor gRPC's own complaints are for the console.
        assert "ssl_transport" not in node.text()


@pytest.mark.full
@pytest.mark.parametrize("shown", ["a token", "certificates alone"])
def test_a_killed_nodes_run_goes_on_from_memory(
    tmp_path: Path, keys: Keys, shown: str, undisturbed: Undisturbed
) -> None:
    """The other agent got its part over TLS; nothing was on the disk, and no agent speaks anything else."""
    mutual = shown == "certificates alone"
    server, client = keys.server(mutual), keys.client(mutual)
    if mutual:
        server, client = without(server, "token-file"), without(client, "token-file")
    training = Training(steps=40, save_every=1000)
    service = Service(
        tmp_path / "job",
        training,
        nnodes="1:2",
        step_time=0.02,
        script_flags=("--memory-every=5",),
        # Each world stands still three steps after the half: step 20 is held then.
        agent_environment={"DALSEGNO_TEST_STEPS": "3"},
        master_flags=as_flags(server),
        agent_flags=("--memory-replicas=1", "--memory-bandwidth=50MB", "--quiet-time=60", *as_flags(client)),
        credentials=Credentials(None, keys.ca, keys.agent.path, keys.agent.key)
        if mutual
        else Credentials(keys.token, keys.ca),
    )
    with service as job:
        job.start_master()
        first = job.open("a", "b")
        job.wait_step(23)
        stored = b"".join(path.read_bytes() for path in job.directory.glob("job.sqlite*"))
        found = re.findall(rb"[0-9a-f]{64}(?:\.[0-9a-f]{32})?@127[.0-9]+:\d+", stored)
        addresses = {PeerAddress.parse(text.decode()) for text in found}
        assert len(addresses) == 2
        assert {bool(address.secret) for address in addresses} == {mutual}
        for address in addresses:
            # It is the one that is shown there.
            shown = caller_context().wrap_socket(socket.create_connection(host_and_port(address.target), 5))
            with shown:
                assert digest_of(shown.getpeercert(binary_form=True) or b"") == address.certificate
            plain = Wire(lambda: None)
            with closing(plain.connect(address.target)) as connection, pytest.raises((BrokenOff, Stranger)):
                plain.greet(connection, address.target)
        wait_held(job, 20, parts=2)
        assert not job.sealed()
        job.kill_node(job.node("b"))
        second = job.wait_world(1, after=first)
        assert job.change(second).resumed == 20
        job.finish()
        job.assert_undisturbed(undisturbed)
        job.assert_lost({second: range(1, 6)})
        said = job.node("a").text()
        assert "does not hold" not in said
        assert "no replica of this node" not in said


def wait_held(job: Service, step: int, parts: int) -> None:
    """Until each agent has all parts of a step."""
    memories = sorted((root_of_user() / job.job).glob("*/run-0001"))

    def look() -> bool:
        found = [list(memory.glob(f"step-{step}.e*.parts")) for memory in memories]
        return all(len(one) == 1 and len(list(one[0].glob("*.json"))) == parts for one in found)

    assert len(memories) == len(job.nodes)
    job.wait_for(look, f"step {step} in the memory of all")


@pytest.mark.full
def test_a_token_by_variable(shell: Shell, keys: Keys) -> None:
    """Master and agent take the token itself from the environment; the workers don't see it."""
    script = shell.directory / "peeks.py"
    secrets = ("DALSEGNO_TOKEN", "DALSEGNO_ADMIN_TOKEN")
    script.write_text(f"import os, sys\nsys.exit(any(name in os.environ for name in {secrets}))\n")
    job = Service(
        shell.directory / "job",
        master_flags=as_flags(without(keys.server(), "token-file")),
        master_environment={"DALSEGNO_TOKEN": keys.token},
    )
    with job:
        address = job.start_master().address
        arguments = (f"--master={address}", f"--job-id={job.job}", f"--tls-ca={keys.ca}", str(script))
        assert shell.run(*arguments, DALSEGNO_TOKEN=keys.token, DALSEGNO_ADMIN_TOKEN=keys.token).code == 0
        refused = shell.run(*arguments)
    expect_one_line(refused, "missing or wrong token", "--token-file")


def test_an_embedded_master_is_not_meant(shell: Shell, keys: Keys) -> None:
    """Variables of a master that is a service, and of agents that go to one, do not reach the embedded one."""
    variables = as_variables("DALSEGNO_MASTER", keys.server(True)) | as_variables("PET", keys.client(True))
    ended = shell.run("--checkpoint-dir=checkpoints", SCRIPT, *SHORT, DALSEGNO_TOKEN=keys.token, **variables)
    assert ended.code == 0, ended.text


def over_tls(tmp_path: Path, keys: Keys) -> Service:
    """A job whose programs are told of token and certificates by flags."""
    return Service(
        tmp_path / "job",
        TRAINING,
        master_flags=as_flags(keys.server()),
        agent_flags=as_flags(keys.client()),
        credentials=Credentials(keys.token, keys.ca),
    )


@pytest.mark.full
def test_a_token_that_is_changed(tmp_path: Path, keys: Keys, undisturbed: Undisturbed) -> None:
    """The token file is read for every connection: with a new token the master comes back to the same workers."""
    with over_tls(tmp_path, keys) as job:
        job.start_master()
        (a,) = job.start("a")
        epoch = job.wait_world(1, 3)
        job.masters[-1].kill()
        token = secrets.token_hex(32)
        keys.token_file.write_text(token, encoding="ascii")
        job.wait_line("the master cannot be reached", a)
        job.start_master()
        job.wait_line("the master is back", a)
        job.credentials = Credentials(token, keys.ca)
        assert job.wait_status(lambda status: True, "the status").epoch == epoch
        job.finish()
        job.assert_undisturbed(undisturbed)


@pytest.mark.full
def test_a_certificate_that_is_changed(tmp_path: Path, keys: Keys, others: Keys, undisturbed: Undisturbed) -> None:
    """The master comes back with one that agents do not know: they say what is wrong, and the run goes on behind it."""
    with over_tls(tmp_path, keys) as job:
        job.start_master()
        (a,) = job.start("a")
        epoch = job.wait_world(1, 3)
        job.masters[-1].kill()
        job.wait_line("the master cannot be reached; training goes on", a)
        job.master_flags = as_flags({**others.server(), "token-file": str(keys.token_file)})
        job.start_master()
        job.wait_line(f"a certificate that --tls-ca {keys.ca} does not accept", a)
        job.masters[-1].kill()
        job.master_flags = as_flags(keys.server())
        job.start_master()
        job.wait_line("the master is back", a)
        assert job.epoch() == epoch
        job.finish()
        job.assert_undisturbed(undisturbed)
        assert a.text().count("does not accept") == 1


@pytest.mark.full
def test_a_token_that_is_changed_at_the_master_alone(tmp_path: Path) -> None:
    """The agent says so, trains on for --master-outage-timeout, saves and ends; with the new one the run goes on."""
    job = Service(
        tmp_path / "job",
        TRAINING,
        agent_flags=("--master-outage-timeout=4",),
        agent_environment={"DALSEGNO_TOKEN": "the-first-token-0123"},
        master_environment={"DALSEGNO_TOKEN": "the-first-token-0123"},
        credentials=Credentials("the-first-token-0123"),
    )
    with job:
        job.start_master()
        (a,) = job.start("a")
        job.wait_world(1, 3)
        job.masters[-1].kill()
        job.master_environment = {"DALSEGNO_TOKEN": "the-second-token-012"}
        job.start_master()
        job.wait_line("the master refuses this token: it was changed there; training goes on for", a)
        assert a.process.wait(90) == 2, a.text()
        assert "start this again with the present one; everything is saved" in a.text()


@pytest.mark.full
def test_plain_torchrun(shell: Shell, keys: Keys, others: Keys) -> None:
    """Our rendezvous takes the same files through --rdzv-conf, and ends as soon when they are wrong."""
    script = shell.directory / "script.py"
    script.write_text("import pathlib\npathlib.Path('ran').touch()\n")
    command = (sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=dalsegno", "--rdzv-id=job")
    with master_process(shell.directory / "job.sqlite", *as_flags(keys.server(mutual=True))) as master:

        def run(client: dict[str, str]) -> Ended:
            conf = ",".join(f"{name.replace('-', '_')}={value}" for name, value in client.items())
            flags = (f"--rdzv-endpoint={master.address}", "--nnodes=1:2", "--rdzv-conf", f"checkpoint_dir=ck,{conf}")
            return shell.run(*flags, str(script), command=command)

        refused = run(keys.client(mutual=True) | {"tls-ca": str(others.ca)})
        assert (refused.code, "does not accept" in refused.text) == (1, True), refused.text
        assert not (shell.directory / "ran").exists()
        done = run(keys.client(mutual=True))
    assert done.code == 0, done.text
    assert (shell.directory / "ran").exists()


def test_the_line_of_the_readme(shell: Shell, keys: Keys) -> None:
    """One certificate that signs itself, made as the reference says, is enough for both sides."""
    readme = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^    (openssl req .*)$", readme, re.MULTILINE)
    command = shlex.split(line.replace("DNS:HOST", "IP:127.0.0.1"))
    subprocess.run(command, check=True, capture_output=True, cwd=shell.directory, timeout=60)
    cert = shell.directory / "cert.pem"
    server = keys.server() | {"tls-cert": str(cert), "tls-key": str(shell.directory / "key.pem")}
    with master_process(shell.directory / "job.sqlite", *as_flags(server)) as master:
        client = as_flags(keys.client() | {"tls-ca": str(cert)})
        ended = shell.run(f"--master={master.address}", "--job-id=job", *client, SCRIPT, *SHORT)
    assert ended.code == 0, ended.text


def test_the_http_edge_speaks_tls_too(tmp_path: Path, keys: Keys) -> None:
    """The token is not readable on its way there; with an authority for agents, certificates are asked for here too."""
    pytest.importorskip("fastapi", reason="needs the extra http")
    context = ssl.create_default_context(cafile=str(keys.ca))

    def ask(scheme: str) -> bytes:
        with urllib.request.urlopen(f"{scheme}://{master.http}/healthz", timeout=10, **trust[scheme]) as answer:
            content: bytes = answer.read()
            return content

    trust: dict[str, dict[str, Any]] = {"http": {}, "https": {"context": context}}
    with master_process(tmp_path / "s.sqlite", "--http-port=0", *as_flags(keys.server())) as master:
        assert ask("https") == b"ok\n"
        with pytest.raises((urllib.error.URLError, ConnectionError, http.client.HTTPException)):
            ask("http")
    with master_process(tmp_path / "t.sqlite", "--http-port=0", *as_flags(keys.server(mutual=True))) as master:
        with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
            ask("https")
        context.load_cert_chain(keys.agent.path, keys.agent.key)
        assert ask("https") == b"ok\n"


@pytest.mark.full
def test_status_over_tls(shell: Shell, keys: Keys, others: Keys) -> None:
    """`dalsegno status` takes the same flags, and says the same when they are wrong."""
    command = (sys.executable, "-m", "dalsegno.agent.commands.dalsegno", "status")
    with master_process(shell.directory / "job.sqlite", *as_flags(keys.server(True))) as master:
        good = shell.run(f"--master={master.address}", *as_flags(keys.client(True)), command=command)
        assert (good.code, good.text) == (0, "")
        bad = keys.client(True) | {"tls-ca": str(others.ca)}
        expect_one_line(
            shell.run(f"--master={master.address}", *as_flags(bad), command=command),
            "does not accept",
            "--tls-ca",
            code=1,
        )


# ---- what cannot work ------------------------------------------------------------------------------------------------


def without(values: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in values.items() if name not in names}


def refusal(shell: Shell, server: dict[str, str], client: dict[str, str], host: str = "127.0.0.1") -> Ended:
    """What an agent with these flags says to a master with those, and that it does not wait."""
    with master_process(shell.directory / "job.sqlite", *as_flags(server)) as master:
        began = time.monotonic()
        address = f"{host}:{master.address.rpartition(':')[2]}"
        ended = shell.run(f"--master={address}", "--job-id=job", *as_flags(client), SCRIPT, *SHORT)
        assert time.monotonic() - began < CONNECT_TIMEOUT - 5
        # Nobody was let in.
        master.process.send_signal(signal.SIGTERM)
        master.process.wait(10)
    assert processes.carriers(shell.mark) == []
    return ended


@pytest.mark.full
def test_an_authority_that_did_not_sign(shell: Shell, keys: Keys, others: Keys) -> None:
    """Named, with the flag to change."""
    ended = refusal(shell, keys.server(), keys.client() | {"tls-ca": str(others.ca)})
    expect_one_line(ended, "the master at 127.0.0.1:", f"--tls-ca {others.ca} does not accept", "signed it")


@pytest.mark.full
def test_an_agent_without_tls(shell: Shell, keys: Keys) -> None:
    """Told to give the authority."""
    expect_one_line(refusal(shell, keys.server(), without(keys.client(), "tls-ca")), "speaks TLS", "--tls-ca")


def test_an_agent_without_tls_where_certificates_are_asked_for(shell: Shell, keys: Keys) -> None:
    """The same, one thing after the other."""
    expect_one_line(refusal(shell, keys.server(True), without(keys.client(), "tls-ca")), "speaks TLS", "--tls-ca")


def test_a_master_without_tls(shell: Shell, keys: Keys) -> None:
    """Told to change the one or the other."""
    ended = refusal(shell, {"token-file": str(keys.token_file)}, keys.client())
    expect_one_line(ended, "does not speak TLS", "--tls-cert and --tls-key", "drop --tls-ca")


@pytest.mark.parametrize("kind", ["wrong", "missing"])
def test_a_wrong_token(shell: Shell, keys: Keys, others: Keys, kind: str) -> None:
    """The master's own word, with the flag to change."""
    client = without(keys.client(), "token-file")
    if kind == "wrong":
        client["token-file"] = str(others.token_file)
    expect_one_line(refusal(shell, keys.server(), client), "missing or wrong token", "--token-file")


@pytest.mark.parametrize("kind", ["foreign", "missing"])
def test_a_certificate_that_is_asked_for(shell: Shell, keys: Keys, others: Keys, kind: str) -> None:
    """A master with an authority of its own says no only by hanging up: told what it wants."""
    client, words = keys.client(), "lets in only nodes with a certificate"
    if kind == "foreign":
        client |= {"tls-cert": str(others.agent.path), "tls-key": str(others.agent.key)}
        words = f"does not accept --tls-cert {others.agent.path}"
    expect_one_line(refusal(shell, keys.server(True), client), words, "--tls-cert")


@pytest.mark.parametrize("kind", ["name", "expired"])
def test_a_certificate_that_does_not_fit(shell: Shell, keys: Keys, kind: str) -> None:
    """For another name, or of another time."""
    names = ("DNS:elsewhere.example", 2) if kind == "name" else ("IP:127.0.0.1", 0)
    made = keys.authority.issue("misfit", *names)
    server = keys.server() | {"tls-cert": str(made.path), "tls-key": str(made.key)}
    ended = refusal(shell, server, keys.client())
    if kind == "name":
        expect_one_line(ended, "another name", "subjectAltName=IP:127.0.0.1")
    else:
        expect_one_line(ended, "not valid now", "expired", "renew it")


@pytest.mark.parametrize(
    ("flag", "content", "words"),
    [
        ("tls-ca", None, "cannot be read: No such file"),
        ("tls-ca", "no certificate", "holds no PEM certificate"),
        ("tls-cert", "no certificate", "are no PEM certificate chain"),
        ("token-file", "two words", "one word of printable ASCII"),
        ("token-file", "", "one word of printable ASCII"),
        ("token-file", None, "cannot be read: No such file"),
    ],
)
def test_files_that_cannot_be_used(shell: Shell, keys: Keys, flag: str, content: str | None, words: str) -> None:
    """Before anything is tried."""
    file = shell.directory / "file"
    if content is not None:
        file.write_text(content, encoding="ascii")
    client = keys.client(True) | {flag: str(file)}
    ended = shell.run("--master=127.0.0.1:1", "--job-id=job", *as_flags(client), SCRIPT)
    expect_one_line(ended, str(file), words)
