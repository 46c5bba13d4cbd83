"""What one seed means: the job, its size and speed, and the list of things that will happen to it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from dalsegno.master.brain.state import LEAST_NODE_TIMEOUT_SECONDS
from dalsegno.protos import control_pb2

from .memory import memory_of
from .orders import orders_of
from .parts import parts_of
from .publishing import publishing_of
from .refusals import refusals_of
from .shapes import shapes_of
from .syncs import sync_of

HOSTS = ("host-a", "host-b", "host-c", "host-d")

PLANNED = ("join", "join", "leave", "leave", "all_leave", "scale")
CRASHES = (
    "kill_node",
    "kill_node",
    "kill_agent",
    "lose_host",
    "crash_worker",
    "crash_worker",
    "kill_newcomer",
    "flapping_node",
    "hung_worker",
    "impatient_leave",
    "failing_start",
    "hung_end",
)
NETWORK = ("cut_closed", "cut_silent", "freeze_agent", "freeze_node", "cut_all")
MASTER = ("crash_master", "crash_handled", "crash_saved", "pause_master", "leave_while_away")
DAMAGE = ("damage_newest", "damage_form", "damage_source")
DISK = (
    "disk_full",
    "little_room",
    "little_room",
    *DAMAGE,
    "blind_host",
    "lagging_host",
    "lagging_host",
    "kill_converter",
    "no_conversion",
    "no_conversion",
    "weak_reader",
    "no_verdict",
    "no_verdict",
)
LOSS = ("lose_store",)
# For those whose shells run, whatever their kind.
SHELLS = (
    "slow_store",
    "failing_store",
    "blocked_console",
    "blocked_console",
    "several_deaths",
    "several_leave",
    "restart_named",
    "restart_named",
    "stuck_node",
)
# How many of the schedules have one, and what happens to it.
CROWDED = 0.01
CROWD = ("several_deaths", "several_deaths", "several_leave", "crash_master", "kill_node", "crash_worker", "join")

MENUS: dict[str, tuple[str, ...]] = {
    "planned": PLANNED,
    "crashes": PLANNED + CRASHES,
    "network": (*PLANNED, *CRASHES, *NETWORK, "late_commit"),
    "master": PLANNED + MASTER,
    "masters": PLANNED + CRASHES + MASTER,
    "store": (*PLANNED, "kill_node", "crash_worker", "crash_master", *LOSS),
    "disk": (*PLANNED, "kill_node", "crash_worker", *DISK),
    "convert": (*PLANNED, "kill_node", "kill_converter", "no_conversion", "hung_converter", *DAMAGE),
    "budget": ("join", "crash_worker", "crash_worker", "failing_start", "weak_reader"),
    "away": ("join", "join", "leave", "all_leave", "master_unreachable", "master_unreachable", "long_pause_of_master"),
    "late": ("join", "leave", "late_commit", "late_commit", "crash_worker", "freeze_agent", "freeze_node"),
    "unheard": ("join", "join", "join", "leave", "unheard_failure", "unheard_failure", "crash_master"),
    "all": PLANNED + CRASHES + NETWORK + MASTER + DISK,
}


# What a master could not tell from a silent script at work.
UNSEEN = frozenset({"hung_worker", "hung_end"})


@dataclass
class Plan:
    """Durations in seconds of simulated time."""

    seed: int
    kind: str
    settings: control_pb2.Settings
    # What every other agent was told, now and then by a person who did not look closely.
    other_settings: control_pb2.Settings
    steps: int
    save_every: int
    step_time: float
    save_time: float
    load_time: float
    convert_time: float
    nproc: int
    any_world_size: bool
    embedded: bool
    outage_timeout: float
    warm_factor: float
    start_nodes: int
    named: bool
    loss: float
    duplication: float
    slow: float
    fault_time: float
    happenings: list[tuple[float, str]]
    # A node without the directory comes while the first world forms.
    blind_start: bool
    # Files are so large, or the disk is so slow, that each takes minutes to convert and all of them longer to verify.
    slow_disk: bool
    # Nodes have different numbers of workers.
    mixed: bool
    # The script has no session: nobody hears of its steps, it saves nothing that counts, and cannot be drained.
    silent: bool
    # Ranks of another world can load what was saved as it lies; or so it says, and they all fail with it.
    reshards: bool
    cannot_reshard: bool
    # Saves are written and sealed while steps are made, some of them several steps late.
    background: bool
    # How long the disk takes to sync a checkpoint, without a byte that moves.
    sync_time: float = 0.0
    # The product's shells run, too: driver, watchers, service, client, mailbox, effects, console, and the loop.
    shells: bool = False
    # How many times slower than the reference the master's processor is.
    slowness: float = 1.0
    # How likely a thread of an agent is held back whenever it may run, and for how long at most (seconds).
    holds: tuple[float, float] = (0.0, 0.0)
    connect_timeout: float = 60.0
    # Something holds up the master for over a second, again and again, up to so many seconds apart; 0: nothing does.
    held_up: float = 0.0
    # Newcomers that crash in a loop.
    loopers: int = 0
    # So many nodes; 0: a handful.
    crowd: int = 0
    # Steps between two checkpoints in memory; 0: there are none.
    memory_every: int = 0
    # No agent reaches another one's memory.
    walled: bool = False
    # The master dies when a leaver is gone, and with it what that had said.
    forgetful: bool = False
    # The ranks finish behind a last save that is in memory alone.
    hasty: bool = False
    # Ranks load from memory what lies in their node's place; or so they say, and they fail without the rest.
    by_place: bool = False
    reads_all: bool = False
    # How long what is cut among ranks is; None: they do not say what a world of another size loads.
    lengths: tuple[int, ...] | None = None
    # Parts take long to other nodes.
    slow_replicas: bool = False
    # Of the nodes that a crash leaves, so many save what they hold; 0.0: none, as their state is not replicated.
    survivors: float = 0.0
    # Numbers of workers with which the script fails as soon as it has loaded.
    bad_sizes: frozenset[int] = frozenset()


def plan_of(seed: int, shells: bool = False) -> Plan:
    """The plan of one seed; the same seed gives the same plan. With `shells` for a run of the product's shells."""
    plan = _plan_of(seed)
    if shells:
        _shells_of(plan)
    return plan


