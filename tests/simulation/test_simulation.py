"""The simulator over many schedules, its own determinism, and bugs planted so that it is known to see."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.conftest import ROOT

from .claim_plan import claim_plan_of
from .leaders import leader_plan_of
from .plan import plan_of
from .plants.brain import PLANTS, Plant, planted
from .plants.claims import CLAIM_PLANTS
from .plants.files import FILE_PLANTS
from .plants.leaders import LEADER_PLANTS
from .plants.memory import MEMORY_PLANTS
from .plants.orders import ORDER_PLANTS
from .plants.shells import SHELL_PLANTS
from .run import CLAIMS, LEADERS, SHELLS, replay, simulate, simulate_all

SHELL_RUNS = int(os.environ.get("SIM_SHELL_RUNS", "40"))
CLAIM_RUNS = int(os.environ.get("SIM_CLAIM_RUNS", "40"))
LEADER_RUNS = int(os.environ.get("SIM_LEADER_RUNS", "20"))
RUNS = int(os.environ.get("SIM_RUNS", "1000"))
FIRST_SEED = int(os.environ.get("SIM_SEED", "1"))
# Schedules that once broke an invariant, by a fault of the product or of the model.
BROKE_ONCE = (
    *(2167, 2481, 2547, 4014, 4911, 5278, 5467, 5797, 20679, 20730, 20907, 21266),
    *(21537, 21922, 22033, 22911, 32199, 32257, 7300131, 7300822, 7301672, 7302298, 9208, 5128, 9517, 26715),
)


def test_every_schedule_keeps_the_invariants() -> None:
    """No seed breaks an invariant; one that does is named, and `--trace --seed N` replays it."""
    seeds = range(FIRST_SEED, FIRST_SEED + RUNS)
    failures = [f"seed {o.seed}: {o.failure}" for o in simulate_all(seeds, min(2, os.cpu_count() or 1)) if o.failure]
    assert failures == []


AFTER_GRPC = """
import asyncio, gc, grpc
from tests.simulation.run import simulate_all

class Garbage:
    pass

async def call():
    garbage = Garbage()
    garbage.itself, garbage.channel = garbage, grpc.aio.insecure_channel("127.0.0.1:1")
    garbage.channel.get_state(try_to_connect=True)
    await asyncio.sleep(0.1)

gc.disable()
asyncio.run(call())
gc.enable()
print([one.failure for one in simulate_all(range(1, 41), 2)])
"""


def test_schedules_run_beside_what_grpc_left_behind() -> None:
    """Its objects must not be collected in processes without its threads: they would wait for those forever."""
    done = subprocess.run(
        [sys.executable, "-c", AFTER_GRPC], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, str([""] * 40)), done.stderr


def test_schedules_that_broke_once_keep_the_invariants() -> None:
    """What was mended stays so."""
    failures = [f"seed {o.seed}: {o.failure}" for o in map(simulate, BROKE_ONCE) if o.failure]
    assert failures == []


def test_every_schedule_of_the_shells_keeps_the_invariants() -> None:
    """The same with driver, watchers, service, client, mailbox, effects, console and loop as they are."""
    seeds = range(FIRST_SEED, FIRST_SEED + SHELL_RUNS)
    outcomes = simulate_all(seeds, min(2, os.cpu_count() or 1), SHELLS)
    failures = [f"seed {o.seed} --shells: {o.failure}" for o in outcomes if o.failure]
    assert failures == []


def test_every_schedule_of_claims_keeps_the_invariants() -> None:
    """Embedded masters as agents find, start and replace them, on machines and in containers that end and come."""
    seeds = range(FIRST_SEED, FIRST_SEED + CLAIM_RUNS)
    outcomes = simulate_all(seeds, min(2, os.cpu_count() or 1), CLAIMS)
    failures = [f"seed {o.seed} --claims: {o.failure}" for o in outcomes if o.failure]
    assert failures == []


def test_every_schedule_of_leaders_keeps_the_invariants() -> None:
    """Several masters over an etcd that loses answers and ends leases: one leads, and nothing stored is forgotten."""
    seeds = range(FIRST_SEED, FIRST_SEED + LEADER_RUNS)
    outcomes = simulate_all(seeds, min(2, os.cpu_count() or 1), LEADERS)
    failures = [f"seed {o.seed} --leaders: {o.failure}" for o in outcomes if o.failure]
    assert failures == []


@pytest.mark.parametrize(("mode", "seeds"), [(SHELLS, (158,)), (CLAIMS, (81,)), (LEADERS, (241,))])
def test_a_seed_of_threads_is_a_schedule(mode: str, seeds: tuple[int, ...]) -> None:
    """Threads take turns as the seed says, whatever the machine does meanwhile."""
    here = [simulate(seed, mode).digest for seed in seeds]
    assert all(here)
    assert [replay(seed, mode)[1].digest for seed in seeds] == here


def test_a_seed_is_a_schedule() -> None:
    """Tracing changes nothing, and neither does the order in which sets of strings are walked."""
    seeds = (3, 440)
    here = [simulate(seed).digest for seed in seeds]
    assert all(here)
    assert [replay(seed)[1].digest for seed in seeds] == here
    code = f"from tests.simulation.run import simulate; print(*[simulate(s).digest for s in {seeds}])"
    for hash_seed in ("1", "2")[: 1 if RUNS < 1000 else 2]:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.split() == here


def test_other_seeds_are_other_schedules() -> None:
    """The digest tells schedules apart."""
    assert len({simulate(seed).digest for seed in range(1, 21)}) == 20


ALL_PLANTS = PLANTS | FILE_PLANTS | MEMORY_PLANTS | ORDER_PLANTS
# Two seconds and more each: it takes many schedules, or what never ends is simulated to its end.
LONG = {
    *("commits_for_closed_epochs", "ends_with_etcd", "forgets_what_is_owed_at_a_restart", "forgets_what_is_wanted"),
    *("gives_up_a_slow_save", "hears_only_verdicts", "looks_at_all_nodes_for_every_node", "loses_one_node_per_move"),
    *("moves_the_counter_under_a_lock_of_its_own", "never_sees_a_stall", "never_tells_the_ranks"),
    *("reads_before_it_takes", "says_nothing", "starts_a_timer_per_registration", "takes_a_number_for_a_process"),
    *("takes_a_stranger_for_the_master", "takes_its_former_self_for_another", "tells_no_node_to_go"),
    *("waits_for_a_goodbye", "waits_for_quiet_without_end", "signals_whom_it_found_alive_before"),
    *("leaves_a_stopped_master", "leaves_a_master_without_a_claim", "deletes_the_newest_too", "keeps_no_lease"),
    *("never_gives_up_resharding", "forgives_everybody_when_held_up"),
}


def names_of(plants: Mapping[str, Any]) -> list[Any]:
    """The plants' names as parameters."""
    return [pytest.param(name, marks=[pytest.mark.full] if name in LONG else []) for name in plants]


