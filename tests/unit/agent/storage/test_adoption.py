"""Which checkpoints of a script are complete, and what becomes of them (the whole way: tests/integration)."""

from __future__ import annotations

import itertools
import os
import queue
import shutil
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.storage import adoption, taking
from dalsegno.agent.storage.adoption import Origin
from dalsegno.agent.storage.foreign import survey
from dalsegno.agent.storage.layouts import Complete, complete
from dalsegno.agent.storage.save_dir import Adoption, prepare
from dalsegno.elastic.checkpoint import Manifest, verify
from dalsegno.elastic.universal import EnvironmentFailed, convert
from dalsegno.protos import control_pb2
from tests.unit.agent.storage.test_storage import make_checkpoint

ORIGIN = Origin("job", 1, 2, 1, 4)


def states(path: Path, *names: str) -> None:
    """Files as `torch.save` ends them."""
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(path / name, "w") as archive:
            archive.writestr("data.pkl", name)


def found(directory: Path, world_size: int = 2) -> list[tuple[str, int | None, str, bool]]:
    units = [unit for series in survey(directory).series() for unit in series]
    every = [complete(directory, unit, world_size) for unit in units]
    whole = [one for one in every if isinstance(one, Complete)]
    return [(one.unit.path, one.unit.number, one.strategy, one.any_world_size) for one in whole]


ZERO_1 = ["mp_rank_00_model_states.pt", *(f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 1))]
ZERO_3 = [f"zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt" for rank in (0, 1) for kind in ("model", "optim")]


@pytest.mark.parametrize("names", [ZERO_1, ZERO_3], ids=["zero1", "zero3"])
def test_deepspeeds_is_complete_with_the_files_of_all_ranks(tmp_path: Path, names: list[str]) -> None:
    """Not without any one of them, and not while one is being written."""
    path = tmp_path / "global_step20"
    path.mkdir()
    for name in names:
        assert found(tmp_path) == []
        states(path, name)
    assert found(tmp_path) == [("global_step20", 20, "deepspeed", False)]
    last = path / names[-1]
    os.truncate(last, last.stat().st_size - 10)
    assert found(tmp_path) == []


def test_stage_0_has_one_file(tmp_path: Path) -> None:
    """Which other stages have first, so it takes `latest` to tell."""
    states(tmp_path / "global_step7", ZERO_1[0])
    assert found(tmp_path) == []
    (tmp_path / "latest").write_text("global_step7")
    assert found(tmp_path) == [("global_step7", 7, "deepspeed", True)]


@pytest.mark.parametrize(
    "other", ["mp_rank_01_model_states.pt", "layer_1_expert_0_mp_rank_00_model_states.pt", "layer_00-model_states.pt"]
)
def test_beyond_data_parallelism_nobody_can_tell_when_it_is_complete(tmp_path: Path, other: str) -> None:
    """Of the files of a save how many there must be is not in their names; and it would not load at any world size."""
    states(tmp_path / "global_step7", ZERO_1[0], other)
    (tmp_path / "latest").write_text("global_step7")
    with pytest.raises(ValueError, match=f"{other}: tensor or pipeline parallelism, or experts"):
        found(tmp_path)


