"""Where nodes meet that were started with torchrun's flags."""

from __future__ import annotations

import errno
import logging
import os
import socket
from pathlib import Path

import grpc
import pytest

from dalsegno.agent.commands import launch
from dalsegno.agent.commands.arguments import build_parser, parse
from dalsegno.agent.commands.endpoint import answers, local_address, split, wait_for_name, where_to_listen
from dalsegno.agent.commands.unused import ignored
from dalsegno.agent.control.connection import Credentials, code_of
from dalsegno.agent.processes.signals import SignalWatch
from dalsegno.agent.shell.console import RunConsole
from dalsegno.agent.storage.job_directory import JobDirectory
from dalsegno.protos import control_pb2, control_pb2_grpc
from dalsegno.protos.contract import CONTROL_PROTOCOL
from dalsegno.protos.options import UsageError

SCRIPT = "train.py"


@pytest.mark.parametrize(
    ("flags", "meet"),
    [
        (["--rdzv-backend=c10d", "--rdzv-endpoint=node0:29500"], "node0:29500"),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=node0"], "node0:29400"),
        (["--rdzv_backend", "static", "--rdzv_endpoint", "[fd00::1]:29500"], "[fd00::1]:29500"),
        (["--nnodes=2", "--node-rank=1", "--master-addr=10.0.0.1", "--master-port=1234"], "10.0.0.1:1234"),
        (["--nnodes=2", "--master_addr=10.0.0.1"], "10.0.0.1:29500"),
        # On one machine torchrun's users give a free port, which is not needed here.
        (["--nnodes=1", "--master-addr=127.0.0.1", "--master-port=1234"], ""),
        (["--master=m:1", "--rdzv-backend=c10d", "--rdzv-endpoint=node0:29500"], ""),
        ([], ""),
    ],
)
def test_where_they_meet(flags: list[str], meet: str) -> None:
    """It is no master of its own that is a service, and the flags that name it have an effect."""
    options = parse([*flags, SCRIPT], {"DLROVER_MASTER_ADDR": "else:1"} if meet else {})
    assert options.meet == meet
    assert not (meet and options.master)
    assert [line for line in ignored(options) if "--master-" in line and meet] == []


def test_help_does_not_call_the_meeting_point_without_effect() -> None:
    """Whoever reads that two flags have no effect drops them, and each node waits at a master of its own."""
    groups = {group.title: group for group in build_parser({})._action_groups}
    unused = {flag for action in groups["accepted, without effect"]._group_actions for flag in action.option_strings}
    assert not unused & {"--master-addr", "--master-port", "--rdzv-endpoint"}
    (addr,) = (one for one in groups["as torchrun"]._group_actions if "--master-addr" in one.option_strings)
    assert "hosts the master" in str(addr.help)


KUBEFLOW = {"PET_NNODES": "2", "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456", "PET_NODE_RANK": "1"}


def test_variables_of_a_launcher_are_flags() -> None:
    """Kubeflow's operator sets them: without a meeting point each pod would wait for the others at a master of its own.

    A master that is named for us wins.
    """
    options = parse([SCRIPT], KUBEFLOW)
    assert (options.meet, options.master) == ("job-master-0:23456", None)
    assert ignored(options) == ["--node-rank is not needed and has no effect: the master gives the ranks"]
    options = parse([SCRIPT], {**KUBEFLOW, "DLROVER_MASTER_ADDR": "service:1"})
    assert (options.meet, options.master) == ("", "service:1")
    assert "--master-addr is not needed and has no effect: use --master HOST:PORT" in ignored(options)
    flags = ["--nnodes=2", "--master-addr=node0"]
    for other in {}, {"PET_MASTER_ADDR": "node0"}:
        assert parse([*flags, SCRIPT], {"DLROVER_MASTER_ADDR": "service:1", **other}).meet == "node0:29500"
    given = parse([SCRIPT], {"PET_NETWORK_CHECK": "1", "PET_AUTO_CONFIG": "0", "PET_ACCELERATOR": ""})
    assert [line.split()[0] for line in ignored(given)] == ["--network-check"]


