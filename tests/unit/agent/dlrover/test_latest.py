"""What is read of a checkpoint directory of DLRover's after a kill, and what is written there."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dalsegno.agent.dlrover import latest


def save(directory: Path, name: str, ranks: int = 2, *, torn: bool = False) -> None:
    """The files of one checkpoint, of ZeRO 1 if there are several ranks."""
    (directory / name).mkdir(parents=True)
    files = ["mp_rank_00_model_states.pt"]
    files += [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(ranks if ranks > 1 else 0)]
    for file in files:
        with zipfile.ZipFile(directory / name / file, "w") as archive:
            archive.writestr("data.pkl", b"x" * 100)
    if torn:
        path = directory / name / files[-1]
        path.write_bytes(path.read_bytes()[:60])


def note(directory: Path, of_deepspeed: str | None, of_dlrover: str | None) -> None:
    """`latest` and `dlrover_latest.txt`."""
    for name, text in (("latest", of_deepspeed), ("dlrover_latest.txt", of_dlrover)):
        if text is not None:
            (directory / name).write_text(text, encoding="ascii")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("left", ["", "30"])
def test_latest_names_the_last_save_again(tmp_path: Path, left: str, ranks: int) -> None:
    """It was empty, or named a save to memory: now it names what DLRover's saver has finished."""
    for name in ("9", "10", "20"):
        save(tmp_path, name, ranks)
    note(tmp_path, left, "10")
    assert "names 10 now" in latest.mend(tmp_path)
    assert (tmp_path / "latest").read_text(encoding="ascii") == "10"
    assert latest.mend(tmp_path) == ""
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_an_empty_directory_is_no_checkpoint(tmp_path: Path) -> None:
    """DeepSpeed makes one for each save to memory."""
    save(tmp_path, "10")
    (tmp_path / "12").mkdir()
    note(tmp_path, "12", "10")
    assert "named 12, which is not all there" in latest.mend(tmp_path)
    assert (tmp_path / "latest").read_text(encoding="ascii") == "10"


def test_a_save_that_was_under_way_is_not_named(tmp_path: Path) -> None:
    """Under DLRover's own launcher DeepSpeed names it before the saver has written it."""
    save(tmp_path, "10")
    save(tmp_path, "20")
    stage = tmp_path / "._dlrover_ckpt_stage" / "20.done"
    stage.mkdir(parents=True)
    note(tmp_path, "20", "10")
    assert "names 10 now" in latest.mend(tmp_path)
    # Killed behind the commit, the saver leaves the same directory.
    note(tmp_path, "20", "20")
    assert latest.mend(tmp_path) == ""
    note(tmp_path, "", "20")
    assert "names 20 now" in latest.mend(tmp_path)


