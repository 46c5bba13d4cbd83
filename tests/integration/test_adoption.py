"""A script that knows nothing of us: its own checkpoints become the run's, and the world changes at them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint import inventory
from tests.support.jobs.cluster import LEFT_UNSAVED, Cluster, Training, Undisturbed
from tests.support.jobs.faults import held_placings, run_directory
from tests.support.jobs.foreign import LIGHTNING, installed
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


def through_changes(job: Cluster, undisturbed: Undisturbed | None) -> None:
    """A node joins and leaves, another joins and is killed: nothing that was saved is lost, and no loss is another.

    Without `undisturbed`, for scripts whose batch depends on the number of ranks, no losses are compared.
    """
    job.start("a")
    last = adopted(job)
    epoch = 1
    for name, go in (("b", lambda node: job.leave(node, LEFT_UNSAVED)), ("c", job.kill_node)):
        (node,) = job.start(name)
        epoch = job.wait_world(2, steps=5, after=epoch)
        grown = job.first_step(epoch)
        assert grown > last
        last = adopted(job, after=grown)
        go(node)
        epoch = job.wait_world(1, steps=5, after=epoch)
        assert job.first_step(epoch) > last
        last = adopted(job, after=job.first_step(epoch))
    job.finish()
    if undisturbed is not None:
        job.assert_undisturbed(undisturbed)
    assert max(one.step for one in inventory(run_directory(job))) == job.training.steps, "saved just before it ended"


@pytest.mark.full
@pytest.mark.parametrize(("stage", "flags"), [(1, ["--deepspeed-load-universal"]), (1, []), (3, [])])
def test_a_deepspeed_script_without_a_session(
    clusters: Clusters, undisturbed: Undisturbed, stage: int, flags: list[str]
) -> None:
    """Through universal files.

    The script loads them because it is told to, or because its configuration is changed in its workers.
    """
    training = Training(script=PLAIN, steps=1000, save_every=20, extra=(f"--zero-stage={stage}",))
    job = clusters(training=training, hooked=False, agent_flags=["--grow-wait=60", *flags])
    job.script_flags = ["--save-dir=${save_dir}"]
    through_changes(job, undisturbed)
    assert {one.form for one in inventory(run_directory(job))} == {"sharded", "universal"}


WORKERS = Path(__file__).resolve().parents[1] / "support" / "workers"
LAYOUTS = WORKERS / "plain_layouts.py"
# How each of them is told where its last checkpoint is.
TOLD = {
    "nanogpt": ["--init_from=${resume_dir:+resume}"],
    "accelerate": ["--resume_from_checkpoint", "${resume_dir}"],
    "diffusers": ["--resume_from_checkpoint", "latest"],
}


@pytest.mark.full
@pytest.mark.parametrize("layout", ["nanogpt", "accelerate", "diffusers"])
def test_scripts_of_other_layouts_go_on(clusters: Clusters, undisturbed: Undisturbed, layout: str) -> None:
    """One file, written over (nanoGPT); all ranks' parts (Accelerate), or the main process's alone."""
    training = Training(script=LAYOUTS, steps=1000, save_every=10, extra=(f"--layout={layout}",))
    job = clusters(training=training, hooked=False, universal="", step_time=0.2, agent_flags=["--grow-wait=60"])
    job.script_flags = ["--save-dir=${save_dir}", *TOLD[layout]]
    through_changes(job, undisturbed)


@dataclass(frozen=True)
class Lightning(Training):
    """A script of the real Lightning, which is installed for it."""

    script: Path = WORKERS / "lightning_worker.py"

    def environment(self, step_log: Path) -> dict[str, str]:
        return {"PYTHONPATH": str(installed(*LIGHTNING))}


@pytest.mark.full
def test_a_script_of_lightnings_goes_on(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Its own `last.ckpt`, through its own handling of SIGTERM."""
    training = Lightning(steps=1000, save_every=10)
    job = clusters(training=training, hooked=False, universal="", step_time=0.2, agent_flags=["--grow-wait=60"])
    job.script_flags = ["--save-dir=${save_dir}"]
    through_changes(job, undisturbed)


