"""What people are shown on the volume, and that nothing of it can stop a pod."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dalsegno.relay import volume as module
from dalsegno.relay.volume import Volume


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    one = Volume(tmp_path, "my-run")
    assert one.problem(must_be_mount=False) == ""
    return one


def synced(revision: str) -> bytes:
    return json.dumps({"event": "hf_synced", "revision": revision}).encode() + b"\n"


def test_a_run_has_its_folders(tmp_path: Path) -> None:
    """On a volume that knows nothing of it; what is shared by runs is beside them. What a person put there stays."""
    (tmp_path / "runs" / "my-run" / "data").mkdir(parents=True)
    (tmp_path / "runs" / "my-run" / "data" / "train.jsonl").write_text("mine")
    for run_id in ("my-run", "other"):
        assert Volume(tmp_path, run_id).problem(must_be_mount=False) == ""
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_dir()}
    own = ("", "/data", "/logs", "/hf", "/ckpt", "/ckpt/_staging", "/ckpt/.store")
    runs = {f"runs/{run_id}{folder}" for run_id in ("my-run", "other") for folder in own}
    assert found == {"runs", "shared", "shared/base_models", "shared/wheelhouse", *runs}
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["train.jsonl"], "a trial is left"


def test_a_place_whose_name_the_locale_cannot_spell_is_named_so(tmp_path: Path) -> None:
    """It is there, but not for a process whose file names are ASCII."""
    place = tmp_path / "donn\u00e9es"
    place.mkdir()
    code = "from pathlib import Path; from dalsegno.relay.volume import Volume\n"
    code += f"print(ascii(Volume(Path({str(place)!a}), 'my-run').problem(must_be_mount=False)))"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=os.environ | ascii_only, capture_output=True, text=True, timeout=60, check=True)
    assert "file names are ascii here: set LC_ALL=C.UTF-8" in done.stdout, done
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "''\n"


def test_the_last_revision_is_read_once(volume: Volume) -> None:
    """Only what is new in `events.log` is read; a line that is just being written is read later."""
    assert volume.last_revision() is None
    volume.events.write_bytes(b"x" * 100 + b"\n" + synced("a"))
    assert volume.last_revision() == "a"
    text = volume.events.read_bytes()
    # Nobody writes there again; here it shows that it is not read again.
    volume.events.write_bytes(text.replace(b'"a"', b'"z"'))
    assert volume.last_revision() == "a"
    with open(volume.events, "ab") as file:
        file.write(synced("b")[:-5])
        file.flush()
        assert volume.last_revision() == "a"
        file.write(synced("b")[-5:])
    assert volume.last_revision() == "b"
    volume.events.write_bytes(synced("c"))
    assert volume.last_revision() == "c", "somebody has emptied it"
    volume.events.unlink()
    assert volume.last_revision() == "c"


def test_a_new_volume_knows_the_revision_that_was_restored_to_it(volume: Volume) -> None:
    """Until another milestone is made."""
    volume.note("restored", checkpoint="step-5.e1.1", step=5, revision="old")
    assert volume.last_revision() == "old"
    with open(volume.events, "ab") as file:
        file.write(synced("new"))
    assert volume.last_revision() == "new"


def test_a_line_that_was_cut_off_does_not_spoil_the_next(volume: Volume) -> None:
    """A full volume takes half a line."""
    volume.note("acquire")
    with open(volume.events, "ab") as file:
        file.write(b'{"event": "res')
    volume.note("started")
    first, cut, last = volume.events.read_bytes().splitlines()
    assert (json.loads(first)["event"], cut, json.loads(last)["event"]) == ("acquire", b'{"event": "res', "started")


def test_pointers_never_stop_a_pod(
    volume: Volume, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The volume fails under them: one line, once."""

    def fails(*_: object, **__: object) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    for name in ("glob", "symlink_to", "unlink"):
        monkeypatch.setattr(Path, name, fails)
    monkeypatch.setattr(module, "replace_file", fails)
    for step in (1, 2):
        volume.show("run-0001", f"step-{step}.e1.1", step, 1)
        volume.write_state({"epoch": 1})
    assert capsys.readouterr().err.count("\n") == 3


def test_a_pod_that_stood_still_points_nowhere(volume: Volume) -> None:
    """It hears of its last commit when somebody else has gone on: `latest` and state.json stay theirs."""
    for name, epoch in (("step-5.e1.1", 1), ("step-10.e2.1", 2)):
        (volume.job / "run-0001" / name).mkdir(parents=True)
        volume.write_state({"epoch": epoch})
        volume.show("run-0001", name, 5 * epoch, epoch)
    volume.show("run-0001", "step-5.e1.1", 5, 1)
    volume.write_state({"epoch": 1})
    assert (volume.ckpt / "latest").resolve().name == "step-10.e2.1"
    assert json.loads(volume.state.read_bytes()) == {"epoch": 2}


def test_a_volume_without_links_has_small_files_instead(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each says where its checkpoint is, and is gone with it; what somebody else has there stays."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refused)
    (volume.ckpt / "step_notes").write_text("mine")
    for step in (5, 10):
        (volume.job / "run-0001" / f"step-{step}.e1.1").mkdir(parents=True)
        volume.show("run-0001", f"step-{step}.e1.1", step, 1)
    for name, step in (("step_00000005", 5), ("step_00000010", 10), ("latest", 10)):
        there = (volume.ckpt / name).read_text().strip()
        assert volume.ckpt / there == volume.job / "run-0001" / f"step-{step}.e1.1"
    (volume.job / "run-0001" / "step-5.e1.1").rmdir()
    volume.tidy()
    assert sorted(one.name for one in volume.ckpt.glob("step_*")) == ["step_00000010", "step_notes"]


def test_a_volume_that_fails_in_the_pre_flight_is_one_line(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount whose server is gone answers with errors that are neither absence nor fullness."""

    def fails(*_: object) -> None:
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    monkeypatch.setattr(module.shutil, "disk_usage", fails)
    assert "Transport endpoint is not connected; mount it again" in volume.problem(must_be_mount=False)
