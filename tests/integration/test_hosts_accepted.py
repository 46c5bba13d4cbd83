"""The whole of it on hosts: a job over TLS with three masters over three members of etcd, each party killed in turn."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

pytest.importorskip("aetcd")

from dalsegno.agent.control.connection import Credentials
from tests.support.hosts.hosts import Hosts, missing
from tests.support.hosts.job import HostedJob
from tests.support.jobs.certificates import as_flags, make_keys
from tests.support.jobs.cluster import Training, Undisturbed
from tests.support.jobs.etcd_members import ETCD, Members, etcd_members
from tests.support.jobs.etcd_members import MISSING as NO_ETCD

MISSING = missing() or (NO_ETCD if ETCD is None else "")
pytestmark = [pytest.mark.timeout(900), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

NODES, MASTERS = ("h1", "h2", "h3"), ("m1", "m2", "m3")
TRAINING = Training(steps=900, save_every=3)


def wait_commit(job: HostedJob) -> None:
    """Until a checkpoint is committed that was not when this was asked, and all nodes train."""
    before = job.wait_status(lambda status: True, "the job's status").head.step
    job.wait_status(lambda status: status.head.step > before, "a commit")


def kill_master(job: HostedJob, name: str) -> None:
    """The process alone; another one leads, if it did."""
    _, generation = job.leader()
    led = job.leader()[0] == name
    job.masters[name].kill()
    job.masters[name].wait(20)
    job.leader(lambda leader, now: leader != name and (not led or now > generation))
    wait_commit(job)
    job.start_master(name)


def kill_member(job: HostedJob, members: Members, number: int) -> None:
    """One of etcd's, which comes back with what it had."""
    members.send(number, signal.SIGKILL)
    wait_commit(job)
    members.start(number)
    members.wait(number)


def cut_masters_host(job: HostedJob, members: Members, number: int) -> None:
    """A master and a member of etcd at once, without a word, and their host boots again."""
    name = MASTERS[number]
    job.hosts[name].power_cut()
    job.leader(lambda leader, generation: leader != name)
    wait_commit(job)
    job.hosts[name].power_up()
    members.start(number)
    members.wait(number)
    job.start_master(name)


def cut_node(job: HostedJob, name: str) -> int:
    """A node's host, which boots again, and its node joins; returns the epoch of the others alone."""
    epoch = job.epoch()
    job.power_cut(job.node(name))
    epoch = job.wait_world(2, steps=2, after=epoch)
    job.host(name).power_up()
    job.start(name)
    job.wait_world(3, steps=2, after=epoch)
    return epoch


@pytest.mark.full
def test_each_party_is_killed_in_turn(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Every master, every member, every node; the curve stays, and only a node's end costs steps."""
    with Hosts(tmp_path / "hosts", (*NODES, *MASTERS)) as hosts:
        names = ["IP:127.0.0.1", *(f"IP:{hosts[name].address}" for name in MASTERS)]
        keys = make_keys(tmp_path / "keys", ",".join(names))
        own = keys.agent
        with (
            etcd_members(tmp_path / "etcd", 3, [hosts[name] for name in MASTERS]) as members,
            HostedJob(
                tmp_path / "job",
                TRAINING,
                hosts=hosts,
                master_hosts=MASTERS,
                store=members.url,
                master_flags=as_flags(keys.server(mutual=True)),
                agent_flags=(*as_flags(keys.client(mutual=True)), "--node-timeout=8", "--memory-replicas=1"),
                credentials=Credentials(keys.token, keys.ca, own.path, own.key),
            ) as job,
        ):
            for name in MASTERS:
                job.start_master(name)
            job.start(*NODES)
            first = job.wait_world(3, steps=2)
            ranks = [job.worker_pid(node) for node in job.nodes]
            for number, name in enumerate(MASTERS):
                kill_master(job, name)
                kill_member(job, members, number)
                cut_masters_host(job, members, number)
            # All of that was nothing to the ranks.
            assert (job.epoch(), [job.worker_pid(node) for node in job.nodes]) == (first, ranks)
            crashes = [cut_node(job, name) for name in NODES]
            wait_commit(job)
            job.finish()
            job.assert_lost(dict.fromkeys(crashes, range(TRAINING.save_every + 1)))
            job.assert_undisturbed(undisturbed)
