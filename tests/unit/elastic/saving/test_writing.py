"""Files are summed while they are written, and read back only where somebody else may have touched them."""

from __future__ import annotations

import errno
import os
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from dalsegno.elastic.checkpoint import CheckpointStore, FileEntry, Manifest, Position, files, summing, verify
from dalsegno.elastic.checkpoint.files import checksum
from dalsegno.elastic.checkpoint.spares import LEAST_BYTES, keep_spares
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.rank.identity import Identity
from dalsegno.elastic.saving import writing
from dalsegno.elastic.saving.bundles import Bundle
from dalsegno.elastic.saving.content import Content
from dalsegno.elastic.saving.saving import Saver
from dalsegno.elastic.saving.writing import AHEAD_BYTES, Summed, SummedFile, write_files
from tests.support.workers.threads import Threads, together

pytestmark = pytest.mark.timeout(30)


def test_the_sum_is_that_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In pieces of all lengths, with the disk at work meanwhile; what torch loads is what it was given."""
    monkeypatch.setattr(summing, "WRITE_BYTES", 4096)
    monkeypatch.setattr(writing, "AHEAD_BYTES", 10_000)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(writing, "begin_to_write", lambda descriptor, start, count: asked.append((start, count)))
    moved: list[int] = []
    pieces = [os.urandom(count) for count in (1, 4095, 4096, 5000, 1, 30_000, *[700] * 100, 5000, 3)]
    with SummedFile(tmp_path / "file", moved.append) as file:
        for count, piece in enumerate(pieces, start=1):
            assert file.write(piece) == len(piece)
            assert file.size == sum(map(len, pieces[:count]))
        digest = file.finish()
    assert (tmp_path / "file").read_bytes() == b"".join(pieces)
    assert FileEntry("file", file.size, digest) == checksum(tmp_path, "file")
    assert sum(moved) == file.size == 118_196
    assert asked[0][0] == 0
    assert all(start + count == after for (start, count), (after, _) in pairwise(asked))
    content: dict[str, Any] = {"a": torch.randn(30_000), "b": [torch.ones(2, dtype=torch.bfloat16)]}
    with Summed() as summed:
        write_files(tmp_path, {"plain.pt": content, "below/packed.pt": Bundle(content), "bytes": b"x"})
    entries = summed.entries(tmp_path)
    assert [entry.path for entry in entries] == ["plain.pt", "below/packed.pt", "bytes"]
    assert list(entries) == [checksum(tmp_path, entry.path) for entry in entries]
    found = torch.load(tmp_path / "plain.pt", weights_only=True, mmap=True)
    assert torch.equal(found["a"], content["a"])
    assert torch.equal(found["b"][0], content["b"][0])


def test_a_write_error_does_not_pass_through_torch(tmp_path: Path) -> None:
    """A device without room in the middle of torch.save: one clear error."""
    for content in ({"weights": torch.zeros(1 << 20)}, Bundle(weights=torch.zeros(1 << 20)), {"few": 1}):
        with SummedFile(Path("/dev/full"), anew=True) as file:
            writing.save(content, file)
            with pytest.raises(OSError, match="No space left") as caught:
                file.finish(lasting=False)
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(FileNotFoundError):
        write_files(tmp_path / "nowhere", {"file": b""})


def test_what_the_writer_summed_is_not_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made durable all the same; what the script then touched, or wrote by itself, is read."""
    read, synced = [], []
    monkeypatch.setattr(files, "_sync", lambda root, path, moved: synced.append(path))
    plain = files.checksum

    def reading(root: Path, path: str, **options: Any) -> FileEntry:
        read.append(path)
        return plain(root, path, **options)

    monkeypatch.setattr(files, "checksum", reading)

    def write(path: Path) -> None:
        write_files(path, {"a.pt": {"a": torch.ones(3)}, "b.pt": {"b": torch.ones(3)}, "c.pt": {}, "d.pt": {}})
        with (path / "b.pt").open("r+b") as file:
            file.write(b"X")
        (path / "c.pt").unlink()
        (path / "d.pt").rename(path / "e.pt")
        (path / "own").write_bytes(b"own")

    saver = Saver(Identity(epoch=1), Solo(), CheckpointStore(tmp_path), None, None)
    manifest = saver.save(Content(1, Position()), write, create_directory=True, drain=False)
    assert manifest is not None
    assert sorted(read) == ["b.pt", "e.pt", "own", "rng/rank-0.json"]
    assert sorted(synced) == sorted(entry.path for entry in manifest.files) == sorted({*read, "a.pt"})
    verify(tmp_path / manifest.name, manifest)


def test_what_another_rank_changes_last_is_read_back(tmp_path: Path) -> None:
    """It may do so until it has said that it has written: here one goes on with another one's file."""
    said = threading.Event()

    def work(group: Threads) -> Manifest | None:
        identity = Identity(rank=group.rank, world_size=2, local_rank=group.rank, local_world_size=2, epoch=1)
        exchange, wrote = group.gather, False

        def gather(message: Any, **options: Any) -> list[Any]:
            if wrote and group.rank == 0:
                said.set()
            return exchange(message, **options)

        def write(path: Path) -> None:
            nonlocal wrote
            if group.rank == 0:
                write_files(path, {"model.pt": {"a": torch.ones(3)}})
                wrote = True
                return
            assert said.wait(30)
            with (path / "model.pt").open("r+b") as file:
                file.write(b"X")

        group.gather = gather  # type: ignore[method-assign]
        saver = Saver(identity, group, CheckpointStore(tmp_path), None, None)
        return saver.save(Content(1, Position()), write, create_directory=True, drain=False)

    manifest = together(2, work)[0]
    assert isinstance(manifest, Manifest)
    verify(tmp_path / manifest.name, manifest)


def test_only_the_checkpoint_that_is_being_written_is_known(tmp_path: Path) -> None:
    """A script that writes an export of its own meanwhile; and one that writes when nobody asks."""
    write_files(tmp_path, {"alone": b"1"})
    (tmp_path / "other").mkdir()
    with Summed() as summed:
        write_files(tmp_path / "other", {"file": b"1"})
        write_files(tmp_path, {"alone": b"2"})
    write_files(tmp_path, {"late": b"3"})
    assert [entry.path for entry in summed.entries(tmp_path)] == ["alone"]


@pytest.mark.parametrize("over", [False, True], ids=["a new file", "an older one"])
def test_growing_files_ask_for_room(tmp_path: Path, over: bool) -> None:
    """Every 32 MB of them together; what writes over an older file has its room."""
    directory, size = tmp_path / "step-2.e1.1", 80 << 20
    old = tmp_path / "step-1.e1.1" / ("file" if over else "other")
    for path in (directory, old.parent):
        path.mkdir()
    old.write_bytes(bytes(LEAST_BYTES))
    keep_spares(tmp_path, old.parent, [old.name])
    asked: list[int] = []

    def check() -> None:
        asked.append((directory / "file").stat().st_size)

    with Summed(check) as summed:
        write_files(directory, {"file": bytes(size)})
        write_files(directory, {f"small-{number}": bytes(1 << 20) for number in range(16)})
    assert len(summed.entries(directory)) == 17
    # The small ones are new in both cases, and 16 MB are asked for together with what the large one had beyond 64.
    assert asked == ([] if over else [32 << 20, 64 << 20, 80 << 20])

    def refuse() -> None:
        raise OSError(errno.ENOSPC, "no memory")

    with Summed(refuse), pytest.raises(OSError, match="no memory"):
        write_files(directory, {"another": bytes(AHEAD_BYTES)})
