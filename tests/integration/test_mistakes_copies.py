"""Ranks that do not have, or do not keep, the same copy of what they train; loops that are left: with real ranks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.integration.test_mistakes_ranks import Came, Told, come_once
from tests.support.pages.mistakes import Comes, brings
from tests.support.workers import copies_worker
from tests.support.workers.zero_runs import run_world

pytestmark = [pytest.mark.timeout(420), pytest.mark.full]

WORKER = Path(copies_worker.__file__)

UNLIKE = {
    "initial weights": ("looped", {"wrap": "none", "model_seed": [1, 2]}, "begin with different weights.*DistributedD"),
    "rate": ("fitted", {"rate": [0.01, 0.02]}, "lr of AdamW is 0.01 on rank 0, 0.02 on rank 1"),
    "rate of a loop": ("looped", {"rate": [0.01, 0.02]}, "lr of AdamW is 0.01 on rank 0, 0.02 on rank 1"),
    "rate of FSDP": ("fitted", {"strategy": "fsdp", "rate": [0.01, 0.02]}, "lr of AdamW is 0.01 on rank 0"),
    "rate of ZeRO": ("fitted", {"strategy": "zero2", "rate": [0.01, 0.02]}, "lr of AdamW is 0.01 on rank 0"),
    "optimizer": ("fitted", {"optimizer": ["AdamW", "Adam"]}, "the optimizer is AdamW on rank 0, Adam on rank 1"),
    "scheduler": ("fitted", {"scheduler": ["linear", "warmup"]}, "the scheduler is LinearLR .*, LambdaLR .* on rank 1"),
    "schedule": ("fitted", {"scheduler": "linear", "end": [0.1, 0.2]}, "the scheduler is .*end_factor=0.1.*=0.2"),
    "loss": ("fitted", {"loss": ["own", "other"]}, r"loss= .* is loss_of \(\w+\) on rank 0, other_loss \(\w+\) on"),
    "frozen": ("looped", {"wrap": "none", "frozen": [True, False]}, "the model is Sequential with 4 parameters, 2 of"),
}
STRANGE = {
    "strange": (
        "looped",
        {"strange": "lost"},
        "SaveError.*AdamW trains parameters that are not the model's, 1 of them",
    ),
    "strange in a Trainer": ("fitted", {"strange": "lost"}, "AdamW trains parameters that are not the model's"),
    "strange in FSDP": ("fitted", {"strange": "lost", "strategy": "fsdp"}, "parameters that are not the model's"),
    "strange in ZeRO": ("fitted", {"strange": "lost", "strategy": "zero1"}, "parameters that are not the model's"),
    "scheduler's state": ("fitted", {"optimizer": "SGD", "scheduler": "linear", "end": [0.5, 0.1]}, "the scheduler is"),
}
# Behind how many steps.
ALONE = {
    "alone": ("looped", {"wrap": "none"}, 1),
    "alone, unsaved": ("looped", {"wrap": "none", "directory": False}, 1),
    "alone, saved by the script": ("looped", {"wrap": "none", "state": False}, 1),
    "alone, without Accumulation": ("looped", {"wrap": "none", "accumulate": False}, 1),
    "alone with SGD": ("looped", {"wrap": "none", "optimizer": "SGD"}, 1),
    "inside": ("looped", {"call": "inside"}, 1),
    "alone, at a rate of 0": ("looped", {"wrap": "none", "scheduler": "warmup"}, 1),
    "alone with SGD, at a rate of 0": ("looped", {"wrap": "none", "scheduler": "warmup", "optimizer": "SGD"}, 2),
}
THAWED = {
    "unfrozen": ("looped", {"frozen": True, "unfreeze": 2}, "0.weight, 0.bias became trainable by step 3: Distributed"),
    "unfrozen in a Trainer": ("fitted", {"frozen": True, "unfreeze": 2}, "0.weight, 0.bias became trainable by step 3"),
    "unfrozen in ZeRO": ("fitted", {"frozen": True, "unfreeze": 2, "strategy": "zero1"}, "by step 3: DeepSpeed averag"),
}
AROUND = {
    "generator, seed": ("looped", {"around": "generator", "seed": [3, 4]}, "seed of the order is 3 on rank 0, 4 on"),
    "generator, rank": ("looped", {"around": "generator", "rank": [0, 0]}, "rank 0 has 0 of 2; rank 1 has 0 of 2"),
    "generator, micro": ("looped", {"around": "generator", "micro": [3, 6]}, "is 2 on rank 0, 1 on rank 1"),
    "enumerate, seed": ("looped", {"around": "enumerate", "seed": [3, 4]}, "seed of the order is 3 on rank 0, 4 on"),
    "some ranks' bar": ("looped", {"around": ["generator", "nothing"], "seed": [3, 4]}, "seed of the order is 3 on"),
    "failing": ("looped", {"around": ["nothing", "failing"]}, "a file is gone"),
}
FINE = {
    "looped": ("looped", {}),
    "kept": ("looped", {"strange": "kept", "wrap": "ddp", "state": True, "max_steps": 0}),
    "frozen from the start": ("looped", {"frozen": True}),
    "bar on one rank": ("looped", {"around": ["generator", "nothing"]}),
    **{name: ("fitted", {"strategy": name}) for name in ("ddp", "fsdp", "zero0", "zero1", "zero2", "zero3")},
    **{
        f"{name} in bf16": ("fitted", {"strategy": name, "dtype": "bf16"}) for name in ("ddp", "fsdp", "zero2", "zero3")
    },
    **{f"{name}, frozen": ("fitted", {"strategy": name, "frozen": True}) for name in ("ddp", "fsdp", "zero2", "zero3")},
    "fp16": ("fitted", {"dtype": "fp16", "max_steps": 6}),
    "warmup": ("fitted", {"scheduler": "warmup"}),
    "statistics of each rank": ("fitted", {"strategy": "local", "layer": "statistics", "max_steps": 3}),
    "dropout": ("fitted", {"layer": "dropout"}),
    "average": ("fitted", {"average": True}),
    "compiled": ("fitted", {"compiled": True}),
    "unfrozen in FSDP": ("fitted", {"strategy": "fsdp", "frozen": True, "unfreeze": 2}),
}
CASES = {
    **{name: Told(case, options) for name, (case, options, _) in {**UNLIKE, **STRANGE, **THAWED, **AROUND}.items()},
    **{name: Told(case, options) for name, (case, options, _) in ALONE.items()},
    **{name: Told(case, options) for name, (case, options) in FINE.items()},
    "unfrozen in FSDP, again": Told("fitted", {"strategy": "fsdp", "max_steps": 5}, after="unfrozen in FSDP"),
    "unfrozen in FSDP, frozen again": Told(
        "fitted", {"strategy": "fsdp", "frozen": True, "max_steps": 6}, after="unfrozen in FSDP"
    ),
    "unscaled": Told("looped", {"scale": False}),
    "unscaled, without Accumulation": Told("looped", {"scale": False, "accumulate": False}),
    "swallowed": Told("looped", {"swallow": [False, True]}),
    "each its own": Told("looped", {"strange": "each", "state": False}),
    "generator": Told("looped", {"around": "generator", "max_steps": 2}),
    "generator again": Told("looped", {"around": "generator"}, after="generator"),
    "generator, another order": Told("looped", {"around": "generator", "seed": 4}, after="generator"),
    "enumerate": Told("looped", {"around": "enumerate", "max_steps": 2}),
    "enumerate again": Told("looped", {"around": "enumerate"}, after="enumerate"),
    "zip": Told("looped", {"around": "zip", "max_steps": 2}),
    "zip again": Told("looped", {"around": "zip"}, after="zip"),
    "left, a list": Told("listed", {"leave": 2}),
    "left": Told("looped", {"leave": 2}),
    "left at its end": Told("looped", {"leave": 3, "max_steps": 3}),
    "left at its end, again": Told("looped", {"max_steps": 4}, after="left at its end"),
    "left, finished within": Told("looped", {"leave": 3, "finish": "within"}),
    "left, finished within, uneven": Told("looped", {"leave": 3, "finish": "within", "save_every": 0}),
    "left, finished behind": Told("looped", {"leave": 3, "finish": "behind"}),
    "left, a list, finished within": Told("listed", {"leave": 3, "finish": True}),
    **{
        f"loops, draws {draws}, {name}": Told(
            "in_loops", {"layer": "dropout", "draws": draws, "quit": quits}, after=f"loops, draws {draws}, {after}"
        )
        for draws in (None, 5)
        for name, after, quits in (
            ("whole", "whole", None),
            ("quit 2", "quit 2", 2),
            ("quit 2, again", "quit 2", None),
            ("quit 3", "quit 3", 3),
            ("quit 3, again", "quit 3", None),
        )
    },
    "left, the same generator": Told("looped", {"leave": 2, "around": "generator", "again": "the same"}),
    "left, another one": Told("looped", {"leave": 2, "around": "generator"}),
}


@pytest.fixture(scope="module")
def came(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Came]:
    """All that needs one start of two ranks."""
    return come_once(tmp_path_factory, "copies", CASES, worker=WORKER)


def ended(came: Came) -> tuple[str, list[int]]:
    """The line that all ranks ended with, and how many steps each had made."""
    (line,) = {rank["refused"] for rank in came.ranks}
    assert "\n" not in line
    return str(line), [len(rank["steps"]) for rank in came.ranks]


@brings(
    "a rank with another learning rate or other hyperparameters, another optimizer, scheduler, or set of frozen "
    "parameters, in a `Trainer` or with `TrainingState`; or with another loss function, in a `Trainer`",
    Comes.REFUSED,
    "the ranks' weights would part, or each gradient be that of several losses",
    "give all ranks the same; the line says who has what",
)
@brings(
    "other weights on each rank before the first step, with `TrainingState` and without DDP",
    Comes.REFUSED,
    "each rank would train a model of its own, and rank 0's be saved for all",
    "make the model from one seed on all ranks, or wrap it in `DistributedDataParallel`, which takes rank 0's",
)
@brings(
    "an optimizer's parameter that is not the model's (a loss with weights of its own), with `TrainingState` or a "
    "`Trainer`",
    Comes.REFUSED,
    "it is in no checkpoint, and nothing averages its gradients",
    "make it part of the model that is wrapped and called; with `TrainingState` it may be a part, `heads=the_module`, "
    "which saves it",
)
@pytest.mark.parametrize("name", [*UNLIKE, *STRANGE])
def test_ranks_that_begin_unlike(came: dict[str, Came], name: str) -> None:
    """One line on all ranks before the first step."""
    pattern = {**UNLIKE, **STRANGE}[name][2]
    assert re.search(pattern, came[name].refused), came[name].refused


@brings(
    "`DistributedDataParallel` forgotten with two ranks or more; or the model inside it called, not the wrapped one",
    Comes.REFUSED,
    "each rank would train a model of its own. Seen right behind the first step that moves a weight, before anything "
    "is saved",
    "call the wrapped model: `wrapped(micro.data)`",
)
@pytest.mark.parametrize("name", list(ALONE))
def test_ranks_that_train_by_themselves(came: dict[str, Came], name: str) -> None:
    """Seen right behind the first step that moves something; nothing of it is saved."""
    line, steps = ended(came[name])
    assert f"after step {ALONE[name][2]} the ranks have different weights or states of the optimizer" in line
    assert steps == [ALONE[name][2]] * 2
    assert came[name].sealed() == []


@brings(
    "parameters unfrozen during a run, with DDP, or ZeRO 1 to 3. (Before the step that would train them)",
    Comes.REFUSED,
    "both average, and ZeRO steps with, what was trainable when they were made",
    "`requires_grad=True` from the start, in a group with a learning rate of 0 until then",
)
@pytest.mark.parametrize("name", list(THAWED))
def test_parameters_unfrozen_during_a_run(came: dict[str, Came], name: str) -> None:
    """Refused before the first step that would train them."""
    line, steps = ended(came[name])
    assert re.search(THAWED[name][2], line), line
    assert steps == [2, 2]


@brings(
    "parameters unfrozen (or frozen) during a run, with FSDP2 or a single process, where the run resumes without doing "
    "so again",
    Comes.SAID,
    "which parameters are frozen is in no checkpoint: they would be again as they were made",
    "set `requires_grad` by the step at each start",
)
def test_what_was_unfrozen_is_frozen_again(came: dict[str, Came]) -> None:
    """One line, on one rank; nothing is said where the script has done it."""
    (line,) = came["unfrozen in FSDP, frozen again"].ranks[0]["warnings"]
    assert "is resumed with 0.weight, 0.bias, trained when it was saved, frozen" in line
    assert came["unfrozen in FSDP, frozen again"].ranks[1]["warnings"] == []
    assert ended(came["unfrozen in FSDP, frozen again"]) == ("", [1, 1])
    assert [rank["warnings"] for rank in came["unfrozen in FSDP, again"].ranks] == [[], []]


@pytest.mark.parametrize("name", list(FINE))
def test_what_is_right_is_not_refused(came: dict[str, Came], name: str) -> None:
    """Nor is anything said of it."""
    line, steps = ended(came[name])
    assert line == ""
    assert steps == [FINE[name][1].get("max_steps", 4)] * 2
    assert [rank["warnings"] for rank in came[name].ranks] == [[], []]


@brings(
    "`micro.scale(loss)` forgotten in a loop of your own",
    Comes.SAID,
    "the micro-batches' mean losses would be added up, not averaged, and short ones count too much. Said before the "
    "first optimizer step; nobody can know whether you have divided the loss by yourself",
    "`micro.scale(loss).backward()`, or multiply by `micro.loss_scale`",
)
@pytest.mark.parametrize("name", ["unscaled", "unscaled, without Accumulation"])
def test_a_scale_that_is_not_used(came: dict[str, Came], name: str) -> None:
    """One line, on one rank."""
    assert ended(came[name]) == ("", [4, 4])
    (line,) = came[name].ranks[0]["warnings"]
    assert line.startswith("micro.scale(loss) was not used in step 1, which is cut into 2 micro-batches on each of 2")
    assert came[name].ranks[1]["warnings"] == []


@brings(
    "an error that is caught inside the loop over micro-batches (out of memory), or a `continue` there",
    Comes.SAID,
    "the step is made without these samples, also in DDP, where only a last micro-batch waits for others. "
    "Said before the optimizer's step; it may be meant (a loss that is no number)",
    "let the error through: the run goes on from its last save",
)
def test_a_micro_batch_that_is_left_out(came: dict[str, Came]) -> None:
    """One line, on the rank that left it out."""
    assert ended(came["swallowed"]) == ("", [4, 4])
    assert came["swallowed"].ranks[0]["warnings"] == []
    (line,) = came["swallowed"].ranks[1]["warnings"]
    assert line.startswith("step 2 has no gradient, or a part of one, from micro-batch 1 of its global batch")


@brings(
    "parameters of each rank's own beside the model, saved by a `save=` of your own",
    Comes.SAID,
    "it may be meant (a classifier of which each rank has some classes), or forgotten",
    "make them part of the wrapped model, unless it is meant",
)
def test_what_each_rank_may_have_of_its_own(came: dict[str, Came]) -> None:
    """A parameter beside the model, saved by the script itself: nobody knows what is meant, so one line says it."""
    assert ended(came["each its own"]) == ("", [4, 4])
    (line,) = came["each its own"].ranks[0]["warnings"]
    assert "the ranks have different values of parameter 0 of AdamW, not the model's" in line
    assert came["each its own"].ranks[1]["warnings"] == []


@brings(
    "`Batches` behind a progress bar, `enumerate`, `zip` or a generator, on ranks that were told different things",
    Comes.REFUSED,
    "the first batch says whose it is, so they are compared as if they were given themselves",
    "give all ranks the same",
)
@pytest.mark.parametrize("name", list(AROUND))
def test_batches_behind_something_are_compared(came: dict[str, Came], name: str) -> None:
    """As if they were given themselves."""
    pattern = AROUND[name][2]
    lines = {rank["refused"] for rank in came[name].ranks}
    assert all(re.search(pattern, line) for line in lines), lines
    assert [rank["steps"] for rank in came[name].ranks] == [[], []]


@brings(
    "`Batches` behind a progress bar, `enumerate`, `zip` or a generator",
    Comes.ROUNDED,
    "each batch knows where it stands, and the checkpoint has the order and the cut: any number of ranks goes on",
)
@pytest.mark.parametrize("name", ["generator", "enumerate", "zip"])
def test_batches_behind_something_are_resumed(came: dict[str, Came], name: str) -> None:
    """Their order and cut are in the checkpoint, and so is where they stand."""
    assert [one.order is not None and one.cut is not None for one in came[name].sealed()] == [True] * 2
    assert came[name].ranks[0]["warnings"] == []
    ids = [sample for part in (name, f"{name} again") for step in came[part].steps for sample in step]
    assert sorted(ids) == list(range(40))
    if name == "generator":
        assert "order" in came["generator, another order"].refused


@brings(
    "`break` at the end of a step, and a second loop over the same `Batches`",
    Comes.BITWISE,
    "the step's micro-batches were all computed, so it counts, and the second loop goes on behind it",
)
@pytest.mark.parametrize("name", ["left", "left, another one"])
def test_a_loop_that_was_left_behind_a_step_has_made_it(came: dict[str, Came], name: str) -> None:
    """The second one trains what is left, each sample once."""
    assert sorted(sample for step in came[name].steps for sample in step) == list(range(40))


@brings(
    "`break` at a step that was to be saved, and a second loop",
    Comes.BITWISE,
    "the second loop begins with that save",
)
def test_what_was_due_at_a_break_is_saved(came: dict[str, Came]) -> None:
    """With as much as the step would have been saved with, had the loop gone on."""
    assert [(one.step, one.position.samples) for one in came["left"].sealed()] == [(2, 24), (4, 0)]


@brings(
    "a loop that is left with `s.finish(); break`, or by a `break` with `s.finish()` behind the loop",
    Comes.BITWISE,
    "the step whose work is done counts, and is saved if it is not: nothing that was trained is lost",
)
@pytest.mark.parametrize(
    "name",
    [
        "left, finished within",
        "left, finished within, uneven",
        "left, finished behind",
        "left, a list, finished within",
    ],
)
def test_a_loop_that_is_left_for_good_is_saved(came: dict[str, Came], name: str) -> None:
    """Off the cadence; on all ranks together."""
    assert ended(came[name]) == ("", [3, 3])
    newest = came[name].sealed()[-1]
    assert newest.step == 3
    if "list" not in name:
        assert newest.position.samples == 36
        assert [rank["warnings"] for rank in came[name].ranks] == [[], []]
    assert json.loads((came[name].directory / "FINISHED.json").read_text())["step"] == 3


ALONE_IT_FINISHES = """
import sys, torch
from dalsegno.elastic import Batches, BatchPlan, ElasticSampler, session
s = session(sys.argv[1])
rows = torch.arange(40)
batches = Batches(rows, ElasticSampler(40, 4, seed=1), BatchPlan(4, s.world_size, 4), s.rank)
for batch in s.steps(batches, max_steps=9, save=lambda path: None, save_every=2):
    list(batch.micro_batches)
    if batch.step == 3 and s.rank == 0:
        s.finish()
        break
