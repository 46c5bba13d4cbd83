"""``convert_directory``: any DeepSpeed checkpoint into any directory, in place, gone on with after a kill."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from dalsegno.agent.commands import dalsegno
from dalsegno.elastic.checkpoint import CheckpointStore, Manifest, verify
from dalsegno.elastic.checkpoint.files import checksum
from dalsegno.elastic.universal import (
    Effort,
    EnvironmentFailed,
    SourceBad,
    Watch,
    Wish,
    convert,
    convert_directory,
    standalone,
    streaming,
)
from dalsegno.elastic.universal.journal import JOURNAL
from dalsegno.elastic.universal.loading import load
from dalsegno.elastic.universal.output import ConversionOutput
from dalsegno.elastic.universal.readers import is_read, reading
from tests.support.checkpoints.conversions import Died, convert_halfway, die_after, files_below, target_of
from tests.support.checkpoints.shards import write_shards
from tests.support.workers.zero_runs import STEPS, Held, Sources, read_held, run_worker
from tests.unit.agent.storage.test_storage import make_checkpoint

pytestmark = pytest.mark.timeout(180)
SEAL = importlib.import_module("dalsegno.elastic.checkpoint.seal")  # hidden by the function
OPTIMIZER = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


@pytest.fixture
def plain(sources: Sources, tmp_path: Path) -> Path:
    """A ZeRO-2 checkpoint of two ranks as a script without ours leaves it: nothing seals it."""
    source = tmp_path / "global_step3"
    shutil.copytree(sources.get(2, 2)[0], source, ignore=shutil.ignore_patterns("MANIFEST.json"))
    return source


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def test_the_files_are_the_same_as_in_a_run(sources: Sources, plain: Path, tmp_path: Path) -> None:
    """Complete at the end, listed with checksums, and named where DeepSpeed looks for a name."""
    sealed = tmp_path / "step-3.e1.0"
    shutil.copytree(sources.get(2, 2)[0], sealed)
    convert(sealed, target_of(sealed))
    target = tmp_path / "out" / "universal"
    made = convert_directory(plain, target)
    assert list(made) == list(Manifest.read(target_of(sealed)).files)
    assert files_below(target) == sorted(["CONVERTED.json", *(entry.path for entry in made)])
    listed = json.loads((target / "CONVERTED.json").read_bytes())["files"]
    assert [checksum(target, entry.path) for entry in made] == list(made)
    assert [(entry["path"], entry["xxh3_128"]) for entry in listed] == [(entry.path, entry.xxh3_128) for entry in made]
    assert (target.parent / "latest_universal").read_text() == "universal"


def test_a_runs_own_names_are_sealed_as_a_runs(sources: Sources, tmp_path: Path) -> None:
    """So that the run and `dalsegno checkpoints` know it."""
    source = tmp_path / "step-3.e1.0"
    shutil.copytree(sources.get(2, 2)[0], source)
    convert_directory(source, target_of(source, 7), latest=False)
    verify(target_of(source, 7), Manifest.read(target_of(source, 7)))
    assert not (tmp_path / "latest_universal").exists()


@pytest.mark.parametrize("wish", [Wish(stage=3), Wish(reset_optimizer=True)], ids=["stage", "reset"])
def test_what_a_run_would_not_expect_is_not_sealed_as_a_runs(sources: Sources, tmp_path: Path, wish: Wish) -> None:
    source = tmp_path / "step-3.e1.0"
    shutil.copytree(sources.get(2, 2)[0], source)
    convert_directory(source, target_of(source), wish=wish)
    assert not (target_of(source) / "MANIFEST.json").exists()
    with pytest.raises(ValueError, match="its own stage"):
        convert(source, target_of(source, 2), wish=wish)


def test_a_killed_one_is_gone_on_with(plain: Path, tmp_path: Path) -> None:
    """SIGKILL in the middle; the same call keeps what was finished and verifies, and deletes what was not."""
    target = tmp_path / "universal"
    convert_halfway(plain, target, 5, "--anywhere")
    finished = [json.loads(line)["path"] for line in (target / JOURNAL).read_text().splitlines()[1:]]
    assert len(finished) == 5
    os.chmod(target / finished[0], 0o644)
    with open(target / finished[0], "r+b") as file:
        file.seek(100)
        file.write(b"?")
    (target / "zero" / "stray.pt").write_bytes(b"half a file")
    kept = {path: (target / path).stat().st_ino for path in finished[1:]}
    made = convert_directory(plain, target)
    assert {path: (target / path).stat().st_ino for path in kept} == kept
    whole = convert_directory(plain, tmp_path / "again")
    assert made == whole
    assert files_below(target) == files_below(tmp_path / "again")


def full_once(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """The first call that makes names durable fails."""
    sync, calls = module.fsync_tree, itertools.count()

    def fsync_tree(directory: Path) -> None:
        if next(calls) == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(directory)

    monkeypatch.setattr(module, "fsync_tree", fsync_tree)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_disk_that_is_full_at_the_very_end(
    sources: Sources, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sealed: bool
) -> None:
    """All files were made, and none is made again."""
    source, target = plain, tmp_path / "universal"
    if sealed:
        source = tmp_path / "step-3.e1.0"
        shutil.copytree(sources.get(2, 2)[0], source)
        target = target_of(source)
    full_once(monkeypatch, SEAL if sealed else standalone)
    with pytest.raises(EnvironmentFailed, match="no space left"):
        convert_directory(source, target)
    made = {path: (target / path).stat().st_ino for path in files_below(target) if path != JOURNAL}
    assert convert_directory(source, target)
    assert {path: (target / path).stat().st_ino for path in made} == made
    assert set(files_below(target)) == {*made, "MANIFEST.json" if sealed else "CONVERTED.json"}


def test_a_lease_that_failed_at_the_very_end_leaves_its_files(
    sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one links to them."""
    source = tmp_path / "step-3.e1.0"
    shutil.copytree(sources.get(2, 2)[0], source)
    full_once(monkeypatch, SEAL)
    with pytest.raises(EnvironmentFailed, match="no space left"):
        convert(source, target_of(source))
    convert(source, target_of(source, 2), earlier=[target_of(source)])
    verify(target_of(source, 2), Manifest.read(target_of(source, 2)))
    for path in files_below(target_of(source)):
        assert path == JOURNAL or os.path.samefile(target_of(source) / path, target_of(source, 2) / path)


