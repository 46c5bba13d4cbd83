"""Jobs for the tests of `agent/deploy`, and what a reader needs to look into what they become."""

from __future__ import annotations

from typing import Any

from dalsegno.agent.deploy.job import JobSpec, job_of

GPT: dict[str, Any] = {
    "name": "gpt",
    "image": "registry.example/gpt:1",
    "command": ["train.py", "--steps=1000", "--save-dir=${save_dir}", "a $(POD_IP) b", "100%", "it's"],
    "nnodes": "1:4",
    "claim": "checkpoints",
    "secrets": {"token": "gpt-token"},
    "host": {"master": "head:29400", "directory": "/shared/gpt"},
}
ETCD = {"etcd": ["etcd-0:2379", "etcd-1:2379"], "secrets": {"token": "gpt-token", "etcd": "etcd-client"}}
TLS = {"secrets": {"token": "gpt-token", "tls": "gpt-tls"}}
FULL = {
    **{"namespace": "training", "nproc": "gpu", "controller": "Deployment", "replicas": 2, "shm": "8Gi", "user": 4711},
    **{"flags": ["--universal-checkpoint"], "env": {"OMP_NUM_THREADS": 4}, "mounts": {"data": "/data"}},
    **{"claim": {"name": "checkpoints", "size": "200Gi", "storage_class": "nfs"}, "drain_timeout": 60, "grace": 90},
    **{"resources": {"limits": {"nvidia.com/gpu": 1}, "requests": {"cpu": "500m"}}},
    **{"node_selector": {"pool": "gpu"}, "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]},
    **{"master": {"image": "registry.example/master:1", "size": "2Gi", "storage_class": "fast", "port": 30000}},
}
AUTOSCALED = {"controller": "Deployment", "autoscale": {"cpu": 70}, "resources": {"cpu": 2}}
BY_METRIC = {"controller": "Deployment", "nnodes": "2:4", "autoscale": {"metric": "free_nodes", "target": 1}}


def job(**changes: Any) -> JobSpec:
    """A job that can be rendered for all, with these keys in the place of its own; None takes one away."""
    return job_of({key: value for key, value in {**GPT, **changes}.items() if value is not None})


def of_kind(objects: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    """The one object of that kind (and name)."""
    (found,) = [one for one in objects if one["kind"] == kind and (not name or one["metadata"]["name"] == name)]
    return found


def pods(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The pod's spec of each component."""
    found = {}
    for one in objects:
        if template := one["spec"].get("template"):
            found[template["metadata"]["labels"]["app.kubernetes.io/component"]] = template["spec"]
    return found


def expanded(text: str, variables: dict[str, str]) -> str:
    """A word of a command as the kubelet hands it to the program: `$(NAME)` is replaced, `$$` is a `$`."""
    out, at = "", 0
    while at < len(text):
        if text.startswith("$$", at):
            out, at = out + "$", at + 2
        elif text.startswith("$(", at) and (end := text.find(")", at)) > 0:
            name = text[at + 2 : end]
            out, at = out + variables.get(name, f"$({name})"), end + 1
        else:
            out, at = out + text[at], at + 1
    return out
