"""Processes of a `Trainer` that stay through planned changes: the same ones train on, and the curve is the same."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dalsegno.agent.decisions.memory import PART_PATIENCE_SECONDS
from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import HOOKED, ROOT, Cluster, Training, Undisturbed

from .test_membership import AT_ONCE, Clusters, any_number, end, together
from .test_staying import (
    a_third_comes_and_goes,
    crash_and_grow,
    join_and_leave,
    leave_with_the_first_ranks,
    scale_away_and_back,
    the_first_of_two_leaves,
    worker,
    workers,
)
from .test_survivors import stood_still

pytestmark = [pytest.mark.timeout(400), pytest.mark.executed]


@dataclass(frozen=True)
class Trained(Training):
    """By a Trainer."""

    script: Path = ROOT / "tests" / "support" / "workers" / "trainer_curve.py"
    extra: tuple[str, ...] = ("--stay",)

    def words(self, *, hooked: bool) -> list[str]:
        return [str(HOOKED), str(self.script)] if hooked else [str(self.script)]


def test_who_stays_trains_on_through_joins_and_leaves(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """1 to 2 to 3 nodes and back to 2: nobody who stays starts anew, no step is lost, callbacks keep their state."""
    job = clusters(training=Trained())
    join_and_leave(job)
    end(job, undisturbed)


@pytest.mark.full
def test_who_was_rank_1_becomes_rank_0(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """The first leaves: another one writes what rank 0 writes, in the end alone, without a wrapper."""
    job, first = together(clusters, "a", "b", training=Trained(), nnodes="1:3")
    job.start("c")
    first = job.wait_world(3, steps=2, after=first)
    job.leave(job.node("c"))
    job.wait_exit(job.node("c"))
    first = job.wait_world(2, steps=2, after=first)
    the_first_of_two_leaves(job, first)
    end(job, undisturbed)


@pytest.mark.full
def test_who_is_left_out_ends_and_comes_back(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Scaled away and back: its callbacks were told of one end."""
    job, first = together(clusters, "a", "b", training=Trained())
    scale_away_and_back(job, first)
    end(job, undisturbed)


