"""A pod that is hit exactly where it saves, takes a save over, or looks for what it goes on from; one history."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint import CheckpointName, Manifest, verify
from tests.support.jobs.held_phases import Phase, agent_of
from tests.support.jobs.local_processes import is_alive, send
from tests.support.jobs.pods import Run, relayed
from tests.support.pages.sources import ROOT

pytestmark = [pytest.mark.full, pytest.mark.timeout(280)]
STEPS = 120
BUSY_SAVER = ROOT / "tests" / "support" / "workers" / "busy_saver.py"


def assert_whole(run: Run) -> None:
    """One history to its end, all that is kept is whole, and nothing half-made lies beside it."""
    run.assert_one_history(STEPS)
    assert (run.state()["status"], run.state()["last_ok_step"]) == ("COMPLETED", STEPS)
    assert run.commander.run()["state"] == "COMPLETED"
    directories = [*run.root.glob("ckpt/.store/my-run/*/step-*")]
    assert directories
    for one in directories:
        verify(one, Manifest.read(one))
    assert all(link.exists() for link in run.root.glob("ckpt/step_*")), "people are shown what is gone"
    saved = run.events("ckpt_saved")
    for resume in run.events("resume"):
        before = [one for one in saved if CheckpointName.parse(one["checkpoint"]).epoch < resume["epoch"]]
        assert resume["step"] >= max((one["step"] for one in before), default=0), f"{resume} goes back too far"


@pytest.mark.parametrize("victim", ["agent", "trainer", "pod"])
@pytest.mark.parametrize("phase", ["saving", "copying", "sealing", "sealed"])
def test_a_kill_while_a_save_is_made_or_taken(tmp_path: Path, phase: str, victim: str) -> None:
    """The agent's or the whole pod's: the next one goes on. The trainer's: the same pod does."""
    held = Phase.below(tmp_path, phase)
    with relayed(tmp_path, "--pace=0.1", "--save-every=20", steps=STEPS) as run:
        a = run.pod("a", **held.environment)
        saved = run.wait_saved()
        held.arm()
        pid = held.wait_held(run)
        made, trainer, agent = run.steps()[-1].step, run.steps()[-1].pid, agent_of(a)
        assert pid == (trainer if phase == "saving" else agent), "another one is held"
        if victim == "pod":
            a.vanish()
        else:
            send([agent if victim == "agent" else trainer])
        held.release()
        if victim == "trainer":
            assert a.process.wait(120) == 0, run.said()
        else:
            assert victim == "pod" or a.process.wait(30) == 128 + signal.SIGKILL, run.said()
            b = run.pod("b")
            assert b.process.wait(120) == 0, run.said()
        _, second, *_ = run.epochs().values()
        assert saved <= second[0].step - 1 <= made + 40
        assert_whole(run)


@pytest.mark.parametrize("victim", ["agent", "pod"])
@pytest.mark.parametrize("phase", ["recovering", "resuming"])
def test_a_kill_while_a_pod_recovers(tmp_path: Path, phase: str, victim: str) -> None:
    """It has verified half of what it goes on from: the next one begins at the same checkpoint."""
    held = Phase.below(tmp_path, phase)
    held.arm()
    with relayed(tmp_path, "--pace=0.1", "--save-every=20", steps=STEPS) as run:
        a = run.pod("a")
        run.wait_saved()
        a.vanish()
        saved = run.checkpoints()[-1]
        b = run.pod("b", **held.environment)
        pid = held.wait_held(run)
        if victim == "pod":
            b.vanish()
        else:
            assert phase == "recovering" or pid == agent_of(b), "another one is held"
            send([agent := agent_of(b)])
            run.wait(lambda: not is_alive(agent), "the agent's end", 10.0)
        held.release()
        if victim == "agent" and phase == "recovering":
            assert b.process.wait(120) == 0, "it had not begun: another agent is started"
        else:
            assert victim == "pod" or b.process.wait(30) == 128 + signal.SIGKILL, run.said()
            c = run.pod("c")
            assert c.process.wait(120) == 0, run.said()
        _, second = run.epochs().values()
        # What the killed pod had saved last, and not taken yet, is taken by the next one.
        assert second[0].step - 1 == run.events("resume")[-1]["step"] >= saved
        assert_whole(run)


@pytest.mark.parametrize("phase", ["copying", "sealing"])
def test_a_pod_that_stood_still_beyond_its_lease_while_it_took_a_save(tmp_path: Path, phase: str) -> None:
    """It wakes when the run is another's, and ends what it had begun: it is fenced, and that save never counts."""
    held = Phase.below(tmp_path, phase)
    with relayed(tmp_path, "--pace=0.2", "--save-every=20", steps=STEPS) as run:
        a = run.pod("a", **held.environment)
        saved = run.wait_saved()
        b = run.pod("b")
        run.wait(lambda: "is a spare" in b.said, "b waits")
        held.arm()
        held.wait_held(run)
        a.all(signal.SIGSTOP)
        run.wait_step(1, epoch=2)
        second = run.events("resume")[1]
        assert second["step"] >= saved
        held.release()
        a.all(signal.SIGCONT)
        run.wait(lambda: run.events("fenced"), "a is fenced")
        run.wait(lambda: "was declared dead" in a.said, "a is told")
        assert b.process.wait(120) == 0, run.said()
        assert a.process.wait(60) == 0, "the run is finished, as a hears"
        late = [one for one in run.events("ckpt_saved") if one["epoch"] == 1 and one["time"] > second["time"]]
        assert not late, late
        assert [one["checkpoint"] for one in run.events("resume")] == [None, second["checkpoint"]]
        assert_whole(run)


def test_a_save_that_was_due_comes_before_the_one_that_was_asked_for(tmp_path: Path) -> None:
    """Asked in an evaluation: the due save is being taken when the next step's is begun. That is waited for, too."""
    held = Phase.below(tmp_path, "copying")
    worker = [sys.executable, str(BUSY_SAVER), "${save_dir}", str(tmp_path / "steps"), "${resume_dir}"]
    with relayed(tmp_path, command=worker, resume_flag=None, lease_seconds=20) as run:
        held.arm()
        a = run.pod("a", **held.environment)
        run.wait_step(20)
        a.notice()
        held.wait_held(run)
        run.wait(lambda: [*run.root.glob("ckpt/.store/my-run/*/e1/checkpoint-21/model.safetensors")], "the next save")
        held.release()
        assert a.process.wait(60) == 75, run.said()
        b = run.pod("b")
        assert b.process.wait(120) == 0, run.said()
        first, second = run.epochs().values()
        assert (first[-1].step, second[0].step) == (21, 22), "a step was lost on notice"
        run.assert_one_history(60)
