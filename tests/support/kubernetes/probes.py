"""Probes of a container: what their results come to, and when the next one is due.

Source: pkg/kubelet/prober/worker.go of Kubernetes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["Health", "Probed", "due", "probed"]


@dataclass(frozen=True)
class Probed:
    """One probe's state: what holds (None: no verdict yet), how often the last result came in a row, when."""

    holds: bool | None = None
    last: bool | None = None
    times: int = 0
    at: float | None = None


def due(probe: Mapping[str, Any], state: Probed, started: float, now: float) -> bool:
    """Whether it is to be made now; `started`: when the container was."""
    if state.at is None:
        return bool(now - started >= probe.get("initialDelaySeconds", 0))
    return bool(now - state.at >= probe.get("periodSeconds", 10))


def probed(probe: Mapping[str, Any], state: Probed, ok: bool, now: float) -> Probed:
    """After a result: it holds once it came often enough in a row."""
    times = state.times + 1 if state.last is ok else 1
    needed = probe.get("successThreshold", 1) if ok else probe.get("failureThreshold", 3)
    return Probed(ok if times >= needed else state.holds, ok, times, now)


@dataclass(frozen=True)
class Health:
    """The probes of a container since its start."""

    startup: Probed = Probed()
    readiness: Probed = Probed()
    liveness: Probed = Probed()

    def has_started(self, container: Mapping[str, Any]) -> bool:
        """Before that, nobody asks whether it lives or is ready."""
        return "startupProbe" not in container or self.startup.holds is True

    def is_ready(self, container: Mapping[str, Any]) -> bool:
        return self.has_started(container) and ("readinessProbe" not in container or self.readiness.holds is True)

    def is_doomed(self) -> bool:
        """Whether the kubelet ends the container."""
        return self.startup.holds is False or self.liveness.holds is False

    def wanted(self, container: Mapping[str, Any]) -> tuple[str, ...]:
        """The probes that are made now, by name."""
        if not self.has_started(container):
            return ("startup",)
        return tuple(name for name in ("readiness", "liveness") if f"{name}Probe" in container)

    def with_result(self, container: Mapping[str, Any], name: str, ok: bool, now: float) -> Health:
        """After a result of one of them."""
        after = probed(container[f"{name}Probe"], getattr(self, name), ok, now)
        return replace(self, **{name: after})
