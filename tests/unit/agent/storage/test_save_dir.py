"""What a script finds of the resume point in its epoch's directory, and what becomes of what it saves there."""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.storage import adoption, save_dir
from dalsegno.agent.storage.best_save import BestRule
from dalsegno.agent.storage.macros import expand, macros_of
from dalsegno.agent.storage.save_dir import Adoption
from dalsegno.elastic.checkpoint import Manifest, verify
from dalsegno.protos import control_pb2, worker_pb2
from tests.support.jobs.faults import volume
from tests.unit.agent.storage.test_adoption import ORIGIN, states, world

Heard = queue.Queue[ev.Event]


@pytest.mark.parametrize(
    ("arguments", "without", "resumed"),
    [
        (["--out=${save_dir}"], ["--out=S"], ["--out=S"]),
        (["--resume", "${resume_dir}", "--x"], ["--x"], ["--resume", "R", "--x"]),
        (["--resume=${resume_dir}", "--x"], ["--x"], ["--resume=R", "--x"]),
        (["--x=1", "${resume_path}/a"], ["--x=1"], ["--x=1", "P/a"]),
        (["train.py", "${resume_dir}"], ["train.py"], ["train.py", "R"]),
        (["--init_from=${resume_dir:+resume}"], [], ["--init_from=resume"]),
        (["--compile", "--init_from=${resume_dir:+resume}"], ["--compile"], ["--compile", "--init_from=resume"]),
        (["--from", "${resume_path:-scratch}"], ["--from", "scratch"], ["--from", "P"]),
        (["-r", "${resume_dir}", "${resume_dir}", "-q"], ["-q"], ["-r", "R", "R", "-q"]),
        (["--resume-from-step=${resume_step}", "--x"], ["--x"], ["--resume-from-step=100", "--x"]),
        (["--step", "${resume_step:--1}"], ["--step", "-1"], ["--step", "100"]),
        (["${local_rank}", "${other}", "$save_dir"], ["${local_rank}", "${other}", "$save_dir"], None),
    ],
)
def test_macros(arguments: list[str], without: list[str], resumed: list[str] | None) -> None:
    """Without a resume point an argument goes, and the flag that it belongs to."""
    values: dict[str, str | None] = {"save_dir": "S", "resume_dir": None, "resume_path": None, "resume_step": None}
    assert expand(arguments, values) == tuple(without)
    values |= {"resume_dir": "R", "resume_path": "P", "resume_step": "100"}
    assert expand(arguments, values) == tuple(without if resumed is None else resumed)


class Run:
    """One run of a script, epoch after epoch, as an agent sees it."""

    def __init__(
        self,
        directory: Path,
        *flags: str,
        pattern: str = "",
        looks: bool = False,
        initial: Path | None = None,
        best: BestRule | None = None,
    ) -> None:
        self.directory = directory
        self.heard: Heard = queue.Queue()
        self.flags = ("--out=${save_dir}", *flags)
        self.taken = Adoption(self.flags, self.heard.put, pattern, looks=looks, initial=initial, best=best)
        self.epoch = 0
        self.resume: Manifest | None = None
        self.problem = ""
        self.damage: worker_pb2.BadCheckpoint | None = None

    @property
    def out(self) -> Path:
        return self.directory / f"e{self.epoch}"

    def next(self) -> tuple[str, ...]:
        """A new epoch, from what was adopted last; returns the script's arguments."""
        self.epoch += 1
        self.world: control_pb2.World = world(self.epoch)
        if self.resume is not None:
            self.world = world(self.epoch, self.resume.name)
            self.world.resume.source.step = self.resume.step
            self.world.resume.source.ref.digest = self.resume.digest
        there = threading.Event()

        def then(problem: str, damage: worker_pb2.BadCheckpoint | None) -> None:
            self.problem, self.damage = problem, damage
            there.set()

        if self.taken.place(self.directory, self.world, then, first=True):
            assert there.wait(20)
        return () if self.problem else self.begin()

    def begin(self) -> tuple[str, ...]:
        return self.taken.begin(self.directory, self.world, ORIGIN, self.flags, first=True)

    def sealed(self) -> Manifest:
        """What is adopted next."""
        event = self.heard.get(timeout=20)
        assert isinstance(event, ev.WorkerSaid), event
        self.resume = Manifest.read(self.directory / event.message.sealed.name)
        return self.resume

    def said(self) -> str:
        event = self.heard.get(timeout=20)
        assert isinstance(event, ev.ManifestRead | ev.Remark), event
        return event.text if isinstance(event, ev.Remark) else event.message

    def quiet(self) -> None:
        """Nothing else is adopted or said."""
        self.taken.settle(20)
        assert self.heard.empty(), self.heard.get_nowait()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    monkeypatch.setattr(adoption, "LOOK_EVERY_SECONDS", 0.05)
    return lambda *flags, **options: Run(tmp_path, *flags, **options)


