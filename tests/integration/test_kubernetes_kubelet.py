"""The tests' miniature of Kubernetes treats processes as a kubelet does: rights, notices, probes, restarts."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.kubernetes.cluster import Kubernetes
from tests.support.kubernetes.kubelet import Kubelet
from tests.support.kubernetes.run import image
from tests.support.kubernetes.sandbox import missing

MISSING = missing()
pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(bool(MISSING), reason=MISSING)]

# Times Kubernetes' pauses.
PACE = 0.02
SECURITY = {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000}
CONTAINER = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
# Serves a line with its name on a port; with the file /tmp/deaf it stays silent, and ends with 3 on a notice.
SERVER = """
import os, signal, socket, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
server = socket.create_server(("0.0.0.0", 8000))
while True:
    one, _ = server.accept()
    if not os.path.exists("/tmp/deaf"):
        one.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n" + os.environ["POD"].encode())
    one.close()
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Kubernetes]:
    """A cluster with one image."""
    with Kubernetes(tmp_path / "cluster", {"one": image(tmp_path / "image")}, pace=PACE) as made:
        made.secret("token", {"token": b"secret", "other": b"unseen"})
        made.apply([{"kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"one": "plain"}}])
        yield made


def workload(kind: str, command: list[str], *, container: Any = None, pod: Any = None, **spec: Any) -> dict[str, Any]:
    """A workload `one` of pods that run this."""
    name = {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    one = {
        **{"name": "main", "image": "one", "command": command, "env": [name], "securityContext": CONTAINER},
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "token", "mountPath": "/run/token"},
            {"name": "settings", "mountPath": "/run/settings"},
        ],
        "ports": [{"name": "http", "containerPort": 8000}],
        **(container or {}),
    }
    items = [{"key": "token", "path": "token"}]
    tmp = {"name": "tmp", "emptyDir": {}}
    config = {"name": "settings", "configMap": {"name": "settings"}}
    secret = {"name": "token", "secret": {"secretName": "token", "defaultMode": 0o440, "items": items}}
    template = {
        "metadata": {"labels": {"app": "one"}},
        "spec": {"securityContext": SECURITY, "containers": [one], "volumes": [tmp, secret, config], **(pod or {})},
    }
    return {"kind": kind, "metadata": {"name": "one"}, "spec": {"replicas": 1, "template": template, **spec}}


def only(cluster: Kubernetes, kind: str = "Deployment") -> Kubelet:
    """The one pod, once its container was started."""

    def look() -> Kubelet | None:
        pods = cluster.pods(kind, "one")
        return pods[0] if len(pods) == 1 and pods[0].started else None

    return cluster.wait_for(look, "the pod", 30)


def others(cluster: Kubernetes, kind: str, name: str, old: Kubelet) -> list[Kubelet]:
    """The workload's pods but this one, once there are some and they run."""
    return cluster.wait_for(
        lambda: [pod for pod in cluster.pods(kind, name) if pod is not old and pod.started], "other pods", 60
    )


def asked(cluster: Kubernetes, address: tuple[str, int]) -> str:
    """What is answered there; "" for nothing, "refused" where nobody listens."""
    try:
        with cluster.outside.connect(address, 2.0) as connection:
            reply = b""
            while data := connection.recv(1000):
                reply += data
            return reply.partition(b"\r\n\r\n")[2].decode()
    except (ConnectionError, TimeoutError):
        return "refused"


def test_a_container_has_the_rights_of_its_pod(cluster: Kubernetes) -> None:
    """User, groups, capabilities, a root that cannot be written, process 1, its own name, its part of the secret."""
    script = (
        "id -u; id -G; grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status; touch /x; touch /usr/x;"
        "touch /tmp/x && echo w; echo $$$$; hostname; ls /run/token; cat /run/token/token;"
        "stat -Lc ' %a' /run/token/token; cat /run/settings/*; echo :$JOB_COMPLETION_INDEX; getent hosts $(hostname)"
    )
    never = {"restartPolicy": "Never"}
    cluster.apply([workload("Job", ["sh", "-c", script], completions=1, parallelism=1, pod=never)])
    pod = cluster.wait_for(lambda: next(iter(cluster.workloads["Job", "one"].pods), None), "the pod")
    assert cluster.wait_for(lambda: cluster.workloads["Job", "one"].status.state, "the end", 30) == "Complete"
    said = [line for line in pod.log.splitlines() if "Read-only" not in line]
    assert len(pod.log.splitlines()) - len(said) == 2
    rights = ["CapBnd:\t0000000000000000", "CapEff:\t0000000000000000", "NoNewPrivs:\t1"]
    assert said[:2] == ["1000", "1000"]
    assert sorted(said[2:5]) == rights
    assert said[5:-1] == ["w", "1", "one-0", "token", "secret 440", "plain:0"]
    assert said[-1].split() == [pod.host.address, "one-0"]


def test_a_notice_and_its_end(cluster: Kubernetes) -> None:
    """First preStop, then SIGTERM, which process 1 ignores without a handler; after the grace SIGKILL."""
    hook = {"lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", "echo hook > /tmp/hook"]}}}}
    cluster.apply([workload("StatefulSet", ["sleep", "100"], container=hook, pod={"terminationGracePeriodSeconds": 1})])
    pod = only(cluster, "StatefulSet")
    cluster.delete_pod(pod)
    later = others(cluster, "StatefulSet", "one", pod)
    assert pod.codes == [128 + signal.SIGKILL]
    assert list(cluster.directory.glob("pods/0-one-0/scratch-tmp/hook"))
    assert later[0].pod.name == pod.pod.name
    assert later[0].host.address != pod.host.address


