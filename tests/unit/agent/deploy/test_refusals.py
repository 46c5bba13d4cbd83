"""What cannot work is refused, each with one line that says what to write."""

from __future__ import annotations

from typing import Any

import pytest

from dalsegno.agent.commands.arguments import build_parser
from dalsegno.agent.deploy.job import job_of
from dalsegno.agent.deploy.refusals import TARGETS, refusals
from dalsegno.agent.deploy.shell_line import SWITCHES
from dalsegno.protos.yaml_text import InputRefused
from tests.support.deploy import AUTOSCALED, BY_METRIC, ETCD, FULL, GPT, TLS, job


@pytest.mark.parametrize(
    ("changes", "nodes"),
    [
        ({"shell": "exec dalsegno-run --nnodes=1:4 a.py"}, (1, 4)),
        ({"shell": "exec dalsegno-run --nnodes=02 a.py", "nnodes": 2}, (2, 2)),
        ({"shell": "command -v dalsegno-run || exit; /opt/dalsegno-run --nnodes=2 a.py"}, (2, 2)),
        ({"shell": "exec dalsegno-run --nnodes=2 a.py || command -v dalsegno-run"}, (2, 2)),
        ({"shell": "exec dalsegno-run a.py", "env": {"PET_NNODES": "3"}}, (3, 3)),
        ({"shell": "exec dalsegno-run --nnodes=$N a.py"}, (1, 1)),
        ({"shell": "# --nnodes=3\nexec dalsegno-run a.py --nnodes 3", "nnodes": "1:4"}, (1, 4)),
        ({"shell": "torchrun --nnodes=1 p.py && exec dalsegno-run a.py", "nnodes": "1:4"}, (1, 4)),
        ({"shell": "exec ./start.sh", "nnodes": "1:4"}, (1, 4)),
    ],
)
def test_a_shell_line_says_how_many_nodes(changes: dict[str, Any], nodes: tuple[int, int]) -> None:
    """Where no key does; what stands elsewhere in it is another's."""
    one = job(**{"command": None, "nnodes": None, **changes})
    assert (one.nnodes, refusals(one, "k8s")) == (nodes, [])


@pytest.mark.parametrize(
    "changes",
    [
        {"command": ["--no-python", "./train.sh", "--master-addr", "10.0.0.1", "--help"]},
        {"command": ["--make-room", "train", "--nnodes", "2"]},
        {"command": ["--max_restarts", "3", "--no_python", "./launch", "--standalone"]},
        {"command": None, "shell": "exec dalsegno-run --no-python ./x --drain-timeout=300 --nnodes=7"},
    ],
)
def test_flags_of_a_program_behind_a_switch_are_its_own(changes: dict[str, Any]) -> None:
    """A switch has no value, so what follows it is the program."""
    assert refusals(job(**changes), "k8s") == []


