"""Processes of a Hugging Face Trainer that stay: the same ones train on, and the curve is the same."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.test_hf_survivors import training as surviving
from tests.integration.test_hf_trainer import assert_trainers_own, trainer_state, training
from tests.integration.test_membership import AT_ONCE, Clusters, any_number, end, together
from tests.integration.test_staying import (
    a_third_comes_and_goes,
    crash_and_grow,
    join_and_leave,
    leave_with_the_first_ranks,
    scale_away_and_back,
    the_first_of_two_leaves,
    two_of_three,
    worker,
    workers,
)
from tests.integration.test_staying_trainers import Trained
from tests.integration.test_survivors import FLAGS, stood_still
from tests.support.jobs import local_processes as processes
from tests.support.jobs.cluster import LIMIT, ROOT, Cluster, Undisturbed

pytestmark = [pytest.mark.timeout(400), pytest.mark.executed]

STAYS = training("--stay")
FULLY = [pytest.param(where, marks=pytest.mark.full) for where in ("backward", "nowhere")]
IN_MEMORY = (*AT_ONCE, "--memory-replicas=1")


@pytest.mark.full
def test_who_stays_trains_on_through_joins_and_leaves(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """2 to 3 nodes and back: nobody who stays starts anew, and what the Trainer saves is its own as ever."""
    job, first = two_of_three(clusters, training=training("--stay", "--evaluate-every=10"))
    a_third_comes_and_goes(job, first)
    end(job, undisturbed)
    assert_trainers_own(job)
    state = trainer_state(job, job.training.steps)
    evaluated = [line["step"] for line in state["log_history"] if "eval_loss" in line]
    assert evaluated == list(range(10, job.training.steps + 1, 10))
    assert Path(state["best_model_checkpoint"]).is_dir()


@pytest.mark.full
def test_who_was_rank_1_becomes_rank_0(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """The first leaves: another one writes what rank 0 writes, in the end alone, without a wrapper."""
    job, first = together(clusters, "a", "b", training=STAYS, nnodes="1:3")
    the_first_of_two_leaves(job, first)
    end(job, undisturbed)
    assert_trainers_own(job)


def odd(what: str) -> Trained:
    """A training that is odd, see `hf_odd`."""
    script = ROOT / "tests" / "support" / "workers" / "hf_odd.py"
    return Trained(script, 60, 10, extra=(*STAYS.extra, f"--odd={what}"), needs_agent=True, preloaded=STAYS.preloaded)


@pytest.mark.full
@pytest.mark.parametrize("what", ["optimizer", "scheduler", "wraps", "patches", "arguments", "barrier", "evaluates"])
def test_trainers_as_people_write_them(clusters: Clusters, undisturbed: Undisturbed, what: str) -> None:
    """A third node joins, and the first rank leaves. Where ranks evaluate before `train()`, no process stays."""
    job, first = two_of_three(clusters, training=odd(what))
    pids = {node.name: worker(job, node) for node in job.nodes}
    job.start("c")
    second = job.wait_world(3, steps=3, after=first)
    stays = what != "evaluates"
    assert ({node.name: worker(job, node) for node in job.nodes if node.name in pids} == pids) is stays
    leaver = job.member(0)
    job.leave(leaver)
    job.wait_exit(leaver)
    job.wait_world(2, steps=3, after=second)
    if not stays:
        assert any("the ranks of this script exchange data, or make other" in node.text() for node in job.nodes)
    job.finish()
    job.assert_lost({})
    # Two of them train in bf16, whose sums depend on how they are cut.
    job.assert_undisturbed(undisturbed, 1e-3 if what in ("wraps", "patches") else LIMIT)


@pytest.mark.full
def test_who_is_left_out_ends_and_comes_back(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Scaled away and back."""
    job, first = together(clusters, "a", "b", training=STAYS)
    scale_away_and_back(job, first)
    end(job, undisturbed)


