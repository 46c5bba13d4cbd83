"""A scene of the main job with real processes on one machine: `python -m examples.demo`, or `make demo`.

Two nodes start, two join, node 0 is killed with SIGKILL, one node leaves on SIGTERM, the run ends. Then the same script
runs undisturbed, alone. While they run, there is a live view in the terminal (without a terminal: plain lines). At the
end there is a page with both loss curves, the timeline of epochs and what each change cost.

Exit code 0 only if the losses of all steps agree within the limit and every sample was consumed exactly once.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from examples.demo_view import Screen, View, open_screen
from examples.history import StepLine, StepLogReader, compare, epoch_spans, kept_history, read_lines
from examples.job_status import JobStatus, read_status
from examples.report import Change, Scene, picture, render

LIMIT = 1e-5
EXIT_LEFT = 75
AGENT_SAYS = "dlrover-run: "
# Seconds between two looks at processes and logs.
LOOK_EVERY = 0.2
TRAIN = Path(__file__).with_name("train.py")


class DemoError(Exception):
    """The scene could not be played to its end: one line that says why and where to look."""


def end_by_signals() -> None:
    """Ends this program by SIGTERM, and by the end of its terminal, as Ctrl-C does: what it has started ends with it.

    That is in sessions of their own, which such a signal does not reach. A second one does not cut this short.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP)

    def end(number: int, _: object) -> None:
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)
        sys.exit(128 + number)

    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:  # else it is `nohup`
            signal.signal(number, end)


@dataclass
class Node:
    """One agent, its console output, and the exit code with which its part in the scene should end."""

    name: str
    process: subprocess.Popen[bytes]
    console: Path
    expected: int = 0
    read: int = 0

    def new_lines(self) -> list[str]:
        """Complete console lines since the last call."""
        text = self.console.read_bytes()[self.read :]
        whole = text[: text.rfind(b"\n") + 1]
        self.read += len(whole)
        return whole.decode(errors="replace").splitlines()


@dataclass(frozen=True)
class Act:
    """One thing that happens, once a world of `world_size` ranks has made `steps` steps."""

    world_size: int
    steps: int
    play: Callable[[Stage], str]


@dataclass
class Stage:
    """The disturbed run while it is played."""

    options: argparse.Namespace
    output: Path
    screen: Screen
    nodes: list[Node] = field(default_factory=list)
    lines: list[StepLine] = field(default_factory=list)
    events: list[tuple[float, str]] = field(default_factory=list)
    status: JobStatus | None = None
    told: set[str] = field(default_factory=set)

    @property
    def step_log(self) -> Path:
        return self.output / "steps"

    @property
    def checkpoints(self) -> Path:
        return self.output / "checkpoints"

    def start(self, *names: str) -> None:
        """Starts one agent per name, each as a second terminal would."""
        for name in names:
            command = [*runner(), *agent_flags(self.options, self.checkpoints), f"--node-name={name}"]
            command += [str(TRAIN), *script_flags(self.options, self.step_log), f"--step-time={self.options.step_time}"]
            console = self.output / f"{name}.log"
            with console.open("wb") as file:
                # In a session of its own, so that Ctrl-C in this terminal reaches only the demo.
                process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
            self.nodes.append(Node(name, process, console))

    def alive(self) -> list[Node]:
        """Nodes whose agents run."""
        return [node for node in self.nodes if node.process.poll() is None]

    def say(self, text: str) -> None:
        """Records something that this script did."""
        self.events.append((time.time(), text))
        self.screen.say(text)


def runner() -> list[str]:
    """The `dlrover-run` of this environment."""
    script = Path(sysconfig.get_path("scripts")) / "dlrover-run"
    if not script.exists():
        raise DemoError(f"{script} doesn't exist: install the project (make demo does)")
    return [str(script)]


def agent_flags(options: argparse.Namespace, checkpoints: Path) -> list[str]:
    """The flags that a user would give; growths follow each other at once because the scene is short."""
    return [
        "--nnodes=1:4",
        "--nproc-per-node=1",
        f"--job-id=demo-{os.getpid()}",
        f"--checkpoint-dir={checkpoints}",
        "--universal-checkpoint",
        "--grow-interval=0",
        *options.agent_flag,
    ]


def script_flags(options: argparse.Namespace, step_log: Path) -> list[str]:
    """The training script's own flags, the same in both runs."""
    return [
        f"--steps={options.steps}",
        f"--save-every={options.save_every}",
        f"--global-batch-size={options.global_batch_size}",
        f"--zero-stage={options.zero_stage}",
        f"--seed={options.seed}",
        f"--learning-rate={options.learning_rate}",
        f"--step-log={step_log}",
    ]