def test_the_switches_are_those_of_the_parser() -> None:
    """All that it has, for nobody adds one there and thinks of this place."""
    actions = [action for action in build_parser({})._actions if action.nargs == 0]
    flags = {flag.partition("=")[0].replace("_", "-") for action in actions for flag in action.option_strings}
    # Behind these a command may end: the next word is the module.
    assert flags - {"-m", "--module"} == SWITCHES


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("k8s", {"nnodes": "3:4", "replicas": 2}, "replicas: 2 nodes are started, and nnodes 3:4 waits for 3"),
    ("slurm", {"nnodes": "3:4", "replicas": 2}, "replicas: 2 nodes are started"),
    ("k8s", {"grace": 30}, "grace: after 30 s a node is killed, and saving may take the 30 s"),
    ("systemd", {"drain_timeout": 90, "grace": 100}, "write grace: 105 or more"),
    (
        "k8s",
        {"command": None, "shell": "exec dalsegno-run --drain-timeout=300 a.py"},
        "grace: after 45 s a node is killed, and saving may take the 300 s of the command's own --drain-timeout, or of"
        " PET_DRAIN_TIMEOUT in env: write grace: 315 or more, or drain_timeout: 300 in its place",
    ),
    ("k8s", {"command": None, "shell": "dalsegno-run --drain_timeout $D a.py", "env": {"D": "60.5"}}, "the 60.5 s of"),
    ("k8s", {"command": None, "shell": "dalsegno-run a.py", "env": {"PET_DRAIN_TIMEOUT": "300"}}, "the 300 s of"),
    ("k8s", {"command": ["--drain-timeout=300", "a.py"]}, "command: --drain-timeout is written by render: its value"),
    ("slurm", {"command": ["--max-restarts", "3", "--nnodes", "2", "a.py"]}, "command: --nnodes is written by render"),
    ("k8s", {"command": ["--standalone", "a.py"]}, "command: --standalone names another master"),
    ("k8s", {"name": "7b-sft"}, "name: '7b-sft' begins with a digit, and the master's Service needs a letter first"),
    ("k8s", {"secrets": None}, "secrets.token: missing: whoever reaches the master's port"),
    ("slurm", {"secrets": {}}, "secrets.token: missing"),
    ("k8s", {"secrets": {"token": "a", "etcd": "b"}}, "secrets.etcd: there is no etcd"),
    ("k8s", {"command": ["train.py", "--token=abc"]}, "command: --token puts a secret on the command line"),
    ("k8s", {"command": ["train.py", "--hub_token", "abc"]}, "command: --hub_token puts a secret"),
    ("slurm", {"command": ["train.py", "--key=hf_" + "a" * 30]}, "command: a secret stands in '--key'"),
    ("k8s", {"command": ["env", "DALSEGNO_TOKEN=abc", "train.py"]}, "command: a secret stands in 'DALSEGNO_TOKEN'"),
    ("k8s", {"command": ["DALSEGNO_ADMIN_TOKEN=abc", "train.py"]}, "a secret stands in 'DALSEGNO_ADMIN_TOKEN'"),
    ("k8s", {"flags": ["--token=abc"]}, "command: --token puts a secret on the command line"),
    ("systemd", {"env": {"DALSEGNO_TOKEN": "abc"}}, "env.DALSEGNO_TOKEN: a secret would stand in the manifest"),
    ("k8s", {"env": {"AWS_SECRET_ACCESS_KEY": "abc"}}, "env.AWS_SECRET_ACCESS_KEY: a secret would stand"),
    ("k8s", {"flags": ["--job_id=other"]}, "flags: --job-id is written by render: its value comes from name"),
    ("k8s", {"command": ["train.py", "--wandb_api_key=1234"]}, "command: --wandb_api_key puts a secret"),
    ("k8s", {"env": {"HUB": "hf_" + "a" * 30}}, "env.HUB: a secret would stand in the manifest"),
    ("k8s", {"flags": ["--standalone"]}, "flags: --standalone names another master"),
    ("k8s", {"command": None, "shell": "dalsegno-run --nnodes=2 a.py"}, "nnodes: 1:4 would not count: the command has"),
    ("k8s", {"image": None}, "image: missing"),
    ("k8s", {"claim": None}, "claim: missing"),
    ("k8s", {"claim": {"name": "c", "access": "ReadWriteOnce"}}, "claim.access: one node alone can mount"),
    (
        "k8s",
        {"nnodes": "1", "replicas": 2, "claim": {"name": "c", "access": "ReadWriteOnce"}},
        "claim.access: one node",
    ),
    ("k8s", {**BY_METRIC, "controller": "Job"}, "autoscale: it cannot set the number of a Job's nodes"),
    ("k8s", {**BY_METRIC, "nnodes": 2}, "autoscale: nnodes 2 is one number: write nnodes: MIN:MAX"),
    ("k8s", {**AUTOSCALED, "resources": None}, "autoscale.cpu: it is percent of what a node requests"),
    ("k8s", {**AUTOSCALED, "resources": {"limits": {"cpu": 2}}}, "autoscale.cpu: it is percent of what a node"),
    ("k8s", {**ETCD, **TLS}, "secrets.tls: with etcd the masters send agents to each other by the address of a pod"),
    ("k8s", {"mounts": {"data": "data"}}, "mounts.data: 'data' is no absolute path"),
    ("k8s", {"mounts": {"data": "/checkpoints/"}}, "mounts.data: /checkpoints/ is where the checkpoints are"),
    ("k8s", {"mounts": {"data": "/tmp"}}, "mounts.data: /tmp is the pod's own (scratch)"),
    ("k8s", {"mounts": {"data": "/dev/shm/"}}, "mounts.data: /dev/shm/ is the pod's own"),
    ("k8s", {"mounts": {"data": "/run/dalsegno/token"}}, "mounts.data: /run/dalsegno/token is the pod's own (secrets)"),
    ("k8s", {"mounts": {"a": "/data", "b": "/data/"}}, "mounts.b: /data/ is where the claim a is"),
    ("k8s", {"checkpoints": "/tmp"}, "checkpoints: /tmp is the pod's own (scratch)"),
    ("k8s", {"checkpoints": "/"}, "checkpoints: / would hide the image"),
    ("k8s", {"mounts": {"data": "/"}}, "mounts.data: / would hide the image"),
    (
        "slurm",
        {"command": None, "shell": "dlrover-run train.py"},
        "shell: a command for an image cannot run under slurm",
    ),
    ("slurm", {"host": {"directory": "/a"}}, "host.master: missing: under slurm"),
    ("systemd", {"host": {"master": "a:1"}}, "host.directory: missing"),
    (
        "systemd",
        {"host": {"master": "a:1,b:1", "directory": "/a"}},
        "host.master: several masters share a job over etcd",
    ),
    ("slurm", {"slurm": {"array": "0-9"}}, "slurm.array: render writes this one itself"),
    ("slurm", {"slurm": {"--time": "1"}}, "slurm.--time: no option of sbatch in its long form"),
]


