"""How long a change of membership stops training: dlrover-run beside torchrun, the same script on the same machine.

Plain DDP (`examples/ddp.py`), one process per node. Three scenes are timed, each from its event to the first step that
every rank of the new world has done: a node joins (1 to 2), a node is killed with SIGKILL (3 to 2, not node 0, whose
death ends a torchrun job), a worker crashes (2 nodes). torchrun runs with its defaults and tuned: last call 2 s,
keep-alive 3 x 2 s, a store of its own for the workers. If `DLROVER_PYTHON` names an interpreter that has DLRover and
this package, DLRover runs too, with a last call of 5 s.

The result is the longest time without a step after the event; for a join also the time until the newcomer takes part.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import report
from examples.history import StepLine, StepLogReader
from tests.support.jobs import local_processes as processes

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "examples" / "ddp.py"
DLROVER = Path(__file__).with_name("dlrover_launcher.py")
REPEATS = 3
# Seconds: a step, how long a peer may take for a change, and how often the step logs are read.
STEP_TIME, PATIENCE, LOOK_EVERY = 0.1, 120.0, 0.1
WARM_STEPS = 10
MARK = "DALSEGNO_BENCHMARK"
TUNED = "last_call_timeout=2,keep_alive_interval=2,keep_alive_max_attempt=3"


@dataclass
class Job:
    """One job below one directory: starts and kills nodes, and reads what their ranks logged.

    Attributes:
        nnodes: as the launcher's flag.
        script, flags: what each rank runs. `--step-log` is added and, without `dlrover-run`, the flag `alone`, which
            names a directory to save in.
        more: flags for `dlrover-run`.
        patience: seconds that a change may take.
    """

    launcher: str
    directory: Path
    port: int
    nnodes: str = "1:4"
    script: Path = SCRIPT
    flags: tuple[str, ...] = ("--steps=100000", "--save-every=10", f"--step-time={STEP_TIME}")
    alone: str = "--checkpoint-dir"
    more: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    patience: float = PATIENCE
    name: str = field(default_factory=lambda: f"peers-{secrets.token_hex(4)}")
    nodes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    # Processes that are no nodes, for instance a peer's master.
    others: list[subprocess.Popen[bytes]] = field(default_factory=list)
    lines: list[StepLine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = StepLogReader(self.directory / "steps")

    def start_node(self) -> subprocess.Popen[bytes]:
        number = len(self.nodes)
        command, extra = LAUNCHERS[self.launcher](self, number)
        flags = [
            *self.flags,
            f"--step-log={self.directory / 'steps'}",
            *(() if self.launcher == "dlrover-run" else (f"{self.alone}={self.directory / 'checkpoints'}",)),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment, MARK: self.name}
        # NCCL refuses two ranks of one host on one card: for it, too, each node is a host.
        nccl = {"NCCL_HOSTID": f"{self.name}.{number}", "NCCL_SOCKET_IFNAME": "lo"}
        env |= {f"{MARK}_NODE": f"{self.name}.{number}", **nccl, **extra}
        with (self.directory / f"{number}.console").open("wb") as console:
            node = subprocess.Popen(
                [*command, str(self.script), *flags], stdout=console, stderr=console, env=env, start_new_session=True
            )
        self.nodes.append(node)
        return node

    def start_other(self, *command: str) -> None:
        with (self.directory / f"other-{len(self.others)}.console").open("wb") as console:
            env = {**os.environ, MARK: self.name}
            self.others.append(
                subprocess.Popen(command, stdout=console, stderr=console, env=env, start_new_session=True)
            )

    def node_processes(self, number: int) -> list[int]:
        return processes.carriers(f"{MARK}_NODE={self.name}.{number}")

    def poll(self) -> list[StepLine]:
        self.lines += self._reader.poll()
        return self.lines

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + self.patience
        while not condition():
            if time.monotonic() > deadline or not any(node.poll() is None for node in self.nodes):
                raise TimeoutError(f"{self.launcher}: {what}: not within {self.patience:.0f} s, or all nodes ended")
            time.sleep(LOOK_EVERY)  # why: no event tells of files of other processes

    def steps_of_world(self, size: int, since: float) -> list[float]:
        """Times at which all ranks of a world of this size had done a step, from `since` on."""
        done: dict[tuple[int, int], list[float]] = {}
        for line in self.poll():
            if line.world_size == size and line.time > since:
                done.setdefault((line.epoch, line.step), []).append(line.time)
        return sorted(max(times) for times in done.values() if len(times) >= size)

    def close(self) -> None:
        for process in (*self.nodes, *self.others):
            process.kill()
        processes.send(processes.carriers(f"{MARK}={self.name}"))
        for process in (*self.nodes, *self.others):
            process.wait(30)
        # What DLRover's classes leave under a launcher that was killed.
        for left in (*Path("/dev/shm").glob(f"{self.name}*"), *Path("/tmp/ckpt_sock").glob(f"{self.name}*")):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def _torchrun(job: Job, *more: str) -> list[str]:
    return [
        *(
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={job.nnodes}",
            "--nproc-per-node=1",
            "--max-restarts=100",
        ),
        *("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{job.port}", f"--rdzv-id={job.name}", *more),
    ]


def _dalsegno(job: Job, number: int) -> tuple[list[str], dict[str, str]]:
    command = [
        *(str(Path(sysconfig.get_path("scripts")) / "dlrover-run"), f"--nnodes={job.nnodes}", f"--job-id={job.name}"),
        *(f"--node-name=n{number}", f"--checkpoint-dir={job.directory / 'checkpoints'}", *job.more),
    ]
    return command, {}


def dlrover(job: Job, number: int) -> tuple[list[str], dict[str, str]]:
    """DLRover's launcher and, with the first node, its master."""
    if not job.others:
        job.start_other(
            *(os.environ["DLROVER_PYTHON"], "-m", "dlrover.python.master.main", "--platform=local"),
            *(f"--port={job.port}", f"--node_num={job.nnodes.rpartition(':')[2]}", f"--job_name={job.name}"),
        )
    command = [
        *(os.environ["DLROVER_PYTHON"], str(DLROVER), f"--nnodes={job.nnodes}", "--nproc_per_node=1"),
        *("--max_restarts=100", "--rdzv_conf=join_timeout=60,lastcall_timeout=5"),
    ]
    return command, {
        "DLROVER_MASTER_ADDR": f"127.0.0.1:{job.port}",
        "NODE_ID": str(number),
        "NODE_RANK": str(number),
        "NODE_NUM": job.nnodes.rpartition(":")[2],
        # Its sockets and its memory carry no other name.
        "ELASTIC_JOB_NAME": f"{job.name}-{number}",
    }