@pytest.mark.full
def test_a_crash_without_memory_starts_all_anew(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """A killed worker breaks the world for all; what is started then stays at the next planned change."""
    job, first = together(clusters, "a", "b", training=Trained(), nnodes="2:3")
    second = crash_and_grow(job, first)
    end(job, undisturbed, lost={second: any_number(job)})


IN_MEMORY = (*AT_ONCE, "--memory-replicas=1")
# Memory checkpoints are so far apart that the newest is older than anything a survivor holds.
IN_STEPS = Trained(steps=40, save_every=1000, extra=("--stay", "--odd=forgets", "--memory-every=15"))


@pytest.mark.parametrize("names", ["ab", pytest.param("abc", marks=pytest.mark.full)])
@pytest.mark.parametrize("what", ["worker", pytest.param("node", marks=pytest.mark.full)])
@pytest.mark.parametrize("others", ["told", pytest.param("waiting", marks=pytest.mark.full)])
def test_who_survives_a_crash_stays(
    clusters: Clusters, undisturbed: Undisturbed, names: str, what: str, others: str
) -> None:
    """It saves what it holds, and trains on with that: no step is lost, and nothing is made or loaded anew.

    The others compute, and are told of it; or they wait for the lost rank's gradients, and get an error.
    """
    pace = {"DALSEGNO_TEST_STEPS": "4", "DALSEGNO_TEST_STANDS": "backward" if others == "told" else "nowhere"}
    job = clusters(training=IN_STEPS, nnodes=f"1:{len(names)}", agent_flags=IN_MEMORY, agent_environment=pace)
    job.start(*names[:-1])
    job.start(names[-1], environment={"DALSEGNO_TEST_STANDS": "backward"})
    first = job.wait_world(len(names), steps=3)
    last = stood_still(job, first)
    lost = job.node(names[-1])
    pids = {node.name: worker(job, node) for node in job.nodes if node is not lost}
    if what == "worker":
        processes.send([worker(job, lost)], signal.SIGKILL)
    else:
        job.kill_node(lost)
    second = job.wait_world(len(names) - (what == "node"), after=first)
    assert {node.name: worker(job, node) for node in job.nodes if node is not lost} == pids
    assert job.change(second).resumed == last
    end(job, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("odd", ["forgets", "forgets,swaps"])
def test_ranks_beside_a_killed_one_stay(clusters: Clusters, undisturbed: Undisturbed, odd: str) -> None:
    """Two on each node, of which one writes for both. Not if a callback then changes the weights."""
    training = replace(IN_STEPS, extra=("--stay", f"--odd={odd}", "--memory-every=15"))
    pace = {"DALSEGNO_TEST_STEPS": "4", "DALSEGNO_TEST_STANDS": "backward"}
    flags = (*IN_MEMORY, "--nproc-per-node=2")
    job = clusters(training=training, nnodes="1:2", agent_flags=flags, agent_environment=pace)
    job.start("a", "b")
    first = job.wait_world(4, steps=3)
    last = stood_still(job, first)
    before = [workers(job, node) for node in job.nodes]
    killed = worker(job, job.nodes[0])
    processes.send([killed], signal.SIGKILL)
    second = job.wait_world(4, after=first)
    after = [workers(job, node) for node in job.nodes]
    kept = {pid for each in before for pid in each} & {pid for each in after for pid in each}
    assert len(kept) == (0 if "swaps" in odd else 3), (before, killed, after)
    assert job.change(second).resumed == last
    if "swaps" in odd:
        assert any("has changed the model or its optimizer in on_fit_end" in node.text() for node in job.nodes)
    end(job, undisturbed)


@pytest.mark.full
def test_who_stays_goes_on_from_memory(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """The drain's step lies in the nodes' memory, and is written to the disk behind."""
    training = Trained(extra=("--stay", "--memory-every=5"))
    job, first = together(clusters, "a", "b", training=training, nnodes="2:3", agent_flags=IN_MEMORY)
    a_third_comes_and_goes(job, first)
    end(job, undisturbed)


@pytest.mark.full
def test_who_holds_the_wrapper_starts_anew(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """One line says why, and nothing is lost."""
    job, first = together(clusters, "a", "b", training=Trained(extra=("--stay", "--odd=holds")), nnodes="2:3")
    a, _ = job.nodes
    before = worker(job, a)
    job.start("c")
    job.wait_world(3, steps=3, after=first)
    assert worker(job, a) != before
    assert any("take trainer.model instead" in node.text() for node in job.nodes)
    end(job, undisturbed)


@pytest.mark.full
def test_ranks_of_a_node_that_stays(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Two on each node, with processes that read the data: the node with the first two leaves."""
    training = Trained(extra=("--stay", "--memory-every=5"))
    environment = {"DALSEGNO_TEST_LOADERS": "fork"}
    job = clusters(training=training, agent_flags=["--nproc-per-node=2"], agent_environment=environment)
    leave_with_the_first_ranks(job)
    end(job, undisturbed)


def joined(clusters: Clusters, odd: str, *, stays: bool, began_anew: bool = False) -> Cluster:
    """A job of one node that another one has joined; `stays`: whether the first one's process is the same then.

    `began_anew`: the world had to be made once more.
    """
    job = clusters(training=Trained(extra=("--stay", f"--odd={odd}")))
    first = job.open("a")
    (a,) = job.nodes
    pid = worker(job, a)
    job.wait_step(6)
    job.start("b")
    second = job.wait_world(2, steps=3, after=first)
    assert (worker(job, a) == pid) is stays
    assert (job.change(second).cause == "b joined") is not began_anew
    return job


@pytest.mark.full
@pytest.mark.parametrize("several", ["", "several,"])
@pytest.mark.parametrize("odd", ["joins", "talks", "joins,talks"])
def test_a_group_of_the_scripts_own(clusters: Clusters, undisturbed: Undisturbed, odd: str, several: str) -> None:
    """Who stays makes it where a new process does, and meets it at its barriers.

    It began alone, so where a script does so only with several ranks, it follows the new one.
    """
    end(joined(clusters, several + odd, stays=True), undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("several", ["", "several,"])
def test_ranks_that_exchange_data(clusters: Clusters, undisturbed: Undisturbed, several: str) -> None:
    """Who stays does not have them any more. Who learns that only as it follows is replaced at once."""
    job = joined(clusters, f"{several}sums", stays=False, began_anew=bool(several))
    line = "cannot follow a new one to the training, which exchanges data there"
    assert any(line in node.text() for node in job.nodes) is bool(several)
    end(job, undisturbed)


@pytest.mark.full
def test_a_change_that_cuts_an_evaluation_short(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """The process stays, and evaluates in the next world."""
    end(joined(clusters, "evaluates", stays=True), undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("extra", [("--stay",), ()])
def test_a_leave_before_the_first_step(clusters: Clusters, undisturbed: Undisturbed, extra: tuple[str, ...]) -> None:
    """A join cuts an evaluation short, and a leave the same one again: that world leaves memory as it found it."""
    training = Trained(extra=(*extra, "--odd=lingers", "--memory-every=5"))
    job, _ = together(clusters, "a", "b", training=training, nnodes="2:3", agent_flags=["--memory-replicas=1"])
    a, _ = job.nodes
    job.wait_for(lambda: "2 ranks evaluate" in a.text(), "an evaluation")
    job.start("c")
    job.wait_for(lambda: "3 ranks evaluate" in a.text(), "an evaluation of three")
    second, told = job.epoch(), time.monotonic()
    job.leave(job.node("c"))
    job.wait_exit(job.node("c"))
    assert time.monotonic() - told < PART_PATIENCE_SECONDS, "nobody waits for a part that no rank has written"
    job.wait_world(2, steps=3, after=second)
    end(job, undisturbed)


@pytest.mark.full
def test_who_has_frozen_parameters_starts_anew(clusters: Clusters) -> None:
    """A wrapper that is made now would be another one than a new process makes."""
    job = joined(clusters, "freezes", stays=False)
    assert any("the script has frozen or unfrozen parameters" in node.text() for node in job.nodes)
    job.finish()


@pytest.mark.full
def test_a_callback_that_changes_the_weights_as_the_world_ends(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """The process does not stay with them; it ends as one that has drained."""
    end(joined(clusters, "swaps", stays=False), undisturbed)


@pytest.mark.full
def test_a_callback_that_raises_as_the_world_ends(clusters: Clusters) -> None:
    """All is saved by then: it is the change that it was, and no crash."""
    job = joined(clusters, "raises", stays=False)
    for node in job.nodes:
        job.leave(node)
    for node in job.nodes:
        job.wait_exit(node)


@pytest.mark.full
def test_a_stop_that_the_old_world_has_agreed_on(clusters: Clusters) -> None:
    """The new rank hears of it, and both end there."""
    job = clusters(training=Trained(extra=("--stay", "--odd=stops")))
    job.open("a")
    job.wait_step(21)
    job.start("b")
    job.finish()
    assert max(line.step for line in job.poll()) in (21, 22)
