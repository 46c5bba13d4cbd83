"""A state that is not what it looks like, and saves that cannot succeed: with real ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic.checkpoint import CheckpointStore
from tests.support.jobs.ports import free_port
from tests.support.pages import printed
from tests.support.pages.mistakes import Comes, brings
from tests.support.workers.zero_runs import run_world

pytestmark = [pytest.mark.full, pytest.mark.timeout(180)]

WORKER = Path(__file__).parents[1] / "support" / "workers" / "state_worker.py"
TRAINER = {"kind": "trainer"}


def run(directory: Path, world: int, cases: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Results of each case on each rank; a case without a directory gets one of its own."""
    return run_and_listen(directory, world, cases)[0]


def run_and_listen(
    directory: Path, world: int, cases: list[dict[str, Any]]
) -> tuple[list[list[dict[str, Any]]], list[str]]:
    """The same, and what the ranks printed."""
    directory.mkdir(parents=True, exist_ok=True)
    cases = [{"directory": str(directory / f"case-{n}"), **case, "port": free_port()} for n, case in enumerate(cases)]
    ended = run_world(world, [str(WORKER), json.dumps(cases), str(directory)])
    assert [code for code, _ in ended] == [0] * world, "\n".join(output for _, output in ended)
    ranks = [json.loads((directory / f"result-{rank}.json").read_text()) for rank in range(world)]
    return [list(of_case) for of_case in zip(*ranks, strict=True)], [output for _, output in ended]


def assert_refused(ranks: list[dict[str, Any]], line: str, steps: list[int]) -> None:
    """On all ranks with the same words, after these steps."""
    (said,) = {rank["refused"] for rank in ranks}
    assert re.search(line, said), said
    assert "\n" not in said
    assert [rank["steps"] for rank in ranks] == [steps] * len(ranks)


# A model, part or callback -> what is said of it.
BY_STATE: list[tuple[dict[str, Any], str]] = [
    (
        {"kind": "sharded"},
        r"the model's first\.weight is sharded, .*strategy='fsdp'.*distributed.checkpoint",
    ),
    ({"kind": "sharded", "load": False}, r"could not be saved: ValueError: the model's first\.weight is sharded"),
    ({"kind": "sharded", "load": False, "how": "background"}, r"could not be saved: .*first\.weight is sharded"),
    ({"kind": "sharded_1"}, "the model is wrapped in FullyShardedDataParallel"),
    ({"kind": "sharded_1", "load": False}, "could not be saved: .* is wrapped in FullyShardedDataParallel"),
    ({"kind": "inside_sharded_1"}, r"the model's first\.weight is sharded"),
    ({"kind": "sharded_part"}, r"the state of average has a sharded tensor \(state.first.weight\).*full_tensor"),
    (
        {"kind": "partitioned"},
        r"optimizer \(ZeroRedundancyOptimizer\) gives no state to save: .*consolidate_state",
    ),
    ({"kind": "partitioned", "how": "background"}, r"optimizer \(ZeroRedundancyOptimizer\) gives no state to save"),
    ({"kind": "extra"}, r"the model's state_dict\(\) \(get_extra_state\?\) has more .*: it holds a pathlib"),
    ({"kind": "one_meta"}, r"first\.weight is on the meta device and has no values"),
]
BY_TRAINER: list[tuple[dict[str, Any], str]] = [
    ({"keeps": "lambda"}, "SaveError: .*the state of the callback Keeps has more than plain values .*Can't pickle"),
    (
        {"keeps": "lambda", "strategy": "fsdp"},
        "SaveError: .*the callback Keeps has more .*Can't pickle",
    ),
    ({"keeps": "lambda", "strategy": "zero1"}, "SaveError: .*the callback Keeps has more .*Can't pickle"),
    ({"keeps": "sharded"}, r"SaveError: .*the callback Keeps has a sharded tensor \(kept\.first\.weight\)"),
    ({"keeps": "sharded", "strategy": "fsdp"}, r"SaveError: .*the callback Keeps has a sharded tensor \(kept\."),
    ({"model": "sharded"}, r"the model's first\.weight is sharded"),
    ({"model": "sharded", "strategy": "fsdp"}, r"the model's first\.weight is sharded"),
    ({"model": "meta"}, r"first\.weight is on the meta device and has no values"),
    ({"model": "meta odd", "strategy": "fsdp"}, r"odd was made on the meta device, and nothing has given it a value"),
    (
        {"model": "meta", "strategy": "fsdp", "init": "fill"},
        r"linear\.bias was made on the meta device, and nothing",
    ),
    ({"optimizer": "lbfgs"}, r"LBFGS computes the loss several times .*choose another optimizer"),
    ({"plateau": True}, "ReduceLROnPlateau steps on the metric of an evaluation: give evaluator="),
    ({"plateau": True, "evaluate_every": 2, "mode": "max"}, "ReduceLROnPlateau has mode 'min' and track .*'max'"),
    ({"plateau": True, "evaluate_every": 2, "strategy": "zero1"}, "steps on a metric, and DeepSpeed steps schedulers"),
]


