"""Many tensors in one file: what comes back is what went in, bit for bit, and damage is told in one line."""

from __future__ import annotations

import io
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dalsegno.elastic.saving import bundles
from dalsegno.elastic.saving.bundles import Bundle, unpacked
from dalsegno.elastic.saving.replicas import loadable
from dalsegno.elastic.saving.staging import HostBuffers
from dalsegno.elastic.saving.writing import SummedFile, save

NOT_A_NUMBER = float("nan")


def written(content: Any, path: Path) -> Any:
    """As it is read again."""
    with SummedFile(path, anew=True) as file:
        save(content, file)
        file.finish()
    return unpacked(torch.load(path, weights_only=True, map_location="cpu", mmap=True))


def same(one: Any, two: Any) -> bool:
    """Values, types, order of keys, and of tensors each bit and how it lies in memory."""
    if type(one) is not type(two):
        return False
    if isinstance(one, Tensor):
        bits = [list(t.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)) for t in (one, two)]
        return one.dtype == two.dtype and one.shape == two.shape and one.stride() == two.stride() and bits[0] == bits[1]
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, two)) and all(map(same, one.values(), two.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return repr(one) == repr(two)


def test_whatever_torch_loads_comes_back_as_it_was(tmp_path: Path) -> None:
    """Every dtype, odd layouts, tensors of no and of one element, keys of all kinds, and what JSON does not know."""
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
    content = {
        "dtypes": [torch.arange(-3, 4).to(dtype) for dtype in [*dtypes, torch.complex64]],
        "layouts": (
            torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
            torch.randn(4, 6).t(),
            torch.randn(8)[::2],
            torch.zeros(0, 3),
            torch.tensor(2.5),
            torch.randn(3).conj(),
            torch.tensor([1 + 2j]).conj(),
            torch.randn(2, requires_grad=True),
            torch.tensor([-0.0, NOT_A_NUMBER, float("inf")]),
        ),
        "keys": {0: 1, "0": 2, None: 3, True: 4, (1, "a"): 5, 2.5: 6},
        "values": [
            None,
            True,
            1 << 80,
            -1,
            -(1 << 63),
            0.1 + 0.2,
            -0.0,
            NOT_A_NUMBER,
            "\ud800 \n é",
            b"\0\xff",
            1j,
        ],
        "lists": [[], {}, (), [["d"], ["p", 0, 0, [], []]]],
        "ordered": OrderedDict(b=1, a=torch.ones(2)),
    }
    assert same(written(Bundle(content), tmp_path / "file"), content)
    nested: Any = written(Bundle({"inner": Bundle({"a": torch.ones(2)})}), tmp_path / "file")
    assert same(nested, {"inner": {"a": torch.ones(2)}})
    assert written(Bundle(), tmp_path / "file") == {}
    # A content that looks like a node is none.
    assert written(Bundle({"tree": ["l", 1]}), tmp_path / "file") == {"tree": ["l", 1]}


@pytest.mark.slow
def test_many_tensors_lie_in_few_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full pools, and tensors that are larger than one; written in several pieces; a tensor that comes twice once."""
    monkeypatch.setattr(bundles, "POOL_BYTES", 1000)
    monkeypatch.setattr(bundles, "STAGE_BYTES", 300)
    generator = torch.Generator().manual_seed(1)
    sizes = torch.randint(1, 120, (200,), generator=generator).tolist()
    content = {n: torch.randn(size, generator=generator) for n, size in enumerate(sizes)}
    content |= {"large": torch.randn(5000), "again": content[3]}
    found = written(Bundle(content), tmp_path / "file")
    assert same(found, content)
    assert found["again"].data_ptr() == found[3].data_ptr()
    pools = torch.load(tmp_path / "file", weights_only=True)["pools"]
    assert len(pools) < 70
    assert sum(pool.numel() for pool in pools) == sum(sizes) + 5000


def test_many_pools_of_one_size_keep_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.6 writes the eleventh before the third: where all have one size, nothing else would tell."""
    monkeypatch.setattr(bundles, "POOL_BYTES", 400)
    content = {n: torch.full((100,), float(n)) for n in range(23)}
    assert same(written(Bundle(content), tmp_path / "file"), content)


def test_pools_follow_the_order_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an older torch has it."""
    monkeypatch.setattr(bundles, "POOL_BYTES", 4)
    as_text = sorted(range(12), key=str)
    monkeypatch.setattr(bundles, "storage_order", lambda count: as_text[:count])
    monkeypatch.setattr(bundles, "recorded", lambda file: [4] * len(file["pools"]))
    content = Bundle({n: torch.full((1,), float(n)) for n in range(12)})
    made = b"".join(bytes(piece) for piece in content.pieces())
    assert torch.frombuffer(bytearray(made), dtype=torch.float32).tolist() == [float(n) for n in as_text]


def test_a_copy_in_host_memory_is_still_packed(tmp_path: Path) -> None:
    """A save in the background; and one that knows nothing of bundles writes what torch loads without ours."""
    content = Bundle({"a": torch.ones(3), "b": {"c": torch.zeros(2)}})
    copied = HostBuffers().copy({"training.pt": content})["training.pt"]
    assert type(copied) is Bundle
    assert same(written(copied, tmp_path / "packed"), dict(content))
    assert bundles.MARK in torch.load(tmp_path / "packed", weights_only=True)
    torch.save(content, tmp_path / "plain")
    assert same(torch.load(tmp_path / "plain", weights_only=True), OrderedDict(content))


def test_a_modules_state_lies_beside_the_other_tensors(tmp_path: Path) -> None:
    """Averages of a model are as large as it is. What cannot be laid down so is written as bytes, and not as a text."""
    state = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(50, 50)).state_dict()
    content = {"ema": state, "odd": torch.ones(1000, requires_grad=True)}
    found = written(Bundle(content), tmp_path / "file")
    assert same(found, content)
    assert same(found["ema"]._metadata, state._metadata)  # type: ignore[attr-defined]
    file = torch.load(tmp_path / "file", weights_only=True)
    assert len(file["tree"]) < 1000
    assert file["pools"][file["rest"]].dtype is torch.uint8
    assert file["pools"][file["rest"]].numel() < 8000
    assert torch.load(tmp_path / "file", weights_only=True)["rest"] == len(file["pools"]) - 1


def test_files_of_the_first_form_are_read() -> None:
    held = io.BytesIO()
    torch.save([torch.ones(2)], held)
    file = {bundles.MARK: 1, "tree": json.dumps(["d", ["a"], [["r", 0]]]), "pools": []}
    assert same(unpacked({**file, "rest": held.getvalue().decode("latin-1")}), {"a": torch.ones(2)})
    assert unpacked({**file, "tree": json.dumps(["d", ["a"], [1]]), "rest": ""}) == {"a": 1}


def test_whether_it_can_be_loaded_is_asked_without_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is surely loaded nothing is written; of anything else its tensors are not."""
    content = Bundle(rows={"a": {"start": 0, "value": torch.ones(1 << 16)}})
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", None)
        loadable(content, "it")
    written: list[int] = []
    torch_save = torch.save

    def noted(given: Any, file: Any) -> None:
        torch_save(given, file)
        written.append(file.tell())

    monkeypatch.setattr(torch, "save", noted)
    loadable(Bundle(content, dtype=torch.float32), "it")
    assert [size < 1 << 16 for size in written] == [True]


def test_what_is_no_bundle_stays_as_it_is() -> None:
    """Files of earlier versions, and of other people."""
    for content in ({"optimizer": {"state": 1}}, [1], OrderedDict(a=1), None):
        assert unpacked(content) is content


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        ({bundles.MARK: 3}, "packed by a later version (form 3, this one reads 2)"),
        ({"tree": json.dumps(["d", ["a"], [["p", 1, 0, [2], [1]]]])}, "not whole"),
        ({"tree": json.dumps(["d", ["a"], [["p", 0, 4, [2], [1]]]])}, "not whole"),
        ({"tree": json.dumps(["d", ["a"], [["p", 0, -1, [2], [1]]]])}, "not whole"),
        ({"tree": json.dumps(["d", ["a"], [["r", 0]]])}, "not whole"),
        ({"tree": json.dumps(["d", ["a"], []])}, ""),
        ({"tree": "{"}, ""),
        ({"pools": None}, "not whole"),
        ({"rest": 5}, "not whole"),
        ({"rest": "PK"}, "not whole"),
    ],
)
def test_what_is_not_whole_is_refused(tmp_path: Path, harm: dict[str, Any], reason: str) -> None:
    """Whoever wrote it: a ValueError, nothing that reaches beyond the file."""
    written(Bundle({"a": torch.ones(5)}), tmp_path / "file")
    content = torch.load(tmp_path / "file", weights_only=True)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (JSON's and ours)
        unpacked({**content, **harm})
    assert reason in str(caught.value)


def test_a_lack_of_memory_is_not_said_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is whole, and the next start may have the memory."""

    def lacks(*_: Any) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")

    written(Bundle({"a": torch.ones(5)}), tmp_path / "file")
    content = torch.load(tmp_path / "file", weights_only=True)
    monkeypatch.setattr(bundles, "_value", lacks)
    with pytest.raises(RuntimeError, match="allocate memory"):
        unpacked(content)
