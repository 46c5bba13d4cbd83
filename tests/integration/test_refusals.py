"""What ranks refuse ends a job at once, with one line; what one node's script does wrong ends no healthy job."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.forks import forked
from tests.support.forks.forked import Forked
from tests.support.forks.forked_agents import DLROVER_RUN, start_agent
from tests.support.jobs import local_processes
from tests.support.jobs.shell import Ended, Shell
from tests.support.workers import refused_worker

pytestmark = [pytest.mark.timeout(180), pytest.mark.executed]

PATIENCE = 90.0
FAILED, FINISHED = 1, 0
MARK = "DALSEGNO_TEST_REFUSALS"


class Job:
    """One job in one directory; its agents in the background."""

    def __init__(self, directory: Path, nnodes: str, **told: Any) -> None:
        self.directory, self.nnodes = directory, nnodes
        self.until = directory / "until"
        self.told = {"starts": str(directory / "starts"), "until": str(self.until), **told}
        self.agents: dict[str, subprocess.Popen[bytes] | Forked] = {}

    def words(self, name: str, *flags: str) -> list[str]:
        own = [f"--nnodes={self.nnodes}", f"--node-name={name}", "--job-id=job", "--checkpoint-dir=ck", *flags]
        return [*own, refused_worker.__file__, json.dumps(self.told)]

    def start(self, name: str, *flags: str, **environment: str) -> None:
        kept = {**os.environ, "OMP_NUM_THREADS": "1", MARK: str(self.directory), **environment}
        command = [DLROVER_RUN, "--grow-interval=0", *self.words(name, *flags)]
        executed = forked.EXECUTES and not self.agents
        self.agents[name] = start_agent(command, kept, self.console(name), self.directory, executed=executed)

    def console(self, name: str) -> Path:
        return self.directory / f"{name}.console"

    def said(self, name: str) -> list[str]:
        lines = self.console(name).read_text(errors="replace").splitlines() if self.console(name).exists() else []
        return [line for line in lines if line.startswith("dlrover-run: ")]

    def wait_said(self, name: str, text: str) -> None:
        self.wait(lambda: any(text in line for line in self.said(name)), f"{name}: {text}")

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        waiting = threading.Event()
        for _ in range(int(PATIENCE / 0.05)):
            if condition():
                return
            waiting.wait(0.05)
        raise AssertionError(f"not within {PATIENCE:.0f} s: {what}\n{self.text()}")

    def text(self) -> str:
        return "\n".join(f"{name}:\n{self.console(name).read_text(errors='replace')}" for name in self.agents)

    def starts(self) -> int:
        path = Path(self.told["starts"])
        return len(path.read_text().splitlines()) if path.exists() else 0

    def close(self) -> None:
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
        local_processes.send(local_processes.carriers(f"{MARK}={self.directory}"))


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(nnodes: str, **told: Any) -> Job:
        made.append(Job(tmp_path, nnodes, **told))
        return made[-1]

    yield make
    for job in made:
        job.close()


@pytest.mark.parametrize("only", ["", pytest.param("1", marks=pytest.mark.full)])
def test_a_refusal_at_a_resume_is_one_start_and_one_line(shell: Shell, only: str) -> None:
    """An optimizer that is not the one that was saved, on all ranks, or on one alone."""
    job = Job(shell.directory, "1", steps=8, crash=5)
    flags = ("--nproc-per-node=2", "--max-restarts=0")
    assert shell.run(*job.words("a", *flags)).code == FAILED
    assert job.starts() == 2
    job.told = {**job.told, "crash": 0, **({"only": only} if only else {})}
    ended = shell.run(*job.words("a", "--nproc-per-node=2", "--max-restarts=3"), WRONG="optimizer")
    assert ended.code == FAILED
    assert job.starts() == 4, "one more start"
    (line,) = [line for line in ended.said if "AdamW" in line and "SGD" in line]
    assert "the training was refused: step-4." in line
    assert "make the same ones, or start a new run" in line
    assert len(ended.said) == 3, "beside where the logs are, and what became of the run before"
    assert resumes(shell, job)


@pytest.mark.parametrize("wrong", ["batch", pytest.param("seed", marks=pytest.mark.full)])
def test_what_batches_refuse_at_a_resume_is_one_start_and_one_line(shell: Shell, wrong: str) -> None:
    """In a loop of the script's own they are made outside of every meeting of the ranks."""
    job = Job(shell.directory, "1", steps=8, crash=5, plain=True)
    assert shell.run(*job.words("a", "--nproc-per-node=2", "--max-restarts=0")).code == FAILED
    assert job.starts() == 2
    job.told = {**job.told, "crash": 0}
    ended = shell.run(*job.words("a", "--nproc-per-node=2", "--max-restarts=3"), WRONG=wrong)
    assert (ended.code, job.starts()) == (FAILED, 4), "one more start"
    (line,) = [line for line in ended.said if "the training was refused: " in line]
    assert "start a new run" in line
    assert resumes(shell, job)