@pytest.mark.parametrize("flags", [["--rdzv-backend=c10d"], [], ["--rdzv-backend=c10d", "--nnodes=1:4"]])
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]", socket.gethostname()])
def test_port_0_of_this_machine_is_a_master_of_its_own(flags: list[str], host: str) -> None:
    """As torchrun's page has it for several jobs on one machine."""
    options = parse([*flags, f"--rdzv-endpoint={host}:0", SCRIPT], {"DLROVER_MASTER_ADDR": "else:1"})
    assert (options.meet, options.master, ignored(options)) == ("", None, [])
    two = ["--nnodes=2", f"--rdzv-endpoint={host}:0", SCRIPT]
    assert parse(["--master=m:1", *two], {}).master == "m:1"
    assert parse(["--standalone", *two], {}).standalone
    with pytest.raises(UsageError, match=r"--rdzv-endpoint: no other node finds .*:0', and --nnodes waits for 2"):
        parse(two, {})


@pytest.mark.parametrize("environ", [{}, {"PET_STANDALONE": "1", "PET_RDZV_ENDPOINT": "localhost:29400"}])
def test_standalone_drops_an_endpoint(environ: dict[str, str]) -> None:
    """As torchrun does, with a line."""
    flags = [] if environ else ["--standalone", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:29400"]
    options = parse([*flags, SCRIPT], environ)
    assert (options.meet, options.master) == ("", None)
    assert ignored(options) == ["--rdzv-endpoint has no effect: --standalone has a master of its own"]


def test_an_endpoint_without_a_backend_is_a_master_that_is_a_service() -> None:
    options = parse(["--rdzv-endpoint=node0:29500", SCRIPT], {})
    assert (options.master, options.meet) == ("node0:29500", "")


@pytest.mark.parametrize("endpoint", ["node0:x", "node0:70000", "node 0:1", ":1", "node0:0"])
def test_what_is_no_endpoint(endpoint: str) -> None:
    with pytest.raises(UsageError, match="--rdzv-endpoint"):
        parse(["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", SCRIPT], {})


def test_which_addresses_are_this_machines() -> None:
    """A name of this machine, any of its addresses; not one that others have, nor what nobody knows."""
    assert local_address("localhost") in ("127.0.0.1", "::1")
    assert local_address("127.0.0.2") == "127.0.0.2"
    assert local_address("203.0.113.1") == ""
    assert local_address("no-such-host.invalid") == ""


@pytest.mark.parametrize(
    ("host", "own", "several", "listens"),
    [
        ("node0", "127.0.1.1", True, "0.0.0.0"),
        ("node0", "::1", True, "0.0.0.0"),
        ("node0", "127.0.1.1", False, "127.0.1.1"),
        ("node0", "10.0.0.1", True, "10.0.0.1"),
        ("localhost", "127.0.0.1", True, "127.0.0.1"),
        ("127.0.1.1", "127.0.1.1", True, "127.0.1.1"),
        ("::1", "::1", True, "::1"),
    ],
)
def test_where_a_hosted_master_listens(host: str, own: str, several: bool, listens: str) -> None:
    """Debian gives a machine's own name a loopback address, where no other node reaches the master."""
    assert where_to_listen(host, own, several) == listens


def test_an_address_that_others_reach_counts_before_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name of this machine may mean both."""
    known = socket.getaddrinfo
    means = ["127.0.1.1", "203.0.113.1", "0.0.0.0"]

    def look_up(host: str, port: int | None, **options: int) -> list[object]:
        return [known(one, port, **options)[0] for one in (means if host == "node0" else [host])]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert local_address("node0") == "0.0.0.0"
    means.pop()
    assert local_address("node0") == "127.0.1.1"


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_a_master_that_others_are_to_reach_asks_for_the_jobs_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: str
) -> None:
    """It listens at all addresses, and this machine's agents find it; nobody is let in without the token."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(launch, "local_address", lambda host: "127.0.1.1")
    options = parse([f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint=node0:{port}", SCRIPT], {})
    options.job_id = "j"
    directory = JobDirectory(tmp_path, "j")
    directory.prepare()
    source = launch._connect(options, None, directory, RunConsole(), tmp_path, SignalWatch((), print))
    try:
        own = "127.0.0.1" if nodes == "2" else "127.0.1.1"
        assert (source.addresses(), source.known_as()) == ((f"{own}:{port}",), (f"node0:{port}",))
        assert answers(f"127.0.0.2:{port}") == (nodes == "2")
        request = control_pb2.StatusRequest(job_id="j", protocol=CONTROL_PROTOCOL)
        with Credentials().channel(f"{own}:{port}") as channel, pytest.raises(grpc.RpcError) as refused:
            control_pb2_grpc.ControlStub(channel).GetStatus(request, timeout=20)
        assert code_of(refused.value) is grpc.StatusCode.UNAUTHENTICATED
    finally:
        assert source.embedded is not None
        for child in source.embedded._children:
            child.process.kill()
            child.process.wait()
        source.close()


def test_host_and_port() -> None:
    assert split("node:1") == ("node", "1")
    assert split("node") == ("node", "")
    assert split("[fd00::1]:2") == ("fd00::1", "2")
    assert split("fd00::1") == ("fd00::1", "")


@pytest.mark.parametrize("hosted", [False, True])
def test_the_others_wait_for_the_node_that_hosts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hosted: bool
) -> None:
    """They say so at once, and read the job's token where that node writes it, later than they come."""
    monkeypatch.setattr(launch, "local_address", lambda host: "")
    caplog.set_level(logging.INFO)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))  # without `listen` nobody answers, and nobody else gets the port
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if hosted:
            server.listen()
        assert answers(address) == hosted
        options = parse(["--rdzv-backend=c10d", f"--rdzv-endpoint={address}", "--rdzv-id=j", SCRIPT], {})
        directory = JobDirectory(tmp_path, "j")
        directory.prepare()
        source = launch._connect(options, None, directory, RunConsole(), tmp_path, SignalWatch((), print))
    assert source.addresses() == (address,)
    assert (f"waiting for the master at {address}" in caplog.text) != hosted
    connector = source.connector()
    assert connector.token() is None
    (directory.private / "token").write_text("a" * 64)
    (directory.private / "token").chmod(0o600)
    assert connector.token() == "a" * 64
    source.close()


