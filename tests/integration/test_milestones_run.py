"""A run with a real Commander and real agents: its milestones outlive its checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra relay")
pytest.importorskip("yaml", reason="needs the extra relay")

from dalsegno.elastic.checkpoint import inventory
from dalsegno.relay.milestones.commander_client import Milestone
from dalsegno.relay.milestones.restore import restore_newest
from tests.support.hub.client import Hub
from tests.support.hub.scene import REPO, milestones_on
from tests.support.jobs.commander import TOKEN, Commander, commander, run_file

pytestmark = [pytest.mark.timeout(200), pytest.mark.full]

# It says where it began. The first one stands still at step 50, so that its newest checkpoint becomes a milestone.
TRAINER = """
import json, pathlib, sys, time
save, resume = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None
state = json.loads((pathlib.Path(resume) / "state.json").read_text()) if resume else {"step": 0}
print("began at", state["step"], flush=True)
while state["step"] < 4000:
    time.sleep(0.1 if resume or state["step"] < 50 else 1000)
    state["step"] += 1
    if state["step"] % 50 == 0:
        path = pathlib.Path(save) / f"checkpoint-{state['step']}"
        path.mkdir(exist_ok=True)
        (path / "model.bin").write_bytes(bytes([state["step"] % 256]) * 100_000)
        (path / "state.json").write_text(json.dumps(state))
"""


class Pod:
    """An agent and a mirror beside it, on a volume."""

    def __init__(self, root: Path, name: str, one: Commander, hub: Hub, file: Path) -> None:
        self.volume, self.log = root / "volume", root / f"{name}.log"
        self.hf, self.checkpoints = self.volume / "hf", self.volume / "ckpt" / "my-run"
        self.hf.mkdir(parents=True, exist_ok=True)
        (root / "train.py").write_text(TRAINER)
        self._environment = {**hub.environment(root / f"home-{name}"), "HF_HUB_DISABLE_XET": "1"}
        self._environment |= {"DALSEGNO_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
        self._agent = ["dalsegno.agent.commands.dlrover_run", "--nnodes=1:1", "--nproc-per-node=1", "--job-id=my-run"]
        self._agent += [f"--master={one.runs['my-run']['address']}"]
        self._agent += [f"--checkpoint-dir={self.volume / 'ckpt'}", str(root / "train.py")]
        self._agent += ["${save_dir}", "${resume_dir}"]
        self._mirror = ["dalsegno.relay.milestones.mirror", str(file), f"--checkpoints={self.checkpoints}"]
        self._mirror += [f"--hf={self.hf}", f"--events={self.hf / 'events.jsonl'}", f"--commander=http://{one.http}"]
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *flags: str) -> None:
        with self.log.open("ab") as log:
            for words in ([self._agent[0], *flags, *self._agent[1:]], self._mirror):
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", *words],
                        env=self._environment,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    def vanish(self) -> None:
        """All of its processes at once, as with a pod."""
        for one in self._processes:
            if one.poll() is None:
                os.killpg(one.pid, signal.SIGKILL)
                one.wait(10)

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


def wait(what: Callable[[], Any], told: Callable[[], str], seconds: float = 60) -> Any:
    until = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < until, told()
        time.sleep(0.05)  # why: what is waited for is in another process
    return found


def test_a_run_goes_on_from_its_last_milestone(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod vanishes with its volume: the milestone is restored to a new one, and training goes on."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = run_file(tmp_path, hf={"repo": REPO, "interval_seconds": 2})
    with commander(tmp_path / "c.db", [file]) as one:
        first = Pod(tmp_path, "a", one, hub, file)
        first.start()
        try:
            wait(lambda: one.run()["milestones"], first.said)
        finally:
            first.vanish()
        listed = [Milestone(**made) for made in one.run()["milestones"]]
        shutil.rmtree(first.volume)
        second = Pod(tmp_path, "b", one, hub, file)
        for key, value in hub.environment(tmp_path / "home-b").items():
            if key.startswith("HF_"):
                monkeypatch.setenv(key, value)
        lines: list[str] = []
        restored = restore_newest(listed, second.checkpoints, second.hf, lines.append)
        assert restored is not None
        assert (restored.manifest.name, restored.manifest.digest) == (listed[0].checkpoint, listed[0].digest)
        assert [found.name for found in inventory(restored.path.parent)] == [listed[0].checkpoint]
        second.start(f"--resume-step={listed[0].step}")
        try:
            wait(lambda: f"began at {listed[0].step}" in second.said(), second.said)
            newest = wait(lambda: _newer(one, listed[0].step), second.said)
        finally:
            second.vanish()
    steps = [made["step"] for made in milestones_on(hub, tmp_path)]
    assert newest["step"] in steps
    assert steps == sorted(steps)
    assert json.loads((second.hf / "events.jsonl").read_text().splitlines()[0])["event"] == "hf_synced"


def _newer(one: Commander, step: int) -> dict[str, Any] | None:
    newest = one.run()["milestones"][0]
    return newest if newest["step"] > step else None