@pytest.mark.parametrize("torn", [False, True], ids=["sealed", "torn"])
def test_one_that_was_killed_at_its_seal(plain: Path, tmp_path: Path, torn: bool) -> None:
    """Its journal is still there. Half a seal is written anew, and a whole one is all there is to do."""
    target = tmp_path / "universal"
    with pytest.raises(Died):
        convert_directory(plain, target, watch=die_after(3))
    begun = (target / JOURNAL).read_bytes()
    assert convert_directory(plain, target)
    (target / JOURNAL).write_bytes(begun)
    if torn:
        os.truncate(target / "CONVERTED.json", 40)
    assert bool(convert_directory(plain, target)) is torn
    assert not (target / JOURNAL).exists()
    assert json.loads((target / "CONVERTED.json").read_bytes())["files"]
    os.truncate(target / "CONVERTED.json", 40)
    with pytest.raises(EnvironmentFailed, match="is damaged: remove it, or choose another directory"):
        convert_directory(plain, target)


def test_two_at_a_time(plain: Path, tmp_path: Path) -> None:
    """The second one is told; it would delete what the first one is writing."""
    target = tmp_path / "universal"
    with pytest.raises(Died):
        convert_directory(plain, target, watch=die_after(3))
    with open(target / JOURNAL) as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(EnvironmentFailed, match="another conversion is writing"):
            convert_directory(plain, target)
    assert convert_directory(plain, target)


@pytest.mark.parametrize("sealed", [True, False])
def test_nobody_prunes_what_is_read(
    sources: Sources, tmp_path: Path, capsys: pytest.CaptureFixture[str], sealed: bool
) -> None:
    """By hand, in the middle of a conversion to another place, which failed with a file that was gone."""
    source, read = tmp_path / "run" / "step-3.e1.0", list[int]()
    prune = ["checkpoints", "prune", str(source.parent), "--keep=1"]
    shutil.copytree(sources.get(2, 2)[0], source)
    described = Manifest.read(source)
    make_checkpoint(source.parent, "step-4.e1.0", job_id=described.job_id, run_id=described.run_id)
    (source.parent / "FINISHED.json").write_text("{}")
    if not sealed:
        (source / "MANIFEST.json").unlink()
        shutil.rmtree(source.parent / ".sealed", ignore_errors=True)

    def moved(count: int) -> None:
        if not read:
            assert dalsegno.run(prune) == 0
        read.append(count)

    assert convert_directory(source, tmp_path / "out", watch=Watch(moved=moved))
    assert read
    assert f"{source}: in use by a conversion, stays" in capsys.readouterr().out
    assert dalsegno.run(prune) == 0
    assert not source.exists()


