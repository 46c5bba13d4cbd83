"""What the tests of cards share: whether there is a card, how ranks are started, what processes have of it."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dalsegno.elastic.checkpoint import inventory
from tests.support.jobs import local_processes as processes
from tests.support.jobs.ports import free_port
from tests.support.pages.sources import ROOT
from tests.support.workers.ranks import Rank

# "cuda": `make test-gpu` has found a card. Else everything runs on the CPU: what of it is not CUDA's is shown there.
DEVICE = os.environ.get("DALSEGNO_TEST_DEVICE", "cpu")
CARDS = torch.cuda.device_count() if DEVICE == "cuda" else 0
WORKER = Path(__file__).with_name("worker.py")
# Seconds. A first start reads CUDA's libraries from the disk.
PATIENCE = 240.0

needs_card = pytest.mark.skipif(CARDS == 0, reason="no card here: make test-gpu")
needs_two = pytest.mark.skipif(CARDS < 2, reason=f"NCCL wants a card for each rank, and here are {CARDS}")
_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
needs_deepspeed = pytest.mark.skipif(not _DEEPSPEED, reason="DeepSpeed is not installed, nor built by test-gpu")
# Without a card they show nothing of cards: that they can run at all is shown once in a while (`make test-all`).
long_without_card = pytest.mark.full if CARDS == 0 else pytest.mark.timeout(290)
_TRANSFORMERS = importlib.util.find_spec("transformers") is not None and importlib.util.find_spec("accelerate")
needs_transformers = pytest.mark.skipif(not _TRANSFORMERS, reason="transformers and accelerate are not installed")
# What is forked from a process that has imported everything (DeepSpeed, too) might hide what starts CUDA.
EXECUTED = DEVICE == "cuda" or not _DEEPSPEED


def environment(**more: str) -> dict[str, str]:
    """Of a training process, nothing of an agent in it; cuBLAS repeats itself bit by bit."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("DALSEGNO_", "TORCHELASTIC_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**kept, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "DS_ACCELERATOR": DEVICE, "PYTHONPATH": path, **more}


class Executed:
    """A training process started as a user does it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `close`
        line = [sys.executable, "-u", *command]
        self._process = subprocess.Popen(line, env=environment, stdout=self._output, stderr=subprocess.STDOUT)

    def wait(self, seconds: float) -> tuple[int, str]:
        """Exit code and output. Raises TimeoutExpired."""
        code = self._process.wait(seconds)
        self._output.seek(0)
        return code, self._output.read().decode(errors="replace")

    def close(self) -> None:
        self._process.kill()
        self._process.wait(30)
        self._output.close()


def run(
    directory: Path, world: int, cases: Sequence[Mapping[str, Any]], **variables: str
) -> list[list[dict[str, Any]]]:
    """Results of each case on each rank."""
    directory.mkdir(parents=True, exist_ok=True)
    told = json.dumps([{**case, "port": free_port()} for case in cases])
    command = [str(WORKER), "--cases", told, "--out", str(directory)]
    ranks: list[Any] = []
    try:
        for rank in range(world):
            own = environment(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(world),
                LOCAL_WORLD_SIZE=str(world),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(free_port()),
                **variables,
            )
            ranks.append(Executed(command, own) if EXECUTED else Rank(command, own))
        deadline = time.monotonic() + PATIENCE
        ended = [rank.wait(max(0.1, deadline - time.monotonic())) for rank in ranks]
    finally:
        for rank in ranks:
            rank.close()
    assert [code for code, _ in ended] == [0] * world, "\n".join(output for _, output in ended)
    made = [json.loads((directory / f"result-{rank}.json").read_text()) for rank in range(world)]
    return [list(of_case) for of_case in zip(*made, strict=True)]


def at_step(source: Path, target: Path, step: int) -> str:
    """Copies the checkpoint of one step into a run's directory of its own; returns that."""
    (found,) = [manifest.name for manifest in inventory(source) if manifest.step == step]
    shutil.copytree(source / found, target / found)
    return str(target)


def touches_card(pid: int) -> bool:
    """Whether a process has a context on a card, and so some of its memory.

    That it has opened the driver's files tells nothing: whoever asks how many cards there are opens them, too (NVML;
    DeepSpeed's import does that).
    """
    if DEVICE != "cuda":
        return any(path.name.startswith("nvidia") for path in processes.open_files(pid))
    line = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    told = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout
    return str(pid) in told.split()


# Where there is no card, one is made up, as far as it is asked who it is.
_SHARING = """
import json, sys, types
import torch, torch.distributed as dist
from dalsegno.elastic.rank.process_group import init_process_group
if sys.argv[1] == "cpu":
    torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(uuid="the only card")
else:
    torch.cuda.set_device(0)
init_process_group(torch.device("cuda", 0))
sums = []
for device in ("cpu", sys.argv[1]):
    value = torch.ones(3, device=device)
    dist.all_reduce(value)
    sums.append(value.tolist())
print(json.dumps({"backend": dist.get_backend_config(), "sums": sums}))
dist.destroy_process_group()
"""


def share_one_card() -> list[str]:
    """Two ranks make the process group of a training on one card, and sum over it; what each wrote."""
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    made = [
        Executed(["-c", _SHARING, DEVICE], environment(RANK=str(rank), LOCAL_RANK=str(rank), **told)) for rank in (0, 1)
    ]
    try:
        ended = [rank.wait(150) for rank in made]
    finally:
        for rank in made:
            rank.close()
    assert [code for code, _ in ended] == [0, 0], ended
    return [output for _, output in ended]
