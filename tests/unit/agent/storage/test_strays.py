"""What a script writes into the checkpoint that it resumed from."""

from __future__ import annotations

import os
import queue
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.storage import adoption, job_directory, save_dir
from dalsegno.agent.storage.save_dir import Adoption
from dalsegno.agent.storage.strays import set_aside, strays
from dalsegno.agent.storage.untaken import LARGE_BYTES
from dalsegno.elastic.checkpoint import Manifest, inventory, verify, verify_listing
from dalsegno.elastic.universal import EnvironmentFailed, conversion
from dalsegno.protos import control_pb2, worker_pb2

from .test_adoption import ORIGIN, begun, sealed_step, states, world


def resumed(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> control_pb2.World:
    """A world that resumes from what the script had saved in the one before."""
    states(run_dir / "e1", "step_10/model.pt")
    monkeypatch.setattr(adoption, "UNSURE_LOOKS", 1)
    taken, heard = begun(run_dir, monkeypatch, world(1))
    assert sealed_step(heard.get(timeout=20)) == 10
    taken.close()
    (sealed,) = inventory(run_dir)
    made = world(2, sealed.name)
    made.resume.form = control_pb2.FORM_SHARDED
    made.resume.source.step, made.resume.source.ref.digest = 10, sealed.digest
    return made


def placed(run_dir: Path, of: control_pb2.World) -> tuple[worker_pb2.BadCheckpoint | None, list[str]]:
    """Its workers are about to start: the damage of its resume point, and what people are told."""
    done: queue.Queue[worker_pb2.BadCheckpoint | None] = queue.Queue()
    heard: queue.Queue[ev.Event] = queue.Queue()
    adopting = Adoption(["${save_dir}", "${resume_dir}"], heard.put)
    assert adopting.place(run_dir, of, lambda problem, damage: done.put(damage), first=True)
    damage = done.get(timeout=20)
    adopting.close()
    said = [heard.get_nowait() for _ in range(heard.qsize())]
    return damage, [event.text for event in said if isinstance(event, ev.Remark)]


def test_what_was_written_there_is_set_aside_before_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, folders and links. The checkpoint is what was sealed, and the script's words are kept."""
    of = resumed(tmp_path, monkeypatch)
    sealed = tmp_path / of.resume.source.ref.name
    (sealed / "step_10" / "logs").mkdir()
    (sealed / "step_10" / "logs" / "a.log").write_text("words")
    (sealed / "latest").symlink_to("step_10")
    damage, said = placed(tmp_path, of)
    assert damage is None
    verify(sealed, Manifest.read(sealed))
    assert (tmp_path / "e2" / ".dalsegno-aside" / "step_10" / "logs" / "a.log").read_text() == "words"
    assert said == [
        f"the script wrote latest, step_10/logs/a.log into {sealed.name}, from which it resumed: set aside in "
        "e2/.dalsegno-aside. It may read what ${resume_dir} names, and saves below ${save_dir}"
    ]
    assert sorted(path.name for path in (sealed / "step_10").iterdir()) == ["model.pt"]


@pytest.mark.parametrize("more", ["step_10/logs/a.log", "step_10/latest", "step_20/model.pt"])
def test_the_master_has_nothing_found_damaged_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    """Whoever verifies or converts the checkpoint before that reads what was sealed, and nothing else."""
    of = resumed(tmp_path, monkeypatch)
    ref = of.resume.source.ref
    sealed = tmp_path / ref.name
    (sealed / more).parent.mkdir(exist_ok=True)
    if more.endswith("latest"):
        (sealed / more).symlink_to("model.pt")
    else:
        (sealed / more).write_text("words")
    assert job_directory._damage_of(sealed, ref.digest, 1, lambda count: None) is None
    verify_listing(sealed, Manifest.read(sealed))
    assert conversion.verified(sealed, ref.digest, lambda count: None).name == ref.name


def test_more_states_of_ranks_are_not_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be taken for a part of it. The checkpoint is not bad: the next start sets them aside."""
    of = resumed(tmp_path, monkeypatch)
    sealed = tmp_path / of.resume.source.ref.name
    (sealed / "global_step20").mkdir()
    (sealed / "global_step20" / "mp_rank_00_model_states.pt").write_text("words")
    with pytest.raises(EnvironmentFailed, match=r"the script has put global_step20/mp_rank_00_model_states\.pt into"):
        conversion.verified(sealed, of.resume.source.ref.digest, lambda count: None)


def test_what_cannot_be_set_aside_is_found_before_the_script_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script would load it."""
    of = resumed(tmp_path, monkeypatch)
    sealed = tmp_path / of.resume.source.ref.name
    (sealed / "more").write_text("words")

    def fails(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(save_dir, "set_aside", fails)
    damage, _ = placed(tmp_path, of)
    assert damage is not None
    assert damage.file == "more"


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        (lambda path: path.unlink(), "MISSING_FILE"),
        (lambda path: path.rename(path.parent / "moved") and path.symlink_to("moved"), "NOT_A_FILE"),
        (lambda path: path.write_bytes(b""), "WRONG_SIZE"),
        (lambda path: shutil.rmtree(path.parent), "MISSING_FILE"),
    ],
)
def test_each_other_damage_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], object], reason: str
) -> None:
    """Of what was sealed, with or without more beside it."""
    of = resumed(tmp_path, monkeypatch)
    ref = of.resume.source.ref
    (tmp_path / ref.name / "more").write_text("words")
    harm(tmp_path / ref.name / "step_10" / "model.pt")
    damage = job_directory._damage_of(tmp_path / ref.name, ref.digest, 1, lambda count: None)
    assert damage is not None
    assert damage.reason.name == reason