@brings(
    "a model given to `TrainingState` after `fully_shard`, or wrapped in FSDP1",
    Comes.REFUSED,
    "rank 0 would save its own rows, and every rank of the next world load them as its own",
    '`Trainer(strategy="fsdp")` with the plain model, or `torch.distributed.checkpoint` ([how](dcp.md))',
)
@brings(
    "sharded tensors in a part of `TrainingState` or in a callback's state",
    Comes.REFUSED,
    "the same: only rank 0's rows would be saved",
    "keep `full_tensor()` of it in the state",
)
@brings(
    "`ZeroRedundancyOptimizer` with `TrainingState.write` or `.files`",
    Comes.REFUSED,
    "each rank has a part of its state, and no rank could save it",
    "a `save=` of your own: `optimizer.consolidate_state_dict(to=0)` on all ranks, then `state.write(path)`",
)
@brings(
    "an object in a model's `get_extra_state`, or in a part's or callback's state",
    Comes.REFUSED,
    "checkpoints hold plain values and tensors; this one could be written, and never be loaded",
    "keep numbers, strings, tensors, lists and dicts",
)
@brings(
    "a model on the meta device, but for FSDP",
    Comes.REFUSED,
    "it has no values, and loading a checkpoint would put none there",
    'make it on a real device, or use `Trainer(strategy="fsdp")`',
)
@brings(
    "a model on the meta device, of which nothing fills some tensor",
    Comes.REFUSED,
    "training would begin with whatever was in memory",
    "`FSDP(init=...)`: a function of the model that fills all parameters and buffers",
)
@brings(
    "LBFGS, or another optimizer that needs a closure, in a `Trainer`",
    Comes.REFUSED,
    "it computes the loss several times in a step, and each micro-batch is computed once",
    "another optimizer, or a loop of your own",
)
@brings(
    "`ReduceLROnPlateau` without evaluations, with another `mode` than `track`'s, or with DeepSpeed",
    Comes.REFUSED,
    "it steps on a metric; DeepSpeed would give it the batch size",
    "`evaluator=`, `evaluate_every=`, `track=Tracked(name, mode)`, and DDP or FSDP",
)
@pytest.mark.full
def test_what_could_not_be_saved_or_stepped_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """On both ranks in one line; no checkpoint is begun."""
    wanted = [*BY_STATE, *(({**TRAINER, **case}, line) for case, line in BY_TRAINER)]
    for (case, line), ranks in zip(wanted, run(tmp_path, 2, [case for case, _ in wanted]), strict=True):
        print(case)
        assert_refused(ranks, line, [])
    assert not list(tmp_path.glob("case-*/step-*"))


@brings(
    "an optimizer that keeps objects, or, with FSDP, tensors that are not sharded as their parameter is",
    Comes.REFUSED,
    "it makes its state in its first step, so it is seen right behind that",
    "another optimizer; or DDP, which takes tensors of any shape",
)
def test_what_an_optimizer_makes_in_its_first_step_is_seen_then(tmp_path: Path) -> None:
    """Long before the first save, on both ranks; a tensor is well where the optimizer is whole."""
    made = {**TRAINER, "steps": 3}
    cases = [
        {**made, "optimizer": "whole", "strategy": "fsdp"},
        {**made, "optimizer": "object", "strategy": "fsdp"},
        {**made, "optimizer": "object"},
        {**made, "optimizer": "whole"},
    ]
    whole, object_too, in_ddp, well = run(tmp_path, 2, cases)
    assert_refused(whole, r"SaveError: .*could not be saved: TypeError: Remembers keeps 'kept' of .* as a plain", [1])
    assert_refused(
        object_too, r"SaveError: .*TypeError: the state of the optimizer has more than plain .* it holds a pathlib", [1]
    )
    assert_refused(in_ddp, r"SaveError: .*TypeError: the state of optimizer has more than plain .* a pathlib", [1])
    assert_refused(well, "^$", [1, 2, 3])


