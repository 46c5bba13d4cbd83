"""Files of ``torch.save`` in pieces: what is read is what was saved, what is written is what torch would write."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("deepspeed")

from dalsegno.elastic.universal.forms import PARAM
from dalsegno.elastic.universal.recording import dense
from dalsegno.elastic.universal.records import Frame, NotInPieces, TorchFile, frame
from dalsegno.elastic.universal.streaming import converted, read, zeros


def saved(content: Any) -> bytes:
    """What torch writes without the archive's own checksums."""
    file = io.BytesIO()
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    torch.save(content, file)
    torch.serialization.set_crc32_options(before)
    return file.getvalue()


def of(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def whole(around: Frame, values: bytes) -> bytes:
    assert len(values) == around.nbytes
    return around.head + values + around.tail


@pytest.mark.parametrize("shape", [(1000, 3), (7,), (1,), (), (0,), (0, 3), (64, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_frame_is_what_torch_writes_around_values(shape: tuple[int, ...], dtype: Any) -> None:
    """Byte by byte, bare and in DeepSpeed's dictionaries, also of no value at all."""
    tensor = torch.randn(shape).to(dtype)
    assert whole(frame(shape, dtype), of(tensor)) == saved(tensor)
    assert whole(frame(shape, dtype, key=PARAM), of(tensor)) == saved({PARAM: tensor})
    assert whole(frame(shape, dtype, key=PARAM, cat_dim=0), of(tensor)) == saved({"cat_dim": 0, PARAM: tensor})


def test_a_frame_is_the_same_from_any_thread() -> None:
    """Torch's option for checksums is a thread's own: two conversions of one source would differ in their files."""
    frame.cache_clear()
    with ThreadPoolExecutor(1) as pool:
        theirs = pool.submit(frame, (7, 9), torch.float32).result()
    assert torch.serialization.get_crc32_options(), "the option is back"
    frame.cache_clear()
    assert frame((7, 9), torch.float32) == theirs


def test_a_frame_keeps_the_order_of_storage() -> None:
    """As torch does with a transposed tensor."""
    tensor = torch.randn(4, 6).t()
    around = frame((6, 4), torch.float32, stride=tensor.stride())
    assert whole(around, of(tensor.t())) == saved(tensor)


def content() -> dict[str, Any]:
    base = torch.arange(5000, dtype=torch.float32)
    return {
        "step": torch.tensor(3.0),
        "flat": base,
        "again": base,
        "view": base[100:400],
        "moments": {0: torch.randn(4000), 1: torch.randn(4000).to(torch.bfloat16), 2: torch.empty(0)},
        "same size": [torch.randn(4000) for _ in range(3)],
        "transposed": torch.randn(20, 30).t(),
    }


def read_back(extent: Any, size: int) -> bytes:
    return b"".join(bytes(piece) for piece in read([extent], memoryview(bytearray(size))))


@pytest.mark.parametrize("size", [64, 4096, 1 << 20])
def test_extents_are_where_the_values_are(tmp_path: Path, size: int) -> None:
    """Shared storages, views, sizes that occur several times, nothing at all."""
    before = content()
    torch.save(before, tmp_path / "file.pt")
    with TorchFile(tmp_path / "file.pt") as file:
        there = file.content
        tensors = [
            there["step"],
            there["flat"],
            there["again"],
            there["view"],
            *there["moments"].values(),
            *there["same size"],
        ]
        for tensor in tensors:
            assert read_back(file.extent(tensor), size) == of(tensor)
        assert read_back(file.extent(there["view"], 10, 20), size) == of(before["flat"][110:130])
        turned = there["transposed"]
        assert read_back(file.extent(turned), size) == of(turned.t())


def test_several_extents_fill_one_buffer(tmp_path: Path) -> None:
    """Pieces are full but for the last, however small the parts."""
    torch.save({"a": torch.arange(1000, dtype=torch.int64)}, tmp_path / "file.pt")
    with TorchFile(tmp_path / "file.pt") as file:
        tensor = file.content["a"]
        extents = [file.extent(tensor, start, 7) for start in range(0, 994, 7)]
        pieces = [bytes(piece) for piece in read(extents, memoryview(bytearray(512)))]
        assert [len(piece) for piece in pieces[:-1]] == [512] * (len(pieces) - 1)
        assert b"".join(pieces) == of(tensor[:994])


def test_zeros() -> None:
    assert [len(piece) for piece in zeros(1000, memoryview(bytearray(b"\1" * 300)))] == [300, 300, 300, 100]
    assert not any(any(piece) for piece in zeros(1000, memoryview(bytearray(b"\1" * 300))))


def test_converted() -> None:
    """The same rounding as a tensor's own."""
    values = torch.randn(100)
    piece, buffer = memoryview(bytearray(of(values))), memoryview(bytearray(400))
    assert bytes(converted(piece, torch.float32, torch.bfloat16, buffer)) == of(values.to(torch.bfloat16))


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    """And no bus error, which a memory map would be."""
    torch.save(torch.randn(10000), tmp_path / "file.pt")
    with TorchFile(tmp_path / "file.pt") as file:
        extent = file.extent(file.content)
        with open(tmp_path / "file.pt", "r+b") as shrinking:
            shrinking.truncate(20000)
        with pytest.raises(OSError, match="ended early"):
            read_back(extent, 1 << 20)


def test_an_older_format(tmp_path: Path) -> None:
    torch.save(torch.randn(10), tmp_path / "file.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(NotInPieces, match=r"before 1\.6"):
        TorchFile(tmp_path / "file.pt")


def test_bytes_in_another_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of the other kind would have to turn them round."""
    torch.save(torch.randn(10), tmp_path / "file.pt")
    monkeypatch.setattr("sys.byteorder", "big")
    with pytest.raises(NotInPieces, match="another order of bytes"):
        TorchFile(tmp_path / "file.pt")


def test_records_that_are_not_where_torch_mapped_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one thing that torch does not tell is checked against all that it does."""
    from dalsegno.elastic.universal import records

    torch.save({"a": torch.randn(10), "b": torch.randn(10)}, tmp_path / "file.pt")
    found = records._storage_records
    monkeypatch.setattr(
        records,
        "_storage_records",
        lambda *arguments: [(start + 64 * n, size) for n, (start, size) in enumerate(found(*arguments))],
    )
    with pytest.raises(NotInPieces, match="not where torch mapped them"):
        TorchFile(tmp_path / "file.pt")


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.randn(3, 4), True),
        (torch.randn(3, 4).t(), True),
        (torch.randn(2, 3, 4).permute(1, 2, 0), True),
        (torch.randn(12)[2:5], True),
        (torch.randn(()), True),
        (torch.randn(0, 4), True),
        (torch.randn(3, 1, 4).transpose(0, 1), True),
        (torch.randn(12)[::2], False),
        (torch.randn(3, 1).expand(3, 4), False),
    ],
)
def test_dense(tensor: Tensor, expected: bool) -> None:
    assert dense(tensor) == expected