@pytest.mark.parametrize("noted", ["", None, "20", "../x"])
def test_where_no_note_helps_the_newest_complete_one_is_named(tmp_path: Path, noted: str | None) -> None:
    """Not one that is torn, whose rank 0 is missing, or that the savers of all nodes have not finished."""
    for name in ("9", "10"):
        save(tmp_path, name)
    save(tmp_path, "11")
    (tmp_path / "._dlrover_ckpt_stage" / "11.done").mkdir(parents=True)
    save(tmp_path, "12", torn=True)
    save(tmp_path, "13")
    (tmp_path / "13" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    note(tmp_path, "", noted)
    assert "names 10 now" in latest.mend(tmp_path)
    assert (tmp_path / "latest").read_text(encoding="ascii") == "10"


@pytest.mark.parametrize(("named", "where"), [("10", "10"), ("global_step7", "global_step7"), ("../other", "../other")])
def test_a_latest_that_names_something_stays(tmp_path: Path, named: str, where: str) -> None:
    """Whatever it is: of another framework, of another number of ranks, or the run's resume point."""
    directory = tmp_path / "saves"
    save(directory, "20")
    save(directory, where)
    note(directory, named, "20")
    assert latest.mend(directory) == ""
    assert (directory / "latest").read_text(encoding="ascii") == named


def test_where_nothing_was_saved_nothing_is_named(tmp_path: Path) -> None:
    """A kill before the first save to the disk: the next start begins at step 0, as DeepSpeed does without the file."""
    note(tmp_path, "", None)
    assert "it is removed" in latest.mend(tmp_path)
    assert not (tmp_path / "latest").exists()
    assert latest.mend(tmp_path) == ""


def test_what_is_there_but_incomplete_is_left_alone(tmp_path: Path) -> None:
    """A run with saves does not begin anew in silence."""
    save(tmp_path, "10", torn=True)
    note(tmp_path, "", "")
    assert latest.mend(tmp_path) == ""
    assert (tmp_path / "latest").read_text(encoding="ascii") == ""


class Storage:
    """As the library's."""

    def write(self, content: Any, path: Any) -> None:
        with open(path, "wb" if isinstance(content, bytes) else "w") as file:
            file.write(content)
            raise KeyboardInterrupt("killed before it is on the disk")

    def safe_rmtree(self, path: str) -> None:
        Path(path).rmdir()


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Storage:
    """A worker's, whose library is changed."""
    monkeypatch.setattr(Storage, "write", Storage.write)
    latest._write_whole(SimpleNamespace(PosixDiskStorage=Storage))  # type: ignore[arg-type]
    return Storage()


def test_notes_are_replaced_and_not_cut_off(tmp_path: Path, storage: Storage) -> None:
    """So a kill leaves what was there. Other files are the library's: it counts them in their directories."""
    for name in ("latest", "dlrover_latest.txt", "latest_checkpointed_iteration.txt"):
        (tmp_path / name).write_text("10", encoding="ascii")
        storage.write("20", str(tmp_path / name))
        assert (tmp_path / name).read_text(encoding="ascii") == "20"
    for name, content in (("0", "done"), (".metadata", b"x")):
        with pytest.raises(KeyboardInterrupt):
            storage.write(content, tmp_path / name)


class Checkpointer:
    """As the library's, as far as it writes `latest`."""

    def __init__(self, directory: Path) -> None:
        self.checkpoint_dir, self.storage = str(directory), Storage()
        self.engine = SimpleNamespace(global_rank=0)
        self.asked: list[Any] = []

    def _save_checkpoint_to_memory(
        self, save_dir: str, tag: Any = None, client_state: Any = None, save_latest: bool = True
    ) -> None:
        self.asked.append((tag, client_state, save_latest))
        (Path(save_dir) / str(tag)).mkdir(exist_ok=True)
        self._update_tracer_file(tag)

    _save_checkpoint_to_storage = _save_checkpoint_to_memory

    def _update_tracer_file(self, tag: Any) -> None:
        raise AssertionError("it writes `latest`, or removes it")

    def load_checkpoint(self, load_dir: str, tag: Any = None, **named: Any) -> str:
        return str(tag or (Path(load_dir) / "latest").read_text(encoding="ascii"))


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Checkpointer]:
    """Makes a worker's, whose library is changed."""
    for name in ("_save_checkpoint_to_memory", "_save_checkpoint_to_storage", "_update_tracer_file", "load_checkpoint"):
        monkeypatch.setattr(Checkpointer, name, getattr(Checkpointer, name))
    module = ModuleType("deepspeed")
    module.DeepSpeedCheckpointer = Checkpointer  # type: ignore[attr-defined]
    latest._name_what_is_whole(module)
    return Checkpointer


def test_only_the_saver_writes_latest(tmp_path: Path, changed: Callable[[Path], Checkpointer]) -> None:
    """The empty directory of a save to memory goes, but not what `latest` names."""
    note(tmp_path, "10", None)
    save(tmp_path, "10")
    checkpointer = changed(tmp_path)
    checkpointer._save_checkpoint_to_memory(str(tmp_path), 12, {"a": 1})
    checkpointer._save_checkpoint_to_memory(str(tmp_path), tag=10)
    checkpointer._save_checkpoint_to_storage(str(tmp_path), 13, save_latest=True)
    assert checkpointer.asked == [(12, {"a": 1}, False), (10, {}, False), (13, {}, False)]
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "10"}
    assert (tmp_path / "latest").read_text(encoding="ascii") == "10"


def test_a_load_without_a_tag_mends_first(
    tmp_path: Path, changed: Callable[[Path], Checkpointer], capsys: pytest.CaptureFixture[str]
) -> None:
    """One rank says so. A tag of the script's own is its business."""
    save(tmp_path, "10")
    note(tmp_path, "", "10")
    checkpointer = changed(tmp_path)
    assert checkpointer.load_checkpoint(str(tmp_path), "7") == "7"
    assert checkpointer.load_checkpoint(str(tmp_path)) == "10"
    assert "names 10 now" in capsys.readouterr().out
