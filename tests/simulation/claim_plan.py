"""What one seed of the claims' world means: machines, containers, agents, and what happens to them."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from .machines import Computer, Site

if TYPE_CHECKING:
    from .claims import World

# Where an agent may live on a machine: on itself, in a container with processes of its own (one of a pod), with a
# network of its own, with both.
KINDS = ("machine", "pod", "pod", "network", "container", "container")
HAPPENINGS = (
    "kill_master",
    "kill_master",
    "stop_master",
    "pause_master",
    "slow_master",
    "kill_agent",
    "kill_agents",
    "kill_starter",
    "freeze_starter",
    "freeze_agent",
    "freeze_all",
    "freeze_all",
    "leave",
    "join",
    "join",
    "join_at_once",
    "restart_site",
    "reboot",
    "reuse_number",
    "reuse_port",
    "slow_directory",
    "full_directory",
    "lose_token",
    "failing_starts",
)
# Seconds.
FAULT_TIME = 110.0


@dataclass(frozen=True)
class ClaimPlan:
    """Times in seconds."""

    seed: int
    # One per machine: the kinds of its sites.
    machines: tuple[tuple[str, ...], ...]
    one_name: bool
    agents: tuple[tuple[int, float], ...]
    happenings: tuple[tuple[float, str], ...]
    node_timeout: float
    patience: float
    slowest_start: float
    # How late other machines see what was written.
    lag: float
    stopped_holds_store: bool
    # How likely threads are held back, and for how long at most.
    holds: tuple[float, float]
    kind: str = "claims"

    def build(self, world: World) -> None:
        """Machines and agents now, and all the rest in its time."""
        from .claim_faults import calm, happen

        for number, kinds in enumerate(self.machines):
            computer = Computer(number, "host" if self.one_name else f"host-{number}")
            world.computers.append(computer)
            populate(computer, kinds)
        for site, at in self.agents:
            # Not its site of now: until then it may be another one.
            world.clock.after(at, lambda number=site: world.join(world.sites()[number]))
        for at, name in self.happenings:
            world.clock.after(at, happen, world, name)
        world.clock.after(FAULT_TIME, calm, world)


def populate(computer: Computer, kinds: tuple[str, ...]) -> None:
    """The sites of a machine that has just come up."""
    pids, net = computer.namespace("pid"), computer.namespace("net")
    computer.sites = [
        Site(
            kind,
            computer,
            computer.namespace("pid") if kind in ("pod", "container") else pids,
            computer.namespace("net") if kind in ("network", "container") else net,
        )
        for kind in kinds
    ]


def claim_plan_of(seed: int) -> ClaimPlan:
    """Everything that can be known of a schedule before it runs."""
    random = Random(f"claim plan {seed}")
    machines = tuple(
        tuple(random.choice(KINDS) for _ in range(random.choice((1, 2, 2, 3))))
        for _ in range(random.choice((1, 1, 1, 2, 3)))
    )
    sites = sum(map(len, machines))
    burst = random.random() < 0.5
    agents = tuple(
        (random.randrange(sites), 0.0 if burst else random.uniform(0.0, 60.0)) for _ in range(random.randint(2, 5))
    )
    count = random.randint(0, 6)
    happenings = sorted((random.uniform(8.0, FAULT_TIME - 5.0), random.choice(HAPPENINGS)) for _ in range(count))
    return ClaimPlan(
        seed=seed,
        machines=machines,
        one_name=random.random() < 0.6,
        agents=agents,
        happenings=tuple(happenings),
        node_timeout=random.choice((2.0, 10.0, 15.0)),
        patience=random.choice((10.0, 60.0)),
        slowest_start=random.choice((2.0, 2.0, 8.0)),
        lag=random.choice((0.0, 0.0, 2.5)) if len(machines) > 1 else 0.0,
        stopped_holds_store=random.random() < 0.5,
        holds=random.choice(((0.0, 0.0), (0.0, 0.0), (0.02, 0.5))),
    )