def save(path: Path, **content: object) -> None:
    """As a script saves: over what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


@pytest.mark.slow
def test_what_is_written_over_is_a_new_checkpoint_each_time(runs: Callable[..., Run]) -> None:
    """The step is its own count; without one it is one more than the last. The run's stay as they were."""
    run = runs()
    run.next()
    save(run.out / "ckpt.pt", iter_num=20)
    first = run.sealed()
    assert (first.step, [one.path for one in first.files], first.shape.any_world_size) == (20, ["ckpt.pt"], True)
    save(run.out / "ckpt.pt", iter_num=40)
    assert run.sealed().step == 40
    save(run.out / "ckpt.pt", model=1)
    assert run.sealed().step == 41
    verify(run.directory / first.name, first)
    run.taken.close()


@pytest.mark.slow
def test_the_next_epoch_has_a_copy_that_may_be_written_over(runs: Callable[..., Run]) -> None:
    """Cut off where it lies, deleted, linked to: the run's own one stays as it was sealed."""
    run = runs("--init_from=${resume_dir:+resume}")
    assert run.next() == (f"--out={run.out}",)
    save(run.out / "a" / "ckpt.pt", iter_num=20)
    (run.out / "last.pt").symlink_to("a/ckpt.pt")
    first = run.sealed()
    assert run.next() == (f"--out={run.out}", "--init_from=resume")
    assert torch.load(run.out / "last.pt", weights_only=True) == {"iter_num": 20}
    assert (run.out / "a" / "ckpt.pt").stat().st_nlink == 1
    run.quiet()
    with open(run.out / "a" / "ckpt.pt", "r+b") as file:
        file.truncate(3)
    verify(run.directory / first.name, first)
    save(run.out / "a" / "ckpt.pt", iter_num=40)
    assert run.sealed().step == 40
    run.taken.close()


@pytest.mark.slow
def test_who_is_told_where_it_is_needs_no_copy(runs: Callable[..., Run]) -> None:
    """By a macro, which names it as the script had: Accelerate's examples read the step from the name. Or because it
    looks into its environment."""
    run = runs("--resume_from_checkpoint", "${resume_dir}", "${resume_path}")
    run.next()
    states(run.out / "step_520", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl")
    first = run.sealed()
    unit = run.directory / first.name / "step_520"
    assert run.next() == (f"--out={run.out}", "--resume_from_checkpoint", str(unit), str(unit))
    assert [*run.out.iterdir()] == []
    save(run.out / "ckpt_600.pt")
    second = run.directory / run.sealed().name
    assert run.next()[2:] == (str(second), str(second / "ckpt_600.pt"))
    run.taken.close()
    run.taken = Adoption(run.flags[:1], run.heard.put, looks=True)
    run.next()
    assert [*run.out.iterdir()] == []
    run.taken.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "step"),
    [
        (["model_000100.pt", "optim_000100_rank0.pt", "optim_000100_rank1.pt"], "100"),
        (["a/epoch_0/model.pt"], "0"),
        (["best.pt", "ckpt_7.pt"], "7"),
        (["last.pt"], None),
        (["x_5_rank0.pt", "x_5_rank1.pt", "y_6.pt"], "6"),
        (["y_6.pt", "x_5_rank0.pt", "x_5_rank1.pt"], None),
    ],
)
def test_who_asks_for_a_step_gets_its_own_number_and_a_copy(
    runs: Callable[..., Run], saved: list[str], step: str | None
) -> None:
    """nanochat builds its files' names from it. A number that only the run counts would be a wrong one."""
    run = runs("--resume-from-step", "${resume_step}")
    assert run.next()[1:] == ()
    for name in saved:
        save(run.out / name)
    while len(run.sealed().files) < len(saved):
        pass
    assert run.next()[1:] == (() if step is None else ("--resume-from-step", step))
    assert all((run.out / name).exists() for name in saved)
    run.taken.close()


