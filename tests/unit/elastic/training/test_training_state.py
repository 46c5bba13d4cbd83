"""A full resume without a framework: bit for bit the training that was not interrupted, or refused with the reason."""

from __future__ import annotations

import gc
import random
import re
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from dalsegno.elastic import SaveError, TrainingState, background
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.saving import writing
from dalsegno.elastic.saving.bundles import Bundle
from dalsegno.elastic.saving.writing import SummedFile
from dalsegno.elastic.training import reading_state, training_state
from dalsegno.elastic.training.copies import Copies
from dalsegno.elastic.training.examination import Examination
from dalsegno.elastic.training.reading_state import check_same_names, read_tensors
from dalsegno.elastic.training.session import BareSession
from tests.unit.elastic.checkpoint.test_best import start

pytestmark = pytest.mark.timeout(60)


def parts(width: int = 8, lr: float = 0.1) -> dict[str, Any]:
    torch.manual_seed(width)
    model = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.5), nn.BatchNorm1d(width), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50),
        "scaler": GradScaler("cpu", init_scale=8.0, growth_interval=2),
    }


def train(session: BareSession, made: dict[str, Any], until: int, how: str) -> list[tuple[float, float, float]]:
    """Losses, learning rates and loss scales; draws from torch, dropout and Python's generator."""
    state = TrainingState(session, **made)
    assert state.load() == (session.resume is not None)
    save: Any = background(state.files) if how == "background" else state.write
    seen = []
    for _ in session.steps(range(session.step, 100), max_steps=until, save=save, save_every=3, seed=5, advanced=True):
        loss = made["model"](torch.randn(6, 4) + random.random()).square().mean()
        made["scaler"].scale(loss * (float("inf") if session.step in (2, 6) else 1.0)).backward()
        made["scaler"].step(made["optimizer"])
        made["scaler"].update()
        made["optimizer"].zero_grad()
        made["scheduler"].step()
        seen.append((float(loss.detach()), made["scheduler"].get_last_lr()[0], made["scaler"].get_scale()))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("how", ["background", "waiting"])
def test_an_interrupted_training_goes_on_bit_for_bit(tmp_path: Path, how: str) -> None:
    """Model with running statistics, optimizer, schedule, loss scale, and all generators."""
    with start(tmp_path / "a") as session:
        wanted = train(session, parts(), 9, how)
    with start(tmp_path / "b") as session:
        found = train(session, parts(), 4, how)
    torch.manual_seed(99)
    random.seed(99)
    with start(tmp_path / "b") as session:
        assert session.step == 4
        found += train(session, parts(), 9, how)
    assert found == wanted
    assert [scale for *_, scale in found] == [8, 16, 8, 8, 16, 16, 8, 8, 16]


def saved(directory: Path, made: dict[str, Any]) -> None:
    with start(directory) as session:
        train(session, made, 2, "waiting")


def refusal(directory: Path, made: dict[str, Any]) -> str:
    before = {name: tensor.clone() for name, tensor in made["model"].state_dict().items()}
    with start(directory) as session, pytest.raises(ValueError, match="step-2") as caught:
        TrainingState(session, **made).load()
    assert all(torch.equal(before[name], tensor) for name, tensor in made["model"].state_dict().items())
    return str(caught.value)


def test_other_parts_are_refused_before_anything_changes(tmp_path: Path) -> None:
    """Another optimizer would take Adam's moments without a word; a schedule that is gone, likewise."""
    saved(tmp_path, parts())
    made = parts()
    made["optimizer"] = torch.optim.SGD(made["model"].parameters(), lr=0.1)
    assert "with optimizer AdamW, scheduler CosineAnnealingLR, scaler GradScaler" in refusal(tmp_path, made)
    made = parts()
    del made["scheduler"]
    assert "this training has optimizer AdamW, scaler GradScaler" in refusal(tmp_path, made)
    # A scaler that is switched off would take the other's state and do nothing with it.
    made = parts()
    made["scaler"] = GradScaler("cpu", enabled=False)
    assert "scaler GradScaler (disabled): it would go on in another way" in refusal(tmp_path, made)


