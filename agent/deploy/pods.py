"""The parts that the pods of a master and of a trainer share: secrets as files, rights, mounts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .command_lines import SecretFiles
from .job import JobSpec

__all__ = ("FILES", "Mounts", "container", "labels", "meta", "own_address", "pod_template")

Object = dict[str, Any]
# Where secrets are mounted, each in a directory of its own, so that a changed secret reaches a running pod.
SECRETS = "/run/dalsegno"
FILES = SecretFiles(
    token=f"{SECRETS}/token/token",
    tls_ca=f"{SECRETS}/tls/ca.crt",
    tls_cert=f"{SECRETS}/tls/tls.crt",
    tls_key=f"{SECRETS}/tls/tls.key",
    etcd_ca=f"{SECRETS}/etcd/ca.crt",
    etcd_cert=f"{SECRETS}/etcd/tls.crt",
    etcd_key=f"{SECRETS}/etcd/tls.key",
)


@dataclass
class Mounts:
    """Volumes of a pod, and where its container sees them."""

    volumes: list[Object] = field(default_factory=list)
    mounts: list[Object] = field(default_factory=list)

    def secret(self, name: str, secret: str, *keys: str) -> None:
        """Mounts these keys of a secret, readable by the pod's group alone."""
        items = [{"key": key, "path": key} for key in keys]
        # 0440 in JSON, which has no octal numbers.
        volume = {"name": name, "secret": {"secretName": secret, "defaultMode": 0o440, "items": items}}
        self.volumes.append(volume)
        self.mounts.append({"name": name, "mountPath": f"{SECRETS}/{name}", "readOnly": True})

    def claim(self, name: str, claim: str, path: str) -> None:
        """Mounts a volume claim."""
        self.volumes.append({"name": name, "persistentVolumeClaim": {"claimName": claim}})
        self.mounts.append({"name": name, "mountPath": path})

    def scratch(self, name: str, path: str, **kind: str) -> None:
        """Mounts an empty directory that goes with the pod."""
        self.volumes.append({"name": name, "emptyDir": kind})
        self.mounts.append({"name": name, "mountPath": path})


def labels(job: JobSpec, component: str) -> Object:
    """By which a component's pods are found."""
    return {
        "app.kubernetes.io/name": "dalsegno",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": component,
    }


def meta(job: JobSpec, name: str, component: str) -> Object:
    """An object's metadata."""
    place = {"namespace": job.namespace} if job.namespace else {}
    return {"name": name, **place, "labels": labels(job, component)}


def own_address() -> list[Object]:
    """Variables that an argument may name: `$(POD_NAME)`, `$(POD_IP)`."""
    return [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in (("POD_NAME", "metadata.name"), ("POD_IP", "status.podIP"))
    ]


def container(
    name: str, image: str, command: Sequence[str], resources: Mapping[str, Any], env: Sequence[Object], mounts: Mounts
) -> Object:
    """A container without rights, whose root file system cannot be written."""
    found: Object = {
        "name": name,
        "image": image,
        "command": list(command),
        # What programs write into a home directory goes the way of the pod. USER, because no image knows this user's
        # number, and getpass, which torch's compiler asks, would fail.
        "env": [*own_address(), {"name": "HOME", "value": "/tmp"}, {"name": "USER", "value": "dalsegno"}, *env],
    }
    if resources:
        found["resources"] = {key: dict(value) for key, value in resources.items()}
    found["volumeMounts"] = mounts.mounts
    found["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    return found


def pod_template(job: JobSpec, component: str, one: Object, mounts: Mounts, **more: Any) -> Object:
    """A pod with one container. It gets no credentials of the cluster: nothing here ever asks its API."""
    spec = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": job.user,
            "runAsGroup": job.user,
            "fsGroup": job.user,
            # A shared claim may hold terabytes: its owner is changed once, not at every start of a pod.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **more,
        "containers": [one],
        "volumes": mounts.volumes,
    }
    return {"metadata": {"labels": labels(job, component)}, "spec": spec}
