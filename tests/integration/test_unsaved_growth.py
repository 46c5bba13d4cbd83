"""A loop that saves nothing, with a session or without: who joins costs nobody a step, unless somebody says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs.cluster import Training

from .test_membership import Clusters, scaled

pytestmark = pytest.mark.timeout(300)
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch.distributed as dist
from dalsegno.elastic import session

s = session()
dist.init_process_group("gloo")
place = Path({place!r})
for number in s.steps(range(10**6), max_steps=10**6):
    with open(place / "made", "a") as made:
        made.write(f"{{s.epoch}} {{s.step + 1}} {{s.world_size}}\\n")
    if (place / "stop").exists():
        break
    time.sleep(0.05)
s.finish()
os._exit(0)
"""
PLAIN = """
import os, time
from pathlib import Path
place = Path({place!r})
print("training on", os.environ["WORLD_SIZE"], flush=True)
while not (place / "stop").exists():
    time.sleep(0.1)
"""


@pytest.mark.full
def test_a_newcomer_of_a_script_that_has_saved_nothing_yet(clusters: Clusters, tmp_path: Path) -> None:
    """It saves below our directory, some day: held off until then, or until somebody asks for as many as may be."""
    script = tmp_path / "train.py"
    script.write_text(PLAIN.format(place=str(tmp_path)))
    job = clusters(training=Training(script=script), hooked=False, universal="", nnodes="1:3")
    job.script_flags = ["--save-dir=${save_dir}"]
    (a,) = job.start("a")
    job.wait_for(lambda: "training on 1" in a.text(), "its start")
    (b,) = job.start("b")
    for node in (a, b):
        job.wait_line(r"b joined: .* nothing of it could be resumed: .* and `dalsegno scale 3` now", node)
    assert "training on 2" not in a.text()
    assert scaled(job, 3).returncode == 0
    job.wait_line("all workers restart to take b in; a number of nodes was asked for, and nothing could be resumed", a)
    job.wait_for(lambda: "training on 2" in a.text(), "both")
    (tmp_path / "stop").touch()
    job.wait_exit()


@pytest.mark.parametrize("told", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_newcomer_is_held_off(clusters: Clusters, tmp_path: Path, told: bool) -> None:
    """Until a set time is over: then the script begins anew, as it was told."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(place=str(tmp_path)))
    flags = ["--grow-wait=2"] if told else []
    job = clusters(training=Training(script=script), hooked=False, universal="", agent_flags=flags)
    (a,) = job.start("a")

    def made() -> list[list[int]]:
        path = tmp_path / "made"
        text = path.read_text() if path.exists() else ""
        return [[int(word) for word in line.split()] for line in text.splitlines(keepends=True) if line.endswith("\n")]

    job.wait_for(lambda: len(made()) > 20, "steps")
    (b,) = job.start("b")
    if told:
        job.wait_line(r"b joined: taken in with the first checkpoint, or in 2 s from step 0 \(--grow-wait\)", a)
        first = job.wait_for(lambda: [line for line in made() if line[2] == 2], "a world of two")[0]
        assert first == [2, 1, 2]
    else:
        job.wait_line("b joined: taken in with the first checkpoint, because .* all steps would be lost", a)
        job.wait_line("joined: taken in with the first checkpoint", b)
        last = made()[-1][1]
        job.wait_for(lambda: made()[-1][1] > last + 20, "more steps")
        assert {(epoch, size) for epoch, _, size in made()} == {(1, 1)}
    (tmp_path / "stop").touch()
    job.wait_exit()
