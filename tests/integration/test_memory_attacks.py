"""Memory checkpoints whatever happens: at random moments of a save, of every step, and with unusual scripts."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.memory.place import remove_leftovers, root_of_user
from dalsegno.elastic.checkpoint import CheckpointDamaged, Manifest, verify_files
from tests.support.jobs import local_processes as processes
from tests.support.jobs.attacks import Attacks
from tests.support.jobs.cluster import Cluster, Node, Undisturbed
from tests.support.jobs.odd import OddTraining
from tests.support.jobs.small_memory import SmallMemoryJob, small_memories

pytestmark = [pytest.mark.timeout(600), pytest.mark.full]

Clusters = Callable[..., Cluster]

STEPS, ATTACKS = 120, 10


@pytest.fixture
def jobs(clusters: Clusters) -> Iterator[Clusters]:
    """Makes jobs with memory checkpoints in every step, and rarely one on the disk."""
    made: list[Cluster] = []

    def make(training: OddTraining, *flags: str, memory_every: int = 1, **options: Any) -> Cluster:
        given = {
            "training": training,
            "nnodes": "1:4",
            "step_time": 0.1,
            "universal": False,
            "script_flags": (f"--memory-every={memory_every}",),
            "agent_flags": ("--memory-replicas=1", "--max-restarts=1000", *flags),
        }
        made.append(clusters(**{**given, **options}))
        return made[-1]

    yield make
    for job in made:
        job.close()
        remove_leftovers(root_of_user())


@pytest.mark.parametrize("seed", range(8))
def test_anything_at_any_moment(jobs: Clusters, undisturbed: Undisturbed, seed: int) -> None:
    """Nodes, agents, ranks, keepers and masters are killed or stopped while parts are copied, summed, sent and told.

    In the second half of the cells processes stay through planned changes.
    """
    odd = ("average", "average,stay")[seed // 4]
    training = OddTraining(odd=odd, width=2000, steps=STEPS, save_every=50, whole=3)
    job = jobs(training, f"--memory-replicas={1 + seed % 2}", f"--memory-bandwidth={(100, 20)[seed // 2 % 2]}MB")
    attacks = Attacks(job, seed, size=3)
    attacks.begin()
    last = (max(line.step for line in job.poll()) + STEPS) // 2
    ways = [attacks.worker, attacks.agent, attacks.node, attacks.leave, attacks.keeper, attacks.master, attacks.stop]
    ways += [attacks.killed_while_stopped, attacks.agent_stopped, attacks.pair]
    try:
        while len(attacks.said) < ATTACKS and max(line.step for line in job.poll()) < last:
            attacks.one(ways)
    finally:
        print("\n".join(attacks.said))
    assert len(attacks.said) >= ATTACKS // 2
    job.finish()
    job.assert_undisturbed(undisturbed)


# ---- memory that others fill ----------------------------------------------------------------------------------------


def memories_of(node: Node, job: Cluster) -> list[Path]:
    """The directory of a node's agent in memory, once there is one."""
    below = root_of_user() / job.job
    return [path for path in processes.open_files(node.pid) if path.parent == below]


def memory_of(node: Node, job: Cluster) -> Path:
    """That of its run."""
    return memories_of(node, job)[0] / "run-0001"


def held(job: Cluster, copies: int = 1) -> int:
    """The step that is held in memory alone, each part on so many nodes; 0: none."""
    status = job.status()
    return status.held.step if status is not None and status.held_copies >= copies else 0


def lines(job: Cluster, pattern: str) -> list[str]:
    """What agents and ranks have said of it."""
    return [line for node in job.nodes for line in node.text().splitlines() if re.search(pattern, line)]


