"""What goes wrong around a job, for tests: full disks, frozen nodes, damaged files, a master that comes and goes."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from dalsegno.agent.control.connection import Credentials
from dalsegno.elastic.checkpoint import CheckpointName, Manifest, is_checkpoint_name
from dalsegno.protos import control_pb2

from . import local_processes as processes
from .cluster import PATIENCE, Cluster, Node
from .master_process import MasterProcess, asked_status, command, serving

UNLIMITED = resource.RLIM_INFINITY


@dataclass
class Service(Cluster):
    """A cluster whose master is a service: started here, killed and started again at the same port and store."""

    master_flags: tuple[str, ...] = ()
    master_environment: Mapping[str, str] = field(default_factory=dict)
    # The URL of its store; empty: a file of the job's.
    store: str = ""
    # What `status` shows and checks; agents have theirs from flags and environment.
    credentials: Credentials = field(default_factory=Credentials)
    masters: list[MasterProcess] = field(default_factory=list)
    # The address by which a node reaches the master, by its name.
    ways: dict[str, str] = field(default_factory=dict)

    def start_master(self) -> MasterProcess:
        """Starts the master; again at the same address where it has had one."""
        port = self.masters[-1].address.rpartition(":")[2] if self.masters else "0"
        flags = (f"--port={port}", f"--log-file={self.directory / 'service.log'}", *self.master_flags)
        line = command(self.store or self.directory / "job.sqlite", *flags, job_id=self.job)
        # The mark lets `close` find it, whatever happens here.
        environment = {**os.environ, "DALSEGNO_TEST_CLUSTER": self.job, **self.master_environment}
        process = subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        self.masters.append(serving(process))
        return self.masters[-1]

    def command(self, name: str) -> list[str]:
        runner, *rest = super().command(name)
        return [runner, f"--master={self.ways.get(name, self.masters[-1].address)}", *rest]

    def master_pid(self) -> int | None:
        if not self.masters or self.masters[-1].process.poll() is not None:
            return None
        return self.masters[-1].process.pid

    def status(self) -> control_pb2.StatusReply | None:
        with self.credentials.channel(self.masters[-1].address) as channel:
            try:
                return asked_status(channel, self.job, self.credentials.metadata)
            except grpc.RpcError:
                return None

    def diagnosis(self, lines: int = 25) -> str:
        log = self.directory / "service.log"
        text = log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:] if log.exists() else []
        return "\n".join([super().diagnosis(lines), "---- service.log", *text])

    def close(self) -> None:
        super().close()
        for master in self.masters:
            master.kill()
            for pipe in (master.process.stdout, master.process.stderr):
                if pipe is not None:
                    pipe.close()


def freeze(cluster: Cluster, node: Node) -> list[int]:
    """SIGSTOP to the agent and everything of it but its keeper; returns what to `thaw`."""
    os.kill(node.pid, signal.SIGSTOP)
    # With the agent stopped nothing new is started by it; a nursery's children are met by the second look.
    frozen: list[int] = [node.pid]
    for _ in range(2):
        for pid in cluster.processes(node):
            if pid not in frozen:
                processes.send([pid], signal.SIGSTOP)
                frozen.append(pid)
    return frozen


def thaw(pids: list[int]) -> None:
    """SIGCONT, the agent last: its workers are awake before it hears that it is dead."""
    processes.send(reversed(pids), signal.SIGCONT)


def limit_files(pids: list[int], size: int) -> None:
    """From now on no file of these processes (and of what they start) grows beyond `size` bytes; as a quota does it."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


@dataclass(frozen=True)
class Volume:
    """A small file system of its own, with a file that takes the room away."""

    path: Path

    @property
    def free(self) -> int:
        """Bytes."""
        stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize

    def fill(self, leave: int = 0) -> None:
        """Takes all room but `leave` bytes."""
        take = self.free - leave
        if take > 0:
            with open(self.path / "filler", "ab") as file:
                with contextlib.suppress(OSError):
                    os.posix_fallocate(file.fileno(), file.tell(), take)
                # Others take of it meanwhile.
                with contextlib.suppress(OSError):
                    while not leave:
                        os.write(file.fileno(), b"x" * 4096)

    def clear(self) -> None:
        """Gives the room back."""
        (self.path / "filler").unlink(missing_ok=True)


