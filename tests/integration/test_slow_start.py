"""Scripts that take long from their start to `session()`: nobody takes them for scripts without one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.jobs.cluster import HOOKED, Training, Undisturbed
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
    job = clusters(training=training, hooked=not hidden, nnodes="1:2", agent_flags=["--grow-wait=1"], universal=False)
    # A forked agent's standby workers have imported what this script is to be seen to import.
    job.executed = 1
    job.start("a", hold="" if hidden else "start")
    if hidden:
        return job, tmp_path / "started", tmp_path / "go"
    return job, job.holds / "start-a-1", job.holds / "release"


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
    assert "restart" not in job.node("a").text()
    if not hidden:
        job.assert_undisturbed(undisturbed)
