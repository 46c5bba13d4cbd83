"""A world's store as torch's agent uses it: it waits there for the others, and not for a world that is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.utils import store as store_util

from dalsegno.agent.decisions import events as ev
from dalsegno.agent.shell.world_store import WorldStore, connect
from dalsegno.agent.workers.tcp_stores import StoreServers
from dalsegno.agent.workers.worker_env import WorldPlace
from dalsegno.protos import control_pb2
from tests.support.jobs.masters import Driven, Node, settings
from tests.unit.agent.decisions.test_decisions import Agent

pytestmark = pytest.mark.timeout(60)


class World:
    """A world of two nodes with two ranks each, of which this test is one node or both."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self._servers = StoreServers("127.0.0.1")
        self.host, self.port = self._servers.open(1)
        world = control_pb2.World(store_host=self.host, store_port=self.port)
        self._served: TCPStore | None = self._servers.use(world, mine=True)

    def store(self, rank: int, timeout: float = 30.0) -> WorldStore:
        place = WorldPlace(rank, 2 * rank, 2, 2, 4, f"node-{rank}")
        store = self._served if rank == 0 else connect(self.host, self.port, 10.0, self.over.is_set)
        assert store is not None
        return WorldStore(store, place, timeout, self.over.is_set)

    def lose_host(self) -> None:
        self._servers.close()
        self._served = None


@pytest.fixture
def world() -> World:
    return World()


def assign(store: WorldStore, rank: int) -> list[Any]:
    """What torch's agent of this node gives its workers for places."""
    spec = SimpleNamespace(role="default", local_world_size=2)
    agent: Any = SimpleElasticAgent
    return [(one.global_rank, one.world_size) for one in agent._assign_worker_ranks(None, store, rank, 2, spec)]


def soon(world: World) -> threading.Timer:
    """The world is over while somebody waits."""
    timer = threading.Timer(0.5, world.over.set)
    timer.start()
    return timer


def test_two_agents_meet(world: World) -> None:
    """As they do at a TCPStore: each hears of the other's ranks, and waits for its end."""
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        store = world.store(rank)
        found[rank] = assign(store, rank)
        store_util.barrier(store, 2, "end", 30.0)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found == {0: [(0, 4), (1, 4)], 1: [(2, 4), (3, 4)]}


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_nobody_waits_for_a_node_whose_world_is_over(world: World, rank: int) -> None:
    """The other died before it had said a word: this one starts its workers in their places, to be told to stop."""
    timer = soon(world)
    assert assign(world.store(rank), rank) == [(2 * rank, 4), (2 * rank + 1, 4)]
    assert not timer.is_alive(), "it waits as long as the world lasts"


@pytest.mark.slow
def test_the_stores_node_is_lost(world: World) -> None:
    """That is no error of this node's agent: the master hears of it, and the world is over."""
    store = world.store(1)
    world.lose_host()
    timer = soon(world)
    assert assign(store, 1) == [(2, 4), (3, 4)]
    assert not timer.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize(
    "wait", [lambda store: assign(store, 1), lambda store: store_util.barrier(store, 2, "end", 0.3)]
)
def test_a_world_that_lasts_has_the_stores_patience(world: World, wait: Callable[[WorldStore], object]) -> None:
    store = world.store(1, timeout=0.3)
    began = time.monotonic()
    with pytest.raises(DistError):
        wait(store)
    assert time.monotonic() - began >= 0.3
    assert store.timeout == timedelta(seconds=0.3)


@pytest.mark.slow
def test_nobody_waits_for_the_others_end_in_a_world_that_is_over(world: World) -> None:
    """torch's agent ends with its workers' success."""
    timer = soon(world)
    store_util.barrier(world.store(0), 2, "end", 30.0)
    assert not timer.is_alive()


def test_what_torch_does_not_ask_is_not_made_up(world: World) -> None:
    store = world.store(1)
    world.over.set()
    with pytest.raises(DistError, match="nobody will set"):
        store.get("another key")


@pytest.mark.slow
def test_nobody_connects_to_the_store_of_a_world_that_is_over(world: World) -> None:
    """Its node was killed before anybody had connected."""
    world.lose_host()
    soon(world)
    assert connect(world.host, world.port, 30.0, world.over.is_set) is None
    assert connect(world.host, world.port, 0.2, lambda: False) is None, "nor for ever"


def test_all_joins_of_a_round_offer_one_store() -> None:
    """The resume point moves with each of many commits, and the world opens with the first of all these Joins."""
    servers = StoreServers("127.0.0.1")
    try:
        _, first = servers.open((1, 3))
        assert {servers.open((1, 3))[1] for _ in range(20)} == {first}
        assert servers.use(control_pb2.World(epoch=3, store_port=first), mine=True) is not None
    finally:
        servers.close()


def test_each_round_and_each_address_has_a_store_of_its_own() -> None:
    """Which nobody has used; those of the last rounds wait for a world that may just be opening."""
    servers = StoreServers("127.0.0.1")
    try:
        ports = [servers.open((1, round_))[1] for round_ in range(1, 12)]
        assert len(set(ports)) == 11
        servers.address = "127.0.0.2"
        ports.append(servers.open((1, 11))[1])
        assert servers.use(control_pb2.World(epoch=10, store_port=ports[9]), mine=True) is not None
        # What it had for other rounds is closed with that.
        assert servers.use(control_pb2.World(epoch=11, store_port=ports[11]), mine=True) is None
        assert servers.use(control_pb2.World(epoch=12, store_port=servers.open((1, 11))[1]), mine=True) is not None
    finally:
        servers.close()


def test_a_store_that_is_gone_is_explained(caplog: pytest.LogCaptureFixture) -> None:
    """Which ports were offered, and what became of them."""
    servers = StoreServers("127.0.0.1")
    try:
        _, first = servers.open((1, 2))
        assert servers.use(control_pb2.World(epoch=2, store_port=first), mine=True) is not None
        _, second = servers.open((1, 3))
        assert servers.use(control_pb2.World(epoch=3, store_port=first), mine=True) is None
    finally:
        servers.close()
    (record,) = caplog.records
    assert f"epoch 3 wants port {first}; open: [{second}]; closed: [({first}, 'used by epoch 2')]" in record.message


def test_a_world_meets_at_the_first_of_many_offers() -> None:
    """Twelve commits come at once while a node joins: it joins anew each time, and the master takes its first Join.

    A node that was cut off, and a restarted master, have such a backlog; the store of that Join was closed by then.
    """
    job = Driven(settings())
    first, second = job.start(2)
    sealed = [job.seal(step) for step in range(1, 13)]
    first.failed()
    early, agent, servers = first.joining(), Agent(), StoreServers("127.0.0.1")
    agent.registered(incarnation=first.incarnation)
    try:
        _, early.store_port = prepared(agent, servers, first)
        for one in sealed:
            second.commit(one)
            prepared(agent, servers, first)
        assert len({order.resume.digest for order in agent.did(ev.PrepareJoin) if order.resume}) == len(sealed)
        job.call(early)
        second.join()
        world = first.directive.run
        assert (world.epoch, world.place.group_rank, world.store_port) == (2, 0, early.store_port)
        assert servers.use(world, mine=True) is not None
    finally:
        servers.close()


def prepared(agent: Agent, servers: StoreServers, node: Node) -> tuple[str, int]:
    """What the agent offers for the present order."""
    agent.hear(ev.Directed(node.directive))
    return servers.open((node.directive.generation, agent.did(ev.PrepareJoin)[-1].round))