def test_transformers_is_complete_with_the_state_of_the_trainer_and_of_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint-30"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"x")
    states(path, "rng_state_0.pth")
    assert found(tmp_path) == []
    (path / "trainer_state.json").write_text("{}")
    assert found(tmp_path) == []
    (path / "rng_state_1.pth").write_bytes(b"not all of it")
    assert found(tmp_path) == []
    states(path, "rng_state_1.pth")
    assert found(tmp_path) == [("checkpoint-30", 30, "transformers", True)]
    states(path / "global_step30", *ZERO_1[:2])
    assert found(tmp_path) == []
    states(path / "global_step30", *ZERO_1)
    assert found(tmp_path) == [("checkpoint-30", 30, "transformers-deepspeed", False)]


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("checkpoint-30", ["trainer_state.json", *(f"rng_state_{rank}.pth" for rank in range(3))]),
        ("global_step30", [ZERO_1[0], *(f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in range(3))]),
        ("step_30", ["model.safetensors", *(f"random_states_{rank}.pkl" for rank in range(3))]),
    ],
    ids=["transformers", "deepspeed", "accelerate"],
)
def test_a_worker_that_is_a_launcher_has_ranks_of_its_own(tmp_path: Path, where: str, names: list[str]) -> None:
    """How many, its files say: at first they must stand still, and from then on all of them must be there."""
    states(tmp_path / where, *names[:-1])
    if where == "step_30":
        (tmp_path / where / names[0]).write_bytes((4).to_bytes(8, "little") + b"{}  ")
    (unit,) = [unit for series in survey(tmp_path).series() for unit in series]
    one = complete(tmp_path, unit, 1)
    assert isinstance(one, Complete)
    assert (one.sure, one.ranks) == (False, 2)
    assert isinstance(complete(tmp_path, unit, 1, 2), Complete)
    assert isinstance(complete(tmp_path, unit, 1, 3), str)
    assert isinstance(complete(tmp_path, unit, 3), str)
    states(tmp_path / where, names[-1])
    for seen, sure in ((0, False), (2, False), (3, True)):
        one = complete(tmp_path, unit, 1, seen)
        assert isinstance(one, Complete)
        assert (one.sure, one.ranks) == (sure, 3)


def test_a_trainers_numbered_file_is_not_its_only_one(tmp_path: Path) -> None:
    """A Trainer alone gives it no number."""
    path = tmp_path / "checkpoint-30"
    states(path, "trainer_state.json", "rng_state_0.pth")
    assert found(tmp_path, 1) == []
    (path / "rng_state_0.pth").rename(path / "rng_state.pth")
    assert found(tmp_path, 1) == [("checkpoint-30", 30, "transformers", True)]


def world(epoch: int, resume: str = "", universal: str = "") -> control_pb2.World:
    made = control_pb2.World(epoch=epoch, run_id="run-0001")
    if resume:
        made.resume.source.ref.name, made.resume.source.ref.digest, made.resume.source.step = resume, "0" * 64, 20
        made.resume.form = control_pb2.FORM_SHARDED
    if universal:
        made.resume.form, made.resume.universal.name = control_pb2.FORM_UNIVERSAL, universal
    return made


def test_each_epoch_has_its_own_directory_which_leads_to_the_resume_point(tmp_path: Path) -> None:
    assert [*prepare(tmp_path, world(1)).iterdir()] == []
    second = prepare(tmp_path, world(2, "step-20.e1.1", "step-20.e1.1.universal.3"))
    assert second == tmp_path / "e2"
    assert (second / "latest").read_text() == "../step-20.e1.1"
    assert (second / "latest_universal").read_text() == "../step-20.e1.1.universal.3"
    assert prepare(tmp_path, world(2, "step-20.e1.1", "step-20.e1.1.universal.3")) == second, "every agent does it"