def join_two(stage: Stage) -> str:
    """Starts two more terminals' agents."""
    stage.start("node-3", "node-4")
    return "two more nodes are started"


def kill_node_zero(stage: Stage) -> str:
    """Kills the agent of group rank 0, which serves the epoch's store, with SIGKILL; its workers must die with it."""
    ranks = stage.status.group_ranks if stage.status else {}
    victim = min(stage.alive(), key=lambda node: ranks.get(node.name, len(stage.nodes)))
    victim.expected = -signal.SIGKILL
    victim.process.kill()
    return f"{victim.name} (group rank {ranks.get(victim.name, 0)}) is killed with SIGKILL"


def leave(stage: Stage) -> str:
    """Sends SIGTERM to a node: a pre-emption notice."""
    leaver = next(node for node in stage.alive() if node.name in ("node-3", "node-4"))
    leaver.expected = EXIT_LEFT
    leaver.process.terminate()
    return f"{leaver.name} gets SIGTERM"


def play(stage: Stage) -> None:
    """Plays the disturbed run, from the first node's start to the last node's exit.

    Raises:
        DemoError: An agent did not end as it should have, or the scene did not end in time.
    """
    options = stage.options
    acts = [
        Act(2, options.act_steps, join_two),
        Act(4, options.act_steps, kill_node_zero),
        Act(3, options.act_steps, leave),
    ]
    reader = StepLogReader(stage.step_log)
    deadline = time.monotonic() + options.timeout
    stage.start("node-1", "node-2")
    stage.say("two nodes are started")
    looked = 0.0
    while stage.alive():
        if time.monotonic() > deadline:
            raise DemoError(f"the scene did not end within {options.timeout:g} s: see the logs in {stage.output}")
        stage.lines += reader.poll()
        if time.monotonic() - looked > 1.0:
            looked = time.monotonic()
            stage.status = read_status(stage.checkpoints, f"demo-{os.getpid()}") or stage.status
        if acts and _reached(stage.lines, acts[0]):
            stage.say(acts.pop(0).play(stage))
        _relay_consoles(stage)
        stage.screen.show(View.of(options.steps, stage.lines, stage.status, [node.name for node in stage.alive()]))
        _check_exits(stage)
        time.sleep(LOOK_EVERY)
    stage.lines += reader.poll()
    _relay_consoles(stage)
    _check_exits(stage)
    if acts:
        raise DemoError(f"the run ended before the scene did: give it more than --steps={options.steps}")


def _reached(lines: Sequence[StepLine], act: Act) -> bool:
    newest = max((line.epoch for line in lines), default=0)
    steps = {line.step for line in lines if line.epoch == newest and line.world_size == act.world_size}
    return len(steps) >= act.steps


def _relay_consoles(stage: Stage) -> None:
    """Prints what the agents tell of the run, each line once. What workers print stays in the logs."""
    for node in stage.nodes:
        for line in node.new_lines():
            if line.startswith(AGENT_SAYS) and line not in stage.told:
                stage.told.add(line)
                stage.screen.say(line.removeprefix(AGENT_SAYS), who=node.name)


def _check_exits(stage: Stage) -> None:
    for node in stage.nodes:
        code = node.process.poll()
        if code is not None and code != node.expected:
            raise DemoError(f"{node.name} ended with {code}, not {node.expected}: see {node.console}")


def stop_all(stage: Stage) -> None:
    """Ends every agent that is left, gently first. Embedded masters end by themselves when their agents are gone."""
    for node in stage.alive():
        node.process.terminate()
    deadline = time.monotonic() + 15
    for node in stage.nodes:
        try:
            node.process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            node.process.kill()
            node.process.wait()


def play_undisturbed(stage: Stage, step_log: Path) -> None:
    """Runs the same script alone, as `python train.py`: no agent, no master, no disturbance."""
    options = stage.options
    command = [sys.executable, str(TRAIN), *script_flags(options, step_log)]
    command.append(f"--checkpoint-dir={stage.output / 'undisturbed-checkpoints'}")
    reader = StepLogReader(step_log)
    lines: list[StepLine] = []
    console = stage.output / "undisturbed.log"
    deadline = time.monotonic() + options.timeout
    with console.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise DemoError(f"the undisturbed run did not end within {options.timeout:g} s: see {console}")
                lines += reader.poll()
                stage.screen.show(View.of(options.steps, lines, None, ["undisturbed"]))
                time.sleep(LOOK_EVERY)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0:
        raise DemoError(f"the undisturbed run ended with {process.returncode}: see {console}")


