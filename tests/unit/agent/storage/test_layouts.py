"""Which of the things that scripts save are complete, layout by layout."""

from __future__ import annotations

import json
import os
import random
import struct
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from dalsegno.agent.storage import foreign
from dalsegno.agent.storage.foreign import TooMany, survey
from dalsegno.agent.storage.headers import is_sound, number_in, was_ended
from dalsegno.agent.storage.layouts import Complete, complete, number_of_unit
from dalsegno.elastic.checkpoint import CheckpointDamaged
from tests.unit.agent.storage.test_adoption import ZERO_1, states

Whole = tuple[str, "int | None", str, bool, bool]


def whole(directory: Path, world_size: int = 2, pattern: str = "") -> list[Whole]:
    """(path, number, strategy, loads anywhere, sure) of the newest of each series, as far as it is complete."""
    every = [complete(directory, units[0], world_size) for units in survey(directory, pattern).series()]
    found = [one for one in every if isinstance(one, Complete)]
    return [
        (one.unit.path, one.unit.number, one.strategy, one.any_world_size, one.sure)
        for one in sorted(found, key=lambda one: one.unit.path)
    ]


def safetensors(path: Path, size: int = 64) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]}}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))


def test_accelerates_is_complete_with_the_random_states_of_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "step_520"
    safetensors(path / "model.safetensors")
    states(path, "optimizer.bin", "scheduler.bin", "random_states_0.pkl")
    assert whole(tmp_path) == []
    states(path, "random_states_1.pkl")
    assert whole(tmp_path) == [("step_520", 520, "accelerate", True, True)]
    states(path / "pytorch_model", *ZERO_1[:2])
    assert whole(tmp_path) == [], "an engine's file is missing"
    states(path / "pytorch_model", *ZERO_1)
    assert whole(tmp_path) == [("step_520", 520, "accelerate", False, True)]


def test_distributed_checkpoints_end_with_their_metadata(tmp_path: Path) -> None:
    """Whatever the directory is called, and wherever it is; also if it is the script's directory itself."""
    for where in (tmp_path / "a" / "deep" / "mine", tmp_path / "b"):
        where.mkdir(parents=True)
        (where / "__0_0.distcp").write_bytes(b"x")
        root = tmp_path / where.relative_to(tmp_path).parts[0]
        assert whole(root) == [] or root == where
        (where / ".metadata").write_bytes(b"\x80\x04.")
    assert whole(tmp_path / "a") == [("deep/mine", None, "torch-distributed", True, True)]
    (path, _, strategy, anywhere, sure) = whole(tmp_path / "b")[0]
    assert (path, strategy, anywhere, sure) == (".", "files", True, False)


@pytest.mark.parametrize("name", ["ckpt.pt", "epoch=0-step=9.ckpt", "lightning_logs/version_0/c/last.ckpt"])
def test_one_file_is_complete_when_its_end_is_there(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"w": torch.zeros(1000)}, path)
    data = path.read_bytes()
    for end in (0, 10, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:end])
        assert whole(tmp_path) == [], end
    path.write_bytes(data)
    (found,) = whole(tmp_path)
    assert (found[0], *found[2:]) == (name, "files", True, True)


