"""Whole agents: killed alone, a script that does not know our flag, and plain torchrun with our rendezvous."""

from __future__ import annotations

import getpass
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dalsegno.agent.commands.arguments import parse
from dalsegno.agent.commands.dlrover_run import default_job_id
from dalsegno.agent.processes.proc import start_time
from tests.support.forks import forked
from tests.support.forks.forked import Forked
from tests.support.forks.forked_agents import DLROVER_RUN, start_agent
from tests.support.jobs.local_processes import is_same_process, process_state
from tests.support.jobs.master_process import master_process
from tests.support.jobs.ports import free_port

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

TORCHRUN = """
import itertools, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
out = sys.argv[1]
for step in itertools.count(1):
    told = torch.tensor([1.0, float(os.path.exists(f"{out}/end"))])
    dist.all_reduce(told)
    ranks, ending = told.tolist()
    with open(f"{out}/rank-{dist.get_rank()}-{os.getpid()}", "a") as log:
        print(step, int(ranks), file=log)
    if ending:
        break
    if os.path.exists(f"{out}/crash-{dist.get_rank()}"):
        os.unlink(f"{out}/crash-{dist.get_rank()}")
        sys.exit(3)
    time.sleep(0.02)
dist.destroy_process_group()
"""

# The world resumes from universal files, whatever the master says.
UNIVERSAL = """
from dalsegno.agent.shell import elastic_agent
from dalsegno.protos import control_pb2 as pb
original = elastic_agent.ElasticAgent._arguments
elastic_agent.ElasticAgent._arguments = lambda self, world: original(
    self, pb.World(epoch=world.epoch, resume=pb.ResumePoint(form=pb.FORM_UNIVERSAL)))
"""

Started = subprocess.Popen[bytes] | Forked


class Programs:
    """Started programs, ended with the test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.running: list[Started] = []

    def start(self, name: str, *command: str, **environment: str) -> Started:
        return self._start(name, command, environment, executed=True)

    def agent(self, name: str, *arguments: str, job: str = "job", **environment: str) -> Started:
        """An agent of a job; `job` empty: of what it takes for its job by itself."""
        arguments = ("--checkpoint-dir", "ck", *(("--job-id", job) if job else ()), *arguments)
        return self._start(name, (DLROVER_RUN, *arguments), environment, executed=forked.EXECUTES)

    def _start(self, name: str, command: tuple[str, ...], environment: dict[str, str], *, executed: bool) -> Started:
        log = self.directory / f"{name}.log"
        process = start_agent(command, {**os.environ, **environment}, log, self.directory, executed=executed)
        self.running.append(process)
        return process

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def close(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()
        claim = self.directory / "ck" / ".dalsegno" / "job" / "claim.json"
        if claim.exists():
            master = json.loads(claim.read_text())
            if is_same_process(master["pid"], master["start_time"]):
                os.kill(master["pid"], signal.SIGKILL)


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    one = Programs(tmp_path)
    yield one
    one.close()


def wait_for(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


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


def steps_of(out: Path) -> dict[str, list[tuple[int, int]]]:
    """Per file of a rank: (step, world size)."""
    found = {}
    for path in sorted(out.glob("rank-*")):
        lines = [line.split() for line in path.read_text().splitlines()]
        found[path.name] = [(int(line[0]), int(line[1])) for line in lines if len(line) == 2]
    return found


@pytest.mark.timeout(420)
def test_plain_torchrun(programs: Programs) -> None:
    """Two torchrun nodes meet through our rendezvous, survive a worker's crash, and one the loss of the other."""
    out = programs.directory / "out"
    out.mkdir()
    script = programs.directory / "script.py"
    script.write_text(TORCHRUN)
    with master_process(programs.directory / "job.sqlite", "--nnodes", "1:2") as master:
        command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=dalsegno", "--rdzv-id=job"]
        command += [f"--rdzv-endpoint={master.address}", "--nnodes=1:2", "--max-restarts=9"]
        command += ["--rdzv-conf", "checkpoint_dir=ck", str(script), str(out)]
        first = programs.start("first", *command)
        second = programs.start("second", *command)
        both = lambda: sum(bool(rows) and rows[-1][1] == 2 for rows in steps_of(out).values())  # noqa: E731
        wait_for(lambda: both() == 2, 120, "the two did not meet")
        (out / "crash-1").touch()
        wait_for(lambda: both() >= 4, 120, "the world did not form again after a crash")
        alone = lambda: {rank for rank, rows in steps_of(out).items() if rows and rows[-1][1] == 1}  # noqa: E731
        before = alone()
        second.send_signal(signal.SIGKILL)
        second.wait()
        wait_for(lambda: alone() - before, 120, "no world of one")
        (out / "end").touch()
        told = time.monotonic()
        assert first.wait(120) == 0, programs.log("first")
        assert time.monotonic() - told < 25, "it waited for a word that had come"
        late = programs.start("late", *command)
        assert late.wait(120) == 0, programs.log("late")
    assert "Traceback" not in programs.log("late")
    text = programs.log("first")
    assert re.search(r"torchrun: .*worker failed", text), text


def test_torchrun_without_an_endpoint_says_so_in_one_line(programs: Programs) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=dalsegno", "script.py"]
    (programs.directory / "script.py").touch()
    assert programs.start("torchrun", *command).wait(60) == 1
    said = programs.log("torchrun")
    assert "torchrun: error: --rdzv-backend=dalsegno needs --rdzv-endpoint=HOST:PORT" in said.splitlines()[-1]
    assert "Traceback" not in said


def test_torchruns_usual_line_for_several_nodes(programs: Programs) -> None:
    """The node at the endpoint hosts the master there; the others find it, whoever comes first."""
    out = programs.directory / "out"
    out.mkdir()
    (out / "end").touch()
    script = programs.directory / "script.py"
    script.write_text(TORCHRUN)
    endpoint = f"127.0.0.2:{free_port()}"
    flags = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}")
    nodes = [programs.agent(name, *flags, str(script), str(out), job="job") for name in ("first", "second")]
    assert [node.wait(90) for node in nodes] == [0, 0], programs.log("first")
    assert sorted(rows for rows in steps_of(out).values()) == [[(1, 2)], [(1, 2)]]
    claim = json.loads(next(programs.directory.rglob("claim.json")).read_text())
    assert claim["address"] == endpoint


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
    assert not [name for name, value in environment.items() if "sesame" in value or master.address in value]
    assert f"dlrover-run: job {job} (from user, script and arguments" in text


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
