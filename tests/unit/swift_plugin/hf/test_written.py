"""What a Trainer gives ``torch.save`` and safetensors is written in our way, or kept."""

from __future__ import annotations

import os
import pickle
import threading
import time
import weakref
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers.modeling_utils
import xxhash

from dalsegno.elastic.saving import writing
from dalsegno.elastic.saving.safetensors_files import Safetensors
from dalsegno.elastic.saving.staging import HostBuffers
from dalsegno.elastic.saving.writing import Summed, write_files
from dalsegno.swift_plugin.hf.written import kept_here, written_here

pytestmark = pytest.mark.timeout(60)

genuine = torch.save, safetensors.torch.save_file


def restored() -> bool:
    aliases = safetensors.torch.save_file, transformers.modeling_utils.safe_save_file
    return torch.save is genuine[0] and aliases == (genuine[1], genuine[1])


class Odd:
    """Not plain."""

    value = 3


def optimizers(state: Any) -> dict[str, Any]:
    return {"state": state, "param_groups": []}


def test_files_are_written_and_summed_in_one_pass(tmp_path: Path) -> None:
    """By whatever name the function is called, in any folder; they are there as soon as it returns."""
    root, tensors = tmp_path / "step-1-e1", OrderedDict(w=torch.ones(3))  # as a model's ``state_dict()``
    root.mkdir()
    with Summed() as summed, written_here(root):
        torch.save(optimizers(torch.ones(2)), root / "optimizer.pt")
        torch.save({"a": 1}, root / "small.pt")
        (root / "deep").mkdir()
        transformers.modeling_utils.safe_save_file(tensors, str(root / "deep" / "model"), metadata={"format": "pt"})
        safetensors.torch.save_file(tensors, root / "other")
        assert torch.equal(torch.load(root / "optimizer.pt")["state"], torch.ones(2))
    assert zipfile.ZipFile(root / "small.pt").testzip() is None  # other programs look for that
    assert sorted(entry.path for entry in summed.entries(root)) == ["deep/model", "optimizer.pt", "other"]
    for name in ("deep/model", "other"):
        assert torch.equal(safetensors.torch.load_file(root / name)["w"], torch.ones(3))
    assert restored()


def test_a_file_may_be_written_from_itself(tmp_path: Path) -> None:
    """As a class does that stamps what was saved: what is loaded is mapped, and would be cut off. Other names stay."""
    model, other = tmp_path / "model", tmp_path / "other"
    with written_here(tmp_path):
        safetensors.torch.save_file({"w": torch.ones(3000)}, model)
        os.link(model, other)
        loaded = safetensors.torch.load_file(model)
        safetensors.torch.save_file({**loaded, "more": torch.ones(9000)}, model, {"stamped": "yes"})
        torch.save(optimizers(torch.ones(5)), tmp_path / "state")
        torch.save(torch.load(tmp_path / "state", mmap=True), tmp_path / "state")
    assert torch.equal(safetensors.torch.load_file(model)["w"], torch.ones(3000))
    assert sorted(safetensors.torch.load_file(other)) == ["w"]
    assert torch.equal(torch.load(tmp_path / "state")["state"], torch.ones(5))


@pytest.mark.parametrize("by_us", [True, False])
def test_of_a_file_that_is_written_twice_the_last_sum_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_us: bool
) -> None:
    """Also where the kernel's clock for files has not ticked in between, and the size is the same."""
    root = tmp_path / "step-1-e1"
    root.mkdir()
    file, now = root / "file", time.time_ns() // 10**9 * 10**9
    look = writing._look
    coarse = lambda found: None if found is None else (*found[:2], found[2] // 10**8, 0)  # noqa: E731
    monkeypatch.setattr(writing, "_look", lambda path: coarse(look(path)))
    with Summed() as summed:
        write_files(root, {"file": b"first"})
        if by_us:
            write_files(root, {"file": b"again"})
        else:
            with open(file, "r+b") as opened:
                opened.write(b"again")
    assert file.stat().st_mtime_ns // 10**9 >= now // 10**9 - 1
    entries = [(one.path, one.xxh3_128) for one in summed.entries(root)]
    assert entries == ([("file", xxhash.xxh3_128(b"again").hexdigest())] if by_us else [])


def test_a_module_that_is_imported_meanwhile_keeps_nothing(tmp_path: Path) -> None:
    """It has our function for good, which does what the library's does from then on."""
    with kept_here(tmp_path, HostBuffers().add) as kept:
        imported, save = safetensors.torch.save_file, torch.save
        imported({"w": torch.ones(3)}, tmp_path / "model")
    seen = weakref.ref(kept)
    del kept
    assert seen() is None
    imported({"w": torch.ones(2)}, tmp_path / "model")
    save(optimizers(1), tmp_path / "state")
    assert torch.equal(safetensors.torch.load_file(tmp_path / "model")["w"], torch.ones(2))
    assert torch.load(tmp_path / "state") == optimizers(1)


def test_what_is_none_of_ours_is_left_alone(tmp_path: Path) -> None:
    """Elsewhere, into an open file, with other options, bytes, of another thread, or what the library refuses."""
    root, out = tmp_path / "step-1-e1", tmp_path / "step-1-e10"
    root.mkdir()
    out.mkdir()
    with Summed() as summed, written_here(root):
        torch.save(optimizers(1), out / "elsewhere")
        with open(root / "open", "wb") as file:
            torch.save(optimizers(2), file)
        torch.save(optimizers(3), root / "options", pickle_protocol=2)
        torch.save(b"4", root / "bytes")
        thread = threading.Thread(target=torch.save, args=(optimizers(5), root / "thread"))
        thread.start()
        thread.join()
        with pytest.raises(ValueError, match="non contiguous"):
            safetensors.torch.save_file({"a": torch.ones(2, 3).t()}, root / "refused")
        with pytest.raises(TypeError, match="metadata"):
            safetensors.torch.save_file({"a": torch.ones(2)}, root / "refused", {"step": 7})  # type: ignore[dict-item]
    assert summed.entries(root) == ()
    found = [torch.load(path) for path in (out / "elsewhere", root / "open", root / "options", root / "thread")]
    assert [one["state"] for one in found] == [1, 2, 3, 5]
    assert torch.load(root / "bytes") == b"4"


def test_somebodys_own_function_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that has replaced ``torch.save`` knows why."""
    told: list[Any] = []
    monkeypatch.setattr(torch, "save", lambda *given: told.append(given))
    with written_here(tmp_path):
        torch.save(1, tmp_path / "file")
    assert told == [(1, tmp_path / "file")]


def test_an_error_leaves_nothing_replaced(tmp_path: Path) -> None:
    """And it is the file system's own."""
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError), written_here(tmp_path):
        torch.save(optimizers(1), tmp_path / "file")
    assert restored()


