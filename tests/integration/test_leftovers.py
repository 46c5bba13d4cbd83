"""What agents leave on a machine when all of their processes are killed at once, and who removes it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dalsegno.agent.memory.place import root_of_user
from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import Cluster, Node, Training

pytestmark = pytest.mark.timeout(300)

Clusters = Callable[..., Cluster]


@pytest.fixture
def short() -> Iterator[Path]:
    """A place of this test's own: other tests' agents would sweep the common one, too.

    Its path is short. A spawned reader of data has a socket 32 bytes below TMPDIR, of 107 that there are, and where it
    cannot have it, says so and is waited for without end.
    """
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def sockets_of(node: Node) -> Path:
    """The directory of the socket of a node's agent."""
    return next(path.parent for path in processes.open_files(node.pid) if path.name == ".owner")


def semaphores_of(node: Node) -> list[Path]:
    """What the rank's DataLoader has, and nobody deletes where all is killed at once."""
    return list(Path("/dev/shm").glob(f"sem.mp-{sockets_of(node).name}.*"))


def memory_of(node: Node) -> Path:
    """The directory of a node's agent in memory."""
    return next(path for path in processes.open_files(node.pid) if path.is_relative_to(root_of_user()))


@pytest.mark.full
def test_the_next_agent_removes_what_a_node_without_its_keeper_left(short: Path, clusters: Clusters) -> None:
    """Of any job, also one without memory checkpoints. What living agents have stays, theirs of the same job too."""
    environment = {"TMPDIR": str(short), "DALSEGNO_TEST_LOADERS": "spawn"}
    options = {"training": Training(steps=1000, save_every=1000), "universal": False}
    job = clusters(nnodes="1:2", agent_flags=("--memory-replicas=1", "--quiet-time=60"), executed=2, **options)
    job.start("a", "b", environment=environment)
    job.wait_world(2)
    job.wait_step(2)
    killed, kept = job.node("b"), job.node("a")
    gone, stay = ([sockets_of(one), memory_of(one), *semaphores_of(one)] for one in (killed, kept))
    assert min(len(gone), len(stay)) > 2
    job.kill_node(killed)
    assert all(path.exists() for path in (*gone, *stay))
    other = clusters(nnodes="1", executed=1, **options)
    other.start("c", environment=environment)
    other.wait_world(1)
    other.wait_for(lambda: not any(path.exists() for path in gone), "the removal of what the killed node had")
    assert all(path.exists() for path in stay[:2])
    assert semaphores_of(kept)
    assert sockets_of(other.node("c")).parent == short
