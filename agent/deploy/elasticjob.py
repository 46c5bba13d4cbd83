"""Reads DLRover's `ElasticJob` (elastic.iml.github.io/v1alpha1), and says what it leaves out."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from dalsegno.protos.contract import Variable
from dalsegno.protos.yaml_text import InputRefused

from .shell_line import agent_line, flag_value
from .table import mappings_of

__all__ = ("is_elastic_job", "translated")

# What its operator sets in each pod of a worker, and scripts of DLRover's name on their command lines.
NUMBERS = ("WORKER_NUM", "NODE_NUM")
# What a pod has anyway here, or what a stock controller decides.
WITHOUT_EFFECT = ("imagePullPolicy", "restartPolicy", "name", "stdin", "tty", "dnsPolicy", "restartCount", "autoScale")

_NODES = re.compile("([0-9]+)(?::([0-9]+))?")


def is_elastic_job(document: Any) -> bool:
    """Whether a document is one."""
    return isinstance(document, Mapping) and document.get("kind") == "ElasticJob"


def translated(document: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The same job in our own format.

    Args:
        document: The whole document.

    Returns:
        The mapping for `job.job_of`, and lines for a person about what was left out. It has neither a claim for
        checkpoints nor a token: these are added to it.

    Raises:
        InputRefused: It trains in a way that there is none of here.
    """
    spec = _mapping(document, "spec", "")
    strategy = spec.get("distributionStrategy", "AllreduceStrategy")
    if strategy != "AllreduceStrategy":
        raise InputRefused(f"spec.distributionStrategy: {strategy} is not there: only AllreduceStrategy is")
    replicas = _mapping(spec, "replicaSpecs", "spec.")
    notes = []
    for role in replicas:
        if role in ("dlrover-master", "master"):
            notes.append(f"spec.replicaSpecs.{role}: left out: render writes the master itself")
        elif role != "worker":
            raise InputRefused(f"spec.replicaSpecs.{role}: only workers train here; there are no other roles")
    worker = _mapping(replicas, "worker", "spec.replicaSpecs.")
    place = "spec.replicaSpecs.worker."
    number = worker.get("replicas", 1)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise InputRefused(f"{place}replicas: {number!r} is no number of nodes")
    place += "template.spec."
    pod = _mapping(_mapping(worker, "template", ""), "spec", "spec.replicaSpecs.worker.template.")
    containers = mappings_of(pod.get("containers"), f"{place}containers")
    if len(containers) != 1:
        raise InputRefused(
            f"{place}containers: {len(containers)} of them: the one with the training is what can be run"
        )
    main = containers[0]
    shell = _shell(main, f"{place}containers[0].")
    env = {name: str(number) for name in NUMBERS} | _env(main, f"{place}containers[0].env")
    own = flag_value(shell, "--nnodes", env)
    low, high = _nnodes(own or _variable(env) or str(number), f"{place}containers[0].")
    values = {
        "name": _mapping(document, "metadata", "").get("name"),
        "namespace": document["metadata"].get("namespace"),
        "image": main.get("image"),
        "shell": shell,
        "nnodes": f"{low}:{high}",
        "replicas": number,
        "resources": main.get("resources"),
        "env": env,
        "mounts": _mounts(pod, main, place, notes),
        "node_selector": pod.get("nodeSelector"),
        "tolerations": pod.get("tolerations"),
    }
    read = {*("containers", "volumes", "nodeSelector", "tolerations"), *WITHOUT_EFFECT}
    notes += [f"{place}{key}: left out" for key in pod if key not in read]
    read = {*("image", "command", "args", "env", "resources", "volumeMounts"), *WITHOUT_EFFECT}
    notes += [f"{place}containers[0].{key}: left out" for key in main if key not in read]
    notes.append(
        "the image needs dalsegno in it, with the extra `http` unless master.image names one for the master:"
        " `dlrover-run` became `dalsegno-run`, so that DLRover's own is not taken"
    )
    if low == high and high > 1:
        instead = f"--nnodes=1:{high} in its command" if own else f"--set nnodes=1:{high}"
        notes.append(f"nnodes {low}:{high} waits for all {high} nodes: {instead} goes on with fewer")
    return {key: value for key, value in values.items() if value}, notes


def _mapping(values: Mapping[str, Any], key: str, place: str) -> Mapping[str, Any]:
    found = values.get(key)
    if not isinstance(found, Mapping):
        raise InputRefused(f"{place}{key}: missing, or no mapping: this is no ElasticJob that DLRover would take")
    return found


def _shell(main: Mapping[str, Any], place: str) -> str:
    """The command for a shell, which becomes the agent."""
    words: list[str] = []
    for key in ("command", "args"):
        some = main.get(key) or []
        if not isinstance(some, list):
            raise InputRefused(f"{place}{key}: {some!r} is no list: write [one, another]")
        words += map(str, some)
    options = re.fullmatch("-([elux]*)c", words[1]) if len(words) == 3 else None
    if options is not None and words[0].rpartition("/")[2] in ("bash", "sh"):
        text = words[2]
        if switched := options[1].replace("l", ""):
            text = f"set -{switched}\n{text}"
    else:
        text = shlex.join(words)
    return agent_line(text, f"{place}command")


def _variable(env: dict[str, str]) -> str:
    """The number of nodes as their variable has it, with `$(WORKER_NUM)` replaced there; empty: it has none."""
    name = f"{Variable.FLAG}NNODES"
    if name not in env:
        return ""
    env[name] = re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), env[name])
    return env[name] if _NODES.fullmatch(env[name]) else ""


def _nnodes(given: str, place: str) -> tuple[int, int]:
    match = _NODES.fullmatch(given)
    if match is None:
        raise InputRefused(f"{place}command: --nnodes={given} is not N or MIN:MAX: write the numbers, or $WORKER_NUM")
    return int(match[1]), int(match[2] or match[1])


def _env(main: Mapping[str, Any], place: str) -> dict[str, str]:
    found = {}
    for entry in mappings_of(main.get("env"), place):
        if "valueFrom" in entry:
            raise InputRefused(f"{place}: {entry.get('name')} has a valueFrom: mount a file, or write a value")
        found[str(entry.get("name"))] = str(entry.get("value", ""))
    return found


def _mounts(pod: Mapping[str, Any], main: Mapping[str, Any], place: str, notes: list[str]) -> dict[str, str]:
    """Claims and where they are mounted; a volume of memory for /dev/shm is there anyway."""
    volumes = {str(volume.get("name")): volume for volume in mappings_of(pod.get("volumes"), f"{place}volumes")}
    found = {}
    for mount in mappings_of(main.get("volumeMounts"), f"{place}containers[0].volumeMounts"):
        volume = volumes.get(str(mount.get("name")), {})
        path = str(mount.get("mountPath"))
        claimed = volume.get("persistentVolumeClaim") or {}
        if not isinstance(claimed, Mapping):
            raise InputRefused(f"{place}volumes: {mount.get('name')}: persistentVolumeClaim is no mapping")
        if claim := claimed.get("claimName"):
            found[str(claim)] = path
        elif "emptyDir" in volume and path in ("/dev/shm", "/tmp"):
            notes.append(f"{place}volumes: {mount.get('name')}: left out: {path} is there anyway")
        else:
            kind = next((key for key in volume if key != "name"), "nothing")
            raise InputRefused(f"{place}volumes: {mount.get('name')} is {kind}: only volume claims are read")
    return found
