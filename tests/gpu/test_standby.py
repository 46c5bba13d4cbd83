"""Standby workers leave CUDA alone until they have a rank, and can use it then: forking is sound."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dalsegno.agent.processes.lifeline import Lifeline
from dalsegno.agent.script import modules_of
from dalsegno.agent.standby.standby_pool import StandbyPool
from dalsegno.agent.standby.worker_main import Assignment
from tests.gpu import scenes
from tests.gpu.scenes import DEVICE, environment, long_without_card, needs_card, needs_deepspeed, touches_card

pytestmark = pytest.mark.timeout(200)

SCRIPT = """
import torch
from dalsegno.elastic import Trainer, session
from dalsegno.elastic.trainer.strategies import own_device
import json, os, sys
before = torch.cuda.is_initialized()
s = session()
opened = torch.cuda.is_initialized()
device = own_device(s.local_rank)
total = float(torch.ones(4, device=device).sum())
print(json.dumps({"before": before, "opened": opened, "device": str(device), "total": total, "pid": os.getpid()}))
"""


@pytest.fixture(params=["torch", pytest.param("deepspeed", marks=[needs_deepspeed, long_without_card])])
def pool(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StandbyPool]:
    """Warm, with what the script imports."""
    (tmp_path / "train.py").write_text(f"import {request.param}\n{SCRIPT}")
    lifeline, warm = Lifeline(), threading.Event()
    one = StandbyPool(lifeline, 1, modules_of(tmp_path / "train.py"), tmp_path / "standby.log", warm.set)
    one.fill(low_priority=False)
    assert warm.wait(scenes.PATIENCE), (tmp_path / "standby.log").read_text(errors="replace")
    yield one
    one.close()
    lifeline.close()


def test_a_warm_nursery_has_not_started_cuda(pool: StandbyPool, tmp_path: Path) -> None:
    """Torch is imported, no card is touched, and each of two workers forked from it can use the card all the same."""
    (nursery,) = pool._nurseries
    assert pool.warm() == 1
    assert not touches_card(nursery.process.pid)
    for number in range(2):
        output = tmp_path / f"out-{number}"
        worker = pool.start_worker(
            Assignment([str(tmp_path / "train.py")], False, environment(), str(tmp_path), str(output), str(output))
        )
        assert worker is not None
        assert worker.wait(scenes.PATIENCE) == 0, output.read_text()
        told = json.loads(output.read_text().splitlines()[-1])
        assert told == {"before": False, "opened": False, "device": told["device"], "total": 4.0, "pid": worker.pid}
        assert told["device"].startswith(DEVICE)
        assert os.waitstatus_to_exitcode(worker.returncode or 0) == 0
    assert not nursery.single, "it forks"
    assert not touches_card(nursery.process.pid)


@needs_card
def test_who_starts_cuda_is_seen() -> None:
    """The witness of the test above: a process that has started CUDA is told from one that has not."""
    import torch

    torch.zeros(1, device="cuda")
    assert touches_card(os.getpid())
