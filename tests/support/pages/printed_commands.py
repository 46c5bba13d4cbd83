"""How each printed command is run. One that is not here fails `tests/unit/house/test_printed.py`.

Most run by themselves (`Run`) in a scratch copy, with flags appended where time demands; some are lines of a scene
(`Scene`) that is a test by itself. What cannot run inside the tests says why, and what covers it instead (`Elsewhere`);
what nobody is meant to type as it stands says so (`Name`).
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Run:
    """It is typed as it is printed, and ends with 0.

    Attributes:
        more: appended.
        says: a pattern in what it says.
        replaced: placeholders, and what stands for them.
        full: only in `make test-all`.
    """

    more: str = ""
    says: str = ""
    replaced: dict[str, str] = field(default_factory=dict)
    full: bool = False


@dataclass(frozen=True)
class Scene:
    """It is a line of the scene that this test in `tests/integration/test_printed_scenes.py` plays."""

    test: str


@dataclass(frozen=True)
class Elsewhere:
    """It cannot run inside the tests. `by`: a target of the Makefile that `make -n` shall know, or a test."""

    why: str
    by: str


@dataclass(frozen=True)
class Name:
    """Nothing to type as it stands: a name, a part of a command, or another program's."""

    why: str


How = Run | Scene | Elsewhere | Name

_NETWORK = "installs from the network, for minutes; CI does it on a bare machine"
_HOURS = "measures for a long time, on a machine that does nothing else"
_CARD = "shows nothing without a card, and says so"
_PROGRAM = "names a program, with no arguments of a training"
_INSIDE = "how one part of the product starts another"
_OTHERS = "a script of somebody else's; one of its shape goes through a join and a kill"
_JOB = "needs the job that the page prints"
_CONTROL = "tests/integration/test_control.py"
_RUN = "needs a Commander and its run's file"
_LOOKING = "tests/integration/test_relay_looking.py"
_ORDER = "an order to a job, which has names of its own"
_CLUSTER = "needs a cluster; a miniature of one runs the objects"
_STEPS = "--steps=4 --save-every=2"
_SWIFT = "a program of ms-swift's, named"

