"""The best checkpoint of a script without a session stays, although newer ones retire those of its age."""

from __future__ import annotations

from pathlib import Path

import pytest

from dalsegno.elastic.checkpoint import inventory
from tests.support.jobs.shell import Shell

SAVES = """import json, pathlib, pickle, sys, time
out = pathlib.Path(sys.argv[1])
for step, loss in ((10, 0.5), (20, 0.1), (30, 0.3), (40, 0.4)):
    with open(out / "metrics.jsonl", "a") as file:
        print(json.dumps({"step": step, "loss": loss}), file=file)
    with open(out / f"step_{step}.pt", "wb") as file:
        pickle.dump({"step": step}, file)
    end = time.monotonic() + 20
    while step < 40 and not [*out.parent.glob(f"step-{step}.e*/MANIFEST.json")] and time.monotonic() < end:
        time.sleep(0.05)
"""


def kept(directory: Path) -> list[int]:
    return [one.step for one in inventory(directory)]


@pytest.mark.full
def test_the_best_survives_pruning(shell: Shell) -> None:
    """Of four, one is to stay: the best does, too."""
    (shell.directory / "train.py").write_text(SAVES)
    flags = "--keep-checkpoints=1", "--best=loss:min", "--job-id=job"
    ended = shell.run(*flags, "train.py", "${save_dir}")
    assert ended.code == 0, ended.text
    directory = shell.directory / "checkpoints" / "job" / "run-0001"
    left = kept(directory)
    assert {20, 40} <= {*left}, ended.text
    assert 10 not in left, "it was the best once"
    best = inventory(directory)[-1].best
    assert best is not None
    assert (best.metric, best.value) == ("loss", 0.1)
