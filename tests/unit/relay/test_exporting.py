"""Which checkpoint an export takes, and when it says that this may never have been committed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml", reason="needs the extra relay")

from dalsegno.agent.commands.dalsegno import run as dalsegno
from dalsegno.elastic.checkpoint import Manifest
from dalsegno.relay import exporting
from dalsegno.relay.milestones.commander_client import Away
from dalsegno.relay.volume import Volume
from tests.support.hub import scene
from tests.support.jobs.commander import run_file

UNSURE = "which may never have been committed"


class Scene:
    """A volume with the run's commit of step 40, and a checkpoint of step 80 that was sealed and never committed."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        (folder / "volume").mkdir()
        self.file, self.pack = run_file(folder), folder / "pack"
        self.pack.mkdir()
        made, volume = scene.Volume(folder / "made"), Volume(folder / "volume", "my-run")
        self.head: Manifest = made.save(40)
        made.save(80)
        volume.job.mkdir(parents=True)
        volume.hf.mkdir()
        self.run_dir = volume.job / "r1"
        shutil.move(made.run_dir, self.run_dir)
        self.answer: dict[str, Any] | Exception = {}
        patch.setattr(exporting, "CommanderClient", lambda *_: self)

    def run(self) -> dict[str, Any]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def exported(self) -> list[str]:
        assert dalsegno(["relay", "export", str(self.file), str(self.pack)]) == 0
        return [path.name for path in self.pack.glob("runs/my-run/ckpt/.store/my-run/*/step-*")]


@pytest.fixture
def its(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scene:
    one = Scene(tmp_path, monkeypatch)
    one.answer = {"head": {"name": one.head.name, "step": 40, "digest": one.head.digest}}
    return one


def test_the_last_commit_is_taken_and_no_line_said(its: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    """What is newer was never committed."""
    assert its.exported() == ["step-40.e1.0"]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("why", ["damaged", "gone", "no head", "away"])
def test_what_may_never_have_been_committed_is_said(its: Scene, capfd: pytest.CaptureFixture[str], why: str) -> None:
    """Wherever the last commit cannot be found on the volume, one line says why, and what that means."""
    place, line = its.run_dir / its.head.name, "step-40.e1.0, the run's last commit, is not on the volume"
    if why == "damaged":
        (place / "MANIFEST.json").write_text(json.dumps({"cut": "off"}))
    elif why == "gone":
        shutil.rmtree(place)
    elif why == "no head":
        its.answer, line = {"head": None}, "the Commander knows no commit of the run"
    else:
        its.answer, line = Away("no answer"), "no answer"
    assert its.exported() == ["step-80.e1.0"]
    (said,) = [one for one in capfd.readouterr().err.splitlines() if "dalsegno relay: " in one]
    assert line in said
    assert UNSURE in said