@brings(
    "a `save=` of your own that fails for want of neither disk nor memory",
    Comes.REFUSED,
    "it would fail at every save, and the run end without a checkpoint. It cannot be tried before the first step",
    "mend it: the line says what was raised, on which rank. Save early once, as with `save_every=1`",
)
@brings(
    "a `save=` of your own that writes nothing below the path it is given",
    Comes.SAID,
    "the checkpoint has the random generators and the position, and no weights",
    "write below `path`, on at least one rank",
)
def test_a_save_that_cannot_succeed_ends_the_run_at_the_first_save(tmp_path: Path) -> None:
    """Whether one rank has it or all; the disk is well."""
    cases = [{"kind": "own save", "how": how} for how in ("outside", "below", "one rank", "nothing")]
    (outside, below, one, nothing), (said, _) = run_and_listen(tmp_path, 2, cases)
    assert_refused(outside, r"SaveError: saving step 2 failed: RuntimeError: Parent directory .*nowhere", [0, 1])
    assert_refused(below, r"SaveError: saving step 2 failed: FileNotFoundError: .*weights/model.bin'", [0, 1])
    assert_refused(one, r"SaveError: saving step 2 failed: RuntimeError: a part that is not ready \(rank 1\)", [0, 1])
    assert_refused(nothing, "^$", list(range(10)))
    assert len(re.findall("wrote nothing below the path it was given", said)) == 1


@brings(
    "`torch.distributed.checkpoint` on a disk that is full or lost for a while",
    Comes.SAID,
    "that save failed on all ranks and the last checkpoint stands; the next one is tried",
    "make room",
)
def test_a_disk_error_of_dcp_costs_that_save_only(tmp_path: Path) -> None:
    """Though it is no `Exception`; a mistake in it ends the run as any other."""
    cases = [{"kind": "dcp", "how": "full", "failures": 2}, {"kind": "dcp", "how": "key", "failures": 2}]
    full, key = run(tmp_path, 2, cases)
    assert_refused(full, "^$", [0, 1, 2])
    assert [m.step for m in CheckpointStore(tmp_path / "case-0").sealed()] == [3]
    assert_refused(key, r"SaveError: saving step 1 failed: KeyError: 'plan' \(in rank 1's part of torch.dist", [0])


def script(directory: Path, steps: int) -> Path:
    """`docs/dcp.md` prints it; with another number of steps."""
    (block,) = (block for block in printed.code() if block.page == "docs/dcp.md")
    assert "STEPS, GLOBAL_BATCH = 12, 12" in block.text
    path = directory / f"dcp-{steps}.py"
    path.write_text(block.text.replace("STEPS, GLOBAL_BATCH = 12, 12", f"STEPS, GLOBAL_BATCH = {steps}, 12"))
    return path


def losses(path: Path, world: int) -> list[tuple[int, float]]:
    ended = run_world(world, [str(path)])
    assert [code for code, _ in ended] == [0] * world, "\n".join(output for _, output in ended)
    return [(int(n), float(loss)) for n, loss in re.findall(r"^step (\d+) loss (\S+)$", ended[0][1], re.MULTILINE)]


