"""Numbers in names that count no steps: of ranks, and of files that are written in turn."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.storage import adoption
from dalsegno.agent.storage.save_dir import Adoption
from dalsegno.elastic.checkpoint import Manifest
from dalsegno.protos import control_pb2

from .test_adoption import ORIGIN, sealed_step, world

_TIME = iter(range(10**9, 2 * 10**9))


class Script:
    """What a script saves below its directory, and what becomes the run's."""

    def __init__(self, run_dir: Path, epoch: int = 1) -> None:
        self.run_dir, self.heard = run_dir, queue.Queue[ev.Event]()
        self.taken = Adoption(["${save_dir}"], self.heard.put)
        self.begin(world(epoch))

    def begin(self, opened: control_pb2.World) -> None:
        self.out = self.run_dir / f"e{opened.epoch}"
        self.taken.begin(self.run_dir, opened, ORIGIN, [], first=True)

    def save(self, name: str, step: int | None = None, **more: object) -> None:
        """A checkpoint of torch; its time of change is later than those before, however fast the test is."""
        made = self.out / f".{name}"
        torch.save({**({} if step is None else {"step": step}), "noise": os.urandom(8), **more}, made)
        os.utime(made, (now := next(_TIME), now))
        os.replace(made, self.out / name)

    def next(self) -> list[str]:
        """The files of the next checkpoint of the run."""
        event = self.heard.get(timeout=20)
        sealed_step(event)
        assert isinstance(event, ev.WorkerSaid)
        return [entry.path for entry in Manifest.read(self.run_dir / event.message.sealed.name).files]

    def nothing(self) -> bool:
        """Whether nothing more becomes the run's."""
        self.taken.settle(20)
        return self.heard.empty()


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    monkeypatch.setattr(adoption, "LOOK_EVERY_SECONDS", 0.02)
    made = Script(tmp_path)
    yield made
    made.taken.close()


@pytest.mark.slow
@pytest.mark.parametrize("counts", [True, False])
def test_files_that_are_written_in_turn(script: Script, counts: bool) -> None:
    """Each save is the run's from the second round on at the latest, whether it says its step or not."""
    script.save("ckpt_5.pt", 5 if counts else None)
    assert script.next() == ["ckpt_5.pt"]
    script.save("ckpt_4.pt", 10 if counts else None)
    assert script.nothing(), "this may still be an older one that was written late"
    for number in range(3, 9):
        script.save(f"ckpt_{4 + number % 2}.pt", 5 * number if counts else None)
        assert script.next() == [f"ckpt_{4 + number % 2}.pt"]
    assert script.nothing()


def test_one_file_with_a_number_that_is_written_over(script: Script) -> None:
    """`model_0.pt`, of a rank 0 that is alone, or a name like `resnet_50.pt`."""
    for step in (10, 20, 30):
        script.save("resnet_50.pt", step)
        assert script.next() == ["resnet_50.pt"]


def test_the_last_step_that_is_saved_twice_is_one(script: Script) -> None:
    """On schedule, and once more at the end."""
    for name, step in (("step_90.pt", 90), ("step_100.pt", 100)):
        script.save(name, step)
        assert script.next() == [name]
    script.save("step_100.pt", 100)
    assert script.nothing()


def test_one_file_of_each_rank(script: Script) -> None:
    """They are one checkpoint, once all are of the same step."""
    script.save("model_0.pt", 10)
    assert script.next() == ["model_0.pt"], "nobody can know that there will be another"
    script.save("model_1.pt", 10)
    assert script.next() == ["model_0.pt", "model_1.pt"]
    for step in (20, 30):
        script.save("model_1.pt", step)
        assert script.nothing(), "the other rank still saves"
        script.save("model_0.pt", step)
        assert script.next() == ["model_0.pt", "model_1.pt"]


def test_epochs_that_are_as_many_as_ranks(script: Script) -> None:
    """`epoch_0.pt` and `epoch_1.pt` in a world of two are two checkpoints, as what is in them says."""
    for epoch in range(4):
        script.save(f"epoch_{epoch}.pt", None, epoch=epoch)
        assert script.next() == [f"epoch_{epoch}.pt"]


@pytest.mark.parametrize("step", [50, 10])
def test_the_next_world_knows_that_they_are_written_in_turn(script: Script, step: int) -> None:
    """So the first of them counts by what is in it: the script goes on, or began anew."""
    for saved in (20, 40):
        script.save("ckpt_1.pt", saved)
        sealed = script.heard.get(timeout=20)
        assert isinstance(sealed, ev.WorkerSaid)
    manifest = Manifest.read(script.run_dir / sealed.message.sealed.name)
    opened = world(2, manifest.name)
    opened.resume.source.ref.digest, opened.resume.source.step = manifest.digest, manifest.step
    script.begin(opened)
    script.save("ckpt_0.pt", step)
    if step > 40:
        assert script.next() == ["ckpt_0.pt"]
    else:
        problem = script.heard.get(timeout=20)
        assert isinstance(problem, ev.ManifestRead)
        assert "older than the resume point" in problem.message


@pytest.mark.parametrize("name", ["epoch_{}.pth", "net_epoch={}.pt", "step-{}.pt", "ep0-ba{}.pt"])
def test_names_that_count_passes_are_of_no_ranks(script: Script, name: str) -> None:
    """MMEngine has its epoch deeper in the file, a plain state has none. A note of the newest is its own."""
    for epoch in (1, 2):
        (script.out / "last_checkpoint").write_text(str(script.out / name.format(epoch)))
        script.save(name.format(epoch), meta={"epoch": epoch})
        assert script.next() == sorted(["last_checkpoint", name.format(epoch)])


def test_a_note_of_one_of_several_files(script: Script) -> None:
    """They are one checkpoint together, and it names what a script goes on from."""
    (script.out / "last_checkpoint").write_text(str(script.out / "generator.pth"))
    script.save("generator.pth")
    script.save("critic.pth")
    assert script.next() == ["critic.pth", "generator.pth", "last_checkpoint"]
