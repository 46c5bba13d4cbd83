"""NumPy's numbers and arrays in DeepSpeed's files are read as they were saved, and nothing else comes with them."""

from __future__ import annotations

import os
import pickle
import types
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("deepspeed")

from dalsegno.elastic.universal import numpys
from dalsegno.elastic.universal.loading import describe_refusal, load, only_safe_loading
from dalsegno.elastic.universal.numpys import as_numpys

from .test_members import READERS, Call, saved, with_torch

VALUES = {
    "a number": numpy.float64(1.5),
    "a truth": numpy.bool_(True),
    "an array": numpy.arange(6.0).reshape(2, 3),
    "in Fortran's order": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    "of the other byte order": numpy.arange(3, dtype=">i4"),
    "complex": numpy.array([1 + 2j], dtype=numpy.complex64),
    "texts": numpy.array(["a", "bcd"]),
    "bytes": numpy.array([b"a", b"bcd"]),
    "no dimension": numpy.array(3, dtype=numpy.uint8),
    "an empty array": numpy.zeros(0),
    "an empty array of rows": numpy.zeros((0, 3), dtype=numpy.int16),
    "an empty text": numpy.str_(""),
    "a text": numpy.str_("ab"),
}
# The name that a file has of it.
MODULE = numpy.ndarray.__reduce__(numpy.ones(1))[0].__module__  # type: ignore[index, union-attr]
RECONSTRUCT, SCALAR = (getattr(__import__(MODULE, fromlist=["x"]), name) for name in ("_reconstruct", "scalar"))


class Built(Call):
    """Pickled, it is a call, and what is made by it gets a state."""

    def __init__(self, state: Any, function: Any, *arguments: Any) -> None:
        super().__init__(function, *arguments)
        self.state = state

    def __reduce__(self) -> tuple[Any, ...]:  # type: ignore[override]
        return self.function, self.arguments, self.state


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("what", VALUES)
def test_values_are_read(tmp_path: Path, what: str, read: Callable[[Path], Any]) -> None:
    """And written anew as NumPy's own: whoever reads them next needs nothing of ours."""
    value = VALUES[what]
    found = as_numpys(read(saved(tmp_path / "file", value)))["zero_stage"]
    assert type(found) is type(value)
    assert numpy.array_equal(found, value)
    assert found.dtype.newbyteorder("=") == value.dtype.newbyteorder("=")
    assert found.flags.f_contiguous == value.flags.f_contiguous
    again = torch.load(saved(tmp_path / "again", found), weights_only=False)["zero_stage"]
    assert type(again) is type(value)
    assert numpy.array_equal(again, value)


def test_arrays_are_of_numpys_own_class(tmp_path: Path) -> None:
    """Of one that derives from it a sum would be an array. Anywhere in what was saved, also twice, or in itself."""
    one = numpy.ones(2)
    content: dict[str, Any] = {"list": [one, (one, 3)], "ordered": OrderedDict(a=one)}
    content["itself"] = content
    found = load(saved(tmp_path / "file", content))["zero_stage"]
    for array in (found["list"][0], found["list"][1][0], found["ordered"]["a"], found["itself"]["list"][0]):
        assert type(array) is numpy.ndarray
    assert type(found["ordered"]) is OrderedDict


def test_the_state_of_a_generator_goes_on(tmp_path: Path) -> None:
    """What scripts put into DeepSpeed's `client_state`."""
    generator = numpy.random.RandomState(3)
    found = load(saved(tmp_path / "file", {"numpy": generator.get_state()}))["zero_stage"]
    other = numpy.random.RandomState(4)
    other.set_state(found["numpy"])
    assert other.rand() == generator.rand()


