"""Memory checkpoints while the master is away, with real agents: what `save_every` names comes to the disk as ever.

Agents write what is in memory to the disk when the master says so. While no agent hears it, the ranks save there.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.memory.place import remove_leftovers, root_of_user
from dalsegno.elastic.checkpoint import verify
from tests.integration.test_hf_trainer import training as of_hf
from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import Training, Undisturbed
from tests.support.jobs.faults import Service, makers, noted_makers, run_directory, volume

pytestmark = pytest.mark.timeout(300)

Jobs = Callable[..., Service]

EVERY = 20


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    """Makes a job of two nodes with memory checkpoints whose master is a service, and ends all of it."""
    made: list[Service] = []

    def make(steps: int, *, trainer: bool = False, store: str = "", **environment: str) -> Service:
        one = of_hf(steps=steps)
        training = Training(one.script, steps, EVERY, extra=one.extra, needs_agent=True, preloaded=one.preloaded)
        options: dict[str, Any] = {
            "training": training if trainer else Training(steps=steps, save_every=EVERY),
            "nnodes": "1:2",
            "step_time": 0.1,
            "universal": False,
            "script_flags": ("--memory-every=3",),
            "agent_flags": ("--memory-replicas=1", "--quiet-time=60", "--keep-checkpoints=0"),
            "agent_environment": {**noted_makers(), **environment},
            # What is forked begins without `sitecustomize`.
            "executed": 4,
            "store": store,
        }
        made.append(Service(tmp_path / "job", **options))
        made[-1].start_master()
        return made[-1]

    yield make
    for job in made:
        print(job.diagnosis())
        job.close()
        remove_leftovers(root_of_user())


def open_world(job: Service) -> int:
    """Its first world, once a step has come to the disk by way of the agents."""
    first = job.open("a", "b")
    wait_on_disk(job, EVERY)
    return first


def wait_on_disk(job: Service, step: int) -> None:
    """Until a step is on the disk, and what is there is what was sealed."""
    job.wait_for(lambda: step in {one.step for one in job.sealed()}, f"step {step} on the disk")
    manifest = next(one for one in job.sealed() if one.step == step)
    verify(run_directory(job) / manifest.name, manifest, threads=1)


def send(job: Service, number: signal.Signals) -> None:
    """A signal to the master."""
    pid = job.master_pid()
    assert pid is not None
    processes.send([pid], number)


def start_next_master(job: Service) -> None:
    """Once the one before is gone."""
    job.masters[-1].process.wait(10)
    job.start_master()


@pytest.mark.full
@pytest.mark.parametrize("trainer", [False, True], ids=["loop", "hugging-face"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_all_nodes_die_in_an_outage(
    jobs: Jobs, undisturbed: Undisturbed, how: signal.Signals, *, trainer: bool
) -> None:
    """The next start goes on from the last step that `save_every` named, though no master ever heard of it."""
    job = jobs(6 * EVERY, trainer=trainer)
    first = open_world(job)
    send(job, how)
    wait_on_disk(job, 5 * EVERY)
    for node in job.alive():
        job.kill_node(node)
    newest = max(one.step for one in job.sealed())
    if how == signal.SIGSTOP:
        send(job, signal.SIGKILL)
    start_next_master(job)
    goes_on(job, first, newest, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("how", ["stopped", "killed"])
def test_the_master_is_back(jobs: Jobs, undisturbed: Undisturbed, how: str) -> None:
    """It counts what was sealed meanwhile, and then the agents write again. Nothing is said to have gone wrong."""
    job = jobs(20 * EVERY)
    open_world(job)
    send(job, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    wait_on_disk(job, 4 * EVERY)
    wait_on_disk(job, 5 * EVERY)
    if how == "stopped":
        send(job, signal.SIGCONT)
    else:
        start_next_master(job)
    job.wait_status(lambda said: said.head.step >= 5 * EVERY, "the commit of what was sealed meanwhile")
    job.finish()
    job.assert_undisturbed(undisturbed)
    job.assert_lost({})
    made, steps = makers(job), job.training.steps
    assert {4 * EVERY, 5 * EVERY, steps} <= made["worker"]
    assert EVERY in made["agent"]
    assert max(made["agent"] - made["worker"]) > 5 * EVERY
    assert not [line for line in said(job) if "could not write" in line]


@pytest.mark.full
def test_the_store_is_full_while_the_master_is_heard(tmp_path: Path, jobs: Jobs, undisturbed: Undisturbed) -> None:
    """It can order no writes, so the ranks save what `save_every` names; with the store back the agents write again."""
    with volume(tmp_path / "store", 20) as room:
        job = jobs(30 * EVERY, store=f"sqlite:///{tmp_path / 'store' / 'job.sqlite'}")
        first = open_world(job)
        room.fill()
        wait_on_disk(job, 4 * EVERY)
        assert job.master_pid() is not None, "the master lives"
        room.clear()
        job.wait_status(lambda said: said.head.step >= 4 * EVERY, "the commit of what was sealed meanwhile")
        job.finish()
        assert job.epoch() == first
    job.assert_undisturbed(undisturbed)
    job.assert_lost({})
    made = makers(job)
    assert 4 * EVERY in made["worker"]
    assert max(made["agent"]) > 5 * EVERY
    for node in job.nodes:
        said = node.said()
        assert len([line for line in said if "can record nothing, as its store is away" in line]) == 1
        assert len([line for line in said if "the master records again" in line]) == 1


@pytest.mark.full
def test_a_power_cut_takes_the_last_save_of_ranks_that_have_finished(
    tmp_path: Path, jobs: Jobs, undisturbed: Undisturbed
) -> None:
    """It was in memory alone, as the disk was full. The next start is not told that nothing is left to do."""
    with volume(tmp_path / "job" / "checkpoints", 64) as disk:
        job = jobs(3 * EVERY, DALSEGNO_TEST_LEAVES=str(2 * EVERY))
        first = open_world(job)
        disk.fill()
        text = f"step-{2 * EVERY}.e{first}"
        job.wait_for(
            lambda: any("as the ranks have finished" in line and text in line for line in said(job)), "the end"
        )
        send(job, signal.SIGKILL)
        for node in job.alive():
            job.kill_node(node)
        disk.clear()
        start_next_master(job)
        del job.agent_environment["DALSEGNO_TEST_LEAVES"]
        goes_on(job, first, EVERY, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("killed", [False, True])
def test_the_last_save_of_ranks_that_have_finished_comes_to_the_disk(jobs: Jobs, *, killed: bool) -> None:
    """Also where the master is killed as it hears of it."""
    job = jobs(3 * EVERY, DALSEGNO_TEST_LEAVES=str(2 * EVERY))
    open_world(job)
    if killed:
        job.wait_for(lambda: any(f"step {2 * EVERY}" in node.text() for node in job.nodes), "the last step")
        send(job, signal.SIGKILL)
        start_next_master(job)
    for node in job.nodes:
        job.wait_exit(node)
    assert max(one.step for one in job.sealed()) == 2 * EVERY
    assert any(f"the run finished at step {2 * EVERY}" in line for line in said(job))


def goes_on(job: Service, before: int, step: int, undisturbed: Undisturbed) -> None:
    """Both nodes are started again, and train to the end behind this step."""
    job.start("a", "b")
    world = job.wait_world(2, after=before)
    assert job.first_step(world) == step + 1
    job.finish()
    job.assert_undisturbed(undisturbed)


def said(job: Service) -> list[str]:
    """Lines of all nodes."""
    return [line for node in job.nodes for line in node.said()]
