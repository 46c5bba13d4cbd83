"""Data, schedules, callbacks and state that are not what they were on another rank, or at another start: real ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic.checkpoint import CheckpointStore
from tests.support.jobs.ports import free_port
from tests.support.pages.mistakes import Comes, brings
from tests.support.workers.zero_runs import run_world

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

WORKER = Path(__file__).parents[1] / "support" / "workers" / "kept_worker.py"
Results = list[dict[str, Any]]


def run(directory: Path, world: int, cases: list[dict[str, Any]]) -> list[Results]:
    """Results of each case on each rank; ``run`` names the directory that a case shares with others."""
    directory.mkdir(parents=True, exist_ok=True)
    placed = [
        {"steps": 4, **case, "directory": str(directory / str(case.get("run", f"case-{n}"))), "port": free_port()}
        for n, case in enumerate(cases)
    ]
    ended = run_world(world, [str(WORKER), json.dumps(placed), str(directory)])
    assert [code for code, _ in ended] == [0] * world, "\n".join(output for _, output in ended)
    ranks = [json.loads((directory / f"result-{rank}.json").read_text()) for rank in range(world)]
    return [list(of_case) for of_case in zip(*ranks, strict=True)]


def assert_refused(ranks: Results, line: str) -> None:
    """On all ranks with the same words, before a step."""
    (said,) = {rank["refused"] for rank in ranks}
    assert re.search(line, said), said
    assert "\n" not in said
    assert [rank["steps"] for rank in ranks] == [[]] * len(ranks)


def assert_goes_on(ranks: Results, steps: list[int], said: str = "") -> None:
    """On all ranks; and perhaps says a line about it, on one."""
    assert [rank["refused"] for rank in ranks] == [""] * len(ranks)
    assert [rank["steps"] for rank in ranks] == [steps] * len(ranks)
    lines = [line for rank in ranks for line in rank["said"]]
    assert len(lines) == bool(said), lines
    assert not said or re.search(said, lines[0]), lines


@brings(
    "a data set with other samples, or in another order, on some rank (a directory as the system lists it, a shuffle "
    "without a seed, a share of its own)",
    Comes.REFUSED,
    "the length is the same, and some samples would be trained twice, others never. Three samples of a data set, or "
    "the first of an iterable one, are compared. What is not the same in two readings is random, and compared with "
    "nothing",
    "give all ranks the same; `check_data=False` (of `Batches` and `Trainer`) where samples may differ",
)
def test_other_data_on_a_rank(tmp_path: Path) -> None:
    """Where the data are read: in the process, or by a loader's workers; samples, or a stream."""
    cases: list[dict[str, Any]] = [
        {"data": "another rank's"},
        {"data": "another rank's", "workers": 1},
        {"data": "another rank's", "kind": "loop", "how": "given"},
        {"data": "split"},
        {"data": "another rank's", "options": {"check_data": False}},
        {"data": "stream", "workers": 2},
        {"data": "drawn"},
        {"data": "drawn", "workers": 1},
        {"data": "of its own"},
    ]
    *wrong, split, allowed, stream, drawn, in_workers, own = run(tmp_path, 2, cases)
    for ranks in wrong:
        assert_refused(ranks, r"Unlike: the ranks have other data: sample \d+ is not the same on rank 0 and rank 1")
    assert_refused(split, "Unlike: the ranks have other data: sample 0 is not the same on rank 0 and rank 1")
    for ranks in (allowed, stream, drawn, in_workers, own):
        assert_goes_on(ranks, [1, 2, 3, 4])


