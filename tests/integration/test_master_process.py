"""The master as a process of its own, with the real brain: killed, stopped, superseded, badly started."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import grpc
import pytest

from dalsegno.protos import control_pb2 as pb
from tests.support.jobs.certificates import Authority
from tests.support.jobs.master_process import Agent, command, eventually, master_process, open_world, settings

pytestmark = pytest.mark.timeout(120)


def durable(status: pb.StatusReply) -> pb.StatusReply:
    """What a restart must not change."""
    copy = pb.StatusReply()
    copy.CopyFrom(status)
    # What the agents report again within a second, and the number of the start.
    for name in ("generation", "step", "loss", "reason"):
        copy.ClearField(name)
    for node in copy.nodes:
        node.ClearField("silent_seconds")
    return copy


def test_kill_and_restart_keep_the_job(tmp_path: Path) -> None:
    """SIGKILL of a running job's master: the next one has the same world, and a repeated call no second effect."""
    store = tmp_path / "s.sqlite"
    with master_process(store, "--nnodes", "1:2") as first:
        agents = [Agent(first.address, "a"), Agent(first.address, "b")]
        epoch = open_world(agents, settings())
        agents[0].progress(epoch, 5)
        commit = agents[0].commit(epoch, 5)
        before = agents[0].status()
        assert before.phase == pb.PHASE_RUNNING
        assert before.head.step == 5
        first.kill()
    with master_process(store, "--nnodes", "1:2") as second:
        assert second.generation == first.generation + 1
        for agent in agents:
            agent.connect(second.address)
        assert durable(agents[0].status()) == durable(before)
        directive = next(agents[1].watch())
        assert directive.WhichOneof("order") == "run"
        assert directive.run.epoch == epoch
        assert directive.generation == second.generation
        assert agents[0].stub.CommitCheckpoint(commit, timeout=10).generation == second.generation
        assert durable(agents[0].status()) == durable(before)


def test_kill_between_any_two_writes(tmp_path: Path) -> None:
    """SIGKILL at random moments of a stream of commits: what was acknowledged is there, and the job goes on."""
    store = tmp_path / "s.sqlite"
    chance = random.Random(20)
    with master_process(store) as master:
        agent = Agent(master.address, "a")
        epoch = open_world([agent], settings((1, 1)))
        master.kill()
    acknowledged = 0
    for _ in range(4):
        with master_process(store) as master:
            agent.connect(master.address)
            assert agent.status().head.step in (acknowledged, acknowledged + 1)
            acknowledged = agent.status().head.step
            killer = threading.Timer(chance.uniform(0.02, 0.2), master.process.kill)
            killer.start()
            acknowledged = commit_until_killed(agent, epoch, acknowledged)
            killer.join()
    assert acknowledged > 0


def commit_until_killed(agent: Agent, epoch: int, step: int) -> int:
    """Returns the last step that was acknowledged."""
    while True:
        try:
            agent.commit(epoch, step + 1)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return step
        step += 1


def test_a_second_master_on_the_store_supersedes_the_first(tmp_path: Path) -> None:
    """The older one answers no further change and ends by itself; embedded with 0, else with 3 and one line."""
    store = tmp_path / "s.sqlite"
    for arguments, code in (((), 3), (("--embedded",), 0)):
        with master_process(store, *arguments) as old:
            agent = Agent(old.address, "a", incarnation=f"{code}")
            agent.register(settings((2, 2)))
            with master_process(store, *arguments) as new:
                assert new.generation > old.generation
                with pytest.raises(grpc.RpcError) as error:
                    agent.stub.Leave(pb.LeaveRequest(caller=agent.next_caller(), notice=5), timeout=10)
                assert error.value.code() is grpc.StatusCode.UNAVAILABLE
                _, said = old.process.communicate(timeout=10)
                assert old.process.returncode == code
                assert said.count("\n") == (1 if code else 0) + said.count("WARNING")
                assert [node.role for node in Agent(new.address, "x").status().nodes] == ["spare"]
        store.unlink()