print("ended at step", s.step)
"""


@brings(
    "`s.finish()` in the body of a loop on one rank alone",
    Comes.REFUSED,
    "the others would make a step without it, and the last save wait for them",
    "let it depend on what all ranks know, `s.sum(found) > 0`",
)
def test_one_rank_that_finishes_alone(tmp_path: Path) -> None:
    """Before it saves: no success, and the line says who has gone where."""
    script = tmp_path / "train.py"
    script.write_text(ALONE_IT_FINISHES)
    ended = run_world(2, [str(script), str(tmp_path / "run")], seconds=60)
    outputs = "\n".join(output for _, output in ended)
    assert [code for code, _ in ended] == [1, 1], outputs
    said = r"Refusal: rank 0 has finished the training behind step 3, and rank 1 (goes on with|is behind) step \d: all"
    assert re.search(said, outputs), outputs
    assert "ended at step" not in outputs


@brings(
    "dropout in several loops of one process, resumed by as many ranks",
    Comes.BITWISE,
    "the first loop goes on with the generators of the checkpoint, and each further one draws as it would have",
)
@pytest.mark.parametrize("draws", [None, 5])
@pytest.mark.parametrize("quits", [2, 3])
def test_further_loops_of_a_resumed_process(came: dict[str, Came], quits: int, draws: int | None) -> None:
    """Two steps in each loop; the resume point is behind the first one, or within the second."""
    name = f"loops, draws {draws}"
    parts = [came[f"{name}, quit {quits}"], came[f"{name}, quit {quits}, again"]]
    assert [len(part.steps) for part in parts] == [quits, 6 - quits]
    for rank in (0, 1):
        whole = came[f"{name}, whole"].ranks[rank]["losses"]
        assert [loss for part in parts for loss in part.ranks[rank]["losses"]] == whole


def test_a_loop_with_nothing_left_to_do_saves_where_the_data_stand(came: dict[str, Came]) -> None:
    """Not where they began: what resumes from there would train their first samples again."""
    assert len(came["left at its end"].steps) == 3
    assert len(came["left at its end, again"].steps) == 1
    ids = [n for part in ("left at its end", "left at its end, again") for step in came[part].steps for n in step]
    assert sorted(ids) == list(range(40))


@brings(
    "`break` at the end of a step, and a second loop, with data that are not `Batches`",
    Comes.SAID,
    "nobody knows whether the step was trained before the `break`, so it does not count",
    "leave the loop by `max_steps=`, or give `Batches`",
)
def test_a_loop_over_a_list_that_was_left(came: dict[str, Came]) -> None:
    assert [len(rank["steps"]) for rank in came["left, a list"].ranks] == [5, 5]
    said = [[line for line in rank["warnings"] if "was left in step" in line] for rank in came["left, a list"].ranks]
    (line,) = said[0]
    assert line.startswith("the previous loop was left in step 2, which does not count")
    assert said[1] == []


@brings(
    "a second loop over the same generator or progress bar around `Batches`, after a `break`",
    Comes.REFUSED,
    "the loop before had fetched a batch ahead, which is lost",
    "give `Batches` to each loop, or make the generator anew",
)
def test_a_second_loop_over_what_was_fetched_ahead(came: dict[str, Came]) -> None:
    line, steps = ended(came["left, the same generator"])
    assert "the loop before had fetched what is between them" in line
    assert steps == [2, 2]