def test_what_the_script_saves_is_sealed_once_under_our_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is newer than the resume point; and the script's own may go, or be written again."""
    monkeypatch.setattr(adoption, "LOOK_EVERY_SECONDS", 0.02)
    heard: queue.Queue[ev.Event] = queue.Queue()
    make_checkpoint(tmp_path, "step-20.e1.1")
    taken = Adoption(["--out=${save_dir}"], heard.put)
    arguments = taken.begin(tmp_path, world(2, "step-20.e1.1"), ORIGIN, ["train.py", "--out=${save_dir}"], first=True)
    assert arguments == ("train.py", f"--out={tmp_path / 'e2'}")
    states(tmp_path / "e2" / "global_step20", *ZERO_1)
    states(tmp_path / "e2" / "global_step40", *ZERO_1)
    event = heard.get(timeout=20)
    assert isinstance(event, ev.WorkerSaid)
    sealed = event.message.sealed
    assert (event.epoch, sealed.name, sealed.step) == (2, "step-40.e2.1", 40)
    manifest = Manifest.read(tmp_path / sealed.name)
    assert (manifest.digest, manifest.shape.world_size) == (sealed.digest, 2)
    assert manifest.resumed_from is not None
    for name in ZERO_1:
        (tmp_path / "e2" / "global_step40" / name).unlink()
    verify(tmp_path / sealed.name, manifest)
    states(tmp_path / "e2" / "global_step60", *ZERO_1)
    event = heard.get(timeout=20)
    assert isinstance(event, ev.WorkerSaid)
    assert event.message.sealed.step == 60
    taken.close()
    assert heard.empty()


@pytest.mark.slow
def test_what_cannot_be_sealed_is_said_once_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try has the master asked for room, which may be deleting something at the first one."""
    monkeypatch.setattr(adoption, "LOOK_EVERY_SECONDS", 0.02)
    plain, calls = adoption.adopt, 0

    def full_at_first(*args: object) -> Manifest:
        nonlocal calls
        calls += 1
        if calls <= 3:
            raise OSError(28, "No space left on device")
        return plain(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(adoption, "adopt", full_at_first)
    heard: queue.Queue[ev.Event] = queue.Queue()
    refused: list[str] = []
    taken = Adoption(["${save_dir}"], heard.put, full=refused.append)
    taken.begin(tmp_path, world(1), ORIGIN, [], first=True)
    states(tmp_path / "e1" / "global_step10", *ZERO_1)
    problem, event = heard.get(timeout=20), heard.get(timeout=20)
    assert isinstance(problem, ev.ManifestRead)
    assert "No space left on device: the run's copy of it takes as much room again; make room" in problem.message
    assert isinstance(event, ev.WorkerSaid)
    taken.close()
    assert refused == ["[Errno 28] No space left on device"] * 3, "who makes room hears of each try"


def begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: control_pb2.World, origin: Origin = ORIGIN
) -> tuple[Adoption, queue.Queue[ev.Event]]:
    """Looks, quickly, at what is below ``e<epoch>``."""
    monkeypatch.setattr(adoption, "LOOK_EVERY_SECONDS", 0.02)
    heard: queue.Queue[ev.Event] = queue.Queue()
    taken = Adoption(["${save_dir}"], heard.put)
    taken.begin(tmp_path, world, origin, [], first=True)
    return taken, heard


def sealed_step(event: ev.Event) -> int:
    assert isinstance(event, ev.WorkerSaid), event
    return event.message.sealed.step


def test_what_a_launchers_ranks_save_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent has one worker, and two ranks below it save; the second time without waiting for long."""
    taken, heard = begun(tmp_path, monkeypatch, world(2), Origin("job", 1, 1, 1, 1))
    for step, looks in ((30, adoption.UNSURE_LOOKS), (60, 10**6)):
        monkeypatch.setattr(adoption, "UNSURE_LOOKS", looks)
        states(tmp_path / "e2" / f"checkpoint-{step}", "trainer_state.json", "rng_state_0.pth", "rng_state_1.pth")
        assert sealed_step(heard.get(timeout=20)) == step
    taken.close()


