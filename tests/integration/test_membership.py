"""Nodes come and go, with real agents, workers and masters: the run stays the undisturbed one.

Scenes of plain DDP, which converts nothing when the world's size changes, are the fast ones; ZeRO is where it matters.
A world is never waited for by time: runs are slow until the test is in a hurry (see `tests/support/jobs/hooked.py`).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from dalsegno.elastic.checkpoint import Manifest, verify
from dalsegno.protos import control_pb2
from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import LEFT, TRAIN, Cluster, Training, Undisturbed
from tests.support.jobs.faults import run_directory

pytestmark = [pytest.mark.timeout(400), pytest.mark.executed]

Clusters = Callable[..., Cluster]

# ZeRO's steps cost more, so there are fewer.
ZERO = Training(script=TRAIN, steps=60)
LONG = Training(steps=200)
# All nodes of the start come into the first world: it opens at once when the last of them is there.
AT_ONCE = ("--quiet-time=60",)


def together(clusters: Clusters, *names: str, **options: object) -> tuple[Cluster, int]:
    """A job whose first world has all these nodes; returns it and its epoch."""
    job = clusters(**{"nnodes": f"1:{len(names)}", "agent_flags": AT_ONCE, **options})
    return job, job.open(*names)


def end(job: Cluster, undisturbed: Undisturbed, lost: dict[int, int | range] | None = None) -> None:
    """The run goes to its end; what it cost and what it kept are judged."""
    job.finish()
    job.assert_lost(lost or {})
    job.assert_undisturbed(undisturbed)


def any_number(job: Cluster) -> range:
    """Steps that a crash may have cost: those since the last commit, in a run that saves every so many."""
    return range(job.training.save_every + 1)


# ---- planned changes ------------------------------------------------------------------------------------------------


def test_joins_lose_nothing(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """1, 2, then 4 nodes: no step is lost, every sample once, the same losses."""
    job = clusters()
    job.open("a")
    job.start("b")
    second = job.wait_world(2, steps=3)
    job.start("c", "d")
    job.wait_world(4, steps=3, after=second)
    end(job, undisturbed)
    assert job.change(second).cause == "b joined"


def test_a_leave_loses_nothing(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """SIGTERM, 4 to 3: saved first, exit code 75; three ranks share 16 samples, which 3 does not divide."""
    job, first = together(clusters, "a", "b", "c", "d")
    leaver = job.node("b")
    job.leave(leaver)
    job.wait_exit(leaver)
    second = job.wait_world(3, steps=3, after=first)
    end(job, undisturbed)
    assert leaver.process.returncode == LEFT
    assert leaver.said()[-1] == "left on notice; everything is saved"
    assert job.change(second).cause == "b left"
    shares = {len(line.sample_ids) for line in job.lines if line.epoch == second}
    assert shares == {5, 6}


@pytest.mark.full
def test_scripts_with_habits_lose_nothing(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """A thread of theirs holds no world up, and their address of the store is none."""
    job = clusters(agent_environment={"DALSEGNO_TEST_HABITS": "1"})
    job.open("a")
    job.start("b")
    second = job.wait_world(2, steps=3)
    job.leave(job.node("b"))
    job.wait_world(1, steps=3, after=second)
    end(job, undisturbed)
    printed = "".join(node.text() for node in job.nodes)
    assert printed.count("the script has set MASTER_ADDR and MASTER_PORT to 127.0.0.1:9, where nobody listens") == 3
    assert printed.count("the script's thread beat goes on 5 s after the script's end") == 3


@pytest.mark.full
@pytest.mark.usefixtures("hang_ups")
def test_a_scale_down_loses_nothing(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """`dalsegno scale`: saved first, the node that is left out stands by, and comes back when it may."""
    job, first = together(clusters, "a", "b")
    assert "2 save" in scaled(job, 1).stdout
    second = job.wait_world(1, steps=3, after=first)
    refused = scaled(job, 5)
    assert (refused.returncode, "allows 1 to 2" in refused.stderr) == (1, True)
    assert scaled(job, 2).returncode == 0
    job.wait_world(2, steps=3, after=second)
    end(job, undisturbed)


def scaled(job: Cluster, nodes: int) -> subprocess.CompletedProcess[str]:
    """What a person types in another terminal."""
    command = [sys.executable, "-m", "dalsegno.agent.commands.dalsegno", "scale", str(nodes), f"--job-id={job.job}"]
    command.append(f"--checkpoint-dir={job.checkpoints}")
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.usefixtures("hang_ups")
def test_all_nodes_leave_at_once(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """The run is saved where it stood, whichever notice came; the same command later goes on at that step."""
    job, _ = together(clusters, "a", "b", "c")
    for node, notice in zip(job.alive(), (signal.SIGTERM, signal.SIGINT, signal.SIGHUP), strict=True):
        node.expected = LEFT
        node.process.send_signal(notice)
    job.wait_exit()
    stopped = max(line.step for line in job.poll())
    assert job.sealed()[-1].step == stopped
    again = job.open("a", "b", "c")
    assert job.change(again).resumed == stopped
    end(job, undisturbed)


# ---- crashes --------------------------------------------------------------------------------------------------------


def test_a_killed_node(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """SIGKILL of agent and workers, 3 to 2: the steps since the last commit are lost, no others."""
    job, first = together(clusters, "a", "b", "c")
    job.wait_step(14)
    job.kill_node(job.member(1))
    second = job.wait_world(2, steps=3, after=first)
    assert job.assert_crash(second).resumed >= 10
    end(job, undisturbed, {second: any_number(job)})


@pytest.mark.parametrize("with_master", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_killed_node_zero(clusters: Clusters, undisturbed: Undisturbed, with_master: bool) -> None:
    """The node of group rank 0, which serves the epoch's store: like any other. The master may die with it."""
    job, first = together(clusters, "a", "b", "c")
    job.wait_step(14)
    if with_master:
        master = job.master_pid()
        assert master is not None
        os.kill(master, signal.SIGKILL)
    victim = job.member(0) if not with_master else job.node("a")
    job.kill_node(victim)
    second = job.wait_world(2, steps=3, after=first)
    assert job.assert_crash(second).resumed >= 10
    assert victim.name not in job.group_ranks()
    end(job, undisturbed, {second: any_number(job)})


