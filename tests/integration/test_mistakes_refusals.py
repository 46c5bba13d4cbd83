"""Mistakes of one rank alone, which all ranks refuse, and mistakes that show late, which are named: with real ranks."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.jobs.ports import free_port
from tests.support.pages.mistakes import Comes, brings
from tests.support.workers import refusing_worker as worker
from tests.support.workers.zero_runs import run_world

pytestmark = pytest.mark.timeout(180)

Results = dict[str, list[dict[str, Any]]]

SAVES = {"steps": 2}
# In order: what resumes comes after what saves. A case without a directory has its own.
CASES: dict[str, dict[str, Any]] = {
    "first trainer": {"kind": "trainer", **SAVES},
    "trainer, one other": {"kind": "trainer", "other": True, "only": "1", "directory": "first trainer"},
    "first loop": {"kind": "loop", **SAVES},
    "loop, one other": {"kind": "loop", "other": True, "only": "1", "directory": "first loop"},
    "loop, goes on": {"kind": "loop", "directory": "first loop", "steps": 3},
    "apart": {"kind": "loop", "apart": True},
    "callback late": {"kind": "trainer", "late": "key"},
    "callback lambda": {"kind": "trainer", "late": "lambda"},
    "callback fsdp": {"kind": "trainer", "late": "key", "strategy": "fsdp"},
    "callback background": {"kind": "trainer", "late": "lambda", "background": True},
    "part late": {"kind": "loop", "late": "key"},
    "stranger": {"kind": "trainer", "stranger": True, "strategy": "fsdp"},
    "lazy": {"kind": "trainer", "lazy": True},
    "lazy fsdp": {"kind": "trainer", "lazy": True, "strategy": "fsdp"},
    "lazy zero": {"kind": "trainer", "lazy": True, "strategy": "deepspeed"},
    "lazy loop": {"kind": "loop", "lazy": True},
    "adds": {"kind": "trainer", "adds": True},
    "adds fsdp": {"kind": "trainer", "adds": True, "strategy": "fsdp"},
    "zero0": {"kind": "trainer", "strategy": "zero0", **SAVES},
    "zero0 turned": {"kind": "trainer", "strategy": "zero0", "turned": True, "directory": "zero0"},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of each case, what came of it on each of two ranks; started once for all."""
    place = tmp_path_factory.mktemp("refusals")

    def told(name: str, case: dict[str, Any]) -> dict[str, Any]:
        return {**case, "directory": str(place / case.get("directory", name)), "port": free_port()}

    ended = run_world(2, [worker.__file__, json.dumps([told(*one) for one in CASES.items()]), str(place)], seconds=150)
    assert [code for code, _ in ended] == [0, 0], "\n".join(output for _, output in ended)
    ranks: list[list[dict[str, Any]]] = [json.loads((place / f"result-{rank}.json").read_text()) for rank in (0, 1)]
    return {name: list(of_case) for name, of_case in zip(CASES, zip(*ranks, strict=True), strict=True)}


def assert_refused(results: Results, name: str, line: str, steps: list[int]) -> None:
    """On all ranks, in one line, after these steps."""
    for rank in results[name]:
        assert re.search(line, rank["refused"]), results[name]
        assert "\n" not in rank["refused"]
        assert rank["steps"] == steps


@brings(
    "a script or data of one rank or node that do not fit the checkpoint, while those of the others do",
    Comes.REFUSED,
    "all ranks hear of it before they train, and nobody waits for the one that refused. Under `dlrover-run` a node"
    " that joined a healthy run with it becomes a spare, and the others go on",
    "start that node anew with what the others have",
)
@pytest.mark.parametrize("kind", ["trainer", "loop"])
def test_what_one_rank_refuses_all_refuse(results: Results, kind: str) -> None:
    assert_refused(results, f"{kind}, one other", "was saved with .*AdamW.*this training has .*SGD", [])
    assert "(rank 1)" in results[f"{kind}, one other"][0]["refused"]
    assert [rank["steps"] for rank in results["loop, goes on"]] == [[3], [3]]


@brings(
    "another `checkpoint_dir` on each rank, or one path on nodes with disks of their own, outside `dlrover-run`",
    Comes.REFUSED,
    "each would have a part of every checkpoint, and no directory all of one",
    "one directory that all ranks see; its path may differ",
)
def test_a_directory_for_each_rank(results: Results) -> None:
    assert_refused(
        results, "apart", r"checkpoint_dir is \S+-0 on rank 0 and \S+-1 on rank 1, which are not the same", []
    )


@brings(
    "a state of a callback or of a part of `TrainingState` that cannot be saved from some step on",
    Comes.REFUSED,
    "every later save would fail; the run ends with its last checkpoint",
    "mend the callback or part that the line names",
)
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("callback late", "the state of the callback Late cannot be had: KeyError: 'accuracy'"),
        ("callback lambda", "the state of the callback Late has more than plain values"),
        ("callback fsdp", "the state of the callback Late cannot be had: KeyError: 'accuracy'"),
        ("callback background", "the state of the callback Late has more than plain values"),
        ("part late", r"average \(Part\) gives no state to save: 'accuracy'"),
    ],
)
def test_a_save_that_fails_late_names_the_part(results: Results, name: str, line: str) -> None:
    for rank in results[name]:
        assert re.search(f"SaveError: saving step [23] failed: .*{line}", rank["refused"]), results[name]
        assert 2 <= len(rank["steps"]) <= worker.LATE
    assert not any("training goes on" in said for rank in results[name] for said in rank["said"])


@brings(
    "an FSDP Trainer whose optimizer has parameters that are not the model's",
    Comes.REFUSED,
    "FSDP puts sharded parameters in the place of those that the model had",
    "take them from the model that `optimizer(model)` is given",
)
def test_an_optimizer_of_other_parameters(results: Results) -> None:
    assert_refused(
        results, "stranger", r"AdamW has 1 parameters that are not the model's, the first of shape \[3\]", []
    )


@brings(
    "a lazy module (`nn.LazyLinear`, …) that has seen no batch",
    Comes.REFUSED,
    "its parameters have no shape yet: nothing could be loaded into them, or compared between ranks",
    "show the model one batch before, or give the module its sizes",
)
@pytest.mark.parametrize("name", ["lazy", "lazy fsdp", "lazy zero", "lazy loop"])
def test_a_lazy_module(results: Results, name: str) -> None:
    assert_refused(results, name, r"the model's 2\.weight has no shape yet .*show the model one batch", [])


@brings(
    "`add_param_group` during a run",
    Comes.SAID,
    "what is saved from then on resumes only where all these groups are made before it is loaded",
    "make all groups at the start, with `lr=0` until they are wanted",
)
@pytest.mark.parametrize("name", ["adds", "adds fsdp"])
def test_a_group_that_is_added_in_a_callback(results: Results, name: str) -> None:
    assert [rank["refused"] for rank in results[name]] == ["", ""]
    lines = [line for rank in results[name] for line in rank["said"] if "trains other parameters" in line]
    assert len(lines) == 1, lines
    assert "2.bias, 2.weight" in lines[0]


def test_other_groups_at_stage_0(results: Results) -> None:
    """DeepSpeed's files of stage 0 say nothing of them; our note beside them does."""
    assert_refused(results, "zero0 turned", "parameters were saved in another order: number 0 was 0.weight", [])
