"""Jobs under a real Slurm: the script that `dalsegno render slurm` prints, submitted with sbatch as it is printed.

The loss curve is the undisturbed run's each time, and every sample is taken once. Slurm's own times are shortened:
`cred_expire` (a requeued task waits for it: 5 seconds, not 120), and `SlurmdTimeout` (a machine is lost after 10).
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import Training, Undisturbed
from tests.support.slurm.daemons import MISSING
from tests.support.slurm.job import SlurmJob, slurm_job

pytestmark = [pytest.mark.timeout(400), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

TRAINING = Training(steps=100, save_every=5)
# None before the one that a notice or the end calls for, so that it may take its time.
SLOW_SAVE = Training(steps=100, save_every=100)
# Steps that a crash may cost.
CRASH = range(TRAINING.save_every + 1)
# Another partition's tasks push ours out. A time of grace is all that Slurm itself gives.
PREEMPTION = ("PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE")
URGENT = "PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF"


def open_world(job: SlurmJob, size: int) -> tuple[str, int]:
    """Submits the array, and waits for its world; returns the array's id, and the epoch."""
    array = job.submit()
    return array, job.wait_world(size, steps=3)


def finish(job: SlurmJob, undisturbed: Undisturbed, *crashes: int, others: tuple[str, ...] = ()) -> None:
    """The run goes to its end, and every task with it; only the epochs that came of a crash have cost steps."""
    job.wait_success(*others)
    job.assert_redone(dict.fromkeys(crashes, CRASH))
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
def test_an_array_is_one_world_and_a_cancelled_task_stays_away(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Two tasks train together; one is cancelled, leaves saved, and does not ask for another start; success.

    Its save lasts longer than the shell takes to pass the notice on, which the agent has had from Slurm already.
    """
    slow = {"training": SLOW_SAVE, "agent_environment": {"DALSEGNO_TEST_SYNC": "3"}}
    with slurm_job(tmp_path / "job", 2, nnodes="1:2", **slow) as job:
        array, epoch = open_world(job, 2)
        job.slurm.run("scancel", f"{array}_1")
        job.wait_world(1, steps=2, after=epoch)
        cancelled = job.wait_task(f"{array}_1", lambda task: task.state != "COMPLETING", "over")
        assert (cancelled.state, cancelled.code, cancelled.starts) == ("CANCELLED", "75:0", 0)
        finish(job, undisturbed, others=(f"{array}_1",))


@pytest.mark.full
def test_tasks_come_late_and_more_are_submitted(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """An array of two of which one has to wait for its machine; then the same script once more: two, three."""
    keys = {"nnodes": "1:3", "replicas": 2}
    with slurm_job(tmp_path / "job", 3, training=TRAINING, keys=keys) as job:
        for name in ("n2", "n3"):
            job.slurm.run("scontrol", "update", f"NodeName={name}", "State=DRAIN", "Reason=busy")
        first, epoch = open_world(job, 1)
        job.slurm.run("scontrol", "update", "NodeName=n2", "State=RESUME")
        epoch = job.wait_world(2, steps=3, after=epoch)
        job.slurm.run("scontrol", "update", "NodeName=n3", "State=RESUME")
        second = job.submit()
        job.wait_world(3, steps=3, after=epoch)
        # It would be the fourth of three.
        waiting = f"{second}_1"
        assert job.tasks()[waiting].state == "PENDING"
        finish(job, undisturbed)
        assert {name: task.starts for name, task in job.tasks().items()} == dict.fromkeys(
            (f"{first}_0", f"{first}_1", f"{second}_0", waiting), 0
        )


@pytest.mark.full
@pytest.mark.parametrize("way", ["requeued", "shell alone"])
def test_a_requeued_task_comes_back(tmp_path: Path, undisturbed: Undisturbed, way: str) -> None:
    """`scontrol requeue` is a notice, and so is a signal to the shell alone: it leaves saved, and joins again.

    Under `proctrack/cgroup` Slurm never signals anybody but the shell; `scancel --batch` does it under any.
    """
    with slurm_job(tmp_path / "job", 2, training=TRAINING, nnodes="1:2") as job:
        array, both = open_world(job, 2)
        tell = ("scancel", "--batch", "--signal=TERM") if way == "shell alone" else ("scontrol", "requeue")
        job.slurm.run(*tell, f"{array}_0")
        alone = job.wait_world(1, steps=2, after=both)
        job.wait_again(f"{array}_0")
        job.wait_world(2, steps=2, after=alone)
        finish(job, undisturbed)
        said = job.output(f"{array}_0")
        assert ("SIGHUP: saving" in said) == (way == "shell alone")
        assert "left on notice; everything is saved" in said


@pytest.mark.full
def test_a_task_that_cannot_save_requeues_itself(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """76: its disk takes longer than the notice; the run goes on from the last commit."""
    options: dict[str, Any] = {"training": SLOW_SAVE, "nnodes": "1"}
    options |= {"keys": {"drain_timeout": 5, "grace": 20}, "agent_environment": {"DALSEGNO_TEST_SYNC": "120"}}
    with slurm_job(tmp_path / "job", 1, **options) as job:
        array, first = open_world(job, 1)
        job.slurm.run("scancel", "--batch", "--signal=TERM", f"{array}_0")
        job.wait_again(f"{array}_0")
        said = job.output(f"{array}_0")
        assert "SIGHUP: saving" in said
        assert "everything is saved" not in said
        again = job.wait_world(1, steps=1, after=first)
        job.wait_success()
        job.assert_redone({again: range(1, 100)})
        job.assert_undisturbed(undisturbed)


@pytest.mark.full
def test_a_task_leaves_before_its_time_is_over(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The notice of `--signal`, `grace` seconds before the limit: 75, the task requeues itself, with all its time."""
    options = {"time": "2"}
    with slurm_job(tmp_path / "job", 2, training=TRAINING, nnodes="1:2", options=options) as job:
        array, epoch = open_world(job, 2)
        for name in (f"{array}_0", f"{array}_1"):
            job.wait_again(name)
        epoch = job.wait_world(2, steps=2, after=epoch)
        finish(job, undisturbed)
        assert "TIME LIMIT" not in job.output(f"{array}_0") + job.output(f"{array}_1")


@pytest.mark.full
@pytest.mark.parametrize("tells", [True, False], ids=["told at once", "told at the end"])
def test_a_preempted_task_leaves_and_comes_back(tmp_path: Path, undisturbed: Undisturbed, tells: bool) -> None:
    """With `preempt_send_user_signal` it goes at once, without it at the end of its GraceTime; no step is lost."""
    more = [*PREEMPTION, *(["SlurmctldParameters=preempt_send_user_signal"] if tells else []), URGENT]
    grace = 60 if tells else 5
    daemons = {"more": more, "partition": f"PriorityTier=1 GraceTime={grace}"}
    with slurm_job(tmp_path / "job", 2, training=TRAINING, nnodes="1:2", daemons=daemons) as job:
        array, both = open_world(job, 2)
        urgent = job.slurm.run("sbatch", "--parsable", "--partition=urgent", "--wrap=sleep 600").strip()
        alone = job.wait_world(1, steps=2, after=both)
        job.slurm.run("scancel", urgent)
        (gone,) = (name for name in (f"{array}_0", f"{array}_1") if job.tasks()[name].starts)
        assert ("DUE TO PREEMPTION" in job.output(gone)) != tells
        job.wait_again(gone)
        job.wait_world(2, steps=2, after=alone)
        finish(job, undisturbed)


@pytest.mark.full
def test_machines_go(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The first task's is set down and then loses power: its task moves on, and the master is on none of them."""
    with slurm_job(tmp_path / "job", 3, training=TRAINING, nnodes="1:2") as job:
        array, both = open_world(job, 2)
        name, crashes = f"{array}_0", []
        first = job.tasks()[name].node
        job.slurm.run("scontrol", "update", f"NodeName={first}", "State=DOWN", "Reason=test")
        alone = job.wait_world(1, steps=2, after=both)
        second = job.wait_again(name).node
        assert second != first
        both = job.wait_world(2, steps=2, after=alone)
        job.slurm.kill_node(second)
        alone = job.wait_world(1, steps=2, after=both)
        crashes.append(alone)
        job.slurm.run("scontrol", "update", f"NodeName={first}", "State=RESUME")
        job.wait_task(name, lambda task: task.starts == 2 and task.state == "RUNNING", "on a third machine")
        job.wait_world(2, steps=2, after=alone)
        finish(job, undisturbed, *crashes)


@pytest.mark.full
def test_processes_are_killed(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """A killed agent has its task started again; a task of which everything is killed has failed, and stays away."""
    with slurm_job(tmp_path / "job", 3, training=TRAINING, nnodes="1:3") as job:
        array, three = open_world(job, 3)
        processes.send(job.on(f"{array}_0")["agent"], signal.SIGKILL)
        two = job.wait_world(2, steps=2, after=three)
        job.wait_again(f"{array}_0")
        three = job.wait_world(3, steps=2, after=two)
        for pids in job.on(f"{array}_2").values():
            processes.send(pids, signal.SIGKILL)
        last = job.wait_world(2, steps=2, after=three)
        failed = job.wait_task(f"{array}_2", lambda task: task.state == "FAILED", "has failed")
        assert (failed.code, failed.starts) == ("0:9", 0)
        finish(job, undisturbed, two, last, others=(f"{array}_2",))


@pytest.mark.full
def test_the_whole_array_is_cancelled(tmp_path: Path) -> None:
    """Every task leaves saved, and none of them starts again; the same script goes on where they stopped."""
    with slurm_job(tmp_path / "job", 2, training=TRAINING, nnodes="1:2") as job:
        array, epoch = open_world(job, 2)
        job.slurm.run("scancel", array)
        for name in (f"{array}_0", f"{array}_1"):
            assert job.wait_task(name, lambda task: task.state == "CANCELLED", "over").starts == 0
        job.arrays.clear()
        open_world_again = job.submit()
        job.wait_world(2, steps=2, after=epoch)
        assert open_world_again != array
        job.wait_success()
        job.assert_redone()