def judge(stage: Stage, undisturbed_log: Path) -> Scene:
    """Compares both runs."""
    lines = read_lines(stage.step_log)
    kept, undisturbed = kept_history(lines), kept_history(read_lines(undisturbed_log))
    changes = stage.status.changes if stage.status else {}
    return Scene(
        title="Dal Segno: one run, four worlds",
        command=shlex.join(["dlrover-run", *agent_flags(stage.options, Path("checkpoints")), "examples/train.py"]),
        kept=kept,
        undisturbed=undisturbed,
        spans=epoch_spans(lines),
        comparison=compare(kept, undisturbed),
        limit=LIMIT,
        changes={epoch: Change(cause, form) for epoch, (cause, form) in changes.items()},
        events=stage.events,
    )


def write_page(scene: Scene, output: Path) -> Path:
    """Writes the page, with its picture and its numbers (JSON) beside it."""
    page = output / "report.html"
    page.write_text(render(scene), encoding="utf-8")
    (output / "curves.svg").write_text(picture(scene), encoding="utf-8")
    summary = {
        "spans": [asdict(span) for span in scene.spans],
        "causes": {epoch: change.cause for epoch, change in scene.changes.items()},
        "largest_difference": scene.comparison.largest_difference,
        "problems": scene.comparison.problems,
    }
    page.with_suffix(".json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return page


def tell(scene: Scene, output: Path) -> int:
    """Prints the result, and writes the page; returns the exit code."""
    page = write_page(scene, output)
    for span in scene.spans:
        cost = f", paused {span.paused:.1f} s" if span.paused else ""
        lost = f", {span.lost_steps} of them redone later" if span.lost_steps else ""
        ranks = f"{span.world_size} rank{'s' if span.world_size != 1 else ''}"
        print(f"epoch {span.epoch}: {ranks}, steps {span.first_step} to {span.last_step}{lost}{cost}")
    compared = scene.comparison
    at = f" at step {compared.at_step}" if compared.at_step else ""
    print(f"largest difference of the losses: {compared.largest_difference:.2e} relative{at} (limit {scene.limit:g})")
    for problem in compared.problems:
        print(f"problem: {problem}")
    equal = compared.largest_difference <= scene.limit and not compared.problems
    if equal:
        print(f"all {len(scene.kept)} steps consumed every sample once, in the order of the undisturbed run")
        for name in ("checkpoints", "undisturbed-checkpoints"):
            shutil.rmtree(output / name, ignore_errors=True)
    print(f"report: {page}")
    return 0 if equal else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The demo's flags."""
    flags = argparse.ArgumentParser(prog="demo", description="A run with joins, a kill and a leave, and its judge.")
    flags.add_argument("--output", type=Path, default=Path("demo-output"), help="logs and the page go below this")
    flags.add_argument("--steps", type=int, default=180, help="optimizer steps of each run")
    flags.add_argument(
        "--act-steps", type=int, default=15, help="steps that a world makes before the next thing happens"
    )
    flags.add_argument("--step-time", type=float, default=0.25, help="seconds that a step of the disturbed run lasts")
    flags.add_argument("--save-every", type=int, default=20)
    flags.add_argument("--global-batch-size", type=int, default=16)
    flags.add_argument("--zero-stage", type=int, default=1, choices=(0, 1, 2, 3))
    flags.add_argument("--seed", type=int, default=0)
    # At 1e-3 this model amplifies a single rounding difference to 1e-5 within 200 steps, disturbed or not.
    flags.add_argument("--learning-rate", type=float, default=3e-4)
    flags.add_argument("--timeout", type=float, default=240.0, help="seconds that each run may take")
    flags.add_argument("--plain", action="store_true", help="plain lines even in a terminal")
    flags.add_argument(
        "--agent-flag", action="append", default=[], metavar="FLAG", help="one more flag for dlrover-run"
    )
    return flags.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plays the scene, then judges it."""
    options = parse(arguments)
    end_by_signals()
    output = (options.output / time.strftime("%Y%m%d-%H%M%S")).resolve()
    output.mkdir(parents=True)
    undisturbed_log = output / "undisturbed-steps"
    # All ranks share this machine's cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        with open_screen(plain=options.plain) as screen:
            stage = Stage(options, output, screen)
            try:
                play(stage)
            finally:
                stop_all(stage)
            screen.say("the run ended; now the same script undisturbed, alone")
            play_undisturbed(stage, undisturbed_log)
        scene = judge(stage, undisturbed_log)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return tell(scene, output)


if __name__ == "__main__":
    sys.exit(main())
