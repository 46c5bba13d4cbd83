"""Checkpoints on a disk that newer ones have replaced: the next save writes over their files, or they go."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from dalsegno.elastic import session
from dalsegno.elastic.checkpoint import CheckpointStore, Ref, durability, spares
from dalsegno.elastic.checkpoint.saved_as import SavedAs
from dalsegno.elastic.checkpoint.spares import FOLDER, LEAST_BYTES, clear_spares, spare_bytes
from dalsegno.elastic.saving.writing import SummedFile
from dalsegno.elastic.universal import conversion
from dalsegno.elastic.universal.errors import EnvironmentFailed
from tests.support.checkpoints.memory import manifest_of
from tests.support.jobs.faults import volume

OLD, NEW = b"o" * (LEAST_BYTES + 5), b"n" * (LEAST_BYTES + 9)
OF_A_TRAINER = "checkpoint-1/model.safetensors"
STEP, FORM, NEXT = "step-1.e1.1", "step-1.e1.1.universal.2", "step-2.e1.1"


@pytest.fixture(autouse=True)
def a_known_file_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Wherever the tests' files lie (an overlay, for one), the kernel's leases tell of all who read them."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    monkeypatch.setitem(durability.TELLING, durability._kind(descriptor), "of the tests")
    os.close(descriptor)


def a_step(run: Path, name: str = STEP, data: bytes = OLD, **changes: Any) -> Path:
    """A sealed checkpoint."""
    directory = run / name
    files = {"model.pt": data, "ranks/0.pt": data, "small": b"s", OF_A_TRAINER: data}
    for path, content in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
    manifest = replace(manifest_of(name.partition(".universal")[0], {0: files}), **{"name": name, **changes})
    (directory / "MANIFEST.json").write_bytes(manifest.to_bytes())
    return directory


def next_save(run: Path, path: str = "model.pt") -> Path:
    """Saves a file of the next step."""
    target = run / NEXT / path
    target.parent.mkdir(parents=True, exist_ok=True)
    with SummedFile(target, anew=True) as file:
        file.write(NEW)
        assert file.finish() == xxhash.xxh3_128(NEW).hexdigest()
    assert target.read_bytes() == NEW
    return target


def test_the_next_save_writes_over_what_was_replaced(tmp_path: Path) -> None:
    """The same files, by their paths; nothing else of the old checkpoint stays."""
    directory = a_step(tmp_path)
    files = {path: os.stat(directory / path).st_ino for path in ("model.pt", "ranks/0.pt", OF_A_TRAINER)}
    assert CheckpointStore(tmp_path).prune([STEP], replaced=True) == {}
    assert not directory.exists()
    assert spare_bytes(tmp_path) == 3 * len(OLD)
    for path, number in files.items():
        assert os.stat(next_save(tmp_path, path.replace("checkpoint-1/", "checkpoint-2/"))).st_ino == number
    assert spare_bytes(tmp_path) == 0
    shutil.rmtree(tmp_path / NEXT)
    a_step(tmp_path, NEXT, NEW)
    CheckpointStore(tmp_path).prune([NEXT], replaced=True)
    assert spare_bytes(tmp_path) == 3 * len(NEW)


def test_what_nobody_would_take_is_not_kept(tmp_path: Path) -> None:
    """Of a person's order, of a later form, and of what a script without a session or a Trainer has written."""
    store = CheckpointStore(tmp_path)
    a_step(tmp_path)
    assert store.prune([STEP]) == {}
    a_step(tmp_path, FORM, form="universal", source=Ref(STEP, "0" * 64))
    assert store.prune([FORM], replaced=True) == {}
    a_step(tmp_path, saved_as=SavedAs(below="", newest="model.pt"))
    assert store.prune([STEP], replaced=True) == {}
    unsealed = a_step(tmp_path)
    os.unlink(unsealed / "MANIFEST.json")
    assert store.prune([STEP], replaced=True) == {}
    assert os.listdir(tmp_path) == []