@pytest.mark.slow
@pytest.mark.parametrize("path", ["checkpoint-30", "a/checkpoint-30"])
def test_only_deepspeed_is_led_to_the_resume_point(runs: Callable[..., Run], path: str) -> None:
    """The examples of transformers 4 begin in no directory that has anything else than `checkpoint-…` in it."""
    run = runs("${resume_dir}")
    run.next()
    states(run.out / path, "trainer_state.json", "rng_state_0.pth", "rng_state_1.pth")
    assert run.sealed().shape.strategy == "transformers"
    run.next()
    assert [*run.out.iterdir()] == []
    run.taken.close()
    run.taken = Adoption(run.flags[:1], run.heard.put)
    run.next()
    assert [one.name for one in run.out.rglob("*") if one.name.startswith("latest")] == []
    assert (run.out / path).is_dir()
    run.taken.close()


@pytest.mark.slow
def test_the_file_that_was_saved_last_is_the_one_beside_the_best(runs: Callable[..., Run]) -> None:
    """As timm saves, and PyTorch's imagenet example: a script that gets a path opens it as a file."""
    run = runs("--resume", "${resume_path}", "${resume_dir}")
    run.next()
    save(run.out / "x" / "checkpoint-2.pth.tar", epoch=2)
    run.sealed()
    save(run.out / "x" / "last.pth.tar", epoch=3)
    save(run.out / "x" / "model_best.pth.tar", epoch=2)
    kept = run.directory / run.sealed().name / "x"
    assert run.next()[1:] == ("--resume", str(kept / "last.pth.tar"), str(kept))
    run.taken.close()


@pytest.mark.slow
def test_dinos_files_are_each_a_checkpoint(runs: Callable[..., Run]) -> None:
    """All that it ever saved was one, which each save made larger."""
    run = runs("--resume", "${resume_path}")
    for number, name in enumerate(("checkpoint0000", "checkpoint0020", "checkpoint0040", "checkpoint")):
        save(run.directory / "e1" / f"{name}.pth")
        os.utime(run.directory / "e1" / f"{name}.pth", (number, number))
    run.next()
    kept = run.sealed()
    assert [one.path for one in kept.files] == ["checkpoint.pth", "checkpoint0040.pth"]
    assert run.next()[1:] == ("--resume", str(run.directory / kept.name / "checkpoint.pth"))
    run.taken.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["checkpoint{}_512.pt", "model50.pt", "checkpoint512.pt"])
def test_a_size_in_a_files_name_hides_none_of_its_saves(runs: Callable[..., Run], name: str) -> None:
    """It was the number of all of them, and nothing was taken behind the first."""
    run = runs("--resume", "${resume_path}")
    for number in range(1, 4):
        run.next()
        save(run.out / name.format(f"_{number}"), w=number)
        assert name.format(f"_{number}") in [one.path for one in run.sealed().files]
    run.taken.close()


