"""A loop through `s.data`, `s.state` and `s.steps` on two ranks, without an agent: one run after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.workers.zero_runs import run_world

pytestmark = pytest.mark.timeout(180)

SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from dalsegno.elastic import session

def train(s, steps):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    state = s.state(model, optimizer)
    wrapped = DistributedDataParallel(model)
    rows = torch.randn(60, 5, generator=torch.Generator().manual_seed(1))
    for batch in s.steps(s.data(rows, global_batch=16, micro_batch=2), state, max_steps=steps, save_every=3):
        for micro in batch:
            micro.scale((wrapped(micro.data[:, :4]) - micro.data[:, 4:]).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [s.rank, s.step, float(model.weight.sum())]

dist.init_process_group("gloo")
for name, steps in (("a", 5), ("b", 4), ("b", 5)):
    with session(sys.argv[1] + name) as s:
        print(name, *train(s, steps), flush=True)
"""


def test_several_runs_on_two_ranks(tmp_path: Path) -> None:
    """Each meets anew, and the one that was interrupted ends where the other has ended, bit for bit."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    for rank, (code, output) in enumerate(run_world(2, [str(script), str(tmp_path / "run-")])):
        assert code == 0, output
        lines = [line.split() for line in output.splitlines() if line[:2] in ("a ", "b ")]
        assert [line[:3] for line in lines] == [["a", str(rank), "5"], ["b", str(rank), "4"], ["b", str(rank), "5"]]
        assert lines[0][3] == lines[2][3] != lines[1][3]
