"""Members of DeepSpeed's enumerations in files: each Python reads those of each, and nothing else comes with them."""

from __future__ import annotations

import argparse
import array
import copy
import importlib
import io
import ipaddress
import operator
import os
import pickle
import random
import subprocess
import time
import types
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum

from dalsegno.elastic.saving.bundles import refused_of
from dalsegno.elastic.saving.writing import write_files
from dalsegno.elastic.universal.loading import allowing, describe_refusal, load, only_safe_loading

# What CPython 3.11.2 writes for ZeroStageEnum.gradients.
BY_NAME = (
    b"\x80\x02c__builtin__\ngetattr\nq\x00cdeepspeed.runtime.zero.config\nZeroStageEnum\nq\x01"
    b"X\t\x00\x00\x00gradientsq\x02\x86q\x03Rq\x04."
)


class Call:
    """Pickled, it is a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.arguments

    def __call__(self) -> None:
        """Pickle asks for it where this is what is called."""


class Colour(Enum):
    """Nobody listed it."""

    RED = 1


def saved(path: Path, content: Any) -> Path:
    torch.save({"zero_stage": content, "step": torch.tensor(3)}, path)
    return path


def with_torch(path: Path) -> Any:
    with only_safe_loading():
        return torch.load(path, weights_only=False)


READERS = [load, lambda path: load(path, mmap=True), with_torch]


@pytest.mark.parametrize("save", [torch.save, lambda content, path: write_files(path.parent, {path.name: content})])
def test_members_are_written_by_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Any, Path], Any]
) -> None:
    """Also by CPython 3.11.0 to 3.11.4, whose own way is by name: no torch loads that with ``weights_only``."""
    monkeypatch.setattr(ZeroStageEnum, "__reduce_ex__", lambda self, protocol: (getattr, (type(self), self.name)))
    for stage in ZeroStageEnum:
        path = tmp_path / f"{stage.name}.pt"
        save({"zero_stage": stage}, path)
        written = path.read_bytes()  # nothing in it is compressed
        assert b"ZeroStageEnum" in written
        assert b"getattr" not in written
        with torch.serialization.safe_globals([ZeroStageEnum]):
            assert torch.load(path, weights_only=True)["zero_stage"] is stage
        assert copy.copy(stage) is stage
        assert copy.deepcopy([stage])[0] is stage


def test_this_is_how_they_were_written_by_name() -> None:
    """The files below are as CPython 3.11.2 makes them."""
    assert pickle.dumps(Call(getattr, ZeroStageEnum, "gradients"), protocol=2) == BY_NAME
    assert pickle.loads(BY_NAME) is ZeroStageEnum.gradients


@pytest.mark.parametrize("read", READERS)
def test_members_by_name_are_read(tmp_path: Path, read: Callable[[Path], Any]) -> None:
    """What plain DeepSpeed saved with such a Python, and what we did."""
    for stage in ZeroStageEnum:
        found = read(saved(tmp_path / f"{stage.name}.pt", Call(getattr, ZeroStageEnum, stage.name)))
        assert found["zero_stage"] is stage
        assert found["step"] == 3


def test_members_of_what_is_allowed_are_read(tmp_path: Path) -> None:
    """A class of the user's own, for as long as it is allowed."""
    path = saved(tmp_path / "file", Call(getattr, Colour, "RED"))
    with torch.serialization.safe_globals([Colour]):
        assert load(path)["zero_stage"] is Colour.RED
    with pytest.raises(pickle.UnpicklingError):
        load(path)


INIT = Call(getattr, ZeroStageEnum, "__init__")
BAD = {
    "a method": INIT,
    "globals": Call(getattr, INIT, "__globals__"),
    "a call of what it gave": Call(Call(getattr, ZeroStageEnum, "__subclasses__")),
    "the kind of classes": Call(getattr, ZeroStageEnum, "__class__"),
    "all members": Call(getattr, ZeroStageEnum, "__members__"),
    "of a member": Call(getattr, ZeroStageEnum.gradients, "__class__"),
    "through a member": Call(getattr, Call(getattr, ZeroStageEnum, "gradients"), "__reduce_ex__"),
    "no such member": Call(getattr, ZeroStageEnum, "nothing"),
    "a default": Call(getattr, ZeroStageEnum, "gradients", 1),
    "no name": Call(getattr, ZeroStageEnum),
    "a name that is no text": Call(getattr, ZeroStageEnum, ["gradients"]),
    "another class on the list": Call(getattr, LossScaler, "__init__"),
    "of text": Call(getattr, "text", "format"),
    "of torch": Call(getattr, torch.Size, "__new__"),
    "a class that is not on the list": Call(getattr, Colour, "RED"),
    "of a function": Call(getattr, os.system, "__call__"),
    "itself": Call(getattr, getattr, "__call__"),
    "eval": Call(eval, "1"),
    "system": Call(os.system, "true"),
}


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("what", BAD)
def test_nothing_else_is_had_by_name(tmp_path: Path, what: str, read: Callable[[Path], Any]) -> None:
    """No attribute but a member of an enumeration, and nothing of anybody else's."""
    with pytest.raises(pickle.UnpicklingError):
        read(saved(tmp_path / "file", BAD[what]))


