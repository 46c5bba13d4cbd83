"""An elastic Trainer that saves to memory, between its own saves and when it drains."""

from __future__ import annotations

import errno
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

from dalsegno.elastic import Drained
from dalsegno.elastic.checkpoint import CheckpointStore, Manifest, inventory, verify
from dalsegno.elastic.saving import background_save
from dalsegno.elastic.saving.tiers import Memory
from dalsegno.elastic.training import entry
from dalsegno.elastic.training.saves import Saves
from dalsegno.swift_plugin.hf import checkpoints
from dalsegno.swift_plugin.hf.options import Options, from_environment
from dalsegno.swift_plugin.hf.saving import SavingTrainer
from tests.unit.elastic.checkpoint.test_best import made
from tests.unit.swift_plugin.hf import test_hf_trainer as hf

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

own_session = hf.own_session


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """This process is its own node, which keeps memory checkpoints there; a drain goes there, too."""
    directory = tmp_path / "memory"
    directory.mkdir()
    plain = Saves.__init__

    def made(self: Saves, identity: Any, *arguments: Any) -> None:
        plain(self, identity, *arguments)
        assert self.saver is not None
        self._memory, self.saver._memory = True, Memory(CheckpointStore(directory), identity)

    monkeypatch.setattr(Saves, "__init__", made)
    monkeypatch.setattr(Saves, "drains_to_memory", lambda self: True)
    return directory