def test_the_death_of_an_agent_process_is_heard(tmp_path: Path) -> None:
    """SIGKILL of a process that watches: its node is dropped long before the node-timeout."""
    watcher = (
        "import sys\n"
        "from tests.support.jobs.master_process import Agent, settings\n"
        "agent = Agent(sys.argv[1], 'b')\n"
        "agent.register(settings((2, 3)))\n"
        "for directive in agent.watch(): print('seen', flush=True)\n"
    )
    root = Path(__file__).parents[2]
    with master_process(tmp_path / "s.sqlite") as master:
        line = [sys.executable, "-c", watcher, master.address]
        agent = Agent(master.address, "a")
        agent.register(settings((2, 3)))
        stream = agent.watch()
        next(stream)
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True, cwd=root) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "seen\n"
            assert {node.node for node in agent.status().nodes} == {"a", "b"}
            process.kill()
        eventually(lambda: {node.node for node in agent.status().nodes} == {"a"}, 6)


def test_a_stopped_master_declares_nobody_dead(tmp_path: Path) -> None:
    """SIGSTOP for longer than the node-timeout, then SIGCONT: every node gets a fresh node-timeout.

    Also the one that the master hears later than the other.
    """
    with master_process(tmp_path / "s.sqlite") as master:
        agents = [Agent(master.address, "a"), Agent(master.address, "b")]
        epoch = open_world(agents, settings(node_timeout=5.0))
        streams = [agent.watch() for agent in agents]
        for stream in streams:
            next(stream)
        master.process.send_signal(signal.SIGSTOP)
        waiting = agents[0].stub.Heartbeat.future(pb.HeartbeatRequest(caller=agents[0].caller()), timeout=10)
        time.sleep(5)
        master.process.send_signal(signal.SIGCONT)
        waiting.result(10)
        time.sleep(0.5)
        for _ in range(10):
            for agent in agents:
                agent.heartbeat()
            time.sleep(0.1)
        status = agents[0].status()
        assert (status.phase, status.epoch) == (pb.PHASE_RUNNING, epoch)
        assert [node.role for node in status.nodes] == ["member", "member"]


def test_sigterm_stops_it_cleanly(tmp_path: Path) -> None:
    """Exit code 0, soon, with a stream open; nothing on stderr."""
    with master_process(tmp_path / "s.sqlite") as master:
        agent = Agent(master.address, "a")
        agent.register(settings((2, 2)))
        stream = agent.watch()
        next(stream)
        start = time.monotonic()
        master.process.terminate()
        _, said = master.process.communicate(timeout=10)
        assert (master.process.returncode, said) == (0, "")
        assert time.monotonic() - start < 5
        with pytest.raises(grpc.RpcError) as error:
            next(stream)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_an_embedded_master_ends_when_nobody_comes(tmp_path: Path) -> None:
    """No agent for the idle time: it ends with 0 by itself."""
    with master_process(tmp_path / "s.sqlite", "--embedded", "--idle-timeout", "1") as master:
        master.process.communicate(timeout=10)
        assert master.process.returncode == 0


def test_the_http_edge_of_a_served_job(tmp_path: Path) -> None:
    """`--http-port`: named in the line that says where the master serves, and ended with it."""
    pytest.importorskip("fastapi", reason="needs the extra http")
    with master_process(tmp_path / "s.sqlite", "--http-port", "0") as master:
        Agent(master.address, "a").register(settings((2, 2)))
        with urllib.request.urlopen(f"http://{master.http}/api/v1/job", timeout=10) as answer:
            job = json.load(answer)
        assert (job["job_id"], [node["node"] for node in job["nodes"]]) == ("job", ["a"])
        expect_refusal(
            command(tmp_path / "t.sqlite", "--http-port", master.http.rpartition(":")[2]),
            "--http-port): Address already",
        )
        master.process.terminate()
        _, said = master.process.communicate(timeout=10)
        assert (master.process.returncode, said) == (0, "")


def test_the_log_file_tells_what_happened(tmp_path: Path) -> None:
    """Each notice of the agents' consoles, once, with the job's name."""
    log = tmp_path / "log"
    with master_process(tmp_path / "s.sqlite", "--log-file", str(log)) as master:
        agents = [Agent(master.address, "a"), Agent(master.address, "b")]
        epoch = open_world(agents, settings())
        agents[0].progress(epoch, 1)
        notices = [notice.text for notice in next(agents[0].watch()).notices]
        lines = log.read_text().splitlines()
    assert notices
    assert all("[job/master]" in line for line in lines)
    assert [line.partition("[job/master] ")[2] for line in lines[2:]] == notices


