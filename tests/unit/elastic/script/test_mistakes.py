"""What newcomers type wrongly: each mistake ends with one line that says what to type."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import ChainDataset, DataLoader, IterableDataset

from dalsegno.elastic import Session, session
from dalsegno.elastic.rank.collective import OtherThread
from dalsegno.elastic.rank.identity import Identity
from dalsegno.elastic.script.engine import check_sizes
from dalsegno.elastic.script.state import _check_stateful
from dalsegno.elastic.training import entry
from tests.support.workers.fake_link import FakeLink


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.randn(40, 5))


class Wrapped(nn.Linear):
    def __init__(self, model: Any = None) -> None:
        super().__init__(4, 1)

    def no_sync(self) -> None: ...


class Lookahead(torch.optim.Optimizer):
    """Around another optimizer, as people write it: what torch's own ``__init__`` makes is taken from that one.

    Args:
        base: The other one.
        calls_super: It does call that all the same, as we say.
    """

    def __init__(self, base: torch.optim.Optimizer, *, calls_super: bool = False) -> None:
        if calls_super:
            super().__init__(base.param_groups, base.defaults)
        self.base, self.param_groups, self.state, self.defaults = base, base.param_groups, base.state, base.defaults

    def step(self, closure: Any = None) -> Any:
        return self.base.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def state_dict(self) -> Any:
        return self.base.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.base.load_state_dict(state)


class Script:
    """A script up to its loop."""

    def __init__(self, directory: Path | None = None) -> None:
        self.s = session(directory)
        self.rows = torch.randn(100, 5)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def data(self, dataset: Any = None, **options: Any) -> Any:
        wanted: dict[str, Any] = {"global_batch": 16, "micro_batch": 4, **options}
        return self.s.data(self.rows if dataset is None else dataset, **wanted)

    def state(self, *arguments: Any, **parts: Any) -> Any:
        return self.s.state(*(arguments or (self.model, self.optimizer)), **parts)

    def loss(self, rows: Tensor) -> Tensor:
        return (self.model(rows[:, :4]) - rows[:, 4:]).square().mean()

    def train(self, data: Any, state: Any, **options: Any) -> None:
        for batch in self.s.steps(data, state, **{"max_steps": 3, **options}):
            self.step(batch)

    def step(self, batch: Any) -> None:
        for micro in batch:
            micro.scale(self.loss(micro.data)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


ENGINE = SimpleNamespace(zero_optimization_stage=lambda: 1)


class SecondEngine(nn.Linear):
    """As DeepSpeed's: a module with an optimizer, or with None."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(1, 1)
        self.optimizer = optimizer

    def zero_optimization_stage(self) -> int:
        return 1


def configured(script: Script) -> Session:
    """Its session, once it was asked for DeepSpeed's configuration."""
    script.s._configured = True
    return script.s


