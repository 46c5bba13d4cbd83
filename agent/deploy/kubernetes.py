"""A job as objects of Kubernetes. No operator and no rights: stock controllers replace pods, the master decides who is
in the world."""

from __future__ import annotations

import re
from typing import Any

from dalsegno.protos.contract import EXIT_FAILED, EXIT_LEFT, EXIT_LEFT_UNSAVED, EXIT_USAGE, Variable

from .command_lines import MASTER_PATIENCE_SECONDS, SecretFiles, master_line, node_line
from .job import JobSpec
from .pods import FILES, Mounts, Object, container, labels, meta, pod_template
from .shell_line import with_flags

__all__ = ("objects",)

MASTER, TRAINER = "master", "trainer"
STATE = "/state"
# Pods that died without a word (a lost machine, the OOM killer) before the Job gives up. The agent's own budget,
# --max-restarts, is for what fails inside the run; this one only ends a loop of pods that die at their start.
LOST_PODS = 100
# Seconds for which a metric must ask for more nodes, or for fewer, until it is obeyed, as each change costs a pause.
GROW_AFTER_SECONDS, SHRINK_AFTER_SECONDS = 60, 300
# The most nodes that it takes out within so many seconds.
SHRINK_NODES, SHRINK_PERIOD_SECONDS = 1, 120


def objects(job: JobSpec) -> list[Object]:
    """All objects of a job that has no `refusals`, in the order in which to apply them."""
    found = [_claim(job)] if job.claim.size else []
    found += [_service(job), _masters(job) if job.etcd else _master(job)]
    found += [_trainers_deployment(job) if job.controller == "Deployment" else _trainers_job(job)]
    if job.autoscale:
        found.append(_autoscaler(job))
    found += [_master_policy(job), _trainer_policy(job)]
    if budget := _budget(job):
        found.append(budget)
    return found


def _object(version: str, kind: str, metadata: Object, spec: Object) -> Object:
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _master_name(job: JobSpec) -> str:
    return f"{job.name}-master"


def _claim(job: JobSpec) -> Object:
    spec: Object = {"accessModes": [job.claim.access], "resources": {"requests": {"storage": job.claim.size}}}
    if job.claim.storage_class:
        spec["storageClassName"] = job.claim.storage_class
    return _object("v1", "PersistentVolumeClaim", meta(job, job.claim.name, TRAINER), spec)


# ---- the master ------------------------------------------------------------------------------------------------------


def _service(job: JobSpec) -> Object:
    """One address that stays. Only pods that are ready are behind it: with several masters, the one that leads."""
    ports = [
        {"name": name, "port": port, "targetPort": name}
        for name, port in (("grpc", job.master.port), ("http", job.master.http_port))
    ]
    spec = {"selector": labels(job, MASTER), "ports": ports}
    return _object("v1", "Service", meta(job, _master_name(job), MASTER), spec)


def _master(job: JobSpec) -> Object:
    """One master with its claim."""
    claim: Object = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": job.master.size}}}
    if job.master.storage_class:
        claim["storageClassName"] = job.master.storage_class
    mounts = Mounts()
    mounts.mounts.append({"name": "state", "mountPath": STATE})
    template = _master_pod(job, f"sqlite:///{STATE}/job.sqlite", mounts)
    spec = {
        "serviceName": _master_name(job),
        "replicas": 1,
        "selector": {"matchLabels": labels(job, MASTER)},
        "template": template,
        "volumeClaimTemplates": [{"metadata": {"name": "state"}, "spec": claim}],
    }
    return _object("apps/v1", "StatefulSet", meta(job, _master_name(job), MASTER), spec)


def _masters(job: JobSpec) -> Object:
    """Several masters over etcd, of which one leads and is ready.

    `Recreate`, because a rolling update waits for new pods to be ready, and those that stand by never are.
    There is no disruption budget for the same reason: with one ready pod it would never let the leader go.
    """
    template = _master_pod(job, job.store, Mounts(), f"--advertise=$(POD_IP):{job.master.port}")
    template["spec"]["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": labels(job, MASTER)},
        }
    ]
    spec = {
        "replicas": job.master.replicas,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": labels(job, MASTER)},
        "template": template,
    }
    return _object("apps/v1", "Deployment", meta(job, _master_name(job), MASTER), spec)


