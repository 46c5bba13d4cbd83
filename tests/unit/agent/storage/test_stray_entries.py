"""Whatever lies in a checkpoint directory: each entry stands by itself, is said, and nothing waits for it.

What agents tell their master of such a directory: `test_survey`.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from dalsegno.agent.commands import dalsegno
from dalsegno.agent.decisions import events as ev
from dalsegno.agent.storage import adoption
from dalsegno.agent.storage.adoption import Adopter, save_directory
from dalsegno.agent.storage.foreign import survey
from dalsegno.agent.storage.layouts import complete
from dalsegno.elastic.checkpoint import Best, CheckpointStore, Manifest, inspect, inventory, retirable
from dalsegno.elastic.rank.collective import Solo
from dalsegno.elastic.saving.resuming import newest
from dalsegno.elastic.universal import ConversionError, convert_directory
from tests.support.checkpoints.damage import HARM, loop
from tests.unit.agent.storage.test_adoption import ORIGIN, ZERO_1, states, world
from tests.unit.agent.storage.test_storage import make_checkpoint

pytestmark = pytest.mark.timeout(120)

Output = pytest.CaptureFixture[str]

# Without "other", which is a sealed checkpoint.
SPOILT = [name for name in HARM if name != "other"]


def _file(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


def _pipe(path: Path) -> None:
    shutil.rmtree(path)
    os.mkfifo(path)


def _no_utf8(path: Path) -> None:
    (path / "MANIFEST.json").unlink()
    (path / os.fsdecode(b"mod\xffel")).touch()


STRAY: dict[str, Callable[[Path], object]] = {
    **{name: lambda path, harm=HARM[name][0]: harm(path / "MANIFEST.json") for name in SPOILT},  # type: ignore[misc]
    "loop": loop,
    "file": _file,
    "pipe itself": _pipe,
    "names": _no_utf8,
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three checkpoints with a best one, and others beside it that are no run's."""
    run = tmp_path / "job" / "run-0001"
    for step in (1, 2, 4):
        make_checkpoint(run, f"step-{step}.e1.1", best=Best("step-1.e1.1", "loss", "min", 0.5), metric=float(step))
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "job" / "pipe")
    os.mkdir(os.fsencode(tmp_path) + b"/job/run-\xff")
    return run


