"""`dalsegno relay export`: what it copies is enough to go on from, is verified, and is never half there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from dalsegno.agent.commands.dalsegno import run as dalsegno
from dalsegno.elastic.checkpoint import Manifest
from tests.support.jobs.commander import TOKEN, own_lines, run_file
from tests.support.jobs.pods import Run, relayed

pytestmark = [pytest.mark.full, pytest.mark.timeout(280)]


def exported(run: Run, pack: Path, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """The exit code, and what is printed on both ways."""
    capfd.readouterr()
    code = dalsegno(["relay", "export", str(run.file), str(pack)])
    said = capfd.readouterr()
    return code, said.out, said.err


def checkpoints(place: Path) -> list[Path]:
    return sorted(place.glob("runs/my-run/ckpt/.store/my-run/*/step-*"))


def test_a_run_goes_on_from_an_export(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest commit, verified; the volume is lost, its export takes its place, and no step is made twice."""
    monkeypatch.setenv("DALSEGNO_TOKEN", TOKEN)
    pack = tmp_path / "pack"
    pack.mkdir()
    with relayed(tmp_path, "--pace=0.1", "--end-when-asked", "--save-every=1000", steps=100) as run:
        a = run.pod("a")
        run.wait_step(20)
        a.notice()
        assert a.process.wait(60) == 75, run.said()
        saved = run.state()["last_ok_step"]
        code, out, err = exported(run, pack, capfd)
        assert (code, err, f"step {saved}, " in out) == (0, "", True)
        assert [int(path.name.split(".")[0][5:]) for path in checkpoints(pack)] == [saved]
        assert (pack / "runs/my-run/run.yaml").read_bytes() == run.file.read_bytes()
        assert json.loads((pack / "runs/my-run/state.json").read_text())["last_ok_step"] == saved
        assert TOKEN not in "".join(path.read_text(errors="replace") for path in pack.rglob("*") if path.is_file())
        assert dalsegno(["relay", "verify", str(run.file), f"--at={pack}"]) == 0
        assert exported(run, pack, capfd)[0] == 0, "again, into what is there"
        shutil.rmtree(tmp_path / "volume")
        pack.rename(tmp_path / "volume")
        b = run.pod("b")
        assert b.process.wait(120) == 0, run.said()
        assert run.epochs()[max(run.epochs())][0].step == saved + 1, run.said()
        run.assert_one_history(100)


def test_a_run_goes_on_from_an_export_that_is_older_than_its_last_commit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pod says what it misses, and what goes on without it; what was exported was deleted on the volume since."""
    monkeypatch.setenv("DALSEGNO_TOKEN", TOKEN)
    pack = tmp_path / "pack"
    pack.mkdir()
    with relayed(tmp_path, "--pace=0.05", steps=160, keep_last=1) as run:
        a = run.pod("a")
        run.wait_saved(20)
        assert exported(run, pack, capfd)[0] == 0
        saved = Manifest.read(checkpoints(pack)[0]).step
        run.wait_saved(saved + 60)
        a.vanish()
        shutil.rmtree(tmp_path / "volume")
        pack.rename(tmp_path / "volume")
        b = run.pod("b")
        run.wait(lambda: f"or --allow-older goes on from step {saved}" in b.said, "what it misses")
        b.vanish()
        c = run.pod("c", "--allow-older")
        assert c.process.wait(120) == 0, run.said()
        assert f"is intact (step {saved}), without step-" in c.said
        assert run.epochs()[max(run.epochs())][0].step == saved + 1, run.said()
        run.assert_one_history(160)


def test_a_pod_on_an_export_takes_nothing_from_a_pod_that_trains(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits with one line, and verifies nothing again until the run is free. Then it goes back."""
    monkeypatch.setenv("DALSEGNO_TOKEN", TOKEN)
    pack = tmp_path / "pack"
    pack.mkdir()
    with relayed(tmp_path, "--pace=0.1", steps=200) as run:
        a = run.pod("a")
        run.wait_saved(20)
        assert exported(run, pack, capfd)[0] == 0
        saved = Manifest.read(checkpoints(pack)[0]).step
        run.wait_saved(saved + 20)
        other = tmp_path / "other.yaml"
        other.write_text(json.dumps(json.loads(run.file.read_text()) | {"l1_root": str(pack)}))
        b = replace(run, file=other).pod("b", "--allow-older")
        waits = f"the run goes back to step {saved} once "
        run.wait(lambda: waits in b.said, "b waits")
        made = run.steps()[-1].step
        run.wait_step(made + 50)
        assert (b.said.count("is intact"), b.said.count(waits)) == (1, 1), b.said
        a.vanish()
        assert b.process.wait(120) == 0, run.said()
        assert (b.said.count("is intact"), b.said.count(waits)) == (2, 1), b.said
        assert run.epochs()[max(run.epochs())][0].step == saved + 1, run.said()
        run.assert_one_history(200)