LAUNCHERS: dict[str, Callable[[Job, int], tuple[list[str], dict[str, str]]]] = {
    "dlrover-run": _dalsegno,
    "torchrun": lambda job, _: (_torchrun(job), {}),
    "torchrun, tuned": lambda job, _: (
        _torchrun(job, f"--rdzv-conf={TUNED}", "--monitor-interval=0.1"),
        {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    ),
}


@contextlib.contextmanager
def a_job(launcher: str, below: Path | None = None, **options: Any) -> Iterator[Job]:
    """A job in a directory of its own, which is deleted with all its processes. `options` as in `Job`."""
    if below is not None:
        below.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="peers-", dir=below) as folder, socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = int(server.getsockname()[1])
        server.close()
        job = Job(launcher, Path(folder), port, **options)
        try:
            yield job
        finally:
            job.close()


def _open(job: Job, count: int) -> None:
    """Opens a first world, in which node 0 hosts the store or the master; its death would be another scene."""
    began = time.time()
    job.start_node()
    job.wait(lambda: hosts(job), "node 0 hosts")
    for _ in range(count - 1):
        job.start_node()
    job.wait(lambda: len(job.steps_of_world(count, began)) >= WARM_STEPS, f"a first world of {count}")


def hosts(job: Job) -> bool:
    """Whether the first node has a master or a store for the others."""
    if job.launcher == "dlrover-run":
        return any((job.directory / "checkpoints").glob(".dalsegno/*/claim.json"))
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", job.port)) == 0


def _pause(job: Job, size: int, event: float) -> float:
    """Longest time without a step, from the last one before the event until the world has `size` ranks and trains."""
    job.wait(lambda: len(job.steps_of_world(size, event + 2 * STEP_TIME)) >= WARM_STEPS, f"a world of {size}")
    before = max(line.time for line in job.lines if line.time <= event)
    after = sorted({line.time for line in job.lines if line.time > event})
    return max(later - earlier for earlier, later in zip([before, *after], after, strict=False))


def joined(launcher: str) -> tuple[float, float]:
    """Longest time without a step, and the time until the newcomer had done one."""
    with a_job(launcher) as job:
        _open(job, 1)
        event = time.time()
        job.start_node()
        pause = _pause(job, 2, event)
        return pause, job.steps_of_world(2, event)[0] - event


def killed(launcher: str, **options: Any) -> tuple[float, float]:
    """Kills a node that is not node 0; returns the same number twice."""
    with a_job(launcher, **options) as job:
        _open(job, 3)
        event = time.time()
        job.nodes[2].kill()
        processes.send(job.node_processes(2))
        pause = _pause(job, 2, event)
        return pause, pause


def crashed(launcher: str, **options: Any) -> tuple[float, float]:
    """Kills the worker of one of two nodes; returns the same number twice."""
    with a_job(launcher, **options) as job:
        _open(job, 2)
        (worker,) = [
            pid
            for pid in job.node_processes(1)
            if any(p.parent == job.directory / "steps" for p in processes.open_files(pid))
        ]
        event = time.time()
        os.kill(worker, signal.SIGKILL)
        pause = _pause(job, 2, event)
        return pause, pause


SCENES: dict[str, Callable[[str], tuple[float, float]]] = {
    "a node joins, 1 to 2": joined,
    "a node is killed, 3 to 2": killed,
    "a worker crashes": crashed,
}


def _row(scene: str, launcher: str) -> dict[str, object]:
    """One line of the table: medians of the repeats that came to an end."""
    found, failed = [], 0
    for _ in range(REPEATS):
        try:
            found.append(SCENES[scene](launcher))
        except TimeoutError as error:
            failed += 1
            print(f"{scene}: {error}", flush=True)
    row: dict[str, object] = {"scene": scene, "launcher": launcher, "not within the limit": failed}
    if found:
        pauses = [pause for pause, _ in found]
        row |= {"no step for, median s": statistics.median(pauses), "min s": min(pauses), "max s": max(pauses)}
        if SCENES[scene] is joined:
            row["newcomer trains after, median s"] = statistics.median(after for _, after in found)
    return row


def main() -> int:
    """Prints a table and writes its JSON."""
    if os.environ.get("DLROVER_PYTHON"):
        LAUNCHERS["DLRover"] = dlrover
    rows = [_row(scene, launcher) for scene in SCENES for launcher in LAUNCHERS]
    title = "What a change of membership costs: plain DDP, one rank per node, all nodes on one machine"
    report("peers", rows, title=title, settings={"repeats": REPEATS, "limit_s": PATIENCE, "step_s": STEP_TIME})
    return 0