@pytest.mark.parametrize(("target", "changes", "line"), WRONG)
def test_what_cannot_work_is_refused(target: str, changes: dict[str, Any], line: str) -> None:
    """One finding, one line; the same job without it is accepted."""
    (said,) = refusals(job(**changes), target)
    assert line in said
    assert said.isprintable()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("changes", [{}, ETCD, TLS, FULL, AUTOSCALED, BY_METRIC])
def test_what_works_is_not(target: str, changes: dict[str, Any]) -> None:
    """Nothing cries wolf."""
    assert refusals(job(**changes), target) == []


@pytest.mark.parametrize(
    ("changes", "target"),
    [
        ({"name": "7b-sft"}, "slurm"),
        ({"name": "7b-sft"}, "systemd"),
        ({"command": ["--max-restarts=3", "a.py", "--nnodes=2", "-h"]}, "k8s"),
        ({"command": ["-m", "package", "--drain-timeout=300"]}, "k8s"),
        ({"command": None, "shell": "exec dalsegno-run --drain-timeout=300 a.py", "drain_timeout": 300}, "k8s"),
        ({"command": None, "shell": "exec dalsegno-run --drain-timeout=300 a.py", "grace": 315}, "k8s"),
        (
            {"command": None, "shell": "exec dalsegno-run --drain-timeout=30 a.py", "drain_timeout": 90, "grace": 45},
            "k8s",
        ),
        ({"command": None, "shell": "exec dalsegno-run --drain-timeout=$D a.py"}, "k8s"),
        ({"command": None, "shell": "exec dalsegno-run a.py --drain-timeout=300"}, "k8s"),
    ],
)
def test_what_is_not_meant_is_accepted(changes: dict[str, Any], target: str) -> None:
    """A name without a Service, a script's own flags, times that fit, and those that only a node knows."""
    assert refusals(job(**changes), target) == []


@pytest.mark.parametrize(
    ("shell", "what"),
    [
        ("dlrover-run train.py | tee log", "'|' stands behind dlrover-run"),
        ("exec dlrover-run train.py |& tee log", "'|&' stands behind"),
        ("cd /app && /opt/dalsegno/bin/dalsegno-run train.py; sync", "';' stands behind"),
        ("dlrover-run train.py || exit 3", "'||' stands behind"),
        ("exec dlrover-run train.py &", "'&' stands behind"),
        ("set -e\ndlrover-run \\\n  train.py # here\nsync\n", "a further line stands behind"),
        ("cat list | exec dlrover-run train.py", "'|' stands before dlrover-run"),
        ("if test -e a; then dlrover-run train.py; fi", "';' stands behind"),
    ],
)
def test_a_shell_that_goes_on_is_refused(shell: str, what: str) -> None:
    """It stays process 1, which ignores SIGTERM: the notice would reach nobody."""
    (said,) = refusals(job(command=None, shell=shell), "k8s")
    assert said.startswith(f"shell: {what}")
    assert "would not pass the notice to it" in said


