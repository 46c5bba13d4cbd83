"""Converters that die or fail, damaged checkpoints, frozen nodes, full disks, blind nodes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint import Manifest
from dalsegno.protos import control_pb2
from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import TRAIN, Cluster, Node, Training, Undisturbed
from tests.support.jobs.faults import (
    DAMAGES,
    UNLIMITED,
    Service,
    freeze,
    held_conversions,
    limit_files,
    limited_files,
    run_directory,
    thaw,
    volume,
    wait_held_converter,
)

pytestmark = pytest.mark.timeout(300)

Clusters = Callable[..., Cluster]
# ZeRO-1: its states belong to ranks, so every change of the world's size needs the universal form.
ZERO = Training(script=TRAIN, steps=40, save_every=10)
SMALL = Training(steps=40, save_every=5)
# Bytes: less than the largest file of a checkpoint, more than logs grow to.
TOO_SMALL = 200_000


# ---- whoever converts dies ------------------------------------------------------------------------------------------


@pytest.mark.full
def test_agent_killed_while_it_converts(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Another node finishes the conversion; the two that are left go on from the step of the drain."""
    job = clusters(training=ZERO)
    (a,) = job.start("a", environment=held_conversions())
    job.wait_world(1, steps=3)
    job.start("b", "c")
    wait_held_converter(job)
    job.wait_status(lambda status: len(status.nodes) == 3, "both newcomers")
    job.kill_agent(a)
    job.wait_line("a can no longer convert: another node takes over")
    epoch = job.wait_world(2)
    assert job.change(epoch).universal
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