@pytest.mark.full
def test_a_crash_without_memory_starts_all_anew(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """A killed worker breaks the world for all; what is started then stays at the next planned change."""
    job, first = two_of_three(clusters, training=STAYS)
    second = crash_and_grow(job, first)
    end(job, undisturbed, lost={second: any_number(job)})


@pytest.mark.full
@pytest.mark.parametrize("cell", ["static", "bf16"])
def test_ranks_of_a_node_that_stays(clusters: Clusters, undisturbed: Undisturbed, cell: str) -> None:
    """Two on each node: the node with the first two leaves. With what accelerate and torch put around the model."""
    one = training("--stay", "--static-graph") if cell == "static" else STAYS
    environment = {"DALSEGNO_TEST_ARGUMENTS": json.dumps({"bf16": True} if cell == "bf16" else {})}
    job = clusters(training=one, agent_flags=["--nproc-per-node=2"], agent_environment=environment)
    leave_with_the_first_ranks(job)
    if cell == "bf16":  # another curve than the undisturbed run's, which knows nothing of it
        job.finish()
        job.assert_lost({})
    else:
        end(job, undisturbed)


@pytest.mark.parametrize("what", ["worker", pytest.param("node", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "others", [pytest.param(one, marks=pytest.mark.full) for one in ("backward", "nowhere")] + ["before"]
)
def test_who_survives_a_crash_stays(clusters: Clusters, undisturbed: Undisturbed, what: str, others: str) -> None:
    """It saves what it holds, and trains on with that: no step is lost, and nothing is made or loaded anew.

    The others compute, or clip their gradients, and are told of it; or they wait for the lost rank's gradients, and get
    an error.
    """
    pace = {"DALSEGNO_TEST_STEPS": "9", "DALSEGNO_TEST_STANDS": others}
    job = clusters(
        training=surviving("--stay"), nnodes="1:2", script_flags=FLAGS, agent_flags=IN_MEMORY, agent_environment=pace
    )
    job.start("a")
    job.start("b", environment={"DALSEGNO_TEST_STANDS": "before" if others == "before" else "backward"})
    first = job.wait_world(2, steps=3)
    last = stood_still(job, first)
    a, b = job.nodes
    pid = worker(job, a)
    if what == "worker":
        processes.send([worker(job, b)], signal.SIGKILL)
    else:
        job.kill_node(b)
    second = job.wait_world(1 if what == "node" else 2, after=first)
    assert worker(job, a) == pid
    assert job.change(second).resumed == last
    end(job, undisturbed)


@pytest.mark.full
def test_ranks_beside_a_killed_one_stay(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """Two on each node, of which one writes for both."""
    pace = {"DALSEGNO_TEST_STEPS": "9", "DALSEGNO_TEST_STANDS": "backward"}
    flags = (*IN_MEMORY, "--nproc-per-node=2")
    one = surviving("--stay")
    job = clusters(training=one, nnodes="1:2", script_flags=FLAGS, agent_flags=flags, agent_environment=pace)
    job.start("a", "b")
    first = job.wait_world(4, steps=3)
    last = stood_still(job, first)
    before = [workers(job, node) for node in job.nodes]
    processes.send([worker(job, job.nodes[0])], signal.SIGKILL)
    second = job.wait_world(4, after=first)
    after = [workers(job, node) for node in job.nodes]
    assert len({pid for each in before for pid in each} & {pid for each in after for pid in each}) == 3
    assert job.change(second).resumed == last
    end(job, undisturbed)


@pytest.mark.full
def test_who_stays_goes_on_from_memory(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """The drain's step lies in the nodes' memory, and is written to the disk behind."""
    flags = {"agent_flags": ["--memory-replicas=1"], "script_flags": ("--memory-every=5",)}
    job, first = two_of_three(clusters, training=STAYS, **flags)
    a_third_comes_and_goes(job, first)
    end(job, undisturbed)


def joined(clusters: Clusters, environment: dict[str, str], *, stays: bool) -> Cluster:
    """A job of one node that another one has joined; `stays`: whether the first one's process is the same then."""
    job, first = two_of_three(clusters, training=STAYS, agent_environment=environment)
    a, _ = job.nodes
    pid = worker(job, a)
    job.start("c")
    job.wait_world(3, steps=3, after=first)
    assert (worker(job, a) == pid) is stays
    return job


@pytest.mark.full
def test_who_stays_ends_what_reads_its_data(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """The next world's data are dealt anew, to the evaluation's processes, too."""
    given = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    evaluated = {"eval_strategy": "steps", "eval_steps": 10}
    job = joined(clusters, {"DALSEGNO_TEST_ARGUMENTS": json.dumps({**given, **evaluated})}, stays=True)
    end(job, undisturbed)


@pytest.mark.full
def test_who_holds_the_wrapper_starts_anew(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """One line says why, and nothing is lost."""
    job = joined(clusters, {"DALSEGNO_TEST_KEEPS": "1"}, stays=False)
    assert any("Take trainer.model instead" in node.text() for node in job.nodes)
    end(job, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("how", ["barrier", "sum"])
def test_ranks_that_talk_before(clusters: Clusters, undisturbed: Undisturbed, how: str) -> None:
    """As scripts do that have rank 0 read the data first: who stays meets new ones there. A sum it cannot repeat."""
    job = joined(clusters, {"DALSEGNO_TEST_TALKS": how}, stays=how == "barrier")
    line = "before train() the ranks of this script exchange data, or make other process groups"
    assert any(line in node.text() for node in job.nodes) is (how == "sum")
    end(job, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("talks", ["", "barrier"])
def test_who_began_alone(clusters: Clusters, undisturbed: Undisturbed, talks: str) -> None:
    """1 to 2 to 3 nodes and back: `main_process_first` did nothing there, so it follows a new process."""
    environment = {"DALSEGNO_TEST_TALKS": talks} if talks else {}
    job = clusters(training=STAYS, nnodes="1:3", agent_environment=environment)
    join_and_leave(job)
    end(job, undisturbed)


@pytest.mark.full
def test_a_change_that_cuts_an_evaluation_short(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """The processes stay, and evaluate in the next world."""
    pace = {"DALSEGNO_TEST_STEPS": "1", "DALSEGNO_TEST_STANDS": "evaluation"}
    # The ranks do not ask one another at each batch that is soon computed.
    pace["DALSEGNO_TEST_ARGUMENTS"] = json.dumps({"per_device_eval_batch_size": 1})
    one = replace(training("--stay", "--evaluate-every=30"), save_every=30)
    job, first = two_of_three(clusters, training=one, agent_environment=pace)
    job.wait_step(30)
    job.wait_standing()
    pids = [worker(job, node) for node in job.nodes]
    job.start("c")
    job.wait_line("3 nodes began from step 30")
    assert all(processes.is_alive(pid) for pid in pids)
    end(job, undisturbed)
    assert job.change(first + 1).cause == "c joined"
    state = trainer_state(job, job.training.steps)
    assert [line["step"] for line in state["log_history"] if "eval_loss" in line] == [30, 60]