KIND = Built((3, "<", None, None, None, -1, -1, 0), numpy.dtype, "f8", False, True)
NOTHING = Built((3, "|", None, None, None, 0, 1, 0), numpy.dtype, "S0", False, True)
BAD = {
    "objects": numpy.array([{}], dtype=object),
    "an object": Call(SCALAR, numpy.dtype("O"), b"x" * 8),
    "records": numpy.zeros(1, dtype=[("a", "i4"), ("b", "i4")]),
    "a date": numpy.datetime64("2026-01-01"),
    "a kind with fields": Built((3, "<", None, ("a",), {"a": ("f8", 900)}, 8, 8, 0), numpy.dtype, "f8", False, True),
    "a kind with a base": Built((3, "<", ("f8", (9,)), None, None, 8, 8, 0), numpy.dtype, "f8", False, True),
    "an odd order": Built((3, "!", None, None, None, -1, -1, 0), numpy.dtype, "f8", False, True),
    "no kind": Call(numpy.dtype, "f3"),
    "a kind of a class": Call(numpy.dtype, float),
    "too few bytes": Built((1, (100,), KIND, False, b"x" * 8), RECONSTRUCT, numpy.ndarray, (0,), b"b"),
    "too many bytes": Built((1, (1,), KIND, False, b"x" * 80), RECONSTRUCT, numpy.ndarray, (0,), b"b"),
    "a size below 0": Built((1, (-1, -1), KIND, False, b"x" * 8), RECONSTRUCT, numpy.ndarray, (0,), b"b"),
    "another class's array": Call(RECONSTRUCT, numpy.matrix, (0,), b"b"),
    "a call of the class": Call(numpy.ndarray, (1 << 40,)),
    "a number of too few bytes": Call(SCALAR, KIND, b"x"),
    "a number without a kind": Call(SCALAR, "f8", b"x" * 8),
    "a text of no characters": Call(SCALAR, Built((3, "<", None, None, None, 4, 4, 0), numpy.dtype, "U1"), b"\xff" * 4),
    "too many dimensions": Built((1, (1,) * 100, KIND, False, b"x" * 8), RECONSTRUCT, numpy.ndarray, (0,), b"b"),
    "nothing of a size": Built((1, (1 << 40,), NOTHING, False, b""), RECONSTRUCT, numpy.ndarray, (0,), b"b"),
    "bytes": Call(bytes, 1 << 40),
}


@pytest.mark.parametrize("read", [load, with_torch])
@pytest.mark.parametrize("what", BAD)
def test_nothing_else_is_made(tmp_path: Path, what: str, read: Callable[[Path], Any]) -> None:
    """NumPy's own functions take sizes, fields and objects as a file has them."""
    with pytest.raises(pickle.UnpicklingError):
        read(saved(tmp_path / "file", BAD[what]))


def test_a_kind_and_a_class_are_numpys_own(tmp_path: Path) -> None:
    content = {"kind": numpy.dtype(">f4"), "class": numpy.ndarray, "kinds": numpy.dtype}
    assert load(saved(tmp_path / "file", content))["zero_stage"] == content


class Twice:
    """Pickled, it is what a function of torch's makes of an array, which then gets a second state."""

    def __reduce__(self) -> tuple[Any, ...]:
        array = Built((1, (2,), KIND, False, b"x" * 16), RECONSTRUCT, numpy.ndarray, (0,), b"b")
        return torch._utils._rebuild_device_tensor_from_numpy, (array, torch.float64, "cpu", False)