def test_what_is_written_over_where_it_lies_stays_as_it_was_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many scripts save the last step twice, once on schedule and once at the end; torch truncates what is there."""
    taken, heard = begun(tmp_path, monkeypatch, world(1))
    states(tmp_path / "e1" / "global_step40", *ZERO_1)
    assert sealed_step(heard.get(timeout=20)) == 40
    states(tmp_path / "e1" / "global_step40", *ZERO_1)
    os.truncate(tmp_path / "e1" / "global_step40" / ZERO_1[0], 0)
    verify(tmp_path / "step-40.e1.1", Manifest.read(tmp_path / "step-40.e1.1"))
    taken.close()


def test_a_mount_that_counts_no_names_has_copies_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """sshfs has hard links, and says of every file that it has one name: links were taken for copies."""

    class Uncounted:
        def __init__(self, found: os.stat_result) -> None:
            self._found = found

        def __getattr__(self, name: str) -> object:
            return 1 if name == "st_nlink" else getattr(self._found, name)

    stat = os.stat
    monkeypatch.setattr(taking.os, "stat", lambda path, **more: Uncounted(stat(path, **more)))
    taken, heard = begun(tmp_path, monkeypatch, world(1))
    states(tmp_path / "e1" / "global_step40", *ZERO_1)
    assert sealed_step(heard.get(timeout=20)) == 40
    for name in ZERO_1:
        (tmp_path / "e1" / "global_step40" / name).write_bytes(b"in place")
    verify(tmp_path / "step-40.e1.1", Manifest.read(tmp_path / "step-40.e1.1"))
    taken.close()


@pytest.mark.parametrize("links", [True, False])
def test_what_changes_while_it_is_copied_is_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    """With hard links as without: half of one save and half of the next is neither."""

    def none(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", none)
    copier = "copy_file" if links else "place_file"
    plain: Callable[[Path, Path], None] = getattr(taking, copier)
    path, copied = tmp_path / "e1" / "global_step40", 0

    def disturbed(source: Path, target: Path) -> None:
        nonlocal copied
        plain(source, target)
        if not copied:
            os.utime(path / source.name, ns=(1, 1))
        copied += 1

    monkeypatch.setattr(taking, copier, disturbed)
    taken, heard = begun(tmp_path, monkeypatch, world(1))
    states(path, *ZERO_1)
    assert sealed_step(heard.get(timeout=20)) == 40
    assert copied > len(ZERO_1)
    assert sorted(one.name for one in tmp_path.iterdir()) == [".sealed", "e1", "step-40.e1.1"]
    assert sorted(one.name for one in (tmp_path / "step-40.e1.1").iterdir()) == sorted(["MANIFEST.json", *ZERO_1])
    taken.close()


@pytest.mark.slow
def test_a_full_disk_is_not_filled_with_what_was_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not fit is gone before it is tried again."""
    plain, tries = taking.describe, 0

    def full_at_first(directory: Path) -> object:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise OSError(28, "No space left on device")
        return plain(directory)

    monkeypatch.setattr(taking, "describe", full_at_first)
    taken, heard = begun(tmp_path, monkeypatch, world(1))
    states(tmp_path / "e1" / "global_step10", *ZERO_1)
    assert isinstance(heard.get(timeout=20), ev.ManifestRead)
    assert sealed_step(heard.get(timeout=20)) == 10
    assert sorted(one.name for one in tmp_path.iterdir()) == [".sealed", "e1", "step-10.e1.1"]
    taken.close()


def test_one_that_cannot_be_taken_keeps_no_other_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link in it, or a name that is no text: said once, and the next ones are the run's."""
    (tmp_path / "e1").mkdir()
    for step, make in ((10, lambda path: path.symlink_to("x")), (20, lambda path: path.write_bytes(b""))):
        states(tmp_path / "e1" / f"global_step{step}", *ZERO_1)
        make(tmp_path / "e1" / f"global_step{step}" / os.fsdecode(b"odd\xff"))
    taken, heard = begun(tmp_path, monkeypatch, world(1))
    assert {event.name for event in (heard.get(timeout=20), heard.get(timeout=20))} == {  # type: ignore[union-attr]
        "global_step10",
        "global_step20",
    }
    states(tmp_path / "e1" / "global_step30", *ZERO_1)
    assert sealed_step(heard.get(timeout=20)) == 30
    taken.close()


