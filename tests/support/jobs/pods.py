"""Pods of a relayed run as real processes: one Commander, one folder as the volume, `dalsegno relay` in each pod."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from dalsegno.elastic.checkpoint import Manifest

from ..hosts.namespaces import children_of
from ..pages.sources import ROOT
from .commander import TOKEN, Commander, commander, run_file
from .local_processes import carriers, send

T = TypeVar("T")
BLACK_BOX = ROOT / "examples" / "black_box.py"
ENTRYPOINT = ROOT / "deploy" / "relay" / "entrypoint.sh"
LEASE_SECONDS = 6.0
_DALSEGNO = (sys.executable, "-m", "dalsegno.agent.commands.dalsegno")
_CONTAINED = ("unshare", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
_CONTAINED += ("sh", "-c", 'hostname "$1" && shift && exec "$@"', "sh")


@dataclass(frozen=True)
class Step:
    """A line of the trainer's log."""

    step: int
    state: float
    epoch: int
    pid: int


@dataclass
class Pod:
    """One machine: all its processes carry its mark, and die together."""

    name: str
    process: subprocess.Popen[bytes]
    errors: Path
    mark: str
    contained: bool = False

    @property
    def said(self) -> str:
        return self.errors.read_text(encoding="utf-8", errors="replace")

    def vanish(self) -> None:
        """SIGKILL for all that runs there, as when a machine is taken away."""
        self.all(signal.SIGKILL)
        self.process.wait(20)

    def all(self, signum: signal.Signals) -> None:
        """Signals all processes of it."""
        send(carriers(self.mark), signum)

    def notice(self) -> None:
        """What an image's entrypoint gets."""
        # In a container it is the first process there.
        pids = children_of(self.process.pid) if self.contained else [self.process.pid]
        send(pids, signal.SIGTERM)


