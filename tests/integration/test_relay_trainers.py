"""Real trainers that know nothing of us, below relay: one curve over two pods, and what a machine's loss costs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from dalsegno.protos.run_file import read_run_file
from tests.support.jobs.local_processes import carriers, send
from tests.support.jobs.pods import Run, relayed
from tests.support.pages.sources import ROOT
from tests.support.workers import tiny_swift

pytestmark = pytest.mark.timeout(400)


def made(path: Path, key: str) -> list[tuple[int, float]]:
    """Steps and values that a trainer has noted."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [(one["step"], one[key]) for one in map(json.loads, text[: text.rfind("\n") + 1].splitlines())]


def assert_one_curve(noted: list[tuple[int, float]], saved: int, last: int, within: float) -> None:
    """The second pod begins behind what was saved, makes again what the first had made, and ends the run."""
    begin = next(n for n, (one, other) in enumerate(pairwise(noted), 1) if other[0] <= one[0])
    first, second = dict(noted[:begin]), noted[begin:]
    assert [step for step, _ in second] == list(range(second[0][0], last + 1))
    assert second[0][0] - 1 >= saved
    assert second[0][0] - 1 in first
    again = [(value, first[step]) for step, value in second if step in first]
    assert again, "the first pod was further than its last save"
    assert all(abs(one - other) <= within for one, other in again)


@pytest.mark.full
def test_a_hugging_face_trainer_of_two_ranks_in_each_pod(tmp_path: Path) -> None:
    """Its launcher is the agent's one worker; both ranks' files are taken, and the next pod's ranks go on from them."""
    pytest.importorskip("transformers")
    noted = tmp_path / "noted"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(ROOT / "examples/relay_sft.py"), "--output_dir", "${save_dir}", "--steps_file", str(noted)]
    command = [*launch, *script, "--max_steps=60", "--save_steps=15", "--pace=0.5"]
    more = {"save_signal": None, "checkpoint_glob": "checkpoint-*", "lease_seconds": 8}
    with relayed(tmp_path, command=command, **more) as run:
        a = run.pod("a")
        saved = run.wait_saved()
        ahead = lambda: [step for step, _ in made(noted, "loss") if step > saved + 2]  # noqa: E731
        run.wait(ahead, "it is further than its save")
        a.vanish()
        saved = run.checkpoints()[-1]
        b = run.pod("b")
        assert b.process.wait(200) == 0, run.said()
        assert_one_curve(made(noted, "loss"), saved, 60, 1e-6)
        (kept,) = {path.parent for path in run.root.glob("ckpt/.store/my-run/*/step-60*/rng_state_1.pth")}
        assert (kept / "rng_state_0.pth").exists()
        assert run.state()["status"] == "COMPLETED"


@pytest.mark.full
def test_a_notice_to_a_hugging_face_trainer_of_two_ranks(tmp_path: Path) -> None:
    """As the printed file starts it, but for the ranks: both save the same step, and none is lost."""
    pytest.importorskip("transformers")
    printed = read_run_file(ROOT / "deploy" / "relay" / "hf-trainer.yaml")
    assert printed.command[:3] == ("torchrun", "--nproc-per-node=gpu", "examples/relay_sft.py")
    noted = tmp_path / "noted"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*launch, str(ROOT / "examples/relay_sft.py"), *printed.command[3:]]
    command += ["--steps_file", str(noted), "--max_steps=60", "--pace=0.3"]
    more = {"save_signal": printed.save_signal, "checkpoint_glob": printed.checkpoint_glob, "lease_seconds": 8}
    with relayed(tmp_path, command=command, **more) as run:
        for name, step in (("a", 20), ("b", 40)):
            pod = run.pod(name)
            far = lambda step=step: [one for one, _ in made(noted, "loss") if one >= step]  # noqa: E731
            run.wait(far, f"step {step}")
            pod.notice()
            assert pod.process.wait(60) == 75, run.said()
        c = run.pod("c")
        assert c.process.wait(200) == 0, run.said()
        assert [step for step, _ in made(noted, "loss")] == list(range(1, 61)), "a step was lost on notice"
        assert run.state()["status"] == "COMPLETED"