def test_the_newest_is_taken_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying may take longer than a script trains between two saves: what is older is not waited for."""
    for step in (10, 20, 30):
        states(tmp_path / "e1" / f"global_step{step}", *ZERO_1)
    taken, heard = begun(tmp_path, monkeypatch, world(1))
    assert sealed_step(heard.get(timeout=20)) == 30
    states(tmp_path / "e1" / "global_step40", *ZERO_1)
    assert sealed_step(heard.get(timeout=20)) == 40
    taken.close()


def deepspeeds(directory: Path, step: int) -> None:
    states(directory / f"global_step{step}", *ZERO_1)


def flash(directory: Path, step: int) -> None:
    states(directory / str(step), "rank_0.pt")
    (directory / "dlrover_latest.txt").write_text(str(step), encoding="ascii")


def numbered(directory: Path, step: int) -> None:
    states(directory, f"model_{step}.pt")


@pytest.mark.slow
@pytest.mark.parametrize("save", [deepspeeds, flash, numbered])
def test_a_script_that_saves_all_the_time_is_taken_while_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[Path, int], None]
) -> None:
    """Its newest is never older than a look; the one before stands still."""
    taken, heard = begun(tmp_path, monkeypatch, world(1))
    monkeypatch.setattr(adoption, "LOOK_EVERY_SECONDS", 0.3)
    over = threading.Event()

    def train() -> None:
        for step in itertools.count(1):
            save(tmp_path / "e1", step)
            if over.wait(0.05):
                return

    script = threading.Thread(target=train)
    script.start()
    try:
        steps = [sealed_step(heard.get(timeout=20)) for _ in range(3)]
    finally:
        over.set()
        script.join()
        taken.close()
    assert steps == sorted(set(steps))
    for step in steps:
        verify(tmp_path / f"step-{step}.e1.1", Manifest.read(tmp_path / f"step-{step}.e1.1"))


@pytest.mark.parametrize("engine", ["global_step30/", ""])
def test_what_nobody_can_convert_is_not_taken_for_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """A checkpoint that verifies is never retired: the run keeps it, and goes on with as many ranks as saved it."""
    path = tmp_path / "e1" / "checkpoint-30"
    states(path, *(f"{engine}{name}" for name in (ZERO_1 if engine else ["model_rank_0.pt"])))
    states(path, "rng_state_0.pth", "rng_state_1.pth")
    (path / "trainer_state.json").write_text("{}")
    taken, heard = begun(tmp_path, monkeypatch, world(1))
    event = heard.get(timeout=20)
    assert isinstance(event, ev.WorkerSaid)
    taken.close()
    source = tmp_path / event.message.sealed.name
    with pytest.raises(EnvironmentFailed, match="no files of DeepSpeed's" + (r".* in global_step30" if engine else "")):
        convert(tmp_path / source.name, tmp_path / f"{source.name}.universal.1")


def test_a_script_that_began_anew_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would train again what the run has behind it, and nobody would see why no step counts."""
    make_checkpoint(tmp_path, "step-20.e1.1")
    taken, heard = begun(tmp_path, monkeypatch, world(2, "step-20.e1.1"))
    states(tmp_path / "e2" / "global_step20", *ZERO_1)
    states(tmp_path / "e2" / "global_step10", *ZERO_1)
    event = heard.get(timeout=20)
    assert isinstance(event, ev.ManifestRead)
    assert event.name == "global_step10"
    assert "did not load" in event.message
    taken.close()


