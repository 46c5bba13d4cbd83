"""DLRover's ElasticJob becomes a job of ours, or one line says why not."""

from __future__ import annotations

import copy
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dalsegno.agent.commands import arguments
from dalsegno.agent.deploy.elasticjob import is_elastic_job, translated
from dalsegno.agent.deploy.job import JobSpec, job_of
from dalsegno.agent.deploy.kubernetes import objects
from dalsegno.agent.deploy.refusals import refusals
from dalsegno.protos.yaml_text import InputRefused, documents, printed
from tests.support.deploy import expanded, pods

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
    assert any("4:4 waits for all 4 nodes: --nnodes=1:4 in its command goes on with fewer" in note for note in notes)
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
        (
            ["bash", "-c", "set -e\ncd /app\n# dlrover-run trains\ndlrover-run --nnodes=2 \\\n  a.py # here\n\n"],
            "set -e\ncd /app\n# dlrover-run trains\nexec dalsegno-run --nnodes=2 \\\n  a.py # here\n\n",
            (2, 2),
        ),
        (["bash", "-ec", "cd /app\ndlrover-run a.py"], "set -e\ncd /app\nexec dalsegno-run a.py", (4, 4)),
        (
            ["bash", "-c", "echo; A=$(nproc) B='x y' numactl --cpunodebind=0 dlrover-run a.py > >(tee log) 2>&1"],
            "echo; A=$(nproc) B='x y' exec numactl --cpunodebind=0 dalsegno-run a.py > >(tee log) 2>&1",
            (4, 4),
        ),
        (["bash", "-c", "time dlrover-run a.py"], "time exec dalsegno-run a.py", (4, 4)),
        (["bash", "-c", "2> log dlrover-run a.py"], "2> log exec dalsegno-run a.py", (4, 4)),
        (["bash", "-c", "A[0]=1 dlrover-run a.py"], "A[0]=1 exec dalsegno-run a.py", (4, 4)),
        (["bash", "-c", 'r() { "$@"; }\nr dlrover-run a.py'], 'r() { "$@"; }\nr exec dalsegno-run a.py', (4, 4)),
        (["bash", "-c", "A=b time dlrover-run a.py"], "A=b time dalsegno-run a.py", (4, 4)),
        (["bash", "-c", "exec numactl dlrover-run a.py"], "exec numactl dalsegno-run a.py", (4, 4)),
        # Only what stands between the agent and its script is its own.
        (["bash", "-c", "# old: --nnodes=2\ndlrover-run a.py"], "# old: --nnodes=2\nexec dalsegno-run a.py", (4, 4)),
        (
            ["bash", "-c", "torchrun --nnodes=1 p.py; dlrover-run a"],
            "torchrun --nnodes=1 p.py; exec dalsegno-run a",
            (4, 4),
        ),
        (
            ["bash", "-c", "dlrover-run --node-check a.py --nnodes 1"],
            "exec dalsegno-run --node-check a.py --nnodes 1",
            (4, 4),
        ),
        (["bash", "-c", "dlrover-run -m a --nnodes 1"], "exec dalsegno-run -m a --nnodes 1", (4, 4)),
        (["bash", "-c", "dlrover-run --nnodes 1:4 a.py"], "exec dalsegno-run --nnodes 1:4 a.py", (1, 4)),
    ],
)
def test_the_shell_becomes_the_agent(command: list[str], shell: str, nodes: tuple[int, int]) -> None:
    """A shell that stays would keep the notice to itself; and the program is ours, not DLRover's of the same name."""
    job = job_of(translated(elastic_job(command))[0])
    assert (job.shell, job.nnodes) == (shell, nodes)


PROGRAM = """#!/bin/bash
printf '%s|' "${0##*/}" "$@"
"""


