"""What a Deployment (with its ReplicaSets) and a StatefulSet do about their pods.

Sources: pkg/controller/deployment/{rolling,recreate}.go, pkg/controller/statefulset/stateful_set_control.go of
Kubernetes, and its documentation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .states import Action, Create, Delete, Pod

__all__ = ["deployment", "stateful_set"]


def deployment(spec: Mapping[str, Any], revision: str, pods: Sequence[Pod]) -> list[Action]:
    """A Deployment's next actions.

    A pod that is being deleted is counted by nobody, so its replacement does not wait for its end, whatever its node
    does. Only `Recreate` waits, at a change of the template, until pods of the old one are gone.

    Args:
        spec: of the Deployment.
        revision: of its present template.
        pods: all of them, those of older templates too.
    """
    replicas = int(spec.get("replicas", 1))
    old = [pod for pod in pods if pod.revision != revision]
    new = [pod for pod in pods if pod.revision == revision and pod.is_active]
    leaving = [pod for pod in old if pod.is_active]
    strategy = spec.get("strategy") or {}
    if strategy.get("type", "RollingUpdate") == "Recreate":
        if leaving:
            return [Delete(pod.name) for pod in leaving]
        if any(not pod.phase.is_terminal for pod in old):
            return []
        return _sized(new, replicas)
    if not leaving:
        return _sized(new, replicas)
    return _rolled(strategy.get("rollingUpdate") or {}, replicas, leaving, new)


def _sized(pods: Sequence[Pod], replicas: int) -> list[Action]:
    """As many as there should be. Those that are not ready go first, then the youngest."""
    if len(pods) <= replicas:
        return [Create() for _ in range(replicas - len(pods))]
    chosen = sorted(pods, key=lambda pod: (pod.ready, -pod.number))
    return [Delete(pod.name) for pod in chosen[: len(pods) - replicas]]


def _rolled(limits: Mapping[str, Any], replicas: int, old: Sequence[Pod], new: Sequence[Pod]) -> list[Action]:
    """A step of a rolling update: never more than the surge above, never fewer ready than allowed below."""
    surge = _share(limits.get("maxSurge", "25%"), replicas, up=True)
    missing = _share(limits.get("maxUnavailable", "25%"), replicas, up=False)
    if not surge and not missing:
        missing = 1
    actions: list[Action] = []
    room = replicas + surge - len(old) - len(new)
    actions += [Create() for _ in range(max(0, min(room, replicas - len(new))))]
    ready = sum(pod.ready for pod in [*old, *new])
    least = replicas - missing
    unready_new = sum(not pod.ready for pod in new)
    most = len(old) + len(new) - least - unready_new
    gone = [pod for pod in old if not pod.ready][: max(0, most)]
    gone += [pod for pod in old if pod.ready][: max(0, min(most - len(gone), ready - least))]
    return actions + [Delete(pod.name) for pod in gone]


def _share(value: Any, replicas: int, *, up: bool) -> int:
    """A number of pods, or a share of them."""
    if isinstance(value, int):
        return value
    share = replicas * int(str(value).removesuffix("%")) / 100
    return math.ceil(share) if up else math.floor(share)


def stateful_set(spec: Mapping[str, Any], revision: str, pods: Sequence[Pod]) -> list[Action]:
    """A StatefulSet's next actions (`OrderedReady`, `RollingUpdate`).

    A pod's name is given again only when the pod of that name is gone: one that hangs, because its node is lost, is
    not replaced until somebody says that the node is gone.
    """
    by_index = {pod.index: pod for pod in pods}
    replicas = int(spec.get("replicas", 1))
    for index in range(replicas):
        pod = by_index.get(index)
        if pod is None:
            return [Create(index)]
        if pod.phase.is_terminal and not pod.deleting:
            return [Delete(pod.name)]
        if not pod.ready and (pod.deleting or pod.revision == revision):
            return []
    too_many = sorted((pod for pod in pods if pod.index >= replicas), key=lambda pod: -pod.index)
    if too_many:
        return [] if too_many[0].deleting else [Delete(too_many[0].name)]
    for pod in sorted(pods, key=lambda pod: -pod.index):
        if pod.revision != revision:
            return [Delete(pod.name)]
    return []