def test_prune_asks_before_each_deletion(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before may take minutes, in which a conversion begins."""
    run, prune, begun = tmp_path / "run", CheckpointStore.prune, contextlib.ExitStack()
    for step in (3, 4, 5):
        make_checkpoint(run, f"step-{step}.e1.0")
    (run / "FINISHED.json").write_text("{}")

    def slowly(store: CheckpointStore, names: Iterable[str], **options: Any) -> dict[str, OSError]:
        deleted = set(names)
        (other,) = {"step-3.e1.0", "step-4.e1.0"} - deleted
        begun.enter_context(reading(run / other))
        return prune(store, deleted, **options)

    monkeypatch.setattr(CheckpointStore, "prune", slowly)
    with begun:
        assert dalsegno.run(["checkpoints", "prune", str(run), "--keep=1"]) == 0
    assert sum((run / f"step-{step}.e1.0").exists() for step in (3, 4)) == 1
    assert "in use by a conversion, stays" in capsys.readouterr().out


def test_a_look_does_not_stop_a_conversion(tmp_path: Path) -> None:
    """Whoever asks whether somebody reads has the lock for a moment."""
    source = tmp_path / make_checkpoint(tmp_path, "step-3.e1.0").name
    with open(source / "MANIFEST.json") as looked:
        fcntl.flock(looked, fcntl.LOCK_EX)
        over = threading.Timer(0.2, lambda: fcntl.flock(looked, fcntl.LOCK_UN))
        over.start()
        with reading(source):
            assert is_read(source)
        over.join()
    assert not is_read(source)


def test_complete_already(plain: Path, tmp_path: Path) -> None:
    """Nothing is made twice, and another source's is not taken for it."""
    target = tmp_path / "universal"
    assert convert_directory(plain, target)
    latest = tmp_path / "latest_universal"
    for before in (None, "another"):
        latest.unlink() if before is None else latest.write_text(before)
        assert convert_directory(plain, target) == ()
        assert latest.read_text() == "universal"
    rewrite(plain / "mp_rank_00_model_states.pt", lambda content: content.update(note="another"))
    with pytest.raises(EnvironmentFailed, match="holds something else already"):
        convert_directory(plain, target)


def test_the_beginning_of_another_conversion(plain: Path, tmp_path: Path) -> None:
    """Neither of another source nor of other wishes: their files would be mixed."""
    target = tmp_path / "universal"
    with pytest.raises(Died):
        convert_directory(plain, target, watch=die_after(3))
    with pytest.raises(EnvironmentFailed, match="conversion of something else: remove it"):
        convert_directory(plain, target, wish=Wish(stage=3))


def test_directories_that_are_not_for_it(plain: Path, tmp_path: Path) -> None:
    """One line each, before anything is read."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("?")
    with pytest.raises(EnvironmentFailed, match="is not empty"):
        convert_directory(plain, tmp_path / "mine")
    with pytest.raises(EnvironmentFailed, match="lies in the checkpoint"):
        convert_directory(plain, plain / "universal")
    with pytest.raises(EnvironmentFailed, match="is a file"):
        convert_directory(plain, tmp_path / "mine" / "thesis.txt")
    with pytest.raises(SourceBad, match="holds no files of a DeepSpeed checkpoint"):
        convert_directory(tmp_path / "mine", tmp_path / "other")
    with pytest.raises(EnvironmentFailed, match="is no directory"):
        convert_directory(tmp_path / "nothing", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step3", "mine"]


def forget_moments(source: Path, ranks: tuple[int, ...]) -> None:
    for rank in ranks:

        def forget(content: dict[str, Any]) -> None:
            for group in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
                del group["exp_avg"], group["exp_avg_sq"]

        rewrite(source / OPTIMIZER.format(rank), forget)


@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["all", "one-rank"])
def test_moments_that_are_missing(plain: Path, tmp_path: Path, ranks: tuple[int, ...]) -> None:
    """DeepSpeed's converter leaves them out without a word; here it is an error that says how to do without them."""
    forget_moments(plain, ranks)
    with pytest.raises(SourceBad, match="--reset-optimizer"):
        convert_directory(plain, tmp_path / "universal")


def test_moments_that_are_missing_at_stage_3(tmp_path: Path) -> None:
    """They lie elsewhere in its files."""
    source = tmp_path / "global_step3"
    write_shards(source, {"weight": (3, 5)}, stage=3)

    def forget(content: dict[str, Any]) -> None:
        content["optimizer_state_dict"]["optimizer_state_dict"]["state"].clear()

    for rank in (0, 1):
        rewrite(source / OPTIMIZER.format(rank), forget)
    with pytest.raises(SourceBad, match="Adam's moments are not there"):
        convert_directory(source, tmp_path / "universal")


@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.full)])
def test_a_reset_that_was_asked_for(sources: Sources, tmp_path: Path, stage: int) -> None:
    """The weights of the checkpoint, and an optimizer as at its first step."""
    made, saved = sources.get(stage, 2)
    source = tmp_path / "global_step3"
    shutil.copytree(made, source, ignore=shutil.ignore_patterns("MANIFEST.json"))
    if stage == 2:
        forget_moments(source, (0, 1))
    target = tmp_path / "universal"
    convert_directory(source, target, wish=Wish(reset_optimizer=True))
    resume = {"load": str(source), "form": "universal", "universal": str(target), "step": STEPS}
    run_worker(1, {"stage": stage, "steps": 1, "out": str(tmp_path / "out"), **resume})
    loaded: Held = read_held(tmp_path / "out", "loaded", 1)
    for name, states in loaded.states.items():
        assert torch.equal(states["fp32"], saved.states[name]["fp32"]), name
        assert not states["exp_avg"].any()
        assert not states["exp_avg_sq"].any()
    assert set(loaded.ranks[0]["steps"]) == {0.0}