def _shells_of(plan: Plan) -> None:
    random = Random(f"shells {plan.seed}")
    plan.shells = True
    plan.survivors = 0.0
    plan.slowness = random.choice((1.0, 1.0, 1.0, 4.0))
    plan.holds = random.choice(((0.0, 0.0), (0.0, 0.0), (0.01, 1.0), (0.05, 0.3)))
    plan.connect_timeout = random.choice((8.0, 60.0))
    plan.held_up = random.choice((0.0,) * 6 + (4.0, 10.0))
    plan.loopers = random.choice((0,) * 9 + (1,))
    plan.named = plan.named or random.random() < 0.2
    for _ in range(random.randint(0, 3)):
        plan.happenings.append((random.uniform(0.0, plan.fault_time), random.choice(SHELLS)))
    if random.random() < CROWDED:
        _crowd_of(plan, random)
    plan.happenings.sort()


def _crowd_of(plan: Plan, random: Random) -> None:
    """Many nodes, few steps: who is lost, many at once, is what counts."""
    plan.crowd = plan.start_nodes = random.choice((60, 100, 200))
    for settings in (plan.settings, plan.other_settings):
        settings.min_nodes, settings.max_nodes, settings.node_unit = random.choice((1, 8)), plan.crowd, 1
    plan.other_settings = plan.settings
    plan.kind = "crowd"
    plan.steps, plan.step_time, plan.nproc = random.randint(12, 20), 1.0, 1
    plan.loss = plan.duplication = plan.slow = 0.0
    plan.mixed = plan.slow_disk = plan.blind_start = plan.silent = False
    plan.loopers, plan.slowness, plan.sync_time = 0, 1.0, 0.0
    plan.fault_time = random.uniform(10.0, 20.0)
    plan.happenings = [
        (random.uniform(4.0, plan.fault_time), random.choice(CROWD)) for _ in range(random.randint(1, 3))
    ]