@pytest.mark.full
def test_ranks_agree_on_the_step_that_they_save(tmp_path: Path) -> None:
    """A signal reaches them in different steps, here one of them alone: all save the same step, and end."""
    pytest.importorskip("transformers")
    noted, out = tmp_path / "noted", tmp_path / "out"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(ROOT / "examples/relay_sft.py"), "--output_dir", str(out), "--steps_file", str(noted)]
    mark = f"DALSEGNO_TEST_MARK={tmp_path}"
    environment = os.environ | dict([mark.split("=", 1)])
    with subprocess.Popen([*launch, *script, "--max_steps=400", "--pace=0.3"], env=environment) as launcher:
        try:
            deadline = time.monotonic() + 120
            while len(made(noted, "loss")) < 5:
                assert time.monotonic() < deadline, "no steps"
                time.sleep(0.1)  # why: another process's file tells nobody that it grows
            send({*carriers(mark)} & {*carriers("LOCAL_RANK=1")}, signal.SIGUSR1)
            assert launcher.wait(60) == 0
        finally:
            send(carriers(mark))
    (saved,) = out.glob("checkpoint-*")
    assert {path.name for path in saved.glob("rng_state_*")} == {"rng_state_0.pth", "rng_state_1.pth"}
    assert saved.name == f"checkpoint-{made(noted, 'loss')[-1][0]}"


@pytest.mark.full
def test_reinforcement_learning_in_plain_torch(tmp_path: Path) -> None:
    """Its files are of no framework; the next pod finds them by ${resume_dir}, and makes the same episodes.

    The first pod is told to go, and loses none; the second vanishes.
    """
    noted = tmp_path / "noted"
    script = [sys.executable, str(ROOT / "examples/relay_rl.py"), "--out", "${save_dir}", "--from", "${resume_dir:-}"]
    command = [*script, "--metrics", str(noted), "--episodes=150", "--save-every=30", "--pace=0.1"]
    with relayed(tmp_path, command=command, resume_flag=None, save_signal="SIGUSR1", lease_seconds=8) as run:
        a = run.pod("a")
        run.wait(lambda: [step for step, _ in made(noted, "mean_reward") if step > 15], "some episodes")
        a.notice()
        assert a.process.wait(60) == 75, run.said()
        asked = made(noted, "mean_reward")[-1][0]
        b = run.pod("b")
        saved = run.wait_saved(asked + 1)
        ahead = lambda: [step for step, _ in made(noted, "mean_reward") if step > saved + 2]  # noqa: E731
        run.wait(ahead, "it is further than its save")
        first = [step for step, _ in made(noted, "mean_reward")][: asked + 1]
        assert first == list(range(1, asked + 2)), "one was lost on notice"
        b.vanish()
        saved = run.checkpoints()[-1]
        c = run.pod("c")
        assert c.process.wait(200) == 0, run.said()
        assert_one_curve(made(noted, "mean_reward"), saved, 150, 0.0)
        assert run.state()["status"] == "COMPLETED"


def logged(run: Run, epoch: int) -> list[tuple[int, float]]:
    """Steps and losses that ms-swift has written in one pod."""
    (path,) = run.root.glob(f"ckpt/.store/my-run/*/e{epoch}/logging.jsonl")
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(int(str(one["global_step/max_steps"]).partition("/")[0]), one["loss"]) for one in lines if "loss" in one]


@pytest.mark.full
def test_ms_swift_as_the_image_starts_it(tmp_path: Path) -> None:
    """The printed file's command, but for a model and data that are here: it knows nothing of us, and goes on."""
    pytest.importorskip("swift", reason="the extra `swift` is not installed")
    tiny_swift.make_model(tmp_path / "model")
    data = tiny_swift.make_data(tmp_path / "data.jsonl", 152)
    printed = read_run_file(ROOT / "deploy" / "relay" / "ms-swift.yaml")
    assert printed.command[:2] == ("swift", "sft")
    kept = [word for word in printed.command[2:] if not word.startswith(("--model=", "--dataset=", "--save_steps="))]
    more = tiny_swift.flags(tmp_path / "model", data, max_steps=120, save_steps=30, per_device_train_batch_size=4)
    plugin = ["--external_plugins", str(Path(tiny_swift.__file__).with_name("slow_swift.py")), "--callbacks", "slow"]
    settings = {
        "command": [sys.executable, "-m", "swift.cli.main", "sft", *kept, *more, *plugin],
        "resume_flag": printed.resume_flag,
        "checkpoint_glob": printed.checkpoint_glob,
        "save_signal": None,
        "lease_seconds": 8,
    }
    with relayed(tmp_path, **settings) as run:
        a = run.pod("a", **tiny_swift.OFFLINE)
        saved = run.wait_saved(seconds=240)  # its imports alone take a minute on a busy machine
        run.wait(lambda: [step for step, _ in logged(run, 1) if step > saved + 2], "it is further than its save")
        a.vanish()
        saved = run.checkpoints()[-1]
        b = run.pod("b", **tiny_swift.OFFLINE)
        assert b.process.wait(300) == 0, run.said()
        assert_one_curve(logged(run, 1) + logged(run, 2), saved, 120, 1e-6)
        assert run.state()["status"] == "COMPLETED"
