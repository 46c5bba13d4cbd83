"""Steps whose pace drops just as one rank is told to leave; run by ``test_hurry``. One JSON object in ``argv[1]``.

Attributes of it: ``fast``: at least so many steps of 1 ms. Then, where the next exchange is ``apart`` steps away or
more, each step takes ``slow`` seconds, and in the first of these rank ``who`` gets its notice. ``together``: each step
has a sum over all ranks, as gradients have. Each rank writes ``rank-<r>.json``: the step with the notice, and the last.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from dalsegno.elastic import Batches, BatchPlan, Drained, ElasticSampler, Session, session

LENGTH = 10**6


def made(s: Session, told: dict[str, Any]) -> dict[str, int]:
    """Trains, until it is drained."""
    noticed, last, waiting = 0, s.step, threading.Event()
    # Of data of a known length: the ranks know many batches ahead.
    sampler, plan = ElasticSampler(LENGTH, s.world_size), BatchPlan(s.world_size, s.world_size, 1)
    try:
        for batch in s.steps(Batches(range(LENGTH), sampler, plan, s.rank)):
            list(batch.micro_batches)
            if told["together"]:
                s.sum(1.0)
            # All ranks know alike when that is.
            apart = (s._exchange._next or 0) - batch.step
            if not noticed and batch.step >= told["fast"] and apart >= told["apart"]:
                noticed = batch.step
                if s.rank == told["who"]:
                    os.kill(os.getpid(), signal.SIGTERM)
            waiting.wait(told["slow"] if noticed else 0.001)
            last = batch.step
    except Drained:
        return {"last": last, "noticed": noticed}
    raise AssertionError("the data ended")


def main() -> None:
    told = json.loads(sys.argv[1])
    s = session(told["directory"])
    Path(told["out"], f"rank-{s.rank}.json").write_text(json.dumps(made(s, told)))


if __name__ == "__main__":
    main()