def ran(job: JobSpec, directory: Path) -> tuple[str, dict[str, str]]:
    """What a pod's bash runs, where programs say their words; and the pod's variables."""
    for name in ("dalsegno-run", "dlrover-run", "numactl"):
        (directory / name).write_text(PROGRAM)
        (directory / name).chmod(0o755)
    made = documents(printed(objects(job)), "the manifest")
    (one,) = pods(made)["trainer"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in one["env"] if "value" in entry}
    line = [expanded(word, environment) for word in one["command"]]
    path = f"{directory}:{os.environ['PATH']}"
    ended = subprocess.run(line, env={**environment, "PATH": path}, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout, environment


COMPLETE = {"claim": "checkpoints", "secrets": {"token": "token"}}
LINES = "set -e\ncd /tmp\ntrue\ndlrover-run --nnodes=$NODE_NUM \\\n  train.py 'a b'\n"


BEFORE = (
    "2> /dev/null A=b",
    "time -p",
    "command -p",
    "A=b",
    "A=$'it\\'s'",
    "A=b command",
    'runs() { "$@"; }\nruns',
)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (LINES, "dalsegno-run|--nnodes=4|train.py|a b|"),
        ("numactl -N 0 dlrover-run train.py", "numactl|-N|0|dalsegno-run|--nnodes=4:4|train.py|"),
        *((f"{before} dlrover-run train.py", "dalsegno-run|--nnodes=4:4|train.py|") for before in BEFORE),
        ("dlrover-run train.py --x=$(echo ')')", "dalsegno-run|--nnodes=4:4|train.py|--x=)|"),
        # These are beyond what is cut into words: nothing but the name is changed.
        ("dlrover-run train.py ${A:-'}'}", "dalsegno-run|train.py|}|"),
        ("cat > /dev/null <<EOF\nit's\nEOF\ndlrover-run train.py", "dalsegno-run|train.py|"),
        ("dlrover-run train.py $(echo $(echo $(echo $(echo 1))))", "dalsegno-run|train.py|1|"),
    ],
)
def test_a_pod_runs_the_agent(command: str, said: str, tmp_path: Path) -> None:
    """With its own words, whatever lines they stand on: a shell that took them for others ended with 0, untrained."""
    values, _ = translated(elastic_job(["/bin/bash", "-c", command]))
    assert ran(job_of({**values, **COMPLETE}), tmp_path)[0] == said


def test_lines_are_printed_as_lines() -> None:
    """A person reads a script, not its escapes."""
    values, _ = translated(elastic_job(["/bin/bash", "-c", LINES]))
    assert "\n          set -e\n          cd /tmp\n" in printed(objects(job_of({**values, **COMPLETE})))


def test_the_number_of_nodes_arrives(tmp_path: Path) -> None:
    """On each of them, also if no flag says it: else each would train alone. Keys of the command line are obeyed."""
    values, notes = translated(elastic_job(["/bin/bash", "-c", "dlrover-run train.py"]))
    assert any("--set nnodes=1:4 goes on with fewer" in note for note in notes)
    for changes, nodes in ({}, "4:4"), ({"nnodes": "1:4", "nproc": 8}, "1:4"):
        said, environment = ran(job_of({**values, **COMPLETE, **changes}), tmp_path)
        options = arguments.parse(said.split("|")[1:-1], environment)
        assert (options.nnodes, options.nproc_per_node) == (nodes, str(changes.get("nproc", 1)))


def test_auto_config_means_the_cards_of_the_pod(tmp_path: Path) -> None:
    """DLRover's own examples give neither number: the number of nodes is the job's, and each pod counts its cards."""
    line = ["/bin/bash", "-c", "dlrover-run --auto-config train.py"]
    document = elastic_job(line, resources={"limits": {"nvidia.com/gpu": 8}})
    said, environment = ran(job_of({**translated(document)[0], **COMPLETE}), tmp_path)
    options = arguments.parse(said.split("|")[1:-1], environment)
    assert (options.nnodes, options.nproc_per_node, options.nproc_is_given) == ("4:4", "gpu", False)
    said, environment = ran(job_of({**translated(document)[0], **COMPLETE, "nproc": 1}), tmp_path)
    options = arguments.parse(said.split("|")[1:-1], environment)
    assert (options.nproc_per_node, options.nproc_is_given) == ("1", True)


