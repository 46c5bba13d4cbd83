"""A job's objects as a base of Kustomize, and another job's as an overlay: what differs from the base, and no more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dalsegno.protos.yaml_text import printed

from .pods import Object

__all__ = ("base", "overlay")

KUSTOMIZATION = "kustomization.yaml"


def base(objects: Sequence[Object]) -> dict[str, str]:
    """Names of files and their texts: one for each object, and the list of them."""
    files = {_file(one): printed([one]) for one in objects}
    return {KUSTOMIZATION: printed([_kustomization(list(files))]), **files}


def overlay(below: Sequence[Object], objects: Sequence[Object], path: str) -> dict[str, str]:
    """The files that make of the base's objects the given ones.

    Args:
        below: The base's objects.
        objects: Those that the overlay shall come to.
        path: From the overlay's directory to the base's.
    """
    old, new = ({_identity(one): one for one in each} for each in (below, objects))
    added = {_file(one): printed([one]) for key, one in new.items() if key not in old}
    patches, files = list[Object](), dict[str, str]()
    for key, one in old.items():
        name = f"patch-{_file(one)}"
        if key not in new:
            gone: Object = {
                "apiVersion": one["apiVersion"],
                "kind": one["kind"],
                "metadata": {"name": one["metadata"]["name"]},
            }
            files[name] = printed([{"$patch": "delete", **gone}])
            patches.append({"path": name})
        elif operations := list(_changes(one, new[key], "")):
            files[name] = printed([operations])
            patches.append({"path": name, "target": {"kind": one["kind"], "name": one["metadata"]["name"]}})
    return {KUSTOMIZATION: printed([_kustomization([path, *added], patches)]), **added, **files}


def _kustomization(resources: list[str], patches: Sequence[Object] = ()) -> Object:
    head = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources}
    return {**head, "patches": list(patches)} if patches else head


def _identity(one: Object) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]


def _file(one: Object) -> str:
    return f"{one['kind'].lower()}-{one['metadata']['name']}.yaml"


def _changes(old: Mapping[str, Any], new: Mapping[str, Any], path: str) -> Iterator[Object]:
    """Operations of a JSON patch (RFC 6902) from one mapping to the other; lists are replaced as a whole."""
    for key in [*old, *(key for key in new if key not in old)]:
        where = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
        if key not in new:
            yield {"op": "remove", "path": where}
        elif key not in old:
            yield {"op": "add", "path": where, "value": new[key]}
        elif isinstance(old[key], Mapping) and isinstance(new[key], Mapping):
            yield from _changes(old[key], new[key], where)
        elif old[key] != new[key]:
            yield {"op": "replace", "path": where, "value": new[key]}
