"""What many nodes cost the master: forming, heartbeats, losses, a restart, at 10 to 2,000 nodes.

A real `dlrover-master` with a SQLite store, as a user starts it, and real gRPC clients, one channel and stream for each
node (`benchmarks.swarm_node`). The clients are three processes on the same cores: one node, half of the nodes, and the
rest. So a loss is real: SIGKILL closes all connections of a process at once; SIGSTOP leaves them open, but nothing
answers, not even pings. The nodes have no workers: the result is the cost of the master, and of what it makes a change
wait for.

- *forming*: all nodes start at once; from the last node's Join to the last node's directive that names the whole world.
- *steady*: nothing but heartbeats.
- *one silent*, *one closed*, *half silent*, *half closed*: from the event to the first survivor that is told
  ("noticed"), and from there to the last survivor that is told of the next world ("formed"). After each, the lost nodes
  come back (*... back*): from the last newcomer's Join to the world of all.
- *half closed, master killed*: both at the same moment; counted from when the next master serves, because agents must
  first come back to it.
- *... by order*: from the order until the master says that it is carried out: a checkpoint is committed; a world
  without the drained node, or of half of the nodes, trains; all have gone. Then all come back.
- *saves to memory*: every 2 s all nodes save to memory, and each tells of its part and of a buddy's.
- *one closed: … from memory*: the same as *one closed*, and each survivor gathers all parts, or those in which its
  ranks have ranges; that takes no time here. *Back*: the drain goes to memory, too.
- *one fails*: the ranks of one node fail, and all nodes stay: each gathers all parts, or those of its place only.
- *progress*: 50 nodes report ten steps a second, one node calls every 50 ms and commits a checkpoint every 2 s.

Nodes that fall silent together are not found out together, because each had spoken at another moment. So with half of
them "noticed" is the first, and the limit is on the sum.

CPU is what the master's process used (user and system) in the scene, from the event to the formed world. Other tables
show how long calls waited; how each cost grows with the number of nodes N (the exponent of a fit of log CPU over log N:
1 is linear), with the longest directives; and what a commit costs a master that keeps all checkpoints.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.cluster import PATIENCE, Cluster, SceneFailed, World
from benchmarks.orders import Person
from benchmarks.results import report
from benchmarks.swarm_memory import ALL, PLACE, RANGES
from dalsegno.master.brain.listening import RECONNECT_SECONDS
from dalsegno.protos import control_pb2 as pb
from dalsegno.protos.contract import JobSettings
from examples.demo import end_by_signals

# Seconds: from the last Join to the world, from a noticed loss to the next world, and what calls and processes may add
# to the time in which a loss must be noticed.
FORMED_WITHIN, NEXT_WITHIN, SLACK = 6.0, 3.0, 1.0
# Seconds after which a closed connection counts as a loss.
CLOSED_GRACE_SECONDS = 1.0
# Percent of one core that steady heartbeats of so many nodes may take.
STEADY_PERCENT, STEADY_NODES = 15.0, 1000
REPORTERS, REPORT_EVERY, REPORT_SECONDS = 50, 0.1, 10.0
# Seconds between two saves of all nodes to memory.
SAVE_EVERY = 2.0
# Sizes of the record at which a commit's cost is measured, over how many commits, and the most seconds of all of them.
MARKS, LAST_COMMITS, RECORD_SECONDS = (100, 1_000, 3_000, 10_000), 50, 600.0
RECORD_NODES = 10
ROLES = ["one", "half", "stay"]

Row = dict[str, Any]


@dataclass
class Options:
    """What to run; durations in seconds."""

    nodes: list[int]
    steady: float
    node_timeout: float
    commits: int
    # The only one of the scenes; "": all of them.
    scene: str = ""


@dataclass
class Results:
    """The measurements; each list holds the lines of one table."""

    rows: list[Row] = field(default_factory=list)
    calls: list[Row] = field(default_factory=list)
    # By kind of directive and number of nodes: the longest, in bytes.
    sizes: dict[str, dict[int, int]] = field(default_factory=dict)


@dataclass
class Scenes:
    """A cluster of `nodes` nodes, and one method for each scene; each leaves a whole world behind."""

    nodes: int
    options: Options
    cluster: Cluster
    results: Results
    epoch: int = 0

    @property
    def sizes(self) -> dict[str, int]:
        """Number of nodes by role."""
        return dict(zip(ROLES, counts(self.nodes), strict=True))

    def form(self) -> None:
        """Starts all nodes at once."""
        with self._row("forming") as row:
            for role, count in self.sizes.items():
                self.cluster.start(role, count)
            world = self.cluster.world(ROLES)
            row |= formed(world)
            self.epoch = world.epoch

    def steady(self) -> None:
        """Only heartbeats."""
        for role in ROLES:
            self._told(self.cluster.ask(role))
        with self._row("steady"):
            time.sleep(self.options.steady)
        for role in ROLES:
            self._calls("steady", role, self.cluster.ask(role))

    def one_silent(self) -> None:
        self._lose("one", silent=True)

    def one_closed(self) -> None:
        self._lose("one", silent=False)

    def half_closed(self) -> None:
        self._lose("half", silent=False)

    def half_silent(self) -> None:
        self._lose("half", silent=True)

    def restart(self) -> None:
        """Half of the nodes and the master die at the same moment."""
        with self._row("half closed, master killed") as row:
            # Only the next master tells the survivors.
            self.cluster.master.close()
            self.cluster.kill("half")
            self.cluster.start_master()
            row["CPU before"] = 0.0
            self._next_world(row, "half", time.monotonic(), self.options.node_timeout + RECONNECT_SECONDS)
        self._back("half", "half closed, master killed", silent=False)

    def memory(self) -> None:
        """All nodes save to memory, and a lost one, and one that comes, have parts gathered from there.

        Then the ranks of one node fail, and all nodes stay.
        """
        for loads in (ALL, RANGES):
            self._saves(loads)
            self._lose("one", silent=False, how=f": {loads} from memory")
        for loads in (ALL, PLACE):
            self._saves(loads)
            with self._row(f"one fails: {loads} from memory") as row:
                event = time.monotonic()
                self.cluster.order("one", "fails")
                world = self.cluster.world(ROLES, since=event)
                row |= {"formed (s)": world.formed - event, "late": world.formed - event > NEXT_WITHIN}
                self.epoch = world.epoch

    def _saves(self, loads: str) -> None:
        with self._row(f"saves to memory: {loads} are loaded"):
            options = {"every": SAVE_EVERY, "seconds": REPORT_SECONDS, "loads": loads}
            asked = [self.cluster.order(role, "saves", **options) for role in ROLES]
            for one in asked:
                self._told(self.cluster.answers(one, REPORT_SECONDS))

    def progress(self) -> None:
        """Many nodes report steps, and an ordinary one calls all the time."""
        reporters = min(REPORTERS, counts(self.nodes)[1])
        with self._row("progress"):
            asked = self.cluster.order("half", "progress", nodes=reporters, every=REPORT_EVERY, seconds=REPORT_SECONDS)
            probe = self.cluster.ask("one", "probe", seconds=REPORT_SECONDS)
            told = self.cluster.answers(asked, REPORT_SECONDS)
        self._calls(f"progress, the {reporters} that report", "half", told)
        self._calls("progress, a good agent", "one", probe)

    def ordered(self) -> None:
        """Somebody saves, drains one node, makes the job smaller, and stops it; after each the world is whole again."""
        few = max(self.nodes // 2, self.cluster.settings.min_nodes)
        with Person(self.cluster.address) as person:
            with self._row("saved by order") as row:
                row["formed (s)"] = person.saves()
            with self._row("one drained by order") as row:
                row["formed (s)"] = person.drains(self._whole)
            with self._row("scaled by order") as row:
                row["formed (s)"] = person.scales(few, self.nodes, self._whole)
            with self._row("stopped by order") as row:
                row["formed (s)"] = person.stops(self._whole)

    def _whole(self, since: float) -> None:
        """Waits until all nodes are one world again."""
        self.epoch = self.cluster.world(ROLES, since=since).epoch

    # ---- parts of them ----------------------------------------------------------------------------------------------

    def _lose(self, role: str, *, silent: bool, how: str = "") -> None:
        scene = f"{role} {'silent' if silent else 'closed'}{how}"
        with self._row(scene) as row:
            event = time.monotonic()
            (self.cluster.silence if silent else self.cluster.kill)(role)
            self._next_world(row, role, event, self.options.node_timeout if silent else CLOSED_GRACE_SECONDS)
        self._back(role, scene, silent=silent)

    def _next_world(self, row: Row, lost: str, event: float, allowed: float) -> None:
        others = [role for role in ROLES if role != lost]
        noticed = self.cluster.noticed(self.epoch, others, allowed + PATIENCE)
        row |= {"noticed (s)": noticed - event, "late": noticed - event > allowed + SLACK}
        world = self.cluster.world(others, since=event)
        begun = noticed if self.sizes[lost] == 1 else max(noticed, event + allowed + SLACK)
        row |= {"formed (s)": world.formed - noticed, "late": row["late"] or world.formed - begun > NEXT_WITHIN}
        self.epoch = world.epoch

    def _back(self, role: str, scene: str, *, silent: bool) -> None:
        """The lost nodes come back, as new ones if their process was killed."""
        with self._row(f"{scene}, back") as row:
            event = time.monotonic()
            if silent:
                self.cluster.wake(role)
            else:
                self.cluster.start(role, self.sizes[role])
            world = self.cluster.world(ROLES, since=event)
            row |= formed(world)
            self.epoch = world.epoch

    @contextlib.contextmanager
    def _row(self, scene: str) -> Iterator[Row]:
        """A row with what the scene cost; if the scene fails, the row stays and says what went wrong."""
        row: Row = {"nodes": self.nodes, "scene": scene, "noticed (s)": None, "formed (s)": None}
        began, before, clients = time.monotonic(), self.cluster.master.cpu(), self._clients()
        try:
            yield row
            if row["formed (s)"] is None and self.cluster.ended_at(self.epoch, ROLES) is not None:
                raise SceneFailed("the world ended, although nothing happened")
        except SceneFailed as error:
            row["failed"] = str(error)
            raise
        finally:
            seconds = time.monotonic() - began
            cpu = self.cluster.master.cpu() - row.pop("CPU before", before)
            row |= {"seconds": seconds, "master CPU (s)": cpu, "master (%)": 100 * cpu / seconds}
            row |= {"clients CPU (s)": max(0.0, self._clients() - clients), "master MiB": self.cluster.master.memory()}
            self.results.rows.append(judged(row))
            print(shown(row), flush=True)

    def _clients(self) -> float:
        return sum(swarm.cpu() for swarm in self.cluster.swarms.values())

    def _told(self, told: Row) -> None:
        """Notes the lengths of the directives that a swarm got."""
        for order, size in told["sizes"].items():
            sizes = self.results.sizes.setdefault(order, {})
            sizes[self.nodes] = max(size, sizes.get(self.nodes, 0))

    def _calls(self, scene: str, role: str, told: Row) -> None:
        """Notes how long a swarm's calls waited."""
        self._told(told)
        for method, waits in told["waits"].items():
            failed = sum(count for what, count in told["failures"].items() if what.startswith(f"{method} "))
            line = {"nodes": self.nodes, "scene": scene, "swarm": role, "call": method, "answered": waits["count"]}
            line |= {f"{key} (ms)": 1000 * waits[key] for key in ("p50", "p99", "max")}
            self.results.calls.append(line | {"failed": failed})