def test_other_launchers_have_numbers_of_their_own(tmp_path: Path) -> None:
    """torchrun reads PET_NNODES, too. A variable of the job's own stays, once; `$(NAME)` in it is replaced."""
    values, _ = translated(elastic_job(["bash", "-c", "numactl prep.py && dlrover-run train.py"]))
    said, environment = ran(job_of({**values, **COMPLETE, "nproc": 8}), tmp_path)
    assert said == "numactl|prep.py|dalsegno-run|--nnodes=4:4|--nproc-per-node=8|train.py|"
    assert not {"PET_NNODES", "PET_NPROC_PER_NODE"} & set(environment)
    own = [{"name": "PET_NNODES", "value": "1:$(WORKER_NUM)"}, {"name": "PET_NODE_NAME", "value": "a"}]
    values, _ = translated(elastic_job(["bash", "-c", "dlrover-run train.py"], env=own))
    job = job_of({**values, **COMPLETE})
    said, environment = ran(job, tmp_path)
    assert (values["nnodes"], said, environment["PET_NNODES"]) == ("1:4", "dalsegno-run|train.py|", "1:4")
    (one,) = pods(objects(job))["trainer"]["containers"]
    assert [entry["value"] for entry in one["env"] if entry["name"] == "PET_NODE_NAME"] == ["a"]
    for line in "PET_NNODES=2 dlrover-run train.py", "export PET_NNODES=2; dlrover-run train.py":
        values, _ = translated(elastic_job(["bash", "-c", line]))
        assert ran(job_of({**values, **COMPLETE}), tmp_path)[0] == "dalsegno-run|train.py|"
    unknown = [{"name": "PET_NNODES", "value": "$(N)"}]
    assert translated(elastic_job(["dlrover-run", "a.py"], env=unknown))[0]["nnodes"] == "4:4"


@pytest.mark.parametrize("command", ["dlrover-run --nnodes=$WORKER_NUM train.py", "dlrover-run train.py"])
def test_another_number_than_the_commands_is_refused(command: str) -> None:
    """The command's own would win, or the variable in its place, and nothing would say so."""
    only, _ = translated(elastic_job(["dlrover-run", "a.py"], env=[{"name": "PET_NNODES", "value": "2:4"}]))
    assert only["nnodes"] == "2:4"
    values, _ = translated(elastic_job(["bash", "-c", command], env=[{"name": "PET_NNODES", "value": "4:4"}]))
    assert refusals(job_of({**values, **COMPLETE}), "k8s") == []
    (line,) = refusals(job_of({**values, **COMPLETE, "nnodes": "1:2", "replicas": 2}), "k8s")
    assert line.startswith("nnodes: 1:2 would not count: the command has --nnodes=4")


def test_its_flags_are_understood() -> None:
    """Those of DLRover's examples are flags of dlrover-run here."""
    words = RUN.replace("$WORKER_NUM", "4").split()[1:]
    assert arguments.parse(words, {}).nnodes == "4:4"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"command": ["python", "train.py"]}, "command: it starts no dlrover-run"),
    ({"command": ["/opt/dlrover-run", "a.py"]}, "command: it starts no dlrover-run"),
    ({"command": ["bash", "-c", "dlrover-run a.py && echo done"]}, "command: '&&' stands behind dlrover-run"),
    ({"command": ["bash", "-c", "dlrover-run a.py | tee log"]}, "command: '|' stands behind dlrover-run"),
    ({"command": ["bash", "-c", "dlrover-run a.py\necho ended"]}, "command: a further line stands behind dlrover-run"),
    (
        {"command": ["bash", "-c", "dlrover-run a.py ${A:-'}'}\necho ended"]},
        "command: a further line stands behind dlrover-run",
    ),
    ({"command": ["bash", "-c", "dlrover-run a.py ${A:-'}'}; echo"]}, "command: ';' stands behind dlrover-run"),
    ({"command": ["bash", "-c", "(dlrover-run a.py)"]}, "command: ')' stands behind dlrover-run"),
    ({"command": ["bash", "-c", "yes | dlrover-run a.py"]}, "command: '|' stands before dlrover-run"),
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
