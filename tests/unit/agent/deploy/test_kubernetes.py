"""What is rendered for Kubernetes is valid there, and says what the page promises."""

from __future__ import annotations

import functools
from typing import Any

import kubernetes_validate
import pytest
from kubernetes_validate import utils

from dalsegno.agent.commands import arguments
from dalsegno.agent.deploy.kubernetes import objects
from dalsegno.agent.deploy.refusals import refusals
from dalsegno.master import cli
from tests.support.deploy import AUTOSCALED, BY_METRIC, ETCD, FULL, GPT, TLS, expanded, job, of_kind, pods
from tests.support.kubernetes.job_controller import JobStatus
from tests.support.kubernetes.job_controller import job as run_job
from tests.support.kubernetes.states import Create, Phase, Pod

# What a node waits for its master at least, as a start that gives up (2) is its last one: every recipe takes it so.
LONG_OUTAGE_SECONDS = 3600
VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
# Each megabyte of definitions is read once, not once for each object.
utils.schema_contents = functools.cache(utils.schema_contents)
KINDS: dict[str, dict[str, Any]] = {"plain": {}, "etcd": ETCD, "tls": TLS, "full": FULL, "autoscaled": AUTOSCALED}
SHELL = {"command": None, "shell": "cd /app && exec dalsegno-run --nnodes=1:$WORKER_NUM train.py", "env": {"A": "$(B)"}}


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid(version: str) -> None:
    """Every object of every kind of job, strictly: a key that the API server would drop is an error, too."""
    for changes in (*KINDS.values(), SHELL, BY_METRIC):
        for one in objects(job(**changes)):
            kubernetes_validate.validate(one, version, strict=True)


def test_the_schemas_are_strict() -> None:
    """A misspelt key, and a value of another kind, are seen: the test above can fail."""
    good = of_kind(objects(job()), "Job")
    for key, value in (("completionsMode", "Indexed"), ("completions", "four")):
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**good, "spec": {**good["spec"], key: value}}, "1.30", strict=True)


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
def test_the_commands_are_understood(changes: dict[str, Any]) -> None:
    """Both programs take their command lines, and the script gets its words as they were written."""
    assert refusals(job(**changes), "k8s") == []
    found = pods(objects(job(**changes)))
    variables = {"POD_NAME": "gpt-0-abcde", "POD_IP": "10.1.2.3"}
    words = [expanded(word, variables) for word in found["trainer"]["containers"][0]["command"]]
    options = arguments.parse(words[1:], {})
    assert words[0] == "dlrover-run"
    assert [options.training_script, *options.training_script_args] == GPT["command"]
    assert (options.job_id, options.nnodes, options.node_name) == ("gpt", "1:4", "gpt-0-abcde")
    assert options.local_addr == "10.1.2.3"
    assert options.connect_timeout >= LONG_OUTAGE_SECONDS
    words = [expanded(word, variables) for word in found["master"]["containers"][0]["command"]]
    master = cli._parser().parse_args(words[1:])
    port = changes.get("master", {}).get("port", 29400)
    assert options.master == f"gpt-master:{port}"
    assert (master.host, master.port, master.advertise) == (
        "0.0.0.0",
        port,
        ("10.1.2.3", port) if "etcd" in changes else None,
    )
    cli._check_several(master)


def test_a_job_ends_with_its_run() -> None:
    """Evicted and leaving pods are replaced for nothing; a failed run, and a wrong command line, end the Job."""
    spec = of_kind(objects(job()), "Job")["spec"]
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    by_codes = {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {"values": []})["values"]
    }
    assert by_codes == {75: "Ignore", 76: "Ignore", 1: "FailJob", 2: "FailJob"}
    assert spec["podFailurePolicy"]["rules"][0] == {
        "action": "Ignore",
        "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
    }


def test_nodes_that_come_back_often_hold_up_no_other() -> None:
    """The back-off is each index's own: evictions of one node do not delay the replacement of another one."""
    spec = of_kind(objects(job()), "Job")["spec"]
    # Five times evicted, its next pause is 160 s; the other node's first one is 10 s.
    ended = [Pod(f"pod-{n}", n, "", int(n == 5), Phase.FAILED, exit_code=75, ended=100.0) for n in range(6)]
    rest = [Pod(f"pod-{n}", n, "", n - 4, Phase.RUNNING) for n in (6, 7)]
    assert run_job(spec, JobStatus(), [*ended, *rest], 110.0)[1] == [Create(1)]