def test_ranks_that_are_at_different_steps(plain: Path, tmp_path: Path) -> None:
    """Files of two saves that were mixed."""

    def advance(content: dict[str, Any]) -> None:
        for group in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            group["step"] = group["step"] + 1

    rewrite(plain / OPTIMIZER.format(1), advance)
    with pytest.raises(SourceBad, match="different numbers of optimizer steps"):
        convert_directory(plain, tmp_path / "universal")


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"round_robin_gradients": True}, "round_robin_gradients"),
        ({"mics_shard_size": 2}, "mics_shard_size"),
        ({"offload_optimizer": {"device": "nvme"}}, "nvme"),
    ],
)
@pytest.mark.parametrize("described", [False, True], ids=["ours", "upstream"])
def test_layouts_that_nobody_converts_rightly(
    plain: Path, tmp_path: Path, zero: dict[str, Any], message: str, described: bool
) -> None:
    """Refused also where DeepSpeed's own converter would be asked, which makes wrong files without a word."""

    def change(content: dict[str, Any]) -> None:
        content["ds_config"]["zero_optimization"].update(zero)
        if described:  # what only DeepSpeed's converter knows
            content["universal_checkpoint_info"]["tp_replicated_parameter_patterns"] = [".*bias"]

    rewrite(plain / "mp_rank_00_model_states.pt", change)
    with pytest.raises(EnvironmentFailed, match=message):
        convert_directory(plain, tmp_path / "universal")


def test_a_name_that_deepspeeds_converter_trips_over(sources: Sources, tmp_path: Path) -> None:
    """With ``[`` in a parameter's name it drops the moments and says Done; with ``+`` it raises."""
    made, saved = sources.get(2, 2, model="names")
    with pytest.raises(EnvironmentFailed, match=r"converter (left out|failed)"):
        convert_directory(made, tmp_path / "theirs", wish=Wish(upstream=True))
    convert_directory(made, tmp_path / "ours")
    for name, states in saved.states.items():
        for state, value in states.items():
            content = load(tmp_path / "ours" / "zero" / name / f"{state}.pt")["param"]
            assert torch.equal(content.reshape(-1).double(), value), f"{name}/{state}"