@pytest.mark.full
def test_probes_end_a_deaf_server(cluster: Kubernetes) -> None:
    """It is not ready before it answers; when it is deaf, nobody is led to it, and it is started again in its pod."""
    probe = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 0.2, "failureThreshold": 2}
    probes = {
        "startupProbe": {**probe, "failureThreshold": 100},
        "readinessProbe": {**probe, "failureThreshold": 1},
        "livenessProbe": {**probe, "failureThreshold": 8},
    }
    service = {
        "selector": {"app": "one"},
        "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
    }
    cluster.apply([{"kind": "Service", "metadata": {"name": "front"}, "spec": service}])
    address = (cluster.address_of("front"), 80)
    assert asked(cluster, address) == "refused"
    cluster.apply([workload("Deployment", [sys.executable, "-c", SERVER], container=probes)])
    (pod,) = cluster.wait_ready("Deployment", "one", 1, 30)
    assert asked(cluster, address) == pod.pod.name
    deaf = next(cluster.directory.glob("pods/*/scratch-tmp")) / "deaf"
    deaf.touch()
    cluster.wait_for(lambda: not pod.pod.ready, "it is not ready", 30)
    assert not pod.codes
    assert asked(cluster, address) == "refused"
    cluster.wait_for(lambda: pod.codes, "its end", 30)
    deaf.unlink()
    cluster.wait_ready("Deployment", "one", 1, 30)
    assert (pod.codes, pod.restarts) == ([3], 1)
    assert asked(cluster, address) == pod.pod.name


@pytest.mark.full
def test_a_rolling_update_is_not_noticed(cluster: Kubernetes) -> None:
    """There is one more pod for a moment, and always one that answers."""
    probe = {"readinessProbe": {"tcpSocket": {"port": 8000}, "periodSeconds": 0.2}}
    service = {"selector": {"app": "one"}, "ports": [{"name": "http", "port": 80, "targetPort": 8000}]}
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    front = {"kind": "Service", "metadata": {"name": "front"}, "spec": service}
    cluster.apply([front, workload("Deployment", [sys.executable, "-c", SERVER], container=probe, strategy=rolling)])
    (old,) = cluster.wait_ready("Deployment", "one", 1, 30)
    address = (cluster.address_of("front"), 80)
    cluster.restart("Deployment", "one")
    answers = set()

    def is_over() -> bool:
        answers.add(asked(cluster, address))
        return len(answers) == 2 and len(cluster.workloads["Deployment", "one"].pods) == 1

    cluster.wait_for(is_over, "the update", 60)
    (new,) = cluster.wait_ready("Deployment", "one", 1, 30)
    assert answers == {old.pod.name, new.pod.name}


@pytest.mark.full
def test_a_lost_node_holds_its_pods(cluster: Kubernetes) -> None:
    """Its pods hang: a Deployment has others made, a StatefulSet waits until somebody says that the node is gone."""
    cluster.apply([workload("StatefulSet", ["sleep", "100"])])
    first = only(cluster, "StatefulSet")
    other = workload("Deployment", ["sleep", "100"])
    other["metadata"]["name"] = "other"
    cluster.apply([other])
    (second,) = cluster.wait_ready("Deployment", "other", 1, 30)
    for pod in (first, second):
        cluster.lose_node(pod.node)
    (third,) = others(cluster, "Deployment", "other", second)
    assert third.node not in (first.node, second.node)
    for _ in range(5):
        cluster.wait_for(lambda: True, "a look")
    assert cluster.workloads["StatefulSet", "one"].pods == [first]
    assert first.pod.deleting
    cluster.forget_node(first.node)
    (again,) = others(cluster, "StatefulSet", "one", first)
    assert again.pod.name == first.pod.name


@pytest.mark.full
def test_a_container_that_ends_is_started_again_later_each_time(cluster: Kubernetes) -> None:
    """The first time at once, then after pauses that double, in the same pod with the same files."""
    cluster.apply([workload("Deployment", ["sh", "-c", "echo line >> /tmp/lines; exit 7"])])
    pod = only(cluster)
    cluster.wait_for(lambda: len(pod.codes) >= 4, "four ends", 60)
    assert set(pod.codes) == {7}
    pauses = [later - earlier for earlier, later in zip(pod.started, pod.started[1:], strict=False)]
    assert pauses[1] >= PACE * 10
    assert pauses[2] >= PACE * 20
    (lines,) = cluster.directory.glob("pods/*/scratch-tmp/lines")
    assert len(lines.read_text().splitlines()) == len(pod.started)