def refused(tmp_path: Path, content: Any) -> str:
    with pytest.raises(pickle.UnpicklingError) as found:
        load(saved(tmp_path / "file", content))
    return describe_refusal("step-7", found.value, "; if you trust it: so")


@pytest.mark.parametrize(
    "call",
    [
        INIT,
        Call(getattr, [], "x"),
        Call(eval, "1"),
        Call(exec, "1"),
        Call(__import__, "os"),
        Call(type, "x", (), {}),
        Call(os.system, "true"),
        Call(subprocess.Popen, "true"),
        Call(operator.attrgetter, "x"),
        Call(importlib.import_module, "os"),
        Call(time.sleep, 0),
    ],
    ids=lambda call: getattr(call.function, "__qualname__", ""),
)
def test_nobody_is_told_to_trust_what_runs_anything(tmp_path: Path, call: Call) -> None:
    """Allowed, ``getattr`` is as good as any code: the advice was to add just that."""
    said = refused(tmp_path, call)
    assert f"{call.function.__name__}, which" in said
    assert said.endswith("which is not on the list of what is loaded from checkpoints: it is not safe to load")


@pytest.mark.parametrize("content", [Path("/x"), Colour.RED, argparse.Namespace(a=1), frozenset()], ids=repr)
def test_classes_may_be_trusted(tmp_path: Path, content: Any) -> None:
    """Those of a script, and those of Python's own that only hold values."""
    said = refused(tmp_path, Call(type(content), 1))
    assert said.endswith("which is not on the list of what is loaded from checkpoints; if you trust it: so")


@pytest.mark.parametrize(
    "value",
    [
        array.array("i", [1, 2]),
        ipaddress.ip_address("10.0.0.1"),
        random.Random(7),
        time.gmtime(0),
        types.SimpleNamespace(a=1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_plain_values_of_python_may_be_trusted_and_then_are_read(tmp_path: Path, value: Any) -> None:
    """They were called unsafe, as if they could run code."""
    path = saved(tmp_path / "file", value)
    with pytest.raises(pickle.UnpicklingError) as found:
        load(path)
    assert describe_refusal("step-7", found.value, "; if you trust it: so").endswith("; if you trust it: so")
    with allowing([f"{type(value).__module__}.{type(value).__qualname__}"]):
        again = load(path)["zero_stage"]
    assert pickle.dumps(again, 2) == pickle.dumps(value, 2)


@pytest.mark.parametrize("name", ["types.FunctionType", "types.CodeType", "random._urandom", "time.SimpleNamespace"])
def test_their_modules_have_more_than_values(name: str) -> None:
    """So only the classes themselves are plain."""
    error = pickle.UnpicklingError(f"Unsupported global: GLOBAL {name} was not an allowed global by default.")
    assert describe_refusal("step-7", error, "; if you trust it: so").endswith(": it is not safe to load")


def test_a_refusal_without_a_name_advises_nothing() -> None:
    """There is nothing to trust."""
    said = describe_refusal("step-7", pickle.UnpicklingError("Unsupported operand 149"), "; if you trust it: so")
    assert said == "step-7 holds something, which is not on the list of what is loaded from checkpoints"


def test_a_state_that_cannot_be_saved_is_named_by_what_it_is() -> None:
    """With CPython 3.11.2 a member of the script's own enumeration was "a getattr"."""
    file = io.BytesIO()
    torch.save({"colour": Call(getattr, Colour, "RED")}, file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError) as found:
        torch.load(file, weights_only=True)
    assert refused_of(found.value) == "it holds a member of an Enum, or a method: keep its value, or its name"