def _plan_of(seed: int) -> Plan:
    random = Random(f"plan {seed}")
    kind = random.choice(list(MENUS))
    maximum = random.choice((2, 3, 4, 4))
    minimum = random.choice((1, 1, 1, 2))
    unit = 2 if maximum == 4 and random.random() < 0.1 else 1
    wild = kind in ("network", "all")
    settings = control_pb2.Settings(
        min_nodes=minimum,
        max_nodes=maximum,
        node_unit=unit,
        node_timeout=random.choice((LEAST_NODE_TIMEOUT_SECONDS, 6.0, 15.0)),
        drain_timeout=8.0,
        join_timeout=random.choice((3.0, 5.0, 8.0)),
        stall_timeout=40.0,
        grow_interval=random.choice((0.0, 0.0, -1.0, 5.0)),
        grow_wait=20.0,
        wait_for_nodes=-1.0,
        quiet_time=1.0,
        max_restarts=random.choice((0, 1, 3)) if kind == "budget" else 1000,
        universal_checkpoint=True,
        keep_checkpoints=random.choice((0, 1, 2, 3)),
    )
    fault_time = random.uniform(8.0, 80.0 if kind == "away" else 35.0)
    count = random.randint(2, 9)
    # Many of them early, when the first worlds form and nothing is saved yet.
    happenings = [
        (random.uniform(0.0, random.choice((4.0, fault_time, fault_time))), random.choice(MENUS[kind]))
        for _ in range(count)
    ]
    if kind == "store":
        happenings.append((random.uniform(3.0, fault_time), "lose_store"))
    plan = Plan(
        seed=seed,
        kind=kind,
        settings=settings,
        other_settings=otherwise(settings) if Random(f"others {seed}").random() < 0.3 else settings,
        steps=random.randint(12, 45),
        save_every=random.choice((3, 5, 8)),
        step_time=random.choice((0.3, 0.6, 1.0)),
        save_time=random.choice((0.05, 0.3, 1.0)),
        load_time=random.choice((0.05, 0.4)),
        convert_time=random.choice((0.2, 1.0, 3.0)),
        nproc=random.choice((1, 1, 2)),
        any_world_size=random.random() < 0.25,
        embedded=random.random() < 0.5,
        outage_timeout=random.choice((6.0, 30.0)),
        warm_factor=random.choice((0.5, 1.0, 3.0)),
        start_nodes=random.randint(minimum, maximum),
        named=random.random() < 0.3,
        loss=random.choice((0.0, 0.01, 0.1)) if wild else 0.0,
        duplication=random.choice((0.0, 0.02, 0.1)) if wild else 0.0,
        slow=random.choice((0.0, 0.02, 0.2)) if wild else 0.0,
        fault_time=fault_time,
        happenings=sorted(happenings),
        blind_start=kind in ("disk", "all") and random.random() < 0.2,
        silent=kind in ("planned", "crashes", "network") and Random(f"silent {seed}").random() < 0.1,
        mixed=Random(f"mixed {seed}").random() < 0.15,
        slow_disk=kind in ("disk", "convert") and random.random() < 0.1,
        reshards=Random(f"reshards {seed}").random() < 0.35,
        cannot_reshard=Random(f"cannot reshard {seed}").random() < 0.25,
        background=Random(f"background {seed}").random() < 0.3,
        sync_time=sync_of(seed, kind == "planned"),
    )
    if plan.background and kind in ("crashes", "masters", "late", "all"):
        happenings.append((random.uniform(3.0, fault_time), "late_seal"))
        plan.happenings = sorted(happenings)
    apart = Random(f"a new master apart {seed}")
    if kind == "away" and apart.random() < 0.3:
        plan.happenings = sorted([*plan.happenings, (apart.uniform(3.0, 10.0), "new_master_unreachable")])
    if not plan.silent and all(name != "scale" for _, name in plan.happenings):
        plan.happenings = sorted([*plan.happenings, *refusals_of(seed, fault_time, alone=minimum == unit == 1)])
    if plan.reshards:
        # Before the world opens, beside it, or nowhere.
        settings.universal_gate = plan.other_settings.universal_gate = seed % 5 == 0
        wanted = seed % 5 < 3 or kind == "convert"
        settings.universal_checkpoint = plan.other_settings.universal_checkpoint = wanted
    orders_of(plan)
    publishing_of(plan)
    memory_of(plan)
    parts_of(plan)
    shapes_of(plan)
    if plan.silent:
        # Long enough for one world to be presented, also where only half of the time is listened to.
        plan.steps, plan.step_time = 70, 1.0
        plan.happenings = [(at, name) for at, name in plan.happenings if name not in UNSEEN]
    return plan


def otherwise(settings: control_pb2.Settings) -> control_pb2.Settings:
    """The same with another --nnodes."""
    other = control_pb2.Settings()
    other.CopyFrom(settings)
    if settings.min_nodes > 1:
        other.min_nodes -= 1
    else:
        other.max_nodes = max(settings.node_unit, settings.max_nodes - 1)
    return other
