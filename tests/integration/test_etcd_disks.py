"""Etcd has no room: the disks of its members are full, or its quota is reached and the leading master goes."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytest.importorskip("aetcd")

from tests.support.jobs.etcd_members import ETCD, MISSING, Members, etcd_members
from tests.support.jobs.etcd_scenes import asked_by_command, crew, emptied, filled, master, served
from tests.support.jobs.faults import volume
from tests.support.jobs.light import Crew
from tests.support.jobs.master_process import eventually, said_by
from tests.support.jobs.schedules import assert_nothing_forgotten

pytestmark = [pytest.mark.timeout(180), pytest.mark.skipif(ETCD is None, reason=MISSING)]

# Room for two segments of etcd's log, which it takes at once, and some of its database.
MEBIBYTES = 140

# A master's line while more than half of the members are gone.
REFUSED = re.compile("^.*cannot see in etcd who leads: .*connection refused.*$", re.MULTILINE)


def commits(agents: Crew, count: int = 3, seconds: float = 30.0) -> None:
    """Waits for more commits that were promised."""
    a = agents.agents["a"]
    before = len(a.promised)
    eventually(lambda: len(a.promised) >= before + count, seconds)


def goes_on(agents: Crew) -> None:
    """The two are in the world in which they were, another one joins, and nothing is forgotten."""
    a = agents.agents["a"]
    epoch = a.epoch
    assert {(one.epoch, len(one.incarnations)) for one in agents.agents.values()} == {(epoch, 1)}
    commits(agents)
    agents.start("c")
    eventually(lambda: a.nodes == 3 and a.epoch > epoch, 30)
    commits(agents)
    assert_nothing_forgotten(list(agents.agents.values()))


def warnings(log: Path, text: str) -> list[str]:
    """A master's lines with this text."""
    return [line for line in log.read_text().splitlines() if text in line]


def sees_who_leads(log: Path) -> bool:
    """Whether a master says no more that it cannot see it."""
    said = log.read_text()
    return said.rfind("etcd says again who leads") >= said.rfind("cannot see in etcd who leads")


def ends(members: Members, number: int) -> None:
    """Waits until a member has ended by itself, and said why."""
    eventually(lambda: members.gone(number), 30)
    assert "no space left on device" in members.log(number)


@pytest.mark.full
def test_disks_of_members_are_full(tmp_path: Path) -> None:
    """One of three: nobody notices. Two: a line says where to look, the job waits, and goes on where there is room."""
    with contextlib.ExitStack() as stack:
        disks = [stack.enter_context(volume(tmp_path / "etcd" / f"m{number}", MEBIBYTES)) for number in range(3)]
        members = stack.enter_context(etcd_members(tmp_path / "etcd", 3))
        logs = [tmp_path / f"log{number}" for number in range(2)]
        processes = [stack.enter_context(master(members.url, f"--log-file={log}")) for log in logs]
        addresses = [said_by(process)["address"] for process in processes]
        agents = stack.enter_context(crew(*addresses))
        commits(agents)
        first = members.leader()
        disks[first].fill()
        ends(members, first)
        commits(agents, 10)
        second = members.leader()
        for log in logs:
            eventually(lambda log=log: sees_who_leads(log), 30)
        begins = [len(log.read_text()) for log in logs]
        disks[second].fill()
        ends(members, second)
        for log, begin in zip(logs, begins, strict=True):
            # The members' leader has gone: the first answers may be none, as at any election.
            eventually(lambda log=log, begin=begin: REFUSED.search(log.read_text(), begin), 30)
            (line,) = REFUSED.findall(log.read_text(), begin)
            assert "(more than half of its members have to run: the log of one that has ended says why, as that" in line
            assert len(line) < 500
        before = len(agents.agents["a"].promised)
        time.sleep(4)  # why: longer than the leader's lease
        assert len(agents.agents["a"].promised) <= before + 1
        said = asked_by_command("status", *addresses)
        assert "etcd does not answer or refuses (this master's log says why)" in said.stderr
        for number in (first, second):
            disks[number].clear()
            members.start(number)
        for number in range(3):
            members.wait(number)
        goes_on(agents)
        for log in logs:
            assert len(warnings(log, "WARNING")) < 15, log.read_text()


@pytest.mark.full
def test_the_leader_goes_while_etcd_is_full(tmp_path: Path) -> None:
    """Nobody can take its place until there is room, which all that are asked say, and no log fills with it."""
    logs = [tmp_path / f"log{number}" for number in range(2)]
    with contextlib.ExitStack() as stack:
        members = stack.enter_context(etcd_members(tmp_path / "etcd", flags=[f"--quota-backend-bytes={4 << 20}"]))
        leader = stack.enter_context(master(members.url, f"--log-file={logs[0]}"))
        addresses = [served(leader)]
        other = stack.enter_context(master(members.url, f"--log-file={logs[1]}"))
        addresses.append(said_by(other)["address"])
        agents = stack.enter_context(crew(*addresses))
        commits(agents)
        filled(members, 300_000)
        eventually(lambda: "etcd is full" in logs[0].read_text(), 20)
        said = asked_by_command("status", *addresses)
        assert "the master cannot record anything now: " in said.stdout
        assert "etcd is full: compact and defragment it" in said.stdout
        leader.send_signal(signal.SIGKILL)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(8)
        (line,) = warnings(logs[1], "WARNING")
        assert "cannot take the lead in etcd: " in line
        assert "etcd is full: compact and defragment it or raise its quota, then disarm its alarm" in line
        said = asked_by_command("status", *addresses)
        assert said.returncode == 1
        assert "nobody" not in said.stderr
        assert "no other master is known to lead, as etcd does not answer or refuses" in said.stderr
        emptied(members)
        served(other)
        goes_on(agents)
        assert "cannot record" not in asked_by_command("status", *addresses).stdout


@pytest.mark.full
def test_a_member_comes_back_with_nothing(tmp_path: Path) -> None:
    """Alone it is let in by no other member; taken in anew under its name it counts like those that never went."""
    with contextlib.ExitStack() as stack:
        members = stack.enter_context(etcd_members(tmp_path / "etcd", 3))
        logs = [tmp_path / f"log{number}" for number in range(2)]
        processes = [stack.enter_context(master(members.url, f"--log-file={log}")) for log in logs]
        agents = stack.enter_context(crew(*(said_by(process)["address"] for process in processes)))
        commits(agents)
        gone = members.leader()
        members.forget(gone)
        commits(agents)
        # As a supervisor starts it again, with an empty volume.
        members.start(gone)
        eventually(lambda: members.gone(gone), 30)
        commits(agents)
        members.admit(gone)
        commits(agents)
        # From here on nothing works without it.
        other = (gone + 1) % 3
        members.send(other, signal.SIGKILL)
        commits(agents, 10)
        members.start(other)
        members.wait(other)
        goes_on(agents)
        for log in logs:
            assert len(warnings(log, "WARNING")) < 15, log.read_text()
