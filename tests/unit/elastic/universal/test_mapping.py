"""Files of torch.save opened without torch: the same content, from a closed list of names, and nothing else."""

from __future__ import annotations

import io
import pickle
import pickletools
import tracemalloc
import zipfile
from collections import OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dalsegno.elastic.universal.archive import refuse_packed
from dalsegno.elastic.universal.mapping import _DTYPES, NotPlainError, check_places, open_mapped


def opened(path: Path) -> Any:
    """The content of a file."""
    records = refuse_packed(path)
    assert records is not None
    return open_mapped(path, records)[0]


def saved(path: Path, content: Any) -> Path:
    """A file of ``torch.save``."""
    torch.save(content, path)
    return path


def remade(path: Path, described: bytes, **records: bytes) -> Path:
    """The same file with another description, or other records."""
    with zipfile.ZipFile(path) as archive:
        held = {info.filename: archive.read(info) for info in archive.infolist()}
    held["archive/data.pkl"] = described
    held |= {f"archive/{name}": data for name, data in records.items()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in held.items():
            archive.writestr(name, data)
    return path


def same(one: Any, other: Any) -> bool:
    """Whether both are alike in type, order, place in a storage and values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        alike = (one.dtype, one.shape, one.stride(), one.storage_offset()) == (
            *(other.dtype, other.shape, other.stride(), other.storage_offset()),
        )
        return alike and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_what_a_training_saves_is_the_same(tmp_path: Path) -> None:
    """As ``torch.load`` gives it: every dtype, views, shared storages, empty tensors, numbers, texts."""
    base = torch.arange(24.0).reshape(4, 6)
    content = {
        "dtypes": [torch.ones(3).to(dtype) for dtype in _DTYPES.values()],
        "views": (base[1:], base.t(), base[:, 2], base),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(7),
        "plain": [None, True, -1, 1 << 70, 0.1, float("inf"), "text, \N{BLACK STAR}", {1: (2,)}],
        "ordered": OrderedDict(a=1),
    }
    path = saved(tmp_path / "file.pt", content)
    found = opened(path)
    assert same(found, torch.load(path, weights_only=True))
    assert found["views"][0].untyped_storage().data_ptr() == found["views"][3].untyped_storage().data_ptr()


def test_a_models_state_keeps_its_versions(tmp_path: Path) -> None:
    """``load_state_dict`` asks ``_metadata`` for them."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    path = saved(tmp_path / "file.pt", model.state_dict())
    assert vars(opened(path)) == vars(torch.load(path, weights_only=True))
    nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).load_state_dict(opened(path))


def test_what_is_written_to_it_stays_out_of_the_file(tmp_path: Path) -> None:
    """The mapping is this process's own."""
    path = saved(tmp_path / "file.pt", torch.zeros(1000))
    before = path.read_bytes()
    opened(path).fill_(1)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [
        nn.Linear(1, 1),
        nn.Parameter(torch.ones(1)),
        torch.ones(2).to_sparse(),
        {1, 2},
        b"x",
    ],
    ids=["module", "parameter", "sparse", "set", "bytes"],
)
def test_what_is_more_is_left_to_torch(tmp_path: Path, content: Any) -> None:
    """It knows it, or says why not."""
    with pytest.raises(NotPlainError):
        opened(saved(tmp_path / "file.pt", content))


def test_a_weight_that_requires_its_gradient_still_does(tmp_path: Path) -> None:
    """DeepSpeed saves its weights in fp32 like that; what cannot have a gradient is left to torch."""
    content = [torch.ones(2, requires_grad=True), torch.zeros(2)]
    path = saved(tmp_path / "file.pt", content)
    assert [(one.tolist(), one.requires_grad) for one in opened(path)] == [([1.0, 1.0], True), ([0.0, 0.0], False)]
    described = zipfile.ZipFile(path).read("file/data.pkl").replace(b"FloatStorage", b"IntStorage")
    with pytest.raises(NotPlainError, match="floating point"):
        opened(remade(path, described))


class Plain:
    """Something small."""

    def __init__(self, size: int = 0) -> None:
        self.size = size


class Stage(IntEnum):
    """A number with a name."""

    ONE = 1


def test_objects_of_listed_classes_are_made(tmp_path: Path) -> None:
    """As torch makes them; of another class none is."""
    path = saved(tmp_path / "file.pt", {"a": [Plain(3), Plain(4)], "stage": Stage.ONE, "shape": torch.Size([2, 3])})
    records = refuse_packed(path)
    assert records is not None
    found = open_mapped(path, records, (Plain, Stage))[0]
    assert [(type(one), vars(one)) for one in found["a"]] == [(Plain, {"size": 3}), (Plain, {"size": 4})]
    assert found["stage"] is Stage.ONE
    assert type(found["shape"]) is torch.Size
    assert found["shape"] == (2, 3)
    with pytest.raises(NotPlainError, match="Stage"):
        open_mapped(path, records, (Plain,))


def test_a_listed_class_is_not_changed(tmp_path: Path) -> None:
    """A description that sets something on it is refused, and so is one that calls what is in it."""
    path = saved(tmp_path / "file.pt", torch.ones(1))
    here = f"c{Plain.__module__}\nPlain\n".encode()
    for described in (here + b"(N}S'size'\nI1\nstb.", here + b"}S'size'\nI1\nsb."):
        records = refuse_packed(remade(path, described))
        assert records is not None
        with pytest.raises(NotPlainError):
            open_mapped(path, records, (Plain,))
    assert not hasattr(Plain, "size")