COMMANDS: dict[str, How] = {
    # The examples, as their docstrings print them.
    "python examples/ddp.py": Run(_STEPS, says="nothing will be saved"),
    "torchrun --nproc-per-node 2 examples/ddp.py": Run("--steps=10 --save-every=2", says=r"step 10: .*2 ranks"),
    "dlrover-run --nnodes=1:4 examples/ddp.py": Run(_STEPS, says="finished at step 4"),
    "python examples/train.py": Run(f"{_STEPS} --layers=1", says="nothing will be saved", full=True),
    "torchrun --nproc-per-node 2 examples/train.py": Run(f"{_STEPS} --layers=1", full=True),
    "dlrover-run --nnodes=1:4 --universal-checkpoint examples/train.py": Run(
        f"{_STEPS} --layers=1", says="finished at step 4", full=True
    ),
    "python examples/trainer.py": Run(_STEPS, says="4 steps; nothing was saved", full=True),
    "torchrun --nproc-per-node 2 examples/trainer.py": Run(_STEPS, says="4 steps; nothing was saved", full=True),
    "dlrover-run --nnodes=1:4 examples/trainer.py": Run(_STEPS, says="4 steps; best: step-4", full=True),
    "python examples/hf_trainer.py": Run(_STEPS, says="4 steps, in out", full=True),
    "torchrun --nproc-per-node 2 examples/hf_trainer.py": Run(_STEPS, says="4 steps, in out", full=True),
    "dlrover-run --nnodes=1:4 examples/hf_trainer.py": Run(_STEPS, says="finished at step 4", full=True),
    # The README, from top to bottom.
    "dlrover-run --nnodes=1:4 train.py": Scene("test_the_first_command_runs_the_printed_script"),
    "python3 -m venv .venv && . .venv/bin/activate": Run(replaced={".venv": "another"}, full=True),
    "pip install torch==2.13.0": Elsewhere(_NETWORK, "install"),
    "pip install -e '.[train]'": Elsewhere(_NETWORK, "install"),
    "dlrover-run --nnodes=1:4 --universal-checkpoint examples/train.py --steps=1000": Scene("test_the_quickstart"),
    "kill -9": Scene("test_the_quickstart"),
    "dalsegno status": Scene("test_the_quickstart"),
    "dalsegno scale 1": Scene("test_the_quickstart"),
    "dalsegno scale 4": Scene("test_the_quickstart"),
    "dalsegno checkpoints ls DIR": Scene("test_the_quickstart"),
    "dalsegno checkpoints verify DIR": Scene("test_the_quickstart"),
    "dalsegno checkpoints show DIR": Scene("test_the_quickstart"),
    "dalsegno checkpoints prune --keep=3 DIR": Scene("test_the_quickstart"),
    "dlrover-run --nnodes=1:4 --universal-checkpoint train.py --save-dir '${save_dir}'": Scene(
        "test_a_script_without_a_session"
    ),
    "dlrover-run --nnodes=1:4 --resume-step=20 train.py": Scene("test_back_to_an_earlier_step"),
    "dlrover-run --nnodes=1:4 train.py --out_dir='${save_dir}' --init_from='${resume_dir:+resume}'": Elsewhere(
        _OTHERS, "tests/integration/test_adoption.py::test_scripts_of_other_layouts_go_on"
    ),
    "dlrover-run --nnodes=1:4 train.py --output_dir '${save_dir}' --resume_from_checkpoint '${resume_dir}'": Elsewhere(
        _OTHERS, "tests/integration/test_adoption.py::test_scripts_of_other_layouts_go_on"
    ),
    "dlrover-run --nnodes=1:4 --checkpoint-glob='checkpoint-*' train_unconditional.py --output_dir '${save_dir}'"
    " --resume_from_checkpoint latest": Elsewhere(
        _OTHERS, "tests/integration/test_adoption.py::test_scripts_of_other_layouts_go_on"
    ),
    "dlrover-run --nnodes=1:4 --deepspeed-load-universal train.py --save-dir '${save_dir}'": Elsewhere(
        _OTHERS, "tests/integration/test_adoption.py::test_a_deepspeed_script_without_a_session"
    ),
    "mkdir -p /var/lib/dalsegno": Scene("test_a_master_that_is_a_service"),
    "(umask 077; openssl rand -hex 32 > token)": Scene("test_a_master_that_is_a_service"),
    "openssl req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 365 -subj /CN=gpt"
    " -addext subjectAltName=DNS:HOST": Scene("test_a_master_that_is_a_service"),
    "dlrover-master --job-id=gpt --host=0.0.0.0 --port=29400 --store=sqlite:////var/lib/dalsegno/gpt.sqlite"
    " --nnodes=1:4 --token-file=token --tls-cert=cert.pem --tls-key=key.pem": Scene("test_a_master_that_is_a_service"),
    "dlrover-run --nnodes=1:4 --job-id=gpt --master=HOST:29400 --token-file=token --tls-ca=cert.pem"
    " --checkpoint-dir=/shared/checkpoints train.py": Scene("test_a_master_that_is_a_service"),
    "dalsegno status --master=HOST:29400 --token-file=token --tls-ca=cert.pem": Scene(
        "test_a_master_that_is_a_service"
    ),
    "dlrover-master --job-id=gpt --host=0.0.0.0 --port=29400 --advertise=HOST"
    " --store=etcd://E1:2379,E2:2379,E3:2379"
    " --nnodes=1:4 --token-file=token --tls-cert=cert.pem --tls-key=key.pem": Scene("test_several_masters"),
    "dlrover-run --nnodes=1:4 --job-id=gpt --master=M1:29400,M2:29400,M3:29400 --token-file=token --tls-ca=cert.pem"
    " --checkpoint-dir=/shared/checkpoints train.py": Scene("test_several_masters"),
    "dlrover-master --relay run.yaml --http-port=8443 --store=sqlite:////var/lib/dalsegno/commander.db"
    " --host=0.0.0.0 --port=29400 --tls-cert=cert.pem --tls-key=key.pem": Elsewhere(
        "a service with certificates of its own", "tests/integration/test_relay_callers.py::test_as_a_page_prints_it"
    ),
    "export DALSEGNO_TOKEN=a-word-of-16-characters-or-more": Scene("test_a_relayed_run"),
    "mkdir -p /tmp/volume": Scene("test_a_relayed_run"),
    "dlrover-master --relay deploy/relay/quickstart.yaml --http-port=8443 --store=sqlite:////tmp/volume/commander.db": (
        Scene("test_a_relayed_run")
    ),
    "dalsegno relay deploy/relay/quickstart.yaml --no-mount-check": Scene("test_a_relayed_run"),
    "dalsegno relay verify deploy/relay/quickstart.yaml": Scene("test_a_relayed_run"),
    "dalsegno relay run.yaml": Elsewhere(_RUN, "tests/integration/test_relay_pods.py"),
    **{
        f"dalsegno relay deploy/relay/{name}.yaml": Elsewhere(_RUN, f"tests/integration/test_relay_trainers.py::{test}")
        for name, test in (
            ("hf-trainer", "test_a_notice_to_a_hugging_face_trainer_of_two_ranks"),
            ("any-rl", "test_reinforcement_learning_in_plain_torch"),
        )
    },
    "dalsegno relay run.yaml --allow-older": Elsewhere(_RUN, "tests/integration/test_relay_export.py"),
    "dalsegno relay verify": Elsewhere(_RUN, "tests/integration/test_relay_pods.py"),
    "dalsegno relay": Name(_PROGRAM),
    "dalsegno relay ARGUMENTS": Name(_INSIDE),
    "dalsegno relay export": Elsewhere(_RUN, "tests/integration/test_relay_export.py"),
    "dalsegno relay export run.yaml /backup": Elsewhere(_RUN, "tests/integration/test_relay_export.py"),
    "dalsegno relay verify run.yaml --at=/backup": Elsewhere(_RUN, "tests/integration/test_relay_export.py"),
    "dalsegno relay status": Elsewhere(_RUN, _LOOKING),
    "dalsegno relay events": Elsewhere(_RUN, _LOOKING),
    "dalsegno relay expire": Elsewhere(_RUN, _LOOKING),
    "dalsegno relay release": Elsewhere(_RUN, _LOOKING),
    "torchrun --rdzv-backend=dalsegno --rdzv-endpoint=HOST:PORT --rdzv-id=JOB": Elsewhere(
        "a node of a job with a master, under torchrun",
        "tests/integration/test_torchrun.py::test_plain_torchrun",
    ),
    "torchrun --rdzv-backend=dalsegno --rdzv-endpoint=HOST:PORT --rdzv-id=JOB --nnodes=1:4 train.py": Elsewhere(
        "the same, with all that it needs",
        "tests/integration/test_torchrun.py::test_plain_torchrun",
    ),
    "dlrover-run --nnodes=2 --rdzv-id=42 --rdzv-backend=c10d --rdzv-endpoint=node0:29500 train.py": Elsewhere(
        "nodes that meet at an address of this machine",
        "tests/integration/test_torchrun.py::test_torchruns_usual_line_for_several_nodes",
    ),
    "python deploy/ray/train_on_ray.py --nodes=4 --num-gpus=8 -- --nnodes=1:4 --nproc-per-node=gpu --job-id=gpt"
    " --master=HOST:29400"
    " --connect-timeout=604800 --token-file=/shared/token --checkpoint-dir=/shared/checkpoints"
    " /shared/train.py": Elsewhere(
        "needs a Ray cluster", "tests/integration/test_ray.py::test_machines_and_agents_come_and_go"
    ),
    "ray job submit": Name("Ray's own, named"),
    # DLRover's scripts.
    "dalsegno-run --nnodes=1:4 train.py": Elsewhere(
        "dlrover is not among what the tests install",
        "tests/integration/test_dlrover.py::test_a_crash_resumes_from_memory",
    ),
    "dalsegno-run --nnodes=1:4 --dlrover-fixes train.py": Elsewhere(
        "dlrover is not among what the tests install",
        "tests/integration/test_dlrover_fixes.py::test_worlds_of_one_two_and_three_of_four",
    ),
    "dalsegno-run --nnodes=1:4 train.py --checkpoint-dir '${save_dir}'": Elsewhere(
        "dlrover is not among what the tests install",
        "tests/integration/test_dlrover.py::test_its_checkpoints_become_the_runs",
    ),
    "dalsegno doctor --dlrover train.py": Elsewhere(
        "needs a script that imports dlrover",
        "tests/unit/agent/dlrover/test_commands.py::test_the_doctor_reads_a_script",
    ),
    "dalsegno doctor --dlrover": Name("a command, named"),
    # The Makefile, and what CONTRIBUTING.md says.
    "make demo": Run(says="consumed every sample once", full=True),
    "make demo-relay": Run(says="consumed every sample once", full=True),
    "python -m examples.demo_relay": Elsewhere("is what `make demo-relay` runs", "demo-relay"),
    "make demo TORCH=...": Elsewhere(_NETWORK, "demo TORCH=torch"),
    "python -m examples.demo": Elsewhere("is what `make demo` runs", "demo"),
    "make test": Elsewhere("this test is a part of it", "test"),
    "make test-all": Elsewhere("this test is a part of it", "test-all"),
    "make check": Elsewhere("`make test` runs all of it, and more", "check"),
    "make lint": Elsewhere("`make test` begins with it", "lint"),
    "make format": Run(),
    "make bench": Elsewhere(_HOURS, "bench"),
    "make test-gpu": Elsewhere(_CARD, "test-gpu"),
    "make test-gpu PYTHON=...": Elsewhere(_CARD, "test-gpu PYTHON=python3"),
    "make bench-gpu": Elsewhere(_CARD, "bench-gpu"),
    "make bench-gpu PYTHON=...": Elsewhere(_CARD, "bench-gpu PYTHON=python3"),
    "make test-gpu PYTHON=/opt/torch/bin/python": Elsewhere(_CARD, "test-gpu PYTHON=python3"),
    "make bench-gpu PYTHON=/opt/torch/bin/python": Elsewhere(_CARD, "bench-gpu PYTHON=python3"),
    "make test-gpu PYTHON=.venv/bin/python FLAGS=--device=cpu": Elsewhere(
        "`make test` runs the same tests on the CPU", "test-gpu PYTHON=python3"
    ),
    **dict.fromkeys(
        ("make test-torch", "make test-torch OTHER=torch==2.6.0"),
        Elsewhere("another PyTorch is gigabytes to fetch", "test-torch"),
    ),
    "make protos": Elsewhere(
        "needs the generators of the network, which `make test` installs",
        "tests/unit/protos/test_protos.py::test_generated_code_is_up_to_date",
    ),
    "make simulate SEED=42 RUNS=1": Run("SHELL_RUNS=1 CLAIM_RUNS=1 LEADER_RUNS=1", full=True),
    "make fuzz SEED=1 COUNT=1000": Run(replaced={"COUNT=1000": "COUNT=20"}, full=True),
    "make simulate SEED=1 RUNS=1000": Elsewhere("`make test` runs these very schedules", "simulate SEED=1 RUNS=2000"),
    ".venv/bin/python -m pytest tests/unit -k sampler": Run(full=True, says="passed"),
    ".venv/bin/python -m pytest tests/integration/test_membership.py -k joins --repeat 20": Run(
        "--repeat 1", says="passed", full=True
    ),
    "python -m tests.unit.protos.test_protos": Run(),
    "python -m benchmarks peers": Elsewhere(_HOURS, "bench"),
    "python -m benchmarks flash": Elsewhere(_HOURS, "bench"),
    "python -m benchmarks pause": Elsewhere(_HOURS, "bench"),
    "python -m benchmarks rendezvous": Elsewhere(_HOURS, "bench"),
    "python -m benchmarks leaders": Elsewhere(_HOURS, "bench"),
    "python -m benchmarks edge": Elsewhere(_HOURS, "bench"),
    "python -m benchmarks successor": Elsewhere(_HOURS, "bench"),
    "python -m benchmarks start": Elsewhere(_HOURS, "bench"),
    "python -m benchmarks gathering": Elsewhere(_HOURS, "bench"),
    "python -m benchmarks upload": Run("--runs=1 --seconds=1 --megabytes=4", says="median", full=True),
    "python -m benchmarks [NAME ...]": Elsewhere(_HOURS, "bench"),
    "python -m benchmarks sampler": Elsewhere(_HOURS, "bench"),
    "python -m benchmarks gpu": Elsewhere(_CARD, "bench-gpu"),
    "python -m benchmarks gpu --device=cpu --sizes=0.05": Run("--repeats=1 --saves=1", says="standby", full=True),
    "python -m benchmarks.reshard": Run("--megabytes=20 --repeats=1", full=True),
    "python -m benchmarks.convert --directory DIR": Run("--megabytes=20 --repeats=1", replaced={"DIR": "."}, full=True),
    "python -m benchmarks.convert_once WAY": Elsewhere(_INSIDE, "bench"),
    "dlrover-run --nnodes=1:4 --memory-replicas=1 examples/ddp.py --memory-every=10": Run(
        _STEPS, says="finished at step 4", full=True
    ),
    # Operations.
    "dalsegno render": Name(_PROGRAM),
    **dict.fromkeys(
        (*("dalsegno render k8s job.yaml", "dalsegno render slurm job.yaml", "dalsegno render systemd job.yaml"),),
        Elsewhere(_JOB, "tests/unit/agent/deploy/test_committed.py::test_the_printed_job_is_rendered"),
    ),
    **dict.fromkeys(
        ("dalsegno render slurm job.yaml --output .", "dalsegno render systemd job.yaml --output ."),
        Elsewhere(_JOB, "tests/unit/agent/commands/test_render.py::test_files_are_written"),
    ),
    "dalsegno render k8s overlay/job.yaml --base base/job.yaml --output overlay": Elsewhere(
        _JOB, "tests/unit/agent/deploy/test_committed.py::test_it_is_what_render_prints"
    ),
    "dalsegno render k8s elastic_job.yaml --set claim=checkpoints --set secrets.token=gpt-token": Elsewhere(
        "a job of DLRover's", "tests/unit/agent/commands/test_render.py::test_an_elastic_job_is_rendered"
    ),
    **dict.fromkeys(
        (
            "kubectl create secret generic gpt-token --from-file=token",
            "dalsegno render k8s job.yaml | kubectl apply -f -",
        ),
        Elsewhere(_CLUSTER, "tests/integration/test_kubernetes.py::test_a_job_completes"),
    ),
    **dict.fromkeys(
        ("kubectl scale deployment/gpt --replicas=3", "kubectl scale deployment/gpt --replicas=0"),
        Elsewhere(_CLUSTER, "tests/integration/test_kubernetes.py::test_a_deployment_is_scaled_and_restarted"),
    ),
    """kubectl patch job/gpt -p '{"spec":{"parallelism":3,"completions":3}}'""": Elsewhere(
        _CLUSTER, "tests/integration/test_kubernetes.py::test_a_job_loses_pods"
    ),
    "kubectl delete node": Name("another program's, named"),
    "kubectl scale": Name("another program's, named"),
    "kubectl delete hpa/gpt": Elsewhere(
        _CLUSTER, "tests/integration/test_kubernetes.py::test_an_autoscaler_changes_the_number_of_nodes"
    ),
    "kubectl rollout status": Name("another program's, named"),
    "kubectl port-forward": Name("another program's, named"),
    "kubectl apply -k deploy/kubernetes/overlays/etcd": Elsewhere(
        _CLUSTER, "tests/unit/agent/deploy/test_committed.py::test_kustomize_comes_to_what_the_job_says"
    ),
    "sbatch gpt.sbatch": Elsewhere(
        "needs Slurm; bash runs its script", "tests/unit/agent/deploy/test_hosts.py::test_the_batch_script_runs"
    ),
    "make test-kind": Elsewhere("needs Docker and kind", "test-kind"),
    # Conversion.
    "dalsegno convert checkpoints/global_step400 universal/global_step400": Scene("test_a_conversion_by_hand"),
    "dalsegno convert": Name(_PROGRAM),
    "dalsegno convert SRC DST": Elsewhere(
        "a synopsis", "tests/integration/zero/test_convert_command.py::test_a_checkpoint_of_deepspeeds"
    ),
    "dalsegno scale": Name(_PROGRAM),
    "dalsegno drain": Name(_PROGRAM),
    "dalsegno render k8s": Name(_PROGRAM),
    "python -m tests.support.jobs.schedules --seed 1 --runs 200 --jobs 3": Elsewhere(
        _HOURS, "tests/integration/test_partitions.py::test_a_random_schedule"
    ),
    **{
        command: Elsewhere(
            _ORDER, "tests/integration/test_control.py::test_a_job_is_drained_saved_and_stopped_by_commands"
        )
        for command in ("dalsegno drain NODE", "dalsegno checkpoint", "dalsegno stop", "dalsegno scale N")
    },
    **{
        command: Elsewhere(_ORDER, f"{_CONTROL}::test_a_service_is_asked_by_commands")
        for command in ("dalsegno start", "dalsegno events")
    },
    "dalsegno doctor": Name(_PROGRAM),
    "dalsegno pauses DIR": Elsewhere(
        "looks at what a job with changes has left",
        "tests/integration/test_benchmark_pause.py::test_the_trace_of_a_job_is_shown",
    ),
    "dlrover-run --trace-dir DIR": Elsewhere(
        "needs a job with changes", "tests/integration/test_benchmark_pause.py::test_the_trace_of_a_job_is_shown"
    ),
    "dalsegno doctor examples/train.py --steps=1000": Run(
        says="change of the world: its checkpoints load as they are", full=True
    ),
    "dalsegno doctor --timeout=S train.py": Elsewhere(
        "a name", "tests/integration/test_doctor.py::test_a_script_without_a_session_that_is_to_run"
    ),
    "dalsegno stop --job-id=$JOB": Name("in the changelog: what is refused where JOB is not set"),
    "dalsegno stop --checkpoint-dir=COPY": Name("in the changelog: what reached another job"),
    "dalsegno pauses": Name(_PROGRAM),
    "dalsegno checkpoints verify": Name(_PROGRAM),
    "dalsegno doctor train.py": Elsewhere("a name", "tests/integration/test_doctor.py::test_a_script_that_fails"),
    "dalsegno status | checkpoints | convert | doctor": Name(_PROGRAM),
    "python -m dalsegno.elastic.universal": Elsewhere(
        _INSIDE, "tests/integration/zero/test_conversion.py::test_killed_and_followed"
    ),
    "python -m dalsegno.elastic.universal --source DIR --target DIR [--earlier DIR ...]": Elsewhere(
        _INSIDE, "tests/integration/zero/test_conversion.py::test_killed_and_followed"
    ),
    # ms-swift.
    "pip install -e '.[train,swift]'": Elsewhere(_NETWORK, "install"),
    "pip install -e '.[train,relay]'": Elsewhere(_NETWORK, "install"),
    "pip install -e '.[etcd,http]'": Elsewhere(_NETWORK, "install"),
    "openssl rand -hex 32": Name("makes the file that the reference prints a command for"),
    "pip install -e '.[train,hf]'": Elsewhere(_NETWORK, "install"),
    "NPROC_PER_NODE=4 swift sft --model … --dataset … --deepspeed zero1 --per_device_train_batch_size 2"
    " --gradient_accumulation_steps 4 --save_steps 100 --output_dir out": Scene("test_ms_swift"),
    "dlrover-run --nnodes=1:4 --nproc-per-node=4 --checkpoint-dir=/shared/checkpoints -m dalsegno.swift_plugin.sft"
    " --model … --dataset … --deepspeed zero1 --per_device_train_batch_size 2 --global_batch_size 32 --save_steps 100"
    " --output_dir /shared/out --universal-checkpoint": Scene("test_ms_swift"),
    'dlrover-run --nnodes=1:4 … -m swift.cli.sft … --external_plugins "$(python -m dalsegno.swift_plugin)"'
    " --callbacks dalsegno": Scene("test_ms_swift"),
    "python -m dalsegno.swift_plugin": Run(says=r"external"),
    "dlrover-run --nnodes=1:4 … -m dalsegno.swift_plugin.sft …": Scene("test_ms_swift"),
    "dlrover-run … -m dalsegno.swift_plugin.sft …": Name("in short what docs/ms-swift.md prints in full"),
    "dlrover-run … -m dalsegno.swift_plugin.pt …": Elsewhere(
        "as sft, with texts", "tests/integration/test_swift.py::test_changes_of_the_world"
    ),
    "dlrover-run … -m dalsegno.swift_plugin.rlhf …": Elsewhere(
        "as sft, with pairs", "tests/integration/test_swift.py::test_changes_of_the_world"
    ),
    "dlrover-run --nnodes=1:4 … swift sft …": Name("of a DLRover set-up, which it is about leaving"),
    "swift sft": Name(_SWIFT),
    "swift sft …": Name(_SWIFT),
    "swift pt": Name(_SWIFT),
    "swift rlhf": Name(_SWIFT),
    "swift infer": Name(_SWIFT),
    "swift export": Name(_SWIFT),
    "swift infer --adapters out/checkpoint-100": Name("a conversation; what it reads are the Trainer's own files"),
    "cp -rL": Name("of coreutils"),
    "dlrover-run --keep-checkpoints": Name("a flag"),
    # Inside.
    "python -m dalsegno.master": Elsewhere(
        _INSIDE, "tests/integration/test_agent_jobs.py::test_status_of_an_embedded_job"
    ),
    "python -m dalsegno.master.on_record FILE JOB": Elsewhere(
        _INSIDE,
        "tests/integration/test_control.py::test_what_happened_to_a_job_whose_own_master_is_gone_is_on_its_record",
    ),
    "python -m": Name(_INSIDE),
    "python -I -S": Name(_INSIDE),
    "python -u …/own_program.py dalsegno.agent.standby.nursery --channel FD …": Name(_INSIDE),
    "python own_program.py MODULE …": Name(_INSIDE),
    "python -m MODULE …": Name(_INSIDE),
    "python -u script.py …": Name(_INSIDE),
    "python -u -m module …": Name(_INSIDE),
    "python train.py": Elsewhere("the demo's undisturbed run", "demo"),
}