@pytest.mark.slow
def test_what_belongs_together_is_one_checkpoint(runs: Callable[..., Run]) -> None:
    """The newest of each series, with notes that name it; what did not change is not copied again."""
    run = runs()
    run.next()
    save(run.out / "best.pt", w=torch.zeros(1000))
    for step in (10, 20):
        states(run.out / f"step_{step}", "model.pt", "optimizer.pt")
    (run.out / "latest").write_text("step_20")
    (run.out / "latest_iteration.txt").write_text("20\n")
    (run.out / "where").write_text(f"{run.out}/step_20")
    (run.out / "readme.txt").write_text("nothing about it")
    first = run.sealed()
    names = ["best.pt", "latest", "latest_iteration.txt", "step_20/model.pt", "step_20/optimizer.pt", "where"]
    assert [one.path for one in first.files] == names
    states(run.out / "step_30", "model.pt", "optimizer.pt")
    second = run.sealed()
    assert (run.directory / second.name / "best.pt").samefile(run.directory / first.name / "best.pt")
    assert [one.path for one in second.files] == ["best.pt", "step_30/model.pt", "step_30/optimizer.pt"]
    run.resume = first
    run.next()
    assert (run.out / "latest").read_text() == "step_20"
    assert (run.out / "where").read_text() == f"{run.out}/step_20"
    run.quiet()
    save(run.out / "best.pt", w=torch.ones(1000))
    third = run.sealed()
    assert (third.step, run.resume.saved_as and run.resume.saved_as.newest) == (21, "best.pt")
    assert "step_20/model.pt" in [one.path for one in third.files], "a script that resumes may need it"
    run.taken.close()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key"), [("ckpt.pt", 10), ("step_10/model.pt", None), ("epoch_1.pt", None)])
def test_a_script_that_begins_anew_is_told(runs: Callable[..., Run], name: str, key: int | None) -> None:
    """What it saves must not take the place of what the run has, whether its name or its file has the number."""
    run = runs("${resume_dir}")
    run.next()
    save(run.out / name.replace("1", "3"), **({} if key is None else {"iter_num": 500}))
    kept = run.sealed()
    run.next()
    save(run.out / name, **({} if key is None else {"iter_num": key}))
    assert "did not load" in run.said()
    assert run.resume == kept
    run.quiet()
    run.taken.close()


def accelerates(path: Path, counted: int) -> None:
    """As Accelerate saves; its scheduler has counted so many steps."""
    states(path, "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl")
    save(path / "scheduler.bin", last_epoch=counted, _step_count=counted + 1)


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("${resume_dir}",), ()], ids=["is told where", "finds a copy"])
def test_names_that_begin_anew_do_not_hide_what_went_on(runs: Callable[..., Run], flags: tuple[str, ...]) -> None:
    """Accelerate's examples behind their first data epoch: what they save last is what they resume from, each time."""
    run = runs(*flags)
    run.next()
    save(run.out / "best.pt", w=1)
    accelerates(run.out / "step_80", 80)
    assert run.sealed().step == 80
    for epoch, (number, counted) in enumerate([(30, 90), (40, 100), (20, 140)], start=1):
        run.next()
        accelerates(run.out / f"step_{number}", counted)
        sealed = run.sealed()
        assert (sealed.step, sealed.saved_as and sealed.saved_as.newest) == (80 + epoch, f"step_{number}")
        if number != 40:  # which is more than the one before
            assert f"counts anew since it resumed: step_{number} comes behind step_" in run.said()
        (run.out / "best.pt").unlink(missing_ok=True)
        run.quiet()
    accelerates(run.out / "step_30", 150)
    assert run.sealed().step == 84, "in one epoch the names count"
    accelerates(run.out / "step_10", 10)
    run.quiet()
    run.taken.close()


@pytest.mark.slow
@pytest.mark.parametrize("counted", [10, 80, None])
def test_a_script_that_loaded_nothing_takes_nobodys_place(runs: Callable[..., Run], counted: int | None) -> None:
    """Its scheduler is not behind the resume point's, or it has none."""
    run = runs("${resume_dir}")
    run.next()
    accelerates(run.out / "step_80", 80)
    run.sealed()
    run.next()
    accelerates(run.out / "step_10", counted or 0)
    if counted is None:
        (run.out / "step_10" / "scheduler.bin").unlink()
    assert "did not load" in run.said()
    run.quiet()
    run.taken.close()


