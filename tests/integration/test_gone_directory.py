"""A node whose working directory somebody deletes: it goes, and the run goes on without it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.protos.contract import EXIT_LEFT
from tests.support.forks.forked_agents import DLROVER_RUN
from tests.support.jobs.programs import Programs, programs_of, wait_for

pytestmark = pytest.mark.timeout(300)

# Notes what each rank does, and where it is; its steps are quick once a file says so.
TRAINS = """
import json, os, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from dalsegno.elastic import session

notes = os.environ["NOTES"]
s = session()
if s.world_size > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1).double()
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
state = s.state(model, optimizer, wrap=DistributedDataParallel)
rows = torch.randn(512, 8, generator=torch.Generator().manual_seed(1)).double()
data = s.data(torch.utils.data.TensorDataset(rows), global_batch=8, micro_batch=4, seed=1)
for batch in s.steps(data, state, max_steps=200, save_every=10):
    for micro in batch:
        micro.scale((state.model(micro.data[0]) - micro.data[0].sum(1, keepdim=True)).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    with open(f"{notes}/rank-{s.rank}", "a") as file:
        file.write(json.dumps([s.epoch, s.world_size, batch.step, os.getpid(), os.getcwd()]) + chr(10))
    time.sleep(0.0 if os.path.exists(f"{notes}/hurry") else 0.1)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_of(tmp_path, TRAINS) as made:
        yield made


def begin(programs: Programs, name: str) -> Path:
    """Starts a node in a directory of its own, which is returned."""
    here = programs.directory / name
    here.mkdir()
    flags = ("--nnodes=1:2", "--job-id=job", f"--checkpoint-dir={programs.directory}/ck", f"--node-name={name}")
    line = " ".join([DLROVER_RUN, *flags, f"{programs.directory}/script.py"])
    programs.start(name, "sh", "-c", f"cd {name} && exec {line}", NOTES=str(programs.directory))
    return here


def noted(programs: Programs, rank: int = 0) -> list[tuple[int, int, int, int, str]]:
    log = programs.directory / f"rank-{rank}"
    return [tuple(json.loads(line)) for line in log.read_text().splitlines()] if log.exists() else []


def kill_rank(programs: Programs, rank: int) -> None:
    os.kill(noted(programs, rank)[-1][3], signal.SIGKILL)


def test_whose_directory_is_gone_goes_and_the_others_train_on(programs: Programs) -> None:
    """Its starts failed, each of them for all nodes, until the job had failed on the healthy one as well."""
    begin(programs, "a")
    wait_for(lambda: bool(noted(programs)), 120, "a trains")
    gone = begin(programs, "b")
    wait_for(lambda: sum(world == 2 for _, world, *_ in noted(programs)) > 12, 120, "both have saved")
    gone.rename(programs.directory / "elsewhere")
    (programs.directory / "elsewhere").rmdir()
    kill_rank(programs, 0)
    a, b = programs.running
    assert b.wait(120) == EXIT_LEFT
    assert f"the working directory {gone} is gone" in programs.log("b")
    (programs.directory / "hurry").touch()
    assert a.wait(120) == 0
    assert "the job failed" not in programs.log("a")
    assert noted(programs)[-1][1:3] == (1, 200)


def test_a_directory_that_was_made_anew_is_where_the_next_workers_start(programs: Programs) -> None:
    """A fresh clone took its place. With the next change of the world the healthy node was put aside."""
    here = begin(programs, "a")
    wait_for(lambda: len(noted(programs)) > 12, 120, "a has saved")
    old = here.rename(programs.directory / "old")
    here.mkdir()
    old.rmdir()
    (programs.directory / "hurry").touch()
    kill_rank(programs, 0)
    (a,) = programs.running
    assert a.wait(120) == 0
    assert noted(programs)[-1][2:] == (200, noted(programs)[-1][3], str(here))
