"""Changes that go through memory, with real agents: what is lost is what the last memory checkpoint is behind.

Nothing is on the disk before the change, or only an older step, so a run that goes on from a later one has it from
memory. In its second half each world makes a few steps and stands still until something happens to it: so a test knows
which step is held, and what a change may cost.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.memory.place import remove_leftovers, root_of_user
from dalsegno.elastic.checkpoint import verify
from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import LEFT, TRAIN, Cluster, Node, Training, Undisturbed
from tests.support.jobs.faults import run_directory
from tests.support.jobs.master_process import eventually

pytestmark = pytest.mark.timeout(300)

Clusters = Callable[..., Cluster]

STEPS, EVERY = 40, 5
# Each world stands still so many steps after the run's half: nothing on the disk, STEPS // 2 in memory.
FREE = 3
MEMORY = Training(steps=STEPS, save_every=1000)
# The same with an older step on the disk.
BESIDE_DISK = Training(steps=STEPS, save_every=15)
ON_DISK = 15
HELD = STEPS // 2


@pytest.fixture
def jobs(clusters: Clusters) -> Iterator[Clusters]:
    """Makes jobs with memory checkpoints; nothing of them is left in memory, once dead nodes' leftovers are removed."""
    made: list[Cluster] = []

    def make(**options: Any) -> Cluster:
        flags = ("--memory-replicas=1", *options.pop("agent_flags", ()))
        given = {
            "training": MEMORY,
            "nnodes": "1:4",
            "step_time": 0.02,
            "universal": False,
            "script_flags": (f"--memory-every={EVERY}",),
            "agent_environment": {"DALSEGNO_TEST_STEPS": str(FREE)},
        }
        made.append(clusters(**{**given, **options, "agent_flags": flags}))
        return made[-1]

    yield make
    for job in made:
        job.close()
        # Of nodes whose keeper was killed, too: the next agent of the machine removes it, or the doctor.
        killed = [node for node in job.nodes if node.expected == -signal.SIGKILL]
        # Keepers that end with their agents just now are still at it.
        eventually(lambda job=job, killed=killed: len(directories(job)) <= len(killed))
        remove_leftovers(root_of_user())
        assert not directories(job)


def together(jobs: Clusters, *names: str, **options: Any) -> tuple[Cluster, int]:
    """A job whose first world has all these nodes; returns it and its epoch."""
    job = jobs(nnodes=f"1:{len(names)}", agent_flags=("--quiet-time=60",), **options)
    return job, job.open(*names)


def directories(job: Cluster) -> list[Path]:
    """The memory of each agent of the job."""
    return sorted((root_of_user() / job.job).glob("*"))


def memory_of(node: Node, job: Cluster) -> Path:
    """The memory of this node's agent, for the job's first run."""
    opened = processes.open_files(node.pid)
    return next(path for path in directories(job) if path in opened) / "run-0001"


def held(job: Cluster, node: Node, step: int, parts: int) -> Path | None:
    """The directory of a step, once all of so many parts are in this node's memory."""
    for found in memory_of(node, job).glob(f"step-{step}.e*.parts"):
        if all((found / f"{part}.json").exists() for part in range(parts)):
            return found.with_name(found.name.removesuffix(".parts"))
    return None


def wait_held(job: Cluster, nodes: list[Node], step: int = HELD, parts: int | None = None) -> list[Path]:
    """Until each of these nodes has all parts of a step, and the world stands still behind it."""
    wanted = len(nodes) if parts is None else parts
    job.wait_step(step + FREE)
    job.wait_standing()
    look = lambda node: lambda: held(job, node, step, wanted)  # noqa: E731
    return [job.wait_for(look(node), f"step {step} in the memory of {node.name}") for node in nodes]


def wait_durable(job: Cluster, step: int) -> None:
    """Until a step is on the disk, whole."""
    job.wait_for(lambda: step in {one.step for one in job.sealed()}, f"step {step} on the disk")
    manifest = next(one for one in job.sealed() if one.step == step)
    verify(run_directory(job) / manifest.name, manifest, threads=1)


def end(job: Cluster, undisturbed: Undisturbed) -> None:
    """The run goes to its end, with every sample once and the undisturbed run's losses."""
    job.finish()
    job.assert_undisturbed(undisturbed)


# ---- crashes --------------------------------------------------------------------------------------------------------


