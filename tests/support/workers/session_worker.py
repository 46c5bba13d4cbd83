"""A worker for tests of the session: a model with dropout on request, and faults on order. Run by ``test_session``."""

from __future__ import annotations

import argparse
import errno
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dalsegno.elastic import Batches, BatchPlan, ElasticSampler, background, session
from dalsegno.elastic.training import saves


class Samples(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(9, generator=torch.Generator().manual_seed(index))


class Held:
    """Cannot be written before a file is there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __deepcopy__(self, memo: object) -> Held:
        return self

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        deadline = time.monotonic() + 30
        while not self.path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)  # another process makes the file
        return int, (0,)


class Unlucky:
    """Cannot be written at all."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __deepcopy__(self, memo: object) -> Unlucky:
        return self

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        raise self.error


def parse() -> argparse.Namespace:
    flags = argparse.ArgumentParser()
    flags.add_argument("--steps", type=int, default=12)
    flags.add_argument("--save-every", type=int, default=0)
    flags.add_argument("--memory-every", default="0")
    flags.add_argument("--dropout", type=float, default=0.0)
    flags.add_argument("--fixed", action="store_true")
    flags.add_argument("--log", type=Path, required=True)
    flags.add_argument("--step-time", type=float, default=0.0)
    flags.add_argument("--slow-from", type=int, default=1, help="the first step that takes --step-time")
    flags.add_argument("--fail-rank", type=int, default=-1)
    flags.add_argument("--fail-saves", type=int, default=1, help="how many saves fail on that rank")
    flags.add_argument("--fail-with", default="disk")
    flags.add_argument("--fail-behind", type=int, default=0, help="with --barrier: the last step without a failure")
    flags.add_argument("--write-slowly", type=float, default=0.0, help="so long rank 0's first save takes, seconds")
    flags.add_argument("--barrier", action="store_true", help="what saves ends in a barrier of the script's own group")
    flags.add_argument("--swallow", action="store_true", help="catch the drain's exception and return 0")
    flags.add_argument("--checkpoint-dir")
    flags.add_argument("--background", action="store_true", help="save in the background")
    flags.add_argument("--hold", type=Path, help="with --background: no write ends before this file is there")
    flags.add_argument("--improves-at", type=int, default=0, help="rank 0 measures its best at this step")
    flags.add_argument("--best-wait", type=float, help="how long the end waits for the best on the disk, seconds")
    flags.add_argument("--plain-lists", type=int, default=0, help="this many batches in an iterable of unknown length")
    return flags.parse_args()


def main() -> None:
    flags = parse()
    if flags.best_wait is not None:
        saves.BEST_WAIT_SECONDS = flags.best_wait
    s = session(checkpoint_dir=flags.checkpoint_dir)
    if s.world_size > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(flags.dropout), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if s.resume is not None:
        state = torch.load(s.resume.path / "model.pt", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    wrapped = DistributedDataParallel(model) if s.world_size > 1 else model
    failed = 0

    def save(path: Path) -> None:
        nonlocal failed
        if s.rank == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path / "model.pt")
        (path / f"part-{s.rank}.json").write_text(json.dumps({"rank": s.rank, "step": s.step}))
        if s.rank == flags.fail_rank and failed < flags.fail_saves:
            failed += 1
            if flags.fail_with == "disk":
                raise OSError(errno.ENOSPC, "No space left on device")
            raise KeyError("a mistake in the script")
        if s.rank == 0 and flags.write_slowly:
            with open(path / "grows", "wb", buffering=0) as grows:
                ends = time.monotonic() + flags.write_slowly
                while time.monotonic() < ends:
                    grows.write(b"x")
                    time.sleep(0.1)  # why: it is to take so long
            flags.write_slowly = 0.0
        if flags.barrier:
            dist.barrier()

    def state() -> dict[str, object]:
        nonlocal failed
        if flags.barrier and s.rank == flags.fail_rank and s.step > flags.fail_behind:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        if flags.barrier:
            dist.barrier()
        files: dict[str, object] = {f"part-{s.rank}.json": json.dumps({"rank": s.rank, "step": s.step}).encode()}
        if s.rank == 0:
            files["model.pt"] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        if flags.hold:
            # First, so that nothing is written before the file is there.
            files = {f"held/{s.rank}.pt": Held(flags.hold), **files}
        if s.rank == flags.fail_rank and failed < flags.fail_saves:
            failed += 1
            full = OSError(errno.ENOSPC, "No space left on device")
            files[f"unlucky-{s.rank}.pt"] = Unlucky(full if flags.fail_with == "disk" else TypeError("a mistake"))
        if flags.fail_with == "same":
            files["same.pt"] = 1
        return files

    sampler = ElasticSampler(100, 16, seed=3)
    plan = BatchPlan(16, s.world_size, 3, flags.fixed)
    batches: Batches[Tensor] = Batches(
        Samples(), sampler, plan, s.rank, resume=s.resume, seed=3 if flags.fixed else None
    )
    if flags.plain_lists:
        unknown(s, flags)
        return
    log = open(flags.log / f"rank-{s.rank}-epoch-{s.epoch}-{os.getpid()}.jsonl", "w")  # noqa: SIM115
    saver = background(state) if flags.background else save
    s.track("score", mode="max")
    every: int | str = int(flags.memory_every) if flags.memory_every.isdecimal() else flags.memory_every
    options = {"save_every": flags.save_every, "memory_every": every}
    for batch in s.steps(batches, max_steps=flags.steps, save=saver, seed=3, **options):
        total = 0.0
        for micro in batch.micro_batches:
            if isinstance(wrapped, DistributedDataParallel):
                wrapped.require_backward_grad_sync = micro.is_last
            loss = (wrapped(micro.data[:, :8]) - micro.data[:, 8:]).square().mean()
            micro.scale(loss, model.parameters()).backward()
            total += float(loss.detach()) * micro.n
        optimizer.step()
        optimizer.zero_grad()
        if flags.step_time and batch.step >= flags.slow_from:
            time.sleep(flags.step_time)
        if flags.improves_at:
            # Rank 0's value is the highest at this step only; the others' in every step.
            s.improved(float(batch.step if s.rank else batch.step == flags.improves_at))
        mean = s.sum(total) / batch.n
        s.report(mean)
        print(json.dumps({"step": batch.step, "loss": mean, "ids": list(batch.sample_ids)}), file=log, flush=True)


def unknown(s: object, flags: argparse.Namespace) -> None:
    """Ranks whose data end at different times."""
    mine = flags.plain_lists + s.rank * 3  # type: ignore[attr-defined]
    done = 0
    for _ in s.steps(iter(range(mine))):  # type: ignore[attr-defined]
        s.sum(1.0)  # type: ignore[attr-defined]
        done += 1
    (flags.log / f"rank-{s.rank}.done").write_text(str(done))  # type: ignore[attr-defined]


if __name__ == "__main__":
    if "--swallow" in sys.argv:
        try:
            main()
        except BaseException as error:  # the script is to be as wrong as scripts can be
            print(f"swallowed {error!r}", file=sys.stderr)
        sys.exit(0)
    main()