@pytest.mark.parametrize("plain", [False, True])
def test_fewer_steps_than_were_made_finish_no_run(shell: Shell, plain: bool) -> None:
    """A typo in their number finished it for good. It is one start and one line, and the right number goes on."""
    job = Job(shell.directory, "1", steps=8, crash=5, plain=plain)
    assert shell.run(*job.words("a", "--nproc-per-node=2", "--max-restarts=0")).code == FAILED
    job.told = {**job.told, "crash": 0, "steps": 2}
    ended = shell.run(*job.words("a", "--nproc-per-node=2", "--max-restarts=3"))
    assert (ended.code, job.starts()) == (FAILED, 4), "one more start"
    (line,) = [line for line in ended.said if "the training was refused: " in line]
    wants = "the run is at step 4, and the script wants 2 steps: give at least 4, or another --job-id / --new-run"
    assert wants in line
    job.told = {**job.told, "steps": 8}
    assert resumes(shell, job)


# Its arguments are wrong, and that is seen before it has a session.
WRONG_TRAINER = """
import sys, torch
from transformers import Trainer, TrainingArguments
from dalsegno.swift_plugin import hf

with open(sys.argv[1], "a") as starts:
    print("started", file=starts)
args = TrainingArguments(sys.argv[2], save_only_model=True, use_cpu=True, report_to="none", max_steps=2)
hf.elastic(Trainer(torch.nn.Linear(1, 1), args, train_dataset=[{"x": 1}] * 8))
"""


def test_what_a_trainer_of_transformers_is_refused_is_one_start_and_one_line(shell: Shell) -> None:
    """All that is wrong with it is seen when it is made elastic, before its session."""
    pytest.importorskip("transformers")
    script, starts = shell.directory / "wrong.py", shell.directory / "starts"
    script.write_text(WRONG_TRAINER)
    flags = ("--nnodes=1", "--nproc-per-node=2", "--job-id=job", "--checkpoint-dir=ck", "--max-restarts=3")
    ended = shell.run(*flags, str(script), str(starts), str(shell.directory / "out"))
    assert (ended.code, len(starts.read_text().splitlines())) == (FAILED, 2)
    (line,) = [line for line in ended.said if "the training was refused: " in line]
    assert "save_only_model" in line
    assert "leave it out" in line


def resumes(shell: Shell, job: Job) -> bool:
    """The right script goes on where the run was saved."""
    ended: Ended = shell.run(*job.words("a", "--nproc-per-node=2"))
    return ended.code == FINISHED and any("resumed at step 4" in line for line in ended.said)


@pytest.mark.parametrize(
    ("wrong", "plain", "why"),
    [
        ("seed", False, "seed is 0 on rank 0, 1 on rank 1"),
        ("batch", True, "global_batch_size was 8 and is 4"),
        pytest.param("seed", True, "seed", marks=pytest.mark.full),
    ],
)
def test_a_node_with_another_script_stays_a_spare(jobs: Callable[..., Job], wrong: str, plain: bool, why: str) -> None:
    """It joins a healthy run with another seed: one more start of the others, no step lost, and they train on."""
    job = jobs("1:2", steps=100_000, pace=0.02, plain=plain)
    job.start("a")
    job.wait_said("a", "epoch 1:")
    job.start("b", WRONG=wrong)
    job.wait_said("a", "b cannot take part, the others go on without it: ")
    job.wait_said("a", "epoch 3:")
    (line,) = [line for line in job.said("a") if "cannot take part" in line]
    assert why in line
    (again,) = [line for line in job.said("a") if "epoch 3:" in line]
    assert "lost 0 steps" in again
    job.wait_said("b", "b cannot take part, and stays a spare: ")
    job.until.touch()
    assert [job.agents[name].wait(PATIENCE) for name in "ab"] == [FINISHED] * 2, job.text()
    assert not any("epoch 4:" in line for line in job.said("a"))


def test_a_growth_that_nobody_can_convert_does_not_begin(jobs: Callable[..., Job]) -> None:
    """What the script saves loads with as many ranks only: the newcomer waits, the others are not restarted for it."""
    job = jobs("1:2", steps=100_000, pace=0.02, strategy="odd")
    job.start("a")
    job.wait(lambda: list(job.directory.glob("ck/job/run-0001/step-*/MANIFEST.json")) != [], "a save")
    job.start("b")
    job.wait_said("b", "what the run saves loads with 1 workers only")
    job.until.touch()
    assert [job.agents[name].wait(PATIENCE) for name in "ab"] == [FINISHED] * 2, job.text()
    assert job.starts() == 1, job.text()


def test_a_lost_node_without_which_nothing_loads_ends_the_job(jobs: Callable[..., Job]) -> None:
    """Nobody else comes: one line says how many workers it takes."""
    job = jobs("1:2", steps=100_000, pace=0.02, strategy="odd")
    for name in "ab":
        job.start(name, "--node-timeout=5", "--quiet-time=60")
    job.wait(lambda: list(job.directory.glob("ck/job/run-0001/step-*/MANIFEST.json")) != [], "a save")
    assert job.starts() == 2
    job.agents["b"].kill()
    assert job.agents["a"].wait(PATIENCE) == FAILED, job.text()
    lines = [line for line in job.said("a") if "was saved by 2 workers and loads with as many only" in line]
    assert lines, job.text()
    assert "start nodes until there are 2 workers again" in lines[-1]
    assert job.starts() == 2
