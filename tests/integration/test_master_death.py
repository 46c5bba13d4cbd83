"""The master is killed in every phase and started again: workers do not notice, and nothing is forgotten (point 4).

`embedded`: an agent starts the next one by itself; `service`: the test does, at the same port with the same store.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dalsegno.protos import control_pb2
from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import TRAIN, Cluster, Training, Undisturbed
from tests.support.jobs.faults import (
    Service,
    flip_byte,
    held_conversions,
    held_verifications,
    run_directory,
    wait_held_converter,
)
from tests.support.jobs.proxy import proxy

pytestmark = pytest.mark.timeout(300)

Jobs = Callable[..., Cluster]
SMALL = Training(steps=40, save_every=5)
LONG = Training(steps=80, save_every=5)
ZERO = Training(script=TRAIN, steps=40, save_every=10)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Makes one job with an embedded master or with one as a service, and ends all of it."""
    made: list[Cluster] = []

    def make(kind: str, **options: Any) -> Cluster:
        job = Service(tmp_path / "job", **options) if kind == "service" else Cluster(tmp_path / "job", **options)
        made.append(job)
        if isinstance(job, Service):
            job.start_master()
        return job

    yield make
    for job in made:
        print(job.diagnosis())
        job.close()


def kinds(default: str) -> pytest.MarkDecorator:
    """Both kinds of master, one of them in the default suite."""
    other = "service" if default == "embedded" else "embedded"
    return pytest.mark.parametrize("kind", [default, pytest.param(other, marks=pytest.mark.full)])


def kill(job: Cluster) -> int:
    """SIGKILL to the master; returns the generation that it had."""
    status = job.wait_status(lambda status: True, "the master's status")
    pid = job.master_pid()
    assert pid is not None
    processes.send([pid], signal.SIGKILL)
    return int(status.generation)


def restart(job: Cluster, generation: int) -> control_pb2.StatusReply:
    """Starts the next master, or waits until an agent has; returns what it says first."""
    if isinstance(job, Service):
        job.masters[-1].process.wait(10)
        job.start_master()
    return job.wait_status(lambda status: status.generation > generation, f"a master after generation {generation}")


def kill_and_restart(job: Cluster) -> control_pb2.StatusReply:
    return restart(job, kill(job))


