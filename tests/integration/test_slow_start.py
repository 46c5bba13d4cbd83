"""Scripts that take long from their start to `session()`: nobody takes them for scripts without one."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from examples.history import compare, kept_history
from tests.support.jobs.cluster import HOOKED, LIMIT, Training, Undisturbed
from tests.support.jobs.cluster import Cluster as Job

from .test_membership import Clusters

pytestmark = pytest.mark.timeout(300)

# Its text does not say that it has a session; another module of its own does.
HIDDEN = """
import os, pathlib, runpy, sys, time
sys.path.insert(0, {here!r})
import own
here = pathlib.Path({here!r})
(here / "started").touch()
while not (here / "go").exists():
    time.sleep(0.05)  # why: the test's word is a file
sys.argv[:1] = [{hooked!r}, "ddp.py"]
runpy.run_path({hooked!r}, run_name="__main__")
"""


def slow(clusters: Clusters, tmp_path: Path, hidden: bool) -> tuple[Job, Path, Path]:
    """A job whose script has started and does not go on; the file that says so, and the one that it waits for."""
    training = Training(steps=40)
    if hidden:
        (tmp_path / "own.py").write_text("import dalsegno.elastic\n")
        script = tmp_path / "hidden.py"
        script.write_text(HIDDEN.format(here=str(tmp_path), hooked=str(HOOKED)))
        training = Training(script=script, steps=40)
    job = clusters(training=training, hooked=not hidden, nnodes="1:2", agent_flags=["--grow-wait=1"], universal="")
    # A forked agent's standby workers have imported what this script is to be seen to import.
    job.executed = 1
    job.start("a", hold="" if hidden else "start")
    if hidden:
        return job, tmp_path / "started", tmp_path / "go"
    return job, job.holds / "start-a-1", job.holds / "release"


@pytest.mark.full
@pytest.mark.parametrize("hidden", [False, True], ids=["named", "hidden"])
def test_nobody_is_restarted_for_a_newcomer_before_session_could_be_called(
    clusters: Clusters, undisturbed: Undisturbed, tmp_path: Path, hidden: bool
) -> None:
    """--grow-wait runs out meanwhile. The newcomer is taken in once steps are made, and none is lost."""
    job, started, go = slow(clusters, tmp_path, hidden)
    job.wait_for(started.exists, "the script's start")
    job.start("b")
    job.wait_status(lambda job: any(node.node == "b" for node in job.nodes), "b at the master")
    time.sleep(4)  # why: nothing is to happen in this time, and so there is no event
    go.touch()
    job.wait_world(2)
    job.finish()
    job.assert_lost({})
    # Its first line names the directory of the logs, which has the name of this test.
    assert not [line for line in job.node("a").said()[1:] if "restart" in line]
    if not hidden:
        job.assert_undisturbed(undisturbed)


# Takes long before it needs its place; it says when it was started, which is told when it has that.
LATE = """
import runpy, sys, time
print("born", time.time(), flush=True)
import dalsegno.elastic
{before}
time.sleep({seconds})  # why: this is the slow start
sys.argv[:1] = [{hooked!r}, "ddp.py"]
runpy.run_path({hooked!r}, run_name="__main__")
"""


def born(job: Job, name: str) -> list[float]:
    """When the scripts of a node were started that have had a place, in that order."""
    return [float(line.split()[1]) for line in job.node(name).text().splitlines() if line.startswith("born ")]


def starts_ahead(job: Job, name: str) -> int:
    """How many scripts of a node have run as far as they can without a place."""
    (log,) = job.directory.glob(f"logs/*-{job.node(name).pid}/agent.log")
    return log.read_text().count("has run ahead and waits")


@pytest.mark.full
@pytest.mark.skipif(sys.version_info < (3, 11), reason="nothing runs ahead on Python 3.10")
@pytest.mark.parametrize(
    "before", ["", pytest.param("s = dalsegno.elastic.session()", marks=pytest.mark.full)], ids=["imports", "a session"]
)
def test_a_slow_start_is_beside_the_training(
    clusters: Clusters, undisturbed: Undisturbed, tmp_path: Path, before: str
) -> None:
    """A node joins, and one is killed: each time the next world's scripts were started before the last one ended.

    What a script builds behind `session()` is built ahead, too, until it uses the session.
    """
    script = tmp_path / "late.py"
    script.write_text(LATE.format(hooked=str(HOOKED), seconds=3, before=before))
    job = clusters(training=Training(script=script, steps=60), hooked=False, nnodes="1:2", universal="")
    job.start("a")
    job.wait_world(1, steps=2)
    job.start("b")
    grown = job.wait_world(2, steps=2)
    # Of the first world it may have had its place before it had got so far.
    job.wait_for(lambda: starts_ahead(job, "a") >= 2, "a's third start")
    job.kill_node(job.node("b"))
    shrunk = job.wait_world(1, steps=2, after=grown)
    job.finish()
    ended: dict[int, float] = {}
    for line in job.poll():
        ended[line.epoch] = max(ended.get(line.epoch, 0.0), line.time)
    first, second, third = born(job, "a")
    (of_b,) = born(job, "b")
    assert (grown, shrunk) == (2, 3)
    assert first < second < third
    assert max(second, of_b) < ended[grown - 1]
    assert third < ended[grown]
    job.assert_crash(shrunk)
    comparison = compare(kept_history(job.poll()), undisturbed.history(Training(steps=60)))
    assert not comparison.problems
    assert comparison.largest_difference <= LIMIT