class _Runs:
    def __reduce__(self) -> Any:
        return print, ("it ran",)


@pytest.mark.parametrize(
    "described",
    [
        pickle.dumps(_Runs(), 2),
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\n_C\n.",
        b"ctorch._utils\n_rebuild_parameter\n.",
        # Something is set on what puts tensors together, and on the kind of ordered dictionaries.
        b"ctorch._utils\n_rebuild_tensor_v2\n(N}S'x'\nI1\nstb.",
        b"ccollections\nOrderedDict\n(N}S'x'\nI1\nstb.",
        b"\x80\x02U\x01aQ.",
        b"\x80\x02X\x01\x00\x00",
        b"",
    ],
    ids=["reduce", "eval", "torch", "parameter", "set on ours", "set on a class", "storage", "cut", "nothing"],
)
def test_nothing_else_is_made(tmp_path: Path, described: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    """Each name that is not on the list, and each description that torch.save does not write, is refused."""
    with pytest.raises(NotPlainError):
        opened(remade(saved(tmp_path / "file.pt", torch.ones(1)), described))
    assert "it ran" not in capsys.readouterr().out


class _Described(pickle.Pickler):
    """Writes a description of one tensor as torch does, with a size of one's own."""

    def __init__(self, file: Any, numel: int) -> None:
        super().__init__(file, 2)
        self._numel = numel

    def persistent_id(self, value: Any) -> Any:
        return ("storage", torch.FloatStorage, "0", "cpu", self._numel) if value is _STORAGE else None


_STORAGE = type("Placeholder", (), {})()


class _Tensor:
    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, (_STORAGE, *self.arguments, False, OrderedDict())


@pytest.mark.parametrize(
    ("numel", "tensor"),
    [
        (1000, _Tensor(0, (4,), (1,))),
        (4, _Tensor(0, (5,), (1,))),
        (4, _Tensor(1, (4,), (1,))),
        (4, _Tensor(-1, (2,), (1,))),
        (4, _Tensor(0, (2, 2), (1 << 40, 1))),
        (4, _Tensor(0, (-1,), (1,))),
        (4, _Tensor(1 << 62, (4,), (1,))),
    ],
)
def test_a_tensor_lies_within_its_storage(tmp_path: Path, numel: int, tensor: _Tensor) -> None:
    """Nothing beyond it is ever read."""
    path = saved(tmp_path / "file.pt", torch.ones(4))
    held = io.BytesIO()
    _Described(held, 4).dump(_Tensor(0, (4,), (1,)))
    assert torch.equal(opened(remade(path, held.getvalue())), torch.ones(4))
    held = io.BytesIO()
    _Described(held, numel).dump(tensor)
    with pytest.raises(NotPlainError):
        opened(remade(path, held.getvalue()))


def test_another_order_of_bytes_is_left_to_torch(tmp_path: Path) -> None:
    """It swaps them."""
    path = saved(tmp_path / "file.pt", torch.ones(4))
    path.write_bytes(path.read_bytes().replace(b"little", b"big   "))
    with pytest.raises(NotPlainError, match="another order of bytes"):
        opened(path)


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    """Wherever that was: as an archive, or here."""
    path = saved(tmp_path / "file.pt", {"a": torch.ones(100), "b": 1})
    whole = path.read_bytes()
    for size in (*range(4, len(whole), 97), len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises((RuntimeError, NotPlainError)):
            opened(path)


def described_by(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return next(archive.read(info) for info in archive.infolist() if info.filename.endswith("data.pkl"))


@pytest.mark.parametrize("bit", [0, 5, 7])
def test_a_flipped_bit_takes_no_memory(tmp_path: Path, bit: int) -> None:
    """Of the place of a value to come back to: the interpreter makes room for as many as that says."""
    path = saved(tmp_path / "archive.pt", {f"layer.{number}": torch.ones(2) for number in range(200)})
    good = described_by(path)
    puts = [at for code, _, at in pickletools.genops(good) if code.name == "LONG_BINPUT" and at is not None]
    flipped = bytearray(good)
    flipped[puts[-1] + 4] ^= 1 << bit
    assert same(opened(remade(path, good)), torch.load(path, weights_only=True))
    tracemalloc.start()
    try:
        with pytest.raises(NotPlainError):
            opened(remade(path, bytes(flipped)))
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("protocol", range(6))
def test_whatever_pickle_writes_is_walked_through(protocol: int) -> None:
    """To its end, where a place far behind all others is found. What is written as text is left to torch."""
    content = [
        *(None, True, 7, -3, 300, 70000, -70000, 1 << 40, 1 << 3000, 0.5, "r", "r" * 300, b"r", b"r" * 300, (), (1,)),
        *((1, 2), (1, 2, 3), (1, 2, 3, 4), [], [1], {}, {1: 2}, {1: 2, 3: 4}, {1}, frozenset({2}), OrderedDict(a=1)),
        *([number] for number in range(400)),
    ]
    written = pickle.dumps(content, protocol)
    if protocol < 2:
        with pytest.raises(NotPlainError):
            check_places(written)
        return
    check_places(written)
    with pytest.raises(NotPlainError, match="place"):
        check_places(written[:-1] + pickle.LONG_BINPUT + b"\0\0\0\x02.")