@kinds("embedded")
def test_killed_while_running(jobs: Jobs, undisturbed: Undisturbed, kind: str) -> None:
    """The same workers go on in the same epoch; afterwards fewer than `min` nodes still wait for another one."""
    job = jobs(kind, training=LONG, nnodes="2:4")
    a, b = job.start("a", "b")
    epoch = job.wait_world(2)
    before = job.wait_status(lambda status: status.head.step >= 5, "a commit")
    workers = [job.worker_pid(a), job.worker_pid(b)]
    after = kill_and_restart(job)
    assert (after.phase, after.epoch, after.run_id) == (control_pb2.PHASE_RUNNING, epoch, before.run_id)
    assert (after.settings.min_nodes, after.settings.max_nodes) == (2, 4)
    assert after.head.step >= before.head.step
    assert [record.epoch for record in after.history] == [record.epoch for record in before.history]
    job.wait_status(lambda status: status.head.step > after.head.step, "a commit under the new master")
    assert [job.worker_pid(a), job.worker_pid(b)] == workers
    assert job.epoch() == epoch
    job.kill_node(b)
    job.wait_line("1 here, at least 2 needed", a)
    assert not [line for line in job.poll() if line.world_size != 2]
    job.start("c")
    epoch = job.wait_world(2, after=epoch)
    job.finish()
    job.assert_lost({epoch: range(30)})
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
@kinds("service")
def test_killed_while_waiting(jobs: Jobs, undisturbed: Undisturbed, kind: str) -> None:
    """One node of at least two: it still waits, and the second one starts the run."""
    job = jobs(kind, training=SMALL, nnodes="2:4")
    (a,) = job.start("a")
    job.wait_line("1 here, at least 2 needed", a)
    after = kill_and_restart(job)
    assert (after.phase, after.settings.min_nodes, after.epoch) == (control_pb2.PHASE_WAITING, 2, 0)
    assert [node.node for node in after.nodes] == ["a"]
    job.start("b")
    assert job.wait_world(2) == 1
    job.finish()
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
@kinds("embedded")
def test_killed_while_forming(jobs: Jobs, undisturbed: Undisturbed, kind: str) -> None:
    """Two nodes gather: they are in the first world."""
    job = jobs(kind, training=SMALL, nnodes="2:4", agent_flags=["--quiet-time=8"])
    job.start("a", "b")
    job.wait_status(
        lambda status: status.phase == control_pb2.PHASE_FORMING and len(status.nodes) == 2, "gathering nodes"
    )
    after = kill_and_restart(job)
    assert {node.node for node in after.nodes} == {"a", "b"}
    assert job.wait_world(2) == 1
    job.finish()
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
@kinds("service")
def test_killed_while_draining(jobs: Jobs, undisturbed: Undisturbed, kind: str) -> None:
    """The drain goes on: the newcomer is in the next world, and no step is lost."""
    job = jobs(kind, training=LONG, agent_flags=["--drain-timeout=120"])
    _, b = job.start("a", "b")
    epoch = job.wait_world(2, steps=3)
    worker = job.worker_pid(b)
    # A rank that does not move: the ranks cannot agree on a boundary yet.
    processes.send([worker], signal.SIGSTOP)
    job.start("c")
    job.wait_status(lambda status: status.phase == control_pb2.PHASE_DRAINING, "draining")
    after = kill_and_restart(job)
    assert (after.phase, after.epoch) == (control_pb2.PHASE_DRAINING, epoch)
    processes.send([worker], signal.SIGCONT)
    assert job.wait_world(3) == epoch + 1
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
@kinds("embedded")
def test_killed_during_a_conversion(jobs: Jobs, undisturbed: Undisturbed, kind: str) -> None:
    """The converter works on under its lease; nobody converts a second time."""
    job = jobs(kind, training=ZERO)
    job.start("a", environment=held_conversions())
    epoch = job.wait_world(1, steps=3)
    job.start("b")
    converter = wait_held_converter(job)
    after = kill_and_restart(job)
    assert (after.phase, after.epoch) == (control_pb2.PHASE_FORMING, epoch)
    job.wait_status(lambda status: len(status.nodes) == 2, "both nodes")
    assert processes.is_alive(converter)
    job.release()
    epoch = job.wait_world(2, after=epoch)
    assert job.change(epoch).universal
    assert len({path.name for path in run_directory(job).glob("step-*.universal.*")}) == 1
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
@kinds("service")
def test_killed_during_a_verification(jobs: Jobs, undisturbed: Undisturbed, kind: str) -> None:
    """A worker could not load the newest checkpoint: the second look is finished, and the one before is used."""
    job = jobs(kind, training=SMALL)
    (a,) = job.start("a")
    job.wait_status(lambda status: status.head.step >= 10, "two commits")
    job.kill_node(a)
    head = job.wait_status(lambda status: True, "the newest commit").head if kind == "service" else None
    found = sorted(run_directory(job).glob("step-*/MANIFEST.json"), key=lambda path: path.stat().st_mtime_ns)
    newest, before = found[-1].parent, found[-2].parent
    assert head is None or head.ref.name == newest.name
    flip_byte(newest)
    (b,) = job.start("b", environment=held_verifications())
    job.wait_line("cannot read .*: it is being verified", b)
    job.wait_for(lambda: [*job.holds.glob("verification-*")] or None, "a verification in the middle")
    kill_and_restart(job)
    job.release()
    job.wait_line(rf"{newest.name} is damaged .*: going back to {before.name}", b)
    epoch = job.wait_world(1, after=1)
    assert f"step-{job.change(epoch).resumed}." in before.name
    job.finish()
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
def test_a_node_that_alone_is_cut_off_drains(jobs: Jobs, undisturbed: Undisturbed) -> None:
    """Its peers still hear the master, so after the outage timeout it has them save; the others go on without it."""
    flags = ["--node-timeout=30", "--master-outage-timeout=4"]
    # It ends before its second half, whose steps are slow: a step that outlasts all before is taken for standing still.
    job = jobs("service", training=Training(steps=400, save_every=50), agent_flags=flags)
    assert isinstance(job, Service)
    with proxy(job.masters[-1].address) as way:
        job.ways["b"] = way.address
        _, b = job.start("a", "b")
        epoch = job.wait_world(2, steps=3)
        way.cut()
        job.wait_line("the master cannot be reached", b)
        alone = job.wait_world(1, steps=2, after=epoch)
        way.mend()
        both = job.wait_world(2, steps=2, after=alone)
        job.finish()
    job.assert_lost({})
    assert both > alone
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
@kinds("service")
def test_leave_while_the_master_is_away(jobs: Jobs, undisturbed: Undisturbed, kind: str) -> None:
    """SIGTERM drains without a master: 75 means saved; the other node goes on from there when there is one again."""
    job = jobs(kind, training=LONG, agent_flags=["--node-timeout=6"])
    a, b = job.start("a", "b")
    epoch = job.wait_world(2, steps=3)
    generation = kill(job)
    job.leave(b)
    job.wait_exit(b)
    if kind == "service":
        # An embedded one may be back by now, and have formed the next world.
        job.wait_line("the master cannot be reached", a)
        assert job.epoch() == epoch
    restart(job, generation)
    job.wait_world(1, after=epoch)
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
@kinds("service")
def test_killed_with_its_store(jobs: Jobs, undisturbed: Undisturbed, kind: str) -> None:
    """Min is still min, although the one node that comes back was told otherwise; with another one the run goes on."""
    job = jobs(kind, training=SMALL, nnodes="2:4", agent_flags=["--node-timeout=6"])
    (a,) = job.start("a")
    job.wait_line("1 here, at least 2 needed", a)
    job.nnodes = "1:3"
    (b,) = job.start("b")
    job.wait_line("the job's settings count: --nnodes=2:4, not 1:3", b)
    epoch = job.wait_world(2)
    job.wait_status(lambda status: status.head.step >= 5, "a commit")
    # Gone before the master is: nobody is to start the next one over it in between.
    store = job.private / "master.sqlite" if kind == "embedded" else job.directory / "job.sqlite"
    for path in store.parent.glob(f"{store.name}*"):
        path.unlink()
    job.kill_node(a)
    generation = kill(job)
    restart(job, generation)
    job.wait_line(r"the master's record was lost; .* with --nnodes=2:4", b)
    job.wait_line("1 here, at least 2 needed", b)
    after = job.wait_status(lambda status: status.epoch >= epoch, "the epochs that were opened")
    assert (after.settings.min_nodes, after.settings.max_nodes) == (2, 4)
    job.start("c")
    epoch = job.wait_world(2, after=epoch)
    assert {(one.min_nodes, one.max_nodes) for one in job.sealed()} == {(2, 4)}
    job.finish()
    job.assert_lost({epoch: range(40)})
    job.assert_undisturbed(undisturbed)
