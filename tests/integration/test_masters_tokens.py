"""Several masters over etcd whose token and certificates change while the job runs, all of them or one alone."""

from __future__ import annotations

import dataclasses
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("aetcd")

from dalsegno.agent.control.connection import Credentials
from tests.support.jobs.certificates import Keys, as_flags, make_keys
from tests.support.jobs.cluster import Training, Undisturbed
from tests.support.jobs.etcd_members import ETCD, MISSING, etcd_members
from tests.support.jobs.several_masters import Several

pytestmark = [pytest.mark.full, pytest.mark.timeout(300), pytest.mark.skipif(ETCD is None, reason=MISSING)]

NEW = "another-token-of-many-characters"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return make_keys(tmp_path / "keys")


@pytest.fixture
def job(tmp_path: Path, keys: Keys) -> Iterator[Several]:
    """Over TLS; each agent has files of its own, which begin as the masters'."""
    own = {name: tmp_path / Path(file).name for name, file in keys.client().items()}
    for name, file in keys.client().items():
        shutil.copy(file, own[name])
    with (
        etcd_members(tmp_path / "etcd") as members,
        Several(
            tmp_path / "job",
            Training(steps=300, save_every=5),
            members=members,
            master_flags=as_flags(keys.server()),
            agent_flags=(*as_flags({name: str(file) for name, file in own.items()}), "--node-timeout=8"),
            credentials=Credentials(keys.token, keys.ca),
        ) as several,
    ):
        yield several


def restart(job: Several, name: str) -> None:
    """As after its files have changed."""
    job.signal_master(name, signal.SIGTERM)
    assert job.masters[name].wait(20) == 0
    job.start_master(name)


def test_the_token_and_the_certificate_of_all_are_changed(
    tmp_path: Path, keys: Keys, job: Several, undisturbed: Undisturbed
) -> None:
    """As the operations page has it: files everywhere, then the masters that stand by, then the one that leads."""
    job.start("a")
    epoch = job.wait_world(1, steps=2)
    worker = job.worker_pid(job.node("a"))
    leader, before = job.leader()
    others = make_keys(tmp_path / "others")
    agents = {name: tmp_path / Path(file).name for name, file in keys.client().items()}
    # Both authorities first, then the rest.
    agents["tls-ca"].write_bytes(keys.ca.read_bytes() + others.ca.read_bytes())
    for name, file in others.server().items():
        if name != "token-file":
            shutil.copy(file, keys.server()[name])
    for file in (keys.token_file, agents["token-file"]):
        file.write_text(NEW, encoding="ascii")
    for name in sorted(set(job.masters) - {leader}):
        restart(job, name)
    restart(job, leader)
    job.credentials = dataclasses.replace(job.credentials, token=NEW, tls_ca=others.ca)
    after, generation = job.leader()
    assert (after != leader, generation > before) == (True, True)
    assert (job.epoch(), job.worker_pid(job.node("a"))) == (epoch, worker)
    job.start("b")
    job.wait_world(2, steps=3, after=epoch)
    assert "refuses" not in job.node("a").text()
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


def test_one_master_has_another_token(tmp_path: Path, keys: Keys, job: Several, undisturbed: Undisturbed) -> None:
    """While it stands by nobody needs it: a node that asks it first joins all the same, and the run goes on."""
    (a,) = job.start("a")
    epoch = job.wait_world(1, steps=2)
    leader, _ = job.leader()
    # The first of those that agents ask, unless it leads.
    wrong = next(name for name in job.masters if name != leader)
    keys.token_file.write_text(NEW, encoding="ascii")
    restart(job, wrong)
    job.start("b")
    job.wait_world(2, steps=3, after=epoch)
    keys.token_file.write_text(keys.token, encoding="ascii")
    restart(job, wrong)
    assert "refuses" not in a.text()
    job.finish()
    job.assert_lost({})
    job.assert_undisturbed(undisturbed)


def test_the_master_that_leads_next_has_another_token(tmp_path: Path, keys: Keys, job: Several) -> None:
    """All agents say so in one line, and train on; with the old token it is as if nothing had been."""
    (a,) = job.start("a")
    epoch = job.wait_world(1, steps=2)
    worker = job.worker_pid(a)
    leader, _ = job.leader()
    wrong, last = (name for name in job.masters if name != leader)
    keys.token_file.write_text(NEW, encoding="ascii")
    restart(job, wrong)
    for name in (last, leader):
        job.signal_master(name, signal.SIGKILL)
    job.wait_line("the master refuses this token: it was changed there; training goes on for", a)
    keys.token_file.write_text(keys.token, encoding="ascii")
    restart(job, wrong)
    job.wait_line("the master takes this token again", a)
    assert (job.epoch(), job.worker_pid(a)) == (epoch, worker)
    for name in (last, leader):
        job.start_master(name)
    job.finish()
    job.assert_lost({})
    assert a.text().count("refuses this token") == 1
