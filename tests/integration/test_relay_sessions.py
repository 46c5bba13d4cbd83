"""Scripts with a session of ours below relay: over pods that vanish and pods that are told to go, one exact curve."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from examples.history import StepLine, compare, kept_history, read_lines
from tests.support.jobs.cluster import HF, LIMIT, Training, Undisturbed
from tests.support.jobs.pods import Run, relayed

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]

STEPS = 60
SCRIPTS = {
    "ddp": Training(steps=STEPS),
    "hf": Training(HF, STEPS, extra=("--max-micro-batch-size=8", "--samples=152"), needs_agent=True),
}


def made(log: Path) -> list[StepLine]:
    """The steps of all pods so far."""
    return read_lines(log) if log.is_dir() else []


def wait_step(run: Run, log: Path, step: int, epoch: int = 1) -> int:
    """Until an epoch, this one or a later, is that far; returns which."""
    found = run.wait(lambda: [one for one in made(log) if one.step >= step and one.epoch >= epoch], f"step {step}")
    return found[0].epoch


@pytest.mark.parametrize(("script", "ranks"), [("ddp", 1), ("ddp", 2), ("hf", 1)])
def test_a_script_with_a_session_over_three_pods(
    tmp_path: Path, undisturbed: Undisturbed, script: str, ranks: int
) -> None:
    """The first vanishes, and costs what it had not saved; the second is told to go, and costs nothing."""
    training, log = SCRIPTS[script], tmp_path / "log"
    flags = () if ranks == 1 else (f"--nproc-per-node={ranks}",)
    saves = "--output-dir=${save_dir}" if script == "hf" else "--checkpoint-dir=${save_dir}"
    command = [sys.executable, str(training.script), *training.flags(log), *training.pace(0.3), saves]
    with relayed(tmp_path, command=command, resume_flag=None, save_signal=None, lease_seconds=8) as run:
        a = run.pod("a", *flags)
        saved = run.wait_saved()
        first = wait_step(run, log, saved + 3)
        a.vanish()
        saved, lost = run.checkpoints()[-1], made(log)[-1].step
        b = run.pod("b", *flags)
        second = wait_step(run, log, lost + 3, first + 1)
        b.notice()
        assert b.process.wait(120) == 75, run.said()
        last = made(log)[-1].step
        assert run.checkpoints()[-1] == last, "what is left is saved"
        c = run.pod("c", *flags)
        assert c.process.wait(200) == 0, run.said()
        epochs = [[one.step for one in made(log) if one.epoch == epoch] for epoch in (first, second)]
        assert epochs[0][-1] == lost > epochs[1][0] - 1 == saved
        assert min(one.step for one in made(log) if one.epoch > second) == last + 1, "a step was lost on notice"
        compared = compare(kept_history(made(log)), undisturbed.history(training))
        assert not compared.problems, compared.problems
        assert compared.largest_difference <= LIMIT, compared
        assert run.state()["status"] == "COMPLETED"
