"""A job of real processes on this machine, for tests of what happens when its nodes come and go.

`Cluster` starts agents as terminals would, each in a session of its own and named, so that one machine has several
nodes; kills or signals whole nodes, agents, workers or the embedded master; waits for what they say and do; and holds
the kept history against the undisturbed run's. Every wait has a deadline and fails with the consoles' last lines.
"""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc

from dalsegno.elastic.checkpoint import SHARDED, Manifest, inventory
from dalsegno.protos import control_pb2
from examples.history import EpochSpan, KeptStep, StepLine, StepLogReader, compare, epoch_spans, kept_history

from ..forks import forked
from ..forks.forked import PRELOADED, Forked, fork_script
from ..forks.forked_agents import DLROVER_RUN, start_agent
from ..hosts.namespaces import Inside
from . import local_processes as processes
from .master_process import asked_status

ROOT = Path(__file__).resolve().parents[3]
DDP = ROOT / "examples" / "ddp.py"
TRAIN = ROOT / "examples" / "train.py"
HF = ROOT / "examples" / "hf_trainer.py"
HOOKED = Path(__file__).with_name("hooked.py")
# Relative difference of the losses that no one may see.
LIMIT = 1e-5
LEFT, LEFT_UNSAVED = 75, 76
# Seconds. Generous: other tests share the cores.
PATIENCE = 120.0
LOOK_EVERY = 0.05
CLUSTER_MARK, NODE_MARK = "DALSEGNO_TEST_CLUSTER", "DALSEGNO_TEST_NODE"
MEMBER_ROLES = ("member", "leaving")

T = TypeVar("T")


@dataclass(frozen=True)
class Training:
    """What is trained: the script and its flags, the same for the disturbed and the undisturbed run."""

    script: Path = DDP
    steps: int = 100
    save_every: int = 10
    global_batch_size: int = 16
    seed: int = 0
    extra: tuple[str, ...] = ()
    # The undisturbed run is one node's, with agent and master: elsewhere the script is not elastic.
    needs_agent: bool = False
    # What processes that it is forked from have imported.
    preloaded: str = PRELOADED

    def words(self, *, hooked: bool) -> list[str]:
        """What is run, without its flags."""
        return [str(HOOKED), self.script.name] if hooked else [str(self.script)]

    def environment(self, step_log: Path) -> dict[str, str]:
        """What it is told otherwise than by flags."""
        return {}

    def pace(self, step_time: float) -> list[str]:
        """How it is told to make slow steps."""
        return [f"--step-time={step_time}"]

    def flags(self, step_log: Path) -> list[str]:
        return [
            f"--steps={self.steps}",
            f"--save-every={self.save_every}",
            f"--global-batch-size={self.global_batch_size}",
            f"--seed={self.seed}",
            f"--step-log={step_log}",
            *(("--layers=1",) if self.script == TRAIN else ()),
            *self.extra,
        ]


class Undisturbed:
    """Undisturbed runs: the plain script alone, without agent and master.

    Each is made once by all pytest processes that were given the same directory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[Training, dict[int, KeptStep]] = {}

    def place(self, training: Training) -> Path:
        """The directory that an undisturbed run was made in."""
        place = self._directory / hashlib.sha256(repr(training).encode()).hexdigest()[:16]
        with open(f"{place}.lock", "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (place / "made").exists():
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
                self._make(training, place)
                (place / "made").touch()
        return place

    def history(self, training: Training) -> dict[int, KeptStep]:
        """The kept history of an undisturbed run."""
        if training not in self._known:
            self._known[training] = kept_history(StepLogReader(self.place(training) / "steps").poll())
        return self._known[training]

    @staticmethod
    def _make(training: Training, place: Path) -> None:
        step_log = place / "steps"
        directory, command = f"--checkpoint-dir={place / 'checkpoints'}", training.words(hooked=False)
        command += training.flags(step_log)
        environment, console = {**os.environ, **training.environment(step_log)}, place / "console"
        if training.needs_agent:
            line = [DLROVER_RUN, "--nnodes=1", directory, *command]
            run = start_agent(line, environment, console, place, executed=False, preloaded=training.preloaded)
        else:
            run = fork_script([*command, directory], environment, console, place)
        code = run.wait(2 * PATIENCE)
        assert code == 0, console.read_text(encoding="utf-8", errors="replace")[-6000:]


@dataclass
class Node:
    """One agent. `expected`: the exit code that its part in the test ends with; None: it is not to end yet."""

    name: str
    number: int
    process: subprocess.Popen[bytes] | Forked | Inside
    console: Path
    mark: str
    expected: int | None = 0

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def text(self) -> str:
        """All that it and its workers wrote so far."""
        return self.console.read_text(encoding="utf-8", errors="replace")

    def said(self) -> list[str]:
        """What the agent itself said, line by line, without its name."""
        head = "dlrover-run: "
        return [line.removeprefix(head) for line in self.text().splitlines() if line.startswith(head)]


@dataclass(frozen=True)
class Change:
    """An epoch's line: `epoch 3: c joined, 4 nodes, resumed at step 120 (universal), paused 1.9 s, lost 0 steps`."""

    epoch: int
    cause: str
    nodes: int
    resumed: int
    how: str
    paused: float
    lost: int

    @property
    def universal(self) -> bool:
        return self.how == "universal"


