"""What a script has not saved again since it resumed stays in the run's checkpoints."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.agent.storage import adoption
from dalsegno.agent.storage.naming import slot_of
from dalsegno.agent.storage.save_dir import Adoption
from dalsegno.elastic.checkpoint import Manifest, verify
from tests.unit.agent.storage.test_adoption import ORIGIN
from tests.unit.agent.storage.test_save_dir import Run, save

pytestmark = pytest.mark.slow

CHECKPOINT, BEST = "checkpoint.pth.tar", "model_best.pth.tar"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    monkeypatch.setattr(adoption, "LOOK_EVERY_SECONDS", 0.05)
    return lambda *flags, **options: Run(tmp_path, *flags, **options)


def files_of(manifest: Manifest) -> list[str]:
    return [one.path for one in manifest.files]


def first_epoch(run: Run, *names: str, **content: object) -> Manifest:
    """Saves these, without a pause, and ends."""
    run.next()
    for name in names:
        save(run.out / name, **content)
    made = run.sealed()
    run.taken.close()
    return made


def test_the_best_model_goes_on_through_all_epochs(runs: Callable[..., Run]) -> None:
    """Though the script saves it once, and the checkpoints that had it are pruned; until the script has another one."""
    run = runs("--resume", "${resume_path}")
    first = first_epoch(run, CHECKPOINT, BEST, epoch=3)
    best = (run.directory / first.name / BEST).read_bytes()
    made, step = first, 3
    for _ in range(2):
        assert run.next()[2:] == (str(run.directory / made.name / CHECKPOINT),)
        for _ in range(2):
            step += 1
            save(run.out / CHECKPOINT, epoch=step)
            before, made = made, run.sealed()
            assert (made.step, files_of(made)) == (step, [CHECKPOINT, BEST])
            assert made.saved_as is not None
            assert made.saved_as.newest == CHECKPOINT
            shutil.rmtree(run.directory / before.name)
        run.taken.close()
    assert (run.directory / made.name / BEST).read_bytes() == best
    verify(run.directory / made.name, made)
    run.next()
    save(run.out / CHECKPOINT, epoch=8)
    save(run.out / BEST, epoch=8)
    made = run.sealed()
    assert (run.directory / made.name / BEST).read_bytes() != best
    (run.out / BEST).unlink()
    save(run.out / CHECKPOINT, epoch=9)
    assert files_of(run.sealed()) == [CHECKPOINT], "it was the script's own in this epoch, and it has deleted it"
    run.taken.close()


def test_each_series_has_its_newest(runs: Callable[..., Run]) -> None:
    """A new one takes the place of the older one; a link to what goes on goes on, too."""
    run = runs("${resume_dir}")
    run.next()
    save(run.out / "step_100" / "model.pt", w=1)
    save(run.out / "best" / "model.pt", w=1)
    (run.out / "chosen").symlink_to("best/model.pt")
    run.sealed()
    run.next()
    save(run.out / "step_110" / "model.pt", w=2)
    made = run.sealed()
    assert files_of(made) == ["best/model.pt", "step_110/model.pt"]
    assert made.saved_as is not None
    assert (made.saved_as.links, made.saved_as.newest) == ((("chosen", "best/model.pt"),), "step_110")
    run.next()
    save(run.out / "best" / "model.pt", w=3)
    made = run.sealed()
    assert (made.step, files_of(made)) == (111, ["best/model.pt", "step_110/model.pt"])
    assert made.saved_as is not None
    assert dict(made.saved_as.numbers)["step_#"] == 110
    run.next()
    save(run.out / "step_120" / "model.pt", w=4)
    assert files_of(run.sealed()) == ["best/model.pt", "step_120/model.pt"]
    run.taken.close()


def test_a_checkpoint_only_together_is_not_taken_in_part(runs: Callable[..., Run]) -> None:
    """A model of this epoch and an optimizer of the last one, when the workers were stopped between the two."""
    run = runs("${resume_dir}")
    first_epoch(run, "model.pt", "optimizer.pt", w=1)
    run.next()
    run.taken.interrupt()
    save(run.out / "model.pt", w=2)
    run.taken.stopped(5.0, 0.0)
    run.taken.close()
    assert run.heard.empty()
    run.next()
    save(run.out / "model.pt", w=2)
    save(run.out / "optimizer.pt", w=2)
    made = run.sealed()
    own = [(run.directory / made.name / name).stat().st_mtime_ns for name in files_of(made)]
    assert own == [(run.out / name).stat().st_mtime_ns for name in ("model.pt", "optimizer.pt")]
    run.taken.close()


def test_parts_of_ranks_that_are_gone_do_not_go_on(runs: Callable[..., Run]) -> None:
    """Two ranks saved, and one saves now."""
    run = runs("${resume_dir}")
    first_epoch(run, "optim_rank0.pt", "optim_rank1.pt", "best.pt", w=1)
    run.next()
    save(run.out / "optim_rank0.pt", w=2)
    assert files_of(run.sealed()) == ["best.pt", "optim_rank0.pt"]
    run.taken.close()


def test_what_a_larger_world_saved_goes_on(runs: Callable[..., Run]) -> None:
    """Through several smaller ones: it is complete, though there are no files of as many ranks as save now."""
    run = runs("${resume_dir}")
    names = [f"best/{name}" for name in ("model.pt", "random_states_0.pkl", "random_states_1.pkl")]
    first_epoch(run, *names, w=1)
    for step in (2, 3):
        run.next(dataclasses.replace(ORIGIN, world_size=3))
        save(run.out / "last.pt", step=step)
        assert files_of(run.sealed()) == [*names, "last.pt"]
        run.taken.close()


def test_what_the_script_found_in_its_directory_and_deleted_does_not_go_on(runs: Callable[..., Run]) -> None:
    run = runs()
    first_epoch(run, CHECKPOINT, BEST, epoch=3)
    run.next()
    (run.out / BEST).unlink()
    save(run.out / CHECKPOINT, epoch=4)
    assert files_of(run.sealed()) == [CHECKPOINT]
    run.taken.close()


def test_it_goes_on_with_what_is_taken_for_a_lost_node(runs: Callable[..., Run]) -> None:
    """The next one that looks, whether or not the first one had taken anything in that epoch."""
    run = runs("${resume_path}")
    first_epoch(run, CHECKPOINT, BEST, epoch=3)
    run.next()
    run.taken.close()
    late = Adoption(run.flags, run.heard.put)
    for epoch in (4, 5):
        save(run.out / CHECKPOINT, epoch=epoch)
        late.take_late(run.directory, run.world, ORIGIN, 60.0)
        made = Manifest.read(run.directory / f"step-{epoch}.e2.1")
        assert files_of(made) == [CHECKPOINT, BEST]


@pytest.mark.parametrize(
    ("path", "slot"),
    [
        ("a/optim_rank0.pt", "a/optim_rank#.pt"),
        ("model-00001-of-00003.safetensors", "model-#.safetensors"),
        ("last-v1.ckpt", "last.ckpt"),
        ("fold1.pt", "fold1.pt"),
        ("best_0.91.pt", "best_0.91.pt"),
        ("rank0/model.pt", "rank0/model.pt"),
    ],
)
def test_what_replaces_a_file_without_a_number(path: str, slot: str) -> None:
    """Versions, shards and parts of ranks; no other numbers, which may be names."""
    assert slot_of(path) == slot