def test_a_worker_crashes(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """SIGKILL of one worker: the same nodes go on, in the same order."""
    job, first = together(clusters, "a", "b")
    ranks = job.group_ranks()
    job.wait_step(14)
    os.kill(job.worker_pid(job.node("b")), signal.SIGKILL)
    second = job.wait_world(2, steps=3, after=first)
    assert job.group_ranks() == ranks
    assert job.assert_crash(second).cause == "a worker failed on b"
    job.wait_line("b: local rank 0 was killed by signal 9")
    end(job, undisturbed, {second: any_number(job)})


@pytest.mark.full
def test_an_agent_is_killed_alone(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Its workers, their DataLoader workers and their children are gone within 2 s; the rest goes on."""
    job = clusters(nnodes="1:2", agent_flags=AT_ONCE)
    job.start("a")
    job.start("b", environment={"DALSEGNO_TEST_CHILDREN": "1"})
    first = job.wait_world(2, steps=3)
    job.wait_step(14)
    victim = job.node("b")
    worker = job.worker_pid(victim)
    followers = job.kill_agent(victim)
    gone = processes.seconds_until(lambda: not any(processes.is_alive(pid) for pid in followers), 20.0)
    assert worker in followers
    # The worker, two DataLoader workers, a grandchild in a session of its own and that one's child.
    assert len(followers) >= 5
    assert gone < 2.0
    second = job.wait_world(1, steps=3, after=first)
    job.assert_crash(second)
    end(job, undisturbed, {second: any_number(job)})


# ---- newcomers that die ---------------------------------------------------------------------------------------------


@pytest.mark.full
def test_newcomers_that_die_before_their_first_step(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Over and over, before and after their world opened: nobody loses a step by it, and nobody is held."""
    job = clusters(training=LONG)
    job.open("a", "b")
    for attempt in range(4):
        epoch = job.epoch()
        (newcomer,) = job.start("n", hold="start")
        if attempt == 0:
            job.wait_status(lambda reply: any(node.node == "n" for node in reply.nodes), "n registered")
        else:
            job.wait_hold("start", newcomer)
        job.kill_node(newcomer)
        job.wait_world(2, steps=2, after=epoch if attempt else 0)
    end(job, undisturbed)
    assert not any("a spare for" in line for line in job.node("a").said())


def flap(job: Cluster) -> int:
    """`flapper` joins, makes steps and dies; returns the epoch of those who go on."""
    (flapper,) = job.start("flapper")
    with_it = job.wait_world(2, steps=2, after=job.epoch())
    job.kill_node(flapper)
    alone = job.wait_world(1, steps=2, after=with_it)
    job.assert_crash(alone)
    return alone


@pytest.mark.full
def test_a_node_that_dies_again_and_again_is_held(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Each death costs the steps since the last commit; after three of them the node is a spare for a while."""
    job = clusters(training=LONG)
    job.open("a")
    deaths = [flap(job) for _ in range(3)]
    job.wait_line("^warning: flapper was lost 3 times in 600 s: a spare for 30 s$", job.node("a"))
    (spare,) = job.start("flapper")
    job.wait_line(r"flapper was lost too often lately: it is a spare for \d+ s", spare)
    before = max(line.step for line in job.poll())
    job.wait_step(before + 3)
    assert job.epoch() == deaths[-1]
    end(job, undisturbed, dict.fromkeys(deaths, any_number(job)))


@pytest.mark.full
def test_a_held_node_comes_back_and_is_held_twice_as_long(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """The time as a spare ends by itself, and doubles with the next death."""
    job = clusters(training=LONG)
    job.open("a")
    deaths = [flap(job) for _ in range(4)]
    job.wait_line("^warning: flapper was lost 4 times in 600 s: a spare for 60 s$", job.node("a"))
    end(job, undisturbed, dict.fromkeys(deaths, any_number(job)))


# ---- waiting, and the end -------------------------------------------------------------------------------------------


@pytest.mark.full
def test_fewer_than_the_minimum_wait(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """At the start, after a leave and after a kill: it says what is missing, and goes on when a node comes."""
    job = clusters(nnodes="2:3")
    missing = "waiting for nodes: 1 here, at least 2 needed"

    def waits(times: int) -> None:
        job.wait_status(lambda reply: reply.phase == control_pb2.PHASE_WAITING and reply.reason == missing, missing)
        job.wait_for(lambda: job.node("a").said().count(missing) == times, f"{missing!r}, {times} times")

    job.start("a")
    waits(1)
    job.start("b")
    first = job.wait_world(2, steps=3)
    job.leave(job.node("b"))
    waits(2)
    job.start("c")
    second = job.wait_world(2, steps=3, after=first)
    job.kill_node(job.node("c"))
    waits(3)
    job.start("d")
    third = job.wait_world(2, steps=3, after=second)
    job.assert_crash(third)
    end(job, undisturbed, {third: any_number(job)})


@pytest.mark.parametrize("victim", ["unfinished", pytest.param("finished", marks=pytest.mark.full)])
def test_a_node_dies_before_the_end_is_agreed(clusters: Clusters, undisturbed: Undisturbed, victim: str) -> None:
    """One node's ranks have finished, the other's are about to: whoever dies now, the run is a success."""
    job = clusters(nnodes="2:2")
    job.start("a")
    job.start("b", hold="end")
    job.hurry()
    job.wait_hold("end", job.node("b"))
    job.wait_status(lambda reply: reply.step == job.training.steps and reply.head.step == reply.step, "the last commit")
    job.kill_node(job.node("b" if victim == "unfinished" else "a"))
    job.release()
    end(job, undisturbed)
    survivor = job.node("a" if victim == "unfinished" else "b")
    assert survivor.said()[-1] == f"the run finished at step {job.training.steps}"
    assert (job.checkpoints / job.job / "run-0001" / "FINISHED.json").is_file()


# ---- ZeRO -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_mixed_scene(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """ZeRO-1 with 1, 2, 4, 3 (node 0 killed), 2 (one leaves) nodes, and a worker's crash in the end."""
    job = clusters(training=ZERO)
    job.open("a", steps=2)
    job.start("b")
    second = job.wait_world(2, steps=2)
    job.start("c", "d")
    fourth = job.wait_world(4, steps=2, after=second)
    job.kill_node(job.member(0))
    third = job.wait_world(3, steps=2, after=fourth)
    job.assert_crash(third)
    job.leave(job.member(1))
    fifth = job.wait_world(2, steps=2, after=third)
    os.kill(job.worker_pid(job.member(1)), signal.SIGKILL)
    sixth = job.wait_world(2, steps=2, after=fifth)
    job.assert_crash(sixth)
    end(job, undisturbed, {third: any_number(job), sixth: any_number(job)})
    assert job.change(fifth).universal
    assert job.change(fourth).universal


@pytest.mark.full
def test_nodes_with_different_numbers_of_workers(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """ZeRO-1 with two ranks on one node and one on the other: a join, a crash of a rank, a leave."""
    job = clusters(training=ZERO)
    job.start("a", environment={"PET_NPROC_PER_NODE": "2"})
    first = job.wait_world(2, steps=2)
    job.start("b", environment={"PET_NPROC_PER_NODE": "1"})
    second = job.wait_world(3, steps=2, after=first)
    os.kill(job.worker_pid(job.node("b")), signal.SIGKILL)
    third = job.wait_world(3, steps=2, after=second)
    job.assert_crash(third)
    job.leave(job.node("b"))
    job.wait_exit(job.node("b"))
    job.wait_world(2, steps=2, after=third)
    end(job, undisturbed, lost={third: any_number(job)})


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "universal"),
    [(0, "gate"), (2, "gate"), (3, "gate"), (2, "beside"), (3, "beside"), (1, ""), (2, ""), (3, "")],
)
def test_other_stages(clusters: Clusters, undisturbed: Undisturbed, stage: int, universal: str) -> None:
    """ZeRO 0, 2 and 3 through a join, a leave and a kill; 1 to 3 also without a conversion, or with one beside it."""
    training = Training(script=TRAIN, steps=60, extra=(f"--zero-stage={stage}",))
    job = clusters(training=training, universal=universal)
    first = job.open("a", "b", steps=2)
    job.start("c")
    second = job.wait_world(3, steps=2, after=first)
    job.leave(job.node("a"))
    third = job.wait_world(2, steps=2, after=second)
    job.wait_exit(job.node("a"))
    job.kill_node(job.member(0))
    fourth = job.wait_world(1, steps=2, after=third)
    job.assert_crash(fourth)
    end(job, undisturbed, {fourth: any_number(job)})
    how = "" if stage == 0 else "universal" if universal == "gate" else "re-sharded"
    assert [job.change(epoch).how for epoch in (second, third, fourth)] == [how] * 3
    assert bool([*run_directory(job).glob("step-*.universal.*")]) == bool(stage and universal)


@pytest.mark.full
@pytest.mark.parametrize("universal", ["", "beside"])
def test_shards_that_cannot_be_loaded_are_converted(
    clusters: Clusters, undisturbed: Undisturbed, universal: str
) -> None:
    """The script says that it can re-shard, and then its DeepSpeed cannot: one restart more, and nothing is lost."""
    job = clusters(training=ZERO, universal=universal, agent_flags=["--max-restarts=0"])
    job.agent_environment = {"DALSEGNO_TEST_STRANGE": "1"}
    first = job.open("a", steps=2)
    job.start("b")
    last = job.wait_world(2, steps=2, after=first)
    assert last == first + 2
    assert job.change(last).how == "universal"
    job.wait_line("the workers failed before their first step .*: it is converted instead")
    end(job, undisturbed)


def of_step(job: Cluster, step: int) -> list[Manifest]:
    return [manifest for manifest in job.sealed() if manifest.step == step]


@pytest.mark.full
def test_the_same_step_is_saved_again_by_another_world(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """A node dies when all parts of step 20 are written but not sealed: the world of two that saves step 20 again,
    and the world of one that goes on from there, have nothing of the world of three's."""
    job = clusters(
        training=Training(script=TRAIN, steps=40), nnodes="1:3", agent_flags=(*AT_ONCE, "--keep-checkpoints=0")
    )
    job.start("a", "b")
    job.start("c", hold="saved-20")
    job.wait_hold("saved-20", job.node("c"))
    run = job.checkpoints / job.job / "run-0001"
    (left,) = run.glob("step-20.e1.*")
    assert list(left.rglob("*.pt"))
    job.kill_node(job.node("c"))
    second = job.wait_world(2, after=1)
    assert job.assert_crash(second).resumed == 10
    job.wait_for(lambda: of_step(job, 20), "step 20 saved again")
    (again,) = of_step(job, 20)
    assert (again.epoch, again.shape.world_size) == (second, 2)
    assert again.name != left.name
    verify(run / again.name, again, 1)
    job.kill_node(job.member(1))
    third = job.wait_world(1, after=second)
    assert job.assert_crash(third).resumed >= 20
    end(job, undisturbed, {second: any_number(job), third: any_number(job)})
    assert not any(manifest.epoch == 1 and manifest.step > 10 for manifest in job.sealed())
