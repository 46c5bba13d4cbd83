"""Nodes come and go, with real agents, workers and masters: the run stays the undisturbed one.

Scenes of plain DDP, where the world's size asks for no conversion, are the fast ones; ZeRO is where it does.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.cluster import Cluster, Training, Undisturbed

pytestmark = pytest.mark.timeout(300)

Clusters = Callable[..., Cluster]


def test_joins_lose_nothing(clusters: Clusters, undisturbed: Undisturbed) -> None:
    """1, 2, then 4 nodes: no step is lost, every sample once, the same losses."""
    job = clusters(training=Training())
    job.start("a")
    job.wait_world(1, steps=3)
    job.start("b")
    second = job.wait_world(2, steps=3)
    job.start("c", "d")
    job.wait_world(4, steps=3, after=second)
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)
