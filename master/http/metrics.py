"""The job in Prometheus' text format (https://prometheus.io/docs/instrumenting/exposition_formats)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from dalsegno.protos import control_pb2

__all__ = ("CONTENT_TYPE", "metrics")

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
ROLES = ("member", "spare", "joining", "leaving")


class _Status(Collector):
    """One look at a job."""

    def __init__(self, status: control_pb2.StatusReply) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        """Every metric that is known."""
        status, history = self._status, self._status.history
        yield GaugeMetricFamily("dalsegno_generation", "Generation of this master.", status.generation)
        yield GaugeMetricFamily("dalsegno_epoch", "The last opened epoch.", status.epoch)
        phases = "1 waiting, 2 forming, 3 running, 4 draining, 5 succeeded, 6 failed, 7 stopped."
        yield GaugeMetricFamily("dalsegno_phase", phases, status.phase)
        yield GaugeMetricFamily("dalsegno_step", "Optimizer steps of the run.", status.step)
        yield GaugeMetricFamily("dalsegno_committed_step", "Step of the newest committed checkpoint.", status.head.step)
        yield GaugeMetricFamily("dalsegno_loss", "The last loss that a node reported.", status.loss)
        paused = sum(epoch.paused for epoch in history)
        yield CounterMetricFamily("dalsegno_paused_seconds", "Time without steps because of changes.", paused)
        lost = sum(epoch.lost_steps for epoch in history)
        yield CounterMetricFamily("dalsegno_lost_steps", "Steps done again after a loss.", lost)
        yield self._parts()
        if status.HasField("goodput"):
            text = "Share of the time that brought the run forward."
            yield GaugeMetricFamily("dalsegno_goodput_ratio", text, status.goodput)
        nodes = GaugeMetricFamily("dalsegno_nodes", "Nodes by role.", labels=("role",))
        roles = Counter(node.role for node in status.nodes)
        for role in ROLES:
            nodes.add_metric((role,), roles[role])
        yield nodes

    def _parts(self) -> Metric:
        """Where the time of all pauses went."""
        family = CounterMetricFamily("dalsegno_paused_part_seconds", "Where paused time went.", labels=("part",))
        seconds: Counter[str] = Counter()
        for epoch in self._status.history:
            for part in epoch.parts:
                seconds[part.name] += part.seconds  # type: ignore[assignment]  # a Counter of floats
        for name, value in sorted(seconds.items()):
            family.add_metric((name,), value)
        return family


def metrics(status: control_pb2.StatusReply) -> str:
    """A job's metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Status(status))
    return generate_latest(registry).decode()
