"""A real Slurm on this machine: its own munged, slurmctld and slurmd's, in a folder of their own.

Nothing of a Slurm that is installed here is read or changed: configuration, key, sockets, ports and state are this
one's. Everything listens on loopback only, and all of it is ended by its process ids.
"""

from __future__ import annotations

import getpass
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.jobs import local_processes as processes
from tests.support.jobs.ports import free_port

# Seconds that the daemons may take to find each other; other tests share the cores.
PATIENCE = 60.0
MARK = "DALSEGNO_TEST_SLURM"
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_NEEDED = ("munged", "slurmctld", "slurmd", "slurmstepd", "sbatch", "scontrol", "squeue", "scancel")
_LOST = [name for name in _NEEDED if shutil.which(name, path=_PATH) is None]
if _LOST:
    MISSING = f"no {', '.join(_LOST)} here: install Debian's munge, slurmctld, slurmd and slurm-client"
else:
    MISSING = "a Slurm of the tests' own is for root" if os.geteuid() else ""

# One task to a node, so that it is known where each one runs. A task that is requeued may start again as soon as its
# old credential has expired: `cred_expire`, which is 120 seconds where nobody says otherwise.
_CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
AuthInfo=socket={root}/munge.socket,cred_expire={expire}
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd-%n.log
PlugStackConfig={root}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=1
SlurmdTimeout={timeout}
KillWait={kill_wait}
{more}
{nodes}
PartitionName=spot Nodes=ALL Default=YES MaxTime=INFINITE State=UP {partition}
"""


class Slurm:
    """The daemons. Use `slurm`, which ends them.

    Args:
        root: A folder of theirs, empty.
        nodes: How many machines it believes to have: `n1`, `n2`, …
        kill_wait: Seconds from the notice of `scancel` to SIGKILL.
        more: Further lines of slurm.conf.
        partition: Further words of its partition.

    Attributes:
        mark: NAME=VALUE in the environment of its daemons, and of what they start.
    """

    def __init__(
        self, root: Path, nodes: int = 3, *, kill_wait: int = 45, more: Sequence[str] = (), partition: str = ""
    ) -> None:
        self.root, self.names = root, [f"n{number + 1}" for number in range(nodes)]
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))},
            "PATH": _PATH,
            "SLURM_CONF": str(root / "slurm.conf"),
            MARK: secrets.token_hex(8),
        }
        self.mark = f"{MARK}={self.environment[MARK]}"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        host = socket.gethostname().partition(".")[0]
        lines = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=1 RealMemory=100"
            for name in self.names
        ]
        text = _CONFIGURATION.format(
            host=host,
            port=free_port(),
            root=root,
            expire=5,
            user=getpass.getuser(),
            timeout=10,
            kill_wait=kill_wait,
            more="\n".join(more),
            nodes="\n".join(lines),
            partition=partition,
        )
        (root / "slurm.conf").write_text(text, encoding="ascii")
        (root / "plugstack.conf").touch()
        (root / "state").mkdir()
        try:
            self._start_munge()
            self._start("slurmctld", "-D")
            for name in self.names:
                self.start_node(name)
            self._wait()
        except BaseException:
            self.close()
            raise

    # ---- daemons ----------------------------------------------------------------------------------------------------

    def _start(self, program: str, *arguments: str, name: str = "") -> None:
        path = shutil.which(program, path=_PATH)
        assert path is not None, MISSING
        with open(self.root / f"{name or program}.out", "ab") as out:
            self._daemons[name or program] = subprocess.Popen(
                [path, *arguments],
                env=self.environment,
                cwd=self.root,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    def _start_munge(self) -> None:
        key = self.root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = {"socket": "socket", "key-file": "key", "log-file": "log", "pid-file": "pid", "seed-file": "seed"}
        flags = [f"--{flag}={self.root}/munge.{end}" for flag, end in files.items()]
        # Its folder is in a temporary one, which it would not trust.
        self._start("munged", "--foreground", "--force", *flags)
        self._until(lambda: (self.root / "munge.socket").exists(), "munged's socket")

    def start_node(self, name: str) -> None:
        """Starts the slurmd of a machine, or starts it again."""
        (self.root / f"spool-{name}").mkdir(exist_ok=True)
        self._start("slurmd", "-D", "-N", name, name=name)

    def kill_node(self, name: str) -> list[int]:
        """A machine is gone at once: its slurmd, and all that Slurm runs there. Returns their process ids."""
        here, all_ = self.on(name), set(processes.carriers(self.mark))
        # The manager of a step is no process of its task; first, so that it tells nobody of the others' end.
        managers = ({_parent(pid) for pid in here} & all_) - set(here)
        gone = [*managers, self._daemons[name].pid, *here]
        processes.send(gone)
        self._daemons[name].wait(PATIENCE)
        return gone

    def on(self, name: str) -> list[int]:
        """The processes of all tasks on a machine: their shells, agents and workers."""
        return [pid for pid in processes.carriers(self.mark) if _node(pid) == name]

    def _wait(self) -> None:
        """Until all machines are ready for tasks."""
        self._until(lambda: set(self.states().values()) == {"idle"}, "the nodes")

    def _until(self, look: object, what: str) -> None:
        assert callable(look)
        deadline = time.monotonic() + PATIENCE
        while not look():
            for name, process in self._daemons.items():
                assert process.poll() is None, f"{name} ended with {process.poll()}\n{self.diagnosis()}"
            assert time.monotonic() < deadline, f"{what}: not within {PATIENCE:.0f} s\n{self.diagnosis()}"
            time.sleep(0.05)  # why: daemons tell nobody when they are there

    # ---- commands ---------------------------------------------------------------------------------------------------

    def run(self, *words: str, check: bool = True, **environment: str) -> str:
        """A command of Slurm's, as a user types it; returns what it printed."""
        done = subprocess.run(
            words,
            env={**self.environment, **environment},
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert not check or done.returncode == 0, f"{words}: {done.stderr}\n{self.diagnosis()}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """What Slurm thinks of each machine: idle, alloc, down, …; empty while it does not answer."""
        said = self.run("sinfo", "--noheader", "--Node", "--format=%N %t", check=False)
        return dict(line.split() for line in said.splitlines())

    # ---- the end ----------------------------------------------------------------------------------------------------

    def diagnosis(self, lines: int = 15) -> str:
        """The last lines of all logs."""
        parts = []
        for log in sorted([*self.root.glob("*.log"), *self.root.glob("*.out")]):
            parts += [f"---- {log.name}", *log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]]
        return "\n".join(parts)

    def close(self) -> None:
        """Ends tasks and daemons."""
        # The one that would start tasks again is the first.
        for name in ("slurmctld", *self.names, "munged"):
            if name in self._daemons:
                self._daemons[name].kill()
                self._daemons[name].wait(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while (left := processes.carriers(self.mark)) and time.monotonic() < deadline:
            processes.send(left)
            time.sleep(0.02)  # why: they are no children of this process
        assert not left, [processes.command_line(pid) for pid in left]


def _parent(pid: int) -> int:
    fields = processes.stat_fields(pid)
    return int(fields[1]) if fields else 0


def _node(pid: int) -> str:
    """On which machine a process believes to be."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            found = dict(one.partition(b"=")[::2] for one in file.read().split(b"\0"))
    except OSError:
        return ""
    return found.get(b"SLURMD_NODENAME", b"").decode()


@contextmanager
def slurm(nodes: int = 3, **options: object) -> Iterator[Slurm]:
    """A Slurm within this; `options` of `Slurm`."""
    # Names of sockets are short, and other users' programs may look for munged's: not in pytest's own folder.
    with tempfile.TemporaryDirectory(prefix="slurm-") as directory:
        os.chmod(directory, 0o755)
        one = Slurm(Path(directory), nodes, **options)  # type: ignore[arg-type]
        try:
            yield one
        finally:
            one.close()
