"""What engines, optimizers and wrappers make of a change of the world: right, said, or refused at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic.universal import convert
from tests.support.jobs.ports import free_port
from tests.support.pages.mistakes import Comes, brings
from tests.support.workers import engines_worker
from tests.support.workers.zero_runs import run_world, seal_sharded

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

STEPS, MORE = 3, 3
Results = list[dict[str, Any]]


def run(world: int, cases: list[dict[str, Any]], out: Path) -> list[Results]:
    """The results of each case, of all ranks."""
    out.mkdir(exist_ok=True)
    given = [{"port": free_port(), "port again": free_port(), **case} for case in cases]
    done = run_world(world, [engines_worker.__file__, json.dumps(given), str(out)], seconds=90 + 5 * len(cases))
    assert not any(code for code, _ in done), "\n".join(output for _, output in done)
    ranks = [json.loads((out / f"result-{rank}.json").read_text()) for rank in range(world)]
    return [list(each) for each in zip(*ranks, strict=True)]


# What two ranks do, by name; all in one world.

DEFAULT = ["sgd", "rmsprop", "adamax", "nadam", "lion"]
FULL = ["plain-sgd", "adagrad", "adadelta", "adamw", "amsgrad", "fused", "radam", "rprop", "asgd"]
STAGES = (2, 3)
ANY = {"zero_allow_untested_optimizer": True}
DEEPSPEED: dict[str, Any] = {"do": "fit", "strategy": "deepspeed", "stage": 2, "steps": STEPS}
DDP: dict[str, Any] = {"do": "ddp"}
CASES: dict[str, dict[str, Any]] = {
    "refused": {**DEEPSPEED, "optimizer": "adafactor"},
    "allowed": {**DEEPSPEED, "optimizer": "adafactor", "config": ANY, "save_every": STEPS},
    "stage 0": {**DEEPSPEED, "optimizer": "adafactor", "stage": 0},
    "adafactor": {**DEEPSPEED, "strategy": "ddp", "optimizer": "adafactor"},
    "fsdp": {**DEEPSPEED, "strategy": "fsdp", "optimizer": "adafactor"},
    **{f"fsdp {name}": {"do": "fsdp", "optimizer": name, "sharded": True, "steps": 5} for name in ("muon", "lamb")},
    **{f"whole {name}": {"do": "fsdp", "optimizer": name, "sharded": False, "steps": 5} for name in ("muon", "lamb")},
    "flat lamb": {"do": "fsdp", "optimizer": "lamb", "sharded": True, "flat": True, "steps": 5},
    "flat adamw": {"do": "fsdp", "optimizer": "adamw", "sharded": True, "flat": True, "steps": 5},
    "static": {**DDP, "options": {"static_graph": True}},
    "static, again": {**DDP, "options": {"static_graph": True}, "again": 3},
    "plain": DDP,
    "plain, again": {**DDP, "again": 3},
    "unused, again": {**DDP, "options": {"find_unused_parameters": True}, "again": 3},
    "static, view": {**DDP, "options": {"static_graph": True, "gradient_as_bucket_view": True}},
    "static trainer": {
        **DEEPSPEED,
        "strategy": "ddp",
        "optimizer": "sgd",
        "options": {"static_graph": True},
        "micro": 2,
    },
    "trainer": {**DEEPSPEED, "strategy": "ddp", "optimizer": "sgd"},
    "unused": {**DDP, "options": {"find_unused_parameters": True}},
    "view": {**DDP, "options": {"gradient_as_bucket_view": True}},
    "compiled": {**DDP, "compiled": True, "options": {"static_graph": True}},
    "join": {**DDP, "join": True},
    "fp16": {**DDP, "hook": "fp16"},
    "power-sgd": {**DDP, "hook": "power-sgd"},
    "tokens": {"do": "tokens"},
}
SAVES: dict[str, dict[str, Any]] = {
    "lambda": {"stage": 2, "save": "lambda"},
    "partial": {"stage": 3, "save": "partial"},
    "hidden": {"stage": 2, "save": "hidden"},
    "hidden, stage 3": {"stage": 3, "save": "hidden"},
    "other stage": {"stage": 3, "save": "hidden", "strategy": "deepspeed-zero-2"},
    "ours, other stage": {"stage": 3, "save": "ours", "strategy": "deepspeed-zero-2"},
    "no engine": {"stage": 0, "save": "plain", "strategy": "deepspeed-zero-2"},
    "ours": {"stage": 2, "save": "ours"},
    "own, named": {"stage": 1, "save": "lambda", "strategy": "deepspeed-zero-1"},
    "own name": {"stage": 1, "save": "lambda", "strategy": "mine"},
    "stage 0": {"stage": 0, "save": "hidden"},
    "dcp": {"stage": 0, "save": "dcp"},
    "of each rank": {"stage": 0, "save": "of each rank"},
}


@dataclass
class Seen:
    """What two ranks came to, by the names above, and three ranks of it."""

    two: dict[str, Results]
    saves: dict[str, Results]
    three: dict[str, Results]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    root = tmp_path_factory.mktemp("engines")
    saves = {f"save: {name}": {"do": "declared", **case} for name, case in SAVES.items()}
    cases = {
        name: {**case, "directory": str(root / str(i))} for i, (name, case) in enumerate({**CASES, **saves}.items())
    }
    two = dict(zip(cases, run(2, list(cases.values()), root / "two"), strict=True))
    again = [name for name in CASES if name not in ("refused", "fsdp")]
    third = [{key: value for key, value in CASES[name].items() if key != "save_every"} for name in again]
    three = dict(zip(again, run(3, third, root / "three"), strict=True))
    return Seen({name: two[name] for name in CASES}, {name: two[f"save: {name}"] for name in SAVES}, three)


def zero_cases(names: list[str], root: Path) -> list[dict[str, Any]]:
    made = []
    for name in names:
        for stage in STAGES:
            save = root / f"{name}-{stage}" / f"step-{STEPS}.e1.0"
            save.parent.mkdir(parents=True)
            common = {"do": "zero", "optimizer": name, "stage": stage, "steps": STEPS + MORE}
            made.append({**common, "save_after": STEPS, "save": str(save)})
    return made


def test_a_buffer_of_the_first_step_is_told_at_the_first_save(tmp_path: Path) -> None:
    """Later its load is refused, and then the work is lost."""
    common = {"do": "zero", "optimizer": "adamw", "steps": 3, "save_after": 2}
    cases = [
        {**common, "stage": stage, "grows": grows, "save": str(tmp_path / f"{stage}-{grows}" / "step-2.e1.0")}
        for stage in (1, 3)
        for grows in (True, False)
    ]
    ours = {**DEEPSPEED, "optimizer": "adamw", "save_every": 1, "grows": True, "directory": str(tmp_path / "ours")}
    for case, ranks in zip([*cases, ours], run(2, [*cases, ours], tmp_path / "out"), strict=True):
        said = [[line for line in rank["said"] if "has 1.calls since its first step" in line] for rank in ranks]
        assert [len(lines) for lines in said] == [case["grows"], 0], (case, ranks)


@brings(
    "DeepSpeed ZeRO 1 to 3 with any of torch's element-wise optimizers (SGD, AdamW, Adamax, NAdam, RMSprop, Rprop, …)",
    Comes.ROUNDED,
    "their states have one value for each weight, so each rank of a new world takes its own range of them",
)
@brings(
    "DeepSpeed ZeRO with an element-wise optimizer of your own, and `zero_allow_untested_optimizer`",
    Comes.ROUNDED,
    "nobody can know that it is element-wise: its checkpoints are converted to universal files when the world changes",
)
@pytest.mark.parametrize("names", [DEFAULT, pytest.param(FULL, marks=pytest.mark.full)])
def test_zero_with_any_elementwise_optimizer(tmp_path: Path, names: list[str]) -> None:
    """Re-sharded, converted, also for the other stage: the losses are those of the world that did not change."""
    made = zero_cases(names, tmp_path)
    before = [ranks[0] for ranks in run(2, made, tmp_path / "before")]
    again, wanted = [], []
    for case, result in zip(made, before, strict=True):
        known = case["optimizer"] != "lion"
        assert result["reshards"] == [known], case
        assert bool(result["said"]) != known, result["said"]
        source = Path(case["save"])
        seal_sharded(source, stage=case["stage"], world=2, step=STEPS)
        target = source.with_name(f"{source.name}.universal.1")
        convert(source, target)
        common = {**case, "first": STEPS, "load": str(source), "save_after": None}
        ways = [{"form": "universal", "universal": str(target), "stage": stage} for stage in (2, 3)]
        ways += [{"form": "sharded", "reshard": True, "stage": case["stage"], "may_fail": not known}]
        again += [{**common, **way} for way in ways]
        wanted += [result["losses"][STEPS:] for _ in ways]
    for case, losses, ranks in zip(again, wanted, run(3, again, tmp_path / "after"), strict=True):
        if case.get("may_fail"):
            assert "which is not known to treat every weight by itself" in ranks[0]["error"]
            assert "it must be converted" in ranks[0]["error"]
        else:
            assert ranks[0]["losses"] == pytest.approx(losses, rel=1e-6), case


@brings(
    "DeepSpeed ZeRO 1 to 3 with an optimizer that looks at whole parameters (Adafactor, LAMB, Muon, 8 bits)",
    Comes.REFUSED,
    "ZeRO gives it flat parts of the model, cut where the number of ranks says: another curve in every world",
    "an element-wise optimizer (AdamW, SGD, Lion), or DDP; or set `zero_allow_untested_optimizer` yourself",
)
def test_an_optimizer_that_does_not_fit_zero_is_refused(seen: Seen) -> None:
    """Before the first step, on all ranks; with stage 0, which partitions nothing, it is right."""
    for rank in seen.two["refused"]:
        assert rank["refused"].startswith("Adafactor with ZeRO-2: ")
        assert "\n" not in rank["refused"]
        assert rank["steps"] == 0
    for world in (seen.two, seen.three):
        assert world["stage 0"][0]["losses"] == pytest.approx(world["adafactor"][0]["losses"], rel=1e-6)
    assert seen.two["stage 0"][0]["said"] == []


@brings(
    "DeepSpeed ZeRO with an optimizer that looks at whole parameters, where your config allows it",
    Comes.SAID,
    "with `zero_allow_untested_optimizer` you have said that you want it: another curve in every world. Its "
    "checkpoints are converted where that can be done",
    "an element-wise optimizer, or DDP",
)
def test_whoever_allows_it_is_told_once(seen: Seen) -> None:
    two, three = seen.two["allowed"], seen.three["allowed"]
    assert [len(rank["said"]) for rank in two] == [1, 0], "rank 0, once"
    assert "the loss curve is another one at every world size" in two[0]["said"][0]
    assert "the run stays at 2 ranks" in two[0]["said"][0]
    assert two[0]["sealed"] == [["deepspeed-zero-2", False, False]], "the master is never promised that it re-shards"
    # The reason for all this.
    assert two[0]["losses"] != pytest.approx(three[0]["losses"], rel=1e-6)
    assert seen.two["adafactor"][0]["losses"] == pytest.approx(seen.three["adafactor"][0]["losses"], rel=1e-6)


@brings(
    "FSDP with Adafactor (torch's or transformers')",
    Comes.REFUSED,
    "it cannot compute with sharded parameters: torch fails at its first step",
    "another optimizer (AdamW, SGD, Muon), or DDP",
)
def test_adafactor_with_fsdp_is_refused(seen: Seen) -> None:
    for rank in seen.two["fsdp"]:
        assert "Adafactor cannot train the sharded parameters of FSDP" in rank["refused"]
        assert rank["steps"] == 0


@brings(
    "FSDP2 (`fully_shard`) with an optimizer that takes norms of parameters (LAMB)",
    Comes.ROUNDED,
    "a norm of a sharded parameter is that of all ranks' rows",
)
@brings(
    "FSDP2 with `torch.optim.Muon`",
    Comes.ROUNDED,
    "right, but up to bfloat16's rounding (losses differ by about 1e-3): Muon multiplies in that precision, and "
    "products of sharded matrices are added up in another order",
)
def test_optimizers_see_whole_parameters_in_fsdp(seen: Seen) -> None:
    for world in (seen.two, seen.three):
        assert world["fsdp lamb"][0]["losses"] == pytest.approx(world["whole lamb"][0]["losses"], rel=1e-6)
        assert world["fsdp muon"][0]["losses"] == pytest.approx(world["whole muon"][0]["losses"], rel=4e-3)


@brings(
    "FSDP1 (`FullyShardedDataParallel`) with an optimizer that looks at whole parameters, or that nobody knows",
    Comes.SAID,
    "it is given flat parts of the model, cut where the number of ranks says: another curve in every world",
    "FSDP2 (`fully_shard`), or an element-wise optimizer",
)
def test_flat_shards_are_told_of(seen: Seen) -> None:
    two, three = seen.two["flat lamb"], seen.three["flat lamb"]
    assert [len(rank["said"]) for rank in two] == [1, 0], "rank 0, once"
    assert "FullyShardedDataParallel gives Lamb flat parts of the model" in two[0]["said"][0]
    assert two[0]["losses"] != pytest.approx(three[0]["losses"], rel=1e-5), "the reason for it"
    assert seen.two["flat adamw"][0]["said"] == []


@brings(
    "`DDP(static_graph=True)` where micro-batches are accumulated",
    Comes.ROUNDED,
    "torch's first backward pass must not be put off there: each step's first micro-batch is synchronised too, which "
    "costs one more all-reduce in each step",
)
@brings(
    "DDP with `find_unused_parameters`, `gradient_as_bucket_view`, `torch.compile`, or within `join()`",
    Comes.ROUNDED,
    "accumulation puts their synchronisation off as it does DDP's",
)
@pytest.mark.parametrize("name", ["static", "static, view", "unused", "view", "compiled", "join"])
def test_ddp_accumulates_alike_with_its_options(seen: Seen, name: str) -> None:
    """Every update is that of the whole batch in one process."""
    for world, accumulation in ((seen.two, 3), (seen.three, 2)):
        result = world[name][0]
        assert max(result["errors"]) < 1e-6
        steps = len(result["errors"])
        kept = 2 if "static_graph" in CASES[name].get("options", {}) else 1
        assert result["deferrals"] == steps * max(0, accumulation - kept)


@brings(
    "DDP, also with a static graph, resumed in the same world of two ranks; with `find_unused_parameters=True` of any",
    Comes.BITWISE,
    "a resumed process synchronises where one that never stopped does, and adds up in the same order",
)
@brings(
    "DDP resumed in the same world of three ranks or more",
    Comes.ROUNDED,
    "after a process's first step torch lays the gradients out anew, and where a gradient lies says in which order the "
    "ranks' are added up: that one step is rounded otherwise",
    "`find_unused_parameters=True`, with which torch does not, where every bit matters",
)
def test_ddp_made_anew(seen: Seen) -> None:
    """As by a process that resumes."""
    for name in ("plain", "static", "unused"):
        assert seen.two[f"{name}, again"][0]["weights"] == seen.two[name][0]["weights"], name
        assert max(seen.three[f"{name}, again"][0]["errors"]) < 1e-6
    assert seen.three["unused, again"][0]["weights"] == seen.three["unused"][0]["weights"]


def test_the_trainer_takes_a_static_graph(seen: Seen) -> None:
    for world in (seen.two, seen.three):
        assert world["static trainer"][0]["losses"] == pytest.approx(world["trainer"][0]["losses"], rel=1e-6)


@brings(
    "DDP with `fp16_compress_hook` or `bf16_compress_hook`",
    Comes.ROUNDED,
    "gradients are added up in 16 bits: the curve is the same up to their rounding, not up to the model's",
)
@brings(
    "DDP with PowerSGD or another hook that approximates gradients",
    Comes.SAID,
    "each rank's gradients are approximated by themselves, so every world has another curve; what it gathers is in no "
    "checkpoint",
    "leave the hook out",
)
def test_hooks_that_change_gradients(seen: Seen) -> None:
    for world in (seen.two, seen.three):
        assert max(world["fp16"][0]["errors"]) < 1e-3
        assert world["fp16"][0]["said"] == []
    assert [len(rank["said"]) for rank in seen.two["power-sgd"]] == [1, 0], "rank 0, once"
    assert "the communication hook powerSGD_hook approximates" in seen.two["power-sgd"][0]["said"][0]
    assert max(seen.two["power-sgd"][0]["errors"]) > 1e-3, "the reason for it"


@brings(
    "`save=` with a DeepSpeed engine, and `strategy=` forgotten, or another stage's",
    Comes.REFUSED,
    "the checkpoint would claim to load at any number of ranks, and holds ZeRO shards of the ranks that saved it; "
    "where the engine cannot be seen in `save`, the files of the first checkpoint show it, and it is not sealed",
    "`save=elastic.deepspeed.save(engine)`, which knows its strategy",
)
@pytest.mark.parametrize(
    ("name", "made", "said"),
    [
        ("lambda", 0, "save= calls a DeepSpeed engine with deepspeed-zero-2"),
        ("partial", 0, "save= calls a DeepSpeed engine with deepspeed-zero-3"),
        ("ours, other stage", 0, "save= writes deepspeed-zero-3: leave strategy out"),
        ("hidden", 1, "the files are ZeRO shards (stage 1 or 2), which load at no other number of ranks"),
        ("hidden, stage 3", 1, "the files are ZeRO shards (stage 3)"),
        ("other stage", 1, "strategy='deepspeed-zero-2', but the files are those of ZeRO stage 3"),
        ("no engine", 1, "strategy='deepspeed-zero-2', but none of the files is a DeepSpeed engine's"),
    ],
)
def test_a_checkpoint_that_is_not_what_it_says_is_refused(seen: Seen, name: str, made: int, said: str) -> None:
    """On all ranks, and nothing is sealed."""
    for rank in seen.saves[name]:
        assert said in rank["refused"]
        assert "\n" not in rank["refused"]
        assert rank["made"] == made
    assert seen.saves[name][0]["left"] == []


@brings(
    "files of torch's distributed checkpoint (DCP), or of DeepSpeed's stage 0, saved with the default strategy",
    Comes.ROUNDED,
    "both load at any number of ranks",
)
@pytest.mark.parametrize(
    ("name", "strategy", "any_world_size", "reshards"),
    [
        ("ours", "deepspeed-zero-2", False, True),  # forgotten, and known all the same
        ("own, named", "deepspeed-zero-1", False, False),
        ("own name", "mine", False, False),
        ("stage 0", "ddp", True, False),
        ("dcp", "ddp", True, False),
    ],
)
def test_one_that_is_what_it_says_is_not(
    seen: Seen, name: str, strategy: str, any_world_size: bool, reshards: bool
) -> None:
    for rank in seen.saves[name]:
        assert (rank["refused"], rank["made"], rank["said"]) == ("", 3, [])
    assert seen.saves[name][0]["sealed"] == [[strategy, any_world_size, reshards]] * 3


@brings(
    "a `save` of your own that writes one file per rank, with the default strategy",
    Comes.SAID,
    "the default says that any number of ranks loads them, and nobody but you knows what is in them",
    "`any_world_size=False` if they are shards",
)
@pytest.mark.full
def test_one_file_of_each_rank_is_told_once(seen: Seen) -> None:
    ranks = seen.saves["of each rank"]
    assert [len(rank["said"]) for rank in ranks] == [1, 0]
    assert "shard-rank*.pt" in ranks[0]["said"][0]
    assert [rank["made"] for rank in ranks] == [3, 3]


@brings(
    "means over tokens (`Batches(count_tokens=..., reduce=s.sum)`)",
    Comes.ROUNDED,
    "the tokens of a global batch are summed as whole numbers, the same on all ranks, while the first forward pass "
    "computes",
)
def test_tokens_are_summed_while_the_model_computes(seen: Seen) -> None:
    """Exactly, in any order with the session's own exchange; and the updates are those of the whole batch."""
    for world, size in ((seen.two, 2), (seen.three, 3)):
        for rank in world["tokens"]:
            assert max(rank["errors"]) < 1e-6
            assert rank["under way"] == [True] * len(rank["errors"]), "it is not waited for before the forward pass"
            assert rank["sum"] == size * 2**60 + sum(range(size))
        assert len({rank["double"] for rank in world["tokens"]}) == 1, "the same bits on every rank"
