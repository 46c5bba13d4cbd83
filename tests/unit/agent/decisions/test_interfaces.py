"""Under which address a node is reached, over which interface, and what it does when that changes."""

from __future__ import annotations

import signal

import pytest

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.decisions.interfaces import rank_interfaces, ranks_elsewhere
from dalsegno.protos import control_pb2, worker_pb2
from dalsegno.protos.addresses import is_loopback, is_only_here
from tests.unit.agent.decisions.test_decisions import ME, Agent, kinds, world

MOVED = ev.AddressChanged("10.0.0.4", "10.0.0.9")

HERE = [("lo", "127.0.0.1"), ("docker0", "172.17.0.1"), ("eth1", "10.0.0.4"), ("eth1", "fd00::4"), ("eth0", "10.1.0.4")]


@pytest.mark.parametrize(
    ("address", "name"), [("10.0.0.4", "eth1"), ("10.1.0.4", "eth0"), ("fd00::4", "eth1"), ("172.17.0.1", "docker0")]
)
def test_the_interface_with_the_address(address: str, name: str) -> None:
    """Both libraries are told it, NCCL exactly: it would take `eth1` for `eth10`, too."""
    assert rank_interfaces(address, HERE, ()) == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


@pytest.mark.parametrize(
    ("host", "here"),
    [
        *(
            (name, True)
            for name in ("localhost", "LocalHost.", "localhost.localdomain", "ip6-localhost", "a.localhost")
        ),
        *((address, True) for address in ("127.0.0.1", "127.0.1.1", "::1")),
        *((other, False) for other in ("head", "head.example", "localhost-1", "10.0.0.4", "fd00::4", "0.0.0.0")),
    ],
)
def test_what_means_another_machine_elsewhere(host: str, here: bool) -> None:
    """A machine's own name may mean loopback on itself; an address of loopback does everywhere."""
    assert is_only_here(host) == here


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1"])
def test_on_one_machine_nothing_changes(address: str) -> None:
    """Where others cannot be, ranks meet as they like."""
    assert is_loopback(address)
    assert rank_interfaces(address, [*HERE, ("lo", address)], ()) == {}


def test_what_the_user_has_set_stands() -> None:
    """Each for itself, and also if it is empty."""
    assert rank_interfaces("10.0.0.4", HERE, {"GLOO_SOCKET_IFNAME": ""}) == {"NCCL_SOCKET_IFNAME": "=eth1"}
    assert rank_interfaces("10.0.0.4", HERE, ["NCCL_SOCKET_IFNAME"]) == {"GLOO_SOCKET_IFNAME": "eth1"}


def test_an_address_of_no_interface() -> None:
    """Nothing is guessed."""
    assert rank_interfaces("192.0.2.1", HERE, ()) == {}


SEVERAL = [("eth0", "10.0.0.4"), ("eth0", "10.0.0.5"), ("eth0:ranks", "10.0.0.6"), ("eth0", "fd00::4")]


def test_an_address_with_a_label_is_found_by_it() -> None:
    """By gloo alone: NCCL takes the first address of an interface, and a colon for what is before a port."""
    assert rank_interfaces("10.0.0.6", SEVERAL, ()) == {
        "GLOO_SOCKET_IFNAME": "eth0:ranks",
        "NCCL_SOCKET_IFNAME": "=eth0",
    }
    assert ranks_elsewhere("10.0.0.6", SEVERAL, ()) == ""


def test_ranks_that_meet_elsewhere_than_the_node_says_so() -> None:
    """One line, with what helps; none where the user chose, on loopback, or where it is the first address."""
    line = ranks_elsewhere("10.0.0.5", SEVERAL, ())
    assert "meet others at 10.0.0.4, the first address of eth0, and not at 10.0.0.5" in line
    assert line.endswith("ip addr add 10.0.0.5/BITS dev eth0 label eth0:ranks")
    assert ranks_elsewhere("10.0.0.5", SEVERAL, ["GLOO_SOCKET_IFNAME"]) == ""
    for address in ("10.0.0.4", "127.0.0.1", "192.0.2.1"):
        assert ranks_elsewhere(address, SEVERAL, ()) == ""


def test_a_node_that_moved_joins_anew() -> None:
    """It serves at the new address first; its workers' connections are dead, and the master hears all of that."""
    agent = Agent().registered().running()
    actions = agent.hear(MOVED)
    assert kinds(actions) == ["MoveTo", "Say", "StopWorkers"]
    assert actions[0] == ev.MoveTo("10.0.0.9")
    assert agent.did(ev.StopWorkers)[-1].grace == 0.0
    agent.hear(ev.WorkersStopped(1))
    assert agent.did(ev.Register)[-1] == ev.Register(ME, "me")


def test_a_node_that_moved_without_workers_registers_at_once() -> None:
    """The master has to tell others its new address."""
    agent = Agent().registered()
    assert kinds(agent.hear(MOVED)) == ["MoveTo", "Say", "Register"]


FROM_LOOPBACK = ev.AddressChanged("127.0.1.1", "10.0.0.4")
GATHER = control_pb2.Gather(round=2)


def alone() -> Agent:
    """Its workers run in a world of one node, on a machine that had no network yet."""
    only = world()
    only.nodes, only.store_host = 1, "127.0.1.1"
    agent = Agent().registered()
    agent.directed(run=only)
    agent.said(hello=worker_pb2.Hello(epoch=1))
    return agent


