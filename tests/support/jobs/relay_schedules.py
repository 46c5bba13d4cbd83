"""Random schedules over pods of a relayed run: `python -m tests.support.jobs.relay_schedules --seed 1 --runs 200`.

Each has one Commander, one folder as the volume, a trainer that knows nothing of us, and two or three pods at a time;
some have a hub, too. Pods, single processes of them and the Commander are killed, stopped and told to go; checkpoints
are damaged. A pod that is gone is followed by another one, as a provider does. The seed decides all of that. A failure
prints the seed, and the command that repeats it; its folder is kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dalsegno.elastic.checkpoint import CheckpointName, Manifest
from tests.support.hub.client import Hub
from tests.support.hub.scene import REPO, milestones_on
from tests.support.jobs.commander import ADMIN_TOKEN
from tests.support.jobs.local_processes import carriers, command_line, send
from tests.support.jobs.pods import LEASE_SECONDS, Pod, Run, relayed
from tests.support.jobs.seeds import run_seeds

STEPS = 260
PACE = 0.06
# Who goes, how often each is drawn.
TARGETS = {
    "pod": 3,
    "entry": 2,
    "agent": 2,
    "trainer": 2,
    "mirror": 1,
    "notice": 4,
    "stopped": 4,
    "commander killed": 3,
    "commander stopped": 2,
    "released": 1,
    "damage": 3,
}
DAMAGES = ("flipped", "truncated", "removed", "extra", "manifest")
# Pods that are started at most; what comes beyond that is a loop.
MOST_PODS = 16
# What is damaged so shortly before a trainer's start was verified before that.
VERIFIED_SECONDS = 5.0
# Seconds within which the run must end once nothing happens any more; the machine may be loaded.
PATIENCE = 150.0


@dataclass(frozen=True)
class Fault:
    """What happens, after how many seconds (see `Schedule.early`), for how long, and to whom of those it may hit."""

    what: str
    after: float
    lasts: float
    which: float

    def __str__(self) -> str:
        return f"{self.what} at {self.after:.1f} s for {self.lasts:.1f} s"


@dataclass(frozen=True)
class Schedule:
    """One run.

    Attributes:
        pods: how many are there at a time.
        comes_after: seconds after which a provider has another machine.
        early: times count from the start of the first pods; else from the first step.
        obeys: the trainer ends when it was asked to save.
        hub: there are milestones.
    """

    seed: int
    pods: int
    comes_after: float
    early: bool
    obeys: bool
    save_every: int
    hub: bool
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        traits = {"early": self.early, "ends when asked": self.obeys, "hub": self.hub}
        words = [word for word, true in traits.items() if true]
        how = ", ".join([f"{self.pods} pods", f"saves every {self.save_every}", *words])
        return f"seed {self.seed}: {how}; {'; '.join(map(str, self.faults))}"


def schedule(seed: int) -> Schedule:
    """What this seed means."""
    draw = random.Random(f"relay schedule {seed}")
    faults = []
    for _ in range(draw.choice((2, 3, 3, 4, 5))):
        what = draw.choices(list(TARGETS), list(TARGETS.values()))[0]
        lasts = draw.choice((draw.uniform(0.1, 2.0), draw.uniform(1.3, 2.5) * LEASE_SECONDS))
        faults.append(Fault(what, draw.uniform(0.0, 15.0), lasts, draw.random()))
    return Schedule(
        seed,
        draw.choice((2, 2, 3)),
        draw.choice((0.0, draw.uniform(0.5, 8.0))),
        draw.random() < 0.3,
        draw.random() < 0.5,
        draw.choice((20, 30, 45)),
        draw.random() < 0.3,
        tuple(sorted(faults, key=lambda fault: fault.after)),
    )


@dataclass
class Stage:
    """A run, who plays in it, and what has happened to it."""

    plan: Schedule
    run: Run
    draw: random.Random
    environment: dict[str, str]
    # Names of pods that lost a process to us; they may end as they like.
    hit: set[str] = field(default_factory=set)
    noticed: set[str] = field(default_factory=set)
    # Checkpoints that are no longer what was sealed, and since when.
    damaged: dict[str, float] = field(default_factory=dict)
    heads: list[dict[str, Any]] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)

    # ---- the provider -----------------------------------------------------------------------------------------------

    def start_pod(self) -> None:
        """A machine comes."""
        number = len(self.run.pods) + 1
        assert number <= MOST_PODS, f"pods end again and again\n{self.run.said()}"
        self.run.pod(f"pod{number}", **self.environment)

    @property
    def there(self) -> list[Pod]:
        """Pods whose entry runs."""
        return [pod for pod in self.run.pods if pod.process.poll() is None]

    def look(self) -> str:
        """How the run stands as the Commander says; remembers its newest commits. "": it does not answer."""
        try:
            shown = self.run.commander.run()
        except (OSError, ValueError, AssertionError):
            return ""
        if shown["head"] is not None and shown["head"] not in self.heads:
            self.heads.append(shown["head"])
        return str(shown["state"])

    def processes(self, pod: Pod, role: str) -> list[int]:
        """Those of a pod that do this."""
        if role == "entry":
            return [pod.process.pid]
        found = carriers(pod.mark)
        if role == "trainer":
            # It may be a fork, whose command line is another's; the log has its number.
            made = {one.pid for one in self.run.steps()}
            return [pid for pid in found if pid in made]
        word = {"agent": "--tell-fd", "mirror": "milestones.mirror"}[role]
        return [pid for pid in found if word in command_line(pid)]

    # ---- what happens -----------------------------------------------------------------------------------------------

    def strike(self, fault: Fault) -> Callable[[], None]:
        """It happens; returns what ends it."""
        if fault.what.startswith("commander"):
            return self._strike_commander(fault)
        if fault.what == "damage":
            self._damage(fault)
        elif fault.what == "released":
            with contextlib.suppress(OSError, ValueError):
                self.run.commander.ask("POST", "/api/relay/my-run/release", token=ADMIN_TOKEN)
        elif (pod := self._victim(fault)) is not None:
            return self._strike_pod(pod, fault)
        return lambda: None

    def _strike_commander(self, fault: Fault) -> Callable[[], None]:
        commander = self.run.commander
        if commander.process.poll() is not None:
            return lambda: None
        if fault.what == "commander killed":
            commander.end(signal.SIGKILL)
            return lambda: commander.again() if commander.process.poll() is not None else None
        stopped = commander.process
        stopped.send_signal(signal.SIGSTOP)
        return lambda: stopped.send_signal(signal.SIGCONT) if stopped.poll() is None else None

    def _victim(self, fault: Fault) -> Pod | None:
        """Most often the pod that trains."""
        trains = [pod for pod in self.there if self.processes(pod, "trainer")]
        chosen = trains if trains and fault.which < 0.8 else self.there
        return chosen[int(fault.which * 1000) % len(chosen)] if chosen else None

    def _strike_pod(self, pod: Pod, fault: Fault) -> Callable[[], None]:
        if fault.what == "notice":
            self.noticed.add(pod.name)
            pod.notice()
        elif fault.what == "stopped":
            frozen = carriers(pod.mark)
            send(frozen, signal.SIGSTOP)
            self.hit.add(pod.name)  # it may have been in the middle of its end
            return lambda: send(reversed(frozen), signal.SIGCONT)
        elif fault.what == "pod":
            self.hit.add(pod.name)
            pod.vanish()
        else:
            if fault.what in ("entry", "agent"):
                self.hit.add(pod.name)
            send(self.processes(pod, fault.what))
        return lambda: None

    def _damage(self, fault: Fault) -> None:
        """Of the newest, as long as another one stays intact."""
        sealed = sorted(
            (path.parent for path in self.run.root.glob("ckpt/.store/my-run/*/step-*/MANIFEST.json")),
            key=lambda path: CheckpointName.parse(path.name).age,
        )
        if len([path for path in sealed if path.name not in self.damaged]) < 2:
            return
        target = sealed[-1]
        self.damaged[target.name] = time.time()
        with contextlib.suppress(FileNotFoundError):  # it was just pruned
            damage(target, DAMAGES[int(fault.which * 1000) % len(DAMAGES)])

    # ---- what must be true ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """All that the module promises, once every pod has ended."""
        self._check_pods()
        self.run.assert_one_history(STEPS)
        self._check_epochs()
        for earlier, later in zip(self.heads, self.heads[1:], strict=False):
            before, after = (CheckpointName.parse(one["name"]) for one in (earlier, later))
            assert before.epoch <= after.epoch, f"a commit of a fenced pod: {after} after {before}"
        assert {"epoch", "status", "last_ok_step"} <= set(self.run.state())
        newest = Manifest.read((self.run.root / "ckpt" / "latest").resolve())
        shown = [
            one["checkpoint"] for one in self.run.events("ckpt_saved") if one["epoch"] == self.run.state()["epoch"]
        ]
        assert not shown or newest.name == shown[-1], f"latest is {newest.name}, saved was {shown}"
        left = {pod.name: [command_line(pid) for pid in carriers(pod.mark)] for pod in self.run.pods}
        assert not any(left.values()), f"left behind: {left}"

    def _check_pods(self) -> None:
        for pod in self.run.pods:
            assert "Traceback (most recent call last)" not in pod.said, f"{pod.name}\n{pod.said}"
            code = pod.process.returncode
            allowed = {0, 75, 76} if pod.name in self.noticed else {0}
            if any(fault.what == "released" for fault in self.plan.faults):
                allowed.add(76)
            if not pod.said:
                allowed.add(-signal.SIGTERM)  # before it was there
            assert code in allowed or pod.name in self.hit, f"{pod.name} ended with {code}\n{self.run.said()}"

    def _check_epochs(self) -> None:
        """Each epoch begins where the newest intact commit before it is; after a notice that is where it ended."""
        saved = self.run.events("ckpt_saved")
        made = self.run.epochs()
        for resume in self.run.events("resume"):
            epoch, step = int(resume["epoch"]), int(resume["step"])
            name = resume["checkpoint"]
            assert name is None or CheckpointName.parse(name).epoch < epoch, resume
            damaged = self.damaged.get(str(name), resume["time"]) + VERIFIED_SECONDS < resume["time"]
            assert not damaged or epoch not in made, f"from a damaged one: {resume}"
            before = [one for one in saved if CheckpointName.parse(one["checkpoint"]).epoch < epoch]
            intact = [int(one["step"]) for one in before if one["checkpoint"] not in self.damaged]
            assert step >= max(intact, default=0) or epoch not in made, f"{resume}: {max(intact)} was committed"
            assert epoch not in made or made[epoch][0].step == step + 1, resume
        for event in self.run.events("released"):
            epoch = int(event["epoch"])
            later = sorted(one for one in made if one > epoch)
            if self.plan.obeys and event["code"] == 75 and epoch in made and later:
                begins = made[later[0]][0].step
                assert begins == made[epoch][-1].step + 1, f"steps lost on notice: {event}, then {begins}"


def damage(directory: Path, how: str) -> None:
    """One file of a sealed checkpoint is no longer what it was."""
    path = directory / ("trainer_state.json" if how in ("flipped", "removed") else "model.safetensors")
    if how == "flipped":
        path.write_bytes(path.read_bytes().replace(b"global", b"glObal"))
    elif how == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif how == "removed":
        path.unlink()
    elif how == "extra":
        (directory / "extra.pt").write_bytes(b"whose is this?")
    else:
        os.truncate(directory / "MANIFEST.json", 100)


@contextlib.contextmanager
def stage(plan: Schedule, directory: Path) -> Iterator[Stage]:
    """The run, not begun. Ends all that it starts."""
    trainer = [f"--pace={PACE}", f"--save-every={plan.save_every}", *["--end-when-asked"] * plan.obeys]
    with contextlib.ExitStack() as stack:
        environment: dict[str, str] = {}
        more: dict[str, Any] = {}
        if plan.hub:
            (directory / "hub").mkdir()
            hub = Hub(directory / "hub")
            stack.callback(hub.close)
            environment = hub.pod_environment(directory / "hub-home")
            more["hf"] = {"repo": REPO, "interval_seconds": 5}
        run = stack.enter_context(relayed(directory, *trainer, steps=STEPS, **more))
        on = Stage(plan, run, random.Random(f"play {plan.seed}"), environment)
        yield on
        if plan.hub:
            there = {one["revision"] for one in milestones_on(hub, directory)}
            told = {one["revision"] for one in run.events("hf_synced")}
            assert told <= there, f"nobody can load {told - there}"


def play(plan: Schedule, directory: Path) -> str:
    """Runs one; returns what it measured."""
    with stage(plan, directory) as on:
        began = time.monotonic()
        due: list[tuple[float, int, Fault | Callable[[], None]]] = [
            (fault.after, number, fault) for number, fault in enumerate(plan.faults)
        ]
        coming = [0.0] * plan.pods
        # When something was last to happen.
        calm = 0.0
        begun = plan.early
        while True:
            if not begun and on.run.steps():
                begun = True
                due = [(at + time.monotonic() - began, number, what) for at, number, what in due]
            now = time.monotonic() - began
            for at, number, what in [one for one in sorted(due, key=lambda one: one[:2]) if begun and one[0] <= now]:
                due.remove((at, number, what))
                if isinstance(what, Fault):
                    due.append((now + what.lasts, number, on.strike(what)))
                else:
                    what()
            calm = now if due and begun else calm
            state = on.look()
            if state == "COMPLETED":
                break
            assert now < calm + PATIENCE, f"it does not end: {state}\n{run_said(on)}"
            coming += [now + plan.comes_after] * (plan.pods - len(on.there) - len(coming))
            for _ in [at for at in coming if at <= now]:
                on.start_pod()
            coming = [at for at in coming if at > now]
            time.sleep(0.1)  # why: what happens in other processes has no event here
        for _, _, what in sorted(due, key=lambda one: one[:2]):
            if not isinstance(what, Fault):
                what()  # nobody stays stopped
        _end(on)
        on.check()
        made = on.run.epochs()
        repeated = len(on.run.steps()) - len({one.step for one in on.run.steps()})
        return f"{len(on.run.pods)} pods, {len(made)} epochs, {repeated} steps twice"


def _end(on: Stage) -> None:
    """Until all pods have ended by themselves, and nothing of them is left."""
    deadline = time.monotonic() + 60.0
    for pod in on.run.pods:
        while pod.process.poll() is None or carriers(pod.mark):
            if time.monotonic() > deadline:
                lines = [command_line(pid) for pid in carriers(pod.mark)]
                raise AssertionError(f"{pod.name} does not end though the run has: {lines}\n{run_said(on)}")
            time.sleep(0.1)  # why: they are not all our children


def run_said(on: Stage) -> str:
    """All that was said, and what is on the record."""
    return f"{on.run.said()}\nheads: {json.dumps(on.heads)}\ndamaged: {sorted(on.damaged)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if all that ran kept what must be true."""

    def run(seed: int, directory: Path) -> str:
        return play(schedule(seed), directory)

    return run_seeds("tests.support.jobs.relay_schedules", str(__doc__), schedule, run, arguments)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
