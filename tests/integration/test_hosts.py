"""Jobs on several hosts: each a network, process numbers, a host name and mounts of its own, one shared directory.

Cables are pulled, lose and delay; hosts lose power, get other addresses, have names that nobody resolves or that mean
something else. Each time the curve is the undisturbed run's, and every sample is taken once.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.support.hosts.hosts import missing
from tests.support.hosts.job import HostedJob, hosted_job
from tests.support.hosts.switch import Way
from tests.support.jobs.cluster import Training, Undisturbed

MISSING = missing()
pytestmark = [pytest.mark.timeout(300), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

TRAINING = Training(steps=400, save_every=5)
# Seconds of silence after which a node is dead: the default, and one for scenes that wait for it.
NODE_TIMEOUT, SOON = 15.0, "--node-timeout=5"
ALL = ("h1", "h2", "h3")
# An hour too fast, and one too slow.
CLOCKS = {"h2": {"DALSEGNO_TEST_CLOCK": "3600"}, "h3": {"DALSEGNO_TEST_CLOCK": "-3600"}}


def start_all(job: HostedJob, *names: str) -> int:
    """Starts a master and all nodes; returns the epoch in which all of them train."""
    job.start_master(job.master_hosts[0])
    job.start(*names)
    return job.wait_world(len(names), steps=3)


def finish(job: HostedJob, undisturbed: Undisturbed, *crashes: int) -> None:
    """The run goes to its end; only the epochs that came of a crash have cost steps, no more than one save's."""
    job.finish()
    job.assert_lost(dict.fromkeys(crashes, range(TRAINING.save_every + 1)))
    job.assert_undisturbed(undisturbed)


def wait_for_seconds(job: HostedJob, seconds: float) -> None:
    """So long nobody may end."""
    until = time.monotonic() + seconds
    job.wait_for(lambda: time.monotonic() > until, "some time")


def out_for_a_moment(job: HostedJob, name: str, seconds: float, epoch: int) -> None:
    """A host's cable is out for so long, and the ranks train on in the same epoch."""
    job.hosts[name].pull()
    wait_for_seconds(job, seconds)
    job.hosts[name].plug()
    before = max(line.step for line in job.poll())
    assert job.wait_step(before + 3) == epoch


def serve_again(job: HostedJob, undisturbed: Undisturbed, host: str, epoch: int) -> None:
    """The master comes back on this host: the ranks of h1 and h2 have noticed nothing, and a third node joins."""
    job.start_master(host)
    job.wait_line("the master is back", job.node("h1"))
    assert job.epoch() == epoch
    job.start("h3")
    job.wait_world(3, steps=3, after=epoch)
    finish(job, undisturbed)


# ---- who is where ----------------------------------------------------------------------------------------------------