IN_DATA: dict[str, tuple[Callable[[Script], Any], str]] = {
    "a DataLoader": (lambda x: x.data(DataLoader(x.rows)), "the data set, not a DataLoader"),
    "an iterator": (lambda x: x.data(iter(x.rows)), "can be read once"),
    "a generator": (lambda x: x.data(i for i in range(3)), "can be read once"),
    "a number": (lambda x: x.data(16), "int is no data set"),
    "nothing to train": (lambda x: x.data([]), "the data set is empty"),
    "only a short batch": (lambda x: x.data([1, 2], drop_last=True), "nothing is left to train on"),
    "batch_size": (lambda x: x.data(batch_size=16), "micro_batch= of one forward pass"),
    "a sampler": (lambda x: x.data(sampler=[1]), "dealt to the ranks by the session"),
    "a torch generator": (lambda x: x.data(generator=torch.Generator()), "seed= makes the order"),
    "epochs": (lambda x: x.data(epochs=3), "data_epochs="),
    "the rank": (lambda x: x.data(rank=0), "the session knows the rank"),
    "a misspelling": (lambda x: x.data(num_worker=1), "neither s.data nor torch's DataLoader"),
    "a float": (lambda x: x.data(global_batch=16.0), r"global_batch=16\.0\): a number of samples"),
    "zero": (lambda x: x.data(micro_batch=0), "at least 1"),
    "no seed": (lambda x: x.data(seed=None), "seed=None"),
    "no epoch": (lambda x: x.data(data_epochs=0), "at least 1"),
    "a stream to shuffle": (lambda x: x.data(Stream(), shuffle=True), "shuffle inside it"),
    "two": (lambda x: (x.data(), x.data()), "has its data already"),
}
IN_STATE: dict[str, tuple[Callable[[Script], Any], str]] = {
    "swapped": (lambda x: x.state(x.optimizer, x.model), "the model comes first, not a AdamW"),
    "two models": (lambda x: x.state(x.model, nn.Linear(1, 1)), r"nn\.ModuleList"),
    "parameters": (lambda x: x.state(x.model, list(x.model.parameters())), "a list has no state_dict"),
    "a scheduler first": (
        lambda x: x.state(x.model, torch.optim.lr_scheduler.ConstantLR(x.optimizer)),
        "ConstantLR is no optimizer",
    ),
    "an optimizer around another": (
        lambda x: x.state(x.model, Lookahead(x.optimizer)),
        r"^Lookahead does not call super\(\)\.__init__\(\): call it",
    ),
    "such a one by name": (
        lambda x: x.state(x.model, x.optimizer, second=Lookahead(x.optimizer)),
        r"Lookahead does not call super\(\)\.__init__\(\)",
    ),
    "wrapped by nothing": (lambda x: x.state(x.model, wrap=id), "made a int of the model, which is no module"),
    "wrapped twice": (lambda x: x.state(Wrapped(), wrap=Wrapped), "the model is a Wrapped already"),
    "no function": (lambda x: x.state(x.model, wrap="ddp"), "a str cannot be called"),
    "an engine": (lambda x: x.state(ENGINE), r"s\.engine\(engine\)"),
    "beside an engine": (lambda x: (setattr(x.s, "_configured", True), x.state()), r"s\.engine\(engine\), not"),
    "twice": (lambda x: (x.state(), x.state()), "has its state already"),
    "no engine": (lambda x: x.s.engine(x.model), r"s\.state\(model, optimizer\) is for it"),
    "a tuple of deepspeed's": (lambda x: x.s.engine((1, 2)), "give the first of"),
    "a config of its own": (lambda x: x.s.engine(ENGINE), r"config=s\.deepspeed_config"),
    "a part without a state": (
        lambda x: configured(x).engine(ENGINE, ema=[1]),
        r"s\.engine\(ema=\.\.\.\): a list has no",
    ),
    "an engine as a part": (
        lambda x: configured(x).engine(ENGINE, critic=SecondEngine(1)),
        r"s\.engine\(critic=\.\.\.\): a DeepSpeed engine is no part.*make one module of both",
    ),
    "an engine beside a model": (
        lambda x: x.state(x.model, x.optimizer, critic=SecondEngine(1)),
        r"s\.state\(critic=.*no part",
    ),
    "the engine's own": (lambda x: configured(x).engine(ENGINE, scheduler=x.optimizer), "the engine has its own"),
    "a config without data": (lambda x: x.s.deepspeed_config({}, x.rows), r"what s\.data"),
}
IN_STEPS: dict[str, tuple[Callable[[Script], Any], str]] = {
    "no state": (lambda x: x.s.steps(x.data(), max_steps=3), "the state is missing"),
    "swapped": (lambda x: x.s.steps(x.state(), x.data(), max_steps=3), "the data come first"),
    "only a state": (lambda x: x.s.steps(x.state(), max_steps=3), "the data come first"),
    "the model": (lambda x: x.s.steps(x.data(), x.model), r"Linear is no state; s\.state\(model"),
    "the engine": (lambda x: x.s.steps(x.data(), ENGINE), r"s\.engine\(engine\) makes one"),
    "a DataLoader": (lambda x: x.s.steps(DataLoader(x.rows), x.state()), r"s\.data\(dataset"),
    "no end": (lambda x: x.s.steps(x.data(), x.state()), "when does the training end"),
    "a seed": (lambda x: x.s.steps(x.data(), x.state(), max_steps=1, seed=1), "follows from data and state"),
    "a save": (lambda x: x.s.steps(x.data(), x.state(), max_steps=1, save=print), "leave it out"),
    "a misspelling": (lambda x: x.s.steps(x.data(), x.state(), max_step=1), "no such option"),
    "in the background": (lambda x: x.s.steps(range(3), background=True), "belongs to"),
    "staying unwrapped": (lambda x: x.s.steps(x.data(), x.state(), max_steps=1, stay=True), "wrap=Distributed"),
    "staying without a state": (lambda x: x.s.steps(range(3), stay=True), "wrap=DistributedDataParallel"),
    "saves below 0": (lambda x: x.s.steps(x.data(), x.state(), max_steps=1, save_every=-1), "cannot be negative"),
}