def test_what_is_damaged_is_not_exported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest is damaged: the one before. All are: exit code 1, nothing there. The Commander is away: said."""
    monkeypatch.setenv("DALSEGNO_TOKEN", TOKEN)
    pack = tmp_path / "pack"
    pack.mkdir()
    with relayed(tmp_path, "--pace=0.15", steps=60) as run:
        assert run.pod("a").process.wait(120) == 0, run.said()
        *_, before, newest = checkpoints(tmp_path / "volume")
        (newest / "trainer_state.json").write_text("{}")
        code, out, err = exported(run, pack, capfd)
        assert (code, before.name in out, f"{newest.name} is damaged" in err) == (0, True, True), (out, err)
        (checkpoints(pack)[0] / "trainer_state.json").write_text("{}")
        assert dalsegno(["relay", "verify", str(run.file), f"--at={pack}"]) == 1
        assert exported(run, pack, capfd)[0] == 0
        assert dalsegno(["relay", "verify", str(run.file), f"--at={pack}"]) == 0, "the damaged copy was replaced"
        run.commander.end()
        code, _, err = exported(run, pack, capfd)
        assert (code, "which may never have been committed" in err) == (0, True)
        for path in checkpoints(tmp_path / "volume"):
            (path / "trainer_state.json").write_text("{}")
        other = tmp_path / "other"
        other.mkdir()
        code, out, err = exported(run, other, capfd)
        assert (code, out, "is the run's and intact: nothing was copied" in err) == (1, "", True)
        assert checkpoints(other) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="a small disk is mounted by root")
def test_a_full_place_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1, and no half of a checkpoint is left."""
    monkeypatch.setenv("DALSEGNO_TOKEN", TOKEN)
    pack = tmp_path / "pack"
    pack.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(pack)], check=False)
    if mounted.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        with relayed(tmp_path, "--pace=0.02", steps=40) as run:
            assert run.pod("a").process.wait(120) == 0, run.said()
            code, out, err = exported(run, pack, capfd)
            assert (code, out, "No space left on device" in err) == (1, "", True)
            assert checkpoints(pack) == []
            assert list((pack / "runs/my-run/ckpt/_staging").iterdir()) == []
    finally:
        subprocess.run(["umount", "-l", str(pack)], check=False)


def test_where_it_cannot_go(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The volume itself, what is not there, a run that is not there: one line, exit code 2."""
    file = run_file(tmp_path)
    root = tmp_path / "volume" / "runs" / "my-run"
    assert dalsegno(["relay", "export", str(file), str(tmp_path)]) == 2
    assert "nothing of my-run is seen on this volume" in capfd.readouterr().err
    root.mkdir(parents=True)
    for place, line in ((tmp_path / "none", "is no directory"), (tmp_path / "volume", "is the volume itself")):
        assert dalsegno(["relay", "export", str(file), str(place)]) == 2
        error = capfd.readouterr().err
        assert (len(own_lines(error)), line in error) == (1, True), error