def test_what_was_sealed_and_changed_is_damaged_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that saves over what it resumed from."""
    of = resumed(tmp_path, monkeypatch)
    sealed = tmp_path / of.resume.source.ref.name
    (sealed / "step_10" / "model.pt").write_bytes(b"another one")
    damage, said = placed(tmp_path, of)
    assert damage is not None
    assert (damage.name, said) == (sealed.name, [])


def test_a_script_that_saves_where_it_resumed_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is taken there. It is said while the script is at work, and once; a log is no save."""
    of = resumed(tmp_path, monkeypatch)
    sealed = tmp_path / of.resume.source.ref.name
    taken, heard = begun(tmp_path, monkeypatch, of, ORIGIN)
    (sealed / "run.log").write_text("words")
    (sealed / "step_20").mkdir()
    (sealed / "step_20" / "model.pt").write_bytes(bytes(LARGE_BYTES))
    said = heard.get(timeout=20)
    assert isinstance(said, ev.Remark)
    assert said.text.startswith(f"the script saved step_20/model.pt into {sealed.name}, from which it resumed")
    os.utime(sealed / "step_20" / "model.pt")
    states(tmp_path / "e2", "step_30/model.pt")
    assert sealed_step(heard.get(timeout=20)) == 30
    taken.close()


def large(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(1 << 20))


def test_a_script_that_saves_into_an_earlier_epochs_directory_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """YOLO's path is in what it resumed from. Logs and small files tell nothing, nor does what was there before."""
    of = resumed(tmp_path, monkeypatch)
    large(tmp_path / "e1" / "x" / "weights" / "best.pt")
    monkeypatch.setattr("dalsegno.agent.storage.elsewhere._EVERY_SECONDS", 0.02)
    taken, heard = begun(tmp_path, monkeypatch, of, ORIGIN)
    taken.settle(20)
    large(tmp_path / "e1" / "x" / "events.out.tfevents.1")
    states(tmp_path / "e1", "x/small.pt")
    taken.settle(20)
    large(tmp_path / "e1" / "x" / "weights" / "last.pt")
    said = heard.get(timeout=20)
    assert isinstance(said, ev.Remark)
    assert said.text == (
        "x/weights/last.pt was saved into e1, the directory of an earlier epoch, where nothing is taken: the script "
        "has that path from what it resumed from; it must save below ${save_dir}"
    )
    large(tmp_path / "e1" / "x" / "weights" / "last.pt")
    states(tmp_path / "e2", "step_30/model.pt")
    assert sealed_step(heard.get(timeout=20)) == 30
    taken.close()


def test_a_script_that_saves_where_it_should_may_write_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it writes into an earlier epoch's directory, its checkpoints are taken."""
    of = resumed(tmp_path, monkeypatch)
    monkeypatch.setattr("dalsegno.agent.storage.elsewhere._EVERY_SECONDS", 0.02)
    taken, heard = begun(tmp_path, monkeypatch, of, ORIGIN)
    for step in (30, 40):
        large(tmp_path / "e2" / f"step_{step}" / "optimizer.bin")
        states(tmp_path / "e2", f"step_{step}/model.pt")
        assert sealed_step(heard.get(timeout=20)) == step
        large(tmp_path / "e1" / "last.pt")
    taken.close()


def test_nothing_of_a_checkpoint_itself_is_a_stray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = resumed(tmp_path, monkeypatch)
    sealed = tmp_path / of.resume.source.ref.name
    listed = [entry.path for entry in Manifest.read(sealed).files]
    assert strays(sealed, listed) == []
    assert set_aside(sealed, listed, tmp_path / "e2") == []
    assert not (tmp_path / "e2").exists()
    with pytest.raises(FileNotFoundError):
        strays(tmp_path / "gone", listed)