def test_converter_killed(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Its agent lives and says what happened; one more agent tries, and both are in the world."""
    job = clusters(training=ZERO)
    job.start("a", environment=held_conversions())
    job.wait_world(1, steps=3)
    job.start("b")
    processes.send([wait_held_converter(job)])
    job.wait_line("converting on a failed: .*killed by signal 9")
    epoch = job.wait_world(2)
    assert job.change(epoch).universal
    assert taken_over(job)
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


def taken_over(job: Cluster) -> list[Path]:
    """Files of universal checkpoints that have the same inode in the directories of two leases."""
    files = [path for path in run_directory(job).glob("step-*.universal.*/zero/**/*.pt") if path.is_file()]
    return [path for path in files if path.stat().st_nlink > 1]


# ---- nobody can convert ---------------------------------------------------------------------------------------------


@pytest.mark.full
def test_no_room_to_convert_after_a_join(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """The old shape goes on from the same checkpoint and loses nothing; the newcomer is a spare."""
    job = clusters(training=ZERO)
    (a,) = job.start("a")
    job.wait_world(1, steps=3)
    limit_files(not_training(job, a), TOO_SMALL)
    job.start("b", environment=limited_files(TOO_SMALL))
    job.wait_line("nobody could convert .* going on in its old shape")
    lift_limits(job)
    epoch = job.wait_world(1, after=1)
    # A worker that was started while the limits were being lifted may have inherited one.
    lift_limits(job)
    assert not job.change(epoch).universal
    job.finish()
    assert any("File too large" in line for line in a.said())
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


@pytest.mark.parametrize("cure", ["room", "node"])
@pytest.mark.full
def test_no_room_to_convert_after_a_loss(clusters: Clusters, undisturbed: Undisturbed, cure: str) -> None:
    """The run waits, says why, and goes on when there is room or a node comes."""
    job = clusters(training=ZERO)
    a, b = job.start("a", "b")
    epoch = job.wait_world(2)
    step = committed(job, epoch)
    limit_files(not_training(job, a), TOO_SMALL)
    job.kill_node(b)
    job.wait_line(r"nobody can convert .*File too large.*trying again", a)
    status = job.wait_status(lambda status: status.phase == control_pb2.PHASE_WAITING, "waiting")
    assert "File too large" in status.reason
    if cure == "room":
        lift_limits(job)
        epoch = job.wait_world(1, after=epoch)
    else:
        job.start("c")
        epoch = job.wait_world(2, after=epoch)
    lift_limits(job)
    change = job.change(epoch)
    assert (change.universal, change.resumed >= step) == (cure == "room", True)
    job.finish()
    job.assert_lost({epoch: range(1, 30)})
    job.assert_undisturbed(undisturbed)


def not_training(job: Cluster, node: Node) -> list[int]:
    """The agent and what it starts converters from, but not the worker, which has to save."""
    worker = job.worker_pid(node)
    return [pid for pid in job.processes(node) if pid != worker]


def lift_limits(job: Cluster) -> None:
    (job.holds / "release").touch()
    limit_files([pid for node in job.alive() for pid in job.processes(node)], UNLIMITED)


def committed(job: Cluster, epoch: int, step: int = 1) -> int:
    """Waits for a commit of this epoch at this step or later, and for a step beyond it; returns the commit's."""
    status = job.wait_status(
        lambda status: status.head.epoch >= epoch and status.head.step >= step, f"a commit of epoch {epoch}"
    )
    found = int(status.head.step)
    job.wait_step(found + 1)
    return found


# ---- the newest checkpoint is damaged -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        "flipped byte",
        pytest.param("extra file", marks=pytest.mark.full),
        pytest.param("truncated file", marks=pytest.mark.full),
        pytest.param("missing file", marks=pytest.mark.full),
    ],
)
def test_damaged_checkpoint(clusters: Clusters, undisturbed: Undisturbed, damage: str) -> None:
    """After a power cut: the one before is used, loudly."""
    job = clusters(training=SMALL)
    (a,) = job.start("a")
    committed(job, 1, step=10)
    job.kill_node(a)
    newest, before = sealed(job)[-1], sealed(job)[-2]
    DAMAGES[damage](newest)
    (again,) = job.start("a")
    epoch = job.wait_world(1, after=1)
    job.wait_line(rf"warning: {newest.name} is damaged \(.*\): going back to {before.name}", again)
    assert job.change(epoch).resumed == step_of(before)
    job.finish()
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
def test_damaged_universal_form(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Only the later form is bad: it is dropped and made anew, and the run goes on from the same step."""
    training = Training(script=TRAIN, steps=40, save_every=0)
    job = clusters(training=training, nnodes="1:2", agent_flags=["--quiet-time=20"])
    job.start("a")
    epoch = job.wait_world(1, steps=3)
    job.start("b")
    epoch = job.wait_world(2, after=epoch)
    drained = job.change(epoch).resumed
    for node in job.alive():
        job.kill_node(node)
    (form,) = run_directory(job).glob("step-*.universal.*")
    DAMAGES["flipped byte"](form)
    job.start("a", "b")
    job.wait_line(f"warning: {form.name} is damaged .*: it is made anew")
    epoch = job.wait_world(2, after=epoch)
    assert (job.change(epoch).resumed, job.change(epoch).universal) == (drained, True)
    job.finish()
    job.assert_undisturbed(undisturbed)


def sealed(job: Cluster) -> list[Path]:
    """Sealed sharded checkpoints, oldest first."""
    found = [path.parent for path in run_directory(job).glob("step-*/MANIFEST.json")]
    return sorted((path for path in found if "universal" not in path.name), key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.split(".")[0].removeprefix("step-"))


# ---- a node that was declared dead comes back -----------------------------------------------------------------------


@pytest.mark.parametrize("with_master", [pytest.param(True, id="with-master"), pytest.param(False, id="alone")])
@pytest.mark.full
def test_frozen_node(clusters: Clusters, undisturbed: Undisturbed, with_master: bool) -> None:
    """SIGSTOP until it counts as dead, then SIGCONT: it is told so, nothing of it counts, and it joins as a new one."""
    job = clusters(training=Training(steps=80), agent_flags=["--node-timeout=5"])
    a, _ = job.start("a", "b")
    epoch = job.wait_world(2)
    committed(job, epoch)
    frozen = freeze(job, a)
    if with_master:
        master = job.master_pid()
        assert master is not None
        os.kill(master, signal.SIGSTOP)
    epoch = job.wait_world(1, steps=3, after=epoch)
    thaw(frozen)
    job.wait_line("this node was declared dead .* joins again as a new one", a)
    job.wait_world(2, steps=3, after=epoch)
    assert set(job.group_ranks()) == {"a", "b"}
    job.finish()
    job.assert_lost({epoch: range(0, 30)})
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
def test_what_a_dead_node_still_writes(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Frozen in the middle of a save and replaced, its worker seals that checkpoint and more: nobody reads them."""
    job = clusters(training=Training(steps=140), nnodes="1:1", agent_flags=["--node-timeout=5"])
    (a,) = job.start("a", hold="saved-20")
    job.wait_world(1)
    # Slower than the other one, which will be far ahead of it.
    job.step_time = 0.4
    (b,) = job.start("b")
    job.wait_line("b is a spare", b)
    job.wait_hold("saved-20", a)
    frozen = freeze(job, a)
    second = job.wait_world(1, steps=3, after=1)
    assert job.change(second).resumed == 10
    job.release()
    thaw([pid for pid in frozen if pid != a.pid])
    # A world of one has no peers whose absence would stop it: it trains on, and believes that it is the run.
    job.wait_for(lambda: [*run_directory(job).glob("step-60.e1.*/MANIFEST.json")] or None, "what the dead node seals")
    thaw([a.pid])
    job.wait_line("this node was declared dead .* joins again as a new one", a)
    committed(job, second, step=20)
    job.wait_line("a is a spare", a)
    job.kill_node(b)
    third = job.wait_world(1, after=second)
    assert 20 <= job.change(third).resumed < 60
    job.finish()
    last = max(run_directory(job).glob(f"step-*.e{third}.*/MANIFEST.json"), key=lambda path: step_of(path.parent))
    resumed_from = Manifest.read(last.parent).resumed_from
    assert resumed_from is not None
    assert f".e{second}." in resumed_from.name
    told = [line for line in a.said() + b.said() if ".e1." in line]
    assert all("no part of the run" in line for line in told), "a checkpoint of the closed epoch was recorded"
    job.assert_undisturbed(undisturbed)


# ---- no room, nothing to see ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [SMALL, pytest.param(ZERO, marks=pytest.mark.full)], ids=["ddp", "zero"])
def test_no_room_to_save(clusters: Clusters, undisturbed: Undisturbed, training: Training) -> None:
    """A save that fails costs nothing else: same workers, same epoch, the last commit stands, a line says so."""
    job = clusters(training=training, nnodes="2:2")
    a, b = job.start("a", "b")
    epoch = job.wait_world(2)
    step = committed(job, epoch)
    workers = [job.worker_pid(a), job.worker_pid(b)]
    limit_files(workers, TOO_SMALL)
    job.wait_line(r"warning: saving step-.* failed \(.*File too large.*\): the next save tries again, commits stand")
    status = job.status()
    assert status is not None
    assert step <= status.head.step < job.wait_step(step) + 100
    limit_files(workers, UNLIMITED)
    job.wait_status(lambda status: status.head.step > step, "the next commit")
    assert [job.worker_pid(a), job.worker_pid(b)] == workers
    job.finish()
    assert job.epoch() == epoch
    job.assert_undisturbed(undisturbed)


def test_full_disk(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The whole file system is full, the embedded master's own store included: the run goes on, and commits again."""
    with volume(tmp_path / "job" / "checkpoints", 64) as disk, Cluster(tmp_path / "job", SMALL) as job:
        job.start("a", "b")
        epoch = job.wait_world(2)
        step = committed(job, epoch)
        disk.fill()
        job.wait_line(r"saving step-.* failed \(.*No space left.*\): the next save tries again, commits stand")
        disk.clear()
        job.wait_status(lambda status: status.head.step > step, "the next commit")
        job.finish()
        assert job.epoch() == epoch
        job.assert_undisturbed(undisturbed)


@pytest.mark.full
def test_a_full_disk_at_the_end(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The last step waits for room, in the same world; a line says so, and one why."""
    with volume(tmp_path / "job" / "checkpoints", 64) as disk, Cluster(tmp_path / "job", SMALL) as job:
        job.start("a", "b")
        epoch = job.wait_world(2)
        committed(job, epoch)
        disk.fill()
        job.hurry()

        def printed() -> str:
            return "".join(node.text() for node in job.nodes)

        job.wait_for(lambda: "is not saved yet: it is tried again for ten minutes" in printed(), "a line of the ranks")
        time.sleep(15)  # why: several tries, of which none is said
        disk.clear()
        job.finish()
        assert job.epoch() == epoch
        assert printed().count(f"saving step-{SMALL.steps}.") == 1
        job.assert_undisturbed(undisturbed)


@pytest.mark.full
def test_node_that_does_not_see_the_checkpoints(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """It stays a spare and says so; the others are not held up."""
    with Service(tmp_path / "job", SMALL) as job:
        job.start_master()
        job.start("a")
        job.wait_world(1, steps=3)
        job.agent_flags = [f"--checkpoint-dir={tmp_path / 'elsewhere'}"]
        (blind,) = job.start("blind")
        job.wait_line(
            "blind does not see the job's checkpoint directory, or may not read what is in it: it stays a spare", blind
        )
        job.finish()
        assert job.epoch() == 1
        job.assert_undisturbed(undisturbed)