class Told(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Of which saves anybody is told."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)


def make(directory: Path, monkeypatch: pytest.MonkeyPatch, *callbacks: Any, every: int = 2, **arguments: Any) -> Any:
    monkeypatch.setattr(hf, "Options", lambda *given: Options(*given, memory_every=every))
    return hf.make(directory, *callbacks, **arguments)


def bring(memory: Path, directory: Path) -> Manifest:
    """What the agents do with the newest one there: it becomes durable."""
    newest = inventory(memory)[-1]
    shutil.copytree(memory / newest.name, directory / "checkpoints" / newest.name)
    return newest


def test_memory_saves_are_nobodys_but_the_runs(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the Trainer's own: no callback, link or limit sees them, and what is logged is what it was."""
    told = Told()
    found = hf.train(make(tmp_path / "a", monkeypatch, told, hf.At(9, lambda: None)))
    assert sorted(one.step for one in inventory(memory)) == [2, 4, 6, 8]
    assert told.steps == [one.step for one in inventory(tmp_path / "a" / "checkpoints")] == [5, 10, 12]
    assert sorted(path.name for path in (tmp_path / "a" / "out").glob("checkpoint-*")) == [
        *("checkpoint-10", "checkpoint-12", "checkpoint-5"),
    ]
    assert found == hf.train(make(tmp_path / "b", monkeypatch, every=0))


def test_a_save_of_a_step_that_has_no_room_once_more_in_memory_is_on_the_disk(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At an epoch's end the step is saved for a crash first, and nobody brings that to the disk. An epoch has 4."""
    look = Memory.look

    def one_copy(self: Memory) -> None:
        look(self)
        if any(one.step == 4 for one in inventory(memory)):
            raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(Memory, "look", one_copy)
    hf.train(make(tmp_path / "a", monkeypatch, every=4, save_strategy="epoch"))
    assert [one.step for one in inventory(tmp_path / "a" / "checkpoints")] == [4, 8, 12]


class ReadsBack(Trainer):  # type: ignore[misc]  # transformers is not typed
    """Somebody's own, which looks at what it has just saved."""

    def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        assert len(load_file(Path(output_dir) / "model.safetensors")) > 10


@pytest.mark.parametrize(("base", "waits"), [(Trainer, False), (ReadsBack, True)])
def test_the_training_goes_on_while_it_is_written(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, base: type[Any], waits: bool
) -> None:
    """And it does not where a class of somebody's own saves, which may read back what it wrote."""
    may_write, under_way = threading.Event(), list[bool]()
    write = background_save.save

    def held(*given: Any) -> None:
        assert may_write.wait(30)
        write(*given)

    monkeypatch.setattr(background_save, "save", held)

    def look() -> None:
        under_way.append(entry._sessions[0].saves.under_way(in_memory=True))
        may_write.set()

    hf.train(make(tmp_path / "a", monkeypatch, hf.At(3, look), base=base))
    assert under_way == [not waits]
    files = [json.loads((path / "trainer_state.json").read_text()) for path in memory.glob("step-*/checkpoint-*")]
    assert sorted(one["global_step"] for one in files) == ([2, 4, 6, 8] if waits else [2, 4, 5, 6, 8, 10])
    for one in inventory(memory):
        verify(memory / one.name, one)


def wait_for(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Quiet(TrainerCallback):  # type: ignore[misc]
    """Is told of a save, and does not look."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None: ...


def test_what_the_trainer_saves_comes_to_the_disk_by_the_agents(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop waits for no disk; then it stands where people look for it."""
    monkeypatch.setattr(checkpoints, "LOOK_SECONDS", 0.0)
    place, seen = tmp_path / "a" / "out" / "checkpoint-5" / "trainer_state.json", list[bool]()

    def bring_it() -> None:
        seen.append(place.exists())
        (held,) = memory.glob("step-5.*[0-9]")
        shutil.copytree(held, tmp_path / "a" / "checkpoints" / held.name)

    def arrived() -> None:
        name = next(memory.glob("step-5.*[0-9]")).name
        wait_for(lambda: trainer.elastic_run._arriving._sight.found(name))

    callbacks = [hf.At(10, bring_it), hf.At(11, arrived), hf.At(12, lambda: seen.append(place.exists()))]
    trainer = make(tmp_path / "a", monkeypatch, *callbacks, every=4)
    hf.train(trainer)
    assert seen == [False, True]
    # The last one is the Trainer's end, for which it waits.
    assert [one.step for one in inventory(tmp_path / "a" / "checkpoints")] == [5, 12]
    assert sorted(one.step for one in inventory(memory)) == [4, 5, 8, 10]
    assert len(load_file(place.parent / "model.safetensors")) > 10


def test_who_is_told_of_a_save_may_look_at_once(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hf.train(make(tmp_path / "a", monkeypatch, Quiet(), every=4))
    assert [one.step for one in inventory(tmp_path / "a" / "checkpoints")] == [5, 10, 12]
    assert sorted(one.step for one in inventory(memory)) == [4, 8]


def test_where_memory_has_no_room_the_loop_waits_for_the_disk(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known at a later step: that one comes to the disk."""
    write = background_save.save

    def full(content: Any, file: Any, *given: Any) -> Any:
        if entry._sessions[0].step < 8:
            raise OSError(errno.ENOSPC, "no room")
        return write(content, file, *given)

    monkeypatch.setattr(background_save, "save", full)
    hf.train(make(tmp_path / "a", monkeypatch, every=100))
    found = [one.step for one in inventory(tmp_path / "a" / "checkpoints")]
    assert len(found) == 2
    assert 5 <= found[0] <= 8
    assert found[1] == 12
    assert sorted(one.step for one in inventory(memory)) == [10]


class Lists:
    """A tokenizer of somebody's own, which writes what is there."""

    def save_pretrained(self, directory: str) -> None:
        sizes = {path.name: path.stat().st_size for path in Path(directory).glob("*.safetensors")}
        Path(directory, "sizes.json").write_text(json.dumps(sizes))


def test_what_somebodys_own_reads_back_is_there(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it comes in the middle of the training."""

    def change() -> None:
        trainer.processing_class = Lists()

    trainer = make(tmp_path / "a", monkeypatch, hf.At(4, change))
    hf.train(trainer)
    found = sorted(path.parent.name for path in memory.glob("step-*/checkpoint-*/sizes.json"))
    assert found == ["checkpoint-4", "checkpoint-6", "checkpoint-8"]
    for path in memory.glob("step-*/checkpoint-*/sizes.json"):
        assert json.loads(path.read_text())["model.safetensors"] > 1000


def test_all_ranks_wait_for_what_one_must_wait_for(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only rank 0's Trainer was given a method, say; each way has collectives of its own."""
    under_way = list[bool]()
    look = lambda: under_way.append(entry._sessions[0].saves.under_way(in_memory=True))  # noqa: E731
    trainer = make(tmp_path / "a", monkeypatch, hf.At(3, look))
    gather = trainer.elastic_run.session.gather

    def of_two(message: Any) -> list[Any]:
        return [*gather(message), [0.0, False] if isinstance(message, list) else False]

    monkeypatch.setattr(trainer.elastic_run.session, "gather", of_two)
    hf.train(trainer)
    assert under_way == [False]
    assert sorted(one.step for one in inventory(memory)) == [2, 4, 6, 8]


def test_a_crash_goes_on_from_the_last_of_them(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same curve; callbacks that count saves do not count it."""
    wanted = hf.train(make(tmp_path / "b", monkeypatch, every=0))

    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hf.train(make(tmp_path / "a", monkeypatch, hf.At(9, die)))
    assert bring(memory, tmp_path / "a").step == 8
    told = Told()
    found = hf.train(make(tmp_path / "a", monkeypatch, told))
    assert hf.without_end(found) == hf.without_end(wanted)
    assert told.steps == [10, 12]


def test_what_comes_to_the_disk_around_a_crash_is_linked(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two worlds; not what lies beyond the step that the run goes on from, comes late, or was deleted."""
    told = list[int]()

    def die() -> None:
        raise KeyboardInterrupt

    def bring_step(step: int) -> None:
        (held,) = memory.glob(f"step-{step}.*[0-9]")
        shutil.copytree(held, tmp_path / "a" / "checkpoints" / held.name)

    def in_output() -> list[str]:
        return sorted(path.parent.name for path in (tmp_path / "a" / "out").glob("checkpoint-*/trainer_state.json"))

    with pytest.raises(KeyboardInterrupt):
        hf.train(make(tmp_path / "a", monkeypatch, hf.At(12, die), every=4))
    assert in_output() == []
    for step in (5, 8):
        bring_step(step)
    monkeypatch.setattr(SavingTrainer, "linked", lambda trainer, step: told.append(step))
    trainer = make(tmp_path / "a", monkeypatch, hf.At(10, lambda: bring_step(4)), every=0)
    assert (in_output(), told) == (["checkpoint-5", "checkpoint-8"], [5, 8])
    bring_step(10)  # the dead world's, which this one makes again
    shutil.rmtree(tmp_path / "a" / "out" / "checkpoint-5")
    hf.train(trainer)
    assert in_output() == sorted(f"checkpoint-{step}" for step in (8, 10, 12))
    places = [tmp_path / "a" / "out" / f"checkpoint-{step}" / "trainer_state.json" for step in (8, 10, 12)]
    assert [place.resolve().parents[1].name.split(".")[1] for place in places] == ["e0", "e1", "e1"]
    hf.close()
    make(tmp_path / "a", monkeypatch, every=0)
    assert "checkpoint-5" not in in_output()
    assert told == [5, 8]


def test_only_what_leads_to_the_resume_point_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what was left by going back; nor what is older than a place of this run. Others' places do not count."""
    first = [made(f"step-{step}.e1.1") for step in (2, 4, 6, 8)]
    resume = made("step-5.e2.1", first[1])
    found = [*first, resume, made("step-3.e2.1", first[0]), made("step-7.e3.1", resume)]
    run_dir, output = tmp_path / "run", tmp_path / "out"
    monkeypatch.setattr(checkpoints, "inventory", lambda place, check_sizes: found)

    def place(directory: Path, step: int) -> Path:
        file = checkpoints.trainers(directory, step) / checkpoints.TRAINER_STATE
        file.parent.mkdir(parents=True)
        return file

    for one in found:
        place(run_dir / one.name, one.step).touch()
    place(tmp_path / "other", 3).touch()
    place(output, 3).symlink_to(tmp_path / "other/checkpoint-3/trainer_state.json")
    assert steps_of(output, run_dir, made("step-9.e2.1", first[1])) == [2, 4, 5]  # in memory alone
    place(output, 6).symlink_to(run_dir / "step-6.e1.1/checkpoint-6/trainer_state.json")  # beyond the resume point
    assert steps_of(output, run_dir, resume) == [2, 4, 5]
    assert checkpoints.newest_linked(output, run_dir) == 6
    place(output, 4).symlink_to(run_dir / "step-4.e1.1/checkpoint-4/trainer_state.json")
    assert steps_of(output, run_dir, resume) == [5]
    place(output, 5).symlink_to(run_dir / "step-5.e2.1/checkpoint-5/trainer_state.json")
    assert steps_of(output, run_dir, resume) == []
    # As on disk, also if it is older than a place: what the run goes on from has one.
    assert steps_of(output, run_dir, first[0]) == [2]


def steps_of(output: Path, run_dir: Path, resume: Manifest) -> list[int]:
    return [step for _, step in checkpoints.unlinked(output, run_dir, resume)]


def test_a_drain_to_memory_changes_nothing(tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is linked nowhere: what it would lead to is gone with the machine."""
    wanted = hf.train(make(tmp_path / "b", monkeypatch, every=0))
    with pytest.raises(Drained):
        hf.train(make(tmp_path / "a", monkeypatch, hf.At(7, hf.drain), every=0))
    assert [one.step for one in inventory(tmp_path / "a" / "checkpoints")] == [5]
    assert sorted(path.name for path in (tmp_path / "a" / "out").glob("checkpoint-*")) == ["checkpoint-5"]
    assert bring(memory, tmp_path / "a").step == 7
    assert hf.without_end(hf.train(make(tmp_path / "a", monkeypatch, every=0))) == hf.without_end(wanted)
    assert not entry._sessions[0].saves.under_way(in_memory=True)


@pytest.mark.parametrize(("said", "every"), [("", 0), ("0", 0), ("25", 25), ("auto", "auto")])
def test_the_environment_says_how_often(said: str, every: int | str) -> None:
    """For those who cannot add a flag."""
    assert from_environment({"DALSEGNO_MEMORY_EVERY": said}).memory_every == every


@pytest.mark.parametrize("said", ["-1", "often", "2.5"])
def test_what_is_no_cadence_is_refused(said: str) -> None:
    """With what there is."""
    with pytest.raises(ValueError, match="memory_every is a number of steps"):
        from_environment({"DALSEGNO_MEMORY_EVERY": said})
