"""A pod whose standard output and error nobody reads: what people would see holds up nothing that is done."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub.client import Hub
from tests.support.hub.scene import REPO
from tests.support.jobs.pods import relayed

pytestmark = [pytest.mark.full, pytest.mark.timeout(280)]


@pytest.fixture(params=["stands still", "is gone"])
def console(request: pytest.FixtureRequest) -> Iterator[int]:
    """A pipe that takes not a byte more, as of a log driver that hangs; or whose reader has ended, as with `| head`."""
    reader, writer = os.pipe()
    if request.param == "is gone":
        os.close(reader)
    else:
        os.set_blocking(writer, False)
        for piece in (b"x" * 4096, b"x"):
            try:
                while True:
                    os.write(writer, piece)
            except BlockingIOError:
                continue
        os.set_blocking(writer, True)
    yield writer
    os.close(writer)
    if request.param != "is gone":
        os.close(reader)


def test_a_pod_whose_console_nobody_reads(tmp_path: Path, hub: Hub, console: int) -> None:
    """It trains, makes its milestone and leaves on notice; so does the next one, which has more to say."""
    environment = hub.pod_environment(tmp_path / "hub-home")
    more = {"hf": {"repo": REPO, "interval_seconds": 3600}}
    with relayed(tmp_path, "--pace=0.1", "--save-every=20", "--end-when-asked", steps=5000, **more) as run:
        a = run.pod("a", console=console, **environment)
        run.wait_saved()
        run.wait(lambda: run.events("hf_synced"), "its milestone")
        a.notice()
        assert a.process.wait(60) == 75, run.said()
        # What is damaged, and a link that cannot be made, are lines of the pod's own.
        newest = max(
            run.root.glob("ckpt/.store/my-run/*/step-*/model.safetensors"), key=lambda one: one.stat().st_mtime
        )
        newest.write_bytes(b"damaged")
        (run.root / "ckpt" / "latest").unlink()
        (run.root / "ckpt" / "latest").mkdir()
        b = run.pod("b", console=console, **environment)
        run.wait(lambda: [one for one in run.events("ckpt_saved") if one["epoch"] > 1], "its save")
        b.notice()
        assert b.process.wait(60) == 75, run.said()
        run.assert_one_history(run.steps()[-1].step)
        assert run.state()["status"] == "PREEMPTED"