@brings(
    "another data set of the same length, or the same in another order, when a run resumes",
    Comes.REFUSED,
    "some samples would come twice and others never. A few samples are compared, up to rounding, with what the "
    "checkpoint says of them",
    "give the data that the run began with, in their order; `check_data=False` for a change that is meant",
)
def test_other_data_at_the_next_start(tmp_path: Path) -> None:
    """In the same world and in another one; the data of the beginning go on."""
    cases: list[dict[str, Any]] = [
        {"run": "trained", "steps": 2},
        {"run": "trained", "steps": 4, "order": 3},
        {"run": "trained", "steps": 4, "order": 3, "options": {"check_data": False}},
        {"run": "drawn", "steps": 2, "data": "drawn"},
        {"run": "drawn", "steps": 4, "data": "drawn"},
        {"run": "stream", "steps": 2, "data": "stream"},
        {"run": "stream", "steps": 4, "data": "stream"},
        {"run": "as it was", "steps": 2},
        {"run": "as it was", "steps": 4},
    ]
    _, other, meant, _, drawn, _, stream, _, same = run(tmp_path, 2, cases)
    assert_refused(other, r"Unlike: these are not the data of step-2\.e\d+\.\d+: sample \d+ is another one")
    for ranks in (meant, drawn, stream, same):
        assert_goes_on(ranks, [3, 4])
    samples = [dict(one.cut.samples) for one in CheckpointStore(tmp_path / "as it was").sealed() if one.cut]
    assert samples[0] == samples[1]
    assert sorted(samples[0]) == ["sample 0", "sample 18", "sample 35"]
    alone, refused = run(tmp_path, 1, [{"run": "as it was", "steps": 6}, {"run": "as it was", "steps": 8, "order": 3}])
    assert_goes_on(alone, [5, 6])
    assert_refused(refused, "these are not the data of step-6")


@brings(
    "`LambdaLR` or `MultiplicativeLR` with another function when a run resumes, also inside of other schedulers",
    Comes.REFUSED,
    "torch saves where such a schedule stands, and not its function: the learning rate would leave its curve. What the "
    "function gives at steps from 0 to 2,000,000 is compared, unless it may have a memory (it counts its calls, draws "
    "numbers, or nobody can tell): that is never called out of turn",
    "restore it; `other_schedule=True` (of `s.state`, `s.engine`, `Trainer`, `TrainingState.load`, "
    "`elastic.deepspeed.restore`) for a change that is meant",
)
@pytest.mark.parametrize("how", ["ddp", "fsdp", "zero2", "own loop", "engine"])
def test_another_function_of_a_schedule(tmp_path: Path, how: str) -> None:
    kinds = {"engine": {"kind": "engine"}, "own loop": {"kind": "loop", "how": "given"}}
    told = {**kinds.get(how, {"strategy": how}), "run": "run"}
    cases: list[dict[str, Any]] = [
        {**told, "base": 0.9, "steps": 2},
        {**told, "base": 0.5},
        {**told, "base": 0.9, "steps": 3},
        {**told, "base": 0.5, "options": {"other_schedule": True}},
    ]
    _, other, same, meant = run(tmp_path, 2, cases)
    assert_refused(other, r"ValueError: the scheduler's function is another one .* gave 0\.9, and this gives 0\.5")
    assert_goes_on(same, [3])
    assert same[0]["rates"] == pytest.approx([0.02 * 0.9**3])
    assert_goes_on(meant, [4])
    assert meant[0]["rates"] == pytest.approx([0.02 * 0.5**4])


@brings(
    "a scheduler that is not given to `TrainingState`, when a run resumes",
    Comes.REFUSED,
    "it begins anew, and sets the learning rate of the first steps. Said at the start of the run; refused where it "
    "does not stand where the run goes on",
    "`TrainingState(..., scheduler=scheduler)`, or move it to `session.step` yourself",
)
def test_a_schedule_that_is_left_out(tmp_path: Path) -> None:
    """One that the script moves itself goes on."""
    cases: list[dict[str, Any]] = [
        {"kind": "loop", "run": how, "how": how, "steps": steps}
        for how in ("left out", "made late", "moved", "given")
        for steps in (2, 4)
    ]
    begun, left_out, _, late, _, moved, _, given = run(tmp_path, 2, cases)
    assert_goes_on(begun, [1, 2])
    for ranks in (left_out, late):
        assert_refused(ranks, "ValueError: StepLR sets the learning rate of optimizer and is not in TrainingState")
    assert_goes_on(moved, [3, 4])
    assert_goes_on(given, [3, 4])
    assert moved[0]["losses"] == given[0]["losses"]


