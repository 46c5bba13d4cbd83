"""Saves that take longer than a notice, with `examples/ddp.py` on a disk that syncs slowly: no change costs a step.

The disk takes 3 s or 15 s for the model's file (see `tests/support/jobs/hooked.py`), a notice is 8 s.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import LEFT, LEFT_UNSAVED, Cluster, Training, Undisturbed

pytestmark = pytest.mark.timeout(400)

Clusters = Callable[..., Cluster]

# Only changes save, and the end.
TRAINING = Training(steps=100, save_every=1000)
SECONDS = [pytest.param(3, marks=pytest.mark.full), 15]


def slow(
    clusters: Clusters, sync: str, *names: str, flags: tuple[str, ...] = (), **environment: str
) -> tuple[Cluster, int]:
    """A job with a world of these nodes; returns it and its epoch."""
    job = clusters(
        training=TRAINING,
        nnodes="1:3",
        agent_flags=("--drain-timeout=8", *flags, *(("--quiet-time=60",) if len(names) == 3 else ())),
        agent_environment={"DALSEGNO_TEST_SYNC": sync, "DALSEGNO_TEST_STEPS": "4", **environment},
    )
    return job, job.open(*names)


def end(job: Cluster, undisturbed: Undisturbed) -> None:
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("seconds", SECONDS)
def test_a_join_and_a_scale_down_wait_for_a_slow_save(
    clusters: Clusters, undisturbed: Undisturbed, seconds: int
) -> None:
    """Longer than the notice and without a byte that moves; after 5 s all are told how far it is."""
    job, first = slow(clusters, str(seconds), "a")
    (b,) = job.start("b")
    second = job.wait_world(2, steps=2, after=first)
    command = [sys.executable, "-m", "dalsegno.agent.commands.dalsegno", "scale", "1", f"--job-id={job.job}"]
    subprocess.run([*command, f"--checkpoint-dir={job.checkpoints}"], check=True, timeout=60, capture_output=True)
    job.wait_world(1, steps=2, after=second)
    if seconds > 5:
        said = r"(growing|scaling down) waits for the save of step \d+: [\d.]+ kB written in [56] s \([\d.]+ kB/s\)"
        lines = [line for line in b.said() if re.fullmatch(said, line)]
        assert len(lines) == 2, b.said()
        warned = [line for line in b.said() if "has 8 s for it" in line and "--drain-timeout=40" in line]
        assert len(warned) == 1, b.said()
    end(job, undisturbed)


@pytest.mark.parametrize("last", [False, True], ids=["rank 0", "the last rank"])
@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.full
def test_a_leave_loses_nothing_where_the_leavers_part_is_there(
    clusters: Clusters, undisturbed: Undisturbed, seconds: int, last: bool
) -> None:
    """What the leaver wrote is complete when its notice is over; the others make it durable, and seal it."""
    job, first = slow(clusters, str(seconds), "a", "b", "c")
    in_time = seconds < 8
    node = job.member(2 if last else 0)
    job.leave(node, LEFT if in_time else LEFT_UNSAVED)
    job.wait_exit(node)
    assert (node.said()[-1] == "left on notice; everything is saved") == in_time
    job.wait_world(2, steps=2, after=first)
    end(job, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("last", [False, True], ids=["rank 0", "the last rank"])
def test_a_leaver_whose_save_is_committed_has_left_safely(
    clusters: Clusters, undisturbed: Undisturbed, last: bool
) -> None:
    """Only a copy for people is still synced when its notice is over, on a disk that takes 15 s for that."""
    job, first = slow(clusters, "latest.json=15", "a", "b")
    node = job.member(int(last))
    job.leave(node, LEFT)
    job.wait_exit(node)
    assert node.said()[-1] == "left on notice; everything is saved"
    job.wait_world(1, steps=2, after=first)
    assert not any("the save is" in line for one in job.nodes for line in one.said())
    end(job, undisturbed)


@pytest.mark.full
def test_a_leave_in_the_middle_of_a_save_in_the_background(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """The threads of the others write on; rank 0 seals what the leaver had written, too."""
    job, first = slow(clusters, "15", "a", "b", "c", DALSEGNO_TEST_BACKGROUND="1")
    leaver = job.member(2)
    job.leave(leaver, LEFT_UNSAVED)
    job.wait_world(2, steps=2, after=first)
    end(job, undisturbed)


@pytest.mark.full
def test_a_leaver_that_stands_still_is_not_waited_for(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Its machine is frozen in the middle of the save, so that no connection closes: its notice ends all the same."""
    job, first = slow(clusters, "15", "a", "b", "c")
    leaver = job.member(2)
    job.leave(leaver)
    job.wait_line(r"the drain \(. leaves\) waits for the save of step \d+: .*")
    processes.send({leaver.pid, *job.processes(leaver)}, signal.SIGSTOP)
    job.wait_world(2, steps=2, after=first)
    job.kill_node(leaver)
    end(job, undisturbed)


@pytest.mark.full
def test_a_stuck_disk_puts_a_growth_off(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Nothing moves for most of --stall-timeout: the save fails on all ranks, and they train on in their world."""
    job, _ = slow(clusters, "60", "a", flags=("--stall-timeout=20",))
    job.start("b")
    said = job.wait_line(r"growing is put off: its save .*")
    assert "failed (TimeoutError: the disk has not answered for 15 s" in said
    end(job, undisturbed)
    assert [span.world_size for span in job.spans()] == [1]
