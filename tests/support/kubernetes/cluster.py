"""The cluster: objects are applied to it, its controllers look at them, its kubelets run their pods."""

from __future__ import annotations

import copy
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from ..hosts.hosts import NETWORK, Host, SwitchProcess
from .autoscaler import Past, autoscaler
from .controllers import deployment, stateful_set
from .job_controller import JobStatus, job
from .kubelet import Kubelet, Storage
from .pod_spec import indexed, port_of
from .sandbox import Image
from .services import ServicePort
from .states import Action, Create, Phase, Pod

__all__ = ["Kubernetes", "Workload"]

T = TypeVar("T")
# Seconds. Generous: other tests share the cores.
PATIENCE = 120.0
LOOK_EVERY = 0.05
# Seconds until a silent node counts as lost, and until its pods are deleted.
NODE_GRACE, TOLERATION = 40.0, 300.0
WORKLOADS = ("Deployment", "StatefulSet", "Job")
# What there is nobody for, but what is allowed to be there.
UNKEPT = ("NetworkPolicy", "PodDisruptionBudget")


@dataclass
class Workload:
    """A Deployment, a StatefulSet or a Job, and its pods."""

    kind: str
    name: str
    spec: dict[str, Any]
    pods: list[Kubelet] = field(default_factory=list)
    status: JobStatus = field(default_factory=JobStatus)

    @property
    def revision(self) -> str:
        """Of its template."""
        text = json.dumps(self.spec["template"], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def decide(self, now: float, pace: float) -> Sequence[Action]:
        """What its controller wants."""
        pods = [one.pod for one in self.pods]
        match self.kind:
            case "Deployment":
                return deployment(self.spec, self.revision, pods)
            case "StatefulSet":
                return stateful_set(self.spec, self.revision, pods)
        self.status, actions = job(self.spec, self.status, pods, now, pace)
        return actions


class Kubernetes:
    """A cluster. Use as a context manager; nothing moves but in `wait_for`.

    Args:
        directory: for all that it has; made.
        images: by the names of images.
        nodes: how many machines it has; pods take turns on them.
        pace: times Kubernetes' pauses.
        claims: volume claims that are there already.
    """

    def __init__(
        self,
        directory: Path,
        images: Mapping[str, Image],
        *,
        nodes: int = 3,
        pace: float = 0.02,
        claims: Sequence[str] = (),
    ) -> None:
        directory.mkdir(parents=True)
        self.directory, self._images, self._pace = directory, images, pace
        self.storage = Storage(directory)
        self.workloads: dict[tuple[str, str], Workload] = {}
        self._services: dict[str, tuple[dict[str, Any], str, dict[str, ServicePort]]] = {}
        # Autoscalers by the names of their Deployments, with what each remembers; external metrics.
        self._autoscalers: dict[str, tuple[Mapping[str, Any], Past]] = {}
        self.metrics: dict[str, float] = {}
        self._lost: dict[str, float] = {}
        self._nodes = [f"node-{number}" for number in range(nodes)]
        self._all: list[Kubelet] = []
        self._names: dict[str, str] = {}
        self._switch = SwitchProcess()
        try:
            self.outside = Host("outside", directory / "outside", f"{NETWORK}.2", self._switch, "eth0", ())
        except BaseException:
            self._switch.close()
            raise
        for name in claims:
            self._claim(name)

    def __enter__(self) -> Kubernetes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            print(self.diagnosis())
        self.close()

    # ---- what kubectl does -----------------------------------------------------------------------------------------

    def apply(self, objects: Sequence[Mapping[str, Any]]) -> None:
        """`kubectl apply`. Raises AssertionError for a kind that there is nobody for."""
        for one in objects:
            kind, name = one["kind"], one["metadata"]["name"]
            if kind in WORKLOADS:
                self._workload(kind, name, one["spec"])
            elif kind == "Service":
                self._service(name, one["spec"])
            elif kind == "PersistentVolumeClaim":
                self._claim(name)
            elif kind == "HorizontalPodAutoscaler":
                self._autoscalers[one["spec"]["scaleTargetRef"]["name"]] = one["spec"], Past()
            elif kind == "ConfigMap":
                self.storage.keep("config", name, {key: text.encode() for key, text in one["data"].items()})
            else:
                assert kind in UNKEPT, f"no {kind} here"

    def secret(self, name: str, files: Mapping[str, bytes]) -> None:
        """`kubectl create secret generic NAME --from-file`."""
        self.storage.keep("secret", name, files)

    def resolve(self, name: str, address: str) -> None:
        """A name that pods made from now on know, of something outside."""
        self._names[name] = address

    def address_of(self, service: str) -> str:
        """Where a service is."""
        return self._services[service][1]

    def scale(self, kind: str, name: str, replicas: int) -> None:
        """`kubectl scale`; of a Job, the patch that changes its number of nodes."""
        one = self.workloads[kind, name]
        keys = ("parallelism", "completions") if kind == "Job" else ("replicas",)
        one.spec |= dict.fromkeys(keys, replicas)

    def restart(self, kind: str, name: str) -> None:
        """`kubectl rollout restart`: another template, by an annotation."""
        template = copy.deepcopy(self.workloads[kind, name].spec["template"])
        marks = template["metadata"].setdefault("annotations", {})
        marks["kubectl.kubernetes.io/restartedAt"] = secrets.token_hex(4)
        self.workloads[kind, name].spec["template"] = template

    def delete_pod(self, pod: Kubelet, grace: float | None = None) -> None:
        """`kubectl delete pod`, with `--grace-period` perhaps."""
        pod.delete(time.monotonic(), grace)

    def evict(self, pod: Kubelet) -> None:
        """What `kubectl drain` and a spot instance's end do: a deletion with the condition `DisruptionTarget`."""
        pod.pod = replace(pod.pod, disrupted=True)
        pod.delete(time.monotonic())

    def delete(self, kind: str, name: str) -> None:
        """`kubectl delete`: its pods go with it. Returns when they are gone."""
        if kind == "HorizontalPodAutoscaler":
            # It has the name of its Deployment, whose number stays as it is.
            del self._autoscalers[name]
            return
        one = self.workloads[kind, name]
        one.spec |= {"replicas": 0, "parallelism": 0}
        self.wait_for(lambda: not [pod for pod in one.pods if not pod.pod.phase.is_terminal], f"the end of {name}")
        del self.workloads[kind, name]

    # ---- what happens to machines ----------------------------------------------------------------------------------

    def lose_node(self, name: str) -> None:
        """A machine is gone, without a word. After a while its pods are deleted, which nobody can confirm."""
        self._lost[name] = time.monotonic()
        for pod in self._pods():
            if pod.node == name:
                pod.lose()

    def forget_node(self, name: str) -> None:
        """`kubectl delete node`, or a cloud's controller that misses the machine: its pods have failed, and go."""
        now = time.monotonic()
        for pod in self._pods():
            if pod.node == name and not pod.pod.phase.is_terminal:
                pod.pod = replace(pod.pod, phase=Phase.FAILED, deleting=True, disrupted=True, ready=False, ended=now)

    # ---- looking ---------------------------------------------------------------------------------------------------

    def pods(self, kind: str, name: str) -> list[Kubelet]:
        """Of a workload, those that are neither ended nor on their way out."""
        return [pod for pod in self.workloads[kind, name].pods if pod.pod.is_active]

    def wait_for(self, condition: Callable[[], T | None], what: str, seconds: float = PATIENCE) -> T:
        """Lets the cluster move until this holds; returns what it returned.

        Raises:
            AssertionError: It does not hold in time.
        """
        deadline = time.monotonic() + seconds
        while True:
            self._tick(time.monotonic())
            found = condition()
            if found:
                return found
            if time.monotonic() > deadline:
                raise AssertionError(f"no {what} within {seconds:.0f} s\n{self.diagnosis()}")
            time.sleep(LOOK_EVERY)  # why: processes, probes and files are looked at, and none of them tells

    def wait_ready(self, kind: str, name: str, count: int, seconds: float = PATIENCE) -> list[Kubelet]:
        """So many pods of a workload are ready, and there are no others of it."""

        def look() -> list[Kubelet] | None:
            one = self.workloads[kind, name]
            ready = [pod for pod in one.pods if pod.pod.ready and pod.pod.revision == one.revision]
            return ready if len(ready) == count == len(one.pods) else None

        return self.wait_for(look, f"{count} ready pods of {kind} {name}", seconds)

    def diagnosis(self, lines: int = 25) -> str:
        """What there is, and what it said last."""
        parts = []
        for one in self.workloads.values():
            parts.append(f"---- {one.kind} {one.name} {one.status if one.kind == 'Job' else ''}")
            for pod in one.pods:
                parts.append(f"-- {pod.node} restarts {pod.restarts} codes {pod.codes} {pod.pod}")
        for log in sorted(self.directory.glob("pods/*/*.log"), key=lambda path: path.stat().st_mtime):
            parts.append(f"---- {log.relative_to(self.directory)}")
            parts += log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
        return "\n".join(parts)

    def close(self) -> None:
        """Ends everything."""
        for _, _, ports in self._services.values():
            for port in ports.values():
                port.close()
        for pod in self._all:
            pod.cut()
        for pod in self._all:
            pod.close()
        self.outside.close()
        self._switch.close()

    # ---- what goes on ----------------------------------------------------------------------------------------------

    def _pods(self) -> list[Kubelet]:
        return [pod for one in self.workloads.values() for pod in one.pods]

    def _tick(self, now: float) -> None:
        for pod in self._pods():
            pod.tick(now)
        for name, since in self._lost.items():
            self._give_up(name, now - since)
        for name, (rules, past) in self._autoscalers.items():
            self._autoscalers[name] = rules, self._autoscale(name, rules, past, now)
        for one in self.workloads.values():
            for pod in [pod for pod in one.pods if pod.is_gone]:
                if one.kind != "Job" or pod.pod.name in one.status.counted:
                    one.pods.remove(pod)
            for action in one.decide(now, self._pace):
                if isinstance(action, Create):
                    one.pods.append(self._create(one, action.index))
                else:
                    (pod,) = [pod for pod in one.pods if pod.pod.name == action.name]
                    pod.delete(now)
        for spec, _, ports in self._services.values():
            self._lead(spec, ports)

    def _autoscale(self, name: str, rules: Mapping[str, Any], past: Past, now: float) -> Past:
        """Sets a Deployment's number by its metric; returns what its autoscaler remembers."""
        one, metric = self.workloads["Deployment", name], rules["metrics"][0]["external"]["metric"]["name"]
        # One that says no number has one pod.
        replicas = one.spec.setdefault("replicas", 1)
        if metric not in self.metrics:
            return past
        one.spec["replicas"], past = autoscaler(rules, replicas, self.metrics[metric], past, now, self._pace)
        return past

    def _give_up(self, node: str, silent: float) -> None:
        for pod in self._pods():
            if pod.node != node or pod.pod.phase.is_terminal:
                continue
            if silent >= NODE_GRACE * self._pace:
                pod.pod = replace(pod.pod, ready=False)
            if silent >= (NODE_GRACE + TOLERATION) * self._pace:
                pod.pod = replace(pod.pod, deleting=True, disrupted=True)

    def _create(self, one: Workload, index: int) -> Kubelet:
        number, suffix = len(self._all), secrets.token_hex(3)[:5]
        # The host name of a Job's pod has no suffix; a StatefulSet's pod has none at all.
        host_name = one.name if index < 0 else f"{one.name}-{index}"
        name = host_name if one.kind == "StatefulSet" else f"{host_name}-{suffix}"
        if one.kind == "Deployment":
            name = host_name = f"{one.name}-{one.revision}-{suffix}"
        spec = one.spec["template"]["spec"]
        up = [node for node in self._nodes if node not in self._lost]
        (container,) = spec["containers"]
        place = self.directory / "pods" / f"{number}-{name}"
        address = f"{NETWORK}.{20 + number}"
        names = [f"{there} {name}" for name, there in self._names.items()]
        host = Host(host_name, place, address, self._switch, "eth0", [f"{address} {host_name}", *names])
        claims = {}
        for template in one.spec.get("volumeClaimTemplates", []):
            claims[template["metadata"]["name"]] = f"{template['metadata']['name']}-{name}"
            self._claim(f"{template['metadata']['name']}-{name}")
        pod = Pod(name, number, one.revision, index)
        image = self._images[container["image"]]
        node = up[number % len(up)]
        template = indexed(one.spec["template"]) if one.kind == "Job" else one.spec["template"]
        made = Kubelet(pod, template, node, place, host, image, self.storage, claims, self._pace)
        self._all.append(made)
        return made

    # ---- objects ---------------------------------------------------------------------------------------------------

    def _workload(self, kind: str, name: str, spec: Mapping[str, Any]) -> None:
        fresh = json.loads(json.dumps(spec))
        if (kind, name) in self.workloads:
            old = self.workloads[kind, name].spec
            assert kind != "Job" or old["template"] == fresh["template"], "the template of a Job cannot be changed"
            self.workloads[kind, name].spec = fresh
        else:
            self.workloads[kind, name] = Workload(kind, name, fresh)

    def _claim(self, name: str) -> None:
        self.storage.claim(name).mkdir(parents=True, exist_ok=True)

    def _service(self, name: str, spec: dict[str, Any]) -> None:
        address = f"{NETWORK}.{3 + len(self._services)}"
        self.outside.run("ip", "addr", "add", f"{address}/24", "dev", self.outside.interface)
        self._names[name] = address
        ports = {one["name"]: ServicePort(self.outside, (address, one["port"])) for one in spec["ports"]}
        self._services[name] = (dict(spec), address, ports)

    def _lead(self, spec: Mapping[str, Any], ports: Mapping[str, ServicePort]) -> None:
        wanted = spec["selector"].items()
        behind = [pod for pod in self._pods() if pod.pod.ready and wanted <= pod.labels.items()]
        for one in spec["ports"]:
            targets = [(pod.host.address, port_of(pod.container, one.get("targetPort", one["port"]))) for pod in behind]
            ports[one["name"]].lead_to(targets)