def test_another_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    """No name in common, some names only on one side, other shapes, other parameter groups."""
    with pytest.raises(ValueError, match=r"none of its 2 names \(a, b\) is in this one's 1 \(c\)"):
        check_same_names({"a": 0, "b": 0}, {"c": 0})
    with pytest.raises(ValueError, match="a, b, c and 1 more only in the checkpoint; e only in the model"):
        check_same_names(dict.fromkeys("abcdf", 0), dict.fromkeys("ef", 0))
    saved(tmp_path, parts())
    with start(tmp_path) as session:
        with pytest.raises(ValueError, match="of another model"):
            TrainingState(session, **parts(width=16)).load()
        made = parts()
        made["optimizer"] = torch.optim.AdamW([{"params": [p]} for p in made["model"].parameters()])
        made["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(made["optimizer"], 50)
        with pytest.raises(ValueError, match=r"the optimizer in step-2\.e0\.1 does not fit this one"):
            TrainingState(session, **made).load()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (torch.OutOfMemoryError, "CUDA out of memory. Tried to allocate 2.00 GiB"),
        (RuntimeError, "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        (RuntimeError, "CUDA error: an illegal memory access was encountered"),
    ],
)
@pytest.mark.parametrize(("where", "what"), [(reading_state, "load_part"), (training_state, "load_weights")])
def test_what_a_machine_lacks_is_not_said_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, what: str, kind: type[Exception], text: str
) -> None:
    """It loads at the next start, where another process's memory is free again."""

    def lacks(*_: Any, **__: Any) -> None:
        raise kind(text)

    saved(tmp_path, parts())
    monkeypatch.setattr(where, what, lacks)
    with start(tmp_path) as session, pytest.raises(kind, match=re.escape(text)):
        TrainingState(session, **parts()).load()


def test_what_another_script_saved_is_refused(tmp_path: Path) -> None:
    """A file that is not there is named."""
    with start(tmp_path) as session:
        list(session.steps([1, 2], max_steps=2, save=lambda path: (path / "own.pt").write_bytes(b"x") and None))
    assert "step-2.e0.1 has no model.pt: it was not saved by TrainingState" in refusal(tmp_path, parts())


def test_a_file_that_a_node_does_not_see_is_no_fault_of_the_checkpoint(tmp_path: Path) -> None:
    """The manifest lists it: a network file system may show it at the next start."""
    saved(tmp_path, parts())
    with start(tmp_path) as session:
        assert session.resume is not None
        (session.resume.path / "training.pt").unlink()
        with pytest.raises(OSError, match=r"training\.pt is not here, although the checkpoint's manifest lists it"):
            TrainingState(session, **parts()).load()


def mapped(name: str) -> bool:
    return any(name in line for line in Path("/proc/self/maps").read_text().splitlines())


class Average:
    """A part that keeps the tensors that it is given."""

    def __init__(self) -> None:
        self.kept: Any = {"shadow": [torch.ones(300, 300)]}

    def state_dict(self) -> Any:
        return self.kept

    def load_state_dict(self, state: Any) -> None:
        self.kept = state


def test_what_was_loaded_has_nothing_of_the_file(tmp_path: Path) -> None:
    """Files are mapped, so that each rank reads what it copies; afterwards they may be deleted or cut."""
    saved(tmp_path, {**parts(width=400), "average": Average()})
    held: list[Any] = []
    real = torch._foreach_copy_
    with start(tmp_path) as session, pytest.MonkeyPatch.context() as patch:
        made = {**parts(width=400), "average": Average()}
        patch.setattr(torch, "_foreach_copy_", lambda *a, **o: held.append(mapped("model.pt")) or real(*a, **o))
        assert TrainingState(session, **made).load()
    assert True in held, "it was read as a whole"
    gc.collect()
    assert not mapped(".pt")
    assert made["optimizer"].state[made["model"][0].weight]["exp_avg"].abs().sum() > 0


def test_moments_keep_the_dtype_that_they_were_saved_with(tmp_path: Path) -> None:
    """fp32 beside bf16 weights, as some optimizers have them: torch would make them bf16 with every resume."""

    def made() -> dict[str, Any]:
        torch.manual_seed(1)
        model = nn.Linear(4, 4).bfloat16()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}

    first = made()
    weight = first["model"].weight
    first["optimizer"].state[weight] = {"momentum_buffer": torch.randn(4, 4)}
    with start(tmp_path) as session:
        list(session.steps([1], save=TrainingState(session, **first).write))
    second = made()
    with start(tmp_path) as session:
        TrainingState(session, **second).load()
    found = second["optimizer"].state[second["model"].weight]["momentum_buffer"]
    assert torch.equal(found, first["optimizer"].state[weight]["momentum_buffer"])
    third = made()
    with start(tmp_path) as session:
        TrainingState(session, **third).load(cast=True)
    assert third["optimizer"].state[third["model"].weight]["momentum_buffer"].dtype is torch.bfloat16


