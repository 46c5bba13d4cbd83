"""What a run without a checkpoint starts from, with real pods: a command's work, or a revision of a hub, made once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hub.client import Hub
from tests.support.hub.scene import REPO
from tests.support.jobs.pods import Run, relayed

pytestmark = [pytest.mark.full, pytest.mark.timeout(280)]

# It says when it begins and ends, takes its time, and must be alone: two of them would spoil each other's work.
MAKER = """
import json, os, pathlib, sys, time
target, log, seconds, code = pathlib.Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
def note(what):
    with open(log, "a") as file:
        file.write(f"{what} {os.getpid()}\\n")
note("begins")
(target / "half").write_text("x")
time.sleep(seconds)
(target / "trainer_state.json").write_text(json.dumps({"global_step": 0, "state": 5.0}))
(target / "half").unlink()
note("ends")
sys.exit(code)
"""


def maker(folder: Path, seconds: float = 0.0, code: int = 0) -> dict[str, object]:
    path = folder / "maker.py"
    path.write_text(MAKER)
    words = [sys.executable, str(path), "${save_dir}", str(folder / "made.log"), str(seconds), str(code)]
    return {"command": words}


def made(folder: Path) -> list[str]:
    path = folder / "made.log"
    return [line.split()[0] for line in path.read_text().splitlines()] if path.exists() else []


def assert_begins_there(run: Run) -> None:
    """The first step is the baseline's."""
    first = run.steps()[0]
    assert (first.step, round(first.state, 6)) == (1, 4.95), run.said()


def test_a_command_makes_it_once_though_two_pods_begin_at_once(tmp_path: Path) -> None:
    """The second one waits for the first one's work, and says so; no later pod makes it again."""
    with relayed(tmp_path, steps=40, baseline=maker(tmp_path, 4.0)) as run:
        a, b = run.pod("a"), run.pod("b")
        assert [a.process.wait(120), b.process.wait(120)] == [0, 0], run.said()
        assert made(tmp_path) == ["begins", "ends"], run.said()
        assert sum("another pod" in pod.said for pod in (a, b)) == 1
        assert_begins_there(run)
        run.assert_one_history(40)


def test_what_a_killed_pod_had_half_made_is_made_anew(tmp_path: Path) -> None:
    """SIGKILL in the middle ends the command, too; the next pod begins with an empty directory."""
    with relayed(tmp_path, steps=40, baseline=maker(tmp_path, 3.0)) as run:
        a = run.pod("a")
        run.wait(lambda: made(tmp_path), "the beginning")
        a.process.kill()
        a.process.wait(10)
        b = run.pod("b")
        assert b.process.wait(120) == 0, run.said()
        assert made(tmp_path) == ["begins", "begins", "ends"]
        assert_begins_there(run)
        c_like = [path.name for path in (run.root / "hf" / "baseline").iterdir() if path.is_dir()]
        assert len(c_like) == 1, "nothing half made is left"


def test_a_notice_in_the_middle_ends_it(tmp_path: Path) -> None:
    """SIGTERM while it is made: the pod has left (75), nothing was trained, and the command is gone."""
    with relayed(tmp_path, steps=40, baseline=maker(tmp_path, 60.0)) as run:
        a = run.pod("a")
        run.wait(lambda: made(tmp_path), "the beginning")
        a.notice()
        assert a.process.wait(20) == 75, run.said()
        assert not run.events("acquire")
        pid = int((tmp_path / "made.log").read_text().split()[1])
        assert not Path(f"/proc/{pid}").exists()


def test_a_command_that_fails_is_one_line(tmp_path: Path) -> None:
    """The pod ends with exit code 1; nothing is trained from what it left."""
    with relayed(tmp_path, steps=40, baseline=maker(tmp_path, code=3)) as run:
        a = run.pod("a")
        assert a.process.wait(60) == 1
        assert "error: baseline: the command ended with 3" in a.said
        assert run.steps() == []


def test_a_revision_of_a_hub(tmp_path: Path, hub: Hub) -> None:
    """It is downloaded and trained from; a hub that is away is waited for, with a line."""
    environment = hub.environment(tmp_path / "hub-home")
    code = (
        "from huggingface_hub import HfApi, CommitOperationAdd as Add\n"
        f"HfApi().create_repo({REPO!r}, exist_ok=True)\n"
        f"HfApi().create_commit({REPO!r}, [Add('trainer_state.json', "
        f"{json.dumps({'global_step': 0, 'state': 5.0}).encode()!r})], commit_message='base')"
    )
    put = {**environment, "HF_HUB_OFFLINE": "0"}
    subprocess.run([sys.executable, "-c", code], env=put, check=True, timeout=60)
    hf = {key: value for key, value in environment.items() if key.startswith("HF_")}
    with relayed(tmp_path, steps=40, baseline={"hf": f"{REPO}@main"}) as run:
        hub.kill()
        a = run.pod("a", **hf)
        run.wait(lambda: "the hub does not answer" in a.said, "the wait", 120.0)
        hub.start()
        assert a.process.wait(120) == 0, run.said()
        assert_begins_there(run)
