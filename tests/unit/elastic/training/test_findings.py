"""What a training is found to be, before its first step."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dalsegno.elastic.training import examination
from dalsegno.elastic.training.draws import drawn_in
from dalsegno.elastic.training.examination import Examination
from dalsegno.elastic.training.findings import (
    BATCH_STATISTICS,
    NOTHING,
    OURS,
    RANDOM,
    SCRIPTS,
    STATE,
    STATISTICS_OF_ALL,
    Facts,
    findings,
    in_distribution,
    kinds_of,
)
from dalsegno.protos.contract import Variable

SAVES = Facts(directory=True, saves=True, save_every=10, data=OURS, max_world_size=4)


def told(facts: Facts) -> dict[str, str]:
    found: dict[str, str] = {}
    for about, text in findings(facts):
        found[about] = f"{found[about]}; {text}" if about in found else text
    return found


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({}, "load as they are, at any number of ranks"),
        ({"any_world_size": False, "reshards": True, "strategy": "deepspeed-zero-1"}, "takes its ranges"),
        ({"any_world_size": False, "strategy": "deepspeed-zero-3"}, "after a conversion to Universal Checkpoint"),
        ({"any_world_size": False, "strategy": "mine"}, "impossible: checkpoints of strategy mine load with 1 ranks"),
        ({"directory": False}, "begins again at step 0, as does a crash: there is no checkpoint directory"),
        (
            {"left_out": ("StepLR",), "lacks": "is not in X", "belongs": "give X"},
            "refused, unless the script itself moves StepLR to session.step: it is not in X, and would begin anew",
        ),
        ({"saves": False}, "begins again at step 0, as does a crash: nothing is given to save with"),
    ],
)
def test_whether_the_world_can_change_and_how(change: dict[str, object], says: str) -> None:
    assert says in told(replace(SAVES, **change))["change of the world"]


def test_what_is_the_same_only_in_distribution() -> None:
    """Dropout that drops, and statistics of a micro-batch; not where the world is always one rank."""
    model = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.0), nn.BatchNorm1d(3), nn.Linear(3, 3))
    assert kinds_of(model) == ((RANDOM, ("Dropout",)), (BATCH_STATISTICS, ("BatchNorm1d",)))
    assert kinds_of(nn.Sequential(nn.Dropout(0.0), nn.Linear(3, 3))) == ()
    assert kinds_of(nn.MultiheadAttention(4, 2, dropout=0.1)) == ((RANDOM, ("dropout in MultiheadAttention",)),)
    facts = replace(SAVES, layers=kinds_of(model))
    text = told(facts)["the same only in distribution"]
    assert "Dropout: each rank draws" in text
    assert "BatchNorm1d: statistics" in text
    assert "BatchNorm1d" not in told(replace(facts, fixed_micro_batch=True))["the same only in distribution"]
    assert "the same only in distribution" not in told(replace(facts, max_world_size=1))
    assert "the same only in distribution" not in told(SAVES)


def test_statistics_of_all_ranks_depend_on_their_number() -> None:
    layers = kinds_of(nn.Sequential(nn.Linear(3, 3), nn.SyncBatchNorm(3)))
    assert layers == ((STATISTICS_OF_ALL, ("SyncBatchNorm",)),)
    facts = replace(SAVES, layers=layers, fixed_micro_batch=True, seeded=True)
    assert (
        "SyncBatchNorm: statistics are of the micro-batches of all ranks"
        in told(facts)["the same only in distribution"]
    )
    assert "the same only in distribution" not in told(replace(facts, max_world_size=1))


class Noisy(nn.Module):
    """Its rate is 0, and its noise is not."""

    def __init__(self, noise: bool) -> None:
        super().__init__()
        self.dropout, self.noise = 0.0, noise

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.dropout) + torch.randn_like(x) * self.noise


class Silent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.dropout)


class Functional(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.1)


class Child(nn.Module):
    """What it drops, a child drops; unless ``also``, a draw of its own."""

    def __init__(self, child: Any, also: float = 0.0) -> None:
        super().__init__()
        self.dropout, self.also = child, also

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x) if self.dropout is not None else x


class Both(Child):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.dropout(x), self.also)


class Within(Child):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.dropout(part) for part in x])


class Rate(nn.Module):
    """Has a rate by a name of its own."""

    def __init__(self, rate: float | None) -> None:
        super().__init__()
        self.drop_rate = rate

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.drop_rate or 0.0)


class OwnDropout(nn.Module):
    """Somebody's own, with the rate where torch's layers have it."""

    def __init__(self, p: Any) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, float(self.p))


class Hidden(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class HiddenDropout(Hidden):
    """Nobody sees how it draws."""


class StochasticDepth(nn.Module):
    """Draws behind a name that says nothing, as torchvision's does."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x


