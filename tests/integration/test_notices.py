"""Signals that reach more than the agent: systemd's KillMode=control-group, Slurm's way, Ctrl-C, a closed terminal.

Every subset of a node's process tree is signalled, with real processes. Where the agent is among them the node leaves
with everything saved; where it is not, the run goes on, after a save if a worker heard it. No step is ever lost.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from dalsegno.agent.decisions.leaving import SAME_NOTICE_SECONDS
from tests.support.jobs import local_processes as processes
from tests.support.jobs.attacks import is_keeper
from tests.support.jobs.cluster import LEFT, LEFT_UNSAVED, Cluster, Node, Training, Undisturbed
from tests.support.jobs.master_process import eventually

pytestmark = pytest.mark.timeout(900)

Clusters = Callable[..., Cluster]

TRAINING = Training(steps=400, save_every=200)
PARTS = ("agent", "keeper", "nursery", "worker", "loaders", "master")
SUBSETS = [frozenset(chosen) for size in range(1, 7) for chosen in itertools.combinations(PARTS, size)]
ALL = frozenset(PARTS)
# Without the agent: each part alone, and all others.
SPARED = [*(subset for subset in SUBSETS if len(subset) == 1 and "agent" not in subset), ALL - {"agent"}]
# Those in which it matters how loaders are started.
WORKERS = [frozenset({"worker"}), frozenset({"loaders"}), ALL - {"agent"}]
NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def a_job(clusters: Clusters, context: str = "fork") -> Cluster:
    return clusters(
        training=TRAINING,
        nnodes="1:2",
        step_time=0.05,
        agent_environment={"DALSEGNO_TEST_LOADERS": context},
        executed=0,
    )


def tree(job: Cluster, node: Node) -> dict[str, list[int]]:
    """The processes of a node whose worker has made a step of the newest epoch, by their part."""
    worker = job.worker_pid(node)
    ours = job.processes(node)
    master = job.master_pid()
    assert master is not None
    loaders = job.wait_for(lambda: loaders_of(worker), "the worker's loaders")
    nursery = int(processes.stat_fields(worker)[1])
    assert nursery in ours
    # A forked agent has children besides, that wait to become its later nurseries.
    (keeper,) = (pid for pid in processes.children(node.pid) if is_keeper(pid))
    found = {"agent": [node.pid], "keeper": [keeper], "nursery": [nursery], "worker": [worker]}
    return {**found, "loaders": loaders, "master": [master]}


def loaders_of(worker: int) -> list[int]:
    """Two DataLoader processes, and whatever multiprocessing has started for them."""
    below = processes.children(worker)
    below += [pid for one in below for pid in processes.children(one)]
    return below if len(below) >= 2 else []


def signal_all(job: Cluster, node: Node, subset: Iterable[str], number: signal.Signals, backwards: bool) -> None:
    parts = tree(job, node)
    pids = [pid for part in PARTS if part in subset for pid in parts[part]]
    processes.send(reversed(pids) if backwards else pids, number)


def leave(job: Cluster, subset: frozenset[str], number: signal.Signals, backwards: bool = False) -> None:
    """The second node leaves when it gets its signals, and comes back."""
    before = job.epoch()
    job.start("b")
    both = job.wait_world(2, steps=2, after=before)
    leaver = job.node("b")
    leaver.expected = 75
    signal_all(job, leaver, subset, number, backwards)
    job.wait_exit(leaver)
    job.wait_world(1, steps=2, after=both)


@pytest.mark.full
@pytest.mark.parametrize(
    "ways",
    [
        pytest.param([(signal.SIGTERM, False), (signal.SIGINT, True)], id="two signals"),
        pytest.param([(number, number == signal.SIGINT) for number in NUMBERS], id="each signal once"),
        *(pytest.param([(number, backwards) for backwards in (False, True)], id=number.name) for number in NUMBERS),
    ],
)
def test_a_node_of_which_everything_is_signalled_leaves_saved(
    clusters: Clusters, undisturbed: Undisturbed, ways: list[tuple[signal.Signals, bool]]
) -> None:
    """The agent first, or last: 75, and no step is lost."""
    job = a_job(clusters)
    job.open("a")
    for number, backwards in ways:
        leave(job, ALL, number, backwards)
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


@pytest.mark.parametrize(
    ("seconds", "second", "code"),
    [
        (0.0, signal.SIGTERM, LEFT),
        (0.0, signal.SIGINT, LEFT),
        (0.1, signal.SIGTERM, LEFT),
        (SAME_NOTICE_SECONDS + 0.6, signal.SIGTERM, LEFT_UNSAVED),
    ],
)
def test_a_second_signal(clusters: Clusters, seconds: float, second: signal.Signals, code: int) -> None:
    """Of one `timeout`, or of a launcher that passes it on: the save is waited for. A later one ends it at once."""
    job = clusters(training=Training(steps=60), nnodes="1:1", executed=0)
    (a,) = job.start("a", hold="saved-20")
    job.wait_hold("saved-20", a)
    a.expected = code
    a.process.send_signal(signal.SIGTERM)
    time.sleep(seconds)  # why: the distance of two signals is what is tried
    a.process.send_signal(second)
    if code == LEFT:
        time.sleep(0.5)  # why: so that it would be seen to go at once
        assert a.alive
        job.release()
    job.wait_exit(a)
    assert job.sealed()[-1].step == (max(line.step for line in job.poll()) if code == LEFT else 10)
    assert ("goes at once" in a.text()) == (code == LEFT_UNSAVED)


def spared(job: Cluster, subset: frozenset[str], number: signal.Signals) -> None:
    """Nobody leaves: the run goes on, in the next epoch if a worker heard it and saved."""
    before = job.epoch()
    parts = tree(job, job.node("a"))
    step = max(line.step for line in job.poll())
    signal_all(job, job.node("a"), subset, number, backwards=False)
    job.wait_world(1, steps=2, after=before if "worker" in subset else before - 1)
    job.wait_step(step + 5)
    assert (job.epoch() > before) == ("worker" in subset)
    for part in ("agent", "keeper", "nursery", "master", *(() if "worker" in subset else ("worker", "loaders"))):
        assert all(processes.is_alive(pid) for pid in parts[part]), part


# Nothing of ours knows spawn: its loaders are told by the same words as those of the fork server.
@pytest.mark.parametrize(
    ("context", "subsets"),
    [
        pytest.param("fork", SPARED, id="fork", marks=pytest.mark.full),
        pytest.param("forkserver", WORKERS, id="forkserver", marks=pytest.mark.full),
        pytest.param("forkserver", SPARED, id="forkserver, each part", marks=pytest.mark.full),
        pytest.param("spawn", SPARED, id="spawn", marks=pytest.mark.full),
    ],
)
def test_what_is_not_the_agent_is_signalled(
    clusters: Clusters, undisturbed: Undisturbed, context: str, subsets: list[frozenset[str]]
) -> None:
    """Each part alone, and all but the agent: the run goes on and loses nothing."""
    job = a_job(clusters, context)
    job.open("a")
    for subset in subsets:
        spared(job, subset, signal.SIGTERM)
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("number", NUMBERS)
def test_every_subset(clusters: Clusters, undisturbed: Undisturbed, number: signal.Signals) -> None:
    """All 63 of them, in one run."""
    job = a_job(clusters)
    job.open("a")
    for subset in SUBSETS:
        if "agent" in subset:
            leave(job, subset, number, backwards=bool(len(subset) % 2))
        else:
            spared(job, subset, number)
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


# Its loader is what a DataLoader process is: deaf to all but its parent, with a program of its own to end. The parent
# is no process of the tests: their threads of gRPC may come back in a forked one, and are deaf to nothing.
PARENT = """
import multiprocessing, signal, subprocess, sys, time
from dalsegno.elastic.data.loaders import pass_over

def deaf(said):
    pass_over((signal.SIGTERM,))
    program = subprocess.Popen(["sleep", "600"])
    program.terminate()
    said.send(program.wait(30))
    time.sleep(600)

ours, theirs = multiprocessing.Pipe()
loader = multiprocessing.get_context("fork").Process(target=deaf, args=(theirs,), daemon=True)
loader.start()
assert ours.recv() == -signal.SIGTERM
print(loader.pid, flush=True)
sys.stdin.readline()
assert loader.is_alive()
loader.terminate()
loader.join(30)
print(loader.exitcode, flush=True)
"""


def test_a_loader_hears_its_parent_only() -> None:
    """Somebody else's SIGTERM does nothing to it, its parent's ends it; a program that it starts can be terminated."""
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        loader = int(parent.stdout.readline())
        os.kill(loader, signal.SIGTERM)
        status = Path(f"/proc/{loader}/status")
        eventually(lambda: "ShdPnd:\t0000000000000000" in status.read_text(), 30)
        parent.stdin.write("\n")
        parent.stdin.close()
        assert parent.stdout.readline() == "0\n"