@pytest.mark.parametrize("name", [*IN_DATA, *(f"state: {one}" for one in IN_STATE), *(f"steps: {o}" for o in IN_STEPS)])
def test_before_the_first_step(name: str) -> None:
    """One line, before anything is trained."""
    kind, _, rest = name.rpartition(": ")
    wrong, line = {"": IN_DATA, "state": IN_STATE, "steps": IN_STEPS}[kind][rest]
    script = Script()
    with pytest.raises(ValueError, match=line) as caught:
        wrong(script)
    assert "\n" not in str(caught.value)
    assert script.s.step == 0


def test_a_loop_over_epochs_around_the_loop() -> None:
    script = Script()
    data, state = script.data(data_epochs=1), script.state()
    script.train(data, state, max_steps=None)
    with pytest.raises(ValueError, match=r"ended at step 7: s\.steps goes through all data epochs by itself"):
        script.train(data, state, max_steps=None)


class Numbers(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.arange(200.0).reshape(40, 5) / 200)


def test_streams_one_after_the_other() -> None:
    """Torch's `ChainDataset` has a `__len__`, which fails where one of them has none: no mistake of anybody's."""
    script = Script()
    data = script.data(ChainDataset([Numbers(), Numbers()]), data_epochs=1)
    script.train(data, script.state(), max_steps=None)
    assert script.s.step == 5


def test_data_or_state_in_the_loop() -> None:
    """They come before."""
    script = Script()
    data, state = script.data(), script.state()
    for batch in script.s.steps(data, state, max_steps=1):
        script.step(batch)
        with pytest.raises(ValueError, match=r"s\.data\(\.\.\.\) comes before the loop"):
            script.data()


def test_an_evaluation_in_between(caplog: pytest.LogCaptureFixture) -> None:
    """No line if `train()` is called anywhere before the next step's micro-batches."""
    script = Script()
    data, state = script.data(), script.state()
    for batch in script.s.steps(data, state, max_steps=4):
        script.model.train()
        script.step(batch)
        script.model.eval()
        for _ in DataLoader(script.rows, 8):
            pass
    assert "evaluation mode" not in caplog.text


def test_an_engine_of_other_sizes() -> None:
    """The engine of a config that was made for other data."""
    script = Script()
    engine = SimpleNamespace(train_micro_batch_size_per_gpu=lambda: 8, gradient_accumulation_steps=lambda: 2)
    with pytest.raises(ValueError, match="made for 2 micro-batches of 8 in a step, and these data have 4 of 4"):
        check_sizes(engine, script.data().plan)


def test_micro_batches_of_a_loop_without_a_state() -> None:
    script = Script()
    for batch in script.data():
        with pytest.raises(RuntimeError, match=r"s\.steps\(data, state\)"):
            next(iter(batch))
        break


def test_the_step_is_not_set_by_hand() -> None:
    script = Script()
    with pytest.raises(AttributeError, match=r"cannot be set \(to 5\).*--resume-step"):
        script.s.step = 5


def test_the_session_of_a_block_is_not_for_later(tmp_path: Path) -> None:
    with session(tmp_path) as s:
        pass
    with pytest.raises(RuntimeError, match="this session is over"):
        s.data([1], global_batch=1, micro_batch=1)
    assert isinstance(session(tmp_path), Session)


def test_a_loop_in_a_thread_under_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The world may have more ranks later: nothing is trained before they come."""
    script, agent = Script(), FakeLink()
    data, state = script.data(), script.state()
    monkeypatch.setattr(script.s.meetings, "_link", agent)
    monkeypatch.setattr(state, "begin", None)
    with ThreadPoolExecutor(1) as thread, pytest.raises(OtherThread):
        thread.submit(script.train, data, state).result()
    assert len(agent.of("refused")) == 1


def test_a_session_that_a_thread_opens_under_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent hears of it, though it has heard of no session before."""
    agent: Any = FakeLink()
    closed: list[bool] = []
    agent.close = lambda: closed.append(True)
    monkeypatch.setattr(entry, "from_environment", lambda **_: Identity(socket="agent.sock"))
    monkeypatch.setattr(entry, "Link", lambda *_: agent)
    monkeypatch.setattr(entry, "_sessions", [])
    with ThreadPoolExecutor(1) as thread, pytest.raises(OtherThread):
        thread.submit(session).result()
    assert len(agent.of("refused")) == len(closed) == 1


def test_an_optimizer_around_another_that_calls_its_super() -> None:
    """As the line of the refusal says: then it trains."""
    script = Script()
    script.optimizer = Lookahead(script.optimizer, calls_super=True)  # type: ignore[assignment]
    script.train(script.data(), script.state())
    assert script.s.step == 3


def test_an_engine_that_only_computes_may_be_a_part() -> None:
    """It has nothing but weights."""
    _check_stateful("s.engine", {"teacher": SecondEngine(None)})