def test_a_host_loses_its_power(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The other one goes on alone, and the curve stays the same; a cable that was out for a moment has cost nothing.

    The gate plays this one scene of all here, so the clocks differ by an hour, too.
    """
    with hosted_job(tmp_path, training=TRAINING, agent_flags=(SOON,), environments=CLOCKS) as job:
        both = start_all(job, "h1", "h2")
        out_for_a_moment(job, "h1", 2.0, both)
        job.power_cut(job.node("h2"))
        alone = job.wait_world(1, steps=3, after=both)
        finish(job, undisturbed, alone)


@pytest.mark.full
def test_hosts_come_and_go(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Names that nobody resolves: hosts join, one loses its power, one leaves, and the curve stays the same."""
    with hosted_job(tmp_path, training=TRAINING, agent_flags=(SOON,)) as job:
        job.start_master("m")
        job.start("h1")
        first = job.wait_world(1, steps=2)
        job.start("h2", "h3")
        third = job.wait_world(3, steps=3, after=first)
        job.power_cut(job.node("h2"))
        fourth = job.wait_world(2, steps=3, after=third)
        job.leave(job.node("h1"))
        job.wait_world(1, steps=3, after=fourth)
        finish(job, undisturbed, fourth)


@pytest.mark.full
@pytest.mark.parametrize("means", ["127.0.1.1", "172.17.0.1"])
def test_names_that_mean_something_else(tmp_path: Path, undisturbed: Undisturbed, means: str) -> None:
    """A host's name means loopback, as Debian has it, or an interface that every host has and that leads nowhere."""
    network = {"interface": "eth1", "resolves": [f"{means} {{name}}"]}
    with hosted_job(tmp_path, network=network, training=TRAINING) as job:
        for name in ALL:
            job.hosts[name].run("ip", "link", "add", "docker0", "type", "bridge")
            job.hosts[name].run("ip", "addr", "add", "172.17.0.1/16", "dev", "docker0")
            job.hosts[name].run("ip", "link", "set", "docker0", "up")
        first = start_all(job, *ALL)
        job.leave(job.node("h1"))
        job.wait_world(2, steps=3, after=first)
        finish(job, undisturbed)


def second_addresses() -> tuple[dict[str, str], dict[str, tuple[str, ...]]]:
    """Of each host another address than that of its cable, and the flag that announces it."""
    addresses = {name: f"10.78.0.{number}" for number, name in enumerate(ALL, 11)}
    return addresses, {name: (f"--local-addr={address}",) for name, address in addresses.items()}


@pytest.mark.full
def test_another_address_than_that_of_the_route(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """`--local-addr` overrides: stores listen there, and ranks meet there."""
    addresses, flags = second_addresses()
    with hosted_job(tmp_path, training=TRAINING, flags_of=flags) as job:
        for name, address in addresses.items():
            job.hosts[name].connect_to_switch("eth1", address)
        start_all(job, *ALL)
        for node in job.nodes:
            listening = job.host(node).run("ss", "-ltnH")
            # Ranks listen, and the first node's store, nowhere else than there.
            assert f"{addresses[node.name]}:" in listening
            assert f"{job.host(node).address}:" not in listening
        finish(job, undisturbed)


@pytest.mark.full
def test_a_second_address_of_an_interface(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """With a label ranks meet there; gloo would take the first one, which a node without a label says in one line."""
    addresses, flags = second_addresses()
    *labelled, bare = ALL
    with hosted_job(tmp_path, training=TRAINING, flags_of=flags) as job:
        for name, address in addresses.items():
            label = ("label", "eth0:ranks") if name in labelled else ()
            job.hosts[name].run("ip", "addr", "add", f"{address}/24", "dev", "eth0", *label)
        start_all(job, *ALL)
        for node in job.nodes:
            listening = job.host(node).run("ss", "-ltnH")
            elsewhere = node.name == bare
            assert elsewhere or f"{addresses[node.name]}:" in listening
            assert (f"{job.host(node).address}:" in listening) == elsewhere
            assert ("the ranks of this node meet others at" in node.text()) == elsewhere
        finish(job, undisturbed)


@pytest.mark.full
def test_a_node_hosts_the_master(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Hosts meet at an address of one of them, as torchrun's do, without any master started by hand."""
    with hosted_job(tmp_path, ALL, training=TRAINING) as job:
        job.meeting_point = f"{job.hosts['h1'].address}:29400"
        job.start("h2")
        job.wait_line("waiting for the master at", job.node("h2"))
        job.start("h1", "h3")
        job.wait_world(3, steps=3)
        job.power_cut(job.node("h3"))
        epoch = job.wait_world(2, steps=3)
        finish(job, undisturbed, epoch)


def as_debian_names_it(job: HostedJob, name: str) -> None:
    """A host whose own name means loopback on itself, and its address on all others."""
    for host in job.hosts.hosts.values():
        means = "127.0.1.1" if host.name == name else job.hosts[name].address
        host.resolve(f"{means} {name}")


@pytest.mark.full
def test_a_node_hosts_the_master_by_a_name_that_means_loopback_there(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """torchrun's usual line on Debian: its master listened where no other node reached it, and all waited for ever."""
    with hosted_job(tmp_path, ALL[:2], training=TRAINING) as job:
        as_debian_names_it(job, "h1")
        job.meeting_point = "h1:29400"
        job.start(*ALL[:2])
        job.wait_line(f"h1 means 127.0.1.1 on this machine.*they are told {job.hosts['h1'].address}", job.node("h1"))
        epoch = job.wait_world(2, steps=3)
        job.power_cut(job.node("h2"))
        alone = job.wait_world(1, steps=3, after=epoch)
        finish(job, undisturbed, alone)


@pytest.mark.full
def test_the_masters_own_name_means_loopback_on_its_host(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """All nodes name the master alike, as the page asks, and the others reach the one beside it all the same."""
    options = {"master_hosts": ("h1",), "master_flags": ("--insecure", "--host=0.0.0.0")}
    with hosted_job(tmp_path, ALL[:2], training=TRAINING, given=dict.fromkeys(ALL, "h1:29400"), **options) as job:
        as_debian_names_it(job, "h1")
        first = start_all(job, "h1")  # so that the world's store is there
        job.start("h2")
        second = job.wait_world(2, steps=3, after=first)
        job.leave(job.node("h1"))
        job.wait_world(1, steps=3, after=second)
        finish(job, undisturbed)


# ---- cables ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_cable_is_out_for_a_moment(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Shorter than a node may be silent: nothing is lost, and no world ends."""
    with hosted_job(tmp_path, training=TRAINING) as job:
        epoch = start_all(job, *ALL)
        for name in ("h2", "m", "h1"):
            out_for_a_moment(job, name, 4.0, epoch)
        finish(job, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("what", ["pulled", "nothing gets out", "nothing gets in"])
def test_a_cable_is_out_for_long(tmp_path: Path, undisturbed: Undisturbed, what: str) -> None:
    """The others go on without its node, which comes back with the cable."""
    with hosted_job(tmp_path, training=TRAINING, agent_flags=(SOON,)) as job:
        first = start_all(job, *ALL)
        lost = Way(loss=1.0)
        match what:
            case "pulled":
                job.hosts["h2"].pull()
            case "nothing gets out":
                job.hosts["h2"].disturb(out=lost)
            case "nothing gets in":
                job.hosts["h2"].disturb(into=lost)
        second = job.wait_world(2, steps=3, after=first)
        job.hosts["h2"].plug()
        job.wait_world(3, steps=3, after=second)
        finish(job, undisturbed, second)


@pytest.mark.full
@pytest.mark.parametrize("name", ["h1", "h2"])
@pytest.mark.parametrize("restarts", [False, True], ids=["", "master restarts"])
def test_the_way_to_the_master_alone_is_lost(
    tmp_path: Path, undisturbed: Undisturbed, name: str, restarts: bool
) -> None:
    """A node's ranks are heard by all others, and its agent by no master: it drains, and joins when the way is back."""
    with hosted_job(tmp_path, training=TRAINING, agent_flags=(SOON, "--master-outage-timeout=10")) as job:
        first = start_all(job, "h1", "h2")
        job.hosts[name].run("ip", "route", "add", "blackhole", f"{job.hosts['m'].address}/32")
        if restarts:
            job.masters["m"].kill()
            job.masters["m"].wait(20)
            job.start_master("m")
        second = job.wait_world(1, steps=3, after=first)
        job.hosts[name].run("ip", "route", "del", "blackhole", f"{job.hosts['m'].address}/32")
        third = job.wait_world(2, steps=3, after=second)
        assert (second, third) == (first + 1, second + 1)
        finish(job, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("way", [Way(delay_seconds=0.2), Way(loss=0.1)], ids=["delay", "loss"])
def test_a_bad_cable(tmp_path: Path, undisturbed: Undisturbed, way: Way) -> None:
    """All that a job does is done over it, only slower: a start, a growth, a leave, a crash."""
    with hosted_job(tmp_path, training=TRAINING) as job:
        job.hosts["h2"].disturb(out=way, into=Way(loss=way.loss))
        job.hosts["m"].disturb(out=way, into=Way(loss=way.loss))
        first = start_all(job, "h1", "h2")
        job.start("h3")
        second = job.wait_world(3, steps=3, after=first)
        job.leave(job.node("h1"))
        third = job.wait_world(2, steps=3, after=second)
        job.power_cut(job.node("h3"))
        fourth = job.wait_world(1, steps=3, after=third)
        finish(job, undisturbed, fourth)


# ---- hosts that change -----------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL, None], ids=["told to end", "killed", "power cut"])
def test_the_master_moves(tmp_path: Path, undisturbed: Undisturbed, how: signal.Signals | None) -> None:
    """It goes on elsewhere with what it had; agents know both addresses, and the ranks notice nothing."""
    with hosted_job(tmp_path, (*ALL, "m", "n"), training=TRAINING, master_hosts=("m", "n")) as job:
        epoch = start_all(job, "h1", "h2")
        if how is None:
            job.hosts["m"].power_cut()
        else:
            job.masters["m"].send_signal(how)
        job.masters["m"].wait(20)
        job.wait_line("the master cannot be reached")
        serve_again(job, undisturbed, "n", epoch)


@pytest.mark.full
@pytest.mark.parametrize("name", ["h1", "h2"])
@pytest.mark.parametrize("memory", [False, True], ids=["disk", "memory"])
def test_an_address_changes(tmp_path: Path, undisturbed: Undisturbed, name: str, memory: bool) -> None:
    """Its connections are dead, and nobody would ever say so: the node notices, and joins again with the new one."""
    flags = ("--memory-replicas=1",) if memory else ()
    with hosted_job(tmp_path, training=TRAINING, agent_flags=flags) as job:
        first = start_all(job, *ALL)
        job.hosts[name].readdress("10.77.0.99")
        job.wait_line("this node's address is 10.77.0.99 now", job.node(name))
        second = job.wait_world(3, steps=8, after=first)
        # Others hold what it made since, and it what they made.
        other = next(one for one in ALL if one != name)
        job.power_cut(job.node(other))
        third = job.wait_world(2, steps=3, after=second)
        finish(job, undisturbed, *range(first + 1, third + 1))


@pytest.mark.full
def test_clocks_that_differ_by_an_hour(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Nothing compares the time of two hosts: a join, a leave and a crash are as they always are."""
    with hosted_job(tmp_path, training=TRAINING, environments=CLOCKS) as job:
        first = start_all(job, *ALL)
        job.leave(job.node("h1"))
        second = job.wait_world(2, steps=3, after=first)
        job.power_cut(job.node("h3"))
        third = job.wait_world(1, steps=3, after=second)
        finish(job, undisturbed, third)
        logs = {name: next(job.directory.glob(f"logs/{name}-*/agent.log")) for name in ("h1", "h2")}
        hours = {name: int(log.read_text(encoding="utf-8")[11:13]) for name, log in logs.items()}
        assert (hours["h2"] - hours["h1"]) % 24 == 1


@pytest.mark.full
def test_the_masters_host_boots(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Its power is cut and comes back, with the same address: agents wait for it, and nobody's ranks stop."""
    with hosted_job(tmp_path, training=TRAINING) as job:
        epoch = start_all(job, "h1", "h2")
        job.hosts["m"].power_cut()
        job.wait_line("the master cannot be reached")
        job.hosts["m"].power_up()
        serve_again(job, undisturbed, "m", epoch)


@pytest.mark.full
def test_a_host_boots_anew(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """The same name comes back after a power cut, and has its place again."""
    with hosted_job(tmp_path, training=TRAINING, agent_flags=("--memory-replicas=1",)) as job:
        first = start_all(job, *ALL)
        job.power_cut(job.node("h2"))
        job.host("h2").power_up()
        job.start("h2")
        second = job.wait_world(3, steps=3, after=first)
        finish(job, undisturbed, *range(first + 1, second + 1))


@pytest.mark.full
def test_a_host_boots_faster_than_its_network(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """Its agent starts where no route leads to the master yet: it waits for one, says so, and joins."""
    with hosted_job(tmp_path, training=TRAINING) as job:
        first = start_all(job, "h1")
        cable = ("dev", job.hosts["h2"].interface)
        job.hosts["h2"].run("ip", "link", "set", *cable, "down")
        (node,) = job.start("h2")
        job.wait_line("cannot be reached yet .Network is unreachable.: trying for 60 s", node)
        job.hosts["h2"].run("ip", "link", "set", *cable, "up")
        job.wait_world(2, steps=3, after=first)
        finish(job, undisturbed)
