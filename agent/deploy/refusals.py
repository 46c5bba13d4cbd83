"""What cannot work, said before anything is started: one line for each finding."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator

from dalsegno.protos.contract import Variable

from .job import BEYOND_DRAIN_SECONDS, JobSpec, shell_drain, shell_nodes
from .pods import SECRETS
from .shell_line import stays, up_to_script

__all__ = ("TARGETS", "refusals")

TARGETS = ("k8s", "slurm", "systemd")
# Flags of dlrover-run that render writes itself, and where their values come from.
OURS = {
    **{"--job-id": "name", "--nnodes": "nnodes", "--nproc-per-node": "nproc", "--drain-timeout": "drain_timeout"},
    **{"--checkpoint-dir": "checkpoints", "--token-file": "secrets.token", "--tls-ca": "secrets.tls"},
    **{"--rdzv-id": "name", "--master": "host.master"},
    **{"--node-name": "the pod's name", "--local-addr": "the pod's address"},
}
# Words that carry a secret itself. Not every word with "token" in it: `--eos-token=</s>` is none.
# A pad or eos token is none.
SECRET_FLAGS = re.compile(
    r"((hf|hub|push-to-hub|auth|access|api)-)?token|(.+-)?(api-key|password|wandb-key|secret-key|access-key)"
)
SECRET_VALUE = re.compile(r"hf_[A-Za-z0-9]{20,}")
SECRET_VARIABLES = re.compile(r"(TOKEN|PASSWORD|SECRET|API_KEY|ACCESS_KEY)$")


def refusals(job: JobSpec, target: str) -> list[str]:
    """Everything that could not work with `target` (one of `TARGETS`): lines for a person; none: it can."""
    return [*_everywhere(job), *(_kubernetes(job) if target == "k8s" else _hosts(job, target))]


def _everywhere(job: JobSpec) -> Iterator[str]:
    low, high = job.nnodes
    if job.replicas < low:
        yield (
            f"replicas: {job.replicas} nodes are started, and nnodes {low}:{high} waits for {low}:"
            f" write replicas: {low} or more, or nnodes: {job.replicas}:{high}"
        )
    yield from _killed_too_early(job)
    yield from _on_the_command_line(job)
    yield from _not_for_it("flags", job.flags)
    yield from _not_for_it("command", up_to_script(job.command))
    own = shell_nodes(job.shell, job.env)
    if own and own != (low, high):
        least, most = own
        yield (
            f"nnodes: {low}:{high} would not count: the command has --nnodes={least}:{most} of its own, or env has it"
            f" as {Variable.FLAG}NNODES: write --nnodes={low}:{high} there, or leave it out there"
        )
    if job.flags and job.shell:
        yield "flags: with shell they have no place: write them into that line"
    if not job.secrets.token:
        yield (
            "secrets.token: missing: whoever reaches the master's port could end the job: make one with"
            " `openssl rand -hex 32`, keep it in a secret under the key `token`, and write secrets: {token: its-name}"
        )
    if job.secrets.etcd and not job.etcd:
        yield "secrets.etcd: there is no etcd: write etcd: [HOST:PORT, ...], or leave it out"


def _killed_too_early(job: JobSpec) -> Iterator[str]:
    own = shell_drain(job.shell, job.env)
    seconds = job.drain_timeout if own is None else math.ceil(own)
    enough = seconds + BEYOND_DRAIN_SECONDS
    if job.grace >= enough:
        return
    killed = f"grace: after {job.grace} s a node is killed, and saving may take the"
    if own is None:
        yield f"{killed} {seconds} s of drain_timeout: write grace: {enough} or more, or leave it out"
    else:
        yield (
            f"{killed} {own:g} s of the command's own --drain-timeout, or of {Variable.FLAG}DRAIN_TIMEOUT in env:"
            f" write grace: {enough} or more, or drain_timeout: {seconds} in its place"
        )


def _not_for_it(key: str, words: Iterable[str]) -> Iterator[str]:
    """Flags of `dlrover-run` that are not for whoever writes the job."""
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        if name in OURS:
            yield f"{key}: {name} is written by render: its value comes from {OURS[name]}"
        elif name in ("--standalone", "--rdzv-endpoint", "--rdzv-backend", "--master-addr"):
            yield f"{key}: {name} names another master than the one of this job: leave it out"
        elif name in ("-h", "--help"):
            yield f"{key}: {name} starts nothing: leave it out"


def _on_the_command_line(job: JobSpec) -> Iterator[str]:
    """Secrets where everybody reads them: in `ps`, in the object, in Slurm's accounting, in git."""
    words = [*job.command, *job.flags, *job.shell.split()]
    for word in words:
        name = word.partition("=")[0]
        plain = name.lstrip("-").replace("_", "-").lower()
        if name.startswith("-") and SECRET_FLAGS.fullmatch(plain):
            yield f"command: {name} puts a secret on the command line, where everybody reads it: use a file of a secret"
        elif SECRET_VALUE.search(word) or name in (Variable.TOKEN, Variable.ADMIN_TOKEN):
            yield f"command: a secret stands in {name[:24]!r}, where everybody reads it: use a file of a secret"
    for name, value in job.env.items():
        if SECRET_VARIABLES.search(name.upper()) or SECRET_VALUE.search(value):
            yield (
                f"env.{name}: a secret would stand in the manifest, where everybody reads it:"
                f" mount it as a file{' (secrets.token does)' if name == Variable.TOKEN else ''}"
            )