def test_a_node_alone_that_gets_its_first_address_trains_on() -> None:
    """Loopback is not gone, and nobody else uses what it was told: the steps since the last commit were lost."""
    agent = alone()
    assert agent.hear(FROM_LOOPBACK) == []
    agent.directed(gather=GATHER)
    agent.said(drained=worker_pb2.Drained())
    agent.exits(0)
    actions = agent.hear(ev.WorkersStopped(1))
    assert kinds(actions)[-3:] == ["Say", "MoveTo", "Register"]
    assert "PrepareJoin" not in kinds(actions)
    assert agent.did(ev.Register)[-1] == ev.Register(ME, "me")
    reply = control_pb2.RegisterReply(generation=1, node="me", run_id="run-0001")
    assert kinds(agent.hear(ev.Registered("me.2", reply))) == []
    assert kinds(agent.directed(gather=GATHER)) == ["PrepareJoin"]


def test_a_node_alone_trains_on_in_each_further_network() -> None:
    """Its ranks meet on loopback still: at the second one it lost the steps since the last commit."""
    agent = alone()
    agent.hear(FROM_LOOPBACK)
    assert agent.hear(ev.AddressChanged("10.0.0.4", "10.1.0.9")) == []
    agent.directed(gather=GATHER)
    agent.said(drained=worker_pb2.Drained())
    agent.exits(0)
    agent.hear(ev.WorkersStopped(1))
    assert "this node's address is 10.1.0.9 now, not 127.0.1.1" in agent.did(ev.Say)[-1].text
    assert agent.did(ev.MoveTo) == [ev.MoveTo("10.1.0.9")]


def test_nodes_of_one_machine_that_gets_a_network_train_on() -> None:
    """Two terminals without one: both lost their steps, though no connection was dead. They hold each other's parts."""
    agent = Agent().registered()
    both = world()
    both.store_host = "127.0.1.1"
    agent.directed(run=both)
    agent.said(hello=worker_pb2.Hello(epoch=1))
    agent.said(progress=worker_pb2.Progress(step=3))
    assert agent.hear(FROM_LOOPBACK) == []


def test_a_script_that_tells_no_step_has_met_the_others_where_its_save_counts() -> None:
    """It has no session; both of its nodes lost what came behind that save, though no connection was dead."""
    agent = Agent().registered()
    both = world()
    both.store_host = "127.0.1.1"
    agent.directed(run=both)
    agent.directed(run=both, head=control_pb2.Checkpoint(epoch=1, step=2))
    assert agent.hear(FROM_LOOPBACK) == []


def test_a_node_alone_that_gets_its_first_address_and_ends_does_not_join_anew() -> None:
    """Nobody hears of that address: the master has to hear that the run is over."""
    agent = alone()
    agent.hear(FROM_LOOPBACK)
    agent.exits(0)
    agent.hear(ev.WorkersStopped(1))
    assert len(agent.did(ev.Register)) == 1


def test_a_node_that_was_fenced_meanwhile_joins_anew_once() -> None:
    """It has told its new address with that."""
    agent = alone()
    agent.hear(FROM_LOOPBACK)
    agent.directed(fenced=control_pb2.Fenced(reason="dead"))
    agent.hear(ev.WorkersStopped(1))
    reply = control_pb2.RegisterReply(generation=1, node="me", run_id="run-0001")
    assert kinds(agent.hear(ev.Registered("me.2", reply))) == []


@pytest.mark.parametrize("hello", [False, True])
def test_a_node_that_told_others_loopback_does_not_wait(hello: bool) -> None:
    """They do not reach its store, and it waits for them, also before its script has come to the session."""
    agent = Agent().registered()
    both = world()
    both.store_host = "127.0.1.1"
    agent.directed(run=both)
    if hello:
        agent.said(hello=worker_pb2.Hello(epoch=1))
    assert kinds(agent.hear(FROM_LOOPBACK)) == ["MoveTo", "Say", "StopWorkers"]


@pytest.mark.parametrize("again", [False, True], ids=["its first registration", "a later one"])
def test_a_node_that_moved_before_it_was_admitted(again: bool) -> None:
    """Its registration is under way, perhaps with the old address: it registers once more when that is answered."""
    agent = Agent()
    if again:
        agent.registered(incarnation="me.0").hear(MOVED)
    else:
        agent.hear(ev.Started())
    began = len(agent.did(ev.Register))
    assert kinds(agent.hear(MOVED)) == ["MoveTo"]
    reply = control_pb2.RegisterReply(generation=1, node="me", run_id="run-0001")
    assert kinds(agent.hear(ev.Registered(ME, reply))) == ["Say", "Register"]
    assert agent.did(ev.Register)[began:] == [ev.Register(ME, "me")]
    assert kinds(agent.hear(ev.Registered("me.2", reply))) == []


def test_a_leaver_that_moved_before_it_was_admitted_says_so_once() -> None:
    """Nobody fetches anything from it any more."""
    agent = Agent()
    agent.hear(ev.Started(), ev.Signalled(signal.SIGTERM), MOVED)
    assert "Register" not in kinds(agent.hear(ev.Registered(ME, control_pb2.RegisterReply(generation=1, node="me"))))


def test_a_leaver_that_moved_goes() -> None:
    """Nothing of it can be saved any more."""
    agent = Agent().registered().running()
    agent.hear(ev.Signalled(signal.SIGTERM), MOVED)
    (exit_,) = agent.hear(ev.WorkersStopped(1))[-1:]
    assert isinstance(exit_, ev.Exit)
    assert exit_.code == ev.EXIT_LEFT_UNSAVED
