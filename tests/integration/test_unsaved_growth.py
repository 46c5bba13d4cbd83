"""A loop with a session that saves nothing: who joins costs nobody a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs.cluster import Training

from .test_membership import Clusters

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