@pytest.mark.full
@brings(
    "FSDP2 in a loop of your own with `torch.distributed.checkpoint`",
    Comes.ROUNDED,
    "each rank loads its own rows from the files of any world; sums are made in another order",
    "[the script](dcp.md)",
)
def test_fsdp2_with_dcp_goes_on_in_another_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 ranks, then 3, then 1: the curve of 2 ranks that nobody disturbed."""
    monkeypatch.chdir(tmp_path)
    found = [one for steps, world in ((3, 2), (6, 3), (9, 1)) for one in losses(script(tmp_path, steps), world)]
    (tmp_path / "alone").mkdir()
    monkeypatch.chdir(tmp_path / "alone")
    wanted = losses(script(tmp_path, 9), 2)
    assert [step for step, _ in found] == [step for step, _ in wanted] == list(range(1, 10))
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in wanted], rel=1e-5)


@pytest.mark.full
@brings(
    "a model given to `TrainingState` or a `Trainer` inside `DistributedDataParallel`, or compiled",
    Comes.ROUNDED,
    "what is inside is saved, so names depend neither on the number of ranks nor on the wrapper",
)
@brings(
    "`ZeroRedundancyOptimizer`, gathered in a `save=` of your own",
    Comes.ROUNDED,
    "rank 0 saves the whole state, and each rank of the next world takes its part",
)
@brings(
    'a model made on the meta device, with `Trainer(strategy="fsdp")`',
    Comes.ROUNDED,
    "its blocks get their first values one by one, the same in every world: those of rank 0",
)
@brings(
    "`ReduceLROnPlateau` in a `Trainer`",
    Comes.ROUNDED,
    "it steps with the tracked metric after each evaluation of `evaluate_every`, and is saved with the rest. (A metric"
    " that comes within a rounding of its threshold may fall to either side.)",
)
def test_the_curve_of_what_was_made_right_is_the_same_in_another_world(tmp_path: Path) -> None:
    """2 ranks for a part of the steps and 1 for the rest, against 3 that nobody disturbed."""
    cases: list[dict[str, Any]] = [
        {"kind": "wrapped_early"},
        {**TRAINER, "model": "wrapped"},
        {"kind": "partitioned", "how": "consolidated"},
        {**TRAINER, "model": "meta", "strategy": "fsdp"},
        {**TRAINER, "model": "meta", "strategy": "fsdp", "in_background": True},
        {**TRAINER, "plateau": True, "evaluate_every": 2},
        {**TRAINER, "plateau": True, "evaluate_every": 2, "strategy": "fsdp"},
    ]
    placed = [{**case, "directory": str(tmp_path / f"run-{n}")} for n, case in enumerate(cases)]
    wholes = run(tmp_path / "3", 3, [{**case, "steps": 9} for case in cases])
    parts = run(tmp_path / "2", 2, [{**case, "steps": 5} for case in placed])
    rests = run(tmp_path / "1", 1, [{**case, "steps": 9} for case in placed])
    for case, (whole, *_), (part, *_), (rest, *_) in zip(cases, wholes, parts, rests, strict=True):
        print(case, whole, part, rest)
        assert part["losses"] + rest["losses"] == pytest.approx(whole["losses"], rel=1e-9)
        if case.get("plateau"):
            assert part["rates"] + rest["rates"] == whole["rates"]
            assert len(set(whole["rates"])) > 2


@brings(
    "weights that were saved in fp32 (or fp64), and a model in bf16, or the reverse",
    Comes.REFUSED,
    "loading converts them without a word, and the training would go on with other numbers",
    "make the model as it was; or `s.state(cast=True)`, `TrainingState.load(cast=True)`, `DDP(cast=True)`, "
    "`FSDP(cast=True)`",
)
@pytest.mark.parametrize("strategy", ["own loop", "ddp", "fsdp"])
def test_another_dtype_is_refused_unless_it_is_asked_for(tmp_path: Path, strategy: str) -> None:
    """On both ranks, with the names of a few tensors and both dtypes."""
    kinds = {"own loop": ({"kind": "whole"}, {"kind": "half"})}
    trained = {**TRAINER, "strategy": strategy}
    as_it_was, other = kinds.get(strategy, (trained, {**trained, "model": "half"}))
    directory = str(tmp_path / "run")
    cases = [
        {**as_it_was, "steps": 2, "directory": directory},
        {**other, "steps": 3, "directory": directory},
        {**as_it_was, "steps": 3, "directory": directory},
        {**other, "steps": 4, "directory": directory, "cast": True},
    ]
    first, refused, went_on, cast = run(tmp_path, 2, cases)
    assert_refused(first, "^$", [1, 2])
    line = r"ValueError: the checkpoint was saved with another dtype: blocks\.0\.linear\.bias float64 and is bfloat16, "
    assert_refused(refused, line, [])
    assert_refused(went_on, "^$", [3])
    assert_refused(cast, "^$", [4])
