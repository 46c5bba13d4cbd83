"""A run whose volume moves, and one whose lease is changed: what the runbook says, with real pods."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from dalsegno.elastic.checkpoint import Manifest
from tests.support.jobs.pods import LEASE_SECONDS, Run, relayed

pytestmark = [pytest.mark.full, pytest.mark.timeout(280)]


def change(run: Run, **settings: Any) -> None:
    """Of the file that the Commander and all pods read."""
    run.file.write_text(json.dumps({**json.loads(run.file.read_text()), **settings}))


@pytest.mark.parametrize("copied", [False, True])
def test_a_run_whose_volume_has_moved(tmp_path: Path, copied: bool) -> None:
    """Mounted elsewhere, or copied: with its new place in the file the next pod goes on, without a look at the old."""
    with relayed(tmp_path, "--pace=0.1", "--end-when-asked", "--save-every=20", steps=120) as run:
        a = run.pod("a")
        run.wait_saved()
        a.notice()
        assert a.process.wait(60) == 75, run.said()
        before = run.events()
        place = tmp_path / "elsewhere" / "volume"
        place.parent.mkdir()
        if copied:
            shutil.copytree(tmp_path / "volume", place, symlinks=True)
            shutil.rmtree(tmp_path / "volume")
        else:
            (tmp_path / "volume").rename(place)
        change(run, l1_root=str(place))
        run.commander.again()
        moved = Run(place.parent, run.file, run.commander)
        assert moved.events() == before
        b = run.pod("b")
        assert b.process.wait(120) == 0, run.said()
        first, second = run.epochs().values()
        assert second[0].step == first[-1].step + 1
        run.assert_one_history(120)
        assert not (tmp_path / "volume").exists(), "somebody has written where it was"
        assert moved.state()["last_ok_step"] == 120
        latest = Path(moved.state()["last_ckpt_path"])
        assert latest.is_relative_to(place)
        assert (moved.root / "ckpt" / "latest").resolve() == latest
        assert Manifest.read(latest).step == 120


def test_a_lease_that_is_changed_counts_from_the_next_start(tmp_path: Path) -> None:
    """Of the Commander for the lease, of a pod for how long it trains on without the Commander."""
    longer = 60.0
    with relayed(tmp_path, "--end-when-asked", "--save-every=1000", "--pace=0.1", steps=5000) as run:
        a = run.pod("a")
        run.wait_step(5)
        change(run, lease_seconds=longer)
        assert run.commander.run()["lease_seconds"] == LEASE_SECONDS, "it has not started anew"
        run.commander.again()
        run.wait(lambda: run.commander.run()["holder"], "the holder", 30.0)
        assert run.commander.run()["lease_seconds"] == longer
        assert len(run.epochs()) == 1, "a goes on"
        run.commander.end(signal.SIGKILL)
        lost = time.monotonic()
        run.wait(lambda: run.events("stopped"), "the end of a's trainer", longer - 10.0)
        assert time.monotonic() - lost < longer - 10.0, "a counts the lease that it began with"
        made = run.steps()[-1].step
        a.vanish()
        run.commander.start()
        b = run.pod("b")
        run.wait_step(made + 5, epoch=2)
        assert "the Commander's counts" not in b.said, "both have read the same file"
        run.commander.end(signal.SIGKILL)
        time.sleep(2.5 * LEASE_SECONDS)  # why: nothing may happen in it
        assert len(run.events("stopped")) == 1, "b trains on for the new one"
        run.commander.start()
        b.notice()
        assert b.process.wait(60) == 75, run.said()
        epochs = list(run.epochs().values())
        assert epochs[1][0].step == made + 1, "what a saved at its fence is the run's"
        run.assert_one_history(epochs[-1][-1].step)
