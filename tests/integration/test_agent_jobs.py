"""Whole agents: killed alone, a script that does not know our flag, what workers and people see of a job."""

from __future__ import annotations

import getpass
import json
import signal
import subprocess
import sys

import pytest

from dalsegno.agent.commands.arguments import parse
from dalsegno.agent.commands.dlrover_run import default_job_id
from dalsegno.agent.commands.tuning import tune
from dalsegno.agent.processes.proc import start_time
from tests.support.jobs.local_processes import is_same_process, process_state
from tests.support.jobs.master_process import master_process
from tests.support.jobs.programs import Programs, wait_for
from tests.unit.agent.storage.test_survey import put

pytestmark = [pytest.mark.timeout(180), pytest.mark.executed]

# A worker with DataLoader processes, one of which starts something in a session of its own.
LOADER = """
import os, subprocess, sys, time
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
pids = open(sys.argv[1], "a", buffering=1)
class Data(Dataset):
    def __len__(self):
        return 100000
    def __getitem__(self, index):
        if index < 2:
            print(os.getpid(), file=pids)
            child = subprocess.Popen(["sleep", "300"], start_new_session=True)
            print(child.pid, file=pids)
        time.sleep(0.05)
        return index
if __name__ == "__main__":
    print(os.getpid(), file=pids)
    for batch in DataLoader(Data(), batch_size=1, num_workers=2):
        pass
"""

# The world resumes from universal files, whatever the master says.
UNIVERSAL = """
from dalsegno.agent.shell import elastic_agent
from dalsegno.protos import control_pb2 as pb
original = elastic_agent.ElasticAgent._arguments
elastic_agent.ElasticAgent._arguments = lambda self, world: original(
    self, pb.World(epoch=world.epoch, resume=pb.ResumePoint(form=pb.FORM_UNIVERSAL)))
"""


@pytest.mark.parametrize("how", ["forked", "cold"])
def test_a_killed_agent_takes_everything_along(programs: Programs, how: str) -> None:
    """SIGKILL of the agent alone: worker, DataLoader processes and their setsid children are gone within 2 s."""
    script = programs.directory / "loader.py"
    script.write_text(LOADER)
    pids = programs.directory / "pids"
    if how == "forked":
        agent = programs.agent("agent", str(script), str(pids))
    else:
        agent = programs.agent("agent", "--no-python", sys.executable, str(script), str(pids))
    wait_for(lambda: pids.exists() and len(pids.read_text().split()) >= 5, 90, "the worker did not get going")
    processes = {pid: start_time(pid) for pid in map(int, pids.read_text().split())}
    assert all(started is not None for started in processes.values())
    agent.kill()
    agent.wait()
    wait_for(
        lambda: not any(is_same_process(pid, started or 0) for pid, started in processes.items()),
        2.0,
        "something lives on",
    )


def test_a_script_that_does_not_know_our_flag(programs: Programs) -> None:
    """It is told in one line, and started again without the flag; one that knows it keeps it."""
    (programs.directory / "sitecustomize.py").write_text(UNIVERSAL)
    for name, flag in (("knows", "parser.add_argument('--universal-checkpoint', action='store_true')"), ("strict", "")):
        script = programs.directory / f"{name}.py"
        script.write_text(
            f"import argparse, sys\nparser = argparse.ArgumentParser()\n{flag}\nparser.parse_args()\n"
            "print('ran with', sys.argv[1:])\n"
        )
        flags = ("--nproc-per-node", "2", "--universal-checkpoint")
        agent = programs.agent(name, *flags, str(script), job=name, PYTHONPATH=str(programs.directory))
        assert agent.wait(90) == 0, programs.log(name)
    assert programs.log("knows").count("ran with ['--universal-checkpoint']") == 2
    assert programs.log("strict").count("ran with []") == 2
    assert programs.log("strict").count("does not know --universal-checkpoint") == 1


def test_workers_do_not_see_the_master(programs: Programs) -> None:
    """Address and token are the agent's: DLRover's client library, used in a script, would call our master.

    The variable names the master, and the console the job that nobody named.
    """
    script = programs.directory / "environment.py"
    script.write_text("import json, os\nprint('ENVIRONMENT', json.dumps(dict(os.environ)), flush=True)\n")
    (programs.directory / "token").write_text("sesame-sesame-sesame-sesame-sesame\n")
    job = default_job_id(parse([str(script)], {}), getpass.getuser())
    with master_process(
        programs.directory / "job.sqlite", "--token-file", str(programs.directory / "token"), job_id=job
    ) as master:
        variables = {"DLROVER_MASTER_ADDR": master.address, "DALSEGNO_TOKEN": "sesame-sesame-sesame-sesame-sesame"}
        agent = programs.agent("agent", str(script), job="", **variables)
        assert agent.wait(90) == 0, programs.log("agent")
    text = programs.log("agent")
    (line,) = [line for line in text.splitlines() if line.startswith("ENVIRONMENT ")]
    environment = json.loads(line.removeprefix("ENVIRONMENT "))
    assert environment["DALSEGNO_JOB_ID"] == job
    assert "DLROVER_MASTER_ADDR" not in environment
    expected: dict[str, str] = {}
    tune(expected)
    assert len(expected) >= 2
    assert {
        name: value for name, value in environment.items() if name.startswith(("GOMP_", "GLIBC_", "THP_"))
    } == expected
    assert not [name for name, value in environment.items() if "sesame" in value or master.address in value]
    assert f"dlrover-run: job {job} (from user, script and arguments" in text


def test_another_argument_is_told_of_the_job_without_it(programs: Programs) -> None:
    """It is another job, from step 0. Once: at its next start it has begun, and `--new-run` means it."""
    script = programs.directory / "mini.py"
    script.write_text("print('TRAINED')\n")
    other = default_job_id(parse([str(script), "--steps=900"], {}), getpass.getuser())
    (programs.directory / "ck" / ".dalsegno" / other).mkdir(parents=True)
    put(programs.directory / "ck" / other / "run-0001", "step-99.e1.1")
    line = (
        f"dlrover-run: {other}, a job of a script of this name, is at step 99 here: --job-id={other} goes on with it;"
        " this one begins at step 0"
    )
    for name, steps, flags, told in (("a", 500, [], 1), ("b", 500, [], 0), ("c", 600, ["--new-run"], 0)):
        assert programs.agent(name, *flags, str(script), f"--steps={steps}", job="").wait(90) == 0, programs.log(name)
        assert programs.log(name).splitlines().count(line) == told, programs.log(name)
    assert programs.agent("named", str(script), "--steps=700", job="mini-00000000").wait(90) == 0
    assert line not in programs.log("named")


def test_status_of_an_embedded_job(programs: Programs) -> None:
    """`dalsegno status` finds the embedded master by its claim."""
    script = programs.directory / "wait.py"
    script.write_text("import time\ntime.sleep(60)\n")
    agent = programs.agent("agent", "--drain-timeout", "2", str(script))
    command = [sys.executable, "-m", "dalsegno.agent.commands.dalsegno", "status", "--checkpoint-dir", "ck"]

    def status() -> str:
        done = subprocess.run(command, cwd=programs.directory, capture_output=True, text=True, timeout=30, check=False)
        return done.stdout

    wait_for(lambda: "job job, run-0001: running, epoch 1" in status(), 60, "no status")
    assert "member 0" in status()
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(60) in (75, 76)
    assert process_state(agent.pid) is None