def test_what_is_kept_is_of_the_moment_of_the_call(tmp_path: Path) -> None:
    """Peft changes a model for a save, and changes it back; and the training goes on."""
    weights, moments = torch.ones(3), torch.full((2,), 5.0)
    root = tmp_path / "own"
    root.mkdir()
    with kept_here(root, HostBuffers().add) as kept:
        safetensors.torch.save_file({"w": weights}, root / "model")
        groups = [{"lr": 0.1, "b": (0.9, 1)}]
        torch.save(OrderedDict(state={0: {"m": moments, "step": 3}}, param_groups=groups), root / "opt")
        torch.save(Odd(), root / "odd")
        (root / "config.json").write_text("{}")
        weights.zero_()
        moments.zero_()
        files = kept.files()
    assert restored()
    assert type(files["model"]) is Safetensors
    assert isinstance(files["odd"], bytes)
    assert files["config.json"] == b"{}"
    (tmp_path / "written").mkdir()
    write_files(tmp_path / "written", files)
    assert torch.equal(safetensors.torch.load_file(tmp_path / "written" / "model")["w"], torch.ones(3))
    found = torch.load(tmp_path / "written" / "opt", weights_only=True)
    assert torch.equal(found["state"][0]["m"], torch.full((2,), 5.0))
    assert (type(found), found["param_groups"]) == (OrderedDict, [{"lr": 0.1, "b": (0.9, 1)}])
    assert torch.load(tmp_path / "written" / "odd", weights_only=False).value == 3


def test_a_name_may_change_behind_the_call(tmp_path: Path) -> None:
    """Renamed, removed as the Trainer removes a dummy, or written once more: as if the file were there."""
    with kept_here(tmp_path, HostBuffers().add) as kept:
        for name, value in (("renamed", 1.0), ("removed", 2.0), ("again", 3.0), ("again", 4.0), ("over", 5.0)):
            safetensors.torch.save_file({"w": torch.full((1,), value)}, tmp_path / name)
        os.rename(tmp_path / "renamed", tmp_path / "new")
        (tmp_path / "removed").unlink()
        (tmp_path / "over").write_text("text")
        (tmp_path / "empty").touch()
        found = kept.files()
    assert found.pop("empty") == b""
    assert found.pop("over") == b"text"
    assert {name: one["w"].item() for name, one in found.items()} == {"new": 1.0, "again": 4.0}


@pytest.mark.parametrize(
    "odd",
    [
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True),
        torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {})),
        torch.Size([1]),
        {Odd: 1},
        [Odd()],
        (around := [1], around.append(around), around)[0],  # type: ignore[func-returns-value, has-type, attr-defined]
        type("Dict", (dict,), {})(),
    ],
)
def test_what_a_copy_would_change_is_pickled_at_once(tmp_path: Path, odd: Any) -> None:
    """Its type, its flags, its keys."""
    with kept_here(tmp_path, HostBuffers().add) as kept:
        try:
            torch.save(optimizers(odd), tmp_path / "file")
        except (AttributeError, pickle.PicklingError):
            return  # a class of this test's own, which nothing pickles: torch says so, as ever
        assert isinstance(kept.files()["file"], bytes)