def test_nothing_is_kept_where_room_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept before goes, too."""
    a_step(tmp_path)
    CheckpointStore(tmp_path).prune([STEP], replaced=True)
    there = os.statvfs(tmp_path)
    monkeypatch.setattr(spares, "FREE_BYTES", there.f_blocks * there.f_frsize)
    a_step(tmp_path, NEXT)
    CheckpointStore(tmp_path).prune([NEXT], replaced=True)
    assert os.listdir(tmp_path) == []


def test_nothing_is_kept_where_others_may_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a network, or below what the kernel does not know: no lease would tell."""
    monkeypatch.setattr(durability, "TELLING", {})
    a_step(tmp_path)
    CheckpointStore(tmp_path).prune([STEP], replaced=True)
    assert os.listdir(tmp_path) == []


def test_a_file_with_another_name_is_left_to_it(tmp_path: Path) -> None:
    """Somebody has kept it for himself: it takes no room here, and is not written over."""
    (tmp_path / "run").mkdir()
    directory = a_step(tmp_path / "run")
    os.link(directory / "model.pt", tmp_path / "kept")
    CheckpointStore(tmp_path / "run").prune([STEP], replaced=True)
    assert sorted(os.listdir(tmp_path / "run" / FOLDER)) == ["=checkpoint-%2Fmodel.safetensors", "=ranks%2F0.pt"]
    next_save(tmp_path / "run")
    assert (tmp_path / "kept").read_bytes() == OLD


@pytest.mark.parametrize("of", ["file", "folder"])
def test_a_link_in_a_checkpoint_is_not_followed(tmp_path: Path, of: str) -> None:
    """What it leads to stays where it is, as it is, whatever else is there."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "0.pt").write_bytes(OLD)
    run = tmp_path / "run"
    directory = a_step(run)
    if of == "file":
        os.unlink(directory / "model.pt")
        (directory / "model.pt").symlink_to(elsewhere / "0.pt")
    else:
        shutil.rmtree(directory / "ranks")
        (directory / "ranks").symlink_to(elsewhere)
    assert CheckpointStore(run).prune([STEP], replaced=True) == {}
    next_save(run, "ranks/0.pt")
    next_save(run)
    assert (elsewhere / "0.pt").read_bytes() == OLD


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    """Nothing is deleted, moved or written elsewhere."""
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir()
    (elsewhere / "=model.pt").write_bytes(OLD)
    a_step(run)
    (run / FOLDER).symlink_to(elsewhere)
    assert CheckpointStore(run).prune([STEP], replaced=True) == {}
    clear_spares(run)
    next_save(run)
    assert os.listdir(elsewhere) == ["=model.pt"]
    assert (elsewhere / "=model.pt").read_bytes() == OLD


def test_what_a_stranger_put_there_stays(tmp_path: Path) -> None:
    """And does not keep the rest from going."""
    a_step(tmp_path)
    CheckpointStore(tmp_path).prune([STEP], replaced=True)
    (tmp_path / FOLDER / "=a").mkdir()
    (tmp_path / FOLDER / "thesis.tex").write_bytes(b"x")
    clear_spares(tmp_path)
    assert sorted(os.listdir(tmp_path / FOLDER)) == ["=a", "thesis.tex"]


def test_pages_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the pieces are: a page in part would have to be read from the disk, where it is no longer in memory."""
    a_step(tmp_path, data=b"o" * (4 << 20))
    CheckpointStore(tmp_path).prune([STEP], replaced=True)
    (tmp_path / NEXT).mkdir()
    sizes: list[int] = []
    write = os.write

    def noted(descriptor: int, data: bytes) -> int:
        count = write(descriptor, data)
        sizes.append(count)
        return count

    monkeypatch.setattr(os, "write", noted)
    pieces = [os.urandom(size) for size in (1, 5000, 4095, 4096, 70_000, 3, 200_001, 12, 8192, 4097, 66_000, 7)]
    with SummedFile(tmp_path / NEXT / "model.pt") as file:
        for piece in pieces:
            assert file.write(piece) == len(piece)
        assert file.size == sum(map(len, pieces))
        assert file.finish() == xxhash.xxh3_128(b"".join(pieces)).hexdigest()
    assert (tmp_path / NEXT / "model.pt").read_bytes() == b"".join(pieces)
    assert [size % 4096 for size in sizes[:-1]] == [0] * (len(sizes) - 1), sizes


