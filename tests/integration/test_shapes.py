"""Scripts that do not run with some numbers of nodes: who joins ends no healthy job. And plain ones that fail once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.jobs.cluster import HOOKED, LEFT_UNSAVED, Cluster, Node, Training, Undisturbed

from .test_membership import Clusters

pytestmark = pytest.mark.timeout(300)
DIVIDES = Path(__file__).resolve().parents[1] / "support" / "workers" / "divides_worker.py"
# The example, as somebody would have it whose accumulation must divide.
ASSERTS = """
import os, runpy, sys
assert 4 % int(os.environ["WORLD_SIZE"]) == 0, f"4 micro-batches on {{os.environ['WORLD_SIZE']}} ranks"
import dalsegno.elastic
sys.argv[:1] = [{hooked!r}, "ddp.py"]
runpy.run_path({hooked!r}, run_name="__main__")
"""
DEAF = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: None)
print("deaf", flush=True)
while True:
    time.sleep(1)  # why: it does nothing until it is killed
"""
FAILED = "with 3 nodes the script failed at its start: the run goes on with 2, and c is a spare. 3 are tried again"


def plain(clusters: Clusters, *flags: str) -> Cluster:
    """A job of the plain script; no failure of it is survived."""
    job = clusters(training=Training(script=DIVIDES), hooked=False, universal="", agent_flags=["--max-restarts=0"])
    job.script_flags = [f"--out={job.directory}", *flags]
    return job


def trains(job: Cluster, node: Node, ranks: int, times: int = 1) -> None:
    """Until this node's script has said so often that it trains with so many."""
    job.wait_for(lambda: node.text().count(f"training on {ranks} from") >= times, f"training on {ranks}")


def test_a_newcomer_ends_no_healthy_job_of_a_plain_script(clusters: Clusters) -> None:
    """Two go on from what the script had saved; everybody hears why, and the newcomer why it is a spare.

    It takes the place of one that leaves, and is killed there: each time the others go on from what was saved last.
    """
    job = plain(clusters)
    a, b = job.start("a", "b")
    trains(job, a, 2)
    (c,) = job.start("c")
    job.wait_line("c joined: .* all workers restart in 5 s .*and go on from what the script itself has saved", a)
    for node in (a, b, c):
        job.wait_line(re.escape(FAILED), node)
    job.wait_line("c is a spare: with 3 nodes the script failed .*4 micro-batches on 3 ranks", c)
    trains(job, a, 2, times=2)
    assert "training on 2 from 0" not in a.text().partition(FAILED)[2]
    job.leave(b, LEFT_UNSAVED)
    trains(job, a, 2, times=3)
    job.kill_node(c)
    trains(job, a, 1)
    begun = [int(step) for step in re.findall(r"training on \d from (\d+)", a.text())]
    assert begun == sorted(begun)
    assert begun[1] >= 5, "the first save"
    (job.directory / "stop").touch()
    job.wait_exit(a)


@pytest.mark.full
def test_the_next_number_of_nodes_is_tried(clusters: Clusters) -> None:
    """Four divides, and takes the spare in; two, when two are killed, have divided before."""
    job = plain(clusters)
    a, _ = job.start("a", "b")
    trains(job, a, 2)
    job.start("c")
    job.wait_line(re.escape(FAILED), a)
    trains(job, a, 2, times=2)
    (d,) = job.start("d")
    trains(job, a, 4)
    job.kill_node(d)
    trains(job, a, 2, times=3)
    assert "training on 3" not in a.text()
    (job.directory / "stop").touch()
    job.wait_exit(*[node for node in job.nodes if node is not d])


@pytest.mark.full
def test_a_newcomer_ends_no_healthy_job_with_a_session(
    clusters: Clusters, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """Drained for it, failed with it, and gone on without it: no step is lost."""
    script = tmp_path / "asserts.py"
    script.write_text(ASSERTS.format(hooked=str(HOOKED)))
    training = Training(script=script, steps=80)
    job = clusters(training=training, hooked=False, universal="", agent_flags=["--max-restarts=0"])
    a, b = job.start("a", "b")
    second = job.wait_world(2, steps=3)
    (c,) = job.start("c")
    for node in (a, b, c):
        job.wait_line(re.escape(FAILED), node)
    third = job.wait_world(2, steps=3, after=second)
    job.finish()
    assert job.change(third).lost == 0
    job.training = Training(steps=80)
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("flags", [[], ["--save-dir=${save_dir}"]], ids=["plain", "with a directory"])
def test_a_plain_script_that_does_nothing_about_a_notice_is_not_waited_for(
    clusters: Clusters, tmp_path: Path, flags: list[str]
) -> None:
    """It catches the signal, and stands still: its node is gone in seconds, whatever --drain-timeout is."""
    script = tmp_path / "deaf.py"
    script.write_text(DEAF)
    job = clusters(training=Training(script=script), hooked=False, universal="", agent_flags=["--drain-timeout=300"])
    job.script_flags = flags
    (a,) = job.start("a")
    job.wait_for(lambda: "deaf" in a.text(), "its start")
    job.leave(a, LEFT_UNSAVED)
    job.wait_line("SIGTERM: passed on to the workers.* 5 s, or 300 s .*while they write", a)
    job.wait_exit(a, seconds=60)


@pytest.mark.full
def test_a_plain_script_that_fails_at_its_first_start_is_started_again(clusters: Clusters) -> None:
    """As torchrun does it, without a step that anybody has heard of."""
    job = plain(clusters, "--fails-first")
    job.agent_flags = []
    (a,) = job.start("a")
    job.wait_line("no room on the card", a)
    trains(job, a, 1)
    (job.directory / "stop").touch()
    job.wait_exit()