@pytest.mark.parametrize("tag", ["epoch_{}", "{}"])
def test_tags_that_count_from_0_are_each_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str) -> None:
    """The first is step 1; behind a resume they go on, and one that is behind its number is named."""
    taken, heard = begun(tmp_path, monkeypatch, world(1))
    for number in (0, 1):
        states(tmp_path / "e1" / tag.format(number), *ZERO_1)
        assert sealed_step(heard.get(timeout=20)) == number + 1
    taken.close()
    again = world(2, "step-2.e1.1")
    again.resume.source.step = 2
    taken, heard = begun(tmp_path, monkeypatch, again)
    states(tmp_path / "e2" / tag.format(1), *ZERO_1)
    states(tmp_path / "e2" / tag.format(0), *ZERO_1)
    event = heard.get(timeout=20)
    assert isinstance(event, ev.ManifestRead)
    assert (event.name, "did not load" in event.message) == (tag.format(0), True)
    for number in (2, 3):
        states(tmp_path / "e2" / tag.format(number), *ZERO_1)
        assert sealed_step(heard.get(timeout=20)) == number + 1
    taken.close()


def test_of_two_tags_nothing_comes_behind_what_was_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps' tag has the larger number, and was taken for newer than the pass over the data that came later."""
    taken, heard = begun(tmp_path, monkeypatch, world(1))
    states(tmp_path / "e1/epoch_0", *ZERO_1)
    assert sealed_step(heard.get(timeout=20)) == 1
    written_before(tmp_path / "e1/global_step10", tmp_path / "e1/epoch_0")
    taken.settle(20)
    states(tmp_path / "e1/epoch_1", *ZERO_1)
    assert sealed_step(heard.get(timeout=20)) == 2
    states(tmp_path / "e1/global_step20", *ZERO_1)
    assert sealed_step(heard.get(timeout=20)) == 20
    taken.close()


def written_before(path: Path, other: Path) -> None:
    """Saves a checkpoint of an earlier time than another one has."""
    earlier = min(one.stat().st_mtime_ns for one in other.iterdir()) - 10**9
    hidden = other.parent.parent / "hidden"
    states(hidden, *ZERO_1)
    for one in hidden.iterdir():
        os.utime(one, ns=(earlier, earlier))
    hidden.rename(path)


@pytest.mark.slow
def test_what_is_saved_last_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script ends in the moment after its last save; what it did not finish, or is taken already, holds nobody up."""
    taken, heard = begun(tmp_path, monkeypatch, world(1))
    monkeypatch.setattr(adoption, "LOOK_EVERY_SECONDS", 0.3)
    for step in (10, 20):
        states(tmp_path / "e1" / f"global_step{step}", *ZERO_1)
        states(tmp_path / "e1" / "global_step99", *ZERO_1[:2])
        taken.settle(20)
        assert sealed_step(heard.get_nowait()) == step
    monkeypatch.setattr(adoption, "LOOK_EVERY_SECONDS", 1000)
    taken.settle(20)
    taken.settle(20)
    taken.close()
    taken.settle(20)
    taken.begin(tmp_path, world(2), ORIGIN, [], first=False)
    taken.settle(20)


@pytest.mark.slow
def test_a_script_that_removes_all_that_it_saved_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the last thing that it does. Its success took ten minutes more. Nor does a file that goes each time."""
    taken, _ = begun(tmp_path, monkeypatch, world(1))
    states(tmp_path / "e1" / "global_step10", *ZERO_1)
    shutil.rmtree(tmp_path / "e1")
    began = time.monotonic()
    taken.settle(40)
    monkeypatch.setattr(adoption, "complete", lambda *_: (_ for _ in ()).throw(FileNotFoundError()))
    states(tmp_path / "e1" / "global_step10", *ZERO_1)
    taken.settle(40)
    assert time.monotonic() - began < 20
    taken.close()


@pytest.mark.slow
def test_who_waits_does_not_make_it_be_taken_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several workers of a node end one after the other, and another node's may still write."""
    taken, heard = begun(tmp_path, monkeypatch, world(1))
    monkeypatch.setattr(adoption, "LOOK_EVERY_SECONDS", 1000.0)
    taken.settle(20)
    states(tmp_path / "e1" / "global_step10", *ZERO_1)
    for _ in range(3):
        taken.settle(0.2)
    assert heard.empty()
    taken.close()