@pytest.mark.full
def test_a_script_of_hugging_faces_goes_on(clusters: Clusters) -> None:
    """An unchanged `Trainer`. Each rank keeps its batch, as docs/scripts.md says."""
    training = Training(script=WORKERS / "hf_plain_worker.py", steps=400, save_every=10)
    job = clusters(training=training, hooked=False, universal="", step_time=0.2, agent_flags=["--grow-wait=60"])
    job.script_flags = ["--output_dir=${save_dir}", "--resume_from_checkpoint", "${resume_dir}"]
    through_changes(job, None)
    said = "".join(node.text() for node in job.nodes)
    assert "1 ranks with 4 samples each" in said
    assert "2 ranks with 4 samples each" in said


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


@pytest.mark.full
@pytest.mark.parametrize("stage", [0, 1])
def test_a_kill_while_deepspeed_writes_latest(clusters: Clusters, undisturbed: Undisturbed, stage: int) -> None:
    """It leaves this file empty. Below `${save_dir}` the next world finds another one, which leads to the last save."""
    training = Training(script=PLAIN, steps=1000, save_every=20, extra=(f"--zero-stage={stage}",))
    job = clusters(training=training, hooked=False, universal="")
    job.script_flags = ["--save-dir=${save_dir}"]
    (node,) = job.start("a")
    last = adopted(job)
    (job.holds / "die-in-latest").touch()
    epoch = job.wait_world(1, steps=5, after=1)
    (left,) = run_directory(job).glob("e1/latest")
    assert left.read_text(encoding="ascii") == ""
    assert job.first_step(epoch) > last + 20
    job.wait_line(f"resumed at step {job.first_step(epoch) - 1}", node)
    job.finish()
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
def test_a_latest_that_is_left_empty_says_what_helps(clusters: Clusters, tmp_path: Path) -> None:
    """The same in a directory of the script's own: DeepSpeed's assertion has no words, so the agent says them."""
    saves = tmp_path / "saves"
    training = Training(script=PLAIN, steps=1000, save_every=20)
    job = clusters(training=training, hooked=False, universal="")
    job.script_flags = [f"--save-dir={saves}"]
    (node,) = job.start("a")
    job.wait_for((saves / "latest").exists, "a save")
    (job.holds / "die-in-latest").touch()
    node.expected = 1
    job.wait_line("Write the name of the last complete directory beside it into it", node)
    job.wait_exit(node)


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


WRITES_WHERE_IT_RESUMED = """
import os, pickle, sys
save, resume = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
step = pickle.load(open(f"{resume}/ckpt.pkl", "rb"))["step"] if resume else 0
with open("starts", "a") as file:
    print(step, file=file)
if not resume:
    with open(f"{save}/ckpt.pkl", "wb") as file:
        pickle.dump({"step": step + 1}, file)
    os._exit(3)
if open("starts").read().split() == ["0", "1"]:
    os.mkdir(f"{resume}/logs")
    with open(f"{resume}/logs/a.log", "w") as file:
        file.write("resumed")
    os._exit(3)
"""