def test_mutual_tls(tmp_path: Path) -> None:
    """With --tls-ca only a client with a certificate of that authority is served, and nobody without TLS."""
    authority = Authority(tmp_path / "authority")
    mine, theirs, root = authority.issue("master"), authority.issue("agent"), authority.path.read_bytes()
    tls = (f"--tls-cert={mine.path}", f"--tls-key={mine.key}", f"--tls-ca={authority.path}")
    with master_process(tmp_path / "s.sqlite", *tls) as master:
        good = grpc.ssl_channel_credentials(root, theirs.key.read_bytes(), theirs.path.read_bytes())
        assert Agent(master.address, "a", credentials=good).status().job_id == "job"
        for credentials in (None, grpc.ssl_channel_credentials(root)):
            with pytest.raises(grpc.RpcError) as error:
                Agent(master.address, "a", credentials=credentials).status()
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--nnodes", "4:1"], "did you mean 1:4"),
        (["--nnodes", "many"], "is not N or MIN:MAX"),
        (["--nnodes", "0:2"], "at least 1 node"),
        (["--nnodes", "1:999999999"], "at most 1048576 nodes"),
        (["--nnodes", "9" * 5000], "is not N or MIN:MAX"),
        (["--port", "99999"], "is no port"),
        (["--host", "0.0.0.0"], "--token-file"),
        (["--host", "nosuch.invalid", "--insecure"], "cannot listen on nosuch.invalid"),
        (["--host", "a..b", "--insecure"], "cannot listen on a..b"),
        (["--token-file", "/nowhere/token"], "cannot read the token file /nowhere/token"),
        (["--tls-cert", "x.pem"], "--tls-cert and --tls-key belong together"),
        (["--tls-cert", __file__, "--tls-key", __file__], "no PEM certificate chain"),
        (["--log-file", "/nowhere/log"], "cannot write the log file"),
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--job-id", "../x"], "is no job id"),
        (["--store", "sqlite:////nowhere/s.sqlite"], "does not exist"),
        (["--store", "redis://x"], "no 'redis' store"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path, arguments: list[str], line: str) -> None:
    """The cause and what to change."""
    expect_refusal(command(tmp_path / "s.sqlite", *arguments), line)


def expect_refusal(line: list[str], text: str) -> None:
    done = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2, done.stderr
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_store_that_cannot_be_written_now_ends_it_with_1(tmp_path: Path) -> None:
    """A full disk is no bad input: supervisors that start nobody again after 2 start it again after 1."""
    with master_process(tmp_path / "s.sqlite"):
        pass
    line = ["sh", "-c", 'ulimit -f 0; exec "$0" "$@"', *command(tmp_path / "s.sqlite")]
    done = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert "cannot write the store" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_mount_that_is_stale_at_the_start_ends_it_with_1(tmp_path: Path) -> None:
    """It is mounted again, and nobody would start the master after 2."""
    stale = (
        "import errno, os, sys\n"
        "from dalsegno.master.cli import main\n"
        "real, gone = os.stat, sys.argv.pop(1)\n"
        "def stat(path, *rest, **options):\n"
        "    if os.fspath(path) == gone: raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)\n"
        "    return real(path, *rest, **options)\n"
        "os.stat = stat\n"
        "sys.exit(main())\n"
    )
    python, _, _, *arguments = command(tmp_path / "s.sqlite")
    line = [python, "-c", stale, str(tmp_path), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr == f"dlrover-master: cannot open the store {tmp_path}/s.sqlite: Stale file handle\n"


def test_a_disk_that_fails_is_no_bad_input(tmp_path: Path) -> None:
    """Wherever what it is started with lies: reading this file is an I/O error."""
    line = command(tmp_path / "s.sqlite", "--token-file=/proc/self/mem")
    done = subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr == "dlrover-master: cannot read the token file /proc/self/mem: Input/output error\n"


def test_what_a_running_job_makes_impossible(tmp_path: Path) -> None:
    """Its port, another job's store, other nnodes, a damaged store."""
    store = tmp_path / "s.sqlite"
    with master_process(store, "--nnodes", "1:2") as master:
        port = master.address.rpartition(":")[2]
        expect_refusal(command(tmp_path / "t.sqlite", "--port", port), f"port {port}: Address already in use")
        expect_refusal(command(store, job_id="other"), "belongs to job 'job', not to 'other'")
        Agent(master.address, "a").register(settings())
    expect_refusal(command(store, "--nnodes", "2:4"), "has --nnodes 1:2 in this store, not 2:4")
    store.write_bytes(b"no database at all" * 100)
    expect_refusal(command(store), "is damaged")
