"""Scripts whose main process saves alone with Accelerate, as most of diffusers' examples do."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.agent.storage import adoption
from dalsegno.agent.storage.alone import MainAlone
from dalsegno.agent.storage.foreign import survey
from dalsegno.agent.storage.layouts import Complete, complete
from dalsegno.agent.storage.volume_check import VolumeCheck
from tests.unit.agent.storage.test_adoption import ZERO_1, ZERO_3, states
from tests.unit.agent.storage.test_save_dir import Run, runs

__all__ = ["runs"]


def nothing_yet(run: Run, seconds: float = 0.4) -> None:
    """Nothing is taken or said in some looks."""
    with pytest.raises(queue.Empty):
        run.heard.get(timeout=seconds)


def judged(alone: MainAlone, root: Path, world_size: int, *, ended: bool = False) -> object:
    """The newest, behind two looks at it."""
    (members,) = survey(root).series()
    alone.judge(members[0], complete(root, members[0], world_size), ended=ended)
    return alone.judge(members[0], complete(root, members[0], world_size), ended=ended)


def diffusers(path: Path, *ranks: int) -> None:
    """As these scripts save: a hook writes the models below, and each rank that calls it its random states."""
    states(path / "unet", "diffusion_pytorch_model.bin")
    (path / "unet" / "config.json").write_text("{}")
    states(path, "optimizer.bin", "scheduler.bin", *(f"random_states_{rank}.pkl" for rank in ranks))


@pytest.mark.slow
def test_what_stands_long_enough_is_taken(runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """And all that comes behind it as soon as from one rank alone, without a word."""
    monkeypatch.setattr(adoption, "PATIENCE_LOOKS", 5)
    run = runs()
    run.next()
    diffusers(run.out / "checkpoint-20", 0)
    first = run.sealed()
    assert (first.step, first.shape.any_world_size, first.saved_as and first.saved_as.newest) == (
        20,
        True,
        "checkpoint-20",
    )
    monkeypatch.setattr(adoption, "PATIENCE_LOOKS", 10_000)
    shutil.rmtree(run.out / "checkpoint-20")
    diffusers(run.out / "checkpoint-40", 0)
    assert run.sealed().step == 40
    run.quiet()
    run.taken.close()


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [True, False])
def test_a_second_save_shows_it(runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, keeps: bool) -> None:
    """The main process went on: nobody else writes into the first one any more. It may be deleted by then."""
    monkeypatch.setattr(adoption, "PATIENCE_LOOKS", 10_000)
    run = runs()
    run.next()
    diffusers(run.out / "checkpoint-20", 0)
    nothing_yet(run)
    if not keeps:
        shutil.rmtree(run.out / "checkpoint-20")
    diffusers(run.out / "checkpoint-40", 0)
    assert run.sealed().step == 40
    diffusers(run.out / "checkpoint-60", 0)
    assert run.sealed().step == 60
    run.quiet()
    run.taken.close()


@pytest.mark.slow
@pytest.mark.parametrize("well", [True, False])
def test_the_last_save_is_taken_when_the_workers_have_ended(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, well: bool
) -> None:
    """Nobody is left who could write the others' random states. While they end, somebody may."""
    monkeypatch.setattr(adoption, "PATIENCE_LOOKS", 10_000)
    run = runs()
    run.next()
    diffusers(run.out / "checkpoint-20", 0)
    nothing_yet(run)
    if well:
        run.taken.settle(20)
    else:
        run.taken.interrupt()
        nothing_yet(run)
        run.taken.stopped(60.0, 10.0)
    assert run.sealed().step == 20
    run.taken.close()


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("${resume_dir}",), ()], ids=["is told where", "finds a copy"])
def test_a_resume_point_of_fewer_ranks_shows_nothing(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """All of one rank is all that there was. Its copy is no incomplete checkpoint, which was said of it for ever."""
    monkeypatch.setattr(adoption, "PATIENCE_LOOKS", 6)
    run = runs(*flags)
    run.next()
    diffusers(run.out / "checkpoint-20", 0)
    run.sealed()
    run.next()
    assert (run.out / "checkpoint-20").is_dir() == (not flags)
    nothing_yet(run, 1.0)
    monkeypatch.setattr(adoption, "PATIENCE_LOOKS", 10_000)
    run.next()
    diffusers(run.out / "checkpoint-40", 0)
    nothing_yet(run)
    diffusers(run.out / "checkpoint-40", 1)
    assert "checkpoint-40/random_states_1.pkl" in [one.path for one in run.sealed().files], "a rank was only late"
    run.taken.close()


@pytest.mark.parametrize("ranks", [(0, 1), (0, 2), (1, 2)])
def test_where_others_save_too_all_must(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    """Also behind a save of the main process's, at the end, and when it has stood for ever."""
    alone = MainAlone(tmp_path, 3, None, 0.0)
    for number in (20, 40):
        diffusers(tmp_path / f"step_{number}", *ranks)
        assert isinstance(judged(alone, tmp_path, 3), str)
    diffusers(tmp_path / "step_60", 0)
    for ended in (False, True):
        assert isinstance(judged(alone, tmp_path, 3, ended=ended), str)


@pytest.mark.parametrize(
    "shards",
    [
        ("pytorch_model_fsdp_rank0.bin", "optimizer_0_rank0.bin"),
        ("pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank1.bin", "optimizer_0_rank0.bin"),
        ("pytorch_model_fsdp_0/__0_0.distcp",),
        (f"pytorch_model/{ZERO_1[0]}",),
        (f"pytorch_model/{ZERO_1[0]}", f"pytorch_model/{ZERO_1[1]}"),
        tuple(f"pytorch_model/{name}" for name in ZERO_3[:2]),
        ("mp_rank_00/model_optim.pt",),
    ],
    ids=["fsdp", "fsdp without an optimizer", "distcp", "zero0", "zero1", "zero3", "megatron"],
)
@pytest.mark.parametrize("below", ["", "random/"])
def test_what_has_shards_of_ranks_needs_all_of_them(tmp_path: Path, shards: tuple[str, ...], below: str) -> None:
    """The other ranks' are of weights or an optimizer, without which nothing loads it."""
    alone = MainAlone(tmp_path, 2, None, 0.0)
    for number in (20, 40):
        states(tmp_path / f"{below}step_{number}", *shards, "random_states_0.pkl")
        for ended in (False, True):
            assert isinstance(judged(alone, tmp_path, 2, ended=ended), str)


@pytest.mark.slow
@pytest.mark.parametrize("late", [True, False])
def test_at_the_end_what_is_not_listed_yet_is_waited_for(
    runs: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Another rank's states may be on another node. A look that takes longer than that is not the last one."""
    monkeypatch.setattr(adoption, "PATIENCE_LOOKS", 10_000)
    monkeypatch.setattr(adoption, "SHARE", 0)
    monkeypatch.setattr(VolumeCheck, "measure", lambda self: setattr(self, "lag", 0.5))
    run = runs()
    run.next()
    diffusers(run.out / "checkpoint-20", 0)
    nothing_yet(run)
    timer = threading.Timer(0.4, lambda: states(run.out / "checkpoint-20", "random_states_1.pkl"))
    if late:
        timer.start()
    else:
        assert run.taken._adopter is not None
        # why: as long as a slow file system needs.
        monkeypatch.setattr(run.taken._adopter, "_is_growing", lambda found: time.sleep(1.2))
    run.taken.settle(20)
    assert ("checkpoint-20/random_states_1.pkl" in [one.path for one in run.sealed().files]) == late
    run.taken.close()


def test_one_look_shows_nothing(tmp_path: Path) -> None:
    """A script that deletes a save of all ranks may have deleted the others' files first."""
    alone = MainAlone(tmp_path, 2, None, 100.0)
    for number in (20, 40):
        diffusers(tmp_path / f"step_{number}", 0)
    (newer, older) = survey(tmp_path).series()[0]
    for _ in range(2):
        diffusers(tmp_path / "step_20", 0)
        found = [alone.judge(unit, complete(tmp_path, unit, 2), ended=False) for unit in (newer, older)]
        assert all(isinstance(one, str) for one in found)
    alone.judge(older, complete(tmp_path, older, 2), ended=False)
    assert isinstance(alone.judge(newer, complete(tmp_path, newer, 2), ended=False), Complete)