@contextlib.contextmanager
def small_job(directory: Path, training: OddTraining, every: int) -> Iterator[SmallMemoryJob]:
    """A world of two nodes with 100 MiB of shared memory each."""
    with (
        small_memories(100 << 20, "a", "b") as memories,
        SmallMemoryJob(
            directory,
            training,
            "1:2",
            step_time=0.05,
            agent_flags=("--memory-replicas=1", "--quiet-time=60"),
            universal=False,
            script_flags=(f"--memory-every={every}",),
            memories=memories,
        ) as job,
    ):
        job.start("a", "b")
        job.wait_world(2)
        yield job


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_others_fill(tmp_path: Path, undisturbed: Undisturbed, rank: int) -> None:
    """Of the node that writes, or of its buddy: training and saves to the disk go on, memory ones once there is room.

    It is said once. A crash meanwhile goes back to something whole.
    """
    training = OddTraining(odd="average", width=2500, steps=130, save_every=20)
    with small_job(tmp_path / "job", training, 2) as job:
        job.wait_for(lambda: held(job) >= 4, "a step in memory")
        full = job.member(rank).name
        job.memories[full].fill()
        step = max(line.step for line in job.poll())
        job.wait_step(step + 45)
        assert step + 10 <= max(one.step for one in job.sealed()), "no save came to the disk"
        assert 1 <= len(lines(job, "in memory failed, commits stand")) <= 2
        job.memories[full].empty()
        # It is tried again ever more rarely: behind 64 times as many steps at last.
        job.wait_for(lambda: held(job) > step, "a step in memory again")
        job.memories[full].fill()
        job.wait_step(held(job) + 5)
        job.kill_node(job.node(full))
        second = job.wait_world(1, after=1)
        assert job.change(second).resumed > step
        job.memories[full].empty()
        job.finish()
        job.assert_undisturbed(undisturbed)
    assert 2 <= len(lines(job, "in memory failed")) <= 5
    assert lines(job, "was saved in memory again")


def verify_part(note: Path) -> None:
    """All files of a part that is said to be there are whole."""
    step = note.parent.with_name(note.parent.name.removesuffix(".parts"))
    own = set(json.loads(note.read_text())["files"])
    verify_files(step, [entry for entry in Manifest.read(step).files if entry.path in own])


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_that_is_full_in_the_middle_of_a_file(tmp_path: Path, undisturbed: Undisturbed, rank: int) -> None:
    """Of the node that writes the first part, or of the one that receives it: nothing of it is left, or counts."""
    training = OddTraining(odd="average", width=2500, steps=80, save_every=1000)
    with small_job(tmp_path / "job", training, 4) as job:
        full = job.member(rank).name
        job.memories[full].fill(but=6 << 20)
        said = "in memory failed" if rank == 0 else r"does not hold part 0 of step-\S+: there is no room"
        job.wait_for(lambda: lines(job, said), "a line about it", 60.0)
        # What is there of steps that count was checked when it came, or is the ranks' own.
        for part in job.memories[full].root.glob(f"{root_of_user().name}/*/*/run-0001/step-*.parts/0.json"):
            try:
                verify_part(part)
            except (CheckpointDamaged, FileNotFoundError):
                assert not part.exists(), "a newer one has not taken its place"
        job.memories[full].empty()
        job.wait_for(lambda: held(job, copies=2), "a step in the memory of both")
        job.kill_node(job.node(full))
        second = job.wait_world(1, after=1)
        assert job.change(second).resumed > 0
        job.finish()
        job.assert_undisturbed(undisturbed)


# ---- on the way between nodes ---------------------------------------------------------------------------------------


def arriving(job: Cluster, node: Node) -> bool:
    """Whether a part is coming into a node's memory just now."""
    return any(memory_of(node, job).glob("*.parts/.in-*"))


def wait_arriving(job: Cluster, node: Node) -> None:
    """Until one is. It is looked for without a pause: a part may come in tens of milliseconds."""
    deadline = time.monotonic() + 60.0
    while not arriving(job, node):
        assert time.monotonic() < deadline, f"no part comes to {node.name}\n{job.diagnosis()}"


@pytest.mark.parametrize("way", ["killed", "stopped", "stopped, killed"])
@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
def test_a_buddy_that_receives_a_part(jobs: Clusters, undisturbed: Undisturbed, names: str, way: str) -> None:
    """What has come of it is never taken for a part; the sender trains on with whoever is left."""
    replicas = 1 if names == "ab" else 2
    training = OddTraining(odd="average", width=4000, steps=60, save_every=1000)
    job = jobs(training, f"--memory-replicas={replicas}", "--memory-bandwidth=8MB", memory_every=3)
    job.start(*names)
    first = job.wait_world(len(names))
    sender = job.member(0)
    buddy = job.member(1)
    wait_arriving(job, buddy)
    if way != "killed":
        os.kill(buddy.pid, signal.SIGSTOP)
        assert arriving(job, buddy)
        job.wait_step(job.wait_step(1) and max(line.step for line in job.poll()) + 3)
    if way == "stopped":
        os.kill(buddy.pid, signal.SIGCONT)
        job.wait_for(lambda: held(job), "a step that is held")
        job.finish()
        job.assert_lost({})
    else:
        job.kill_node(buddy)
        second = job.wait_world(len(names) - 1, after=first)
        assert job.change(second).resumed > 0
        assert sender.alive
        job.finish()
        assert all(lost <= 7 for lost in [change.lost for change in job.changes().values()])
    job.assert_undisturbed(undisturbed)


