"""`--universal-checkpoint`: a world that can re-shard trains at once, and universal files are made beside it.

They are there before the next change and before the end, whoever dies meanwhile. What `=gate` does, other files show.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.agent.workers.conversion_job import NICENESS
from dalsegno.elastic.checkpoint import UNIVERSAL, Manifest, inventory, verify
from dalsegno.elastic.universal import convert
from dalsegno.protos import control_pb2
from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import TRAIN, Cluster, Training, Undisturbed
from tests.support.jobs.faults import held_conversions, run_directory, wait_held_converter

pytestmark = pytest.mark.timeout(300)

Clusters = Callable[..., Cluster]
# What is committed meanwhile makes agents delete what older epochs left unsealed.
ZERO = Training(script=TRAIN, steps=40, save_every=2)
# Saved at changes only: what a world starts from stays what a crash goes back to.
RARELY = Training(script=TRAIN, steps=40, save_every=1000)
# Each world makes some steps, and then waits for what is to happen to it.
PACED = {"DALSEGNO_TEST_STEPS": "6"}
THERE = "the universal files of step-.* are there"


def joined(clusters: Clusters, training: Training = ZERO) -> tuple[Cluster, int, int]:
    """A second node has joined, and the first one's converter is held; returns its process, and the world's epoch."""
    job = clusters(training=training, universal="beside", agent_environment=PACED, agent_flags=["--keep-checkpoints=0"])
    job.start("a", environment=held_conversions())
    job.wait_world(1, steps=3)
    job.start("b")
    converter = wait_held_converter(job)
    epoch = job.wait_world(2, steps=3)
    assert job.change(epoch).how == "re-sharded"
    assert not forms(job), "the world trains before they are there"
    return job, converter, epoch


def forms(job: Cluster) -> list[Manifest]:
    """All sealed universal forms."""
    return [one for one in inventory(run_directory(job)) if one.form == UNIVERSAL]


def assert_made(job: Cluster, directory: Path) -> None:
    """Of what each world re-sharded there is one universal form, whole, and what a conversion by itself makes of it."""
    started = {change.resumed for change in job.changes().values() if change.how == "re-sharded"}
    made = forms(job)
    assert started == {one.step for one in made}
    assert len(made) == len(started)
    for one in made:
        verify(run_directory(job) / one.name, one, 1)
        assert one.source is not None
        aside = directory / "aside" / f"{one.source.name}.universal.99"
        aside.parent.mkdir(exist_ok=True)
        assert convert(run_directory(job) / one.source.name, aside).files == one.files


@pytest.mark.full
def test_the_next_world_waits_for_them(clusters: Clusters, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The first one trains meanwhile, and the converter yields to it."""
    job, converter, epoch = joined(clusters)
    assert os.getpriority(os.PRIO_PROCESS, converter) == NICENESS
    job.wait_status(lambda status: status.head.epoch == epoch, "a commit of the world of two")
    held = next(run_directory(job).glob("step-*.universal.*"))
    b = job.node("b")
    job.leave(b)
    job.wait_exit(b)
    job.wait_line("the next world is ready; for 5 s it has waited for the universal files of step-.*, which a makes")
    status = job.wait_status(lambda status: True, "the status")
    assert (status.phase, status.epoch) == (control_pb2.PHASE_FORMING, epoch)
    assert "waiting for the universal files of step-" in status.reason
    assert held.is_dir(), "it is of an older epoch than the commits, and not sealed"
    job.release()
    job.wait_world(1, steps=2, after=epoch)
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)
    assert_made(job, tmp_path)


@pytest.mark.full
def test_a_converter_that_is_killed(clusters: Clusters, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """The training does not notice, and the other node makes them, once: a crash after that costs no other ones."""
    job, converter, epoch = joined(clusters, RARELY)
    processes.send([converter])
    job.wait_line("converting on a failed: .*killed by signal 9")
    job.wait_line(THERE)
    assert_made(job, tmp_path)
    assert job.epoch() == epoch
    os.kill(job.worker_pid(job.node("b")), signal.SIGKILL)
    last = job.wait_world(2, steps=2, after=epoch)
    assert job.change(last).how == "re-sharded"
    job.finish()
    job.assert_lost({last: range(1, 30)})
    job.assert_undisturbed(undisturbed)
    assert len(forms(job)) == 1


@pytest.mark.full
def test_a_node_that_is_killed_while_it_makes_them(
    clusters: Clusters, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """The one that is left makes them out of what was begun, before it goes on."""
    job, _, epoch = joined(clusters)
    job.kill_node(job.node("a"))
    last = job.wait_world(1, steps=2, after=epoch)
    job.wait_line("a can no longer convert: another node takes over")
    assert job.change(epoch).resumed in {one.step for one in forms(job)}
    job.finish()
    job.assert_lost({last: range(3)})
    job.assert_undisturbed(undisturbed)
    assert_made(job, tmp_path)


@pytest.mark.full
def test_the_end_waits_for_them(clusters: Clusters, undisturbed: Undisturbed, tmp_path: Path) -> None:
    """All ranks have finished; the job has not, until the files are there."""
    job, converter, epoch = joined(clusters)
    job.hurry()
    job.wait_line("the training has ended; for 5 s it has waited for the universal files of step-.*, which a makes")
    status = job.wait_status(lambda status: True, "the status")
    assert (status.phase, status.epoch, status.step) == (control_pb2.PHASE_RUNNING, epoch, ZERO.steps)
    assert processes.is_alive(converter)
    job.release()
    job.finish()
    assert f"the run finished at step {ZERO.steps}" in job.node("a").said()[-1]
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)
    assert_made(job, tmp_path)
