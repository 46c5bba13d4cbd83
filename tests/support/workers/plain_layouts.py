"""A script without a session that saves and resumes as others' scripts do: nanoGPT's, Accelerate's, diffusers'.

It knows nothing of us, nor of the libraries whose layouts it writes, except the real Accelerate with the last two. Its
position in the data follows from its step, and the number of ranks must divide the global batch. Alone it runs with
plain `python`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
SAMPLES = 640
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
# Where the test says that it needs no more time.
HOLDS = Path(os.environ.get("DALSEGNO_TEST_HOLDS", "."))


class State:
    """What is trained, and how far it is."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.step = 0

    def tree(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, tree: dict[str, Any], step: int) -> None:
        self.model.load_state_dict(tree["model"])
        self.optimizer.load_state_dict(tree["optimizer"])
        self.step = step


class NanoGpt:
    """One file, written over where it lies; looked for only if the script is told to resume."""

    def resume(self, state: State, options: argparse.Namespace) -> None:
        if options.init_from == "resume":
            found = torch.load(options.save_dir / "ckpt.pt", weights_only=True)
            state.load(found, found["iter_num"])

    def save(self, state: State, options: argparse.Namespace) -> None:
        if dist.get_rank() == 0:
            self.write(state, options)

    @staticmethod
    def write(state: State, options: argparse.Namespace) -> None:
        options.save_dir.mkdir(parents=True, exist_ok=True)
        torch.save({**state.tree(), "iter_num": state.step, "config": {}}, options.save_dir / "ckpt.pt")


class Accelerate:
    """A directory for each step, of which every rank writes a part; the one before is deleted."""

    def __init__(self, state: State) -> None:
        from accelerate import Accelerator

        self._accelerator = Accelerator(cpu=True)
        self._accelerator.register_for_checkpointing(_Counter(state))
        self._prepared = self._accelerator.prepare(state.model, state.optimizer)

    def resume(self, state: State, options: argparse.Namespace) -> None:
        if options.resume_from_checkpoint:
            self._accelerator.load_state(options.resume_from_checkpoint)
            # As Accelerate's examples do it.
            name = os.path.splitext(os.path.basename(options.resume_from_checkpoint))[0]
            state.step = int(name.replace("step_", ""))

    def save(self, state: State, options: argparse.Namespace) -> None:
        before = sorted(options.save_dir.glob("step_*"))
        self._accelerator.save_state(options.save_dir / f"step_{state.step}")
        dist.barrier()
        if dist.get_rank() == 0:
            for one in before:
                shutil.rmtree(one)


class Diffusers:
    """As diffusers' examples: the main process saves alone; all look for a name below the output directory."""

    def __init__(self, state: State) -> None:
        from accelerate import Accelerator

        self._accelerator = Accelerator(cpu=True)
        self._prepared = self._accelerator.prepare(state.model, state.optimizer)

    def resume(self, state: State, options: argparse.Namespace) -> None:
        name = os.path.basename(options.resume_from_checkpoint or "")
        if name == "latest":
            found = sorted(options.save_dir.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
            name = found[-1].name if found else ""
        if name:
            self._accelerator.load_state(options.save_dir / name)
            state.step = int(name.split("-")[1])

    def save(self, state: State, options: argparse.Namespace) -> None:
        if self._accelerator.is_main_process:
            self._accelerator.save_state(options.save_dir / f"checkpoint-{state.step}")


class _Counter:
    def __init__(self, state: State) -> None:
        self._state = state

    def state_dict(self) -> dict[str, int]:
        return {"step": self._state.step}

    def load_state_dict(self, tree: dict[str, int]) -> None:
        self._state.step = tree["step"]


class Notice:
    """Saves when this process is told to go, whichever rank it is, and goes; not in the middle of a step's changes."""

    def __init__(self, save: Callable[[], None]) -> None:
        self._save, self._told, self._steps = save, False, False
        signal.signal(signal.SIGTERM, lambda *_: self._take())

    @contextlib.contextmanager
    def stepping(self) -> Iterator[None]:
        """Around what a step changes."""
        self._steps = True
        yield
        self._steps = False
        if self._told:
            self._take()

    def _take(self) -> None:
        self._told = True
        if not self._steps:
            time.sleep(2.0)  # why: a slow disk; everybody else is long ready to go on
            self._save()
            os._exit(143)


def main() -> None:
    flags = argparse.ArgumentParser()
    for name in ("steps", "save-every", "global-batch-size", "seed"):
        flags.add_argument(f"--{name}", type=int)
    flags.add_argument("--step-time", type=float, default=0.0)
    flags.add_argument("--layout", choices=["nanogpt", "accelerate", "diffusers"], required=True)
    flags.add_argument("--step-log")
    flags.add_argument("--checkpoint-dir")
    flags.add_argument("--save-dir", type=Path)
    flags.add_argument("--init_from", default="scratch")
    flags.add_argument("--resume_from_checkpoint")
    flags.add_argument("--save-at-notice", action="store_true")
    options = flags.parse_args()
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    state = State(options.seed)
    layout: NanoGpt | Accelerate | Diffusers = NanoGpt()
    if options.layout != "nanogpt":
        layout = Accelerate(state) if options.layout == "accelerate" else Diffusers(state)
    layout.resume(state, options)
    data = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(options.seed))
    sys.path.insert(0, str(EXAMPLES))
    from common import StepLog

    log = StepLog(options.step_log, rank=rank, world_size=world, epoch=int(os.environ.get("DALSEGNO_EPOCH", 0)))
    share = options.global_batch_size // world
    stepping: Any = contextlib.nullcontext
    if options.save_at_notice:
        stepping = Notice(lambda: NanoGpt.write(state, options)).stepping
    while state.step < options.steps:
        first = state.step * options.global_batch_size + rank * share
        samples = [number % SAMPLES for number in range(first, first + share)]
        loss = (state.model(data[samples]) - data[samples].roll(1, dims=1)).square().mean()
        state.optimizer.zero_grad()
        loss.backward()
        mean = loss.detach().double().reshape(1)
        for one in (mean, *(parameter.grad for parameter in state.model.parameters())):
            dist.all_reduce(one)
            one /= world
        with stepping():
            state.optimizer.step()
            state.step += 1
        log.write(
            step=state.step,
            data_epoch=first // SAMPLES,
            sample_ids=samples,
            loss=mean.item(),
            grad_norm=0.0,
        )
        if options.save_dir and state.step % options.save_every == 0:
            layout.save(state, options)
        if not (HOLDS / "hurry").exists():
            time.sleep(options.step_time)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
