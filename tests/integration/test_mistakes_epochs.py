"""A data set that is another one in each data epoch keeps its curve, with loader workers or without."""

from __future__ import annotations

import pytest

from tests.support.jobs.cluster import Cluster, Undisturbed, change_worlds
from tests.support.pages.mistakes import Comes, brings

from .test_bring_your_script import WORKERS, Worker
from .test_membership import Clusters, together

pytestmark = pytest.mark.timeout(400)

TRAINING = Worker(WORKERS / "epochs_worker.py", 60, 10)


def leave(clusters: Clusters) -> Cluster:
    """A leave in the middle of the second data epoch of two ranks, and the end of the run."""
    job, first = together(clusters, "a", "b", training=TRAINING, universal="")
    job.wait_world(2, steps=6, after=first - 1)
    job.leave(job.node("b"))
    job.wait_world(1, steps=3, after=first)
    job.finish()
    return job


@brings(
    "a data set with `set_epoch`, map-style or iterable, also inside of a `Subset` or another one, with any workers",
    Comes.ROUNDED,
    "each process that reads it is told the data epoch before it reads. A call of the script's own reaches neither a "
    "loader's workers nor the processes behind a change",
)
def test_a_data_set_is_told_its_epoch(
    clusters: Clusters, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New processes read on in the run's data epoch, as do workers; the undisturbed run has none."""
    undisturbed.history(TRAINING)
    monkeypatch.setenv("LOADER_WORKERS", "1")
    job = leave(clusters)
    job.assert_undisturbed(undisturbed)
    assert "set_epoch" not in job.diagnosis(1000)


@pytest.mark.full
@brings(
    "`set_epoch` called by the script with another number than the data epoch (from 1 on, in stages)",
    Comes.SAID,
    "the call would hold for one process and a while: samples are those of their data epoch instead",
    "do so inside of `set_epoch`",
)
def test_another_number_than_the_data_epoch(
    clusters: Clusters, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes nothing, wherever the world changes, and each start says so once."""
    undisturbed.history(TRAINING)
    monkeypatch.setenv("COUNTS_FROM", "1")
    job = leave(clusters)
    job.assert_undisturbed(undisturbed)
    said = [
        line
        for node in job.nodes
        for line in node.text().splitlines()
        if "called by the script, counts for nothing" in line
    ]
    assert len(said) == 2, said


@pytest.mark.full
@pytest.mark.parametrize("stay", [(), ("--stay",)])
def test_a_data_set_with_epochs_through_all_changes(
    clusters: Clusters, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch, stay: tuple[str, ...]
) -> None:
    """Joins, a kill, a leave; with processes that stay, whose data sets stand where a step was that is made again."""
    training = Worker(WORKERS / "epochs_worker.py", 100, 10, extra=stay)
    undisturbed.history(training)
    monkeypatch.setenv("LOADER_WORKERS", "2")
    job = clusters(training=training, nnodes="1:3", universal="")
    change_worlds(job)
    job.assert_undisturbed(undisturbed)