def test_weights_are_complete_when_all_tensors_are_there(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors(path)
    assert was_ended(path)
    data = path.read_bytes()
    for torn in (b"", data[:4], data[:20], data[:-1], data + b"x", b"\xff" * 8 + data[8:], data[:8] + b"[" * 200):
        path.write_bytes(torn)
        assert was_ended(path) is False, torn


def test_what_other_formats_say(tmp_path: Path) -> None:
    """A pickle ends with its stop; torch's old format, numbers alone and the rest say nothing."""
    pickled = torch.save({"x": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert pickled is None
    assert was_ended(tmp_path / "old.pt") is None
    for content, expected in ((b"\x80\x04N.", True), (b"\x80\x04N", False), (b"raw", None), (b"", None)):
        (tmp_path / "x").write_bytes(content)
        assert was_ended(tmp_path / "x") is expected
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="no regular file"):
        was_ended(tmp_path / "pipe")


def files(directory: Path, names: Sequence[str]) -> None:
    for name in names:
        states(directory, name)


def test_files_beside_each_other(tmp_path: Path) -> None:
    """Of one number together, all without a number together; ranks, shards and logs are no steps."""
    files(tmp_path, ["model_90.pt", "model_100.pt", "optimizer_100.pt", "best.pt", "last.pt"])
    files(tmp_path, ["x_5_rank0.pt", "x_5_rank1.pt"])
    (tmp_path / "log.txt").write_text("x" * 10_000)
    found = {units[0].series: units[0].names for units in survey(tmp_path).series()}
    assert found == {
        "model_#.pt": ("model_100.pt",),
        "optimizer_#.pt": ("optimizer_100.pt",),
        "*": ("best.pt", "last.pt"),
        "x_#_rank#.pt": ("x_5_rank0.pt", "x_5_rank1.pt"),
    }
    assert not next(one for one in whole(tmp_path) if one[1] == 5)[3], "each rank's own: at the same number only"


def test_directories_of_their_own(tmp_path: Path) -> None:
    """A number makes a directory one checkpoint, also if its files lie below; a temporary file makes it unfinished."""
    files(tmp_path, ["step_7/model.pt", "step_7/more/optimizer.pt", "iter_0000003/mp_rank_00/model_optim_rng.pt"])
    files(tmp_path, ["run1/ckpt.pt", "version_3/ckpt_2.pt"])
    assert {one[0]: one[1:3] for one in whole(tmp_path)} == {
        "step_7": (7, "directory"),
        "iter_0000003": (3, "directory"),
        "run1/ckpt.pt": (None, "files"),
        "version_3/ckpt_2.pt": (2, "files"),
    }
    (tmp_path / "step_7" / "more.tmp").touch()
    assert "step_7" not in [one[0] for one in whole(tmp_path)]


def test_only_what_matches_counts(tmp_path: Path) -> None:
    files(tmp_path, ["ckpt.pt", "odd/name.json", "odd/other.pt", "mine/a/b.pt"])
    assert [one[0] for one in whole(tmp_path, pattern="odd/*.json")] == ["odd/name.json"]
    assert [one[0] for one in whole(tmp_path, pattern="mine")] == ["mine"]
    assert sorted(survey(tmp_path, "mine").other) == ["ckpt.pt", "odd/name.json", "odd/other.pt"]


def test_a_trainers_unfinished_checkpoint_is_nobody_elses(tmp_path: Path) -> None:
    safetensors(tmp_path / "checkpoint-30" / "model.safetensors")
    states(tmp_path / "checkpoint-30", "training_args.bin")
    assert whole(tmp_path) == []


def test_links_are_noted_and_not_followed(tmp_path: Path) -> None:
    """Those that lead out are not, and one in a checkpoint that leads out of it makes it none."""
    files(tmp_path, ["step_7/model.pt", "a.pt"])
    (tmp_path / "latest").symlink_to("step_7")
    (tmp_path / "last.pt").symlink_to(tmp_path / "a.pt")
    (tmp_path / "out").symlink_to("/etc")
    (tmp_path / "loop").symlink_to("loop")
    found = survey(tmp_path)
    assert found.links == {"latest": "step_7", "last.pt": "a.pt", "loop": "loop"}
    (tmp_path / "step_7" / "same.pt").symlink_to("model.pt")
    step = next(units[0] for units in found.series() if units[0].number == 7)
    one = complete(tmp_path, step, 1)
    assert isinstance(one, Complete)
    assert one.links == (("step_7/same.pt", "step_7/model.pt"),)
    (tmp_path / "step_7" / "far.pt").symlink_to("../a.pt")
    with pytest.raises(CheckpointDamaged, match=r"far\.pt: NOT_A_FILE"):
        whole(tmp_path)


@pytest.mark.slow
def test_thousands_of_files_are_looked_at_and_millions_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "step_1").mkdir()
    for number in range(3000):
        (tmp_path / "step_1" / f"part-{number}.bin").write_bytes(b"x")
    assert [one[0] for one in whole(tmp_path)] == ["step_1"]
    monkeypatch.setattr(foreign, "MOST_ENTRIES", 2000)
    with pytest.raises(TooMany, match="more than 2,000 files"):
        survey(tmp_path)


@pytest.mark.parametrize("pattern", ["", "checkpoint-*"])
def test_of_a_run_of_weeks_the_newest_are_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    """However many there are, with whatever in them: a script without a session deletes none."""
    monkeypatch.setattr(foreign, "MOST_ENTRIES", 400)
    for number in range(10, 410, 10):
        files(tmp_path, [f"checkpoint-{number}/{name}" for name in (*"abcdefgh", "model.safetensors", "rng_state.pth")])
    found = survey(tmp_path, pattern)
    assert [unit.number for unit in found.series()[0]] == list(range(400, 400 - 10 * foreign.NEWEST, -10))
    # What ranks save beside one another is one checkpoint of several parts.
    for rank in range(40):
        files(tmp_path / "parts", [f"rank{rank}_step{step}/model.pt" for step in (1, 2)])
    ranks = [units for units in survey(tmp_path / "parts").series() if units[0].number is not None]
    assert sum(map(len, ranks)) == 80


class _OfTheirs:
    """Settings of the script's own, which nobody else can unpickle."""


@pytest.mark.parametrize(
    ("content", "number"),
    [
        ({"model": {"w": torch.zeros(3)}, "model_args": {"step": 9}, "iter_num": 70000, "config": {"step": 3}}, 70000),
        ({"epoch": 1, "global_step": 300, "loops": {"step": 1}}, 300),
        ({"optimizer": {"state": {0: {"step": 7}}}, "step": 12345678, "hyper_parameters": _OfTheirs()}, 12345678),
        ({"MODEL_STATE": {}, "EPOCHS_RUN": 3}, 3),
        ({"model": {"step": 5}}, None),
        ({"w": torch.zeros(3)}, None),
        ({"step": torch.tensor(5)}, None),
        ({"step": True}, None),
        ([1, 2], None),
    ],
)
def test_numbers_are_read_without_unpickling(tmp_path: Path, content: object, number: int | None) -> None:
    """At the top only: an optimizer counts its own steps."""
    torch.save(content, tmp_path / "x.pt")
    assert number_in(tmp_path / "x.pt") == number


@pytest.mark.parametrize(
    ("files", "number"),
    [
        ([("checkpoint.pth.tar", 13, 1000, 2), ("model_best.pth.tar", 10, 1000, 1)], 13),
        ([("checkpoint.pth.tar", 13, 1000, 2), ("model_best.pth.tar", 10, 9000, 1)], 13),
        ([("last.pt", 100, 1000, 1), ("best.pt", 150, 1000, 2)], 100),
        ([("checkpoint.pth.tar", None, 1000, 2), ("model_best.pth.tar", 10, 1000, 1)], 10),
        ([("a.pt", 13, 100_000, 2), ("b.pt", 10, 100_000, 1)], 13),
        ([("a.pt", 13, 100_000, 2), ("b.pt", 10, 100_100, 1)], 13),
        ([("model.pt", 13, 100_000, 1), ("scheduler.pt", 2, 10, 2)], 13),
        ([("model.pt", None, 100_000, 1), ("scheduler.pt", 2, 10, 2)], 2),
    ],
)
def test_the_number_of_several_files_is_that_of_the_one_that_a_script_goes_on_from(
    tmp_path: Path, files: list[tuple[str, int | None, int, int]], number: int | None
) -> None:
    """Else that of the largest, of several about as large of the one that was written last."""
    for name, epoch, floats, written in files:
        torch.save({"w": torch.zeros(floats)} | ({} if epoch is None else {"epoch": epoch}), tmp_path / name)
        os.utime(tmp_path / name, (written, written))
    ((unit,),) = survey(tmp_path).series()
    one = complete(tmp_path, unit, 1)
    assert isinstance(one, Complete)
    assert number_of_unit(tmp_path, one) == number


def test_files_that_are_no_checkpoints_have_no_number(tmp_path: Path) -> None:
    for content in (b"", b"PK\x03\x04", b"\x80\x02}q"):
        (tmp_path / "x.pt").write_bytes(content)
        assert number_in(tmp_path / "x.pt") is None
    states(tmp_path, "y.pt")
    assert number_in(tmp_path / "y.pt") is None


def test_flash_checkpoints_are_complete_when_their_note_names_them(tmp_path: Path) -> None:
    """DLRover's saver writes it after all ranks' files; nothing has to stop changing for that."""
    states(tmp_path / "20", "rank_0.pt")
    assert whole(tmp_path) == [("20", 20, "directory", True, False)], "of the first save nobody knows"
    note = tmp_path / "dlrover_latest.txt"
    note.write_text("20", encoding="ascii")
    assert whole(tmp_path) == [("20", 20, "directory", True, True)]
    states(tmp_path / "40", "rank_0.pt", "rank_1.pt")
    assert whole(tmp_path) == [], "40 is being written"
    note.write_text("40", encoding="ascii")
    assert whole(tmp_path) == [("40", 40, "directory", False, True)]


def test_deepspeed_without_zero_is_complete_when_latest_says_so(tmp_path: Path) -> None:
    """Rank 0 writes that last. A kill in the middle of it leaves it empty, and younger than what it was to name."""
    states(tmp_path, "global_step20/mp_rank_00_model_states.pt")
    assert whole(tmp_path) == []
    (tmp_path / "latest").write_text("global_step10")
    assert whole(tmp_path) == []
    (tmp_path / "latest").write_text("global_step20")
    assert whole(tmp_path)[0][:3] == ("global_step20", 20, "deepspeed")
    (tmp_path / "latest").write_text("")
    assert whole(tmp_path)[0][:3] == ("global_step20", 20, "deepspeed")
    os.utime(tmp_path / "latest", (1, 1))
    assert whole(tmp_path) == [], "it was empty before"


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8, b"\0" * 40])
def test_an_archive_whose_middle_is_missing_is_not_sound(tmp_path: Path, damage: bytes) -> None:
    """What is compressed cannot be read at all then."""
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data.pkl", random.Random(1).randbytes(5000).hex())
    with open(path, "r+b") as file:
        file.seek(30 + len("data.pkl"))  # behind the header of its only file
        file.write(damage)
    assert is_sound(path) is not bool(damage)
