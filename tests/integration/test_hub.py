"""A run on machines from which Hugging Face's hub cannot be reached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs.cluster import Training, Undisturbed
from tests.support.jobs.silent_hub import MODEL, SilentHub, make_cache

from .test_membership import Clusters

pytestmark = [pytest.mark.timeout(300), pytest.mark.full]
SCRIPT = Path(__file__).resolve().parents[1] / "support" / "workers" / "hub_worker.py"


@pytest.fixture
def hub() -> Iterator[SilentHub]:
    one = SilentHub()
    yield one
    one.close()


def test_only_the_first_start_waits_for_a_silent_hub(
    clusters: Clusters, undisturbed: Undisturbed, hub: SilentHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asks as the script would anywhere. A newcomer and the next worlds take what the cache has."""
    make_cache(tmp_path / "home")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    # The library waits for a second, not for ten.
    patience = {"HF_HUB_ETAG_TIMEOUT": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "1"}
    job = clusters(
        training=Training(script=SCRIPT, steps=80),
        hooked=False,
        universal="",
        agent_environment={"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "no_proxy": "*", **patience},
    )
    (a,) = job.start("a")
    first = job.wait_world(1, steps=3)
    assert hub.asked_for(MODEL) > 0, "the run's first world asks"
    job.wait_line(f"{hub.url} does not answer: after a change", a)
    asked = hub.asked_for(MODEL)
    (b,) = job.start("b")
    second = job.wait_world(2, steps=3, after=first)
    assert hub.asked_for(MODEL) == asked, "the newcomer takes the other node's word"
    job.wait_line(f"{hub.url} does not answer: after a change", b)
    job.kill_node(job.node("b"))
    job.wait_world(1, steps=3, after=second)
    assert hub.asked_for(MODEL) == asked, hub.asked
    job.finish()
    job.training = Training(steps=80)
    job.assert_undisturbed(undisturbed)
