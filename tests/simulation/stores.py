"""The stores that an agent offers for worlds: one that a world is told to use must still be open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dalsegno.agent.workers.tcp_stores import StoreServers
from dalsegno.protos import control_pb2

if TYPE_CHECKING:
    from .agents import SimAgent
    from .real_agent import RealAgent


class Stores(StoreServers):
    """The product's, over stores that nobody serves, at ports that nobody has used."""

    def __init__(self, agent: SimAgent | RealAgent) -> None:
        super().__init__(agent.host)
        self._agent = agent

    def _serve(self) -> tuple[Any, int]:
        return object(), self._agent.sim.fresh_port()

    def use(self, world: control_pb2.World, mine: bool) -> Any:
        found = super().use(world, mine)
        why = f"{self._agent.label} is told to serve port {world.store_port}"
        self._agent.sim.ledger.require(found is not None or not mine, "the store of a world is open", why)
        return found
