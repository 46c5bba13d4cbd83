"""A script that knows nothing of us: its own checkpoints become the run's, and the world changes at them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint import inventory
from tests.support.jobs.cluster import Cluster, Training, Undisturbed
from tests.support.jobs.faults import held_placings, run_directory
from tests.support.jobs.shell import Shell

from .test_membership import Clusters

pytestmark = pytest.mark.timeout(300)
PLAIN = Path(__file__).resolve().parents[1] / "support" / "workers" / "plain_deepspeed.py"


def adopted(job: Cluster, after: int = 0) -> int:
    """Until a checkpoint of a step beyond this one is the run's; returns its step."""
    found = job.wait_for(
        lambda: [one.step for one in inventory(run_directory(job)) if one.step > after] or None,
        f"the script's checkpoint beyond step {after} among the run's",
    )
    return max(found)


@pytest.mark.full
@pytest.mark.parametrize(("stage", "flags"), [(1, ["--deepspeed-load-universal"]), (1, []), (3, [])])
def test_a_deepspeed_script_without_a_session(
    clusters: Clusters, undisturbed: Undisturbed, stage: int, flags: list[str]
) -> None:
    """One node, two from a checkpoint on, and one again after a kill, through universal files.

    The script loads them because it is told to, or because its configuration is changed in its workers.
    """
    training = Training(script=PLAIN, steps=1000, save_every=20, extra=(f"--zero-stage={stage}",))
    job = clusters(training=training, hooked=False, agent_flags=["--grow-wait=60", *flags])
    job.script_flags = ["--save-dir=${save_dir}"]
    job.start("a")
    adopted(job)
    job.start("b")
    second = job.wait_world(2, steps=5)
    grown = job.first_step(second)
    assert grown > 20
    last = adopted(job, after=grown)
    job.kill_node(job.node("b"))
    third = job.wait_world(1, steps=5, after=second)
    assert job.first_step(third) > last
    job.finish()
    job.assert_undisturbed(undisturbed)
    found = inventory(run_directory(job))
    assert {one.form for one in found} == {"sharded", "universal"}
    assert max(one.step for one in found) == 1000, "saved in the moment before it ended"


LAYOUTS = Path(__file__).resolve().parents[1] / "support" / "workers" / "plain_layouts.py"
# How each of them is told where its last checkpoint is.
TOLD = {
    "nanogpt": ["--init_from=${resume_dir:+resume}"],
    "lightning": [],
    "accelerate": ["--resume_from_checkpoint", "${resume_dir}"],
}


@pytest.mark.parametrize("layout", ["nanogpt", *(pytest.param(one, marks=pytest.mark.full) for one in list(TOLD)[1:])])
def test_scripts_of_other_layouts_go_on(clusters: Clusters, undisturbed: Undisturbed, layout: str) -> None:
    """One node, two from a checkpoint on, and one again after a kill: nothing that was saved is lost."""
    training = Training(script=LAYOUTS, steps=1000, save_every=10, extra=(f"--layout={layout}",))
    job = clusters(training=training, hooked=False, universal="", step_time=0.2, agent_flags=["--grow-wait=60"])
    job.script_flags = ["--save-dir=${save_dir}", *TOLD[layout]]
    job.start("a")
    adopted(job)
    job.start("b")
    second = job.wait_world(2, steps=5)
    grown = job.first_step(second)
    assert grown > 10
    last = adopted(job, after=grown)
    job.kill_node(job.node("b"))
    third = job.wait_world(1, steps=5, after=second)
    assert job.first_step(third) > last
    job.finish()
    job.assert_undisturbed(undisturbed)
    assert max(one.step for one in inventory(run_directory(job))) == 1000, "saved in the moment before it ended"


@pytest.mark.full
def test_a_node_that_dies_while_it_copies_the_resume_point(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Others wait for its copy; it is killed in the middle, and they go on from the same checkpoint without it."""
    training = Training(script=LAYOUTS, steps=1000, save_every=10, extra=("--layout=nanogpt",))
    job = clusters(training=training, hooked=False, universal="", step_time=0.2, agent_flags=["--grow-wait=60"])
    job.script_flags = ["--save-dir=${save_dir}", *TOLD["nanogpt"]]
    job.start("a", environment=held_placings())
    adopted(job)
    job.start("b")
    job.wait_for(lambda: list(job.holds.glob("placing-*")) or None, "the copy that is held")
    assert not [line for line in job.poll() if line.epoch == 2], "its workers wait"
    job.kill_node(job.node("a"))
    alone = job.wait_world(1, steps=5, after=2)
    assert job.first_step(alone) > 10
    job.finish()
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
def test_deepspeeds_own_error_says_what_helps(clusters: Clusters) -> None:
    """A plain script that resumes at another number of ranks, and whose configuration does not know of that."""
    training = Training(script=PLAIN, steps=1000, save_every=20)
    job = clusters(training=training, hooked=False, universal="", agent_flags=["--grow-wait=60"])
    job.script_flags = ["--save-dir=${save_dir}"]
    (node,) = job.start("a")
    adopted(job)
    job.start("b")
    line = '"checkpoint": {"load_universal": os.environ.get("DALSEGNO_RESUME_FORM") == "universal"}'
    said = job.wait_for(
        lambda: [text for text in node.said() if line in text] if node.alive else ["ended"], "what helps", seconds=120
    )
    assert "or start with --deepspeed-load-universal" in said[0], node.text()


FAILS_AFTER_SAVES = """
import os, pickle, sys
path = f"{sys.argv[1]}/ckpt.pkl"
step = pickle.load(open(path, "rb"))["step"] if os.path.exists(path) else 0
with open("starts", "a") as file:
    print(step, file=file)
if step < 3:
    with open(path, "wb") as file:
        pickle.dump({"step": step + 1}, file)
    os._exit(3)
"""


def test_a_script_that_fails_right_after_its_save(shell: Shell) -> None:
    """Nobody had the time to look before it was gone: what it saved is taken all the same, and counts as progress."""
    (shell.directory / "train.py").write_text(FAILS_AFTER_SAVES)
    ended = shell.run("--max-restarts=1", "--job-id=job", "train.py", "${save_dir}")
    assert ended.code == 0, ended.text
    assert (shell.directory / "starts").read_text().split() == ["0", "1", "2", "3"], ended.text
