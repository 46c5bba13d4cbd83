"""Relay with real processes on one machine: `python -m examples.demo_relay`, or `make demo-relay`.

A Commander, a hub, and two pods with one folder as their volume. Pod A trains, and every process of it is killed with
SIGKILL. Pod B, which has waited as a spare, goes on when A's lease is over, and finishes. Meanwhile milestones go to
the hub. Then the same script runs undisturbed, alone.

Exit code 0 only if the losses of all steps agree within the limit, every sample was consumed exactly once, and a
milestone is on the hub.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.demo import LIMIT, DemoError, end_by_signals, tell
from examples.history import StepLogReader, compare, epoch_spans, kept_history, read_lines
from examples.report import Change, Scene

ROOT = Path(__file__).resolve().parents[1]
DDP = Path(__file__).with_name("ddp.py")
REPO = "demo/relayed"
# Seconds between two looks at processes and logs.
LOOK_EVERY = 0.2


@dataclass
class Stage:
    """What plays, and where it writes."""

    options: argparse.Namespace
    output: Path
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    hub_token: str = field(default_factory=lambda: f"hf_{secrets.token_hex(16)}")
    began: float = field(default_factory=time.time)
    events: list[tuple[float, str]] = field(default_factory=list)
    running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        return self.output / "run.yaml"

    @property
    def step_log(self) -> Path:
        return self.output / "steps"

    def say(self, text: str) -> None:
        """Prints and records what happened."""
        self.events.append((time.time(), text))
        print(f"{time.time() - self.began:6.1f} s  {text}", flush=True)

    def wait(self, until: Callable[[], Any], what: str) -> Any:
        """What comes of `until`, once that is true. Raises DemoError."""
        deadline = time.monotonic() + self.options.timeout
        while not (found := until()):
            for name, process in self.running.items():
                if process.poll():
                    raise DemoError(f"{name} ended with {process.returncode}: see {self.output / name}.log")
            if time.monotonic() > deadline:
                raise DemoError(f"{what} did not happen within {self.options.timeout:g} s: see {self.output}")
            time.sleep(LOOK_EVERY)  # why: what is waited for is in other processes
        return found

    @contextmanager
    def process(
        self, name: str, words: Sequence[str], environment: dict[str, str]
    ) -> Iterator[subprocess.Popen[bytes]]:
        """One process in a session of its own, with its output in a file; it is ended whatever happens."""
        with (self.output / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                words, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
            )
        self.running[name] = process
        try:
            yield process
        finally:
            self.end(name)

    def end(self, name: str) -> None:
        """Kills all processes of it at once."""
        if process := self.running.pop(name, None):
            vanish(process.pid)
            process.wait()

    def said(self, name: str) -> str:
        """The output of a process so far."""
        return (self.output / f"{name}.log").read_text(encoding="utf-8", errors="replace")


def vanish(pid: int) -> None:
    """Kills a process and all that descend from it, at once, as when a machine is taken away."""
    family, found = {pid}, True
    while found:
        found = False
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(path.read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has ended meanwhile
            child = int(path.parent.name)
            if parent in family and child not in family:
                family.add(child)
                found = True
    for one in family:
        try:
            os.kill(one, signal.SIGKILL)
        except ProcessLookupError:
            continue


def script_flags(options: argparse.Namespace, step_log: Path) -> list[str]:
    """The training script's own flags, the same in both runs."""
    flags = [f"--steps={options.steps}", f"--save-every={options.save_every}", f"--step-time={options.step_time}"]
    return [*flags, f"--step-log={step_log}"]


def write_run_file(stage: Stage, commander: str) -> None:
    """Writes `run.yaml`; JSON is YAML."""
    options = stage.options
    run = {
        "run_id": "relayed",
        "commander": commander,
        "l1_root": str(stage.output / "volume"),
        "command": ["python", str(DDP), *script_flags(options, stage.step_log), "--checkpoint-dir=${save_dir}"],
        "lease_seconds": options.lease_seconds,
        "hf": {"repo": REPO, "interval_seconds": options.milestone_seconds},
        "manifest": {"demo": True},
    }
    stage.file.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def ask(stage: Stage, commander: str) -> dict[str, Any]:
    """How the run stands, as the Commander has it."""
    shows = {"authorization": f"Bearer {stage.token}"}
    request = urllib.request.Request(f"{commander}/api/relay/relayed", headers=shows)
    with urllib.request.urlopen(request, timeout=20) as reply:
        shown: dict[str, Any] = json.load(reply)
    return shown


def steps_of(reader: StepLogReader, lines: list[Any]) -> int:
    """The last step that any world has made."""
    lines += reader.poll()
    return max((line.step for line in lines), default=0)