def _master_pod(job: JobSpec, store: str, mounts: Mounts, *more: str) -> Object:
    mounts.secret("token", job.secrets.token, "token")
    if job.secrets.tls:
        mounts.secret("tls", job.secrets.tls, "tls.crt", "tls.key")
    if job.secrets.etcd:
        mounts.secret("etcd", job.secrets.etcd, "ca.crt", "tls.crt", "tls.key")
    mounts.scratch("tmp", "/tmp")
    tls, etcd = bool(job.secrets.tls), bool(job.secrets.etcd)
    files = SecretFiles(
        FILES.token,
        "",
        *((FILES.tls_cert, FILES.tls_key) if tls else ("", "")),
        *((FILES.etcd_ca, FILES.etcd_cert, FILES.etcd_key) if etcd else ("", "", "")),
    )
    line = master_line(job, job.master.port, store, files, *more)
    one = container(MASTER, job.master.image or job.image, line, job.master.resources, (), mounts)
    one["ports"] = [
        {"name": "grpc", "containerPort": job.master.port},
        {"name": "http", "containerPort": job.master.http_port},
    ]
    one["readinessProbe"] = {
        "httpGet": {"path": "/readyz", "port": "http", "scheme": "HTTPS" if tls else "HTTP"},
        "periodSeconds": 2,
        "timeoutSeconds": 2,
    }
    # No liveness probe: it listens only once its store could be read, and whoever waits for that is not to be killed.
    # One that hangs while it serves ends by itself (--hang-timeout).
    return pod_template(job, MASTER, one, mounts)


# ---- the trainers ----------------------------------------------------------------------------------------------------


def _trainers_job(job: JobSpec) -> Object:
    """Nodes that end with the run: who left on notice or was evicted is replaced, who failed ends the Job."""
    codes = {"containerName": TRAINER, "operator": "In"}
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {**codes, "values": [EXIT_LEFT, EXIT_LEFT_UNSAVED]}},
        {"action": "FailJob", "onExitCodes": {**codes, "values": [EXIT_FAILED, EXIT_USAGE]}},
    ]
    spec = {
        "completionMode": "Indexed",
        "completions": job.replicas,
        "parallelism": job.replicas,
        "backoffLimit": LOST_PODS,
        # Each replacement waits twice as long as the one before, up to ten minutes, also where the failure is ignored,
        # and only a pod that succeeds ends that. With a limit per index, the pauses are each node's own.
        "backoffLimitPerIndex": LOST_PODS,
        # The only one that goes with a podFailurePolicy.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": rules},
        "template": _trainer_pod(job, "Never"),
    }
    return _object("batch/v1", "Job", meta(job, job.name, TRAINER), spec)


def _trainers_deployment(job: JobSpec) -> Object:
    """Nodes to scale. `Recreate`: two versions of a script never train in one world."""
    spec = {
        # With an autoscaler their number is not said: applied again, it would undo what that has set.
        **({} if job.autoscale else {"replicas": job.replicas}),
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": labels(job, TRAINER)},
        "template": _trainer_pod(job, "Always"),
    }
    return _object("apps/v1", "Deployment", meta(job, job.name, TRAINER), spec)


def _autoscaler(job: JobSpec) -> Object:
    """Sets the number of nodes within `nnodes`.

    All that are missing come at once, as newcomers join in one growth; surplus ones go one by one, each on a notice.
    """
    if job.autoscale.cpu:
        target = {"type": "Utilization", "averageUtilization": job.autoscale.cpu}
        metric: Object = {"type": "Resource", "resource": {"name": "cpu", "target": target}}
    else:
        target = {"type": "AverageValue", "averageValue": job.autoscale.target}
        metric = {"type": "External", "external": {"metric": {"name": job.autoscale.metric}, "target": target}}
    down = {
        "type": "Pods",
        "value": SHRINK_NODES,
        "periodSeconds": min(1800, max(SHRINK_PERIOD_SECONDS, 2 * job.grace)),
    }
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": job.name},
        "minReplicas": job.nnodes[0],
        "maxReplicas": job.nnodes[1],
        "metrics": [metric],
        "behavior": {
            "scaleUp": {
                "stabilizationWindowSeconds": GROW_AFTER_SECONDS,
                "policies": [{"type": "Pods", "value": job.nnodes[1], "periodSeconds": GROW_AFTER_SECONDS}],
            },
            "scaleDown": {"stabilizationWindowSeconds": SHRINK_AFTER_SECONDS, "policies": [down]},
        },
    }
    return _object("autoscaling/v2", "HorizontalPodAutoscaler", meta(job, job.name, TRAINER), spec)


def _trainer_pod(job: JobSpec, restart: str) -> Object:
    mounts = Mounts()
    mounts.claim("checkpoints", job.claim.name, job.checkpoints)
    for number, (claim, path) in enumerate(job.mounts.items()):
        mounts.claim(f"mount-{number}", claim, path)
    mounts.secret("token", job.secrets.token, "token")
    if job.secrets.tls:
        mounts.secret("tls", job.secrets.tls, "ca.crt")
    mounts.scratch("tmp", "/tmp")
    # The container's own /dev/shm has 64 MB: too few for loaders with workers, and for memory checkpoints.
    mounts.scratch("shm", "/dev/shm", medium="Memory", **({"sizeLimit": job.shm} if job.shm else {}))
    files = SecretFiles(FILES.token, FILES.tls_ca if job.secrets.tls else "")
    env = [{"name": name, "value": _literal(value)} for name, value in job.env.items()]
    master = f"{_master_name(job)}:{job.master.port}"
    if job.shell:
        line = ["/bin/bash", "-c", _literal(_with_numbers(job))]
        env = [*(entry for entry in _as_variables(job, master, files) if entry["name"] not in job.env), *env]
    else:
        # A pod that replaces another one is another node, also where an index gives both one host name.
        own = ("--node-name=$(POD_NAME)", "--local-addr=$(POD_IP)")
        line = node_line(job, master, job.checkpoints, files, *own)
        words = len(job.flags) + len(job.command)
        line[-words:] = [_literal(word) for word in line[-words:]]
    one = container(TRAINER, job.image, line, job.resources, env, mounts)
    more: Object = {"restartPolicy": restart, "terminationGracePeriodSeconds": job.grace}
    if job.node_selector:
        more["nodeSelector"] = dict(job.node_selector)
    if job.tolerations:
        more["tolerations"] = [dict(one) for one in job.tolerations]
    return pod_template(job, TRAINER, one, mounts, **more)


