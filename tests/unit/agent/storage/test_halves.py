"""A save in several numbered files is taken whole or not at all."""

from __future__ import annotations

import itertools
import os
import queue
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dalsegno.agent.storage import adoption
from dalsegno.agent.storage.foreign import FILES, FoundUnits, Unit
from dalsegno.agent.storage.halves import is_parted
from dalsegno.agent.storage.layouts import Complete, FileState
from dalsegno.agent.storage.slices import SaveSlice
from dalsegno.elastic.checkpoint import Manifest
from tests.unit.agent.storage.test_save_dir import Run, runs, save

__all__ = ["runs"]

Runs = Callable[..., Run]


def begin(path: Path) -> bytes:
    """As `torch.save` is in the middle of it; returns the rest."""
    made = path.parent.parent / f"made-{path.name}"
    save(made, w=1)
    data = made.read_bytes()
    path.write_bytes(data[:-100])
    return data[-100:]


def end(path: Path, rest: bytes) -> None:
    with open(path, "ab") as file:
        file.write(rest)


def names(manifest: Manifest) -> list[str]:
    return [one.path for one in manifest.files]


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_a_half_is_not_taken_while_the_other_is_written(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """HiFi-GAN's `g_` and `do_`: a join restarted all workers at the first, which went on with the old optimizer."""
    monkeypatch.setattr(adoption, "PATIENCE_LOOKS", 20)
    run = runs()
    run.next()
    if not first:
        save(run.out / "do_0010.pt")
        save(run.out / "g_0010.pt")
        while len(run.sealed().files) < 2:
            pass
    rest = begin(run.out / "do_0020.pt")
    save(run.out / "g_0020.pt")
    for _ in range(15):  # for longer than patience lasts
        with pytest.raises(queue.Empty):
            run.heard.get(timeout=0.1)
        end(run.out / "do_0020.pt", b"0")
    os.truncate(run.out / "do_0020.pt", os.path.getsize(run.out / "do_0020.pt") - 15)
    end(run.out / "do_0020.pt", rest)
    sealed = run.sealed()
    assert (sealed.step, names(sealed)) == (20, ["do_0020.pt", "g_0020.pt"])
    run.quiet()
    run.taken.close()


@pytest.mark.slow
@pytest.mark.parametrize("there", ["half", "not begun", "half of the first"])
def test_a_half_whose_other_never_comes_is_not_taken(runs: Runs, there: str) -> None:
    """The workers were killed in the middle of it: the next start has the pair before."""
    run = runs()
    run.next()
    if "first" not in there:
        save(run.out / "do_0010.pt")
        save(run.out / "g_0010.pt")
        while len(run.sealed().files) < 2:
            pass
    run.taken.interrupt()
    if "half" in there:
        begin(run.out / "do_0020.pt")
    save(run.out / "g_0020.pt")
    run.taken.stopped(40, 0)
    assert run.heard.empty(), run.heard.get_nowait()
    run.taken.close()


@pytest.mark.slow
def test_a_half_of_which_there_is_little_is_no_note(runs: Runs) -> None:
    """HiFi-GAN's names have no ending, and a small file without one may name a checkpoint."""
    run = runs()
    run.next()
    begin(run.out / "do_00000010")
    save(run.out / "g_00000010", w=torch.zeros(2000))
    for _ in range(5):
        with pytest.raises(queue.Empty):
            run.heard.get(timeout=0.1)
        end(run.out / "do_00000010", bytes(500))
    (run.out / "do_00000010").unlink()
    save(run.out / "do_00000010", w=torch.zeros(2000))
    assert names(run.sealed()) == ["do_00000010", "g_00000010"]
    run.taken.close()


@pytest.mark.slow
def test_a_half_that_its_writer_has_left_holds_nothing_up_for_ever(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is named."""
    monkeypatch.setattr(adoption, "PATIENCE_LOOKS", 10)
    run = runs()
    run.next()
    begin(run.out / "do_0020.pt")
    save(run.out / "g_0020.pt")
    assert "do_0020.pt is not written to its end" in run.said()
    assert names(run.sealed()) == ["g_0020.pt"]
    run.taken.close()


@pytest.mark.slow
def test_who_always_writes_a_half_is_told(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is ever taken then, and nobody would know why."""
    monkeypatch.setattr(adoption, "PATIENCE_LOOKS", 10)
    number, survey = itertools.count(1), adoption.survey

    def train_and_survey(root: Path, pattern: str) -> FoundUnits:
        """A thread of its own would be late now and then, and what it saved then be taken."""
        each = next(number)
        begin(root / f"do_{each:04d}.pt")
        save(root / f"g_{each:04d}.pt")
        return survey(root, pattern)

    monkeypatch.setattr(adoption, "survey", train_and_survey)
    run = runs()
    run.next()
    assert "is never known to be whole" in run.said()
    run.taken.close()


@pytest.mark.slow
def test_one_whose_pair_is_not_begun_is_waited_for_a_little(runs: Runs) -> None:
    """Ranks may gather the optimizer's state meanwhile. What is no pair any more is taken."""
    run = runs()
    run.next()
    save(run.out / "optim_0010.pt")
    save(run.out / "model_0010.pt")
    while len(run.sealed().files) < 2:
        pass
    began = time.monotonic()
    save(run.out / "model_0020.pt")
    assert names(run.sealed()) == ["model_0020.pt", "optim_0010.pt"]
    assert time.monotonic() - began >= adoption.UNSURE_LOOKS * adoption.LOOK_EVERY_SECONDS
    run.taken.close()


def piece(*names: str) -> SaveSlice:
    """All of one folder; the first are new."""
    units = []
    for name in names:
        kind, _, number = name.partition("_")
        unit = Unit(name, f"{kind}_#", FILES, int(number), (name,))
        units.append(Complete(unit, "files", True, (FileState(name, 1, 1, 1),)))
    return SaveSlice(tuple(units), (units[0],), 1, units[0], ())


@pytest.mark.parametrize(
    ("names", "before", "parted"),
    [
        (("g_2", "do_1"), {"g_#": 1, "do_#": 1}, True),
        (("g_2",), {"g_#": 1, "do_#": 1}, True),
        (("g_2", "do_2"), {"g_#": 1, "do_#": 1}, False),
        (("g_2", "do_1"), {"g_#": 1, "do_#": 0}, False),
        (("g_2", "best_1"), {"g_#": 1, "best_#": 1}, False),
        (("best_2", "g_1"), {"g_#": 1, "best_#": 1}, False),
        (("g_2", "do_1"), {"g_#": 1, "a/do_#": 1}, False),
        (("g_2",), {"g_#": 1, "*": 1}, False),
        (("g_2", "do_1"), {}, False),
    ],
)
def test_which_are_parted(names: tuple[str, ...], before: dict[str, int | None], parted: bool) -> None:
    """Those that had one number. The best one is saved now and then, and a file without a number belongs to all."""
    assert is_parted(piece(*names), before) is parted
