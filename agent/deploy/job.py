"""The job as a person describes it: one checked value, whatever it is rendered for."""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dalsegno.protos.contract import JobSettings, Variable
from dalsegno.protos.options import nnodes
from dalsegno.protos.yaml_text import InputRefused

from .shell_line import flag_value
from .table import YamlMapping

__all__ = (
    "BEYOND_DRAIN_SECONDS",
    "Autoscale",
    "Host",
    "JobSpec",
    "MasterSpec",
    "Secrets",
    "VolumeClaim",
    "job_of",
    "shell_drain",
    "shell_nodes",
)

# Between the end of the notice and SIGKILL: an agent's ranks end, the checkpoint is sealed, the master hears of it.
BEYOND_DRAIN_SECONDS = 15
ACCESS = ("ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod")


@dataclass(frozen=True)
class VolumeClaim:
    """The volume claim of the checkpoints. With a size it is printed, too; without, it is there already."""

    name: str = ""
    access: str = "ReadWriteMany"
    size: str = ""
    storage_class: str = ""


@dataclass(frozen=True)
class Secrets:
    """Names of secrets, whose files are mounted (Kubernetes) or lie in `host.secrets/NAME` (elsewhere).

    Attributes:
        token: with the file `token`.
        tls: with `tls.crt`, `tls.key` (the master's) and `ca.crt`; empty: no TLS.
        etcd: the same for etcd.
    """

    token: str = ""
    tls: str = ""
    etcd: str = ""


@dataclass(frozen=True)
class Autoscale:
    """By what a HorizontalPodAutoscaler sets the number of nodes, within `nnodes`; nothing set: there is none.

    Attributes:
        cpu: percent of their CPU requests that nodes are to use on average; 0: not by that.
        metric: name of an external metric, of which each node stands for `target`; empty: not by one.
    """

    cpu: int = 0
    metric: str = ""
    target: str = ""

    def __bool__(self) -> bool:
        return bool(self.cpu or self.metric)


@dataclass(frozen=True)
class MasterSpec:
    """The master. `size` and `storage_class` are of the claim for its state, which etcd replaces."""

    image: str = ""
    port: int = 29400
    http_port: int = 8080
    replicas: int = 3
    size: str = "1Gi"
    storage_class: str = ""
    resources: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Host:
    """Where no container runs: Slurm and systemd.

    Attributes:
        master: HOST:PORT of the master as nodes reach it, several with commas (with etcd).
        directory: where the command runs, seen by all nodes.
        bin: where `dlrover-run` and `dlrover-master` are.
        secrets: directory of the secrets' directories.
        user: who runs it (systemd).
        checkpoints: the checkpoint directory, seen by all nodes; default: below `directory`.
    """

    master: str = ""
    directory: str = ""
    bin: str = "/opt/dalsegno/bin"
    secrets: str = "/etc/dalsegno"
    user: str = "dalsegno"
    checkpoints: str = ""


@dataclass(frozen=True)
class JobSpec:
    """A job as its file says it: each field is a key, with the key's name.

    `nnodes` is (least, most), `replicas` the nodes that are started; `drain_timeout` and `grace` are seconds. `nproc`
    is empty where the file has none, which means one.
    """

    name: str
    namespace: str
    image: str
    command: tuple[str, ...]
    shell: str
    flags: tuple[str, ...]
    nnodes: tuple[int, int]
    replicas: int
    nproc: str
    controller: str
    autoscale: Autoscale
    claim: VolumeClaim
    checkpoints: str
    secrets: Secrets
    etcd: tuple[str, ...]
    drain_timeout: int
    grace: int
    resources: Mapping[str, Mapping[str, str]]
    shm: str
    env: Mapping[str, str]
    mounts: Mapping[str, str]
    user: int
    node_selector: Mapping[str, str]
    tolerations: tuple[Mapping[str, Any], ...]
    master: MasterSpec
    host: Host
    slurm: Mapping[str, str]

    @property
    def store(self) -> str:
        """`--store` with etcd."""
        return f"etcd://{','.join(self.etcd)}"