@pytest.mark.parametrize("stray", STRAY)
def test_the_other_checkpoints_of_a_run_count(run: Path, tmp_path: Path, capsys: Output, stray: str) -> None:
    """Listed, verified, shown, kept and pruned, by hand and by retention, beside one of which nobody can tell."""
    odd = make_checkpoint(run, "step-3.e1.1").name
    STRAY[stray](run / odd)
    sound = ["step-1.e1.1", "step-2.e1.1", "step-4.e1.1"]
    assert [manifest.name for manifest in inventory(run)] == sound
    assert odd in [one.name for one in inspect(run).unsealed]
    assert dalsegno.run(["checkpoints", "ls", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == sound
    assert lines[4].startswith(f"  {odd}  not usable: ")
    assert len(lines) == 5
    assert dalsegno.run(["checkpoints", "verify", str(tmp_path)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if line.endswith(": intact")] == [f"{run / name}: intact" for name in sound]
    assert len(said) == 4
    assert dalsegno.run(["checkpoints", "show", str(run / odd)]) == 2
    assert capsys.readouterr().err.startswith(f"dalsegno: error: {run / odd} is no sealed checkpoint: ")
    assert retirable(inventory(run), 1).old == ("step-2.e1.1",)
    (run / "FINISHED.json").touch()
    assert dalsegno.run(["checkpoints", "prune", str(tmp_path), "--keep=1"]) == 0
    assert not (run / "step-2.e1.1").exists()
    assert [manifest.name for manifest in inventory(run)] == ["step-1.e1.1", "step-4.e1.1"]
    # Only what was never sealed goes with the old ones.
    assert os.path.lexists(run / odd)


@pytest.mark.parametrize("stray", STRAY)
def test_a_session_of_its_own_goes_on_from_what_is_sound(
    run: Path, caplog: pytest.LogCaptureFixture, stray: str
) -> None:
    """And says which checkpoint was damaged, where it can be told."""
    odd = make_checkpoint(run, "step-5.e1.1").name
    STRAY[stray](run / odd)
    with caplog.at_level(logging.WARNING):
        point = newest(CheckpointStore(run), Solo(), 1)
    assert point is not None
    assert point.ref.name == "step-4.e1.1"
    assert any(f"{odd} is damaged" in message for message in caplog.messages) == (stray != "loop")


def test_a_session_does_not_start_over_because_manifests_are_damaged(run: Path) -> None:
    """Nothing sound is left: a person decides."""
    for name in ("step-1.e1.1", "step-2.e1.1", "step-4.e1.1"):
        HARM["flipped"][0](run / name / "MANIFEST.json")
    with pytest.raises(RuntimeError, match=r"all 3 checkpoints in .* are damaged"):
        newest(CheckpointStore(run), Solo(), 1)


def test_nobody_goes_back_behind_a_checkpoint_that_cannot_be_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be sound; an older one does not matter. (Permissions would not stop root.)"""
    read = Manifest.read.__func__  # type: ignore[attr-defined]
    locked = "step-4.e1.1"

    def refuses(cls: type[Manifest], path: Path) -> Manifest:
        if path.name == locked:
            raise PermissionError(13, "Permission denied", str(path))
        manifest: Manifest = read(cls, path)
        return manifest

    monkeypatch.setattr(Manifest, "read", classmethod(refuses))
    assert [manifest.name for manifest in inventory(run)] == ["step-1.e1.1", "step-2.e1.1"]
    with pytest.raises(OSError, match=r"step-4.e1.1 cannot be read: .*Permission denied.*; let it be read, or move"):
        newest(CheckpointStore(run), Solo(), 1)
    locked = "step-2.e1.1"
    point = newest(CheckpointStore(run), Solo(), 1)
    assert point is not None
    assert point.ref.name == "step-4.e1.1"


def test_directories_that_cannot_be_read_are_said(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """One line and exit code 1; the runs beside them are listed, verified and pruned."""
    closed = make_checkpoint(tmp_path / "job" / "run-0002", "step-1.e1.1").name
    (run / "FINISHED.json").touch()
    listdir = os.listdir

    def refuses(path: Path | int) -> list[str]:
        if isinstance(path, Path) and path.name == "run-0002":
            raise PermissionError(13, "Permission denied", str(path))
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refuses)
    for action, last in (("ls", "4.2 MB"), ("verify", "intact"), ("prune", "step-2.e1.1")):
        flags = ["--keep=1"] if action == "prune" else []
        assert dalsegno.run(["checkpoints", action, str(tmp_path), *flags]) == 1
        first, *others = capsys.readouterr().out.splitlines()
        assert first == f"{tmp_path / 'job' / 'run-0002'}: it cannot be read: Permission denied"
        assert any(last.split()[-1] in line for line in others)
    assert (tmp_path / "job" / "run-0002" / closed / "MANIFEST.json").exists()


def test_names_in_no_encoding_are_printed_escaped(tmp_path: Path, capsys: Output) -> None:
    """Of the directory that is given, of runs, and of files that should not be there."""
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/d\xff\x1b[31m\n"))
    directory = root / "run-0001" / make_checkpoint(root / "run-0001", "step-1.e1.1").name
    (directory / os.fsdecode(b"more\xfe")).touch()
    assert dalsegno.run(["checkpoints", "ls", str(root)]) == 0
    assert dalsegno.run(["checkpoints", "verify", str(root)]) == 1
    assert dalsegno.run(["checkpoints", "prune", str(root), "--keep=1"]) == 1
    assert dalsegno.run(["checkpoints", "ls", str(root / "nothing")]) == 2
    out, err = capsys.readouterr()
    shown = f"{tmp_path}/d\\udcff\\x1b[31m\\n"
    assert out.splitlines()[0] == f"{shown}/run-0001"
    assert f"{shown}/run-0001/step-1.e1.1: step-1.e1.1/more\\udcfe: EXTRA_FILE" in out.splitlines()
    assert err == f"dalsegno: error: {shown}/nothing is no directory\n"


@pytest.mark.parametrize("journal", ["pipe", "brackets", "link"])
def test_a_conversion_is_not_held_up_by_what_is_called_its_journal(tmp_path: Path, journal: str) -> None:
    """One line; nothing is written through it."""
    source, target = tmp_path / "global_step1", tmp_path / "out"
    states(source, *ZERO_1)
    target.mkdir()
    path = target / "JOURNAL.jsonl"
    if journal == "pipe":
        os.mkfifo(path)
    elif journal == "link":
        path.symlink_to(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").write_text("mine")
    else:
        path.write_bytes(b"[" * 200_000 + b"\n")
    with pytest.raises(ConversionError) as caught:
        convert_directory(source, target)
    if journal == "link":
        assert (tmp_path / "elsewhere").read_text() == "mine"
    # What cannot be parsed is torn, and begun anew; then the source turns out to be none.
    assert ("mp_rank_00" if journal == "brackets" else "no regular file") in str(caught.value)


# ---- adoption --------------------------------------------------------------------------------------------------------


def test_scripts_checkpoints_are_adopted_beside_stray_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pipes, loops, endless numbers, archives of several disks: each is passed over, and what is whole is taken."""
    monkeypatch.setattr(adoption, "LOOK_EVERY_SECONDS", 0.05)
    told: queue.SimpleQueue[ev.Event] = queue.SimpleQueue()
    directory = save_directory(tmp_path, 2)
    states(directory / "global_step30", *ZERO_1)
    states(directory / "global_step31", *ZERO_1)
    os.mkfifo(directory / "global_step31" / "more")
    states(directory / "global_step32", *ZERO_1)
    (directory / "global_step32" / "zero").symlink_to(directory / "global_step32")
    (directory / "global_step33").symlink_to(directory / "global_step33")
    os.mkfifo(directory / "global_step34")
    states(directory / f"global_step{'9' * 5000}"[:200], *ZERO_1)
    states(directory / "global_step35", *ZERO_1)
    (directory / "global_step35" / os.fsdecode(b"mod\xffel")).touch()
    states(directory / "global_step36", *ZERO_1[1:])
    # The end of a large archive that says that it is the second disk's.
    (directory / "global_step36" / ZERO_1[0]).write_bytes(
        b"PK\x06\x07" + b"\0\0\0\1" + bytes(8) + b"\0\0\0\2" + b"PK\5\6" + bytes(4) + b"\xff" * 12 + b"\0\0"
    )
    os.mkfifo(directory / "latest")
    states(directory / "global_step37", ZERO_1[0])
    states(directory / "global_step38", *ZERO_1)
    os.mkfifo(directory / "global_step38" / "more")
    adopter = Adopter(tmp_path, world(2), ORIGIN, told.put)
    try:
        said = []
        while not isinstance(event := told.get(timeout=60), ev.WorkerSaid):
            assert isinstance(event, ev.ManifestRead)
            said.append(event.message)
    finally:
        adopter.close()
    assert event.message.sealed.step == 30
    assert sum("more in it is a link, a pipe or a device: only files are taken" in text for text in said) == 1
    assert any("zero in it is a link, a pipe or a device: only files are taken" in text for text in said)
    assert any("not UTF-8" in text for text in said)
    assert any("no regular file" in text for text in said)  # `latest`, of what would be stage 0
    assert all(text.isprintable() for text in said)
    (units,) = survey(directory).series()
    assert [unit.number for unit in units] == [38, 37, 36, 35, 32, 31, 30]
    assert isinstance(complete(directory, units[2], 2), str)
