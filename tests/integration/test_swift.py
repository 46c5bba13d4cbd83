"""ms-swift under real agents: full-parameter and LoRA training whose world changes size, and `swift sft` by itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dalsegno.swift_plugin import PLUGIN
from tests.integration.test_membership import AT_ONCE
from tests.integration.test_memory import jobs, together
from tests.integration.test_staying import join_and_leave, worker
from tests.integration.test_survivors import PACE, stood_still
from tests.support.forks import forked
from tests.support.jobs.cluster import Cluster, Training, Undisturbed, change_worlds, grow_to_two
from tests.support.workers import tiny_swift
from tests.support.workers.zero_runs import run_world

pytest.importorskip("swift", reason="the extra `swift` is not installed")
pytestmark = [pytest.mark.timeout(900), pytest.mark.executed]

__all__ = ["jobs"]

Clusters = Callable[..., Cluster]
STEPS_PLUGIN = Path(tiny_swift.__file__).with_name("swift_steps.py")
ENTRY = "dalsegno.swift_plugin"
PRELOADED = "tests.support.forks.preloaded_swift"


@dataclass(frozen=True)
class Swift(Training):
    """One of ms-swift's trainings.

    Attributes:
        made: Where the model and the data are.
        module: What is run; `swift.cli.sft` is ms-swift's own, with our plugin.
        options: Its flags, beside those of `tiny_swift`.
    """

    made: Path = Path()
    module: str = f"{ENTRY}.sft"
    options: tuple[tuple[str, str], ...] = ()
    needs_agent: bool = True
    preloaded: str = PRELOADED

    def words(self, *, hooked: bool) -> list[str]:
        return ["-m", self.module]

    def pace(self, step_time: float) -> list[str]:
        return []

    def environment(self, step_log: Path) -> dict[str, str]:
        return {"STEP_LOG": str(step_log)}

    def flags(self, step_log: Path) -> list[str]:
        given: dict[str, Any] = {
            "max_steps": self.steps,
            "save_steps": self.save_every,
            "per_device_train_batch_size": 3,
            "output_dir": "out",
            **dict(self.options),
        }
        plugins, callbacks = [str(STEPS_PLUGIN)], ["steps"]
        if "packing" in given:
            plugins.append(str(STEPS_PLUGIN.with_name("packed_attention.py")))
        if self.module.startswith("swift."):
            plugins, callbacks = [*plugins, str(PLUGIN)], [*callbacks, "dalsegno"]
        else:
            given["global_batch_size"] = self.global_batch_size
        task = "pairs" if self.module.endswith("rlhf") else "labels" if "task_type" in given else "data"
        flags = tiny_swift.flags(self.made / "model", self.made / f"{task}.jsonl", **given)
        return [*flags, "--external_plugins", *plugins, "--callbacks", *callbacks]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with `model`, `data.jsonl`, `pairs.jsonl` of answers to prefer and not, and `labels.jsonl`."""
    directory = tmp_path_factory.mktemp("tiny")
    tiny_swift.make_model(directory / "model")
    # 152 samples, 16 at a time: data epochs of 10 steps, the last of which is short.
    tiny_swift.make_data(directory / "data.jsonl", 152)
    tiny_swift.make_data(directory / "pairs.jsonl", 152, pairs=True)
    tiny_swift.make_data(directory / "labels.jsonl", 152, labels=True)
    tiny_swift.make_data(directory / "held_out.jsonl", 12)
    return directory


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in tiny_swift.OFFLINE.items():
        monkeypatch.setenv(name, value)


def output(job: Cluster) -> Path:
    """The directory that all epochs have written to."""
    (found,) = {path.parent for path in (job.directory / "out").rglob("logging.jsonl")}
    return found


def judge(job: Cluster, undisturbed: Undisturbed) -> None:
    """The undisturbed run's losses, every sample once, and ms-swift's own files where they always are."""
    job.assert_undisturbed(undisturbed)
    last = output(job) / f"checkpoint-{job.training.steps}"
    state = json.loads((last / "trainer_state.json").read_text())
    logged = [line["step"] for line in state["log_history"] if "grad_norm" in line]
    assert logged == list(range(1, job.training.steps + 1))
    assert (last / "args.json").is_file()
    assert (output(job) / "last-checkpoint").resolve() == last.resolve()
    limit = dict(job.training.options).get("save_total_limit") if isinstance(job.training, Swift) else None
    if limit is not None:
        # One more: what was retired last may lie there until the next save.
        assert len(job.sealed()) <= int(limit) + 1