@pytest.mark.parametrize(
    ("layer", "draws"),
    [
        (Child(nn.Dropout(0.0)), ()),
        (Child(nn.Identity()), ()),
        (Child(None), ()),
        (Child(OwnDropout(0.0)), ()),
        (Within(nn.Dropout(0.0)), ()),
        (Both(nn.Identity(), 0.1), ("dropout in Both",)),
        (Both(nn.Dropout(0.0), 0.1), ("dropout in Both",)),
        (Child(nn.Dropout(0.1)), ("Dropout",)),
        (Child(Functional()), ("dropout in Child", "dropout in Functional")),
        (Child(OwnDropout(0.1)), ("OwnDropout",)),
        (Child(OwnDropout(torch.tensor(0.1))), ("dropout in Child", "dropout in OwnDropout")),
        (Child(HiddenDropout()), ("dropout in Child",)),
        (Child(StochasticDepth(0.1)), ("dropout in Child",)),
        (Rate(0.0), ()),
        (Rate(None), ()),
        (Rate(True), ("dropout in Rate",)),
        (Rate(0.1), ("dropout in Rate",)),
    ],
    ids=str,
)
def test_a_layer_draws_what_its_children_do_not(layer: nn.Module, draws: tuple[str, ...]) -> None:
    """A child is a layer of its own: one that drops nothing is no draw, whatever its name is."""
    assert kinds_of(layer) == (((RANDOM, draws),) if draws else ())


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_a_transformer_whose_rates_are_0_draws_nothing(family: str, rate: float) -> None:
    """And one whose rates are not is told of."""
    transformers = pytest.importorskip("transformers")
    size: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if family == "bert":
        rates = {"hidden_dropout_prob": rate, "attention_probs_dropout_prob": rate}
        config = transformers.BertConfig(**size, intermediate_size=16, **rates)
        model = transformers.BertForSequenceClassification(config)
    elif family == "gpt2":
        rates = {"resid_pdrop": rate, "embd_pdrop": rate, "attn_pdrop": rate}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, **ends, **rates))
    else:
        config = transformers.T5Config(**size, d_kv=8, d_ff=16, dropout_rate=rate)
        model = transformers.T5ForConditionalGeneration(config)
    assert bool(kinds_of(model)) is (rate > 0)


def noisy_in_many_ways(self: Any, x: Any, function: Any) -> Any:
    """As code is laid out in which variables are kept, put down or seen from inside."""
    y = x
    self.dropout(y)
    y = [self.dropout(self.dropout(part)) for part in x]
    later = lambda: self.dropout(y)  # noqa: E731  # a function inside
    return later() + self.training * self.dropout(x).sum()


def noisy_by_another(self: Any, x: Any, other: Any) -> Any:
    y = self.dropout(x)
    return other.dropout(y)


def test_what_an_attribute_of_ones_own_draws_can_be_left_out() -> None:
    """Wherever a function asks for it. Another one's, of the same name, draws all the same."""
    silent = frozenset({"dropout"})
    assert drawn_in(noisy_in_many_ways) == drawn_in(noisy_by_another) == ("dropout",)
    assert drawn_in(noisy_in_many_ways, silent) == ()
    assert drawn_in(noisy_by_another, silent) == ("dropout",)
    assert drawn_in(noisy_loss, silent) == ("randn",)


def noisy_loss(model: Any, data: Any) -> Any:
    def noise() -> Tensor:
        return torch.randn(3)

    return model(data) + noise()