def job_of(values: Any) -> JobSpec:
    """The job in a document of our own format.

    Args:
        values: The mapping, as `yaml_text.documents` reads it.

    Raises:
        InputRefused: Keys that there are not, or values that are not of their kind. What cannot work together is
            `refusals.refusals`' matter.
    """
    table = YamlMapping(values)
    shell, env = _shell(table), table.texts("env")
    low, high = (None if "nnodes" in table else shell_nodes(shell, env)) or _nnodes(table.text("nnodes", "1"))
    drain = table.whole("drain_timeout", int(JobSettings.drain_timeout), least=1)
    job = JobSpec(
        name=table.name("name"),
        namespace=table.name("namespace"),
        image=table.text("image"),
        command=_command(table),
        shell=shell,
        flags=table.words("flags"),
        nnodes=(low, high),
        replicas=table.whole("replicas", high, least=1),
        nproc=_nproc(table.text("nproc")),
        controller=table.one_of("controller", ("Job", "Deployment"), "Job"),
        autoscale=_autoscale(table.below("autoscale"), "replicas" in table),
        claim=_claim(table),
        checkpoints=table.path("checkpoints", "/checkpoints"),
        secrets=_secrets(table.below("secrets")),
        etcd=_endpoints(table),
        drain_timeout=drain,
        grace=table.whole("grace", drain + BEYOND_DRAIN_SECONDS),
        resources=_resources(table),
        shm=table.quantity("shm"),
        env=env,
        mounts=table.texts("mounts"),
        user=table.whole("user", 1000, least=1),
        node_selector=table.texts("node_selector"),
        tolerations=table.mappings("tolerations"),
        master=_master(table.below("master"), several="etcd" in table),
        host=_host(table.below("host")),
        slurm=table.texts("slurm"),
    )
    table.done()
    if not job.name:
        raise InputRefused("name: missing: the job's id, and the name of everything that belongs to it")
    # The longest name that is made of it is NAME-master-0 with a controller's hash.
    if len(job.name) > 40:
        raise InputRefused(f"name: {job.name!r} is longer than 40 characters: pods need the rest of their 63")
    if job.command and job.shell:
        raise InputRefused("shell: command is there, too: write one of the two")
    if not job.command and not job.shell:
        raise InputRefused("command: missing: the script and its arguments, like [train.py, --steps=1000]")
    return job


def _nnodes(text: str) -> tuple[int, int]:
    try:
        return nnodes(text)
    except argparse.ArgumentTypeError as error:
        raise InputRefused(f"nnodes: {error}") from error


def shell_nodes(shell: str, env: Mapping[str, str]) -> tuple[int, int] | None:
    """The least and the most nodes that a shell line says itself, or its variables.

    None: neither does, or only a node knows: `$N` of its image.
    """
    given = shell and (flag_value(shell, "--nnodes", env) or env.get(f"{Variable.FLAG}NNODES", ""))
    with contextlib.suppress(argparse.ArgumentTypeError):
        return nnodes(given)
    return None


def shell_drain(shell: str, env: Mapping[str, str]) -> float | None:
    """The seconds of a notice that a shell line says itself, or its variables.

    None: neither does, or only a node knows.
    """
    given = shell and (flag_value(shell, "--drain-timeout", env) or env.get(f"{Variable.FLAG}DRAIN_TIMEOUT", ""))
    return float(given) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", given) else None


def _nproc(text: str) -> str:
    if text and not re.fullmatch(r"[1-9][0-9]*|[a-z][a-z0-9]*", text):
        raise InputRefused(f"nproc: {text!r} is no number of workers, and no word like auto, cpu, gpu")
    return text


def _command(table: YamlMapping) -> tuple[str, ...]:
    value = table.take("command")
    if not isinstance(value, str):
        return table.words("command")
    try:
        return tuple(shlex.split(value))
    except ValueError as error:
        raise InputRefused(f"command: {value!r} cannot be cut into words: {error}") from error