_CHANGE = re.compile(
    r"epoch (?P<epoch>\d+): (?P<cause>.*), (?P<nodes>\d+) nodes?, "
    r"(?:from step 0|resumed at step (?P<resumed>\d+)(?: \((?P<how>universal|re-sharded)\))?)"
    r"(?:, paused (?:at least )?(?P<paused>[\d.]+) s, lost (?:at least )?(?P<lost>\d+|an unknown number of) steps?"
    r"(?: \(the master was away\))?)?$"
)


def parse_change(line: str) -> Change | None:
    match = _CHANGE.fullmatch(line)
    if match is None:
        return None
    number = {name: int(match[name] or 0) for name in ("epoch", "nodes", "resumed")}
    # After the master's death they may be more, or not known.
    number["lost"] = int(match["lost"]) if (match["lost"] or "").isdigit() else 0
    return Change(cause=match["cause"], how=match["how"] or "", paused=float(match["paused"] or 0), **number)


@dataclass
class Cluster:
    """One job below one directory. Use as a context manager, or through the fixture `cluster`."""

    directory: Path
    training: Training = field(default_factory=Training)
    nnodes: str = "1:4"
    step_time: float = 0.1
    agent_flags: Sequence[str] = ()
    agent_environment: Mapping[str, str] = field(default_factory=dict)
    # Run the example through `hooked.py`: its second half is slow until `hurry`, and workers can be held.
    hooked: bool = True
    # Ask for universal files at each change of shape, `beside` the world or before it (`gate`); empty: don't.
    universal: str = "gate"
    # Of the script, in nodes only and not in the undisturbed run.
    script_flags: Sequence[str] = ()
    # How many agents are executed as a user's are; those after them are forked, which saves their imports.
    executed: int = field(default_factory=lambda: int(forked.EXECUTES))
    job: str = field(default_factory=lambda: f"test-{secrets.token_hex(4)}")
    nodes: list[Node] = field(default_factory=list)
    lines: list[StepLine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self.checkpoints, self.step_log = self.directory / "checkpoints", self.directory / "steps"
        self.holds = self.directory / "holds"
        self.holds.mkdir()
        self.mark = f"{CLUSTER_MARK}={self.job}"
        self._reader = StepLogReader(self.step_log)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            print(self.diagnosis())
        self.close()

    # ---- nodes ------------------------------------------------------------------------------------------------------

    def start(self, *names: str, hold: str = "", environment: Mapping[str, str] | None = None) -> list[Node]:
        """Starts one agent per name, as the same command in another terminal would. `hold`: see `hooked.py`."""
        started = [self._start(name, hold, environment or {}) for name in names]
        self.nodes += started
        return started

    def _start(self, name: str, hold: str, environment: Mapping[str, str]) -> Node:
        number = len(list(self.directory.glob("*.console")))
        console = self.directory / f"{number}-{name}.console"
        mark = f"{self.job}.{number}"
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            CLUSTER_MARK: self.job,
            NODE_MARK: mark,
            "DALSEGNO_TEST_HOLD": hold,
            "DALSEGNO_TEST_HOLDS": str(self.holds),
            **self.training.environment(self.step_log),
            **self.agent_environment,
            **environment,
        }
        process = start_agent(
            self.command(name),
            env,
            console,
            self.directory,
            executed=number < self.executed,
            preloaded=self.training.preloaded,
            host=self.host_of(name),
        )
        return Node(name, number, process, console, f"{NODE_MARK}={mark}")

    def host_of(self, name: str) -> int | None:
        """The process in whose namespaces this node lives; None: this machine itself is its host."""
        return None

    def command(self, name: str) -> list[str]:
        """What a user would type. Growths follow each other at once: the scenes are short."""
        return [
            DLROVER_RUN,
            f"--nnodes={self.nnodes}",
            f"--job-id={self.job}",
            f"--node-name={name}",
            f"--checkpoint-dir={self.checkpoints}",
            f"--log-dir={self.directory / 'logs'}",
            *((f"--universal-checkpoint={self.universal}",) if self.universal else ()),
            "--grow-interval=0",
            *self.agent_flags,
            *self.training.words(hooked=self.hooked),
            *self.training.flags(self.step_log),
            *self.training.pace(self.step_time),
            *self.script_flags,
        ]

    def node(self, name: str) -> Node:
        """The last one started under this name."""
        return next(node for node in reversed(self.nodes) if node.name == name)

    def alive(self) -> list[Node]:
        return [node for node in self.nodes if node.alive]

    def leave(self, node: Node, expected: int = LEFT) -> None:
        """A leave notice: SIGTERM to the agent."""
        node.expected = expected
        node.process.send_signal(signal.SIGTERM)

    def kill_agent(self, node: Node) -> list[int]:
        """SIGKILL to the agent alone; returns its other processes of that moment, which have to follow it."""
        others = [pid for pid in self.processes(node) if pid != node.pid]
        node.expected = -signal.SIGKILL
        node.process.kill()
        node.process.wait(PATIENCE)
        return others

    def kill_node(self, node: Node) -> None:
        """SIGKILL to all processes of the node at once, its keeper included. The embedded master is not the node's."""
        node.expected = -signal.SIGKILL
        keepers = [pid for pid in processes.children(node.pid) if pid not in self.processes(node)]
        masters = {pid for pid in [self.master_pid()] if pid is not None}
        node.process.kill()
        processes.send(set(self.processes(node)) | set(keepers) - masters)
        node.process.wait(PATIENCE)

    def processes(self, node: Node) -> list[int]:
        """The agent, its workers, standby workers, converters and all their children; not its keeper."""
        master = self.master_pid()
        return [pid for pid in processes.carriers(node.mark) if pid != master and not _is_master(pid)]

    def worker_pid(self, node: Node) -> int:
        """The process of this node that writes the newest epoch's step log (with one worker per node)."""

        def find() -> int | None:
            suffix = f"-epoch-{self.epoch()}.jsonl"
            for pid in self.processes(node):
                if any(p.parent == self.step_log and p.name.endswith(suffix) for p in processes.open_files(pid)):
                    return pid
            return None

        return self.wait_for(find, f"a worker of {node.name} in the newest epoch")

    # ---- the master -------------------------------------------------------------------------------------------------

    @property
    def private(self) -> Path:
        """The job's private directory: claim, token, the master's store and log."""
        return self.checkpoints / ".dalsegno" / self.job

    def master_pid(self) -> int | None:
        """The embedded master's process, as its claim has it; None while there is none."""
        try:
            pid = int(json.loads((self.private / "claim.json").read_text(encoding="utf-8"))["pid"])
        except (FileNotFoundError, KeyError, ValueError):
            return None
        return pid if processes.is_alive(pid) and _is_master(pid) else None

    def kill_master(self) -> None:
        """SIGKILL to the embedded master, if there is one."""
        master = self.master_pid()
        processes.send([] if master is None else [master])

    def status(self) -> control_pb2.StatusReply | None:
        """What the master says of the job; None where none answers."""
        try:
            address = json.loads((self.private / "claim.json").read_text(encoding="utf-8"))["address"]
            token = (self.private / "token").read_text(encoding="utf-8").strip()
        except (FileNotFoundError, KeyError, ValueError):
            return None
        with grpc.insecure_channel(address) as channel:
            try:
                return asked_status(channel, self.job, (("authorization", f"Bearer {token}"),))
            except grpc.RpcError:
                return None

    def wait_status(
        self, condition: Callable[[control_pb2.StatusReply], bool], what: str, seconds: float = PATIENCE
    ) -> control_pb2.StatusReply:
        """Until the master's status fulfils a condition."""

        def look() -> control_pb2.StatusReply | None:
            status = self.status()
            return status if status is not None and condition(status) else None

        return self.wait_for(look, what, seconds)

    def group_ranks(self) -> dict[str, int]:
        """Group rank of every member of the open world, by name."""
        status = self.wait_status(lambda reply: True, "the master's status")
        return {node.node: node.group_rank for node in status.nodes if node.role in MEMBER_ROLES}

    def member(self, group_rank: int) -> Node:
        """The node of this group rank. (One that has left is listed for a moment longer.)"""
        ranks = self.group_ranks().items()
        return next(node for name, rank in ranks if rank == group_rank and (node := self.node(name)).alive)

    # ---- waiting ----------------------------------------------------------------------------------------------------

    def wait_for(self, look: Callable[[], T | None], what: str, seconds: float = PATIENCE) -> T:
        """Until `look` finds something; fails at once when an agent ends as it should not, or when none is left."""
        deadline = time.monotonic() + seconds
        while True:
            over = bool(self.nodes) and not self.alive()
            found = look()
            if found:
                return found
            self.check_exits()
            assert not over, f"{what}: not when all agents had ended\n{self.diagnosis()}"
            assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s\n{self.diagnosis()}"
            # Files and processes that are not our children: there is no event to wait for.
            time.sleep(LOOK_EVERY)

    def check_exits(self) -> None:
        for node in self.nodes:
            code = node.process.poll()
            if code is not None:
                assert code == node.expected, f"{node.name} ended with {code}, not {node.expected}\n{self.diagnosis()}"

    def poll(self) -> list[StepLine]:
        """All lines of the step logs so far."""
        self.lines += self._reader.poll()
        return self.lines

    def epoch(self) -> int:
        """The newest epoch that made a step; 0 before the first."""
        return max((line.epoch for line in self.poll()), default=0)

    def wait_world(self, size: int, steps: int = 1, after: int = 0, seconds: float = PATIENCE) -> int:
        """Until the newest epoch (above `after`) has `size` ranks and has made `steps` steps; returns the epoch."""

        def look() -> int | None:
            newest = self.epoch()
            own = [line for line in self.lines if line.epoch == newest]
            if newest <= after or any(line.world_size != size for line in own):
                return None
            made = {line.step for line in own if line.rank == 0}
            return newest if len(made) >= steps else None

        return self.wait_for(look, f"a world of {size} after epoch {after} with {steps} steps", seconds)

    def first_step(self, epoch: int) -> int:
        """With which step an epoch began."""
        return min(line.step for line in self.poll() if line.epoch == epoch)

    def wait_standing(self) -> None:
        """Until all ranks of the last world are in a step that does not end (`DALSEGNO_TEST_STEPS`, `jobs.hooked`).

        Until then a rank that is left may still hold a boundary to save.
        """

        def stand_still() -> bool:
            found = [path.name.split("-") for path in self.holds.glob("standing-*")]
            last = [words for words in found if int(words[1]) == max(int(one[1]) for one in found)]
            return bool(last) and len(last) == int(last[0][4])

        self.wait_for(stand_still, "the world to stand still")

    def wait_step(self, step: int, seconds: float = PATIENCE) -> int:
        """Until any rank has done this step in the newest epoch; returns the epoch."""

        def look() -> int | None:
            newest = self.epoch()
            return newest if any(line.epoch == newest and line.step >= step for line in self.lines) else None

        return self.wait_for(look, f"step {step}", seconds)

    def wait_line(self, pattern: str, node: Node | None = None, seconds: float = PATIENCE) -> str:
        """Until an agent (of this node, or any) has said a line in which the pattern is found; returns the line."""

        def look() -> str | None:
            for one in [node] if node is not None else self.nodes:
                for line in one.said():
                    if re.search(pattern, line):
                        return line
            return None

        return self.wait_for(look, f"a line {pattern!r}" + (f" of {node.name}" if node is not None else ""), seconds)

    def wait_hold(self, place: str, node: Node, seconds: float = PATIENCE) -> Path:
        """Until a worker of the node is held (see `hooked.py`); returns the mark that it left and removes it."""

        def look() -> Path | None:
            return next(iter(sorted(self.holds.glob(f"{place}-{node.name}-*"))), None)

        mark = self.wait_for(look, f"{node.name} held at {place}", seconds)
        mark.unlink()
        return mark

    def release(self) -> None:
        """Lets every held worker go on."""
        (self.holds / "release").touch()

    def hurry(self) -> None:
        """Everything that was to happen has happened: the rest of the run is made without pauses."""
        (self.holds / "hurry").touch()

    def finish(self, *nodes: Node) -> None:
        """The run goes to its end, and so do the agents that are left (or these)."""
        self.hurry()
        self.wait_exit(*nodes)

    def open(self, *names: str, steps: int = 3, **options: Any) -> int:
        """Starts these nodes and waits until all of them are one world, a new one; returns its epoch."""
        before = self.epoch()
        self.start(*names, **options)
        return self.wait_world(len(names), steps, after=before)

    def wait_exit(self, *nodes: Node, seconds: float = PATIENCE) -> None:
        """Until these agents (default: all) have ended, each with its expected code."""
        chosen = nodes or tuple(self.nodes)
        self.wait_for(lambda: not any(node.alive for node in chosen), f"exit of {[n.name for n in chosen]}", seconds)
        self.check_exits()

    # ---- judging ----------------------------------------------------------------------------------------------------

    def changes(self) -> dict[int, Change]:
        """The line of every epoch that made a step; all consoles must tell the same."""
        found: dict[int, Change] = {}
        for node in self.nodes:
            for line in node.said():
                change = parse_change(line)
                if change is not None:
                    assert found.setdefault(change.epoch, change) == change, f"two lines of epoch {change.epoch}"
        return found

    def change(self, epoch: int, seconds: float = PATIENCE) -> Change:
        """The line of an epoch, once an agent has said it."""
        return self.wait_for(lambda: self.changes().get(epoch), f"the line of epoch {epoch}", seconds)

    def spans(self) -> list[EpochSpan]:
        """What each epoch did, by the step logs."""
        return epoch_spans(self.poll())

    def assert_lost(self, lost: Mapping[int, int | range]) -> None:
        """Steps that opening each epoch cost, by the agents' lines and by the step logs; 0 for epochs not named."""
        spans = self.spans()
        for before, after in itertools.pairwise(spans):
            redone = before.last_step - after.first_step + 1
            allowed = lost.get(after.epoch, 0)
            limits = allowed if isinstance(allowed, range) else range(allowed, allowed + 1)
            assert redone in limits, f"epoch {after.epoch} cost {redone} steps, not {allowed}\n{self.diagnosis()}"
            told = self.change(after.epoch)
            # The master hears of steps a moment later: what nobody told it before a crash is not in its count.
            # A Trainer's log comes after the boundary: a step that was told of may be missing there.
            allowed_more = 1 if self.training.needs_agent else 0
            assert told.lost <= max(redone, 0) + allowed_more, told
            assert redone or told.lost <= allowed_more, told

    def assert_crash(self, epoch: int) -> Change:
        """The epoch came of a crash: it went on from the last checkpoint sealed before; only later steps were lost."""
        told = self.change(epoch)
        sealed = [one for one in self.sealed() if one.epoch < epoch]
        last = max(sealed, key=lambda one: (one.epoch, one.step), default=None)
        assert told.resumed == (last.step if last is not None else 0), f"{told}, sealed: {[one.name for one in sealed]}"
        return told

    def sealed(self) -> list[Manifest]:
        """The manifests of all sealed checkpoints of the job's only run that were not pruned."""
        return [one for one in inventory(self.checkpoints / self.job / "run-0001") if one.form == SHARDED]

    def assert_undisturbed(self, undisturbed: Undisturbed, limit: float = LIMIT) -> None:
        """Every sample once, in the undisturbed run's order, and its losses up to a part of so much."""
        kept = kept_history(self.poll())
        comparison = compare(kept, undisturbed.history(self.training))
        assert not comparison.problems, "\n".join([*comparison.problems[:5], self.diagnosis()])
        difference = comparison.largest_difference
        assert difference <= limit, f"step {comparison.at_step} differs by {difference:.2e}\n{self.diagnosis()}"

    # ---- the end ----------------------------------------------------------------------------------------------------

    def diagnosis(self, lines: int = 25) -> str:
        """The consoles' last lines, the epochs, the master's log, and where all of it lies."""
        parts = [f"---- job {self.job} in {self.directory}"]
        parts += [
            f"epoch {s.epoch}: {s.world_size} ranks, steps {s.first_step} to {s.last_step}, paused {s.paused:.1f} s"
            for s in self.spans()
        ]
        for node in self.nodes:
            code = node.process.poll()
            state = "running" if code is None else f"ended with {code}"
            parts.append(f"---- {node.console.name} ({state}, expected {node.expected})")
            parts += node.text().splitlines()[-lines:]
        log = self.private / "master.log"
        if log.exists():
            parts += ["---- master.log", *log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]]
        return "\n".join(parts)

    def close(self) -> None:
        """Kills all that is left of the job, by process id, and sees that nothing is left.

        Raises:
            AssertionError: An ended agent had left processes behind, or a killed one's did not follow it.
        """
        orphans = self._orphans()
        for node in self.nodes:
            if node.alive:
                processes.send([node.pid], signal.SIGCONT)
                node.process.kill()
            node.process.wait(PATIENCE)
        # The master first: it is meant to outlive the agents. Keepers end the rest.
        self.kill_master()
        deadline = time.monotonic() + 20
        while (left := processes.carriers(self.mark)) and time.monotonic() < deadline:
            masters = [pid for pid in left if _is_master(pid)]
            processes.send(masters)
            time.sleep(LOOK_EVERY)
        described = [f"{pid}: {processes.command_line(pid)}" for pid in left]
        processes.send(left)
        assert not left, f"processes were left after their agents: {described}"
        assert not orphans, f"an ended agent left processes behind: {orphans}"

    def _orphans(self) -> list[str]:
        """Processes of nodes whose agent has ended (a moment ago is long enough: the keeper needs two scans)."""
        ended = [node for node in self.nodes if not node.alive]
        gone = processes.seconds_until(lambda: not any(self.processes(node) for node in ended), 10.0) < 10.0
        if gone:
            return []
        return [f"{node.name}: {processes.command_line(pid)}" for node in ended for pid in self.processes(node)]


def _is_master(pid: int) -> bool:
    return "dalsegno.master" in processes.command_line(pid)


def grow_to_two(job: Cluster) -> int:
    """A world of one node, and one of two that has made steps: its epoch.

    Where the first agent would be executed as a user's is, the second one is.
    """
    # Each world is waited for until it has made three, and not every one tells of a step before the next one begins.
    job.agent_environment = {**job.agent_environment, "DALSEGNO_TEST_STEPS": "4"}
    # One that is executed imports everything anew in each world that it is in: not the one that is in all of them.
    executed, job.executed = job.executed, 0
    job.open("a")
    job.executed = 2 * executed
    job.start("b")
    return job.wait_world(2, steps=3)


def change_worlds(job: Cluster) -> None:
    """1, 2, 3 nodes, a kill of one, a leave, and the end: five epochs. What was kept is judged by the caller."""
    second = grow_to_two(job)
    job.start("c")
    third = job.wait_world(3, steps=3, after=second)
    job.kill_node(job.node("b"))
    fourth = job.wait_world(2, steps=3, after=third)
    job.leave(job.node("c"))
    job.wait_world(1, steps=2, after=fourth)
    job.finish()
    job.assert_lost({fourth: range(job.training.save_every + 1)})