def test_what_torch_wrote_in_its_old_format_is_read(tmp_path: Path) -> None:
    """It cannot be mapped."""
    torch.save({"a": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert read_tensors(tmp_path / "old.pt")["a"].tolist() == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda model: nn.DataParallel(torch.compile(model))])
def test_names_do_not_depend_on_what_is_around_the_model(tmp_path: Path, wrap: Any) -> None:
    """Nor those of a checkpoint that an earlier version saved with the wrapper's prefix."""
    made = parts()
    with start(tmp_path / "a") as session:
        list(session.steps([1], save=TrainingState(session, **{**made, "model": wrap(made["model"])}).write))
    with start(tmp_path / "a") as session:
        assert TrainingState(session, **parts()).load()
    prefixed = wrap(made["model"]).state_dict()
    assert not prefixed.keys() & made["model"].state_dict().keys()

    def earlier(path: Path) -> None:
        TrainingState(session, **made).write(path)
        torch.save(prefixed, path / "model.pt")

    with start(tmp_path / "b") as session:
        list(session.steps([1], save=earlier))
    with start(tmp_path / "b") as session:
        made = parts()
        assert TrainingState(session, **{**made, "model": wrap(made["model"])}).load()


def test_a_state_that_goes_wrong_later_is_not_saved(tmp_path: Path) -> None:
    """The rehearsal saw it well; each save looks at the small parts again, and no tensor is copied for it."""
    average = Average()
    average.kept["large"] = torch.empty(1 << 33, dtype=torch.uint8, device="cpu")  # never touched
    with start(tmp_path) as session:
        state = TrainingState(session, **parts(), average=average)
        state.rehearse()
        steps = session.steps(range(9), save=state.write, save_every=2)
        average.kept["shadow"].append(lambda: 1)
        with pytest.raises(SaveError, match="could not be saved: TypeError: the state of average has more than plain"):
            list(steps)
        average.kept["shadow"].pop()
        assert "average" in state.files()["training.pt"]
        average.kept["shadow"].append(Fraction(1, 2))
        with pytest.raises(TypeError, match=r"the state of average has more .*it holds a fractions.Fraction"):
            state.files()


@pytest.mark.parametrize("value", [Fraction(1, 2), lambda: 1])
def test_a_state_that_could_not_be_loaded_again_is_not_saved(tmp_path: Path, value: Any) -> None:
    """Better an error with the first save than with every resume."""
    made = {**parts(), "own": SimpleNamespace(state_dict=lambda: {"what": value}, load_state_dict=None)}
    with start(tmp_path) as session, pytest.raises(TypeError, match=r"the state of .*own has more than plain values"):
        TrainingState(session, **made).files()


def test_a_model_that_gets_a_buffer_in_its_first_step_is_refused_behind_it(tmp_path: Path) -> None:
    """What a resumed script makes would not have it: better now than at the first change of the world."""
    model = nn.Linear(2, 2)
    model.register_buffer("cache", None)
    with start(tmp_path) as session:
        steps = session.steps(range(9), save=TrainingState(session, model=model).write)
        next(steps)
        model.cache = torch.zeros(3)
        with pytest.raises(SaveError, match=r"the model.s state_dict\(\) has cache since its first"):
            next(steps)


