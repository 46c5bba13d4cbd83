"""The tests' miniature of Kubernetes decides as the stock controllers and the kubelet do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.kubernetes.autoscaler import Past, autoscaler
from tests.support.kubernetes.controllers import deployment, stateful_set
from tests.support.kubernetes.job_controller import JobStatus, failure_action, job
from tests.support.kubernetes.pod_spec import command_line, environment, port_of, volumes
from tests.support.kubernetes.probes import Health, Probed, due, probed
from tests.support.kubernetes.states import Action, Create, Delete, Phase, Pod

RULES = {
    "rules": [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [75, 76]}},
        {"action": "FailJob", "onExitCodes": {"containerName": "trainer", "operator": "In", "values": [1, 2]}},
    ]
}
RECREATE = {"replicas": 2, "strategy": {"type": "Recreate"}}
JOB: dict[str, Any] = {
    **{"completions": 2, "parallelism": 2, "backoffLimit": 2, "podReplacementPolicy": "Failed"},
    **{"podFailurePolicy": RULES, "template": {"spec": {"containers": [{"name": "trainer"}]}}},
}


def running(number: int, revision: str = "new", index: int = -1, ready: bool = True) -> Pod:
    return Pod(f"pod-{number}", number, revision, index, Phase.RUNNING, ready)


def ended(number: int, index: int, code: int, when: float = 0.0) -> Pod:
    phase = Phase.FAILED if code else Phase.SUCCEEDED
    return replace(running(number, index=index), phase=phase, ready=False, exit_code=code, ended=when)


def leaving(pod: Pod) -> Pod:
    return replace(pod, deleting=True, ready=False)


# ---- HorizontalPodAutoscaler -----------------------------------------------------------------------------------------

AUTOSCALER: dict[str, Any] = {
    **{"minReplicas": 1, "maxReplicas": 4},
    "metrics": [{"type": "External", "external": {"target": {"type": "AverageValue", "averageValue": "8"}}}],
    "behavior": {
        "scaleUp": {
            "stabilizationWindowSeconds": 60,
            "policies": [{"type": "Pods", "value": 4, "periodSeconds": 60}],
        },
        "scaleDown": {
            "stabilizationWindowSeconds": 300,
            "policies": [{"type": "Pods", "value": 1, "periodSeconds": 120}],
        },
    },
}


def numbers(values: list[tuple[float, float]], replicas: int = 1) -> list[int]:
    """What it has set at these moments, with these values of the metric."""
    found, past = [], Past()
    for now, value in values:
        replicas, past = autoscaler(AUTOSCALER, replicas, value, past, now, 1.0)
        found.append(replicas)
    return found


def test_an_autoscaler_obeys_a_metric_that_stays() -> None:
    """All at once upwards, after its window; one in each period downwards, after its own."""
    assert numbers([(0, 8), (30, 32), (59, 32), (91, 32), (100, 32)]) == [1, 1, 1, 4, 4]
    assert numbers([(0, 32), (200, 8), (301, 8), (400, 8), (422, 8), (700, 8)], 4) == [4, 4, 3, 3, 2, 1]


def test_an_autoscaler_keeps_to_its_bounds() -> None:
    """No more than most, no fewer than least, and none where somebody has set none; a tenth is no change."""
    assert numbers([(0, 800), (61, 800)]) == [4, 4]
    assert numbers([(0, 0), (301, 0)], 2) == [1, 1]
    assert numbers([(0, 8)], 0) == [0]
    assert numbers([(0, 8.7), (61, 8.7)]) == [1, 1]
    assert numbers([(0, 8), (61, 8)], 7) == [4, 3]


# ---- Deployment ------------------------------------------------------------------------------------------------------


def test_a_deployment_has_as_many_pods_as_it_should() -> None:
    """Missing ones are made, surplus ones go: those that are not ready, then the youngest."""
    two = [running(0), running(1)]
    assert deployment(RECREATE, "new", []) == [Create(), Create()]
    assert deployment(RECREATE, "new", two) == []
    assert deployment({**RECREATE, "replicas": 1}, "new", two) == [Delete("pod-1")]
    assert deployment({**RECREATE, "replicas": 1}, "new", [running(0, ready=False), two[1]]) == [Delete("pod-0")]


def test_a_deployment_replaces_what_is_on_its_way_out() -> None:
    """It does not wait for the end of a pod that hangs on a lost node."""
    assert deployment(RECREATE, "new", [leaving(running(0)), running(1)]) == [Create()]


def test_recreate_waits_for_the_end_of_the_old_ones() -> None:
    """First all old pods go; none is made before the last of them is gone."""
    old = [running(0, "old"), running(1, "old")]
    assert deployment(RECREATE, "new", old) == [Delete("pod-0"), Delete("pod-1")]
    assert deployment(RECREATE, "new", [leaving(old[0])]) == []
    assert deployment(RECREATE, "new", [ended(0, -1, 75)]) == [Create(), Create()]


@pytest.mark.parametrize(
    ("limits", "pods", "actions"),
    [
        ({"maxSurge": 1, "maxUnavailable": 0}, "RR", [Create()]),
        ({"maxSurge": 1, "maxUnavailable": 0}, "RRn", []),
        ({"maxSurge": 1, "maxUnavailable": 0}, "RRN", [Delete("pod-0")]),
        ({"maxSurge": 0, "maxUnavailable": 1}, "RR", [Delete("pod-0")]),
        ({"maxSurge": 0, "maxUnavailable": 1}, "R", [Create()]),
        ({"maxSurge": 0, "maxUnavailable": 1}, "Rn", []),
        (
            {},
            "rR",
            [
                Create(),
            ],
        ),
        ({"maxSurge": "50%", "maxUnavailable": "50%"}, "rR", [Create(), Delete("pod-0")]),
    ],
)
def test_a_rolling_update_keeps_its_limits(limits: dict[str, Any], pods: str, actions: list[Action]) -> None:
    """Never more than the surge above, never fewer ready than allowed. R, N: ready and old, ready and new."""
    revisions = {"R": "old", "N": "new"}
    given = [running(number, revisions[one.upper()], ready=one.isupper()) for number, one in enumerate(pods)]
    assert deployment({"replicas": 2, "strategy": {"rollingUpdate": limits}}, "new", given) == actions


# ---- StatefulSet -----------------------------------------------------------------------------------------------------


def test_a_stateful_set_gives_a_name_again_when_its_pod_is_gone() -> None:
    """One that hangs is not replaced; one that has failed is deleted first; another revision is, too."""
    spec = {"replicas": 1}
    one = running(0, index=0)
    assert stateful_set(spec, "new", []) == [Create(0)]
    assert stateful_set(spec, "new", [one]) == []
    assert stateful_set(spec, "new", [leaving(one)]) == []
    assert stateful_set(spec, "new", [ended(0, 0, 1)]) == [Delete("pod-0")]
    assert stateful_set(spec, "newer", [one]) == [Delete("pod-0")]
    assert stateful_set(spec, "newer", [leaving(one)]) == []
    # A broken revision is repaired: its pod is not ready, and need not be.
    assert stateful_set(spec, "newer", [replace(one, ready=False)]) == [Delete("pod-0")]


def test_a_stateful_set_goes_in_order() -> None:
    """The next pod is made when those before it are ready; the last one goes first."""
    assert stateful_set({"replicas": 2}, "new", [running(0, index=0, ready=False)]) == []
    assert stateful_set({"replicas": 2}, "new", [running(0, index=0)]) == [Create(1)]
    assert stateful_set({"replicas": 0}, "new", [running(0, index=0), running(1, index=1)]) == [Delete("pod-1")]


# ---- Job -------------------------------------------------------------------------------------------------------------


def looked(spec: dict[str, Any], pods: list[Pod], now: float = 0.0, status: JobStatus | None = None) -> Any:
    return job(spec, status or JobStatus(), pods, now)


def test_a_job_makes_its_indexes_and_completes_with_all_of_them() -> None:
    """Each index needs one pod that succeeds."""
    assert looked(JOB, [])[1] == [Create(0), Create(1)]
    status, actions = looked(JOB, [ended(0, 0, 0), running(1, index=1)])
    assert (status.succeeded, status.state, actions) == (frozenset({0}), "", [])
    assert looked(JOB, [ended(0, 0, 0), ended(1, 1, 0)])[0].state == "Complete"


@pytest.mark.parametrize(
    ("pod", "action"),
    [
        (ended(0, 0, 75), "Ignore"),
        (ended(0, 0, 76), "Ignore"),
        (ended(0, 0, 1), "FailJob"),
        (ended(0, 0, 2), "FailJob"),
        (ended(0, 0, 137), "Count"),
        (replace(ended(0, 0, 137), disrupted=True), "Ignore"),
        # The first rule that knows it decides.
        (replace(ended(0, 0, 1), disrupted=True), "Ignore"),
    ],
)
def test_the_pod_failure_policy_is_that_of_its_first_rule(pod: Pod, action: str) -> None:
    """Evicted: ignored, whatever its code is. Then by its code."""
    assert failure_action(RULES, "trainer", pod) == action
    other = {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [75]}}]}
    assert failure_action(other, "trainer", ended(0, 0, 0)) == "Count"


def test_a_job_that_fails_ends_its_pods_first() -> None:
    """FailJob deletes what runs; the Job has failed when all of it has ended."""
    pods = [ended(0, 0, 1), running(1, index=1)]
    status, actions = looked(JOB, pods)
    assert (status.state, actions) == ("", [Delete("pod-1")])
    status, _ = looked(JOB, [pods[0], ended(1, 1, 75)], status=status)
    assert status.state == "Failed"
    assert "pod-0" in status.ending


def test_a_job_gives_up_beyond_its_limit() -> None:
    """Counted failures alone reach `backoffLimit`."""
    pods = [ended(number, 0, 137) for number in range(3)]
    assert looked(JOB, pods)[0].ending == "BackoffLimitExceeded"
    assert looked(JOB, pods[:2])[0].ending == ""
    assert looked(JOB, [replace(pod, exit_code=75) for pod in pods])[0].failed == 0


def test_a_job_replaces_after_a_pause_that_doubles() -> None:
    """10 s, 20 s, ... up to 10 min. Ignored pods are counted there; a success ends it."""
    one = [ended(0, 0, 75, when=100.0), running(9, index=1)]
    assert looked(JOB, one, 109.9)[1] == []
    assert looked(JOB, one, 110.0)[1] == [Create(0)]
    two = [ended(1, 0, 75, when=90.0), *one]
    assert looked(JOB, two, 119.9)[1] == []
    assert looked(JOB, two, 120.0)[1] == [Create(0)]
    many = [ended(number, 0, 75, when=100.0) for number in range(20)]
    assert looked(JOB, [*many, one[1]], 699.0)[1] == []
    assert looked(JOB, [*many, one[1]], 700.0)[1] == [Create(0)]
    three = {**JOB, "completions": 3, "parallelism": 3}
    assert looked(three, [ended(0, 0, 75, 100.0), ended(1, 2, 0, 105.0), one[1]], 106.0)[1] == [Create(0)]


def test_indexes_with_limits_of_their_own_have_pauses_of_their_own() -> None:
    """With `backoffLimitPerIndex` a node that comes back often does not hold up another one."""
    pods = [ended(number, 0, 75, when=100.0) for number in range(5)] + [ended(5, 1, 75, when=100.0)]
    assert looked(JOB, pods, 110.0)[1] == []
    own = {**JOB, "backoffLimitPerIndex": 2}
    assert looked(own, pods, 110.0)[1] == [Create(1)]


def test_a_job_does_not_replace_what_hangs() -> None:
    """With `podReplacementPolicy: Failed` a pod of a lost node keeps its place until it has failed."""
    pods = [leaving(running(0, index=0)), running(1, index=1)]
    assert looked(JOB, pods)[1] == []
    assert looked({**JOB, "podReplacementPolicy": "TerminatingOrFailed"}, pods)[1] == [Create(0)]


def test_a_job_is_scaled() -> None:
    """More nodes are made; with fewer, those with the highest indexes go."""
    pods = [running(0, index=0), running(1, index=1)]
    assert looked({**JOB, "completions": 3, "parallelism": 3}, pods)[1] == [Create(2)]
    assert looked({**JOB, "completions": 1, "parallelism": 1}, pods)[1] == [Delete("pod-1")]
    # Also where it is the only one that there is just now.
    assert looked({**JOB, "completions": 1, "parallelism": 1}, pods[1:])[1] == [Delete("pod-1")]
    assert looked({**JOB, "parallelism": 1}, pods)[1] == [Delete("pod-1")]


# ---- probes ----------------------------------------------------------------------------------------------------------


def test_a_probe_needs_its_results_in_a_row() -> None:
    """Thresholds count from anew after each other result."""
    probe = {"failureThreshold": 2, "successThreshold": 1}
    state = probed(probe, Probed(), False, 0.0)
    assert state.holds is None
    state = probed(probe, probed(probe, state, True, 1.0), False, 2.0)
    assert state.holds is True
    assert probed(probe, state, False, 3.0).holds is False


def test_a_probe_is_made_once_in_a_period() -> None:
    """The first one after `initialDelaySeconds`."""
    probe = {"periodSeconds": 2, "initialDelaySeconds": 5}
    assert not due(probe, Probed(), 10.0, 14.9)
    assert due(probe, Probed(), 10.0, 15.0)
    assert not due(probe, Probed(at=15.0), 10.0, 16.9)
    assert due(probe, Probed(at=15.0), 10.0, 17.0)


def test_nobody_asks_before_the_start() -> None:
    """While the startup probe has not succeeded there are no others; without any, what runs is ready."""
    container = {"startupProbe": {"failureThreshold": 2}, "readinessProbe": {}}
    container["livenessProbe"] = {"failureThreshold": 1}
    health = Health()
    assert health.wanted(container) == ("startup",)
    doomed = health.with_result(container, "startup", False, 0.0).with_result(container, "startup", False, 1.0)
    assert doomed.is_doomed()
    health = health.with_result(container, "startup", True, 0.0)
    assert health.wanted(container) == ("readiness", "liveness")
    assert not health.is_ready(container)
    assert health.with_result(container, "readiness", True, 1.0).is_ready(container)
    assert health.with_result(container, "liveness", False, 1.0).is_doomed()
    assert Health().is_ready({})


# ---- a pod's specification -------------------------------------------------------------------------------------------


def test_variables_and_words_are_expanded() -> None:
    """A variable may name those before it; what nobody knows stays; `$$` is a `$`."""
    field = {"valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    container = {
        "command": ["run", "--name=$(POD)", "$$(POD)", "$(NOBODY)"],
        "args": ["$(TEXT)"],
        "env": [{"name": "POD", **field}, {"name": "TEXT", "value": "$(POD) is here"}],
        "ports": [{"name": "grpc", "containerPort": 29400}],
    }
    variables = environment(container, {"metadata.name": "ddp-0"}, {"PATH": "/bin"})
    assert variables == {"PATH": "/bin", "POD": "ddp-0", "TEXT": "ddp-0 is here"}
    assert command_line(container, variables) == ["run", "--name=ddp-0", "$(POD)", "$(NOBODY)", "ddp-0 is here"]
    assert (port_of(container, "grpc"), port_of(container, 80)) == (29400, 80)


def test_volumes_are_mounted_from_the_root_on() -> None:
    """A claim of a StatefulSet is found by the volume's name; none hides another; an unknown one is refused."""
    spec = {
        "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory"}}],
        "containers": [
            {
                "volumeMounts": [
                    {"name": "shm", "mountPath": "/dev/shm"},
                    {"name": "tmp", "mountPath": "/tmp"},
                    {"name": "state", "mountPath": "/state"},
                ]
            }
        ],
    }
    found = volumes(spec, {"state": "state-ddp-master-0"})
    assert [(one.kind, one.source, one.path) for one in found] == [
        ("scratch", "tmp", "/tmp"),
        ("claim", "state-ddp-master-0", "/state"),
        ("memory", "shm", "/dev/shm"),
    ]
    with pytest.raises(KeyError):
        volumes(spec, {})