def _shell(table: YamlMapping) -> str:
    value = table.take("shell")
    if value is not None and not isinstance(value, str):
        raise InputRefused(f"shell: {value!r} is no text: put it into quotes (a list of words is `command`)")
    return value or ""


def _claim(table: YamlMapping) -> VolumeClaim:
    value = table.take("claim")
    if value is None or isinstance(value, str):
        return VolumeClaim(table.name("claim"))
    inner = table.below("claim")
    claim = VolumeClaim(
        inner.name("name"),
        inner.one_of("access", ACCESS, VolumeClaim.access),
        inner.quantity("size"),
        inner.text("storage_class"),
    )
    inner.done()
    return claim


def _secrets(table: YamlMapping) -> Secrets:
    secrets = Secrets(table.name("token"), table.name("tls"), table.name("etcd"))
    table.done()
    return secrets


def _is_address(text: str) -> bool:
    found = re.fullmatch(r"[A-Za-z0-9._-]+:([0-9]{1,5})", text)
    return found is not None and 0 < int(found[1]) < 65536


def _autoscale(table: YamlMapping, replicas: bool) -> Autoscale:
    found = Autoscale(
        cpu=table.whole("cpu", 0, 1, 1000) if "cpu" in table else table.whole("cpu", 0),
        metric=table.text("metric"),
        target=table.quantity("target"),
    )
    table.done()
    if found.metric and not re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.:|]{0,200}[A-Za-z0-9])?", found.metric):
        raise InputRefused(f"autoscale.metric: {found.metric!r} is no name of a metric, like free_nodes")
    if found.cpu and found.metric:
        raise InputRefused("autoscale.metric: cpu is there, too: write one of the two")
    if bool(found.metric) != bool(found.target):
        raise InputRefused("autoscale: metric and target belong together: each node stands for so much of the metric")
    if found and replicas:
        raise InputRefused("replicas: the autoscaler sets their number, between the two of nnodes: leave it out")
    return found


def _endpoints(table: YamlMapping) -> tuple[str, ...]:
    found = table.words("etcd")
    for one in found:
        if not _is_address(one):
            raise InputRefused(f"etcd: {one!r} is not HOST:PORT (TLS comes with secrets.etcd, not with https://)")
    return found


def _master(table: YamlMapping, several: bool) -> MasterSpec:
    if "replicas" in table and not several:
        raise InputRefused("master.replicas: several masters share a job over etcd only: write etcd: [HOST:PORT, ...]")
    master = MasterSpec(
        image=table.text("image"),
        port=table.whole("port", MasterSpec.port, 1, 65535),
        http_port=table.whole("http_port", MasterSpec.http_port, 1, 65535),
        replicas=table.whole("replicas", MasterSpec.replicas, 1, 9),
        size=table.quantity("size", MasterSpec.size),
        storage_class=table.text("storage_class"),
        resources=_resources(table),
    )
    table.done()
    if master.port == master.http_port:
        raise InputRefused(f"master.http_port: {master.port} is master.port, too: agents and HTTP need one each")
    return master


def _host(table: YamlMapping) -> Host:
    host = Host(
        master=table.text("master"),
        directory=table.path("directory"),
        bin=table.path("bin", Host.bin),
        secrets=table.path("secrets", Host.secrets),
        user=table.user("user", Host.user),
        checkpoints=table.path("checkpoints"),
    )
    table.done()
    for one in filter(None, host.master.split(",")):
        if not _is_address(one):
            raise InputRefused(f"host.master: {one!r} is not HOST:PORT")
    return host


def _resources(table: YamlMapping) -> dict[str, dict[str, str]]:
    """`limits` and `requests`. A flat mapping is both, so that nothing is taken away from a pod that trains."""
    value = table.take("resources")
    if value is None:
        return {}
    inner = table.below("resources")
    if "limits" in inner or "requests" in inner:
        found = {"requests": inner.quantities("requests"), "limits": inner.quantities("limits")}
        inner.done()
        return {key: mapping for key, mapping in found.items() if mapping}
    flat = table.quantities("resources")
    return {"requests": flat, "limits": dict(flat)}