def test_a_killed_node(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """Its part is with its buddy: the other goes on from memory, and then the step is on the disk, too."""
    job, first = together(jobs, "a", "b")
    wait_held(job, job.alive())
    assert not job.sealed()
    job.kill_node(job.node("b"))
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed == HELD
    wait_durable(job, HELD)
    end(job, undisturbed)
    job.assert_lost({second: range(1, EVERY + 1)})


def test_a_killed_worker_alone(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """A single node has no buddy and needs none: its agent's memory outlives the worker."""
    job = jobs(nnodes="1")
    first = job.open("a")
    wait_held(job, job.alive())
    os.kill(job.worker_pid(job.node("a")), signal.SIGKILL)
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed == HELD
    wait_durable(job, HELD)
    end(job, undisturbed)
    job.assert_lost({second: range(1, EVERY + 1)})


@pytest.mark.full
def test_a_killed_agent_leaves_no_memory_behind(jobs: Clusters) -> None:
    """Its keeper removes what it had in memory, and nothing of the other agent's."""
    job, _ = together(jobs, "a", "b")
    wait_held(job, job.alive())
    gone, kept = memory_of(job.node("b"), job).parent, memory_of(job.node("a"), job).parent
    job.kill_agent(job.node("b"))
    job.wait_for(lambda: not gone.exists(), "the end of the killed agent's memory")
    assert kept.is_dir()
    job.finish()


@pytest.mark.full
def test_a_killed_node_and_its_only_buddy(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """A part is nowhere any more: the run goes back to what is on the disk, and says so."""
    job, first = together(jobs, "a", "b", "c", training=BESIDE_DISK)
    job.wait_standing()
    job.wait_for(lambda: ON_DISK in {one.step for one in job.sealed()}, "the save on the disk")
    for name in ("a", "b"):
        job.kill_node(job.node(name))
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed == ON_DISK
    end(job, undisturbed)
    job.assert_lost({second: range(1, HELD + FREE + 1)})


@pytest.mark.full
def test_a_killed_master(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """The next master hears from the nodes what they hold, and uses it."""
    job, first = together(jobs, "a", "b")
    wait_held(job, job.alive())
    master = job.master_pid()
    assert master is not None
    os.kill(master, signal.SIGKILL)
    job.kill_node(job.node("a"))
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed == HELD
    wait_durable(job, HELD)
    end(job, undisturbed)


# ---- planned changes ------------------------------------------------------------------------------------------------


def test_a_join_and_a_leave(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """Both drain into memory: no step is lost, and each comes to the disk behind the next world's first step."""
    job = jobs(nnodes="1:2")
    first = job.open("a")
    job.start("b")
    second = job.wait_world(2, after=first)
    wait_durable(job, job.change(second).resumed)
    leaver = job.node("b")
    job.leave(leaver)
    job.wait_exit(leaver)
    third = job.wait_world(1, after=second)
    wait_durable(job, job.change(third).resumed)
    end(job, undisturbed)
    job.assert_lost({})


@pytest.mark.full
def test_all_nodes_leave(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """The step is on the disk when the last one has gone, and the same command goes on from it."""
    job, first = together(jobs, "a", "b")
    wait_held(job, job.alive())
    for node in job.alive():
        job.leave(node)
    job.wait_exit()
    stopped = max(line.step for line in job.poll())
    wait_durable(job, stopped)
    assert not directories(job)
    assert {node.process.returncode for node in job.nodes} == {LEFT}
    second = job.open("a", "b", steps=1)
    assert (second > first, job.first_step(second)) == (True, stopped + 1)
    end(job, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("way", ["kill", pytest.param("leave", marks=pytest.mark.full)])
def test_zero_at_another_number_of_ranks(jobs: Clusters, undisturbed: Undisturbed, way: str) -> None:
    """Shards of two ranks, from memory, into one."""
    training = Training(script=TRAIN, steps=STEPS, save_every=1000, extra=("--zero-stage=1",))
    job, first = together(jobs, "a", "b", training=training)
    wait_held(job, job.alive())
    (job.leave if way == "leave" else job.kill_node)(job.node("b"))
    second = job.wait_world(1, after=first)
    told = job.change(second)
    assert told.how == "re-sharded"
    assert told.resumed == (HELD if way == "kill" else max(line.step for line in job.poll() if line.epoch == first))
    end(job, undisturbed)
    job.assert_lost({second: range(1, EVERY + 1)} if way == "kill" else {})


# ---- agents that were told otherwise --------------------------------------------------------------------------------


def start_with(job: Cluster, name: str, replicas: int) -> None:
    """Starts an agent whose own command line names so many replicas."""
    flags, job.agent_flags = job.agent_flags, (*job.agent_flags, f"--memory-replicas={replicas}")
    try:
        job.start(name)
    finally:
        job.agent_flags = flags


def test_an_agent_without_the_flag(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """The first agent's counts: the other drains into memory as it joins, and its loss costs as much as any."""
    # Each world makes so many steps that one of them is saved to memory.
    job = jobs(nnodes="1:2", agent_environment={"DALSEGNO_TEST_STEPS": str(EVERY + 1)})
    first = job.open("a")
    start_with(job, "b", 0)
    second = job.wait_world(2, after=first)
    assert not [line for node in job.nodes for line in node.said() if "could not fetch" in line]
    wait_durable(job, job.change(second).resumed)
    step = (job.change(second).resumed // EVERY + 1) * EVERY
    job.wait_step(step)
    job.wait_standing()
    for node in job.alive():
        job.wait_for(lambda node=node: held(job, node, step, 2), f"step {step} in the memory of {node.name}", 20)
    job.kill_node(job.node("b"))
    third = job.wait_world(1, after=second)
    assert job.change(third).resumed >= step, "on the disk is the step of the drain alone"
    end(job, undisturbed)
    job.assert_lost({third: range(EVERY + 1)})


@pytest.mark.full
def test_an_agent_with_the_flag_in_a_job_without(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """The first agent's counts: nothing is in memory, and its end leaves nothing there."""
    job = jobs(nnodes="1:2", agent_flags=("--memory-replicas=0",))
    first = job.open("a")
    start_with(job, "b", 1)
    second = job.wait_world(2, after=first)
    assert job.change(second).resumed in {one.step for one in job.sealed()}
    assert not list((root_of_user() / job.job).glob("*/run-0001/step-*"))
    job.leave(job.node("b"))
    job.wait_exit(job.node("b"))
    job.wait_world(1, after=second)
    end(job, undisturbed)
    job.assert_lost({})
    assert not directories(job)


@pytest.mark.full
def test_who_has_the_flag_keeps_nothing_for_itself_in_a_job_without(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """The first agent is gone, and the job is as it began: without copies there is nothing to go on from."""
    steps = {"DALSEGNO_TEST_STEPS": str(EVERY + 1)}
    job = jobs(nnodes="1:2", agent_flags=("--memory-replicas=0",), agent_environment=steps)
    first = job.open("a")
    start_with(job, "b", 1)
    second = job.wait_world(2, after=first)
    job.leave(job.node("a"))
    job.wait_exit(job.node("a"))
    third = job.wait_world(1, after=second)
    job.wait_step((job.change(third).resumed // EVERY + 1) * EVERY)
    job.wait_standing()
    assert not list((root_of_user() / job.job).glob("*/run-0001/step-*"))
    end(job, undisturbed)
    job.assert_lost({})


# ---- damage ---------------------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    """Turns a bit in the middle of a file."""
    with path.open("r+b") as file:
        middle = path.stat().st_size // 2
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 1]))


def assert_said_once(job: Cluster, pattern: str) -> None:
    """Each console has one such line."""
    for node in job.alive():
        job.wait_line(pattern, node)
        assert len([line for line in node.said() if re.search(pattern, line)]) == 1


@pytest.mark.full
def test_a_flipped_bit_of_the_last_copy(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """It is found, said, and the disk's commit is used."""
    job, first = together(jobs, "a", "b", training=BESIDE_DISK)
    step = wait_held(job, job.alive())[0]
    job.wait_for(lambda: ON_DISK in {one.step for one in job.sealed()}, "the save on the disk")
    flip(step / "model.pt")
    job.kill_node(job.node("b"))
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed == ON_DISK
    assert_said_once(job, rf"step-{HELD}\S* was in memory only, .* no other copy .*: going back to step-{ON_DISK}")
    end(job, undisturbed)


@pytest.mark.full
def test_a_flipped_bit_of_one_copy(jobs: Clusters, undisturbed: Undisturbed) -> None:
    """It is found, and the other node's copy is used."""
    job, first = together(jobs, "a", "b", training=BESIDE_DISK)
    step = wait_held(job, job.alive())[0]
    flip(step / "model.pt")
    os.kill(job.worker_pid(job.node("b")), signal.SIGKILL)
    second = job.wait_world(2, after=first)
    assert job.change(second).resumed == HELD
    assert_said_once(job, rf"cannot load step-{HELD}\S* from its memory .*: other copies of it are tried")
    end(job, undisturbed)
