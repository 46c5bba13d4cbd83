"""Bugs of several masters, planted; see `plants` and `leaders`."""

from __future__ import annotations

from typing import Any

from dalsegno.master.leadership import standing
from dalsegno.master.leadership.candidate import Candidate
from dalsegno.master.leadership.leader_key import LeaderKey
from dalsegno.master.leadership.standing import KeyOrder
from dalsegno.master.record.etcd_store import EtcdStore
from dalsegno.master.record.store import StoreAway

from .brain import Plant


def writes_over_whatever_is_there(original: Any) -> Any:
    def put_head(self: Any, head: Any, changes: Any, rows: Any) -> bool:
        found = self._client.get(self._at + "head")
        self._revision, self._held = (0, b"") if found is None else (found.revision, found.data)
        done: bool = original(self, head, changes, rows)
        return done

    return put_head


def ends_with_etcd(original: Any) -> Any:
    async def taken_over(self: Any) -> int:
        try:
            generation: int = await self._server.lead()
            return generation
        except StoreAway as error:
            raise ValueError("etcd is away") from error

    return taken_over


def keeps_no_lease(original: Any) -> Any:
    return {**original, KeyOrder.KEEP: LeaderKey._look}


def takes_its_former_self_for_another(original: Any) -> Any:
    return 4


def reads_before_it_takes(original: Any) -> Any:
    def refresh(self: Any) -> None:
        if self._revision == 0:
            original(self)

    return refresh


_LEADS = frozenset({"one leads in the end", "who leads goes on"})
_ENDS = frozenset({"no master ends by itself"})
_RECORD = _ENDS | frozenset(
    {
        *("generations never fall", "no head is written over unseen", "one writer for each generation"),
        *("no decision is forgotten", "no decision is made twice"),
    }
)

LEADER_PLANTS = {
    plant.replace.__name__: plant
    for plant in [
        Plant(EtcdStore, "_put_head", writes_over_whatever_is_there, _RECORD, seeds=100),
        Plant(EtcdStore, "_refresh", reads_before_it_takes, _RECORD | {"no master breaks"}, seeds=100),
        Plant(Candidate, "_taken_over", ends_with_etcd, _ENDS | {"no master breaks"}, seeds=100),
        Plant(LeaderKey, "_acts", keeps_no_lease, _LEADS, seeds=10),
        Plant(standing, "CLASH_LOOKS", takes_its_former_self_for_another, _ENDS, seeds=20),
    ]
}