def play(stage: Stage) -> list[dict[str, Any]]:
    """Plays the scene; returns the milestones. Raises DemoError."""
    (stage.output / "volume").mkdir()
    (stage.output / "hub").mkdir()
    base = {**os.environ, "DALSEGNO_TOKEN": stage.token}
    words = [sys.executable, "-u", "-m", "tests.support.hub.server", str(stage.output / "hub"), stage.hub_token]
    with stage.process("hub", words, base):
        port = stage.wait(lambda: re.match(r"(\d+)\n", stage.said("hub")), "the hub's start")[1]
        # The Commander's own address is known only when it listens, and its file does not need it.
        write_run_file(stage, "http://127.0.0.1:8443")
        words = ["dlrover-master", f"--relay={stage.file}", "--http-port=0"]
        words.append(f"--store=sqlite:///{stage.output}/commander.db")
        with stage.process("commander", words, base):
            found = stage.wait(
                lambda: re.search(r'"http": "([^"]+)"', stage.said("commander")), "the Commander's start"
            )
            commander = f"http://{found[1]}"
            write_run_file(stage, commander)
            stage.say(f"the Commander and a hub run; the volume is {stage.output}/volume")
            hub = {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_TOKEN": stage.hub_token}
            return play_pods(stage, commander, {**base, **hub, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"})


def play_pods(stage: Stage, commander: str, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Pod A trains and vanishes; pod B goes on and finishes."""
    reader, lines = StepLogReader(stage.step_log), []
    words = ["dalsegno", "relay", str(stage.file), "--no-mount-check"]

    def pod(name: str) -> Any:
        return stage.process(name, words, {**environment, "HF_HOME": str(stage.output / f"home-{name}")})

    with pod("pod-a"):
        stage.wait(lambda: steps_of(reader, lines) >= 1, "pod A's first step")
        stage.say("pod A trains")
        with pod("pod-b") as second:
            stage.wait(lambda: steps_of(reader, lines) >= stage.options.steps // 3, "a third of the steps")
            made = stage.wait(lambda: ask(stage, commander)["milestones"], "a milestone")
            stage.say(f"milestone: step {made[0]['step']} is {made[0]['repo']}@{made[0]['revision'][:8]}")
            step = steps_of(reader, lines)
            stage.end("pod-a")
            stage.say(f"every process of pod A is killed with SIGKILL, behind step {step}")
            epoch = max(line.epoch for line in lines)
            stage.wait(lambda: steps_of(reader, lines) and max(line.epoch for line in lines) > epoch, "pod B's start")
            stage.say("pod B has taken over")
            stage.wait(lambda: second.poll() is not None, "the end of the run")
    stage.say("the run is finished")
    milestones: list[dict[str, Any]] = ask(stage, commander)["milestones"]
    return milestones


def play_undisturbed(stage: Stage, step_log: Path) -> None:
    """The same script alone. Raises DemoError."""
    words = [sys.executable, str(DDP), *script_flags(stage.options, step_log)]
    words[-2] = "--step-time=0"
    with stage.process("undisturbed", words, dict(os.environ)) as process:
        stage.wait(lambda: process.poll() is not None, "the end of the undisturbed run")


def judge(stage: Stage, undisturbed_log: Path) -> Scene:
    """Compares both runs."""
    lines = read_lines(stage.step_log)
    kept, undisturbed = kept_history(lines), kept_history(read_lines(undisturbed_log))
    spans = epoch_spans(lines)
    return Scene(
        title="Dal Segno: one run, two pods",
        command=shlex.join(["dalsegno", "relay", "run.yaml"]),
        kept=kept,
        undisturbed=undisturbed,
        spans=spans,
        comparison=compare(kept, undisturbed),
        limit=LIMIT,
        changes={span.epoch: Change(f"pod {'AB'[number]}") for number, span in enumerate(spans[:2])},
        events=stage.events,
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The demo's flags."""
    flags = argparse.ArgumentParser(prog="demo_relay", description="A run that is relayed, and its judge.")
    flags.add_argument("--output", type=Path, default=Path("demo-output"), help="logs and the page go below this")
    flags.add_argument("--steps", type=int, default=150, help="optimizer steps of each run")
    flags.add_argument("--save-every", type=int, default=20)
    flags.add_argument("--step-time", type=float, default=0.2, help="seconds that a step of the relayed run lasts")
    flags.add_argument("--lease-seconds", type=float, default=8.0, help="how long a silent pod keeps the run")
    flags.add_argument("--milestone-seconds", type=float, default=5.0, help="seconds between two milestones")
    flags.add_argument("--timeout", type=float, default=180.0, help="seconds that each part may take")
    return flags.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plays the scene, then judges it."""
    options = parse(arguments)
    end_by_signals()
    output = (options.output / time.strftime("relay-%Y%m%d-%H%M%S")).resolve()
    output.mkdir(parents=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The commands of this environment, also where it is not activated.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    stage = Stage(options, output)
    try:
        milestones = play(stage)
        play_undisturbed(stage, output / "undisturbed-steps")
    except DemoError as error:
        print(f"demo-relay: {error}", file=sys.stderr)
        return 1
    for one in milestones:
        print(f"milestone: step {one['step']}, revision {one['revision']}")
    return tell(judge(stage, output / "undisturbed-steps"), output)


if __name__ == "__main__":
    sys.exit(main())
