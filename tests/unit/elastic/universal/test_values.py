"""Universal files are read in place where they are as torch writes them, and by torch where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed")

from dalsegno.elastic.universal import loading, values
from dalsegno.elastic.universal.recording import without_crc32
from dalsegno.elastic.universal.records import Frame
from dalsegno.elastic.universal.values import UniversalValues


def put(path: Path, content: Any, *, ours: bool = True) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not ours:  # torch names records after the file then
        torch.save(content, path)
        return
    with without_crc32(), path.open("xb") as file:
        torch.save(content, file)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("around", ["bare", "param", "cat_dim", "expert", "strided", "theirs"])
def test_what_is_read_in_place_is_what_torch_loads(
    tmp_path: Path, around: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any range of any form, bit for bit; of many files of one shape only the first goes through torch."""
    made = {f"p{n}.weight": torch.randn(7, 5).to(dtype) for n in range(6)}
    forms = {
        "bare": lambda value: value.reshape(-1),
        "param": lambda value: {"param": value},
        "cat_dim": lambda value: {"cat_dim": 0, "param": value},
        "expert": lambda value: {"param": value, "is_expert_param": True},
        "strided": lambda value: {"param": value.t().contiguous().t()},
        "theirs": lambda value: {"cat_dim": 0, "param": value},
    }
    for name, value in made.items():
        for state in ("fp32", "exp_avg"):
            put(tmp_path / name / f"{state}.pt", forms[around](value), ours=around != "theirs")
    asked: list[Path] = []
    plain = values.load
    monkeypatch.setattr(values, "load", lambda path, **options: asked.append(path) or plain(path, **options))
    found = UniversalValues(tmp_path)
    for name, value in made.items():
        assert found.states(name) == {"fp32", "exp_avg"}
        assert (found.size(name), found.dtype(name, "fp32"), found.expert(name)) == (35, dtype, around == "expert")
        for state in ("fp32", "exp_avg"):
            for start, count in ((0, 35), (3, 30), (34, 1)):
                target = torch.empty(count, dtype=dtype)
                found.read(name, state, start, target)
                assert torch.equal(target, value.reshape(-1)[start : start + count])
            wider = torch.empty(4, dtype=torch.float64)
            found.read(name, state, 2, wider)
            assert torch.equal(wider, value.reshape(-1)[2:6].double())
    in_place = around in ("bare", "param", "cat_dim")
    assert len(asked) == (1 if in_place else 12)


def test_another_file_of_the_same_size_is_no_frame_of_values(tmp_path: Path) -> None:
    """Shapes of as many values have files of one length; what surrounds them says which one it is."""
    tall, wide = torch.arange(24.0).reshape(6, 4), torch.arange(24.0).reshape(4, 6)
    put(tmp_path / "a" / "fp32.pt", {"param": tall})
    put(tmp_path / "b" / "fp32.pt", {"param": wide.t()})
    put(tmp_path / "c" / "fp32.pt", {"param": torch.arange(24, dtype=torch.int32).reshape(6, 4)})
    assert len({path.stat().st_size for path in tmp_path.glob("*/*.pt")}) == 1
    found, target = UniversalValues(tmp_path), torch.empty(24)
    for name, wanted in (("a", tall.reshape(-1)), ("b", wide.t().reshape(-1)), ("c", torch.arange(24.0))):
        found.read(name, "fp32", 0, target)
        assert torch.equal(target, wanted)
    assert found.dtype("c", "fp32") == torch.int32


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    """A file and a parameter."""
    put(tmp_path / "a" / "fp32.pt", {"param": torch.ones(3)})
    found = UniversalValues(tmp_path)
    with pytest.raises(RuntimeError, match=r"a/exp_avg\.pt is missing"):
        found.read("a", "exp_avg", 0, torch.empty(3))
    with pytest.raises(RuntimeError, match="the model has a parameter that was not saved"):
        found.states("b")


def test_a_mapped_file_is_read_once_while_that_is_asked_for(tmp_path: Path) -> None:
    """And anew where it is another one, or afterwards; its storages are told each time."""
    path = tmp_path / "file.pt"
    put(path, {"a": torch.ones(3), "b": torch.zeros(2)})
    seen: list[Any] = []
    with loading.each_once():
        one = loading.load(path, mmap=True)
        two = loading.load(path, mmap=True, seen=seen.append)
        assert one is two
        assert sorted(storage.nbytes() for storage in seen) == [8, 12]
        assert loading.load(path) is not one
        path.unlink()
        put(path, {"a": torch.full((3,), 2.0), "b": torch.zeros(2)})
        assert loading.load(path, mmap=True)["a"].tolist() == [2, 2, 2]
        with pytest.raises(FileNotFoundError):
            loading.load(tmp_path / "none.pt", mmap=True)
    three = loading.load(path, mmap=True)
    assert loading.load(path, mmap=True) is not three


def test_a_frame_has_a_length(tmp_path: Path) -> None:
    """A file that goes on behind the values, or ends early, is none of ours."""
    (tmp_path / "file").write_bytes(b"headvvvvtail")
    with values._Open(tmp_path / "file") as file:
        assert file.has(Frame(b"head", 4, b"tail"))
        assert not file.has(Frame(b"head", 3, b"tail"))
        assert not file.has(Frame(b"Head", 4, b"tail"))
        assert not file.has(Frame(b"head", 4, b"Tail"))
