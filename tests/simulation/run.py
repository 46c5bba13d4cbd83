"""Runs schedules by seed, and replays one with a trace."""

from __future__ import annotations

import functools
import gc
import logging
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from .claim_plan import claim_plan_of
from .claims import World
from .leaders import LeaderWorld, leader_plan_of
from .plan import plan_of
from .world import Simulation

logger = logging.getLogger(__name__)

# What is simulated: decisions alone, with the shells around them, embedded masters and their claims, or several masters
# over etcd.
DECISIONS, SHELLS, CLAIMS, LEADERS = "decisions", "shells", "claims", "leaders"
# Schedules in which much happens.
WARM_UP = (416, 47, 105)


@dataclass(frozen=True)
class Outcome:
    """`failure` is empty where everything held; `cut` says why the schedule ended before its job did, if it did."""

    seed: int
    digest: str
    failure: str = ""
    name: str = ""
    cut: str = ""


@functools.cache
def warm_up() -> None:
    """What a process does only once (caches, first calls) must not cost the time of its first schedule."""
    for seed in WARM_UP:
        try:
            Simulation(plan_of(seed, shells=True)).run()
        except Exception as error:
            # With a plant in place; whoever asks for this seed is told.
            logger.debug("seed %d: %s", seed, error)


def _made(seed: int, mode: str, tracing: bool = False) -> Simulation | World | LeaderWorld:
    if mode == LEADERS:
        return LeaderWorld(leader_plan_of(seed), tracing)
    if mode == CLAIMS:
        return World(claim_plan_of(seed), tracing)
    if mode == SHELLS:
        warm_up()
    return Simulation(plan_of(seed, shells=mode == SHELLS), tracing)


def simulate(seed: int, mode: str = DECISIONS) -> Outcome:
    """One schedule."""
    try:
        made = _made(seed, mode)
        return Outcome(seed, made.run(), cut=made.ledger.elsewhere if isinstance(made, Simulation) else "")
    except AssertionError as error:
        return Outcome(seed, "", str(error), getattr(error, "name", type(error).__name__))
    except Exception as error:
        # A crash of the code under test is a finding like any other; the replay shows where.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(seed, "", f"{error!r} at {frame.name}:{frame.lineno}", type(error).__name__)


def replay(seed: int, mode: str = DECISIONS) -> tuple[list[str], Outcome]:
    """One schedule with every line of its trace."""
    made = _made(seed, mode, tracing=True)
    try:
        return made.lines, Outcome(seed, made.run())
    except Exception:
        return made.lines, Outcome(seed, "", traceback.format_exc())


def simulate_all(seeds: range, processes: int, mode: str = DECISIONS) -> Iterator[Outcome]:
    """Many schedules, in order of their seeds."""
    one = partial(simulate, mode=mode)
    if processes == 1:
        yield from map(one, seeds)
        return
    # What is garbage here must not be collected in the forked processes: where the last object of grpc.aio goes, gRPC
    # waits for a thread of its own, which they do not have, and waits forever.
    gc.freeze()
    try:
        with ProcessPoolExecutor(processes) as pool:
            yield from pool.map(one, seeds, chunksize=20 if mode == DECISIONS else 4)
    finally:
        gc.unfreeze()