def test_a_full_disk_gets_the_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that finds no room goes on where it was, once what was kept for others is gone."""
    monkeypatch.setattr(spares, "FREE_BYTES", 0)
    monkeypatch.setattr(spares, "FREE_TIMES", 0)
    with volume(tmp_path / "volume", 16) as disk:
        a_step(disk.path, data=b"o" * (4 << 20))
        CheckpointStore(disk.path).prune([STEP], replaced=True)
        assert spare_bytes(disk.path) == 12 << 20
        (disk.path / NEXT).mkdir()
        content = os.urandom(12 << 20)
        with SummedFile(disk.path / NEXT / "another.pt") as file:
            for at in range(0, len(content), 700_001):  # so that room is short in the middle of one
                file.write(content[at : at + 700_001])
            assert file.finish() == xxhash.xxh3_128(content).hexdigest()
        assert (disk.path / NEXT / "another.pt").read_bytes() == content
        assert spare_bytes(disk.path) == 0
        # Nothing is left to give back.
        with SummedFile(disk.path / NEXT / "more") as file:
            file.write(content)
            with pytest.raises(OSError, match="No space left") as failure:
                file.finish()
        assert failure.value.errno == errno.ENOSPC


@pytest.mark.parametrize("call", ["open", "write"])
def test_two_who_find_the_disk_full_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The other one has given the room back a moment before: both go on. Names may need room, too."""
    (tmp_path / NEXT).mkdir()
    ask, failures = getattr(os, call), [OSError(errno.ENOSPC, "No space left on device")]

    def full(*words: Any) -> Any:
        # Only what is written to the new file, or makes it.
        if failures and (call == "write" or str(words[0]).endswith("model.pt")):
            raise failures.pop()
        return ask(*words)

    monkeypatch.setattr(os, call, full)
    next_save(tmp_path)
    assert not failures


def test_what_a_script_writes_by_itself_gets_the_room_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`torch.save` takes no such file, and says nothing of a full disk: the save fails, and the next try has the room.

    It failed for good, the last step's too, beside files as large as a checkpoint.
    """
    monkeypatch.setattr(spares, "FREE_BYTES", 0)
    monkeypatch.setattr(spares, "FREE_TIMES", 0)
    run, size = tmp_path / "run", 2 * LEAST_BYTES

    def save(path: Path) -> None:
        if s.step > 2 and spare_bytes(run):  # others have filled the disk meanwhile
            raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 704 vs 598")
        torch.save(torch.zeros(size, dtype=torch.uint8), path / "model.pt")

    with session(run, keep=1) as s:
        for _ in range(3):
            s.begin_step()
            s.end_step()
            first = s.save(save)
        assert first is None
        assert "saving step-3.e0.1 failed, commits stand" in caplog.text
        again = s.save(save)
        assert again is not None
        s.finish()


def test_no_room_for_a_name_gives_room_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint's own directory may be what the disk has no room for."""
    monkeypatch.setattr(spares, "FREE_BYTES", 0)
    monkeypatch.setattr(spares, "FREE_TIMES", 0)
    make = os.mkdir

    def full(path: Any, *more: Any) -> None:
        if spare_bytes(tmp_path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        make(path, *more)

    with session(tmp_path, keep=1) as s:
        s.begin_step()
        s.end_step()
        a_step(tmp_path, "step-0.e0.1")
        CheckpointStore(tmp_path).prune(["step-0.e0.1"], replaced=True)
        with monkeypatch.context() as patch:
            patch.setattr(os, "mkdir", full)
            assert s.save(lambda path: None) is None
            assert s.save(lambda path: None) is not None


def test_a_conversion_that_finds_no_room_gives_it_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes by itself, too, and the next lease goes on with what it has made."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    a_step(tmp_path)
    CheckpointStore(tmp_path).prune([STEP], replaced=True)
    monkeypatch.setattr(conversion, "verified", full)
    with pytest.raises(EnvironmentFailed, match="no space left"):
        conversion.convert(tmp_path / STEP, tmp_path / FORM)
    assert spare_bytes(tmp_path) == 0
