"""All nodes and the master are gone at once; what is provably gone is not waited for."""

from __future__ import annotations

from typing import Any

import pytest

from dalsegno.master.brain import brain
from dalsegno.master.brain.state import Phase
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, all_join, settings


def process(machine: str, boot: str = "1", pid: int = 7) -> control_pb2.Process:
    return control_pb2.Process(machine=machine, boot_id=boot, pid_ns="pid:[1]", pid=pid, start_time=9)


def trained(machines: tuple[str, str] = ("m", "m"), **changes: Any) -> Driven:
    """A world of a and b, which has made steps and a commit."""
    job = Driven(settings(node_timeout=60, **changes))
    a, b = (
        job.node(node=name, process=process(machine, pid=number))
        for number, (name, machine) in enumerate(zip("ab", machines, strict=True), start=1)
    )
    all_join([a, b])
    job.wait(2)
    assert job.members == ["a", "b"]
    a.step(5)
    a.save(5, any_size=True)
    return job


def attempt(job: Driven, name: str, where: control_pb2.Process) -> tuple[str, Node]:
    """A new agent asks for this name."""
    new = Node(job, f"new {name} of {where.machine} {job.now}")
    reply = new.register(node=name, process=where)
    return reply.code, new


def test_the_same_commands_gather_as_at_a_first_start() -> None:
    """The new master sees that the agents' processes are gone: the names are free, and both are taken in."""
    job = trained()
    job.restart(is_gone=lambda known: known.pid in (1, 2))
    assert len(job.job.nodes) == 0
    code, a = attempt(job, "a", process("m", pid=11))
    assert code == "OK"
    a.join()
    job.wait(0.5)
    assert job.phase is not Phase.RUNNING, "others may be on their way"
    code, b = attempt(job, "b", process("m", pid=12))
    assert code == "OK"
    b.join()
    job.wait(2)
    assert (job.epoch, job.members) == (2, ["a", "b"])
    assert "gone when the master came back" in job.job.world.causes[0]


def test_who_lives_is_not_taken_for_gone() -> None:
    """One agent of two ended with the master: its peer's ranks stop at once, and it goes on without."""
    job = trained()
    b = job.nodes[1]
    job.restart(is_gone=lambda known: known.pid == 1)
    assert list(job.job.nodes) == ["b"]
    assert job.phase in (Phase.FORMING, Phase.WAITING)
    b.beat()
    b.join()
    job.wait(2)
    assert job.members == ["b"]


def test_a_machine_that_was_started_anew_frees_all_names_of_its_own() -> None:
    """The master is on another one, and presumes all alive: who comes from the same machine knows better."""
    job = trained(("m", "m"))
    job.restart()
    code, a = attempt(job, "a", process("m", boot="2", pid=1))
    assert code == "OK"
    assert list(job.job.nodes) == ["a"]
    a.join()
    code, b = attempt(job, "", process("m", boot="2", pid=2))
    assert code == "OK"
    b.join()
    job.wait(2)
    assert len(job.members) == 2


def test_other_machines_are_waited_for() -> None:
    """They may still be on."""
    job = trained(("m", "n"))
    job.restart()
    code, a = attempt(job, "a", process("m", boot="2"))
    assert code == "OK"
    a.join()
    assert sorted(job.job.nodes) == ["a", "b"]
    code, _ = attempt(job, "b", process("m", boot="2"))
    assert code == "ABORTED", "the machine of b is another"


@pytest.mark.parametrize(
    "claimed",
    [
        process("another", boot="2"),
        process("", boot="2"),
        process("m", boot=""),
        process("m", boot="1", pid=99),
    ],
)
def test_nobody_frees_a_name_by_a_guess(claimed: control_pb2.Process) -> None:
    """Only what identifies the machine, with another boot of it, proves that its agents are gone."""
    job = trained()
    job.restart()
    code, _ = attempt(job, "a", claimed)
    assert code == "ABORTED"
    assert sorted(job.job.nodes) == ["a", "b"]


def test_one_that_is_heard_is_there() -> None:
    """Two machines that take each other for the same one (copies of a disk) do not take each other's names."""
    job = trained()
    for node in job.nodes:
        node.beat()
    code, _ = attempt(job, "a", process("m", boot="2"))
    assert code == "ALREADY_EXISTS"
    assert sorted(job.job.nodes) == ["a", "b"]


def test_a_node_that_came_back_from_a_power_cut_need_not_wait_for_its_own_name() -> None:
    """Its connection was closed by nobody; the master was never away."""
    job = trained(("m", "n"))
    a, _ = job.nodes
    job.silent.add(a.incarnation)
    job.wait(10)
    assert a.is_known
    code, _ = attempt(job, "a", process("m", boot="2"))
    assert code == "OK"


def test_an_older_agents_node_is_presumed_alive() -> None:
    """It did not say where it lives."""
    job = Driven(settings(node_timeout=60))
    job.node(node="a").join()
    job.wait(2)
    job.restart(is_gone=lambda known: True)
    assert list(job.job.nodes) == ["a"]


@pytest.mark.parametrize("gone", [True, False])
def test_the_steps_that_led_to_the_last_commit_are_known(gone: bool) -> None:
    """The new master has heard of none of them; the commit is on the record. Also at the job's end."""
    job = trained()
    job.restart(is_gone=lambda known: gone)
    assert brain.status(job.state, job.now).step == 5
    if not gone:
        for node in job.nodes:
            node.beat()
        job.call(control_pb2.StopRequest(job_id="job"))
        for node in job.nodes:
            node.drained(5)
        job.wait(30)
    (record,) = job.job.history
    assert (record.first_step, record.last_step) == (1, 5)
    assert brain.status(job.state, job.now).step == 5
