"""What a model's forward pass changes by itself is told in one line, and nothing else is."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from dalsegno.elastic import session
from dalsegno.elastic.training import in_forward
from dalsegno.elastic.training.examination import Examination
from dalsegno.elastic.training.in_forward import LOOKS, said, watch_forward
from dalsegno.elastic.training.training_state import TrainingState
from dalsegno.protos.contract import Variable


class Codebook(nn.Module):
    """As of a VQ-VAE."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("embed", torch.randn(6, 4))
        self.register_buffer("size", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        near = torch.cdist(x, self.embed).argmin(1)
        if self.training:
            with torch.no_grad():
                chosen = nn.functional.one_hot(near, 6).to(x)
                self.size.mul_(0.8).add_(chosen.sum(0), alpha=0.2)
                self.embed.mul_(0.9).add_(chosen.t() @ x, alpha=0.1)
        return x + self.embed[near]


class Carried(nn.Module):
    """A hidden state that goes from one micro-batch to the next, in a buffer that is assigned anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("hidden", torch.zeros(1, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.layer(x + self.hidden))
        self.hidden = out.mean(0, keepdim=True).detach()
        return out


class Momentum(nn.Module):
    """As MoCo: the key's encoder follows at the beginning of each forward pass."""

    def __init__(self, follow: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.follow = follow

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                self.follow(key, query)
        return self.query(x) + self.key(x)


def _assigned(key: Tensor, query: Tensor) -> None:
    key.data = key.data * 0.9 + query.data * 0.1


class Rotary(nn.Module):
    """Makes its table anew for longer inputs, and fills another one when it is first called."""

    def __init__(self, *, grows: bool = True) -> None:
        super().__init__()
        self.layer, self.calls, self.grows = nn.Linear(4, 4), 0, grows
        self.register_buffer("table", torch.zeros(1), persistent=False)
        self.register_buffer("filled", torch.zeros(4))
        self.register_buffer("mask", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.grows:
            self.register_buffer("table", torch.arange(1.0 + self.calls), persistent=False)
            self.register_buffer(f"of_{self.calls}", torch.ones(1))
        self.filled.copy_(torch.arange(4.0))
        self.mask = torch.ones(4)
        return self.layer(x * self.mask + self.filled)


class Holes(nn.Module):
    """Has numbers that are none, and an infinite mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("holes", torch.full((4,), float("nan")))
        self.register_buffer("mask", torch.full((4,), float("-inf")))
        self.register_buffer("gone", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Projected(nn.Module):
    """Keeps a weight that the optimizer trains within its bounds: the same in every world."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data.clamp_(-0.1, 0.1)
        return self.layer(x)


class Odd(Holes):
    """Has buffers whose numbers cannot be compared in the usual way, or do not lie here."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("small", torch.ones(4).to(torch.float8_e4m3fn))
        self.register_buffer("sparse", torch.eye(4).to_sparse())
        self.register_buffer("elsewhere", torch.ones(4, device="meta"))
        self.register_buffer("freed", torch.ones(4))
        self.freed.untyped_storage().resize_(0)


class Gathered(Momentum):
    """Its key is there only while it computes, as with ZeRO-3."""

    def __init__(self) -> None:
        super().__init__(_assigned)
        for parameter in self.key.parameters():
            parameter.ds_id = 1  # type: ignore[attr-defined]


class Averaged(nn.Module):
    """A model with the average of its weights beside it, which the loop updates once a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.average = torch.optim.swa_utils.AveragedModel(self.layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.average(x)


def plain(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), *layers)


def train(
    model: nn.Module,
    *,
    called: nn.Module | None = None,
    steps: int = LOOKS + 2,
    micros: int = 2,
    ranks: tuple[int, int, int] = (0, 2, 2),
    begins: bool = True,
    behind: Callable[[nn.Module], None] = lambda _: None,
) -> list[int]:
    """Trains as a loop does. Returns how many hooks the model had behind each step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    rank, world_size, most = ranks
    examination, now = Examination(rank, begins, world_size, most, True), SimpleNamespace(step=0)
    examination.learn_parts(model, optimizer)
    examination.end(lambda: now.step)
    hooks = []
    for _ in range(steps):
        for _ in range(micros):
            (called or model)(torch.randn(5, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        behind(model)
        now.step += 1
        hooks.append(_hooks(model))
    return hooks


def _hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    monkeypatch.delenv(Variable.SOCKET, raising=False)
    monkeypatch.delenv(Variable.DOCTOR, raising=False)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if "in distribution" in one.getMessage()]


KEY = "key.weight, key.bias (parameters that no optimizer trains)"


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Codebook, "embed, size (buffers)"),
        (lambda: plain(Codebook()), "1.embed, 1.size (buffers)"),
        (Carried, "hidden (buffers)"),
        (lambda: Momentum(_assigned), KEY),
        (lambda: Momentum(lambda key, query: key.data.mul_(0.9).add_(query.data, alpha=0.1)), KEY),
        # Equal weights stay equal in the first passes.
        (lambda: Momentum(lambda key, query: key.lerp_(query, 0.1)), KEY),
        (lambda: plain(spectral_norm(nn.Linear(4, 3))), "1.weight_u, 1.weight_v (buffers)"),
        (lambda: spectral_norm(nn.Linear(4, 3)), "weight_u, weight_v (buffers)"),
        (
            lambda: plain(parametrizations.spectral_norm(nn.Linear(4, 3))),
            "1.parametrizations.weight.0._u, 1.parametrizations.weight.0._v (buffers)",
        ),
        (lambda: plain(nn.InstanceNorm1d(5, track_running_stats=True)), "1.running_mean, 1.running_var (buffers)"),
    ],
)
def test_what_forward_changes_is_told_once(
    model: Callable[[], nn.Module], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    hooks = train(model())
    assert len(lines(caplog)) == 1
    assert f"the same only in distribution: {named}" in lines(caplog)[0]
    assert "depend on the number of ranks, also with fixed_micro_batch" in lines(caplog)[0]
    assert hooks[-1] == _hooks(model())  # the script's own


def test_what_follows_later_is_told_then(caplog: pytest.LogCaptureFixture) -> None:
    """A learning rate that begins at 0 moves no weight, so what follows the weights stays as it is."""
    model = Momentum(lambda key, query: key.lerp_(query, 0.1))
    model.query.requires_grad_(False)
    model.other = nn.Linear(4, 4)

    def behind(_: nn.Module) -> None:
        behind.calls += 1  # type: ignore[attr-defined]
        if behind.calls == 2:  # type: ignore[attr-defined]
            model.query.weight.data += 1

    behind.calls = 0  # type: ignore[attr-defined]
    train(model, called=nn.Sequential(model, model.other), behind=behind)
    assert "key.weight (parameters" in lines(caplog)[0]


@pytest.mark.parametrize(
    "model",
    [
        lambda: plain(nn.Dropout(0.5), nn.BatchNorm1d(4), nn.Linear(4, 1)),
        lambda: plain(nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(4)).eval()),
        Rotary,
        lambda: Rotary(grows=False),
        Holes,
        Odd,
        Projected,
        Gathered,
        lambda: plain(nn.Linear(4, 4).requires_grad_(False)),
    ],
)
def test_what_forward_leaves_alone_is_not(model: Callable[[], nn.Module], caplog: pytest.LogCaptureFixture) -> None:
    hooks = train(model())
    assert caplog.records == []
    assert hooks[0] == 2
    assert hooks[-1] == 0


def test_a_model_in_which_nothing_could_change_is_let_go_at_once() -> None:
    assert train(plain(nn.BatchNorm1d(4)), steps=2) == [2, 0]


def test_an_average_that_the_loop_updates_is_the_same_in_every_world(caplog: pytest.LogCaptureFixture) -> None:
    train(Averaged(), behind=lambda model: model.average.update_parameters(model.layer))
    assert lines(caplog) == []


def test_a_wrappers_broadcast_is_no_change(caplog: pytest.LogCaptureFixture) -> None:
    """As DDP's, of buffers that rank 0 has otherwise."""
    inner = Holes()

    class Wrapper(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inner.mask.add_(1).copy_(torch.randn(4))
            return inner(x)

    train(inner, called=Wrapper())
    assert lines(caplog) == []


@pytest.mark.parametrize(
    "told",
    [{"ranks": (1, 2, 2)}, {"ranks": (0, 1, 1)}, {"begins": False}],
    ids=["another rank", "a single rank for ever", "a resumed run"],
)
def test_where_nothing_is_told_nothing_is_looked_for(told: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    assert train(Codebook(), **told) == [0] * (LOOKS + 2)
    assert lines(caplog) == []


def test_an_evaluation_is_not_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    model = Carried().eval()
    assert train(model)[-1] == 0
    assert lines(caplog) == []


def test_a_world_of_one_rank_that_may_grow_is_told(caplog: pytest.LogCaptureFixture) -> None:
    train(Codebook(), ranks=(0, 1, 4))
    assert len(lines(caplog)) == 1


def test_models_in_a_list_are_called_by_themselves(caplog: pytest.LogCaptureFixture) -> None:
    models = nn.ModuleList([nn.Linear(4, 4), nn.ModuleDict({"b": Codebook()})])
    train(models, called=nn.Sequential(models[0], models[1]["b"]))
    assert "1.b.embed, 1.b.size (buffers)" in lines(caplog)[0]


def test_a_copy_or_a_pickle_of_the_model_takes_no_watch_along(caplog: pytest.LogCaptureFixture) -> None:
    model = Codebook()
    steps = SimpleNamespace(done=0)
    watch = watch_forward(model, (), lambda: steps.done)[0]
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    steps.done = 1
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        other(torch.randn(5, 4))
    assert lines(caplog) == []
    watch.end()
    assert _hooks(model) == 0


def test_a_forward_pass_that_fails_leaves_it_to_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    model, steps = Codebook(), SimpleNamespace(done=0)
    watch_forward(model, (), lambda: steps.done)
    steps.done = 1
    with pytest.raises(RuntimeError):
        model(torch.randn(5, 3))
    model(torch.randn(5, 4))
    assert len(lines(caplog)) == 1


def test_a_compiled_model_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The hooks are neither traced into what it makes, nor do they have it made anew."""
    model = Codebook()
    counts: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        counts.append(1)
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    steps = SimpleNamespace(done=0)
    assert watch_forward(compiled, (), lambda: steps.done) == []
    for _ in range(4):
        compiled(torch.randn(5, 4))
        steps.done += 1
    assert counts == [1]
    inside = Codebook()
    inside.compile(backend="eager")
    assert watch_forward(inside, (), lambda: 0) == []


@pytest.mark.parametrize("compiled", [False, True])
def test_what_a_training_state_is_given_compiled_is_left_alone(tmp_path: Path, compiled: bool) -> None:
    """It saves the model inside, which would be traced with the hooks."""
    model = Codebook()
    with session(checkpoint_dir=tmp_path) as s:
        s.examination = Examination(0, True, 2, 2, True)
        TrainingState(s, model=torch.compile(model, backend="eager") if compiled else model)
        s.examination.end(lambda: 0)
        assert _hooks(model) == (0 if compiled else 2)


class Frequencies(nn.Module):
    """As some rotary embeddings: the buffer is made anew for each batch's length."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("inv_freq", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.inv_freq = torch.ones(2) / len(x)
        return self.layer(x) * self.inv_freq.sum()


def test_frequencies_of_rotary_embeddings_are_no_state(caplog: pytest.LogCaptureFixture) -> None:
    model, steps = Frequencies(), SimpleNamespace(done=0)
    assert watch_forward(model, (torch.optim.SGD(model.parameters(), 0.1),), lambda: steps.done)
    for rows in (3, 5, 2, 4, 6):
        model(torch.randn(rows, 4))
        steps.done += 1
    assert lines(caplog) == []


def test_a_staying_process_forgets_the_model() -> None:
    model = Codebook()
    examination = Examination(0, True, 2, 2, True)
    examination.learn_parts(model)
    examination.end(lambda: 0)
    assert _hooks(model) == 2
    examination.forget()
    assert _hooks(model) == 0


def test_of_large_buffers_the_first_numbers_are_compared(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Last(Carried):
        def forward(self, x: Tensor) -> Tensor:
            self.hidden[0, -1] += 1
            return self.layer(x)

    monkeypatch.setattr(in_forward, "_FEW", 2)
    train(Last())
    assert len(lines(caplog)) == 1
    monkeypatch.setattr(in_forward, "_WHOLE", 3)
    train(Last())
    assert len(lines(caplog)) == 1
    train(Codebook())
    assert "embed, size" in lines(caplog)[1]


def test_what_a_card_records_is_left_alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_forward, "_captures", lambda: True)
    assert train(Codebook())[-1] == 0
    assert lines(caplog) == []


@pytest.mark.parametrize("where", ["_can_be_read", "_differ"])
def test_a_device_that_cannot_compute_it_ends_no_training(
    where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> bool:
        raise NotImplementedError("no such kernel")

    monkeypatch.setattr(in_forward, where, fails)
    assert train(Codebook())[-1] == 0
    assert [one.getMessage() for one in caplog.records] == [
        "it is not seen what the forward pass changes: no such kernel"
    ]


def test_what_is_said() -> None:
    assert said(["h"], []).startswith(
        "h (buffers): the forward pass changes it, once for each micro-batch of each rank"
    )
    assert said(["h"], ["k"]).startswith("h (buffers) and k (parameters that no optimizer trains): the forward pass")