@pytest.mark.slow
def test_what_was_saved_right_before_the_workers_were_stopped_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script saves and fails in the next moment, or saves because it was told to leave: its next start finds that."""
    taken, heard = begun(tmp_path, monkeypatch, world(1))
    monkeypatch.setattr(adoption, "LOOK_EVERY_SECONDS", 0.3)
    taken.interrupt()
    states(tmp_path / "e1", "ckpt.pt")
    taken.stopped(40, 0)
    assert sealed_step(heard.get_nowait()) == 1
    taken.close()


@pytest.mark.slow
def test_what_was_being_written_when_the_workers_were_stopped_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the format has no end, half a file is as still as a whole one, however long nobody writes the rest."""
    taken, heard = begun(tmp_path, monkeypatch, world(1))
    (tmp_path / "e1" / "vocabulary.raw").write_bytes(b"all of it")
    sealed = heard.get(timeout=20)
    assert sealed_step(sealed) == 1
    taken.interrupt()
    (tmp_path / "e1" / "model.raw").write_bytes(b"half of")
    taken.stopped(40, 0)
    time.sleep(20 * adoption.LOOK_EVERY_SECONDS)
    taken.stopped(40, 0)
    assert heard.empty()
    (tmp_path / "e1" / "model.raw").unlink()
    states(tmp_path / "e1", "ckpt_20.pt")
    taken.stopped(40, 0)
    assert sealed_step(heard.get_nowait()) == 20, "of what is as it was, all is there"
    taken.close()


@pytest.mark.slow
def test_the_last_save_is_taken_however_often_it_changed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the script has ended well, what it saved is still, and its rest is waited for."""
    taken, heard = begun(tmp_path, monkeypatch, world(1))
    until = time.monotonic() + 60
    while heard.empty() and time.monotonic() < until:
        (tmp_path / "e1" / "model.raw").write_bytes(os.urandom(8))
        time.sleep(adoption.LOOK_EVERY_SECONDS / 4)
    problem = heard.get_nowait()
    assert isinstance(problem, ev.ManifestRead)
    assert "changes all the time" in problem.message
    taken.settle(20)
    assert sealed_step(heard.get_nowait()) == 1
    taken.close()


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("ends", [True, False])
def test_what_was_saved_last_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Neither where the disk is full, nor where the file system hangs."""
    held = threading.Event()

    def hangs(*_: object) -> Manifest:
        if ends:
            raise OSError(28, "No space left on device")
        held.wait(30)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(adoption, "adopt", hangs)
    taken, _ = begun(tmp_path, monkeypatch, world(1))
    states(tmp_path / "e1" / "global_step10", *ZERO_1)
    taken.settle(30 if ends else 0.5)
    held.set()
    taken.close()


def test_a_script_that_does_not_ask_for_it_is_left_alone(tmp_path: Path) -> None:
    taken = Adoption(["--out=mine"], lambda event: None)
    assert taken.begin(tmp_path, world(1), ORIGIN, ["--out=mine"], first=True) == ("--out=mine",)
    assert [*tmp_path.iterdir()] == []


def test_a_script_that_is_not_told_of_universal_files_is_named(tmp_path: Path) -> None:
    """DeepSpeed would look for shards of as many ranks and fail, again and again."""
    taken = Adoption(["${save_dir}"], lambda event: None)
    universal = world(2, "step-20.e1.1", "step-20.e1.1.universal.3")
    assert "start with --universal-checkpoint" in taken.hint(universal, ["train.py"])
    assert taken.hint(universal, ["train.py", "--universal-checkpoint"]) == ""
    assert taken.hint(world(2, "step-20.e1.1"), ["train.py"]) == ""
    assert Adoption(["${save_dir}"], lambda event: None, is_told=True).hint(universal, ["train.py"]) == ""
    assert Adoption(["x"], lambda event: None).hint(universal, ["train.py"]) == ""