@pytest.mark.parametrize(("changes", "least"), [(AUTOSCALED, 1), (BY_METRIC, 2)])
def test_an_autoscaler_sets_the_number_of_nodes(changes: dict[str, Any], least: int) -> None:
    """Alone, as the Deployment names none, which would be set anew whenever it is applied; within `nnodes`."""
    made = objects(job(**changes))
    deployment = of_kind(made, "Deployment")
    autoscaler = of_kind(made, "HorizontalPodAutoscaler")["spec"]
    assert "replicas" not in deployment["spec"]
    named = {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment["metadata"]["name"]}
    assert autoscaler["scaleTargetRef"] == named
    assert (autoscaler["minReplicas"], autoscaler["maxReplicas"]) == (least, 4)
    assert f"--nnodes={least}:4" in deployment["spec"]["template"]["spec"]["containers"][0]["command"]
    # At its least number of nodes an emptied machine still gets rid of them, one by one.
    kept = [one["spec"]["minAvailable"] for one in made if one["kind"] == "PodDisruptionBudget"]
    assert kept == [least - 1] * (least > 1)
    (metric,) = autoscaler["metrics"]
    assert metric == (
        {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 70}}}
        if changes is AUTOSCALED
        else {
            "type": "External",
            "external": {"metric": {"name": "free_nodes"}, "target": {"type": "AverageValue", "averageValue": "1"}},
        }
    )
    # One at a time, and not before the last one has had its notice.
    (down,) = autoscaler["behavior"]["scaleDown"]["policies"]
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert (down["type"], down["value"], down["periodSeconds"] > grace) == ("Pods", 1, True)


def test_one_master_keeps_its_claim_and_several_keep_nothing() -> None:
    """A StatefulSet of one with its store on a claim; with etcd a Deployment that no rollout can get stuck in."""
    made = objects(job())
    one = of_kind(made, "StatefulSet")["spec"]
    assert one["replicas"] == 1
    assert "--store=sqlite:////state/job.sqlite" in one["template"]["spec"]["containers"][0]["command"]
    assert one["volumeClaimTemplates"][0]["metadata"]["name"] == "state"
    # Trainers are none: the pod of a lost machine would not be replaced.
    assert [each["metadata"]["name"] for each in made if each["kind"] == "StatefulSet"] == ["gpt-master"]
    three = of_kind(objects(job(**ETCD)), "Deployment", "gpt-master")["spec"]
    assert (three["replicas"], three["strategy"]) == (3, {"type": "Recreate"})
    command = three["template"]["spec"]["containers"][0]["command"]
    assert {"--store=etcd://etcd-0:2379,etcd-1:2379", "--etcd-ca=/run/dalsegno/etcd/ca.crt"} <= set(command)


@pytest.mark.parametrize("changes", [*KINDS.values(), SHELL], ids=[*KINDS, "shell"])
def test_pods_have_no_rights(changes: dict[str, Any]) -> None:
    """No credentials of the cluster, no root, nothing written but what is mounted, secrets as files for the group."""
    made = objects(job(**changes))
    assert not {one["kind"] for one in made} & {"Role", "RoleBinding", "ClusterRole", "ServiceAccount"}
    for spec in pods(made).values():
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        (one,) = spec["containers"]
        assert one["securityContext"]["readOnlyRootFilesystem"] is True
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
        assert "/tmp" in [mount["mountPath"] for mount in one["volumeMounts"]]
        assert not [entry for entry in one["env"] if "secretKeyRef" in entry.get("valueFrom", {})]
        for volume in spec["volumes"]:
            assert volume.get("secret", {"defaultMode": 0o440})["defaultMode"] == 0o440
        named = {volume["name"] for volume in spec["volumes"]} | {"state"}
        assert {mount["name"] for mount in one["volumeMounts"]} <= named


@pytest.mark.parametrize("changes", [{}, ETCD])
def test_nobody_ends_a_master_that_waits_for_its_store(changes: dict[str, Any]) -> None:
    """It listens only after that, and etcd may be away for longer than any probe has patience."""
    (master,) = pods(objects(job(**changes)))["master"]["containers"]
    assert not {"livenessProbe", "startupProbe"} & set(master)


