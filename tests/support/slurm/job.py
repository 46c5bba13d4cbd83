"""A job in a real Slurm: what `dalsegno render slurm` prints is what `sbatch` is given."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dalsegno.protos.yaml_text import printed

from ..forks.forked_agents import DLROVER_RUN
from ..jobs import local_processes as processes
from ..jobs.cluster import CLUSTER_MARK, PATIENCE
from ..jobs.faults import Service
from .daemons import Slurm, slurm

__all__ = ["SlurmJob", "Task", "slurm_job"]


@dataclass(frozen=True)
class Task:
    """A task of an array as Slurm tells of it; `node` is empty while it is on none."""

    state: str
    reason: str
    code: str
    node: str
    starts: int


@dataclass
class SlurmJob(Service):
    """A job of array tasks, and its master, which no task carries.

    Attributes:
        slurm: where the tasks run.
        keys: of `job.yaml`, besides those that are the same in all scenes.
        options: of sbatch, its key `slurm`.
        arrays: ids of the submitted arrays, in order.
    """

    slurm: Slurm = field(kw_only=True)
    keys: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    arrays: list[str] = field(default_factory=list)
    step_time: float = 0.05

    def prepare(self) -> None:
        """Starts the master, and has the script printed for it: `printed.sbatch`."""
        secret = self.directory / "secrets" / "job-token" / "token"
        secret.parent.mkdir(parents=True)
        secret.write_text("0123456789abcdef" * 4)
        self.master_flags = (f"--token-file={secret}",)
        # `status` asks as a node does.
        self.credentials = type(self.credentials)(token=secret.read_text())
        master = self.start_master().address
        words = [*self.training.words(hooked=True), *self.training.flags(self.step_log)]
        job = {
            "name": self.job,
            "command": [*words, *self.training.pace(self.step_time)],
            "flags": ["--grow-interval=0", "--node-timeout=5", f"--log-dir={self.directory / 'logs'}"],
            "nnodes": self.nnodes,
            "secrets": {"token": "job-token"},
            "host": {
                "master": master,
                "directory": str(self.directory),
                "bin": str(Path(DLROVER_RUN).parent),
                "secrets": str(self.directory / "secrets"),
            },
            "slurm": {"partition": "spot", **self.options},
            **self.keys,
        }
        (self.directory / "job.yaml").write_text(printed([job]))
        done = subprocess.run(
            [str(Path(DLROVER_RUN).with_name("dalsegno")), "render", "slurm", "job.yaml"],
            cwd=self.directory,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        (self.directory / "printed.sbatch").write_text(done.stdout)

    def submit(self) -> str:
        """Hands the printed script to sbatch, not a letter changed; returns the id of its array."""
        environment = {
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            CLUSTER_MARK: self.job,
            "DALSEGNO_TEST_HOLDS": str(self.holds),
            "DALSEGNO_TEST_STEPS": "4",
            **self.agent_environment,
        }
        line = ("sbatch", "--parsable", f"--chdir={self.directory}", str(self.directory / "printed.sbatch"))
        self.arrays.append(self.slurm.run(*line, **environment).strip())
        return self.arrays[-1]

    # ---- tasks ------------------------------------------------------------------------------------------------------

    def tasks(self) -> dict[str, Task]:
        """All tasks by their names, like `1_0`; those that wait for their first start have one name together."""
        found = {}
        for line in self.slurm.run("scontrol", "--oneliner", "show", "job").splitlines():
            one = dict(word.partition("=")[::2] for word in line.split())
            if one.get("ArrayJobId") in self.arrays:
                name = f"{one['ArrayJobId']}_{one['ArrayTaskId']}"
                found[name] = Task(
                    one["JobState"], one["Reason"], one["ExitCode"], one.get("BatchHost", ""), int(one["Restarts"])
                )
        return found

    def wait_task(self, name: str, condition: Callable[[Task], bool], what: str) -> Task:
        """Until this holds for a task."""

        def look() -> Task | None:
            one = self.tasks().get(name)
            return one if one is not None and condition(one) else None

        return self.wait_for(look, f"task {name} {what}")

    def wait_again(self, name: str) -> Task:
        """Until a task was requeued and runs anew."""
        return self.wait_task(name, lambda task: task.starts > 0 and task.state == "RUNNING", "running again")

    def on(self, name: str) -> dict[str, list[int]]:
        """A task's own processes: its `shell`, its `agent`, and what the agent has started (`others`)."""
        pids = self.slurm.on(self.tasks()[name].node)
        lines = {pid: processes.command_line(pid) for pid in pids}
        shell = [pid for pid, line in lines.items() if line.endswith("/slurm_script")]
        agent = [pid for pid, line in lines.items() if f"{DLROVER_RUN} " in line and _parent(pid) in shell]
        return {"shell": shell, "agent": agent, "others": [pid for pid in pids if pid not in (*shell, *agent)]}

    def output(self, name: str) -> str:
        """What a task has written, in all its starts."""
        path = self.directory / f"slurm-{name}.out"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    # ---- the end ----------------------------------------------------------------------------------------------------

    def wait_success(self, *others: str) -> None:
        """The run goes to its end, and every task with it, successfully; nothing of it is left. `others` need not."""
        self.hurry()

        def over() -> bool:
            tasks = {name: task for name, task in self.tasks().items() if name not in others}
            return bool(tasks) and all((task.state, task.code) == ("COMPLETED", "0:0") for task in tasks.values())

        self.wait_for(over, "the tasks' success")
        left = {name: self.slurm.on(name) for name in self.slurm.names}
        assert not any(left.values()), left

    def assert_redone(self, crashes: Mapping[int, range] | None = None) -> None:
        """Steps that opening each epoch cost: none, apart from these epochs."""
        spans = self.spans()
        for before, after in itertools.pairwise(spans):
            redone, allowed = before.last_step - after.first_step + 1, (crashes or {}).get(after.epoch, range(1))
            assert redone in allowed, f"epoch {after.epoch} cost {redone} steps, not {allowed}\n{self.diagnosis()}"

    def diagnosis(self, lines: int = 25) -> str:
        parts = [super().diagnosis(lines), self.slurm.run("scontrol", "--oneliner", "show", "job", check=False)]
        for path in sorted(self.directory.glob("slurm-*.out")):
            parts += [f"---- {path.name}", *path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]]
        return "\n".join([*parts, self.slurm.diagnosis(lines)])

    def close(self) -> None:
        # It would start tasks again.
        self.slurm.close()
        super().close()


def _parent(pid: int) -> int:
    fields = processes.stat_fields(pid)
    return int(fields[1]) if fields else 0


@contextmanager
def slurm_job(
    directory: Path, nodes: int = 3, *, daemons: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[SlurmJob]:
    """A job whose script is printed, and a Slurm for it; all of it ends. `daemons`: of `Slurm`, `options`: its own."""
    with slurm(nodes, **(daemons or {})) as one, SlurmJob(directory, slurm=one, **options) as job:
        job.prepare()
        yield job