class Bank(nn.Linear):
    """Keeps what it has seen, and more of it with each step."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("bank", torch.zeros(0, 2))

    def grow(self) -> None:
        self.bank = torch.cat([self.bank, torch.ones(1, 2)])


class GrowingBank(Bank):
    """Which loads one of any size."""

    def _load_from_state_dict(self, state: Any, prefix: str, *others: Any) -> None:
        self.bank = torch.zeros_like(state[f"{prefix}bank"])
        super()._load_from_state_dict(state, prefix, *others)


def test_a_buffer_that_grows_in_the_first_step_is_refused_behind_it(tmp_path: Path) -> None:
    model = nn.Sequential(Bank())
    with start(tmp_path) as session:
        steps = session.steps(range(9), save=TrainingState(session, model=model).write)
        next(steps)
        model[0].grow()
        with pytest.raises(SaveError, match=r"the model's 0\.bank has the shape \[1, 2\] now, and had \[0, 2\] before"):
            next(steps)


@pytest.mark.parametrize("grows", [True, False])
def test_a_model_that_grows_later_is_remarked_on_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, grows: bool
) -> None:
    """The script may make it so when it resumes; if it does not know, this says why it cannot."""
    model = nn.Sequential(Bank())
    with start(tmp_path) as session:
        steps = session.steps(range(9), save=TrainingState(session, model=model).write, save_every=2)
        for number, _ in enumerate(steps):
            if number >= 4:
                model[0].grow() if grows else model.register_buffer("late", torch.zeros(3))
    said = [line for line in caplog.messages if "before it loads, the run goes on at no other start" in line]
    assert len(said) == 1
    assert ("the model's 0.bank has the shape" if grows else "has late since") in said[0]


def test_a_module_that_loads_its_buffer_at_any_size_may_grow_it(tmp_path: Path) -> None:
    model = nn.Sequential(GrowingBank())
    with start(tmp_path) as session:
        for _ in session.steps(range(9), save=TrainingState(session, model=model).write, save_every=4, max_steps=8):
            model[0].grow()
    again = nn.Sequential(GrowingBank())
    with start(tmp_path) as session:
        TrainingState(session, model=again).load()
    assert again[0].bank.shape == (8, 2)


def test_a_buffer_that_repeats_its_memory_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """torch saves it, and cannot load it."""
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(1).expand(8))
    with start(tmp_path) as session, pytest.raises(SaveError, match="the model's mask has one place in memory for"):
        next(session.steps(range(9), save=TrainingState(session, model=model).write))


def test_a_part_that_is_none_is_no_part(tmp_path: Path) -> None:
    """`scaler=scaler if fp16 else None`: saved and loaded as if it were not there."""
    with start(tmp_path) as session:
        state = TrainingState(session, **{**parts(), "scheduler": None, "scaler": None})
        list(session.steps(range(2), save=state.write))
    with start(tmp_path) as session:
        made = parts()
        assert TrainingState(session, model=made["model"], optimizer=made["optimizer"], scaler=None).load()


def test_a_resume_that_was_not_loaded_is_refused() -> None:
    """It would go on at the step of the checkpoint with the weights of step 0."""
    resume = SimpleNamespace(step=3, ref=SimpleNamespace(name="step-3.e1.1"))
    known = {"examination": Examination(0, False, 1, 1, True), "copies": Copies(Solo())}
    session: Any = SimpleNamespace(rank=0, step=3, resume=resume, **known)
    state = TrainingState(session, model=nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"goes on from step-3\.e1\.1: call TrainingState\.load\(\)"):
        state.rehearse()
    session.step = 4
    state.rehearse()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.ASGD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_is_filled_as_torch_would(
    kind: Any, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The short way and torch's own give the same state, places and dtypes; nothing of it lies in the file."""

    def made() -> tuple[list[nn.Parameter], Any]:
        torch.manual_seed(3)
        parameters = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in ((3, 4), (5,), (2, 2))]
        return parameters, kind([{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:]}], lr=0.1)

    parameters, optimizer = made()
    for parameter in parameters[:2]:  # one has no state yet
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    with SummedFile(tmp_path / "file") as file:
        writing.save(Bundle(optimizer.state_dict()), file)
    saved = read_tensors(tmp_path / "file")
    short = made()[1]
    asked = [0]
    fill = reading_state._fill
    monkeypatch.setattr(reading_state, "_fill", lambda *given: asked.append(1) or fill(*given))
    reading_state.load_part(short, saved)
    assert asked[1:]
    monkeypatch.setattr(reading_state, "_loads_as_torch_does", lambda part: False)
    long = made()[1]
    reading_state.load_part(long, saved)
    (tmp_path / "file").write_bytes(bytes((tmp_path / "file").stat().st_size))  # what is mapped of it is gone
    for found in (short, long):
        state = found.state_dict()
        wanted = optimizer.state_dict()
        assert state["param_groups"] == wanted["param_groups"]
        assert state["state"].keys() == wanted["state"].keys()
        for number, values in wanted["state"].items():
            for key, value in values.items():
                one = state["state"][number][key]
                assert (one.dtype, one.device, one.stride()) == (value.dtype, value.device, value.stride())
                assert torch.equal(one, value)


