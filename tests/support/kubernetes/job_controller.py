"""What an indexed Job does about its pods: replacements with their back-off, the pod failure policy, its end.

Sources: pkg/controller/job/{job_controller,backoff_utils,pod_failure_policy,indexed_job_utils}.go of Kubernetes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .states import Action, Create, Delete, Phase, Pod

__all__ = ["JobStatus", "failure_action", "job"]

# Seconds before the first replacement, doubled with each further pod that failed, and their bound.
FIRST_PAUSE, LONGEST_PAUSE = 10.0, 600.0


@dataclass(frozen=True)
class JobStatus:
    """What the controller keeps between two looks.

    Attributes:
        succeeded: indexes that are done.
        failed: pods that counted against `backoffLimit`.
        counted: names of pods that were counted, or ignored.
        failures: by index how many of its pods failed, and when the last one did; ignored ones are among them.
        ending: why the Job fails, while its pods end.
        state: "" while it runs, then "Complete" or "Failed".
    """

    succeeded: frozenset[int] = frozenset()
    failed: int = 0
    counted: frozenset[str] = frozenset()
    failures: Mapping[int, tuple[int, float]] = field(default_factory=dict)
    ending: str = ""
    state: str = ""


def failure_action(policy: Mapping[str, Any], container: str, pod: Pod) -> str:
    """What the first rule that knows this failed pod says: Ignore, FailJob, FailIndex or Count (no rule does)."""
    for rule in policy.get("rules", []):
        codes = rule.get("onExitCodes")
        if codes is not None:
            own = codes.get("containerName") in (None, container)
            is_in = pod.exit_code in codes["values"]
            # 0 is not matched, also by NotIn.
            if own and pod.exit_code and is_in == (codes["operator"] == "In"):
                return str(rule["action"])
        for condition in rule.get("onPodConditions", []):
            wanted = condition["type"] == "DisruptionTarget" and condition.get("status", "True") == "True"
            if wanted and pod.disrupted:
                return str(rule["action"])
    return "Count"


def job(
    spec: Mapping[str, Any], status: JobStatus, pods: Sequence[Pod], now: float, pace: float = 1.0
) -> tuple[JobStatus, list[Action]]:
    """Its status from now on, and its next actions.

    Args:
        spec: of the Job.
        status: as returned the last time.
        pods: all that there are.
        now: seconds, monotonic.
        pace: times Kubernetes' pauses of back-off.
    """
    if status.state:
        return status, []
    status = _counted(spec, status, pods)
    if not status.ending and status.failed > spec.get("backoffLimit", 6):
        status = replace(status, ending="BackoffLimitExceeded")
    active = [pod for pod in pods if pod.is_active]
    if status.ending:
        if all(pod.phase.is_terminal for pod in pods):
            return replace(status, state="Failed"), []
        return status, [Delete(pod.name) for pod in active]
    wanted = set(range(spec["completions"]))
    if wanted <= status.succeeded:
        return replace(status, state="Complete"), [Delete(pod.name) for pod in active]
    return status, _managed(spec, status, pods, now, pace)


def _counted(spec: Mapping[str, Any], status: JobStatus, pods: Sequence[Pod]) -> JobStatus:
    """After a look at pods that have ended and were not counted."""
    container = spec["template"]["spec"]["containers"][0]["name"]
    for pod in sorted(pods, key=lambda pod: pod.ended):
        if not pod.phase.is_terminal or pod.name in status.counted:
            continue
        status = replace(status, counted=status.counted | {pod.name})
        if pod.phase is Phase.SUCCEEDED:
            status = replace(status, succeeded=status.succeeded | {pod.index}, failures=_forgiven(spec, status))
            continue
        count, _ = status.failures.get(pod.index, (0, 0.0))
        status = replace(status, failures={**status.failures, pod.index: (count + 1, pod.ended)})
        action = failure_action(spec.get("podFailurePolicy", {}), container, pod)
        if action == "FailJob":
            status = replace(status, ending=status.ending or f"PodFailurePolicy: {pod.name}, code {pod.exit_code}")
        status = replace(status, failed=status.failed + (action != "Ignore"))
    return status


def _forgiven(spec: Mapping[str, Any], status: JobStatus) -> Mapping[int, tuple[int, float]]:
    """A success ends the common back-off; an index with one of its own keeps it."""
    return status.failures if "backoffLimitPerIndex" in spec else {}


def _managed(spec: Mapping[str, Any], status: JobStatus, pods: Sequence[Pod], now: float, pace: float) -> list[Action]:
    active = [pod for pod in pods if pod.is_active]
    too_many = [pod for pod in active if pod.index >= spec["completions"] or pod.index in status.succeeded]
    room = min(spec["parallelism"], spec["completions"] - len(status.succeeded))
    rest = sorted((pod for pod in active if pod not in too_many), key=lambda pod: pod.index)
    too_many += rest[room:]
    if too_many:
        return [Delete(pod.name) for pod in too_many]
    # With `Failed`, who is on its way out is not replaced before it has ended: on a lost node, never by itself.
    held = {pod.index for pod in active}
    leaving = {pod.index for pod in pods if pod.deleting and not pod.phase.is_terminal}
    if spec.get("podReplacementPolicy", "TerminatingOrFailed") == "Failed":
        held |= leaving
    free = [index for index in range(spec["completions"]) if index not in held | status.succeeded]
    ready: list[Action] = [Create(index) for index in free if _pause_is_over(spec, status, index, now, pace)]
    return ready[: max(0, room - len(held))]


def _pause_is_over(spec: Mapping[str, Any], status: JobStatus, index: int, now: float, pace: float) -> bool:
    if "backoffLimitPerIndex" in spec:
        count, last = status.failures.get(index, (0, 0.0))
    else:
        count = sum(number for number, _ in status.failures.values())
        last = max((when for _, when in status.failures.values()), default=0.0)
    return not count or now - last >= pace * min(FIRST_PAUSE * 2 ** (count - 1), LONGEST_PAUSE)