@pytest.mark.full
def test_a_script_that_writes_into_the_checkpoint_that_it_resumed_from(shell: Shell) -> None:
    """A log in it damages nothing: it is set aside, said, and the run never goes back for it."""
    (shell.directory / "train.py").write_text(WRITES_WHERE_IT_RESUMED)
    ended = shell.run("--max-restarts=3", "--job-id=job", "train.py", "${save_dir}", "${resume_dir}")
    assert ended.code == 0, ended.text
    assert (shell.directory / "starts").read_text().split() == ["0", "1", "1"], ended.text
    assert "the script wrote logs/a.log into step-1.e1.1, from which it resumed: set aside in e3/" in ended.text
    assert "going back" not in ended.text


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_what_a_leaver_saves_at_its_notice_is_the_runs(clusters: Clusters, undisturbed: Undisturbed, rank: int) -> None:
    """It takes its time; the others wait for it, although they could go on at once from what was saved before.

    The first node looks for what is saved; what another one saves then, that one takes itself.
    """
    steps = 7 * 5  # in the first 5 s a session might still be opened, and a leaver is waited for anyway
    training = Training(script=LAYOUTS, steps=200, save_every=30, extra=("--layout=nanogpt",))
    job = clusters(training=training, hooked=False, universal="", step_time=0.2)
    job.script_flags = ["--save-dir=${save_dir}", "--save-at-notice", *TOLD["nanogpt"]]
    job.start("a", "b")
    second = job.wait_world(2, steps=steps)
    job.leave(job.member(rank), LEFT_UNSAVED)
    third = job.wait_world(1, steps=2, after=second)
    last = max(line.step for line in job.poll() if line.epoch == second and line.rank == rank)
    assert job.first_step(third) >= last, "what it had made when the notice came"
    job.finish()
    job.assert_undisturbed(undisturbed)


SAVES_SLOWLY = """
import os, pickle, signal, sys, time
from pathlib import Path
save = Path(next(one for one in sys.argv if one.startswith("--save-dir=")).partition("=")[2])

def notice(*_):
    end = time.monotonic() + {computes}
    while time.monotonic() < end:
        pass
    content = pickle.dumps({{"step": 1, "weights": bytes(100_000)}})
    with open(save / "ckpt.pkl", "wb") as file:
        for part in range(0, len(content), 10_000):
            file.write(content[part : part + 10_000])
            file.flush()
            time.sleep({seconds} / 10)  # why: a slow disk
    while True:
        time.sleep(1)  # why: it does nothing more

signal.signal(signal.SIGTERM, notice)
print("begun", flush=True)
while True:
    time.sleep(1)  # why: until its notice
"""


@pytest.mark.full
@pytest.mark.parametrize(("computes", "seconds"), [(0, 12), (8, 1)], ids=["slow", "late"])
def test_a_notice_lasts_while_the_script_ends_its_step_and_saves(
    clusters: Clusters, tmp_path: Path, computes: int, seconds: int
) -> None:
    """Longer than one that does nothing is waited for, and so little that no disk tells of it; then it is ended."""
    script = tmp_path / "train.py"
    script.write_text(SAVES_SLOWLY.format(computes=computes, seconds=seconds))
    flags = ["--drain-timeout=300"]
    job = clusters(training=Training(script=script), hooked=False, universal="", agent_flags=flags)
    job.script_flags = ["--save-dir=${save_dir}"]
    (a,) = job.start("a")
    job.wait_for(lambda: "begun" in a.text(), "its start")
    job.leave(a, LEFT_UNSAVED)
    job.wait_line("5 s, or 300 s .--drain-timeout. while they write or compute", a)
    job.wait_exit(a, seconds=90)
    assert len(inventory(run_directory(job))) == 1


@pytest.mark.full
def test_what_the_last_node_saves_at_its_notice_is_the_runs(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Everybody leaves; the same command goes on from there."""
    training = Training(script=LAYOUTS, steps=200, save_every=40, extra=("--layout=nanogpt",))
    job = clusters(training=training, hooked=False, universal="", step_time=0.2)
    job.script_flags = ["--save-dir=${save_dir}", "--save-at-notice", *TOLD["nanogpt"]]
    (a,) = job.start("a")
    job.wait_step(5)
    job.leave(a, LEFT_UNSAVED)
    job.wait_exit(a)
    last = max(line.step for line in job.poll())
    job.start("b")
    second = job.wait_world(1, after=1)
    assert job.first_step(second) >= last
    job.finish()
    job.assert_undisturbed(undisturbed)