class Both(torch.optim.Optimizer):
    """Two optimizers, as people combine Muon and AdamW; saves what they save, in a form of its own."""

    def __init__(self, *inner: torch.optim.Optimizer, form: str) -> None:
        self.inner, self.form = inner, form
        self.state: Any = {}
        self.defaults = {}
        self.param_groups = [group for one in inner for group in one.param_groups]

    def state_dict(self) -> Any:
        states = [one.state_dict() for one in self.inner]
        if self.form == "much like torch's":
            return {"state": states[1]["state"], "param_groups": states[1]["param_groups"], "others": states[:1]}
        return states if self.form == "a list" else {"optimizers": states}

    def load_state_dict(self, state: Any) -> None:
        states = state["optimizers"] if self.form == "a dictionary" else state
        if self.form == "much like torch's":
            states = [*state["others"], {name: state[name] for name in ("state", "param_groups")}]
        for one, own in zip(self.inner, states, strict=True):
            one.load_state_dict(own)


@pytest.mark.parametrize("form", ["a list", "a dictionary", "much like torch's"])
def test_an_optimizer_with_a_form_of_its_own_loads_by_itself(tmp_path: Path, form: str) -> None:
    def made() -> tuple[list[nn.Parameter], Both]:
        first, second = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
        sgd = torch.optim.SGD([first], lr=0.1, momentum=0.9)
        return [first, second], Both(sgd, torch.optim.AdamW([second]), form=form)

    parameters, optimizer = made()
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for one in optimizer.inner:
        one.step()
    torch.save(optimizer.state_dict(), tmp_path / "file")
    other = made()[1]
    reading_state.load_part(other, read_tensors(tmp_path / "file"))
    (tmp_path / "file").write_bytes(bytes((tmp_path / "file").stat().st_size))  # what is mapped of it is gone
    for found, wanted in zip(other.inner, optimizer.inner, strict=True):
        torch.testing.assert_close(found.state_dict()["state"], wanted.state_dict()["state"], rtol=0, atol=0)


class Short(torch.optim.AdamW):
    """Saves its moments in bf16, and makes them fp32 again as it loads."""

    def state_dict(self) -> Any:
        return shortened(super().state_dict())

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        lengthen(self)


def shortened(state: Any) -> Any:
    return {**state, "state": {n: {k: v.bfloat16() for k, v in one.items()} for n, one in state["state"].items()}}


def lengthen(optimizer: torch.optim.Optimizer) -> None:
    for values in optimizer.state.values():
        values.update({key: value.float() for key, value in values.items()})


def test_what_an_optimizer_converts_as_it_loads_stays_so(tmp_path: Path) -> None:
    """By itself, or in a hook; what torch alone has made shorter is undone."""
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 0.3)
    for kind in (Short, torch.optim.AdamW):
        optimizer = kind([parameter])
        optimizer.step()
        state = optimizer.state_dict()
        torch.save(state if kind is Short else shortened(state), tmp_path / "file")
        other = kind([parameter])
        if kind is not Short:
            other.register_load_state_dict_post_hook(lengthen)
        reading_state.load_part(other, read_tensors(tmp_path / "file"))
        assert {value.dtype for value in other.state[parameter].values()} == {torch.float32}
        other.step()
    long = torch.optim.AdamW([parameter])
    long.step()
    torch.save(long.state_dict(), tmp_path / "file")
    half = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    hooked = torch.optim.AdamW([half])
    hooked.register_load_state_dict_post_hook(lambda found: None)
    reading_state.load_part(hooked, read_tensors(tmp_path / "file"))
    assert hooked.state[half]["exp_avg"].dtype == torch.float32


def test_what_torch_would_ask_when_it_loads_is_asked() -> None:
    """Hooks, a `load_state_dict` of somebody's own, and numbers where there are tensors today: torch's own way."""
    parameter = nn.Parameter(torch.ones(2))
    plain = torch.optim.AdamW([parameter])
    assert reading_state._loads_as_torch_does(plain)
    seen: list[int] = []
    plain.register_load_state_dict_post_hook(lambda optimizer: seen.append(len(optimizer.state)))
    assert not reading_state._loads_as_torch_does(plain)
    parameter.grad = torch.ones(2)
    plain.step()
    reading_state.load_part(plain, plain.state_dict())
    assert seen == [1]

    class Own(torch.optim.AdamW):
        pass

    assert not reading_state._loads_as_torch_does(Own([parameter]))
    old = {"state": {0: {"step": 3, "exp_avg": torch.ones(2)}}, "param_groups": [{"params": [0]}]}
    assert not reading_state._only_tensors(old)
