"""Members of etcd that are parted from each other, and masters that reach only some of them.

`tests/support/jobs/schedules.py` draws such things at random. Here are the scenes in which both sides are known.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("aetcd")

from tests.support.jobs.cluster import Training, Undisturbed
from tests.support.jobs.etcd_members import ETCD, MISSING, etcd_members
from tests.support.jobs.proxy import Proxy
from tests.support.jobs.schedules import NODE_TIMEOUT, Stage, play, schedule, stage
from tests.support.jobs.several_masters import Several

pytestmark = [pytest.mark.timeout(180), pytest.mark.skipif(ETCD is None, reason=MISSING)]


@pytest.fixture
def on(tmp_path: Path) -> Iterator[Stage]:
    """Two agents in a world that commits."""
    with stage(tmp_path) as made:
        made.crew.start("a")
        made.crew.start("b")
        made.crew.train(0.1)
        made.wait_world("a", "b")
        made.wait(lambda: made.crew.agents["a"].promised, "a commit")
        yield made


def commits(on: Stage, count: int = 3) -> None:
    """Waits for more commits that a master has answered."""
    agent = on.crew.agents["a"]
    before = len(agent.promised)
    on.wait(lambda: len(agent.promised) >= before + count, f"{count} commits")


def goes_on(on: Stage) -> None:
    """The two are in the world that they were in; another one joins; and the record is as it must be."""
    agents = on.crew.agents
    assert {agents[name].epoch for name in "ab"} == {1}
    on.crew.start("c")
    on.wait_world("a", "b", "c", above=1)
    commits(on)
    on.check()


@pytest.mark.parametrize(
    "how", ["cut", pytest.param("hold", marks=pytest.mark.full), pytest.param("lose", marks=pytest.mark.full)]
)
def test_etcds_leader_is_parted_from_the_others(on: Stage, how: str) -> None:
    """The two others choose one of them; the job goes on there, and nothing that the first one has counts."""
    alone = on.members.leader()
    on.members.wires.isolate(alone, how)
    on.wait(lambda: on.members.find_leader() not in (alone, None), "another member that leads")
    commits(on)
    on.members.wires.heal()
    on.members.wait(alone)
    goes_on(on)


@pytest.mark.full
@pytest.mark.parametrize("how", ["cut", "hold", "lose"])
def test_the_leading_master_reaches_only_the_member_that_is_cut_off(on: Stage, how: str) -> None:
    """It cannot write, lets its agents go, and another master leads; its own writes are refused afterwards."""
    alone = on.members.leader()
    leader, before = on.job.leader()
    for number, way in enumerate(on.ways[leader]):
        if number != alone:
            way.cut()
    on.members.wires.isolate(alone, how)
    name, generation = on.job.wait_leader(lambda name, generation: name != leader)
    assert generation > before
    commits(on)
    on.members.wires.heal()
    for way in on.ways[leader]:
        way.mend()
    on.job.wait_standby(leader, name)
    goes_on(on)


@pytest.mark.full
@pytest.mark.parametrize("deaf", [True, False], ids=["nothing reaches it", "nothing comes from it"])
@pytest.mark.parametrize("who", ["etcd's leader", "another member"])
def test_one_way_loss(on: Stage, who: str, deaf: bool) -> None:
    """One direction between a member and both others is lost; members and job go on, and all of it heals."""
    leads = on.members.leader()
    number = leads if who == "etcd's leader" else (leads + 1) % 3
    for other in {0, 1, 2} - {number}:
        on.members.wires.lose(*((other, number) if deaf else (number, other)))
    on.wait(lambda: on.members.wires.lost > 2000, "something to be lost")
    commits(on, 10)
    on.members.wires.heal()
    for each in range(3):
        on.members.wait(each)
    goes_on(on)


@pytest.mark.full
def test_no_member_reaches_another(on: Stage) -> None:
    """Nobody can write: the agents wait in their world, and nobody is declared dead."""
    for one, other in ((0, 1), (0, 2), (1, 2)):
        on.members.wires.cut(one, other)
    before = len(on.crew.agents["a"].promised)
    # Longer than a node may be silent, and than a lease.
    with pytest.raises(AssertionError):
        on.wait(lambda: len(on.crew.agents["a"].promised) > before + 1, "a commit", seconds=NODE_TIMEOUT + 3)
    on.members.wires.heal()
    commits(on)
    goes_on(on)


@pytest.mark.full
@pytest.mark.parametrize("how", ["held", "stopped"])
def test_what_a_leader_sends_comes_late(on: Stage, how: str) -> None:
    """Its requests come once another master leads, as they were held on the way, or as it was: none of them counts."""
    leader, before = on.job.leader()
    if how == "stopped":
        on.job.signal_master(leader, signal.SIGSTOP)
    else:
        for way in on.ways[leader]:
            way.freeze()
    name, _ = on.job.wait_leader(lambda name, generation: name != leader and generation > before)
    commits(on)
    on.job.signal_master(leader, signal.SIGCONT)
    for way in on.ways[leader]:
        way.mend()
    on.job.wait_standby(leader, name)
    goes_on(on)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_real_ranks_through_a_partition(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Etcd's leader is cut off with the leading master: the ranks train on, and the world grows under the next one."""
    training = Training(steps=400, save_every=5)
    with etcd_members(tmp_path / "etcd", 3, wired=True) as members:
        ways = {f"m{number}": [Proxy(one) for one in members.endpoints] for number in range(2)}
        stores = {name: f"etcd://{','.join(way.address for way in its)}" for name, its in ways.items()}
        with Several(tmp_path / "job", members=members, stores=stores, count=2, training=training) as job:
            job.start("a")
            first = job.wait_world(1, steps=2)
            worker = job.worker_pid(job.node("a"))
            leader, _ = job.leader()
            alone = members.leader()
            for number, way in enumerate(ways[leader]):
                if number != alone:
                    way.cut()
            members.wires.isolate(alone)
            job.wait_leader(lambda name, generation: name != leader)
            members.wires.heal()
            for way in ways[leader]:
                way.mend()
            assert job.worker_pid(job.node("a")) == worker
            job.start("b")
            job.wait_world(2, steps=3, after=first)
            job.finish()
            job.assert_lost({})
            job.assert_undisturbed(undisturbed)
        for way in [way for its in ways.values() for way in its]:
            way.close()


@pytest.mark.full
@pytest.mark.parametrize("seed", range(1, 21))
def test_a_random_schedule(tmp_path: Path, seed: int) -> None:
    """`python -m tests.support.jobs.schedules` runs more of them."""
    play(schedule(seed), tmp_path)