@brings(
    "callbacks of one class in another order than they were saved in",
    Comes.BITWISE,
    "each is known again by the plain values that it was made with",
)
@brings(
    "several callbacks of one class that were made with other values when a run resumes",
    Comes.REFUSED,
    "nobody could say which state is whose; a class's only one may be made otherwise",
    "make them as they were, or give each a `key` (`Callback.key`)",
)
@brings(
    "a callback with a state that is left out when a run resumes, or a new one",
    Comes.SAID,
    "its state is lost with the next checkpoint; the new one begins anew",
    "give it again where that is not meant",
)
def test_callbacks_that_were_moved_or_are_gone(tmp_path: Path) -> None:
    def averages(run: str, steps: int, *decays: float) -> dict[str, Any]:
        return {"run": run, "steps": steps, "averages": list(decays)}

    cases = [
        averages("whole", 4, 0.5, 0.9),
        averages("run", 2, 0.5, 0.9),
        averages("run", 3, 0.6, 0.8),
        averages("run", 4, 0.9, 0.5),
        averages("run", 5, 0.9),
        averages("run", 6, 0.9, 0.5),
    ]
    whole, _, unknown, turned, gone, new = run(tmp_path, 2, cases)
    assert_refused(unknown, "ValueError: the checkpoint has states of 2 callbacks of class Average .* than the 2 here")
    assert_goes_on(turned, [3, 4])
    assert turned[0]["kept"] == whole[0]["kept"]
    assert_goes_on(gone, [5], "the state of Average-1 is in the checkpoint, and no callback takes it: it is lost")
    assert_goes_on(new, [6], "the checkpoint has no state of Average-1, which begins anew")


@brings(
    "a buffer that is not persistent and changes in training (a warm-up's counter, a queue), with `s.state`, "
    "`TrainingState`, `s.engine` or `Trainer`",
    Comes.BITWISE,
    "`state_dict()` leaves it out, so it is saved beside it as soon as it has changed",
)
@brings(
    "a plain attribute of a module that changes in training (`self.calls += 1`)",
    Comes.SAID,
    "no `state_dict()` has it, and nobody knows what it is for: a resumed run has its first value again",
    "where the training depends on it: `register_buffer`, or `get_extra_state`",
)
@pytest.mark.parametrize("how", ["ddp", "fsdp", "zero2", "engine 1", "engine 3"])
def test_state_that_no_state_dict_has(tmp_path: Path, how: str) -> None:
    kind, _, stage = how.partition(" ")
    told = {"kind": "given engine", "stage": int(stage)} if kind == "engine" else {"strategy": how}
    cases: list[dict[str, Any]] = [
        {**told, "model": "warms", "run": "whole"},
        {**told, "model": "warms", "run": "run", "steps": 2},
        {**told, "model": "warms", "run": "run"},
        {**told, "model": "counts", "save_every": 1},
    ]
    whole, begun, rest, counts = run(tmp_path, 2, cases)
    assert_goes_on(begun, [1, 2], r"\bwarm \(buffers\): the forward pass changes it")
    assert_goes_on(rest, [3, 4])
    assert begun[0]["losses"] + rest[0]["losses"] == whole[0]["losses"]
    assert_goes_on(counts, [1, 2, 3, 4], r"\bcalls changed while the model trained, and is in no checkpoint")


@brings(
    "a buffer that is not persistent, or a plain attribute, that changes in training, in a Hugging Face `Trainer`",
    Comes.SAID,
    "it saves the model's `state_dict()`: a resumed run has their first values again",
    "where the training depends on it: `register_buffer` without `persistent=False`",
)
@pytest.mark.parametrize("model", ["warms", "counts", ""])
def test_state_that_a_trainer_of_hugging_face_does_not_save(tmp_path: Path, model: str) -> None:
    """One rank says so; nothing of a model that has none."""
    (ranks,) = run(tmp_path, 2, [{"kind": "hugging face", "model": model}])
    assert [(rank["refused"], rank["steps"]) for rank in ranks] == [("", [1, 2, 3, 4])] * 2
    lines = [line for rank in ranks for line in rank["said"] if "while the model trained" in line]
    name = {"warms": "inside.warm", "counts": "inside.calls"}.get(model, "")
    assert [line.split()[0] for line in lines] == [name] * bool(name)
