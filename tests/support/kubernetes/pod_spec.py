"""Reads a pod's specification: command line, environment, mounts. Pure."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..deploy import expanded

__all__ = ["COMPLETION_INDEX", "Volume", "command_line", "environment", "indexed", "port_of", "volumes"]

COMPLETION_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def indexed(template: Mapping[str, Any]) -> dict[str, Any]:
    """A template as an indexed Job makes pods of it: the container's variables have the index."""
    made: dict[str, Any] = copy.deepcopy(dict(template))
    (container,) = made["spec"]["containers"]
    field = {"fieldRef": {"fieldPath": COMPLETION_INDEX}}
    container["env"] = [*container.get("env", []), {"name": "JOB_COMPLETION_INDEX", "valueFrom": field}]
    return made


def environment(container: Mapping[str, Any], fields: Mapping[str, str], image: Mapping[str, str]) -> dict[str, str]:
    """A container's variables.

    Args:
        container: whose `env`.
        fields: what `fieldRef` may name, `metadata.name` for example.
        image: variables of the image.

    Raises:
        KeyError: It refers to what there is not here.
    """
    own: dict[str, str] = {}
    for entry in container.get("env", []):
        if "valueFrom" in entry:
            own[entry["name"]] = fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            # A variable may name those before it.
            own[entry["name"]] = expanded(str(entry.get("value", "")), own)
    return {**image, **own}


def command_line(container: Mapping[str, Any], variables: Mapping[str, str]) -> list[str]:
    """`command` and `args`, with `$(NAME)` replaced. What an image would run by itself is known to nobody here."""
    words = [*container.get("command", []), *container.get("args", [])]
    return [expanded(word, dict(variables)) for word in words]


def port_of(container: Mapping[str, Any], port: int | str) -> int:
    """A port by its number or its name. Raises KeyError."""
    return port if isinstance(port, int) else {one["name"]: one["containerPort"] for one in container["ports"]}[port]


@dataclass(frozen=True)
class Volume:
    """A volume of a pod at its place: `kind` is claim, secret, config, scratch or memory.

    `source` names the claim, secret or config map; of an empty directory it is the volume's name. `items`: key and
    path of each file, all if there are none.
    """

    kind: str
    source: str
    path: str
    read_only: bool
    items: tuple[tuple[str, str], ...] = ()
    mode: int = 0o644


def volumes(spec: Mapping[str, Any], claims: Mapping[str, str]) -> list[Volume]:
    """What the pod's container mounts, in the order of its paths, so that none hides another.

    Args:
        spec: of the pod.
        claims: by a volume's name the claim that its StatefulSet has made for it.

    Raises:
        KeyError: It mounts a volume that it does not have.
    """
    named = {one["name"]: one for one in spec.get("volumes", [])}
    named |= {name: {"persistentVolumeClaim": {"claimName": claim}} for name, claim in claims.items()}
    mounts = spec["containers"][0].get("volumeMounts", [])
    found = [_volume(named[one["name"]], one) for one in mounts]
    return sorted(found, key=lambda one: one.path.count("/"))


def _volume(volume: Mapping[str, Any], mount: Mapping[str, Any]) -> Volume:
    path, read_only = mount["mountPath"], bool(mount.get("readOnly"))
    match volume:
        case {"persistentVolumeClaim": {"claimName": name}}:
            return Volume("claim", name, path, read_only)
        case {"emptyDir": kind}:
            return Volume("memory" if (kind or {}).get("medium") == "Memory" else "scratch", mount["name"], path, False)
        case {"secret": secret}:
            return _files("secret", secret["secretName"], secret, path)
        case {"configMap": config}:
            return _files("config", config["name"], config, path)
    raise KeyError(f"no such kind of volume here: {volume}")


def _files(kind: str, name: str, source: Mapping[str, Any], path: str) -> Volume:
    items = tuple((item["key"], item["path"]) for item in source.get("items", []))
    return Volume(kind, name, path, True, items, source.get("defaultMode", 0o644))