def test_credentials_mean_a_master_that_is_a_service(tmp_path: Path) -> None:
    """Nothing is started at the meeting point then."""
    options = parse(["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=j", SCRIPT], {})
    directory = JobDirectory(tmp_path, "j")
    watch = SignalWatch((), print)
    source = launch._connect(options, "sesame-sesame-sesame-sesame", directory, RunConsole(), tmp_path, watch)
    assert source.embedded is None
    assert source.connector().token() == "sesame-sesame-sesame-sesame"


def test_a_claim_of_another_user_is_told_with_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only that permission is denied: one user is to run all of a job."""
    directory = JobDirectory(tmp_path, "j")
    directory.prepare()
    path = directory.private / "claim.json"
    path.touch(mode=0o600)

    def start(self: launch.EmbeddedMaster) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(launch.EmbeddedMaster, "start", start)
    monkeypatch.setattr(os, "geteuid", lambda: 6001)
    options = parse(["--job-id=j", SCRIPT], {})
    with pytest.raises(UsageError, match=r"claim\.json belongs to user .*: let one user run all of a job, or give"):
        launch._connect(options, None, directory, RunConsole(), tmp_path, SignalWatch((), print))


@pytest.mark.slow
def test_a_name_that_comes_with_its_node_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nodes start together, the name of one may be known later than another one looks for it."""
    looks = 0

    def late(host: str, *_: object, **__: object) -> list[object]:
        nonlocal looks
        looks += 1
        if looks < 3:
            raise socket.gaierror(-2, "Name or service not known")
        return []

    monkeypatch.setattr(socket, "getaddrinfo", late)
    wait_for_name("node0:29500", 60)
    assert looks == 3
    looks = -10
    with pytest.raises(UsageError, match=r"node0 has no address \(Name .*, for 0.1 s .*check --rdzv-endpoint"):
        wait_for_name("node0:29500", 0.1)


def test_a_backend_of_torchrun_that_has_no_effect_says_what_becomes_of_its_endpoint() -> None:
    options = parse(["--rdzv-backend=etcd", "--rdzv-endpoint=e:2379", SCRIPT], {})
    assert any("takes e:2379 for a dlrover-master" in line for line in ignored(options))


@pytest.mark.parametrize("word", ["${save-dir}", "${SAVE_DIR}", "${savedir}", "${save_dirs}", "${save_dir:=x}"])
def test_a_macro_that_is_misspelt_is_named(word: str) -> None:
    """The script would save into a directory of that name, and nothing would be the run's."""
    assert any(f"{word} is handed" in line and "'${save_dir}'" in line for line in ignored(parse([SCRIPT, word], {})))
    (line,) = ignored(parse([SCRIPT, "${resume_steps}"], {}))
    assert line.endswith("only '${resume_step}' is filled in here")  # with a number
    for other in ("${save_dir}", "${resume_dir:+resume} ${save_dir}", "${hydra:run.dir}", "${oc.env:USER}"):
        assert ignored(parse([SCRIPT, other], {})) == []