def _as_variables(job: JobSpec, master: str, files: SecretFiles) -> list[Object]:
    """The flags of `dlrover-run` where its command line is somebody else's: what stands there wins."""
    values = {
        Variable.MASTER: master,
        f"{Variable.FLAG}JOB_ID": job.name,
        f"{Variable.FLAG}CHECKPOINT_DIR": job.checkpoints,
        f"{Variable.FLAG}DRAIN_TIMEOUT": str(job.drain_timeout),
        f"{Variable.FLAG}CONNECT_TIMEOUT": str(MASTER_PATIENCE_SECONDS),
        f"{Variable.FLAG}TOKEN_FILE": files.token,
        f"{Variable.FLAG}TLS_CA": files.tls_ca,
        f"{Variable.FLAG}NODE_NAME": "$(POD_NAME)",
        f"{Variable.FLAG}LOCAL_ADDR": "$(POD_IP)",
    }
    return [{"name": name, "value": value} for name, value in values.items() if value]


def _with_numbers(job: JobSpec) -> str:
    """Its shell line with the numbers of nodes and workers: torchrun in the same line would take variables for its own.

    What the line or `env` says of them stays. One node is the default, and workers that nobody wrote are
    `--auto-config`'s to count.
    """
    numbers = {"nnodes": ":".join(map(str, job.nnodes)), "nproc_per_node": job.nproc}
    flags = {
        f"--{name.replace('_', '-')}": value
        for name, value in numbers.items()
        if value not in ("1:1", "") and (variable := f"{Variable.FLAG}{name.upper()}") not in job.env
        if variable not in job.shell
    }
    return with_flags(job.shell, flags)


def _literal(word: str) -> str:
    """A word as it is: Kubernetes replaces `$(NAME)` by a variable, and `$$` by one `$`."""
    return re.sub(r"\$(?=[$(])", "$$", word)


# ---- around them -----------------------------------------------------------------------------------------------------


def _budget(job: JobSpec) -> Object | None:
    """Evictions leave the run its least nodes; where it has no more than these, they go one by one.

    A budget that forbade every eviction would only hold up who empties a machine: a node that leaves loses no step.
    """
    keep = min(job.nnodes[0], (job.nnodes[0] if job.autoscale else job.replicas) - 1)
    if not keep:
        return None
    spec = {
        "minAvailable": keep,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": labels(job, TRAINER)},
    }
    return _object("policy/v1", "PodDisruptionBudget", meta(job, job.name, TRAINER), spec)


def _master_policy(job: JobSpec) -> Object:
    """The master hears the job's nodes, and pods of the namespace that say by a label that they look at it.

    A policy knows no host names. So with etcd the master may call any address, but only at etcd's ports, and DNS.
    """
    looks = {"podSelector": {"matchLabels": {"dalsegno/looks-at": job.name}}}
    ingress = [
        {
            "from": [{"podSelector": {"matchLabels": labels(job, TRAINER)}}, looks],
            "ports": [{"protocol": "TCP", "port": name} for name in ("grpc", "http")],
        },
    ]
    egress: list[Object] = []
    if job.etcd:
        ports = sorted({int(one.rpartition(":")[2]) for one in job.etcd})
        egress = [
            {"ports": [{"protocol": "TCP", "port": port} for port in ports]},
            {"ports": [{"protocol": protocol, "port": 53} for protocol in ("UDP", "TCP")]},
        ]
    spec: dict[str, Any] = {
        "podSelector": {"matchLabels": labels(job, MASTER)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": egress,
    }
    return _object("networking.k8s.io/v1", "NetworkPolicy", meta(job, _master_name(job), MASTER), spec)


def _trainer_policy(job: JobSpec) -> Object:
    """Nodes hear each other, on any port; where they go (data, hubs) is not restricted."""
    spec = {
        "podSelector": {"matchLabels": labels(job, TRAINER)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": labels(job, TRAINER)}}]}],
    }
    return _object("networking.k8s.io/v1", "NetworkPolicy", meta(job, job.name, TRAINER), spec)