@dataclass
class Run:
    """A run with its Commander."""

    folder: Path
    file: Path
    commander: Commander
    pods: list[Pod] = field(default_factory=list)

    @property
    def root(self) -> Path:
        return self.folder / "volume" / "runs" / "my-run"

    @property
    def command(self) -> tuple[str, ...]:
        return "relay", str(self.file), "--no-mount-check"

    def pod(
        self,
        name: str,
        *flags: str,
        contained: bool = False,
        image: bool = False,
        console: int | None = None,
        through: tuple[str, ...] = (),
        **environment: str,
    ) -> Pod:
        """Starts one.

        Args:
            contained: with a host name, process numbers and mounts of its own, as its process 1.
            image: by the image's entry point.
            console: what its standard output and error are, instead of a file of the errors.
            through: a command that executes it.
        """
        mark = f"DALSEGNO_TEST_POD={self.folder}/{name}"
        errors = self.folder / f"{name}.err"
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("DALSEGNO_", "PET_", "HF_"))}
        home = self.folder / f"home-{name}"
        home.mkdir()
        if image:
            # Where the image has it, too: beside the interpreter.
            kept["PATH"] = f"{os.path.dirname(sys.executable)}{os.pathsep}{kept.get('PATH', os.defpath)}"
        with open(errors, "wb") as stderr:
            process = subprocess.Popen(
                [
                    *((*_CONTAINED, name) if contained else ()),
                    *through,
                    *(("sh", str(ENTRYPOINT), *self.command[1:]) if image else (*_DALSEGNO, *self.command)),
                    *flags,
                ],
                env={**kept, "HOME": str(home), "DALSEGNO_TOKEN": TOKEN, **dict([mark.split("=", 1)]), **environment},
                stdout=subprocess.DEVNULL if console is None else console,
                stderr=stderr if console is None else console,
                start_new_session=True,
            )
        self.pods.append(Pod(name, process, errors, mark, contained))
        return self.pods[-1]

    def checkpoints(self) -> list[int]:
        """Steps of the checkpoints that are sealed on the volume."""
        sealed = self.root.glob("ckpt/.store/my-run/*/step-*/MANIFEST.json")
        return sorted(Manifest.read(path.parent).step for path in sealed)

    def steps(self) -> list[Step]:
        """What the trainers made, in order."""
        with contextlib.suppress(FileNotFoundError):
            text = (self.folder / "steps").read_text(encoding="utf-8")
            return [Step(*json.loads(line)) for line in text[: text.rfind("\n") + 1].splitlines()]
        return []

    def epochs(self) -> dict[int, list[Step]]:
        """The same by epoch."""
        found: dict[int, list[Step]] = {}
        for one in self.steps():
            found.setdefault(one.epoch, []).append(one)
        return found

    def events(self, name: str = "") -> list[dict[str, Any]]:
        """Lines of `events.log`."""
        with contextlib.suppress(FileNotFoundError):
            every = [json.loads(line) for line in (self.root / "events.log").read_text().splitlines()]
            return [one for one in every if not name or one["event"] == name]
        return []

    def state(self) -> dict[str, Any]:
        return dict(json.loads((self.root / "state.json").read_text()))

    def wait(self, look: Callable[[], T | None], what: str, seconds: float = 90.0) -> T:
        """Waits until `look` finds something."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if found := look():
                return found
            time.sleep(0.05)  # why: other processes' files tell nobody that they have changed
        raise AssertionError(f"{what}: not within {seconds:.0f} s\n{self.said()}")

    def wait_step(self, step: int, epoch: int = 1) -> None:
        """Until a trainer of this epoch, or a later one, is that far."""
        self.wait(lambda: [one for one in self.steps() if one.step >= step and one.epoch >= epoch], f"step {step}")

    def wait_saved(self, step: int = 1, seconds: float = 90.0) -> int:
        """Until the run has a checkpoint of at least this step; returns which."""
        saved = lambda: [e for e in self.events("ckpt_saved") if e["step"] >= step]  # noqa: E731
        found = self.wait(saved, f"a save beyond {step}", seconds)
        return int(found[-1]["step"])

    def said(self) -> str:
        """All that the pods and the run's log say."""
        log = "\n".join(map(str, self.events()))
        return "\n".join(f"== {pod.name}\n{pod.said}" for pod in self.pods) + f"\n{log}"

    def assert_one_history(self, steps: int) -> None:
        """Each epoch goes on from a step that an earlier one made, with the same curve, and the last one ends it."""
        curve: dict[int, float] = {}
        last: list[Step] = []
        for epoch, made in sorted(self.epochs().items()):
            assert [one.step for one in made] == list(range(made[0].step, made[-1].step + 1)), f"epoch {epoch}"
            assert made[0].step == 1 or made[0].step - 1 in curve, f"epoch {epoch} begins at {made[0].step}"
            for one in made:
                assert curve.setdefault(one.step, one.state) == one.state, f"step {one.step} is another in {epoch}"
            last = made
        assert last[-1].step == steps, self.said()


@contextlib.contextmanager
def relayed(folder: Path, *trainer: str, steps: int = 200, **more: Any) -> Iterator[Run]:
    """A Commander, and a run that is not begun. Ends all that it starts."""
    (folder / "volume").mkdir(exist_ok=True)
    command = [sys.executable, str(BLACK_BOX), "--output_dir", "${save_dir}", "--log", str(folder / "steps")]
    settings: dict[str, Any] = {
        "command": [*command, f"--steps={steps}", *trainer],
        "resume_flag": "--resume_from_checkpoint",
        "save_signal": "SIGUSR1",
        "lease_seconds": LEASE_SECONDS,
        **more,
    }
    file = run_file(folder, **settings)
    with commander(folder / "store.db", [file]) as one:
        run = Run(folder, run_file(folder, **settings | {"commander": f"http://{one.http}"}), one)
        try:
            yield run
        finally:
            for pod in run.pods:
                pod.all(signal.SIGKILL)
                pod.process.wait(20)