def counts(nodes: int) -> tuple[int, int, int]:
    """Number of nodes by role: one, half of them, the rest."""
    half = nodes // 2
    return 1, half, nodes - half - 1


def formed(world: World) -> Row:
    """The row of a world that waited for its last node."""
    seconds = world.formed - world.joined
    return {"formed (s)": seconds, "late": seconds > FORMED_WITHIN}


def judged(row: Row) -> Row:
    """Says in ``kept`` whether the scene kept its limits, and in ``remark`` what went wrong."""
    late = row.pop("late", None)
    if row["scene"] == "steady" and row["nodes"] == STEADY_NODES:
        late = row["master (%)"] > STEADY_PERCENT
    failed = row.pop("failed", "")
    row["kept"] = "no" if failed or late else "" if late is None else "yes"
    row["remark"] = failed
    return row


def shown(row: Row) -> str:
    """One line for the console."""
    parts = [f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()]
    return f"  {', '.join(parts)}"


def settings(nodes: int, options: Options, **changes: Any) -> pb.Settings:
    """The agents' own settings, except for the sizes, and with a growth whenever a node comes."""
    values = {"min_nodes": max(1, nodes // 4), "max_nodes": nodes, "grow_interval": 0.0}
    return pb.Settings(**(asdict(JobSettings()) | values | {"node_timeout": options.node_timeout} | changes))


def measure(results: Results, nodes: int, options: Options) -> None:
    """Runs all scenes; after a failed one the next begins with a new cluster."""
    plain: list[Callable[[Scenes], None]] = [
        Scenes.steady,
        Scenes.one_silent,
        Scenes.one_closed,
        Scenes.half_closed,
        Scenes.half_silent,
        Scenes.restart,
        Scenes.progress,
        Scenes.ordered,
    ]
    for replicas, waiting in ((0, plain), (1, [Scenes.memory])):
        waiting = [scene for scene in waiting if options.scene in ("", scene.__name__)]
        while waiting:
            with Cluster(settings(nodes, options, memory_replicas=replicas)) as cluster:
                scenes = Scenes(nodes, options, cluster, results)
                try:
                    scenes.form()
                except SceneFailed:
                    results.rows[-1]["remark"] += f"; {len(waiting)} scenes left out"
                    break
                with contextlib.suppress(SceneFailed):
                    while waiting:
                        waiting.pop(0)(scenes)


def record(options: Options) -> list[Row]:
    """How the cost of a commit and of a heartbeat grows with the record, if all checkpoints are kept."""
    rows: list[Row] = []
    end = time.monotonic() + RECORD_SECONDS
    with Cluster(settings(RECORD_NODES, options, keep_checkpoints=0)) as cluster:
        Scenes(RECORD_NODES, options, cluster, Results()).form()
        done = step = 0
        for mark in [mark for mark in MARKS if mark < options.commits] + [options.commits]:
            # Side by side they share transactions, which fills the record sooner; those that are measured come one by
            # one.
            count, step, *_ = _calls(cluster, "half", step, mark - LAST_COMMITS - done, end)
            done += count
            count, step, cpu, took = _calls(cluster, "one", step, mark - done, end)
            done += count
            _, _, beat, _ = _calls(cluster, "one", None, LAST_COMMITS, end)
            if not count:
                break
            size = sum(path.stat().st_size for path in cluster.folder.glob("master.sqlite*")) / 1024
            rows.append({"checkpoints": done, "master's CPU for a commit (ms)": cpu, "a commit takes (ms)": took})
            rows[-1] |= {"for a heartbeat (ms)": beat, "store (KiB)": size, "master MiB": cluster.master.memory()}
            print(shown(rows[-1]), flush=True)
        if not rows:
            return [{"checkpoints": done, "remark": f"no more within {RECORD_SECONDS:.0f} s"}]
        cluster.master.close()
        began = time.monotonic()
        cluster.start_master()
        rows[-1]["restart (s)"] = time.monotonic() - began
    return rows


def _calls(cluster: Cluster, role: str, step: int | None, count: int, end: float) -> tuple[int, int, float, float]:
    """Makes the nodes of a role commit steps above `step`, or send heartbeats (None).

    Returns how many there were, the last step, and milliseconds for each: of the master's CPU, and altogether.
    """
    left = end - time.monotonic()
    if count <= 0 or left <= 0:
        return 0, step or 0, 0.0, 0.0
    before, began = cluster.master.cpu(), time.monotonic()
    told = cluster.ask(role, "calls", commits=step is not None, count=count, seconds=left, above=step or 0)
    done = int(told["waits"].get("Heartbeat" if step is None else "CommitCheckpoint", {}).get("count", 0))
    each = 1000 / max(1, done)
    return done, told["step"], each * (cluster.master.cpu() - before), each * (time.monotonic() - began)


def growth(results: Results) -> list[Row]:
    """For each scene the exponent of the master's CPU time over the nodes; and the lengths of directives."""
    costs: dict[str, dict[int, float]] = {}
    for row in results.rows:
        if not row["remark"]:
            # At least a clock tick, because 0 has no logarithm.
            costs.setdefault(row["scene"], {})[row["nodes"]] = max(row["master CPU (s)"], 0.01)
    found: list[Row] = []
    for scene, points in costs.items():
        if len(points) > 1:
            line: Row = {"what": f"{scene}, master's CPU (s)", "grows as N^": exponent(points)}
            found.append(line | {f"N={nodes:,}": cpu for nodes, cpu in points.items()})
    for order, sizes in sorted(results.sizes.items()):
        line = {"what": f"longest directive `{order}` (bytes)"}
        found.append(line | {f"N={nodes:,}": size for nodes, size in sizes.items()})
    return found


def exponent(points: dict[int, float]) -> float:
    """The x of cost = c * N^x, by least squares of the logarithms: 1 is linear."""
    return statistics.linear_regression([math.log(n) for n in points], [math.log(y) for y in points.values()]).slope


def main(arguments: Sequence[str] = ()) -> int:
    """Prints tables and writes their JSON; returns 0 if every scene kept its limits."""
    flags = argparse.ArgumentParser(prog="python -m benchmarks rendezvous", description=__doc__.partition("\n")[0])
    flags.add_argument("--nodes", default="10,100,1000,2000", help="how many, with commas (%(default)s)")
    flags.add_argument("--steady", type=float, default=60.0, help="seconds of nothing but heartbeats (%(default)s)")
    flags.add_argument("--node-timeout", type=float, default=JobSettings().node_timeout)
    flags.add_argument("--commits", type=int, default=MARKS[-1], help="of the longest record; 0: none (%(default)s)")
    flags.add_argument("--scene", default="", help="only this one: steady, memory, restart, … (default: all)")
    given = flags.parse_args(arguments)
    sizes = [int(n) for n in given.nodes.split(",")]
    options = Options(sizes, given.steady, given.node_timeout, given.commits, given.scene)
    if min(options.nodes) < len(ROLES) or 0 < options.commits < 2 * LAST_COMMITS:
        flags.error(f"at least {len(ROLES)} nodes and {2 * LAST_COMMITS} commits")
    # Ended by a signal, it still ends the processes that it has started, even stopped ones.
    end_by_signals()
    results = Results()
    for nodes in options.nodes:
        measure(results, nodes, options)
    told = {"steady_s": options.steady, "node_timeout_s": options.node_timeout}
    report("rendezvous", results.rows, title="One master and N nodes on the same cores", settings=told)
    if results.calls:
        report("rendezvous_calls", results.calls, title="How long calls wait", settings=told)
    if grown := growth(results):
        report("rendezvous_growth", grown, title="How it grows with the number of nodes", settings=told)
    if options.commits:
        title = f"A record of many checkpoints (--keep-checkpoints=0), {RECORD_NODES} nodes"
        report("rendezvous_record", record(options), title=title, settings=told)
    return int(any(row["kept"] == "no" for row in results.rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
