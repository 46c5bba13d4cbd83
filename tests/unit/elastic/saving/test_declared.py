"""What a checkpoint says of itself, held against how it is saved and what is in it."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dalsegno.elastic import background
from dalsegno.elastic.deepspeed.checks import loads_by_place
from dalsegno.elastic.saving.background_save import Background
from dalsegno.elastic.saving.declared import contradiction, how_loaded, of_each_rank, strategy_of
from dalsegno.elastic.trainer.strategies import DDP
from dalsegno.elastic.training.training_state import TrainingState
from dalsegno.protos.reads import Reads

ZERO_2 = ["bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"]
ZERO_3 = ["zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
PIPELINE = ["layer_00-model_00-model_states.pt", "mp_rank_00_model_states.pt", ZERO_3[1]]
DCP = [".metadata", "__0_0.distcp", "__1_0.distcp"]


@pytest.mark.parametrize(
    ("files", "strategy", "any_world_size", "said"),
    [
        (ZERO_2, "ddp", True, "the files are ZeRO shards (stage 1 or 2)"),
        (ZERO_3, "ddp", True, "the files are ZeRO shards (stage 3)"),
        (ZERO_3, "deepspeed-zero-3", True, "says that they do"),
        (ZERO_3, "deepspeed-zero-2", False, "those of ZeRO stage 3"),
        (ZERO_2, "deepspeed-zero-3", False, "those of ZeRO stage 1 or 2"),
        (ZERO_2[1:], "deepspeed-zero-1", False, "those of ZeRO stage 0"),
        (["model.pt"], "deepspeed-zero-1", False, "none of the files is a DeepSpeed engine's"),
        ([], "deepspeed-zero-0", True, "none of the files is a DeepSpeed engine's"),
    ],
)
def test_lies_are_found(files: list[str], strategy: str, any_world_size: bool, said: str) -> None:
    for place in ("", "checkpoint-4/global_step4/"):
        found = contradiction([f"{place}{file}" for file in files], strategy, any_world_size)
        assert found is not None
        assert said in found


@pytest.mark.parametrize(
    ("files", "strategy", "any_world_size"),
    [
        (ZERO_2, "deepspeed-zero-1", False),
        (ZERO_2, "deepspeed-zero-2", False),
        (ZERO_3, "deepspeed-zero-3", False),
        (ZERO_2[1:], "deepspeed-zero-0", True),
        (ZERO_2[1:], "ddp", True),
        (ZERO_2, "mine", False),
        (PIPELINE, "deepspeed-zero-1", False),
        (DCP, "ddp", True),
        (["model.pt", "rng/rank-0.json"], "ddp", True),
    ],
)
def test_what_may_be_true_is_not_refused(files: list[str], strategy: str, any_world_size: bool) -> None:
    assert contradiction(files, strategy, any_world_size) is None


@pytest.mark.parametrize(
    ("files", "world_size", "found"),
    [
        (["model.pt", "opt_rank0.pt", "opt_rank1.pt"], 2, "opt_rank*.pt"),
        (["shards/rank-0/a.pt", "shards/rank-1/a.pt"], 2, "shards/rank-*/a.pt"),
        (["opt_rank0.pt", "opt_rank1.pt"], 3, None),
        (["opt_rank0.pt"], 1, None),
        (["model.pt"], 2, None),
    ],
)
def test_one_of_each_rank(files: list[str], world_size: int, found: str | None) -> None:
    assert of_each_rank(files, world_size) == found


class Engine:
    def __init__(self, stage: int) -> None:
        self.stage = stage

    def zero_optimization_stage(self) -> int:
        return self.stage

    def save_checkpoint(self, path: Path) -> None: ...

    def save_16bit_model(self, path: Path) -> None: ...


def ways(engine: Engine) -> list[Any]:
    def inner(path: Path) -> None:
        engine.save_checkpoint(path)

    return [inner, lambda path: engine.save_checkpoint(path), engine.save_checkpoint, functools.partial(inner)]


def test_an_engine_is_seen_before_it_saves() -> None:
    for way in ways(Engine(2)):
        with pytest.raises(ValueError, match="save= calls a DeepSpeed engine with deepspeed-zero-2"):
            strategy_of(way, "ddp")
        with pytest.raises(ValueError, match="deepspeed-zero-3"):
            strategy_of(way, "deepspeed-zero-3")
        assert strategy_of(way, "deepspeed-zero-2") == "deepspeed-zero-2"
        assert strategy_of(way, "mine") == "mine"


class Saying:
    by_place = True
    reads = Reads()

    def write(self, path: Path) -> None: ...


def test_how_a_save_is_loaded_says_itself_or_whose_it_is() -> None:
    def write(path: Path) -> None: ...

    nothing = {"reshards": False, "by_place": False, "reads": None}
    said = {"reshards": False, "by_place": True, "reads": Reads()}
    assert how_loaded(write) == how_loaded(background(lambda: {})) == nothing
    assert how_loaded(Saying()) == how_loaded(Saying().write) == how_loaded(Background(dict, Saying())) == said
    write.reshards = True  # type: ignore[attr-defined]
    assert how_loaded(write) == {**nothing, "reshards": True}


def test_another_thing_of_that_name_says_nothing() -> None:
    """It would be in a manifest that nobody can read."""

    class Counting:
        reads: Any = 3

        def write(self, path: Path) -> None: ...

    class Reading(Counting):
        def reads(self) -> None: ...

    for one in (Counting(), Reading()):
        assert how_loaded(one)["reads"] is how_loaded(one.write)["reads"] is None


def test_what_a_class_of_the_scripts_own_adds_is_not_known() -> None:
    """Another method than ``write``, other files of a strategy; experts, which only some ranks write."""

    class State(TrainingState):
        def __init__(self) -> None: ...

        def save_with_more(self, path: Path) -> None: ...

    class Strategy(DDP):
        def files(self, state: Any) -> dict[str, Any]:
            return {**super().files(state), "more/rank-1.pt": b""}

    assert how_loaded(State().write) == {"reshards": False, "by_place": True, "reads": Reads()}
    assert not how_loaded(State().save_with_more)["by_place"]
    assert (DDP().by_place, DDP().reads) == (True, Reads())
    assert (Strategy().by_place, Strategy().reads) == (False, None)
    engine = {"mp_world_size": 1, "zero_optimization_stage": lambda: 2}
    assert loads_by_place(SimpleNamespace(**engine))
    for other in ({"has_moe_layers": True}, {"pipeline_parallelism": True}, {"mp_world_size": 2}):
        assert not loads_by_place(SimpleNamespace(**{**engine, **other}))


def test_what_saves_whole_is_let_be() -> None:
    """Stage 0; the weights alone, gathered; and what only holds an engine."""
    engine = Engine(2)
    for way in ways(Engine(0)):
        assert strategy_of(way, "ddp") == "ddp"
    assert strategy_of(lambda path: engine.save_16bit_model(path), "ddp") == "ddp"
    assert strategy_of(None, "ddp") == "ddp"


def test_what_knows_its_own_need_not_be_told() -> None:
    class Ours:
        strategy = "deepspeed-zero-3"

    assert strategy_of(Ours(), "ddp") == "deepspeed-zero-3"
    with pytest.raises(ValueError, match="leave strategy out"):
        strategy_of(Ours(), "deepspeed-zero-1")