def test_files_of_torchs_older_format(plain: Path, tmp_path: Path) -> None:
    """They cannot be read in pieces: DeepSpeed's converter takes them."""
    path = plain / OPTIMIZER.format(0)
    torch.save(torch.load(path, weights_only=False), path, _use_new_zipfile_serialization=False)
    made = convert_directory(plain, tmp_path / "universal")
    rewrite(path, lambda content: None)
    again = convert_directory(plain, tmp_path / "again")
    assert [entry.path for entry in made] == [entry.path for entry in again]
    one, two = (load(tmp_path / name / "zero/body.weight/exp_avg.pt") for name in ("universal", "again"))
    assert torch.equal(one["param"], two["param"])


def test_a_class_that_is_allowed(plain: Path, tmp_path: Path) -> None:
    """A script's own class in the model states, by name and for this conversion alone."""
    import argparse

    rewrite(plain / "mp_rank_00_model_states.pt", lambda content: content.update(args=argparse.Namespace(a=1)))
    with pytest.raises(EnvironmentFailed, match=r"argparse\.Namespace"):
        convert_directory(plain, tmp_path / "universal")
    with pytest.raises(EnvironmentFailed, match="is not a class"):
        convert_directory(plain, tmp_path / "universal", wish=Wish(allow=("os.system",)))
    with pytest.raises(EnvironmentFailed, match="cannot be allowed"):
        convert_directory(plain, tmp_path / "universal", wish=Wish(allow=("nowhere.Thing",)))
    assert convert_directory(plain, tmp_path / "universal", wish=Wish(allow=("argparse.Namespace",)))
    with pytest.raises(EnvironmentFailed, match=r"argparse\.Namespace"):
        convert_directory(plain, tmp_path / "other")


def test_a_file_that_was_not_made(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is missing is found before anything says that the directory is complete."""
    stream = ConversionOutput.stream

    def forget(self: ConversionOutput, path: str, *rest: Any) -> None:
        if path != "zero/body.bias/exp_avg.pt":
            stream(self, path, *rest)

    monkeypatch.setattr(ConversionOutput, "stream", forget)
    with pytest.raises(EnvironmentFailed, match=r"left out zero/body\.bias/exp_avg\.pt"):
        convert_directory(plain, tmp_path / "universal")
    assert not (tmp_path / "universal" / "CONVERTED.json").exists()


def test_parameters_are_worked_on_side_by_side(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that wait for each other come through."""
    number, meeting, write = itertools.count(), threading.Barrier(2, timeout=10), streaming._write_state

    def meet(*arguments: Any) -> None:
        if next(number) < 2:
            meeting.wait()
        write(*arguments)

    monkeypatch.setattr(streaming, "_write_state", meet)
    assert convert_directory(plain, tmp_path / "universal", wish=Wish(effort=Effort(threads=2)))


def test_effort() -> None:
    """What it may take is checked before anything is done."""
    assert Effort(threads=2, memory=1 << 20).piece == 128 << 10
    assert Effort(threads=1, memory=1 << 40).piece == 4 << 20
    for wrong in ({"threads": 0}, {"threads": 4, "memory": 1000}):
        with pytest.raises(ValueError, match="threads"):
            Effort(**wrong)


def test_any_effort_makes_the_same(plain: Path, tmp_path: Path) -> None:
    """Pieces of one page, of odd numbers of them, and of everything at once."""
    made = [
        convert_directory(plain, tmp_path / f"{number}", wish=Wish(effort=effort), watch=Watch())
        for number, effort in enumerate([Effort(1, 16 << 10), Effort(3, 200 << 10), Effort(8, 1 << 30)])
    ]
    assert made[0] == made[1] == made[2]


MANY = """
import resource, sys
from pathlib import Path
from dalsegno.elastic.universal import convert_directory
resource.setrlimit(resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
convert_directory(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.mark.full
def test_more_ranks_than_a_shell_lets_open_files(tmp_path: Path) -> None:
    """All their files are open at a time."""
    values = write_shards(tmp_path / "source", {"a": (500,), "b": (77, 3)}, world=150)
    command = [sys.executable, "-c", MANY, str(tmp_path / "source"), str(tmp_path / "target")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for name, states in values.items():
        there = load(tmp_path / "target" / "zero" / name / "fp32.pt")["param"]
        assert torch.equal(there.flatten(), states["fp32"])