@contextlib.contextmanager
def volume(path: Path, mebibytes: int) -> Iterator[Volume]:
    """Mounts a tmpfs; skips the test where that is not allowed."""
    path.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "tmpfs", str(path)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield Volume(path)
    finally:
        # Lazy: a process that a failed test left behind may still have a file open here.
        subprocess.run(["umount", "-l", str(path)], check=True, timeout=30)


def _held_agents() -> dict[str, str]:
    """Where `sitecustomize` is, before what this process was told to import from: that may be another checkout."""
    paths = [str(Path(__file__).with_name("held_agents")), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def limited_files(size: int) -> dict[str, str]:
    """Environment of an agent that is limited as by `limit_files`, before it can start anything."""
    return {**_held_agents(), "DALSEGNO_TEST_FILE_BYTES": str(size)}


def held_conversions(files: int = 5) -> dict[str, str]:
    """Environment of an agent whose converters stop after so many files; see `held_agents/sitecustomize.py`."""
    return {**_held_agents(), "DALSEGNO_TEST_HELD_FILES": str(files)}


def held_verifications() -> dict[str, str]:
    """Environment of an agent that stops when it verifies a checkpoint."""
    return {**_held_agents(), "DALSEGNO_TEST_HELD_VERIFICATION": "1"}


def noted_makers() -> dict[str, str]:
    """Environment of an agent that notes who makes directories of checkpoints, it or its workers; see `makers`."""
    return {**_held_agents(), "DALSEGNO_TEST_MAKERS": "1"}


def makers(cluster: Cluster) -> dict[str, set[int]]:
    """The steps of which directories were made on the disk, by "agent" and "worker"."""
    found: dict[str, set[int]] = {"agent": set(), "worker": set()}
    for line in (cluster.holds / "made").read_text(encoding="utf-8").splitlines():
        who, path = line.split(" ", 1)
        name = Path(path).name
        if is_checkpoint_name(name):
            found[who].add(CheckpointName.parse(name).step)
    return found


def held_writings(how: str = "held", after: str = "") -> dict[str, str]:
    """Environment of an agent that stops when it writes a memory checkpoint to the disk, or `fails` to.

    `after`: but not those whose names begin so.
    """
    environment = {**_held_agents(), "DALSEGNO_TEST_HELD_WRITING": how}
    return {**environment, "DALSEGNO_TEST_HELD_AFTER": after} if after else environment


def deaf() -> dict[str, str]:
    """Environment of an agent whose memory no other one reaches, as behind a firewall that answers nothing."""
    return {**_held_agents(), "DALSEGNO_TEST_DEAF": "1"}


def held_placings() -> dict[str, str]:
    """Environment of an agent that stops when it puts the resume point where a script without a session looks."""
    return {**_held_agents(), "DALSEGNO_TEST_HELD_PLACING": "1"}


def wait_held_converter(cluster: Cluster) -> int:
    """Until a converter is held and a file of its is journalled, a moment later; returns its process id."""

    def look() -> int | None:
        held = next(iter(cluster.holds.glob("conversion-*")), None)
        journals = run_directory(cluster).glob("step-*.universal.*/JOURNAL.jsonl")
        if held is None or not any(journal.read_bytes().count(b"\n") > 1 for journal in journals):
            return None
        return int(held.name.removeprefix("conversion-"))

    return cluster.wait_for(look, "a conversion in the middle of its files")


def run_directory(cluster: Cluster, run: str = "run-0001") -> Path:
    return cluster.checkpoints / cluster.job / run


def flip_byte(path: Path) -> None:
    """One bit of the largest file."""
    file = largest(path)
    with open(file, "r+b") as data:
        data.seek(file.stat().st_size // 2)
        byte = data.read(1)
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte[0] ^ 1]))


def truncate(path: Path) -> None:
    file = largest(path)
    os.truncate(file, file.stat().st_size - 1)


def remove_file(path: Path) -> None:
    largest(path).unlink()


def add_file(path: Path) -> None:
    (path / "extra.pt").write_bytes(b"whose is this?")


def largest(path: Path) -> Path:
    """The largest file that the manifest lists and that no other checkpoint shares."""
    listed = [path / entry.path for entry in Manifest.read(path).files]
    return max((file for file in listed if file.stat().st_nlink == 1), key=lambda file: file.stat().st_size)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped byte": flip_byte,
    "truncated file": truncate,
    "missing file": remove_file,
    "extra file": add_file,
}


def wait_until(condition: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """For what concerns no agent; see `Cluster.wait_for`."""
    assert processes.seconds_until(condition, seconds) < seconds, f"{what}: not within {seconds:.0f} s"
