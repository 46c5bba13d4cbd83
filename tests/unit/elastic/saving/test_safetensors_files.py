"""Files of safetensors, written piece by piece, are what the library itself reads and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dalsegno.elastic.saving.safetensors_files import DTYPES, Safetensors, is_plain
from dalsegno.elastic.saving.staging import HostBuffers
from dalsegno.elastic.saving.writing import write_files


def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    found = {f"of {name}": (torch.randn(3, 5) * 9).to(dtype) for dtype, name in DTYPES.items()}
    return found | {
        "scalar": torch.tensor(7.0),
        "empty": torch.empty(0, 4),
        "view": torch.arange(10.0)[3:7],
        "parameter": torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        'in "quotes", ü': torch.randn(300, 400),
    }


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    assert {name: one.dtype for name, one in found.items()} == {name: one.dtype for name, one in wanted.items()}
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name].detach()) for name in found)


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "by": "ü"}])
def test_the_library_reads_what_it_would_have_written(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    """Byte by byte behind the header: it has the same order."""
    given = tensors()
    assert is_plain(given)
    write_files(tmp_path, {"ours": Safetensors(given, metadata)})
    save_file(given, tmp_path / "theirs", metadata)
    assert same(load_file(tmp_path / "ours"), given)
    for name in ("ours", "theirs"):
        with safe_open(tmp_path / name, "pt") as file:
            assert file.metadata() == metadata
    headers = [header((tmp_path / name).read_bytes()) for name in ("ours", "theirs")]
    assert headers[0] == headers[1]


def header(data: bytes) -> tuple[dict[str, object], bytes]:
    count = int.from_bytes(data[:8], "little")
    assert count % 8 == 0
    return json.loads(data[8 : 8 + count]), data[8 + count :]


def test_nothing_is_a_file_too(tmp_path: Path) -> None:
    """A rank that has no weights of its own."""
    write_files(tmp_path, {"ours": Safetensors({})})
    assert load_file(tmp_path / "ours") == {}


def test_a_copy_in_host_memory_is_written_alike(tmp_path: Path) -> None:
    """As a save in the background needs it: what is changed behind the copy is not in it."""
    given = tensors()
    wanted = {name: tensor.detach().clone() for name, tensor in given.items()}
    copied = HostBuffers().copy({"model": Safetensors(given, {"format": "pt"})})
    for tensor in given.values():
        tensor.detach().zero_()
    write_files(tmp_path, copied)
    assert same(load_file(tmp_path / "model"), wanted)
    with safe_open(tmp_path / "model", "pt") as file:
        assert file.metadata() == {"format": "pt"}


_base = torch.arange(10.0)


@pytest.mark.parametrize(
    "given",
    [
        {"a": _base[:6], "b": _base[5:]},
        {"a": _base, "b": _base},
        {"a": torch.ones(3, 4).t()},
        {"a": torch.eye(3).to_sparse()},
        {"a": torch.ones(2, dtype=torch.complex64).conj()},
        {"a": torch.ones(2, device="meta")},
        {"a": 1.0},
        {1: _base},
        [_base],
    ],
)
def test_the_rest_is_the_librarys(given: object) -> None:
    """It refuses most of this, and has a line for each."""
    assert not is_plain(given)


def test_parts_of_one_piece_of_memory_are_plain(tmp_path: Path) -> None:
    """DeepSpeed keeps all weights in one."""
    given = {"a": _base[:5], "b": _base[5:]}
    assert is_plain(given)
    write_files(tmp_path, {"ours": HostBuffers().copy(Safetensors(given))})
    assert same(load_file(tmp_path / "ours"), given)
