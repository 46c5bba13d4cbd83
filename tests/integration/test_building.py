"""What a world starts from is verified while its ranks build their models; nothing of it is used before."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs.faults import DAMAGES
from tests.support.jobs.programs import Programs, programs_of, wait_for

pytestmark = pytest.mark.timeout(300)

# Behind step 20 it builds until a file says that it is built. `sys.argv[1]`: who asks for the resume point's files.
BUILDS = """
import json, os, sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from dalsegno.elastic import session

s = session()
with open("opened", "a") as file:
    file.write(f"{s.epoch} {s.rank} {0 if s.resume is None else s.resume.step}" + chr(10))
torch.manual_seed(0)
model = torch.nn.Linear(8, 1).double()
while s.resume is not None and s.resume.step == 20 and not os.path.exists("built"):
    time.sleep(0.01)
if sys.argv[1] == "first" and s.resume is not None and s.rank == 0:
    assert os.path.isdir(s.resume.path)
if sys.argv[1] == "first" and s.world_size > 1:
    dist.init_process_group("gloo")
    dist.barrier()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
state = s.state(model, optimizer, wrap=DistributedDataParallel)
rows = torch.randn(512, 8, generator=torch.Generator().manual_seed(1)).double()
data = s.data(torch.utils.data.TensorDataset(rows), global_batch=8, micro_batch=2, seed=1)
for batch in s.steps(data, state, max_steps=30, save_every=10):
    for micro in batch:
        micro.scale((state.model(micro.data[0]) - micro.data[0].sum(1, keepdim=True)).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    if s.rank == 0:
        with open("log", "a") as file:
            file.write(json.dumps([s.epoch, batch.step]) + chr(10))
    while batch.step == 25 and not os.path.exists("hurry"):
        time.sleep(0.01)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Programs]:
    with programs_of(tmp_path, BUILDS) as made:
        yield made


def steps(programs: Programs) -> list[tuple[int, int]]:
    log = programs.directory / "log"
    return [(epoch, step) for epoch, step in map(json.loads, log.read_text().splitlines())] if log.exists() else []


def killed_at_25(programs: Programs, who: str, nodes: int) -> Path:
    """All nodes are killed behind the save of step 20, which is returned; in the next world everything is quick."""
    for name in "ab"[:nodes]:
        begin(programs, name, who, nodes)
    wait_for(lambda: any(step == 25 for _, step in steps(programs)), 120, "step 25")
    for one in programs.running:
        os.kill(one.pid, signal.SIGKILL)
        one.wait(60)
    (newest,) = [path.parent for path in programs.directory.glob("ck/job/*/step-20.*/MANIFEST.json")]
    (programs.directory / "hurry").touch()
    programs.running.clear()
    return newest


def begin(programs: Programs, name: str, who: str, nodes: int) -> None:
    flags = (f"--nnodes={nodes}", f"--node-name={name}", "--quiet-time=3", "--trace-dir=trace")
    programs.agent(name, *flags, str(programs.directory / "script.py"), who)


def opened(programs: Programs) -> list[str]:
    path = programs.directory / "opened"
    return path.read_text().splitlines() if path.exists() else []


def marks(programs: Programs, name: str) -> list[int]:
    """The epochs of all marks of this name."""
    lines = [line for path in programs.directory.glob("trace/*") for line in path.read_text().splitlines()]
    return [one["epoch"] for one in map(json.loads, lines) if one.get("mark") == name]


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.full)])
def test_it_is_verified_while_the_script_builds(programs: Programs, nodes: int) -> None:
    """The session opens at once, and all is verified before the model is there."""
    killed_at_25(programs, "loads", nodes)
    first = max(epoch for epoch, _ in steps(programs))
    for name in "ab"[:nodes]:
        begin(programs, name, "loads", nodes)
    wait_for(lambda: [e for e in marks(programs, "verified") if e > first], 120, "all is verified")
    assert all(step <= 25 for _, step in steps(programs))
    assert not [epoch for epoch in marks(programs, "loaded") if epoch > first]
    (programs.directory / "built").touch()
    for one in programs.running:
        assert one.wait(120) == 0
    assert [step for epoch, step in steps(programs) if epoch > first] == list(range(21, 31))


@pytest.mark.parametrize("who", ["loads", pytest.param("first", marks=pytest.mark.full)])
@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.full)])
def test_damage_ends_ranks_that_build_for_long(programs: Programs, nodes: int, who: str) -> None:
    """They never come to ask for the files; the run goes back by one all the same."""
    newest = killed_at_25(programs, who, nodes)
    first = max(epoch for epoch, _ in steps(programs))
    DAMAGES["flipped byte"](newest)
    for name in "ab"[:nodes]:
        begin(programs, name, who, nodes)
    for one in programs.running:
        assert one.wait(120) == 0
    assert f"{newest.name} is damaged" in programs.diagnosis()
    assert [step for epoch, step in steps(programs) if epoch > first] == list(range(11, 31))


@pytest.mark.full
@pytest.mark.parametrize("nodes", [1, 2])
def test_damage_where_only_one_rank_asks(programs: Programs, nodes: int) -> None:
    """The others wait for it in a collective of the script's own."""
    newest = killed_at_25(programs, "first", nodes)
    (programs.directory / "built").touch()
    first = max(epoch for epoch, _ in steps(programs))
    DAMAGES["flipped byte"](newest)
    for name in "ab"[:nodes]:
        begin(programs, name, "first", nodes)
    for one in programs.running:
        assert one.wait(120) == 0
    assert f"{newest.name} is damaged" in programs.diagnosis()
    assert [step for epoch, step in steps(programs) if epoch > first] == list(range(11, 31))