@pytest.mark.parametrize(
    "shell",
    [
        "exec dlrover-run train.py",
        "dalsegno-run train.py;\n# done\n",
        "cd /app && exec dlrover-run train.py > >(tee log) 2>&1",
        "exec dlrover-run train.py; exit 3",
        "if test -e a; then exec dlrover-run b.py; else exec dalsegno-run train.py; fi",
        "cat list | sort > sorted || exit; exec dlrover-run train.py",
        "exec dlrover-run train.py || echo dlrover-run is not there",
        "trap 'kill -TERM $!' TERM; dlrover-run train.py & wait; wait",
        "dlrover-run train.py << END\n1\nEND\n",
        "exec dlrover-run train.py 'it",
        "exec ./start.sh | tee log",
        "echo dlrover-run starts; exec ./start.sh",
    ],
)
def test_a_shell_that_becomes_the_agent_is_not(shell: str) -> None:
    """Nor one that passes the notice on, nor what nobody can read for certain."""
    assert refusals(job(command=None, shell=shell), "k8s") == []


@pytest.mark.parametrize("words", [["--eos-token=</s>"], ["--max-tokens=5"], ["--tokenizer=gpt2"], ["token"]])
def test_words_about_tokens_are_no_secrets(words: list[str]) -> None:
    """Language models have tokens, too."""
    assert refusals(job(command=["train.py", *words], env={"TOKENIZERS_PARALLELISM": "1"}), "k8s") == []


def test_one_node_may_have_a_claim_of_its_own() -> None:
    """A ReadWriteOnce claim is refused only where several nodes would mount it."""
    assert refusals(job(nnodes="1", claim={"name": "c", "access": "ReadWriteOnce"}), "k8s") == []


