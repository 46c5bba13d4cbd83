"""DLRover's ElasticJob becomes a job of ours, or one line says why not."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dalsegno.agent.commands import arguments
from dalsegno.agent.deploy.elasticjob import is_elastic_job, translated
from dalsegno.agent.deploy.job import job_of
from dalsegno.agent.deploy.refusals import refusals
from dalsegno.protos.yaml_text import InputRefused

RUN = "dlrover-run --network-check --nnodes=$WORKER_NUM --nproc_per_node=2 --max_restarts=3 train.py --epochs 2"


def elastic_job(command: Any = None, **changes: Any) -> dict[str, Any]:
    """A document in the shape of DLRover's examples; `changes` of the worker's container."""
    main = {
        "name": "main",
        "image": "registry.example/app:1",
        "imagePullPolicy": "Always",
        "command": ["/bin/bash", "-c", RUN] if command is None else command,
        "resources": {"limits": {"cpu": "8", "memory": "16Gi"}, "requests": {"cpu": "4", "memory": "16Gi"}},
        **changes,
    }
    pod = {"restartPolicy": "Always", "containers": [main]}
    return {
        "apiVersion": "elastic.iml.github.io/v1alpha1",
        "kind": "ElasticJob",
        "metadata": {"name": "torch-app", "namespace": "dlrover"},
        "spec": {
            "distributionStrategy": "AllreduceStrategy",
            "optimizeMode": "single-job",
            "replicaSpecs": {"worker": {"replicas": 4, "template": {"spec": pod}}},
        },
    }


def test_a_job_is_translated() -> None:
    """All that its pods were given arrives; only a claim and a token are missing, which it never had."""
    document = elastic_job(env=[{"name": "A", "value": "1"}], volumeMounts=[{"name": "nas", "mountPath": "/nas"}])
    pod = document["spec"]["replicaSpecs"]["worker"]["template"]["spec"]
    pod["volumes"] = [{"name": "nas", "persistentVolumeClaim": {"claimName": "pvc-nas"}}]
    assert is_elastic_job(document)
    values, notes = translated(document)
    job = job_of(values)
    assert (job.name, job.namespace, job.image) == ("torch-app", "dlrover", "registry.example/app:1")
    assert (job.nnodes, job.replicas, job.mounts) == ((4, 4), 4, {"pvc-nas": "/nas"})
    assert job.env == {"WORKER_NUM": "4", "NODE_NUM": "4", "A": "1"}
    assert job.resources["requests"]["cpu"] == "4"
    assert [line.partition(":")[0] for line in refusals(job, "k8s")] == ["secrets.token", "claim"]
    assert any("--set nnodes=1:4" in note for note in notes)
    whole = job_of({**values, "claim": "checkpoints", "secrets": {"token": "token"}})
    assert refusals(whole, "k8s") == []


@pytest.mark.parametrize(
    ("command", "shell", "nodes"),
    [
        (["/bin/bash", "-c", RUN], "exec " + RUN.replace("dlrover-run", "dalsegno-run"), (4, 4)),
        (
            ["bash", "-c", "(bash slow.sh &) && dlrover-run --nnodes=3:$WORKER_NUM train.py $((WORKER_NUM * 1))"],
            "(bash slow.sh &) && exec dalsegno-run --nnodes=3:$WORKER_NUM train.py $((WORKER_NUM * 1))",
            (3, 4),
        ),
        (
            ["sh", "-c", "exec dlrover-run --nnodes ${NODE_NUM} a.py"],
            "exec dalsegno-run --nnodes ${NODE_NUM} a.py",
            (4, 4),
        ),
        (["dlrover-run", "--nnodes=2:4", "a.py", "it's"], "exec dalsegno-run --nnodes=2:4 a.py 'it'\"'\"'s'", (2, 4)),
        (
            ["/bin/bash", "-c", "dlrover-run a.py --log ./dlrover-run.log"],
            "exec dalsegno-run a.py --log ./dlrover-run.log",
            (4, 4),
        ),
    ],
)
def test_the_shell_becomes_the_agent(command: list[str], shell: str, nodes: tuple[int, int]) -> None:
    """A shell that stays would keep the notice to itself; and the program is ours, not DLRover's of the same name."""
    job = job_of(translated(elastic_job(command))[0])
    assert (job.shell, job.nnodes) == (shell, nodes)