def test_the_long_ones_are_plants() -> None:
    """None of the names is of a plant that is no more."""
    assert set(ALL_PLANTS | SHELL_PLANTS | CLAIM_PLANTS | LEADER_PLANTS) >= LONG


@pytest.mark.parametrize("name", names_of(ALL_PLANTS))
def test_a_planted_bug_is_seen(name: str) -> None:
    """With the bug planted, one of the invariants that it breaks fails within the plant's number of seeds."""
    plant = ALL_PLANTS[name]
    found: set[str] = set()
    seeds = (seed for seed in itertools.count(plant.first) if plant.is_shown_by(plan_of(seed)))
    with planted(plant):
        for seed in itertools.islice(seeds, plant.seeds):
            found.add(simulate(seed).name)
            if found & plant.caught:
                return
    shown = (
        f"{plant.seeds} schedules from {plant.first} on show only {sorted(found - {''})}, not {sorted(plant.caught)}"
    )
    pytest.fail(f"{shown}: start nearer to one that does (Plant.first), or plant the bug where it does harm")


def _is_seen(plant: Plant, mode: str, suiting: Iterator[int]) -> None:
    """Within the plant's number of schedules; and without it they keep the invariants."""
    tried = []
    with planted(plant):
        for seed in itertools.islice(suiting, plant.seeds):
            tried.append((seed, simulate(seed, mode).name))
            if tried[-1][1] in plant.caught:
                break
    assert tried[-1][1] in plant.caught, f"{len(tried)} schedules show only {tried}"
    assert [seed for seed, _ in tried if simulate(seed, mode).failure] == []


@pytest.mark.parametrize("name", names_of(SHELL_PLANTS))
def test_a_bug_planted_in_the_shells_is_seen(name: str) -> None:
    """With the bug an invariant that it breaks fails within its number of seeds; without it all hold."""
    plant = SHELL_PLANTS[name]
    seeds = itertools.count(plant.first)
    _is_seen(plant, SHELLS, (seed for seed in seeds if plant.is_shown_by(plan_of(seed, shells=True))))


@pytest.mark.parametrize("name", names_of(CLAIM_PLANTS))
def test_a_bug_planted_in_embedded_masters_is_seen(name: str) -> None:
    """The same for who may replace whom."""
    plant: Any = CLAIM_PLANTS[name]
    _is_seen(plant, CLAIMS, (seed for seed in itertools.count(plant.first) if plant.is_shown_by(claim_plan_of(seed))))


@pytest.mark.parametrize("name", names_of(LEADER_PLANTS))
def test_a_bug_planted_in_leadership_is_seen(name: str) -> None:
    """The same for several masters."""
    plant: Any = LEADER_PLANTS[name]
    _is_seen(plant, LEADERS, (seed for seed in itertools.count(1) if plant.is_shown_by(leader_plan_of(seed))))