@pytest.mark.parametrize("read", READERS)
def test_no_tensor_shares_the_memory_of_an_array(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    """A function on torch's own list makes one; a second state then freed the memory below it."""
    with pytest.raises((pickle.UnpicklingError, TypeError, RuntimeError)):  # it finds no array, or no place for one
        read(saved(tmp_path / "file", Twice()))


@pytest.mark.parametrize("read", [load, with_torch])
def test_an_array_has_one_state(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    state = (1, (2,), KIND, False, b"x" * 16)
    once = Built(state, RECONSTRUCT, numpy.ndarray, (0,), b"b")
    path = saved(tmp_path / "file", once)
    twice = pickle.dumps(state, 2)[2:-1] + b"b"
    with zipfile.ZipFile(path) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    (name,) = [name for name in files if name.endswith("data.pkl")]
    # Behind the first BUILD of the array, which is the last one of that value.
    at = files[name].rindex(b"b", 0, files[name].index(b"step"))
    with zipfile.ZipFile(path, "w") as archive:
        for one, data in files.items():
            archive.writestr(one, data[: at + 1] + twice + data[at + 1 :] if one == name else data)
    with pytest.raises(pickle.UnpicklingError):
        read(path)


def test_what_is_nested_too_deep_is_refused(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(pickle.UnpicklingError):
        numpys.as_numpys(deep)


def test_an_array_without_a_state_is_refused() -> None:
    with pytest.raises(pickle.UnpicklingError):
        numpys.as_numpys([object.__new__(numpys.STAND_INS[1])])


def test_what_to_do_with_others_is_said(tmp_path: Path) -> None:
    with pytest.raises(pickle.UnpicklingError) as found:
        load(saved(tmp_path / "file", numpy.array([{}], dtype=object)))
    said = describe_refusal("step-7", found.value, "; if you trust it: so")
    assert "holds numpy.dtype, which is not on the list of what is loaded from checkpoints: save NumPy's" in said


def test_a_script_may_have_allowed_numpys_own(tmp_path: Path) -> None:
    """Then those are taken, all of them: half of each would not fit together."""
    kinds = [type(numpy.dtype(numpy.float64))]
    own = [RECONSTRUCT, numpy.ndarray, numpy.dtype, *kinds]
    path = saved(tmp_path / "file", numpy.ones(2))
    with torch.serialization.safe_globals(own):
        assert type(with_torch(path)["zero_stage"]) is numpy.ndarray
        assert type(load(path)["zero_stage"]) is numpy.ndarray
    assert numpys.STAND_INS[0] not in torch.serialization.get_safe_globals()


def test_a_program_of_an_array_is_not_run(tmp_path: Path) -> None:
    """Its state may be any call: torch's list holds for that, too."""
    bad = Built((1, (1,), KIND, False, Call(os.system, "true")), RECONSTRUCT, numpy.ndarray, (0,), b"b")
    with pytest.raises(pickle.UnpicklingError):
        load(saved(tmp_path / "file", bad))


@pytest.mark.parametrize("other", [False, True])
def test_a_restored_client_state_has_numpys_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: bool) -> None:
    """At stage 0 DeepSpeed reads it, with torch alone, and hands it on before we see it, as to a scheduler.

    Its fast engine does so too: a class of its own, which reads with torch.
    """
    from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

    from dalsegno.elastic.deepspeed import engine as module

    path = saved(tmp_path / "mp_rank_00_model_states.pt", numpy.ones(2))
    scheduler: list[Any] = []

    def load_checkpoint(*_: Any, **__: Any) -> tuple[str, Any]:
        with only_safe_loading():
            found = engine.checkpoint_engine.load(str(path), map_location="cpu")
        scheduler.append(found["zero_stage"])
        return str(path), with_torch(path)

    engine = types.SimpleNamespace(
        module=torch.nn.Linear(1, 1),
        checkpoint_engine=type("Fast", (TorchCheckpointEngine,), {})() if other else TorchCheckpointEngine(),
        zero_optimization_stage=lambda: 0,
        load_checkpoint=load_checkpoint,
    )
    for name in ("separate_steps", "restore_unpartitioned"):
        monkeypatch.setattr(module, name, lambda *_: None)
    resume: Any = types.SimpleNamespace(path=tmp_path, universal=None, form="sharded", reshard=False)
    found = module._load(engine, resume, strict=True)["zero_stage"]
    for one in (found, *scheduler):
        assert type(one) is numpy.ndarray
        assert one.sum() == 2.0