def test_nodes_never_see_the_masters_key() -> None:
    """Of the certificate's secret a trainer gets the authority alone."""
    (volume,) = [one for one in pods(objects(job(**TLS)))["trainer"]["volumes"] if one["name"] == "tls"]
    assert [item["key"] for item in volume["secret"]["items"]] == ["ca.crt"]
    probe = pods(objects(job(**TLS)))["master"]["containers"][0]["readinessProbe"]
    assert probe["httpGet"] == {"path": "/readyz", "port": "http", "scheme": "HTTPS"}


@pytest.mark.parametrize(("drain", "grace"), [(None, 45), (120, 135)])
def test_the_grace_period_outlasts_the_drain(drain: int | None, grace: int) -> None:
    """A pod is killed 15 s after the last moment at which it may still save."""
    assert pods(objects(job(drain_timeout=drain)))["trainer"]["terminationGracePeriodSeconds"] == grace


@pytest.mark.parametrize(
    ("nodes", "replicas", "kept"), [("1:4", 4, 1), ("2:4", 4, 2), ("4", 4, 3), ("1", 1, None), ("3:8", 5, 3)]
)
def test_evictions_leave_the_least_nodes_and_are_never_forbidden(nodes: str, replicas: int, kept: int | None) -> None:
    """The disruption budget keeps the run going where it can, and lets whoever empties a machine go on."""
    budgets = [one for one in objects(job(nnodes=nodes, replicas=replicas)) if one["kind"] == "PodDisruptionBudget"]
    assert [one["spec"]["minAvailable"] for one in budgets] == ([] if kept is None else [kept])


def test_only_the_jobs_nodes_reach_the_master() -> None:
    """And pods with the label that docs/operations.md names, on any of its ports. It calls nobody, or etcd and DNS."""
    for changes, ports in (({}, []), (ETCD, [2379, 53, 53])):
        made = objects(job(**changes))
        policy = of_kind(made, "NetworkPolicy", "gpt-master")["spec"]
        assert [port["port"] for rule in policy["egress"] for port in rule["ports"]] == ports
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        components = {
            one["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]: one["spec"]["template"][
                "metadata"
            ]["labels"]
            for one in made
            if "template" in one["spec"]
        }
        assert policy["podSelector"]["matchLabels"] == components["master"]
        # An empty selector would be every pod of the namespace, and a peer without one every pod of some.
        peers = [peer for rule in policy["ingress"] for peer in rule["from"]]
        looks = {"dalsegno/looks-at": "gpt"}
        assert peers == [{"podSelector": {"matchLabels": one}} for one in (components["trainer"], looks)]
        assert [port["port"] for rule in policy["ingress"] for port in rule["ports"]] == ["grpc", "http"]
        assert of_kind(made, "Service")["spec"]["selector"] == components["master"]


def test_a_command_of_others_has_its_flags_as_variables() -> None:
    """They are variables that dlrover-run reads. The numbers are other launchers' as well: these stand in its line."""
    (one,) = pods(objects(job(**SHELL, nproc=8)))["trainer"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in one["env"] if "value" in entry}
    line = expanded(one["command"][2], {})
    assert line == str(SHELL["shell"]).replace("dalsegno-run", "dalsegno-run --nproc-per-node=8")
    assert expanded(variables["A"], {"B": "b"}) == "$(B)"
    options = arguments.parse(["train.py"], variables)
    assert (options.job_id, options.checkpoint_dir) == ("gpt", "/checkpoints")
    assert (options.master, options.token_file) == ("gpt-master:29400", "/run/dalsegno/token/token")
    assert options.connect_timeout >= LONG_OUTAGE_SECONDS


@pytest.mark.parametrize("how", [{"flags": ["--connect-timeout=90"]}, {"env": {"PET_CONNECT_TIMEOUT": "90"}}])
@pytest.mark.parametrize("kind", [{}, SHELL], ids=["command", "shell"])
def test_whoever_says_how_long_to_wait_for_the_master_is_heard(kind: dict[str, Any], how: dict[str, Any]) -> None:
    """As a flag or, as any flag, a variable."""
    if "flags" in how and kind:
        how = {"shell": str(SHELL["shell"]).replace("dalsegno-run", "dalsegno-run --connect-timeout=90")}
    (one,) = pods(objects(job(**{**kind, **how})))["trainer"]["containers"]
    variables = {entry["name"]: entry["value"] for entry in one["env"] if "value" in entry}
    words = one["command"][1:] if not kind else one["command"][2].partition("dalsegno-run ")[2].split()
    words = [word for word in words if "WORKER_NUM" not in word]
    assert arguments.parse(words, variables).connect_timeout == 90
