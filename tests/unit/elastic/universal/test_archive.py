"""A file of a checkpoint that would become larger than it is: refused before anything of it is unpacked."""

from __future__ import annotations

import io
import os
import re
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed")

from dalsegno.elastic.universal import EnvironmentFailed, SourceBad, convert, convert_directory
from dalsegno.elastic.universal.archive import Packed, refuse_packed
from dalsegno.elastic.universal.conversion import Wish
from dalsegno.elastic.universal.loading import load
from tests.unit.agent.storage.test_adoption import ZERO_1

pytestmark = pytest.mark.timeout(240)

BOMB = 1 << 29
"""Bytes that the file would become."""
# What wait4 tells of a child is also its parent's memory, from before the exec.
MEASURED = """
import atexit, pathlib, runpy, sys
peak = sys.argv.pop(1)
atexit.register(lambda: pathlib.Path(peak).write_bytes(pathlib.Path("/proc/self/status").read_bytes()))
runpy.run_module("dalsegno.elastic.universal", run_name="__main__", alter_sys=True)
"""


def packed(path: Path, size: int, record: str = "data.pkl") -> None:
    """Like a file of `torch.save`, with a compressed record of so many zeros."""
    chunk = bytes(1 << 20)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        with archive.open(f"archive/{record}", "w", force_zip64=True) as file:
            for _ in range(size // len(chunk)):
                file.write(chunk)
        if record != "version":
            archive.writestr("archive/version", "3\n", zipfile.ZIP_STORED)


def overlapping(path: Path, records: int) -> None:
    """Many names for the same bytes."""
    saved = io.BytesIO()
    with zipfile.ZipFile(saved, "w") as archive:
        archive.writestr("archive/data.pkl", bytes(100_000))
    data = saved.getvalue()
    directory = data.index(b"PK\x01\x02")
    entry = data[directory : data.index(b"PK\x05\x06")]
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, records, records, records * len(entry), directory, 0)
    path.write_bytes(data[:directory] + entry * records + end)


@pytest.mark.parametrize("record", ["data.pkl", "version", "data/0", ".data/serialization_id"])
def test_a_compressed_record_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: str) -> None:
    """Whichever it is: torch is not even asked."""
    monkeypatch.setattr(torch, "load", lambda *arguments, **options: pytest.fail("torch has opened it"))
    packed(tmp_path / "file.pt", 1 << 24, record)
    with pytest.raises(Packed, match=f"'archive/{record}' in it is compressed, .* would become {1 << 24}"):
        load(tmp_path / "file.pt")


def test_records_that_share_their_bytes_are_refused(tmp_path: Path) -> None:
    """Each is no larger than the file, all together are."""
    overlapping(tmp_path / "file.pt", 1)
    refuse_packed(tmp_path / "file.pt")
    overlapping(tmp_path / "file.pt", 50)
    with pytest.raises(Packed, match="its 50 records are of 5000000 bytes together, and the file has"):
        refuse_packed(tmp_path / "file.pt")


def test_what_has_no_directory_is_not_left_to_torch(tmp_path: Path) -> None:
    """It might find another one in it."""
    torch.save({"a": torch.zeros(10)}, tmp_path / "file.pt")
    os.truncate(tmp_path / "file.pt", (tmp_path / "file.pt").stat().st_size - 30)
    with pytest.raises(RuntimeError, match="it is no whole archive"):
        load(tmp_path / "file.pt")


@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_saves_is_loaded(tmp_path: Path, zipped: bool) -> None:
    """Of any size, of both its formats, empty tensors and shared storages included."""
    tensor = torch.arange(100_000)
    content = {"all": tensor, "part": tensor[5:10], "none": torch.zeros(0)}
    torch.save(content, tmp_path / "file.pt", _use_new_zipfile_serialization=zipped)
    assert torch.equal(load(tmp_path / "file.pt")["part"], tensor[5:10])


@pytest.mark.parametrize("upstream", [False, True])
def test_a_packed_checkpoint_is_bad(tmp_path: Path, upstream: bool) -> None:
    """Of our converter and of DeepSpeed's: one line that names the file."""
    source = tmp_path / "global_step1"
    source.mkdir()
    for name in ZERO_1:
        packed(source / name, 1 << 20)
    with pytest.raises(SourceBad, match=r"_states.pt cannot be read: 'archive/data.pkl' in it is compressed"):
        convert_directory(source, tmp_path / "out", wish=Wish(upstream=upstream))


@pytest.mark.full
@pytest.mark.slow
def test_a_bomb_takes_no_memory(tmp_path: Path) -> None:
    """The whole converter, in a process of its own, stays far below what the file would become."""
    source = tmp_path / "global_step1"
    source.mkdir()
    packed(source / ZERO_1[0], BOMB)
    for name in ZERO_1[1:]:
        os.link(source / ZERO_1[0], source / name)
    assert (source / ZERO_1[0]).stat().st_size < BOMB // 100
    peak = tmp_path / "peak"
    command = [sys.executable, "-c", MEASURED, str(peak), "--anywhere", "--source", str(source)]
    done = subprocess.run([*command, "--target", str(tmp_path / "out")], stdout=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 65
    assert '"SOURCE_BAD"' in done.stdout
    (kilobytes,) = re.findall(r"^VmHWM:\s*(\d+) kB$", peak.read_text(), re.MULTILINE)
    assert int(kilobytes) << 10 < BOMB


def test_a_checkpoint_out_of_sight_is_not_a_bad_one(tmp_path: Path) -> None:
    """Its directory may be on a mount that is away; without a manifest it is damaged."""
    source = tmp_path / "step-3.e1.1"
    with pytest.raises(EnvironmentFailed, match="is not in sight"):
        convert(source, tmp_path / "step-3.e1.1.universal.1", digest="0" * 64)
    source.mkdir()
    with pytest.raises(SourceBad, match=r"MANIFEST.json: MANIFEST"):
        convert(source, tmp_path / "step-3.e1.1.universal.2", digest="0" * 64)