def _kubernetes(job: JobSpec) -> Iterator[str]:
    # Of all that has the name only a Service must not: RFC 1035, where pods and the like have RFC 1123.
    if job.name[0].isdigit():
        yield (
            f"name: {job.name!r} begins with a digit, and the master's Service needs a letter first:"
            f" write for example m{job.name}"
        )
    if not job.image:
        yield "image: missing: the image with the script and dalsegno in it (deploy/docker/trainer.Dockerfile)"
    if job.shell and (why := stays(job.shell, "shell")):
        yield why
    if not job.claim.name:
        yield (
            "claim: missing: pods lose what they write when they end: write claim: NAME of a volume claim for the"
            " checkpoints that all nodes can mount (ReadWriteMany)"
        )
    most = max(job.nnodes[1], job.replicas)
    if job.claim.access != "ReadWriteMany" and most > 1:
        yield (
            f"claim.access: one node alone can mount a {job.claim.access} claim, and this job has up to {most}:"
            " take a ReadWriteMany one (NFS, CephFS, ...), or write nnodes: 1"
        )
    yield from _autoscaled(job)
    if job.etcd and job.secrets.tls:
        yield (
            "secrets.tls: with etcd the masters send agents to each other by the address of a pod, which no certificate"
            " names: leave out etcd (one master, restarted), or secrets.tls (in a network that you trust)"
        )
    yield from _mounts(job)


def _autoscaled(job: JobSpec) -> Iterator[str]:
    """Why an autoscaler would never change the number of nodes."""
    if not job.autoscale:
        return
    low, high = job.nnodes
    if job.controller != "Deployment":
        yield "autoscale: it cannot set the number of a Job's nodes: write controller: Deployment"
    if low == high:
        yield f"autoscale: nnodes {low} is one number: write nnodes: MIN:MAX"
    if job.autoscale.cpu and "cpu" not in job.resources.get("requests", {}):
        yield (
            "autoscale.cpu: it is percent of what a node requests, and none is requested: write resources: {cpu: ...},"
            " or take a metric of yours: {metric: NAME, target: N}"
        )


def _mounts(job: JobSpec) -> Iterator[str]:
    """Where two volumes would be mounted at one place, which Kubernetes refuses."""
    taken = {
        "/tmp": "the pod's own (scratch)",
        "/dev/shm": "the pod's own (scratch)",
        SECRETS: "the pod's own (secrets)",
    }
    wanted = {"checkpoints": job.checkpoints, **{f"mounts.{claim}": path for claim, path in job.mounts.items()}}
    for key, path in wanted.items():
        plain = path.rstrip("/")
        if not path.startswith("/"):
            yield f"{key}: {path!r} is no absolute path"
        elif not plain:
            yield f"{key}: / would hide the image: take another path"
        elif owner := taken.get(SECRETS if f"{plain}/".startswith(f"{SECRETS}/") else plain):
            yield f"{key}: {path} is {owner}: take another path"
        else:
            taken[plain] = "where the checkpoints are" if key == "checkpoints" else f"where the claim {key[7:]} is"


def _hosts(job: JobSpec, target: str) -> Iterator[str]:
    if job.shell:
        yield f"shell: a command for an image cannot run under {target}: write command: [train.py, ...]"
    if not job.host.master:
        yield (
            f"host.master: missing: under {target} nobody finds the master by itself: write host: {{master: HOST:PORT}}"
            " of the machine that runs dlrover-master (`dalsegno render systemd` prints its unit)"
        )
    if not job.host.directory:
        yield (
            "host.directory: missing: where the command runs, a directory that all nodes see:"
            " write host: {directory: /shared/NAME}"
        )
    if "," in job.host.master and not job.etcd:
        yield "host.master: several masters share a job over etcd only: write etcd: [HOST:PORT, ...], or one address"
    for key in job.slurm if target == "slurm" else ():
        if key in ("array", "requeue", "signal", "nodes", "open-mode", "job-name", "ntasks"):
            yield f"slurm.{key}: render writes this one itself: leave it out"
        elif not re.fullmatch(r"[a-z][a-z-]*", key):
            yield f"slurm.{key}: no option of sbatch in its long form, like partition"
