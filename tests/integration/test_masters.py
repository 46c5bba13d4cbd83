"""Several masters over a real etcd: whichever of them and of etcd's members goes, a job trains, grows and commits."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from subprocess import PIPE, Popen

import pytest

pytest.importorskip("aetcd")

from dalsegno.protos import control_pb2
from tests.support.jobs.cluster import Training, Undisturbed
from tests.support.jobs.etcd_members import ETCD, MISSING, Members, etcd_members
from tests.support.jobs.master_process import command, said_by, serving
from tests.support.jobs.ports import free_port
from tests.support.jobs.proxy import Proxy
from tests.support.jobs.several_masters import Several

pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(ETCD is None, reason=MISSING)]


def dalsegno(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dalsegno.agent.commands.dalsegno", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def page(address: str, path: str) -> int:
    """The status with which a master's HTTP port answers."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    with etcd_members(tmp_path / "etcd", 3) as three:
        yield three


@pytest.fixture
def job(tmp_path: Path, members: Members) -> Iterator[Several]:
    with Several(tmp_path / "job", members=members, training=Training(steps=400, save_every=5)) as several:
        yield several


@pytest.mark.parametrize(
    "how",
    [
        "killed",
        pytest.param("told to end", marks=pytest.mark.full),
        pytest.param("stopped", marks=pytest.mark.full),
        pytest.param("killed with etcd's leader", marks=pytest.mark.full),
    ],
)
def test_the_leader_goes(job: Several, members: Members, undisturbed: Undisturbed, how: str) -> None:
    """Another one leads soon, the ranks go on as they are, and the world grows under the new one."""
    job.start("a")
    first = job.wait_world(1, steps=2)
    known = job.wait_status(lambda status: status.head.step >= 5, "a commit").history[0]
    worker = job.worker_pid(job.node("a"))
    leader, before = job.leader()
    began = time.monotonic()
    if how.startswith("killed with"):
        members.send(members.leader(), signal.SIGKILL)
    job.signal_master(leader, {"stopped": signal.SIGSTOP, "told to end": signal.SIGTERM}.get(how, signal.SIGKILL))
    after = job.wait_leader(lambda name, generation: name != leader and generation > before)
    took = time.monotonic() - began
    assert job.worker_pid(job.node("a")) == worker
    job.start("b")
    job.wait_world(2, steps=3, after=first)
    # Goodput is counted on from the worlds that the last leader knew.
    status = job.wait_status(lambda status: len(status.history) > 1 and status.goodput > 0, "the new world's record")
    then = status.history[0]
    assert (then.epoch, then.first_step, then.paused) == (known.epoch, known.first_step, known.paused)
    assert status.goodput <= 1
    if how == "stopped":
        job.signal_master(leader, signal.SIGCONT)
        job.wait_standby(leader, after[0])
    assert took < 30
    said = dalsegno("status", f"--master={','.join(job.addresses.values())}")
    assert f"master: {job.addresses[after[0]]} leads since " in said.stdout
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
def test_a_leader_that_is_cut_off_from_etcd_alone(tmp_path: Path, members: Members, undisturbed: Undisturbed) -> None:
    """It sends its agents away, also those with nothing to say: the next leader takes nobody for dead."""
    proxies = [Proxy(endpoint) for endpoint in members.endpoints]
    stores = {"m0": f"etcd://{','.join(one.address for one in proxies)}"}
    training = Training(steps=400, save_every=5)
    flags = ("--node-timeout=8",)
    with Several(
        tmp_path / "job", members=members, stores=stores, count=1, training=training, agent_flags=flags
    ) as job:
        assert job.leader()[0] == "m0"
        job.ports["m1"] = free_port()
        job.start_master("m1")
        job.wait_standby("m1", "m0")
        job.start("a", "b")
        epoch = job.wait_world(2, steps=2)
        workers = [job.worker_pid(node) for node in job.nodes]
        for proxy in proxies:
            proxy.cut()
        job.wait_leader(lambda name, generation: name == "m1")
        job.wait_for(lambda: not isinstance(job.ask("m0"), control_pb2.StatusReply), "m0 to serve nobody")
        cut = time.monotonic()
        # Longer than a node may be silent.
        job.wait_for(lambda: time.monotonic() - cut > 10, "some time")
        assert (job.epoch(), [job.worker_pid(node) for node in job.nodes]) == (epoch, workers)
        job.finish()
        job.assert_lost({})
        job.assert_undisturbed(undisturbed)
    for proxy in proxies:
        proxy.close()


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(8))
def test_whatever_goes(job: Several, members: Members, undisturbed: Undisturbed, seed: int) -> None:
    """Masters and members are killed and stopped, as the seed says, in any phase; a commit comes each time."""
    random = Random(f"masters {seed}")
    job.start("a")
    job.wait_world(1, steps=2)
    nodes = 1
    for _ in range(5):
        before = job.wait_status(lambda status: True, "the job's status").head.step
        victim, how = random.choice(("master", "leader", "member")), random.choice((signal.SIGKILL, signal.SIGSTOP))
        back = (send_master if victim != "member" else send_member)(job, members, random, victim, how)
        if nodes == 1 and random.random() < 0.4:
            # Its world forms while somebody is gone.
            job.start("b")
            nodes = 2
        time.sleep(random.uniform(0.0, 6.0))  # why: how long somebody is gone is what is tried
        back()
        job.wait_status(lambda status, before=before: status.head.step > before, "a commit")
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