@pytest.mark.slow
def test_a_copy_beside_which_names_begin_anew_is_not_taken_again(runs: Callable[..., Run]) -> None:
    """Not even when the script has deleted what it saved later."""
    run = runs()
    run.next()
    accelerates(run.out / "step_80", 80)
    run.sealed()
    run.next()
    assert (run.out / "step_80").is_dir()
    accelerates(run.out / "step_30", 90)
    assert run.sealed().step == 81
    run.said()
    for file in (run.out / "step_30").iterdir():
        file.unlink()
    (run.out / "step_30").rmdir()
    run.quiet()
    accelerates(run.out / "step_80", 140)
    assert run.sealed().step == 82, "written again"
    run.taken.close()


@pytest.mark.slow
def test_what_is_being_written_is_left_alone(runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, with pauses longer than a look; and a format that nobody knows is waited for longer."""
    run = runs(pattern="*")
    run.next()
    save(run.directory / "x", iter_num=5)
    data = (run.directory / "x").read_bytes()
    with open(run.out / "ckpt.pt", "wb", buffering=0) as file:
        for start in range(0, len(data), len(data) // 4 + 1):
            file.write(data[start : start + len(data) // 4 + 1])
            if start:
                time.sleep(0.3)
    assert run.sealed().step == 5
    assert verify(run.directory / run.resume.name, run.resume) is None  # type: ignore[union-attr]
    began = time.monotonic()
    (run.out / "raw").write_bytes(b"x" * 100)
    run.sealed()
    assert time.monotonic() - began >= adoption.UNSURE_LOOKS * adoption.LOOK_EVERY_SECONDS
    run.taken.close()


def test_the_newest_of_several_is_still_the_newest(runs: Callable[..., Run]) -> None:
    """Lightning looks for the newest `last*.ckpt`; of versions of one file only that one is kept."""
    run = runs()
    run.next()
    for name, written in (("last-v1.ckpt", 4), ("last.ckpt", 3), ("b.ckpt", 1), ("a.ckpt", 2)):
        save(run.out / name, global_step=written)
        os.utime(run.out / name, (written, written))
    assert [one.path for one in run.sealed().files] == ["a.ckpt", "b.ckpt", "last-v1.ckpt"]
    run.next()
    assert [one.name for one in sorted(run.out.iterdir(), key=os.path.getmtime)][:3] == [
        "b.ckpt",
        "a.ckpt",
        "last-v1.ckpt",
    ]
    run.quiet()
    run.taken.close()


def saved_ahead(path: Path, seconds: float, **content: object) -> None:
    """As a script saves on a node whose clock is so far ahead of ours."""
    save(path.with_name(f".{path.name}"), **content)
    os.utime(path.with_name(f".{path.name}"), (time.time() + seconds,) * 2)
    os.replace(path.with_name(f".{path.name}"), path)


def test_a_clock_that_was_set_back_hides_no_save(runs: Callable[..., Run]) -> None:
    """The copy of `last.ckpt` was the newest version for as long as that, and what Lightning saved beside it none.

    Copies keep their order, and in the next epochs the new file is the newest: of all that a script finds, too.
    """
    run = runs()
    run.next()
    saved_ahead(run.out / "best.ckpt", 3590, global_step=5)
    saved_ahead(run.out / "last.ckpt", 3600, global_step=10)
    while len(run.sealed().files) < 2:
        pass
    run.next()
    best, last = (os.path.getmtime(run.out / f"{name}.ckpt") for name in ("best", "last"))
    assert (round(last - best), last < time.time()) == (10, True)
    run.quiet()
    save(run.out / "last-v1.ckpt", global_step=20)
    assert run.sealed().step == 20
    run.next()
    assert os.path.getmtime(run.out / "best.ckpt") < os.path.getmtime(run.out / "last-v1.ckpt")
    run.quiet()
    run.taken.close()


def test_files_that_count_themselves_need_not_wait_for_each_other(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is written again and again keeps no other from being taken."""
    monkeypatch.setattr(adoption, "PATIENCE_LOOKS", 1_000_000)
    run = runs()
    run.next()
    until = time.monotonic() + 60
    for number in itertools.takewhile(lambda _: run.heard.empty(), itertools.count()):
        assert time.monotonic() < until
        save(run.out / "last.ckpt", global_step=number)
        if number < 5:
            save(run.out / "best.ckpt", global_step=number)
        time.sleep(0.13)  # why: longer than one look, and shorter than several
    assert "best.ckpt" in {Path(file.path).name for file in run.sealed().files}
    run.taken.close()


@pytest.mark.slow
def test_what_never_stops_changing_is_said(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And who waits for the last save does not wait for it without end."""
    monkeypatch.setattr(adoption, "PATIENCE_LOOKS", 6)
    run = runs()
    run.next()
    over = threading.Event()

    def restless() -> None:
        while not over.wait(0.02):
            # Renamed into place, so that nobody ever sees it empty.
            (tmp_path / "next").write_bytes(os.urandom(8))
            os.replace(tmp_path / "next", run.out / "replay.bin")

    thread = threading.Thread(target=restless)
    thread.start()
    try:
        assert "is never known to be whole" in run.said()
        began = time.monotonic()
        run.taken.settle(30)
        assert time.monotonic() - began < 20
    finally:
        over.set()
        thread.join()
    run.taken.close()


def test_odd_names_are_names(runs: Callable[..., Run]) -> None:
    """Spaces, newlines, quotes: kept, and found again."""
    run = runs()
    run.next()
    name = "my ck\npt '$(x)' *.pt"
    save(run.out / "a b" / name, step=3)
    assert [one.path for one in run.sealed().files] == [f"a b/{name}"]
    run.next()
    assert (run.out / "a b" / name).is_file()
    run.taken.close()


@pytest.mark.slow
def test_what_is_not_known_is_said_at_once(runs: Callable[..., Run]) -> None:
    """With what helps. Logs are nobody's checkpoint, and after a checkpoint nothing else is said."""
    run = runs()
    run.next()
    (run.out / "train.log").write_bytes(bytes(2 << 20))
    run.quiet()
    (run.out / "weights.json").write_bytes(bytes(2 << 20))
    assert "the script saved weights.json, which is not known for a checkpoint" in (text := run.said())
    assert "--checkpoint-glob" in text
    run.quiet()
    run.taken.close()
    run = runs(pattern="*.ckpt")
    run.next()
    save(run.out / "model.pt", w=torch.zeros(1 << 19))
    assert "nor does it match --checkpoint-glob=*.ckpt" in run.said()
    save(run.out / "model.ckpt")
    run.sealed()
    run.taken.close()


@pytest.mark.slow
def test_what_stays_incomplete_is_said(runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that never writes its part keeps nothing of it; and the one before is kept."""
    monkeypatch.setattr(adoption, "PATIENCE_LOOKS", 5)
    run = runs()
    run.next()
    states(run.out / "step_5", "optimizer.bin", "random_states_0.pkl", "random_states_1.pkl")
    states(run.out / "step_6", "optimizer.bin", "random_states_0.pkl")
    assert run.sealed().step == 5
    assert run.said() == "it is not complete: random_states_1.pkl is missing"
    run.taken.close()


@pytest.mark.slow
def test_a_script_that_deletes_at_once_loses_only_what_it_deleted(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rotation beside the looks, without an error. How long it takes here depends on the machine."""
    monkeypatch.setattr(adoption, "PATIENCE_LOOKS", 1_000_000)
    run = runs()
    run.next()
    for step in range(1, 40):
        states(run.out / f"step_{step}", "model.pt", "optimizer.pt")
        for name in ("model.pt", "optimizer.pt"):
            (run.out / f"step_{step - 1}" / name).unlink(missing_ok=True)
        time.sleep(0.01)
    while run.sealed().step < 39:
        pass
    verify(run.directory / run.resume.name, run.resume)  # type: ignore[union-attr, arg-type]
    run.quiet()
    run.taken.close()


def test_a_full_disk_is_said_and_nothing_is_left(runs: Callable[..., Run], tmp_path: Path) -> None:
    """Of a copy for the next epoch; the script starts with it, or not at all."""
    run = runs()
    run.next()
    save(run.out / "ckpt.pt", iter_num=20, w=torch.zeros(1 << 20))
    sealed = run.sealed()
    with volume(tmp_path / "small", 2) as small:
        run.directory = small.path
        (small.path / sealed.name).symlink_to(tmp_path / sealed.name)
        run.next()
        assert "cannot be put into the script's new directory: No space left on device" in run.problem
        assert "${resume_dir}" in run.problem
        assert not (run.out / "ckpt.pt").exists()
    run.taken.close()


@pytest.mark.slow
def test_other_nodes_wait_for_the_copy(runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """One makes it, on the file system of all; who is not wanted any more does not wait."""
    run = runs()
    run.next()
    save(run.out / "ckpt.pt", iter_num=20)
    run.sealed()
    run.taken.close()
    other = Adoption(run.flags, run.heard.put)
    following = world(2, run.resume.name)  # type: ignore[union-attr]
    said: queue.Queue[str] = queue.Queue()

    def then(problem: str, damage: object) -> None:
        assert damage is None
        said.put(problem)

    assert other.place(run.directory, following, then, first=False)
    with pytest.raises(queue.Empty):
        said.get(timeout=0.3)
    run.next()
    assert said.get(timeout=20) == ""
    assert other.place(run.directory, world(3, run.resume.name), then, first=False)  # type: ignore[union-attr]
    other.close()
    with pytest.raises(queue.Empty):
        said.get(timeout=0.3)
    run.taken.close()
    monkeypatch.setattr(save_dir, "_PATIENCE_SECONDS", 0.2)
    assert other.place(run.directory, world(4, run.resume.name), then, first=False)  # type: ignore[union-attr]
    assert "did not come into" in said.get(timeout=20)
    waiting = [thread for thread in threading.enumerate() if thread.name == "placing"]
    for thread in waiting:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of others")
def test_files_of_others_are_taken_where_they_can_be_read(runs: Callable[..., Run], tmp_path: Path) -> None:
    """Another user's file is copied, as it cannot be linked to everywhere; the copy is ours."""
    run = runs()
    run.next()
    save(run.out / "ckpt.pt", iter_num=20)
    os.chown(run.out / "ckpt.pt", 12345, 12345)
    os.chmod(run.out / "ckpt.pt", 0o444)
    sealed = run.sealed()
    assert (run.directory / sealed.name / "ckpt.pt").stat().st_uid == 0
    run.next()
    save(run.out / "ckpt.pt", iter_num=30)
    assert run.sealed().step == 30
    run.taken.close()


@pytest.mark.slow
def test_a_file_that_cannot_be_read_is_said(runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others of its directory do not wait for it longer than a look."""
    plain = adoption.complete

    def refuses(root: Path, unit: adoption.Unit, world_size: int, seen: int = 0) -> object:
        if unit.number == 9:
            raise PermissionError(13, "Permission denied", unit.path)
        return plain(root, unit, world_size)

    monkeypatch.setattr(adoption, "complete", refuses)
    run = runs()
    run.next()
    save(run.out / "step_8" / "model.pt")
    save(run.out / "step_9" / "model.pt")
    assert "Permission denied" in run.said()
    assert run.sealed().step == 8
    run.taken.close()


def test_a_macro_needs_its_directory() -> None:
    assert macros_of(["--x=${resume_dir:+a}", "${resume_path}"]) == {"resume_path"}
    assert not Adoption(["${resume_path}"], lambda event: None).wanted


@pytest.mark.slow
def test_a_damaged_resume_point_is_found_before_the_script_starts(runs: Callable[..., Run]) -> None:
    """Each byte counts, whoever reads the checkpoint: the run's own, by a macro, or a copy of it."""
    for number, flags in enumerate(((), ("--from=${resume_dir}",))):
        run = runs(*flags)
        run.epoch = 10 * number
        run.next()
        save(run.out / "ckpt.pt", iter_num=20 + number)
        manifest = run.sealed()
        path = run.directory / manifest.name / "ckpt.pt"
        text = bytearray(path.read_bytes())
        text[len(text) // 2] ^= 1
        path.write_bytes(text)
        run.next()
        assert run.damage is not None
        assert (run.damage.name, run.damage.digest, run.damage.file) == (manifest.name, manifest.digest, "ckpt.pt")
        text[len(text) // 2] ^= 1
        path.write_bytes(text)
        run.next()
        assert run.damage is None
        run.taken.close()


def test_a_run_without_a_checkpoint_starts_from_what_it_was_given(runs: Callable[..., Run], tmp_path: Path) -> None:
    """`--initial-checkpoint`, until there is a checkpoint of its own."""
    initial = tmp_path / "initial"
    initial.mkdir()
    run = runs("--from=${resume_dir}", initial=initial)
    assert f"--from={initial}" in run.next()
    save(run.out / "ckpt.pt", iter_num=20)
    manifest = run.sealed()
    assert f"--from={run.directory / manifest.name}" in run.next()
    run.taken.close()


@pytest.mark.slow
def test_only_a_save_that_was_begun_later_answers(runs: Callable[..., Run]) -> None:
    """A script that is asked to save was perhaps just saving: that is taken, and is not what it was asked for."""
    run = runs()
    run.next()
    save(run.out / "step_10" / "model.pt")
    run.sealed()
    assert not run.taken.wait_met(0.2, lambda: False)
    half = run.out / "step_20" / "model.pt"
    save(half)
    run.taken.request()
    with open(half, "ab"):
        os.utime(half)
    assert run.sealed().step == 20
    assert not run.taken.wait_met(0.3, lambda: False)
    save(run.out / "step_21" / "model.pt")
    begun = time.monotonic()
    assert run.taken.wait_met(60, lambda: False)
    assert time.monotonic() - begun < 40, "nothing more was under way"
    assert run.sealed().step == 21
    assert run.taken.met
    run.taken.close()


@pytest.mark.slow
def test_what_was_saved_while_the_agent_was_stopped_answers(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-Z until behind the notice, `fg`: it said that the script did not save, and ended it before it had looked."""
    clock = MagicMock()
    clock.monotonic = lambda: time.monotonic() + (100.0 if stopped.is_set() else 0.0)
    stopped, answers = threading.Event(), queue.Queue[bool]()
    monkeypatch.setattr(adoption, "time", clock)
    run = runs()
    run.next()
    save(run.out / "step_10" / "model.pt")
    run.sealed()
    monkeypatch.setattr(adoption, "LOOK_EVERY_SECONDS", 0.3)
    run.taken.request()
    threading.Thread(target=lambda: answers.put(run.taken.wait_met(30, lambda: False)), daemon=True).start()
    save(run.out / "step_20" / "model.pt")
    with pytest.raises(queue.Empty):
        answers.get(timeout=0.3)
    stopped.set()
    assert answers.get(timeout=30)
    assert run.sealed().step == 20
    run.taken.close()


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", [False, True])
def test_the_next_save_may_be_the_one_that_was_asked_for(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """One that was due is taken first; what is written meanwhile is waited for. Not all that a script ever saves."""
    plain, over = adoption.adopt, threading.Event()
    run = runs()
    run.next()
    save(run.out / "step_10" / "model.pt")
    run.sealed()

    def write(step: int) -> None:
        """It takes a few looks, or until the test's end."""
        path, until = run.out / f"step_{step}" / "model.pt", time.monotonic() + (100 if step == 22 else 0.5)
        save(path)
        while time.monotonic() < until and not over.wait(0.1):
            with open(path, "ab"):
                os.utime(path)

    writers = []

    def adopt(piece: Any, *rest: Any) -> Manifest:
        if piece.step == 20 or (goes_on and piece.step == 21):
            writers.append(threading.Thread(target=write, args=(piece.step + 1,)))
            writers[-1].start()
            while not (run.out / f"step_{piece.step + 1}" / "model.pt").exists():
                time.sleep(0.01)
        return plain(piece, *rest)

    monkeypatch.setattr(adoption, "adopt", adopt)
    run.taken.request()
    save(run.out / "step_20" / "model.pt")
    try:
        begun = time.monotonic()
        assert run.taken.wait_met(60, lambda: False)
        assert time.monotonic() - begun < 40
        assert run.heard.qsize() > 1, "what was being written was not waited for"
        assert [run.sealed().step for _ in range(2)] == [20, 21]
    finally:
        over.set()
        for writer in writers:
            writer.join()
    run.taken.close()
