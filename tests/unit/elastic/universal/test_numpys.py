"""NumPy's numbers and arrays in DeepSpeed's files are read as they were saved, and nothing else comes with them."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

pytest.importorskip("deepspeed")

from dalsegno.elastic.universal import numpys
from dalsegno.elastic.universal.loading import describe_refusal, load

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
    found = read(saved(tmp_path / "file", value))["zero_stage"]
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
}


@pytest.mark.parametrize("read", [load, with_torch])
@pytest.mark.parametrize("what", BAD)
def test_nothing_else_is_made(tmp_path: Path, what: str, read: Callable[[Path], Any]) -> None:
    """NumPy's own functions take sizes, fields and objects as a file has them."""
    with pytest.raises(pickle.UnpicklingError):
        read(saved(tmp_path / "file", BAD[what]))


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
