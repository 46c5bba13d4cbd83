"""What a HorizontalPodAutoscaler does about the number of a Deployment's pods, by one external metric.

Source: pkg/controller/podautoscaler/horizontal.go of Kubernetes, and its documentation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Past", "autoscaler"]

# A metric that is off by less than this share changes nothing.
TOLERANCE = 0.1


@dataclass(frozen=True)
class Past:
    """What an autoscaler remembers, with times: what it would have set, and by how much it changed the number."""

    wanted: tuple[tuple[float, int], ...] = ()
    changes: tuple[tuple[float, int], ...] = ()


def autoscaler(
    spec: Mapping[str, Any], replicas: int, value: float, past: Past, now: float, pace: float
) -> tuple[int, Past]:
    """The number of pods that it sets now, and what it remembers.

    Args:
        spec: of the autoscaler.
        replicas: what the Deployment has; 0: somebody has switched it off.
        value: of the metric, in all.
        past: what it returned last.
        now: monotonic seconds.
        pace: times Kubernetes' pauses.
    """
    low, high = int(spec.get("minReplicas", 1)), int(spec["maxReplicas"])
    if not replicas:
        return 0, past
    if not low <= replicas <= high:
        return min(max(replicas, low), high), past
    ((metric,),) = (spec["metrics"],)
    share = value / (replicas * float(metric["external"]["target"]["averageValue"]))
    desired = replicas if abs(share - 1) <= TOLERANCE else math.ceil(share * replicas)
    up, down = spec["behavior"]["scaleUp"], spec["behavior"]["scaleDown"]
    longest = max(one["stabilizationWindowSeconds"] for one in (up, down)) * pace
    wanted = (*(one for one in past.wanted if now - one[0] <= longest), (now, desired))
    at_least = min(count for at, count in wanted if now - at <= up["stabilizationWindowSeconds"] * pace)
    at_most = max(count for at, count in wanted if now - at <= down["stabilizationWindowSeconds"] * pace)
    count = min(max(replicas, at_least), at_most) if at_least <= at_most else replicas
    if count > replicas:
        count = min(count, high, replicas + _left(up, past, 1, now, pace))
    elif count < replicas:
        count = max(count, low, replicas - _left(down, past, -1, now, pace))
    changes = past.changes if count == replicas else (*past.changes, (now, count - replicas))
    return count, replace(past, wanted=wanted, changes=changes)


def _left(rules: Mapping[str, Any], past: Past, sign: int, now: float, pace: float) -> int:
    """How many more pods may come, or go, in the periods of all policies."""
    found = []
    for policy in rules["policies"]:
        assert policy["type"] == "Pods", "only policies of pods are kept here"
        recent = [by * sign for at, by in past.changes if now - at <= policy["periodSeconds"] * pace and by * sign > 0]
        found.append(max(0, policy["value"] - sum(recent)))
    return max(found)
