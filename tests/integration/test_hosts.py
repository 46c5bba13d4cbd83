"""Jobs on several hosts: each a network, process numbers, a host name and mounts of its own, one shared directory.

Cables are pulled, lose and delay; hosts lose power, get other addresses, have names that nobody resolves. Each time the
curve is the undisturbed run's, and every sample is taken once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import FAILED
from tests.support.hosts.hosts import Hosts, missing
from tests.support.hosts.job import HostedJob
from tests.support.jobs.cluster import Training, Undisturbed

MISSING = missing()
pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

NODES = ("h1", "h2", "h3")
TRAINING = Training(steps=400, save_every=5)


@pytest.fixture
def make_job(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., HostedJob]]:
    """Makes hosts and a job on them (arguments of `HostedJob` without directory and hosts); all ends with the test."""
    made: list[HostedJob] = []

    def make(names: tuple[str, ...] = (*NODES, "m"), options: dict[str, Any] | None = None, **rest: Any) -> HostedJob:
        hosts = Hosts(tmp_path / "hosts", names, **(options or {}))
        request.addfinalizer(hosts.close)
        job = HostedJob(tmp_path / "job", TRAINING, hosts=hosts, **rest)
        made.append(job)
        return job

    yield make
    for job in made:
        if request.node.stash.get(FAILED, True):
            print(job.diagnosis())
        job.close()


def test_hosts_come_and_go(make_job: Callable[..., HostedJob], undisturbed: Undisturbed) -> None:
    """Names that nobody resolves: hosts join, one loses its power, one leaves, and the curve stays the same."""
    job = make_job()
    job.start_master("m")
    job.start("h1")
    first = job.wait_world(1, steps=2)
    job.start("h2", "h3")
    third = job.wait_world(3, steps=3, after=first)
    job.power_cut(job.node("h2"))
    fourth = job.wait_world(2, steps=3, after=third)
    job.leave(job.node("h1"))
    job.wait_world(1, steps=3, after=fourth)
    job.finish()
    job.assert_lost({fourth: range(TRAINING.save_every + 1)})
    job.assert_undisturbed(undisturbed)