def full(*options: str, module: str = f"{ENTRY}.sft") -> Any:
    """A cell that only the full run has; its options as `name=value`."""
    given = dict(option.split("=") for option in options)
    return pytest.param(module, given, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("module", "options"),
    [
        full("deepspeed=zero1"),
        full("deepspeed=zero1", "add_version=false", module="swift.cli.sft"),
        full("deepspeed=zero2"),
        full("deepspeed=zero3"),
        full(),
        full("tuner_type=lora", "lora_dropout=0"),
        full("tuner_type=lora", "lora_dropout=0", "deepspeed=zero1"),
        full("tuner_type=lora", "lora_dropout=0", "deepspeed=zero2"),
        full("tuner_type=lora", "lora_dropout=0", "deepspeed=zero3"),
        full("tuner_type=lora", "lora_dropout=0.1", "fixed_micro_batch=true"),
        full("deepspeed=zero1", module=f"{ENTRY}.pt"),
        full("deepspeed=zero1", "streaming=true"),
        full("deepspeed=zero1", "dataloader_num_workers=2"),
        full("deepspeed=zero1", "streaming=true", "dataloader_num_workers=1"),
        full("deepspeed=zero2", "save_total_limit=2"),
        full("packing=true", "streaming=true", "attn_impl=flash_attention_2", "deepspeed=zero1"),
        full("packing=true", "attn_impl=flash_attention_2", "deepspeed=zero1"),
        full("task_type=seq_cls", "num_labels=2", "deepspeed=zero1"),
        full("rlhf_type=rm", "deepspeed=zero2", module=f"{ENTRY}.rlhf"),
        full("rlhf_type=orpo", "deepspeed=zero1", "fixed_micro_batch=true", module=f"{ENTRY}.rlhf"),
        full("rlhf_type=cpo", "deepspeed=zero1", "fixed_micro_batch=true", module=f"{ENTRY}.rlhf"),
        full("rlhf_type=simpo", "fixed_micro_batch=true", module=f"{ENTRY}.rlhf"),
        full("rlhf_type=dpo", "tuner_type=lora", "lora_dropout=0", "deepspeed=zero1", module=f"{ENTRY}.rlhf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()) or "ddp",
)
def test_changes_of_the_world(
    clusters: Clusters, undisturbed: Undisturbed, made: Path, module: str, options: Mapping[str, str]
) -> None:
    """Nodes join, one is killed, one leaves: the losses are the undisturbed run's."""
    training = Swift(steps=80, save_every=10, made=made, module=module, options=tuple(options.items()))
    job = clusters(training=training, nnodes="1:3")
    change_worlds(job)
    judge(job, undisturbed)


def test_a_join_and_a_kill(clusters: Clusters, undisturbed: Undisturbed, made: Path) -> None:
    """The shortest of these: ZeRO-1 on one node, on two, and on one again."""
    training = Swift(steps=20, save_every=5, made=made, options=(("deepspeed", "zero1"),))
    job = clusters(training=training, nnodes="1:2")
    second = grow_to_two(job)
    job.kill_node(job.node("b"))
    third = job.wait_world(1, steps=2, after=second)
    job.finish()
    job.assert_lost({third: range(training.save_every + 1)})
    judge(job, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize("options", [{}, {"tuner_type": "lora", "lora_dropout": "0"}], ids=["all", "lora"])
def test_a_crash_that_costs_no_step(
    jobs: Clusters, undisturbed: Undisturbed, made: Path, options: Mapping[str, str]
) -> None:
    """With DDP the rank that is left saves the last boundary, and then it comes to the disk."""
    # Memory checkpoints are older than what is left.
    training = Swift(steps=40, save_every=1000, made=made, options=(("memory_every", "15"), *options.items()))
    pace = {**PACE, "DALSEGNO_TEST_STANDS": "before"}
    job, first = together(jobs, "a", "b", training=training, script_flags=(), agent_environment=pace)
    last = stood_still(job, first)
    job.kill_node(job.member(0))
    second = job.wait_world(1, after=first)
    assert job.change(second).resumed == last
    job.finish()
    job.assert_lost({})
    judge(job, undisturbed)


@pytest.mark.full
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tuner_type": "lora", "lora_dropout": "0"},
        {"tuner_type": "lora", "lora_dropout": "0", "lorap_lr_ratio": "4"},
    ],
    ids=["all", "lora", "lora+"],
)
def test_processes_that_stay(jobs: Clusters, undisturbed: Undisturbed, made: Path, options: Mapping[str, str]) -> None:
    """Through joins, a crash and a leave: with DDP the first node's process is the same all the time."""
    tuner = {"tuner_type": "lora"} if options else {}
    options = {"stay": "true", "memory_every": "5", "gradient_checkpointing": "true", **tuner, **options}
    training = Swift(steps=40, save_every=1000, made=made, options=tuple(options.items()))
    pace = {**PACE, "DALSEGNO_TEST_STANDS": "before"}
    job = jobs(nnodes="1:3", training=training, script_flags=(), agent_flags=AT_ONCE, agent_environment=pace)
    first = job.open("a")
    pid = worker(job, job.node("a"))
    job.start("b")
    second = job.wait_world(2, steps=3, after=first)
    job.start("c")
    third = job.wait_world(3, steps=3, after=second)
    job.leave(job.node("c"))
    job.wait_exit(job.node("c"))
    fourth = job.wait_world(2, steps=3, after=third)
    assert worker(job, job.node("a")) == pid
    last = stood_still(job, fourth)
    job.kill_node(job.node("b"))
    fifth = job.wait_world(1, after=fourth)
    assert worker(job, job.node("a")) == pid
    assert job.change(fifth).resumed == last
    job.finish()
    job.assert_lost({})
    judge(job, undisturbed)


@pytest.mark.full
def test_processes_of_its_own_command_that_stay(jobs: Clusters, undisturbed: Undisturbed, made: Path) -> None:
    """`swift sft` with our plugin, whose flags are variables. Its ranks meet as they read the data."""
    training = Swift(steps=40, save_every=1000, made=made, module="swift.cli.sft")
    environment = {**PACE, "DALSEGNO_STAY": "1"}
    job = jobs(nnodes="1:3", training=training, script_flags=(), agent_flags=AT_ONCE, agent_environment=environment)
    join_and_leave(job)
    job.finish()
    judge(job, undisturbed)


@pytest.mark.full
def test_evaluations_the_best_model_and_early_stopping(
    clusters: Clusters, undisturbed: Undisturbed, made: Path
) -> None:
    """What counts as better gets worse from the first evaluation on: that model is the best, and the run stops."""
    options = {
        "deepspeed": "zero1",
        "val_dataset": str(made / "held_out.jsonl"),
        "eval_strategy": "steps",
        "eval_steps": "10",
        "per_device_eval_batch_size": "1",  # a mean of batch means is the same in every world then
        "metric_for_best_model": "loss",
        "greater_is_better": "true",
        "load_best_model_at_end": "true",
        "early_stop_interval": "11",
    }
    training = Swift(steps=160, save_every=10, made=made, options=tuple(options.items()))
    job = clusters(training=training, nnodes="1:3")
    change_worlds(job)
    job.assert_undisturbed(undisturbed)
    found, wanted = (last_state(place) for place in (job.directory, undisturbed.place(training)))
    assert (found["global_step"], found["best_global_step"]) == (wanted["global_step"], wanted["best_global_step"])
    assert (found["global_step"], found["best_global_step"]) == (120, 10)
    evaluations = [
        [(line["step"], line["eval_loss"]) for line in one["log_history"] if "eval_loss" in line]
        for one in (found, wanted)
    ]
    assert [step for step, _ in evaluations[0]] == list(range(10, 121, 10))
    assert [loss for _, loss in evaluations[0]] == pytest.approx([loss for _, loss in evaluations[1]], rel=1e-4)
    assert (Path(found["best_model_checkpoint"]) / "model.safetensors").is_file()


def last_state(place: Path) -> dict[str, Any]:
    """What the Trainer has written of its last step."""
    states = [json.loads(path.read_text()) for path in (place / "out").rglob("checkpoint-*/trainer_state.json")]
    return max(states, key=lambda state: state["global_step"])


def run_swift(module: str, flags: list[str], *, executed: bool) -> None:
    """One of ms-swift's trainings on two ranks, as torchrun starts it or as it finds itself there."""
    command = [module, *flags]
    if executed:
        line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", *command]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        ended = [(done.returncode, done.stderr)]
    else:
        ended = run_world(2, command, module=True, preloaded=PRELOADED)
    for code, text in ended:
        # Outside of dlrover-run nobody sees to it that C++ threads of torch outlive the interpreter: it aborts now and
        # then, once all is done. What was trained and saved is compared all the same.
        aborted = "terminate called without an active exception" in text and "End time of running main" in text
        assert code == 0 or aborted, text[-3000:]


@pytest.mark.full
def test_swift_by_itself_is_unchanged(made: Path, tmp_path: Path, repetition: int) -> None:
    """Without `dlrover-run` the plugin does nothing, and our entry what it stands for: the same losses and files."""
    twice = ["--gradient_accumulation_steps", "2"]
    plugin = ["--external_plugins", str(PLUGIN), "--callbacks", "dalsegno"]
    found = []
    for name, module, more in (
        ("without", "swift.cli.sft", twice),
        ("plugin", "swift.cli.sft", [*twice, *plugin]),
        ("entry", f"{ENTRY}.sft", ["--global_batch_size", "12", "--universal-checkpoint"]),
    ):
        flags = tiny_swift.flags(
            made / "model",
            made / "data.jsonl",
            max_steps=6,
            save_steps=3,
            per_device_train_batch_size=3,
            output_dir=tmp_path / name,
            add_version="false",
        )
        # In a forked process our modules are imported already: swift by itself must be without them.
        run_swift(module, [*flags, *more], executed=not repetition and (name == "without" or forked.EXECUTES))
        checkpoints = sorted(path.name for path in (tmp_path / name).glob("checkpoint-*"))
        state = json.loads((tmp_path / name / "checkpoint-6" / "trainer_state.json").read_text())
        found.append((checkpoints, [line.get("loss") for line in state["log_history"]]))
    assert found[0] == found[1] == found[2]
    assert found[0][0] == ["checkpoint-3", "checkpoint-6"]
