"""A script that accumulates gradients over batches by hand loses no part of an optimizer's step, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs.programs import Programs, programs_of, wait_for

pytestmark = pytest.mark.timeout(300)

ACCUMULATES = """
import json, os, sys, time
import torch
from torch.nn.parallel import DistributedDataParallel
from dalsegno.elastic import session

log, every, pace = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
s = session()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
state = s.state(model, optimizer, wrap=DistributedDataParallel)
rows = torch.randn(512, 8, generator=torch.Generator().manual_seed(1)).double()
data = s.data(torch.utils.data.TensorDataset(rows), global_batch=8, micro_batch=2, seed=1)
for number, batch in enumerate(s.steps(data, state, max_steps=60, save_every=20, memory_every=4)):
    for micro in batch:
        micro.scale((state.model(micro.data[0]) - micro.data[0].sum(1, keepdim=True)).square().mean()).backward()
    if (number + 1) % every == 0:
        optimizer.step()
        optimizer.zero_grad()
    if s.rank == 0:
        with open(log, "a") as file:
            total = sum(one.sum().item() for one in model.parameters())
            file.write(json.dumps({"step": batch.step, "sum": total}) + chr(10))
    hurries = os.path.exists(log + ".hurry")
    while batch.step == 45 and s.world_size == 1 and pace and not hurries and not s.should_drain:
        hurries = os.path.exists(log + ".hurry")
        time.sleep(0.01)
    time.sleep(0 if hurries else pace)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_of(tmp_path, ACCUMULATES) as made:
        yield made


def curve(log: Path) -> dict[int, float]:
    """The sum of all weights behind each step, as it was made last."""
    return {one["step"]: one["sum"] for one in map(json.loads, log.read_text(encoding="utf-8").splitlines())}


def reached(log: Path, step: int) -> bool:
    return log.exists() and any(one >= step for one in curve(log))


@pytest.mark.parametrize("every", [pytest.param(2, marks=pytest.mark.full), 5, 16])
@pytest.mark.parametrize("event", ["leave", "interrupt", "kill"])
def test_no_part_of_a_step_is_lost(programs: Programs, tmp_path: Path, event: str, every: int) -> None:
    script, log, alone = tmp_path / "script.py", tmp_path / "log", tmp_path / "alone"
    subprocess.run([sys.executable, str(script), str(alone), str(every), "0"], cwd=tmp_path, check=True, timeout=120)

    def agent(name: str) -> None:
        flags = ("--nnodes=1:2", "--memory-replicas=1", f"--node-name={name}", "--quiet-time=3")
        programs.agent(name, *flags, str(script), str(log), str(every), "0.05")

    agent("a")
    agent("b")
    # Behind step 32 the state is looked at, and what was noted of the last whole boundary must stay.
    first = 33 if event == "kill" else 13
    wait_for(lambda: reached(log, first), 120, f"step {first}")
    a, b = programs.running
    if event == "leave":
        os.kill(b.pid, signal.SIGTERM)
    elif event == "kill":
        os.kill(b.pid, signal.SIGKILL)
    else:
        for one in (a, b):
            os.kill(one.pid, signal.SIGINT)
            one.wait(60)
        agent("c")
    Path(f"{log}.hurry").touch()
    programs.running[-1 if event == "interrupt" else 0].wait(120)
    found, wanted = curve(log), curve(alone)
    assert sorted(found) == sorted(wanted)
    assert {step: found[step] for step in wanted} == pytest.approx(wanted, rel=1e-9)
    assert "gradients were carried over the end of step" in programs.diagnosis()
