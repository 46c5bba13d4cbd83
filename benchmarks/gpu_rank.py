"""One rank of `benchmarks.gpu`: starts like the worker of a changed world, and reports how long each part took.

With ``--saves`` it trains and saves instead.
"""

import time

_MAIN = time.monotonic()

import argparse  # noqa: E402  # imports from here on are a part that is timed
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from dalsegno.elastic import TrainingState, background, session  # noqa: E402
from dalsegno.elastic.rank.process_group import init_process_group  # noqa: E402
from dalsegno.elastic.trainer.strategies import own_device  # noqa: E402

_IMPORTED = time.monotonic()

# Bytes of weights and two moments, for each parameter.
PER_PARAMETER = 12
ROWS = 16


class Parts:
    """Durations of consecutive parts, each until the card has finished its work."""

    def __init__(self, began: float) -> None:
        self.seconds = {"process": _MAIN - began, "imports": _IMPORTED - _MAIN}
        self._last = _IMPORTED

    def end(self, name: str) -> None:
        """Ends a part."""
        settle()
        now = time.monotonic()
        self.seconds[name], self._last = now - self._last, now


def settle() -> None:
    """Waits until the card has finished its work."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def make_model(state_bytes: int) -> nn.Module:
    """Layers whose weights, with Adam's moments, take about `state_bytes` bytes."""
    parameters = state_bytes / PER_PARAMETER
    width = 4096 if parameters > 8 * 4096**2 else 1024
    layers = max(1, round(parameters / width**2))
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def main() -> int:
    """Writes what was timed to ``--out``."""
    flags = argparse.ArgumentParser(description=__doc__)
    flags.add_argument("--began", type=float, required=True, help="when this process was asked for, monotonic")
    flags.add_argument("--directory", required=True)
    flags.add_argument("--bytes", type=int, required=True)
    flags.add_argument("--device", choices=("cuda", "cpu"), required=True)
    flags.add_argument("--saves", type=int, default=0)
    flags.add_argument("--out", type=Path, required=True)
    options = flags.parse_args()
    parts = Parts(options.began)
    local_rank = int(os.environ["LOCAL_RANK"])
    device = own_device(local_rank, torch.device("cpu") if options.device == "cpu" else None)
    torch.zeros(1, device=device)
    parts.end("context")
    s = session(options.directory, keep=1)
    parts.end("session")
    init_process_group(device)
    dist.all_reduce(torch.ones(1, device=device))
    parts.end("process group")
    with torch.device(device):
        model = make_model(options.bytes)
        rows = torch.randn(ROWS, model[0].in_features)  # type: ignore[index]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    state = TrainingState(s, model=model, optimizer=optimizer)
    parts.end("model")
    found: dict[str, Any] = {"resumed": state.load()}
    wrapped = DistributedDataParallel(model) if s.world_size > 1 else model
    parts.end("load")

    def step() -> None:
        train(wrapped, optimizer, rows)

    step()
    parts.end("first step")
    found |= {"parts": parts.seconds, "rank": s.rank, "backend": dist.get_backend_config()}
    if options.saves:
        found["saves"] = save(s, state, step, options.saves)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"result-{s.rank}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rows: Tensor) -> None:
    """Makes one training step."""
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def save(s: Any, state: TrainingState, step: Callable[[], None], count: int) -> list[dict[str, Any]]:
    """Times saves of both ways: how long the script stood still, the next step, and the time until the seal."""
    found = []
    ways: dict[str, Any] = {"waiting": state.write, "in the background": background(state.files)}
    for way, content in ways.items():
        for _ in range(count):
            s.begin_step()
            usual = timed(step)
            s.end_step()
            began = time.monotonic()
            s.save(content, wait=False)
            stopped = time.monotonic() - began
            after = timed(step)
            s.settle()
            whole = time.monotonic() - began
            found.append({"way": way, "stopped": stopped, "usual step": usual, "step after": after, "sealed": whole})
    return found


def timed(step: Callable[[], None]) -> float:
    """Seconds of one step, until the card has finished it."""
    settle()
    began = time.monotonic()
    step()
    settle()
    return time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
