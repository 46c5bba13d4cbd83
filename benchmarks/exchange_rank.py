"""One rank of `benchmarks.exchange`: steps of a given length, with and without a way for the ranks to agree.

One JSON object in ``argv[1]``: ``steps``, ``seconds`` (of a step's own work), ``way`` and ``out``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from dalsegno.elastic import Session, session


def work(seconds: float) -> None:
    """Stands for forward and backward: other ranks may use the core meanwhile, as they can while a GPU computes."""
    time.sleep(seconds)


def with_nothing(s: Session, seconds: float) -> None:
    work(seconds)


def with_session(s: Session, seconds: float) -> None:
    s.begin_step(ahead=1 << 30)  # data of a known length, far from its end
    work(seconds)
    s.end_step()


def with_session_every_step(s: Session, seconds: float) -> None:
    s.begin_step(ahead=1)
    work(seconds)
    s.end_step()


def with_tokens(s: Session, seconds: float) -> None:
    s.begin_step(ahead=1 << 30)
    summed = s.start_sum(1000)
    work(seconds / 2)  # the first forward pass
    summed.wait()
    work(seconds / 2)
    s.end_step()


def with_tokens_before(s: Session, seconds: float) -> None:
    s.begin_step(ahead=1 << 30)
    s.sum(1000)
    work(seconds / 2)
    work(seconds / 2)  # in two parts, as above, because a sleep takes longer than it is told
    s.end_step()


def with_all_reduce(s: Session, seconds: float) -> None:
    work(seconds)
    dist.all_reduce(torch.zeros(1))


WAYS: dict[str, Callable[[Session, float], None]] = {
    "nothing": with_nothing,
    "session": with_session,
    "session, data of unknown length": with_session_every_step,
    "session, means over tokens": with_tokens,
    "session, tokens summed before": with_tokens_before,
    "all-reduce": with_all_reduce,
}


def main() -> None:
    task = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    s = session()
    step = WAYS[task["way"]]
    for _ in range(task["steps"] // 10):
        step(s, task["seconds"])
    dist.barrier()
    began = time.perf_counter()
    for _ in range(task["steps"]):
        step(s, task["seconds"])
    taken = (time.perf_counter() - began) / task["steps"]
    (Path(task["out"]) / f"result-{dist.get_rank()}.json").write_text(json.dumps({"seconds": taken}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