@pytest.mark.parametrize("way", ["killed", "stopped"])
@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_holder_that_serves_a_newcomer(jobs: Clusters, undisturbed: Undisturbed, names: str, way: str) -> None:
    """Somebody else's copy is used, or that of the disk; nothing half is loaded."""
    training = OddTraining(odd="average", width=12_000, steps=30, save_every=5)
    job = jobs(training, memory_every=3)
    job.start(*names)
    first = job.wait_world(len(names), 6)
    holder = job.member(0)
    job.wait_for(lambda: {one.step for one in job.sealed()}, "a save on the disk")
    job.start("new")
    newcomer = job.node("new")
    job.wait_for(lambda: memories_of(newcomer, job), "the newcomer's memory")
    wait_arriving(job, newcomer)
    os.kill(holder.pid, signal.SIGSTOP)
    caught = arriving(job, newcomer)
    if way == "killed":
        job.kill_node(holder)
    else:
        time.sleep(2.0)
        os.kill(holder.pid, signal.SIGCONT)
    job.wait_world(len(names) + (way == "stopped"), after=first)
    job.finish()
    job.assert_undisturbed(undisturbed)
    assert caught, "the part had come before its sender stood still"


# ---- scripts --------------------------------------------------------------------------------------------------------

ODD = ["average", "norm", "dtypes", "short", "thaws", "adds", "late", "loaders", "small", "compiled", "auto", "stay"]


@pytest.mark.parametrize("odd", ODD)
def test_unusual_scripts(jobs: Clusters, undisturbed: Undisturbed, odd: str) -> None:
    """A crash, a killed node, a join and a leave: the same losses as without, and every sample once."""
    training = OddTraining(odd=f"average,{odd}", steps=60)
    job = jobs(training, "--quiet-time=60", memory_every=2, nnodes="1:2")
    first = job.open("a", "b")
    job.wait_step(14)
    os.kill(job.worker_pid(job.node("b")), signal.SIGKILL)
    second = job.wait_world(2, 4, after=first)
    if odd != "auto":
        assert job.change(second).lost <= 4
        assert job.change(second).resumed >= 10
    job.kill_node(job.node("a"))
    third = job.wait_world(1, 4, after=second)
    assert job.change(third).resumed >= job.change(second).resumed + (odd != "auto")
    job.start("c")
    fourth = job.wait_world(2, 4, after=third)
    job.leave(job.node("b"))
    fifth = job.wait_world(1, 1, after=fourth)
    job.finish()
    job.assert_undisturbed(undisturbed)
    assert [job.change(epoch).lost for epoch in (fourth, fifth)] == [0, 0]


@pytest.mark.parametrize("every", ["1", "auto"])
@pytest.mark.parametrize("odd", ["raises", "hangs"])
def test_a_rank_that_fails_alone(jobs: Clusters, undisturbed: Undisturbed, odd: str, every: str) -> None:
    """By an error of its own, or without a word: the next world goes on from memory."""
    training = OddTraining(odd=f"average,{odd}" + (",auto" if every == "auto" else ""), steps=60)
    # Longer than a start takes on a busy machine, and than the longest step towards the end.
    job = jobs(training, "--quiet-time=60", "--stall-timeout=15", nnodes="1:2")
    first = job.open("a", "b")
    second = job.wait_world(2, 4, after=first)
    if odd == "raises":
        job.wait_line("rank 1 has had enough")
    assert 1 <= job.change(second).resumed <= 14
    if every == "1":
        assert job.change(second).resumed >= 12
    job.finish()
    job.assert_undisturbed(undisturbed)


@pytest.mark.parametrize("kill", ["", "b"])
def test_a_long_evaluation(jobs: Clusters, undisturbed: Undisturbed, kill: str) -> None:
    """A minute without a step is no stall; a node that is killed in it costs what memory is behind."""
    training = OddTraining(odd="average,evaluates", steps=40)
    options = {"agent_environment": {"DALSEGNO_TEST_LONG": "65"}, "nnodes": "1:2"}
    job = jobs(training, "--quiet-time=60", memory_every=2, **options)
    first = job.open("a", "b")
    for rank in range(2):
        job.wait_for((job.holds / f"evaluates-{first}-{rank}").exists, f"the evaluation of rank {rank}")
    if kill:
        job.kill_node(job.node(kill))
        second = job.wait_world(1, after=first, seconds=200.0)
        assert 16 <= job.change(second).resumed <= 20
    job.wait_step(21, seconds=200.0)
    job.finish()
    job.assert_undisturbed(undisturbed)
    assert (job.epoch() == first) is not bool(kill)