def send_master(job: Several, members: Members, random: Random, victim: str, how: signal.Signals) -> Callable[[], None]:
    """A master goes; returns what brings it back."""
    name = job.leader()[0] if victim == "leader" else random.choice(sorted(job.masters))
    job.signal_master(name, how)
    if how is signal.SIGKILL:
        return lambda: job.start_master(name)
    return lambda: job.signal_master(name, signal.SIGCONT)


def send_member(job: Several, members: Members, random: Random, victim: str, how: signal.Signals) -> Callable[[], None]:
    """One of etcd's members goes; returns what brings it back."""
    number = random.randrange(3)
    members.send(number, how)

    def back() -> None:
        members.start(number) if how is signal.SIGKILL else members.send(number, signal.SIGCONT)
        members.wait(number)

    return back


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--store=memory://", "--advertise=h:1"], "--advertise has no effect with --store memory://"),
        (["--store=etcd://h:1", "--embedded"], "--embedded and --store etcd:// do not go together"),
        (["--store=etcd://h:1", "--host=0.0.0.0", "--insecure"], "name one that they reach with --advertise HOST:PORT"),
        (["--store=etcd://h:1", "--advertise=0.0.0.0:1"], "'0.0.0.0:1' is no address to go to"),
        (["--store=etcd://h:1", "--advertise=münchen"], "is no address to go to"),
        (["--store=etcd://h:1", "--advertise=a:b"], "'a:b' is no address to go to: write HOST:PORT"),
    ],
)
def test_what_does_not_fit_is_one_line(flags: list[str], line: str) -> None:
    command = [sys.executable, "-m", "dalsegno.master", "--job-id=job", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert line in done.stderr
    assert done.stderr.count("\n") == 1


def test_health_and_readiness(tmp_path: Path) -> None:
    """Both masters are healthy; the one that leads is ready, the other one says why it is not."""
    with etcd_members(tmp_path / "etcd") as one, contextlib.ExitStack() as stack:
        processes = []
        for _ in range(2):
            line = command(one.url, "--http-port=0")
            process = stack.enter_context(Popen(line, stdout=PIPE, stderr=PIPE, text=True))
            stack.callback(process.kill)
            processes.append((process, said_by(process)["http"]))
            if len(processes) == 1:
                assert serving(process).generation == 1
        (_, leads), (standing, other) = processes
        assert [page(http, "/healthz") for http in (leads, other)] == [200, 200]
        assert [page(http, "/readyz") for http in (leads, other)] == [200, 503]
        assert [page(http, "/api/v1/job") for http in (leads, other)] == [200, 503]
        processes[0][0].send_signal(signal.SIGTERM)
        assert processes[0][0].wait(20) == 0
        assert serving(standing).generation == 2
        assert page(other, "/readyz") == 200


@pytest.mark.full
def test_one_address_for_two_masters_is_one_line(tmp_path: Path) -> None:
    """The one that leads goes on; the other one would send agents to itself."""
    with etcd_members(tmp_path / "etcd") as one, contextlib.ExitStack() as stack:
        processes = []
        for _ in range(2):
            line = command(one.url, "--advertise=127.0.0.1:7000")
            process = Popen(line, stdout=PIPE, stderr=PIPE, text=True)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
            if len(processes) == 1:
                serving(process)
        assert processes[1].wait(60) == 2
        assert processes[1].stderr is not None
        (line,) = processes[1].stderr.read().splitlines()
        assert line == (
            "dlrover-master: another master of this job advertises 127.0.0.1:7000, too: give each its own --advertise"
        )
        assert processes[0].poll() is None