UNREADABLE: list[tuple[dict[str, Any], str]] = [
    ({"comand": ["x"]}, "comand: no such key: did you mean command?"),
    ({"master": {"prot": 1}}, "master.prot: no such key: did you mean master.port?"),
    ({"secrets": {"tokne": "a"}}, "secrets.tokne: no such key: did you mean secrets.token?"),
    ({"zzz": 1}, "zzz: no such key: there are "),
    ({"nnodes": "4:1"}, "nnodes: '4:1': the maximum is below the minimum"),
    ({"nnodes": 64.5}, "nnodes: '64.5' is not N or MIN:MAX"),
    ({"replicas": 0}, "replicas: 0 is no whole number from 1"),
    ({"replicas": True}, "replicas: True is no whole number"),
    ({"name": "My_Job"}, "name: 'My_Job' is no name"),
    ({"name": None}, "name: missing"),
    ({"name": "a" * 41}, "longer than 40 characters"),
    ({"command": None}, "command: missing"),
    ({"command": "train.py 'x"}, 'command: "train.py \'x" cannot be cut into words'),
    ({"command": [["a"]]}, "command: ['a'] is no text"),
    ({"controller": "StatefulSet"}, "controller: 'StatefulSet' is none of Job, Deployment"),
    ({"claim": {"name": "c", "access": "ReadOnlyMany"}}, "claim.access: 'ReadOnlyMany' is none of"),
    ({**AUTOSCALED, "replicas": 2}, "replicas: the autoscaler sets their number"),
    ({"autoscale": {"cpu": 0}}, "autoscale.cpu: 0 is no whole number from 1 to 1000"),
    ({"autoscale": {"cpu": "70%"}}, "autoscale.cpu: '70%' is no whole number"),
    ({"autoscale": {"metric": "free_nodes"}}, "autoscale: metric and target belong together"),
    ({"autoscale": {"target": 1}}, "autoscale: metric and target belong together"),
    ({"autoscale": {"cpu": 70, "metric": "a", "target": 1}}, "autoscale.metric: cpu is there, too"),
    ({"autoscale": {"metric": "free nodes", "target": 1}}, "autoscale.metric: 'free nodes' is no name of a metric"),
    ({"autoscale": 70}, "autoscale: 70 is no mapping"),
    ({"claim": {"name": "c", "size": "big"}}, "claim.size: 'big' is no size"),
    ({"checkpoints": "relative"}, "checkpoints: 'relative' is no absolute path"),
    ({"etcd": ["https://a:1"]}, "etcd: 'https://a:1' is not HOST:PORT"),
    ({"etcd": "a:1"}, "etcd: 'a:1' is no list"),
    ({"tolerations": 3}, "tolerations: 3 is no list"),
    ({"tolerations": ["x"]}, "tolerations: 'x' is no mapping"),
    ({"shell": ["a", "b"]}, "shell: ['a', 'b'] is no text"),
    ({"master": {"port": 8080}}, "master.http_port: 8080 is master.port, too"),
    ({"env": {"DEBUG": True}}, "env.DEBUG: True is no text: put it into quotes"),
    ({"env": {"A": "a\nb"}}, "env.A: 'a\\nb' has a line break"),
    ({"host": {"master": "head"}}, "host.master: 'head' is not HOST:PORT"),
    ({"host": ["head"]}, "host: ['head'] is no mapping"),
    ({"user": 0}, "user: 0 is no whole number from 1"),
    ({"host": {"user": "-train"}}, "host.user: '-train' is no name of a user, like ml_train"),
    ({"host": {"user": "a b"}}, "host.user: 'a b' is no name of a user"),
    ({"nproc": 0}, "nproc: '0' is no number of workers, and no word like auto, cpu, gpu"),
    ({"nproc": "2 each"}, "nproc: '2 each' is no number of workers"),
    ({"nproc": "2.5"}, "nproc: '2.5' is no number of workers"),
    ({"resources": {"cpu": "many"}}, "resources.cpu: 'many' is no size"),
    ({"resources": {"limits": {"memory": "-1Gi"}}}, "resources.limits.memory: '-1Gi' is no size"),
    ({"master": {"resources": {"requests": {"cpu": "1 core"}}}}, "master.resources.requests.cpu: '1 core' is no size"),
    ({"master": {"replicas": 3}}, "master.replicas: several masters share a job over etcd"),
    ({"etcd": ["a:0"]}, "etcd: 'a:0' is not HOST:PORT"),
    ({"etcd": ["a:65536"]}, "etcd: 'a:65536' is not HOST:PORT"),
    ({"host": {"master": "head:99999"}}, "host.master: 'head:99999' is not HOST:PORT"),
    ({"shell": "exec dlrover-run train.py"}, "shell: command is there, too: write one of the two"),
]


@pytest.mark.parametrize(("changes", "line"), UNREADABLE)
def test_what_is_no_job_is_refused(changes: dict[str, Any], line: str) -> None:
    """Unknown keys with the nearest known one, and values of another kind with what should stand there."""
    with pytest.raises(InputRefused) as said:
        job(**changes)
    (found,) = said.value.lines
    assert line in found
    assert found.isprintable()


def test_each_known_key_is_named_once() -> None:
    """Also one that may have two forms, of which each is looked at."""
    with pytest.raises(InputRefused) as said:
        job(zzz=1)
    known = said.value.lines[0].partition("there are ")[2].split(", ")
    assert len(known) == len(set(known)) > 20


def test_another_file_is_not_printed() -> None:
    """A file of many keys is something else: some of them are named."""
    with pytest.raises(InputRefused) as said:
        job_of({f"user{number}:x": "/bin/sh" for number in range(50)})
    assert len(said.value.lines) == 6
    assert said.value.lines[-1] == "and 45 more keys that there are not: is this the job's file?"


def test_a_list_is_no_job() -> None:
    """Nor is a word."""
    for document in (["gpt"], "gpt", 3):
        with pytest.raises(InputRefused, match=r"the file: .* is no mapping"):
            job_of(document)
    assert job_of(GPT).name == "gpt"


@pytest.mark.parametrize("key", ["user", "grace", "drain_timeout"])
def test_a_duration_is_no_word(key: str) -> None:
    """Numbers in quotes are refused: nobody means them."""
    with pytest.raises(InputRefused, match=f"{key}: 'many' is no whole number"):
        job(**{key: "many"})