def test_draws_outside_of_layers() -> None:
    """By names in the code of a `forward`, of a loss, of what is inside of it; and of the data set, which was seen."""
    model = nn.Sequential(Noisy(True), Silent(), Functional())
    assert kinds_of(model) == ((RANDOM, ("randn_like in Noisy", "dropout in Functional")),)
    assert drawn_in(noisy_loss) == drawn_in(functools.partial(noisy_loss, None)) == ("randn",)
    assert drawn_in(nn.functional.mse_loss) == drawn_in(None) == drawn_in(len) == drawn_in(nn.MSELoss()) == ()
    about = "the same only in distribution"
    drawing = replace(SAVES, loss_draws=("randn",))
    assert "randn in the loss: each rank draws" in told(drawing)[about]
    assert about not in told(replace(drawing, fixed_micro_batch=True, seeded=True))
    assert "a generator of its own" in told(replace(SAVES, data_draws_own=True, max_world_size=1))[about]
    assert "the data set: what it draws" in told(replace(SAVES, data_draws=True))[about]


def test_what_the_doctor_does_not_see_it_says() -> None:
    """A run does not."""
    assert "not seen" not in told(SAVES)
    alone = told(replace(SAVES, examined=True))["not seen"]
    assert "look with --nproc-per-node=2" in alone
    assert "what a loop or a callback draws at random" in alone
    together = told(replace(SAVES, examined=True, world_size=2, unwrapped=True))["not seen"]
    assert "--nproc-per-node" not in together
    assert "no DistributedDataParallel is around the model" in together


def test_what_is_not_saved() -> None:
    facts = replace(SAVES, save_every=0, stateless=("A", "B", "C", "D"))
    assert "a crash goes back to the last change" in told(facts)["not saved"]
    assert "A, B, C and 1 more: without state_dict()" in told(facts)["not saved"]
    assert "not saved" not in told(SAVES)
    in_memory = told(replace(SAVES, save_every=0, memory_every="auto"))["not saved"]
    assert in_memory.startswith(
        "what is in memory only (save_every is 0): if all nodes go at once, the run goes back to"
    )
    assert "not saved" not in told(replace(SAVES, memory_every=10))
    assert "which callback is which, of several A" in told(replace(SAVES, twins=("A",)))["not saved"]


def test_data_that_nobody_follows() -> None:
    for what, says in ((NOTHING, "a resume is refused; give Batches"), (STATE, "needs 1 ranks again")):
        assert says in told(replace(SAVES, data=what))["change of the world"]
    for what in (OURS, SCRIPTS, ""):
        assert "load as they are" in told(replace(SAVES, data=what))["change of the world"]


def test_people_are_told_once_by_rank_0_where_the_run_begins(capsys: pytest.CaptureFixture[str]) -> None:
    for rank, begins in ((1, True), (0, False), (0, True)):
        look = Examination(rank, begins, 2, 4, True)
        look.learn(strategy="fsdp", saves=True, save_every=1)
        look.learn_parts(nn.Linear(2, 2), None)
        look.end()
        look.end()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "dalsegno: training: strategy fsdp, 2 ranks"
    assert len(lines) == 2


def test_the_doctor_gets_them_and_the_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its first step, on each rank; one writes."""
    monkeypatch.setenv(Variable.DOCTOR, str(tmp_path / "found"))
    monkeypatch.setattr(examination, "insist", lambda code: None)
    for rank in (1, 0):
        assert not (tmp_path / "found").exists()
        with pytest.raises(SystemExit) as left:
            Examination(rank, False, 1, 1, False).end()
        assert left.value.code == 0
    assert (tmp_path / "found").read_text().startswith("training: strategy ddp, 1 rank\nchange of the world: ")


def test_a_loss_scale_that_overflows_find() -> None:
    """Of an engine in fp16, where the number of ranks may change."""
    line = "fp16 with a dynamic loss scale"
    for fp16, dynamic in ((True, True), (True, False), (False, True)):
        engine = SimpleNamespace(
            zero_optimization_stage=int, fp16_enabled=lambda on=fp16: on, dynamic_loss_scale=lambda on=dynamic: on
        )
        examination = Examination(0, True, 1, 2, True)
        examination.learn_parts(engine)
        assert examination._facts.dynamic_scale is (fp16 and dynamic)
    assert any(text.startswith(line) for text in in_distribution(Facts(max_world_size=2, dynamic_scale=True)))
    assert not any(text.startswith(line) for text in in_distribution(Facts(dynamic_scale=True)))