def test_its_flags_are_understood() -> None:
    """Those of DLRover's examples are flags of dlrover-run here."""
    words = RUN.replace("$WORKER_NUM", "4").split()[1:]
    assert arguments.parse(words, {}).nnodes == "4:4"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"command": ["python", "train.py"]}, "command: it starts no dlrover-run"),
    ({"command": ["/opt/dlrover-run", "a.py"]}, "command: it starts no dlrover-run"),
    ({"command": ["bash", "-c", "dlrover-run a.py && echo done"]}, "command: '&&' stands behind dlrover-run"),
    ({"command": ["bash", "-c", "dlrover-run a.py | tee log"]}, "command: '|' stands behind dlrover-run"),
    ({"command": ["bash", "-c", "dlrover-run a.py 'x"]}, "cannot be cut into words"),
    ({"command": ["bash", "-c", "dlrover-run --nnodes=$N a.py"]}, "command: --nnodes=$N is not N or MIN:MAX"),
    ({"env": [{"name": "A", "valueFrom": {"secretKeyRef": {}}}]}, "containers[0].env: A has a valueFrom"),
    ({"volumeMounts": [{"name": "x", "mountPath": "/x"}]}, "volumes: x is nothing: only volume claims are read"),
    ({"volumeMounts": {"name": "x"}}, "containers[0].volumeMounts: {'name': 'x'} is no list"),
    ({"env": {"A": "b"}}, "containers[0].env: {'A': 'b'} is no list"),
    ({"env": ["A=b"]}, "containers[0].env: 'A=b' is no mapping"),
    ({"command": "dlrover-run a.py"}, "containers[0].command: 'dlrover-run a.py' is no list"),
]


@pytest.mark.parametrize(("changes", "line"), WRONG)
def test_what_cannot_be_taken_over_is_refused(changes: dict[str, Any], line: str) -> None:
    """Rather than left out: such a job would do something else here."""
    with pytest.raises(InputRefused) as said:
        translated(elastic_job(**changes))
    (found,) = said.value.lines
    assert line in found


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("containers", ["x"], "template.spec.containers: 'x' is no mapping"),
        ("containers", {"name": "main"}, "template.spec.containers: {'name': 'main'} is no list"),
        ("volumes", "x", "template.spec.volumes: 'x' is no list"),
        ("tolerations", "foo", "tolerations: 'foo' is no list"),
        ("tolerations", [3], "tolerations: 3 is no mapping"),
    ],
)
def test_what_is_of_another_kind_is_refused(key: str, value: Any, line: str) -> None:
    """By its place; nothing ends in Python's own words."""
    document = elastic_job()
    document["spec"]["replicaSpecs"]["worker"]["template"]["spec"][key] = value
    with pytest.raises(InputRefused) as said:
        job_of({**translated(document)[0], "claim": "c"})
    (found,) = said.value.lines
    assert line in found


def test_parameter_servers_are_refused() -> None:
    """Other strategies and roles are another training."""
    for key, line in (("ps", "replicaSpecs.ps: only workers train here"), ("evaluator", "replicaSpecs.evaluator")):
        document = elastic_job()
        document["spec"]["replicaSpecs"][key] = copy.deepcopy(document["spec"]["replicaSpecs"]["worker"])
        with pytest.raises(InputRefused, match=line):
            translated(document)
    document = elastic_job()
    document["spec"]["distributionStrategy"] = "ParameterServerStrategy"
    with pytest.raises(InputRefused, match="ParameterServerStrategy is not there: only AllreduceStrategy is"):
        translated(document)


@pytest.mark.parametrize("at", [("spec",), ("spec", "replicaSpecs"), ("spec", "replicaSpecs", "worker")])
def test_what_is_no_elastic_job_is_refused(at: tuple[str, ...]) -> None:
    """A mapping that is missing is named."""
    document: Any = elastic_job()
    below = document
    for key in at[:-1]:
        below = below[key]
    below[at[-1]] = None
    with pytest.raises(InputRefused, match=f"{at[-1]}: missing, or no mapping"):
        translated(document)


def test_what_is_left_out_is_said() -> None:
    """Each with its place."""
    document = elastic_job(securityContext={"capabilities": {"add": ["NET_ADMIN"]}})
    document["spec"]["replicaSpecs"]["dlrover-master"] = {"template": {}}
    document["spec"]["replicaSpecs"]["worker"]["template"]["spec"]["hostNetwork"] = True
    said = "\n".join(translated(document)[1])
    for place in ("replicaSpecs.dlrover-master: left out", "spec.hostNetwork: left out", "securityContext: left out"):
        assert place in said
