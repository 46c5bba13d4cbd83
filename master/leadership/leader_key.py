"""The key in etcd, `/dalsegno/<job>/leader`, by which masters of one job know who should lead. It ends with a lease.

What stands there and names no leader, or has no lease, counts as nothing, and is written over: it must not stop a job.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import ClassVar

from dalsegno.protos.addresses import ADDRESS

from ..record.etcd_calls import Change, Etcd, EtcdUnavailable, Value
from ..record.etcd_store import PREFIX
from .standing import LEASE_SECONDS, KeyOrder, Leader, Saw, Unanswered

__all__ = ["LeaderKey"]


class LeaderKey:
    """One master's hands on the key. For one thread at a time.

    Args:
        client: its own from here on.
        job_id: whose leader it is.
    """

    def __init__(self, client: Etcd, job_id: str) -> None:
        self._client = client
        self._name = f"{PREFIX}/{job_id}/leader"
        # The lease of the last campaign, which may have won without our knowing; 0: there was none.
        self._lease = 0

    def carry_out(self, order: KeyOrder, mine: Leader) -> Saw | Unanswered:
        """Does what the order says, and returns what the key says then; `mine` is what it says where it is written."""
        try:
            return Saw(self._acts[order](self, mine))
        except EtcdUnavailable as error:
            return Unanswered(str(error), error.cure)

    def close(self) -> None:
        self._client.close()

    def _look(self, mine: Leader) -> Leader | None:
        return _decoded(self._client.get(self._name))

    def _keep(self, mine: Leader) -> Leader | None:
        if self._lease:
            self._client.keep(self._lease)
        return self._look(mine)

    def _campaign(self, mine: Leader) -> Leader | None:
        found = self._client.get(self._name)
        if (leader := _decoded(found)) is not None:
            return leader
        # A lease for each try: one that was granted earlier may end at any moment.
        self._lease = self._client.grant(LEASE_SECONDS)
        return self._replace(found, mine)

    def _announce(self, mine: Leader) -> Leader | None:
        found = self._client.get(self._name)
        leader = _decoded(found)
        return self._replace(found, mine) if leader is not None and leader.master == mine.master else leader

    def _resign(self, mine: Leader) -> Leader | None:
        found = self._client.get(self._name)
        leader = _decoded(found)
        if found is not None and leader is not None and leader.master == mine.master:
            self._client.change(self._name, found.revision, [Change(self._name, None)], found.data)
        return None

    def _replace(self, found: Value | None, mine: Leader) -> Leader | None:
        revision, held = (0, None) if found is None else (found.revision, found.data)
        if self._client.change(self._name, revision, [Change(self._name, _encoded(mine), self._lease)], held):
            return mine
        # Somebody was faster; or this was done already, and the answer was lost.
        return self._look(mine)

    _acts: ClassVar[dict[KeyOrder, Callable[[LeaderKey, Leader], Leader | None]]] = {
        KeyOrder.LOOK: _look,
        KeyOrder.KEEP: _keep,
        KeyOrder.CAMPAIGN: _campaign,
        KeyOrder.ANNOUNCE: _announce,
        KeyOrder.RESIGN: _resign,
    }


def _encoded(leader: Leader) -> bytes:
    return json.dumps(asdict(leader), sort_keys=True).encode()


def _decoded(found: Value | None) -> Leader | None:
    if found is None:
        return None
    try:
        said = json.loads(found.data)
        leader = Leader(said["master"], said["address"], said["generation"])
        return leader if _is_sound(leader) and found.lease else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def _is_sound(leader: Leader) -> bool:
    """Whether it has the types that it should have, and an address that may go into a call's metadata."""
    texts = isinstance(leader.master, str) and isinstance(leader.address, str)
    return texts and type(leader.generation) is int and ADDRESS.fullmatch(leader.address) is not None
