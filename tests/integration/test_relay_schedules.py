"""Random kill schedules over real pods, and pods in containers of their own; `relay_schedules` runs many more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hosts.hosts import missing
from tests.support.jobs.pods import relayed
from tests.support.jobs.relay_schedules import play, schedule

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]


# A Commander that stands still, single processes killed, a pod that sleeps beyond its lease, damage, a hub.
@pytest.mark.parametrize("seed", [102, 117, 119, 210])
def test_a_random_schedule(tmp_path: Path, seed: int) -> None:
    """`python -m tests.support.jobs.relay_schedules` runs more of them."""
    play(schedule(seed), tmp_path)


@pytest.mark.skipif(bool(why := missing()), reason=why)
def test_pods_with_names_and_process_numbers_of_their_own(tmp_path: Path) -> None:
    """As containers are: each entry is process 1 of its host. One leaves on notice, one vanishes, one finishes."""
    with relayed(tmp_path, "--pace=0.1", "--end-when-asked", "--save-every=30") as run:
        a = run.pod("alpha", contained=True)
        run.wait_saved()
        assert run.commander.run()["holder"].startswith("alpha")
        b = run.pod("beta", contained=True)
        run.wait(lambda: "is a spare" in b.said, "b waits")
        a.notice()
        assert a.process.wait(60) == 75, run.said()
        run.wait_step(1, epoch=2)
        assert run.commander.run()["holder"].startswith("beta")
        saved = run.wait_saved(run.steps()[-1].step + 1)
        b.vanish()
        c = run.pod("gamma", contained=True)
        assert c.process.wait(150) == 0, run.said()
        first, second, *_, last = run.epochs().values()
        assert second[0].step == first[-1].step + 1
        assert last[0].step >= saved + 1
        run.assert_one_history(200)
        assert [event["pod"] for event in run.events("acquire")] == ["alpha-1", "beta-1", "gamma-1"]
        assert run.state()["pod"] == "gamma-1"
