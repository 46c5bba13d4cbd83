"""A training run in the miniature cluster: what `dalsegno render` prints for `deploy/kubernetes`, and its judgement."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import yaml

from dalsegno.agent.commands import dalsegno
from dalsegno.protos.yaml_text import documents
from examples.history import EpochSpan, StepLine, StepLogReader, compare, epoch_spans, kept_history

from ..hosts.hosts import ROOT
from ..jobs.cluster import HOOKED, LIMIT, Training, Undisturbed
from .cluster import Kubernetes, Workload
from .kubelet import Kubelet
from .sandbox import Image

__all__ = ["MASTER", "TRAINER", "Run", "rendered"]

BASE = ROOT / "deploy" / "kubernetes" / "base" / "job.yaml"
OVERLAYS = ROOT / "deploy" / "kubernetes" / "overlays"
TRAINER, MASTER = "dalsegno-trainer:latest", "dalsegno-master:latest"
TOKEN = b"only-for-this-test-0123456789abcdef"
PROGRAMS = ("dalsegno-run", "dlrover-run", "dlrover-master")
# Where the run writes its steps, in its claim.
STEPS, HOLDS = "/checkpoints/steps", "/checkpoints/holds"

T = TypeVar("T")


def rendered(description: Path, directory: Path, changes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What `dalsegno render k8s` prints for this job with these changes; None takes a key away."""
    (values,) = documents(description.read_text(encoding="utf-8"), str(description))
    values = {key: value for key, value in {**values, **changes}.items() if value is not None}
    file = directory / "job.yaml"
    file.write_text(yaml.safe_dump(values), encoding="utf-8")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = dalsegno.run(["render", "k8s", str(file)])
    assert code == 0, printed.getvalue()
    return documents(printed.getvalue(), "what render printed")


def image(directory: Path) -> Image:
    """The trainer's image and the master's: the programs of the running interpreter, and the examples."""
    directory.mkdir()
    for name in PROGRAMS:
        (directory / name).symlink_to(Path(sys.prefix) / "bin" / name)
    python = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    cores = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return Image(directory, {**python, **cores}, {"/opt/dalsegno/examples": ROOT / "examples"})


class Run:
    """One run. Use as a context manager.

    Args:
        directory: for all of it; made.
        training: what is trained; `hooked`, so that it ends only after `finish`.
        description: the job as a person wrote it.
        step_time: seconds of a step.
        nodes: of the cluster.
        prepare: makes what is outside, and returns further changes.
        changes: of the description.
    """

    def __init__(
        self,
        directory: Path,
        training: Training,
        description: Path = BASE,
        *,
        step_time: float = 0.05,
        nodes: int = 3,
        prepare: Callable[[Kubernetes], Mapping[str, Any]] = lambda _: {},
        **changes: Any,
    ) -> None:
        directory.mkdir()
        self.training = training
        words = [str(HOOKED), training.script.name, *training.flags(Path(STEPS)), *training.pace(step_time)]
        own = {
            "command": words,
            "env": {"DALSEGNO_TEST_HOLDS": HOLDS, "DALSEGNO_TEST_STEPS": 4},
            # Growths follow each other at once: the scenes are short.
            "flags": ["--grow-interval=0"],
        }
        one = image(directory / "image")
        self.cluster = Kubernetes(
            directory / "cluster", {TRAINER: one, MASTER: one}, nodes=nodes, claims=["checkpoints"]
        )
        self.checkpoints = self.cluster.storage.claim("checkpoints")
        (self.checkpoints / "holds").mkdir()
        self._reader, self._lines = StepLogReader(self.checkpoints / "steps"), list[StepLine]()
        try:
            self.objects = rendered(description, directory, {**own, **changes, **prepare(self.cluster)})
        except BaseException:
            self.cluster.close()
            raise
        self.cluster.secret("ddp-token", {"token": TOKEN})
        # Once, as far apart as wall and monotonic clock are here.
        self._apart = time.time() - time.monotonic()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cluster.__exit__(kind, error, traceback)

    @property
    def kind(self) -> str:
        """Of the trainers' controller."""
        (kind,) = [one["kind"] for one in self.objects if one["metadata"]["name"] == "ddp" and one["kind"] in KINDS]
        return str(kind)

    @property
    def trainers(self) -> Workload:
        return self.cluster.workloads[self.kind, "ddp"]

    def pods(self) -> list[Kubelet]:
        """The trainers' pods that are neither ended nor on their way out, the oldest first."""
        return self.cluster.pods(self.kind, "ddp")

    def apply(self) -> None:
        """`kubectl apply`."""
        self.cluster.apply(self.objects)

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def poll(self) -> list[StepLine]:
        """All lines of the step logs so far."""
        self._lines += self._reader.poll()
        return self._lines

    def wait_world(self, size: int, after: int = 0, steps: int = 3) -> int:
        """Until an epoch above this one has so many ranks and has made so many steps; returns it."""

        def look() -> int | None:
            newest = max((line.epoch for line in self.poll()), default=0)
            own = [line for line in self._lines if line.epoch == newest]
            made = {line.step for line in own if line.rank == 0 and line.world_size == size}
            return newest if newest > after and len(made) >= steps else None

        return self.cluster.wait_for(look, f"world of {size} after epoch {after} with {steps} steps")

    def wait_for(self, condition: Callable[[], T | None], what: str, seconds: float = 120.0) -> T:
        return self.cluster.wait_for(condition, what, seconds)

    def hurry(self) -> None:
        """Nothing more is to happen: the run goes to its end."""
        (self.checkpoints / "holds" / "hurry").touch()

    # ---- judging ---------------------------------------------------------------------------------------------------

    def spans(self) -> list[EpochSpan]:
        return epoch_spans(self.poll())

    def lost(self) -> dict[int, int]:
        """Epochs of which steps had to be made again, and how many."""
        return {span.epoch: span.lost_steps for span in self.spans() if span.lost_steps}

    def seconds_to_first_step(self, pod: Kubelet, epoch: int) -> float:
        """From the start of a pod's newest container to the first step of an epoch that it is in."""
        began = next(span.began for span in self.spans() if span.epoch == epoch)
        return began - (pod.started[-1] + self._apart)

    def assert_undisturbed(self, undisturbed: Undisturbed) -> None:
        """Every sample once, in the undisturbed run's order, and its losses."""
        comparison = compare(kept_history(self.poll()), undisturbed.history(self.training))
        assert not comparison.problems, "\n".join([*comparison.problems[:5], self.cluster.diagnosis()])
        assert comparison.largest_difference <= LIMIT, f"step {comparison.at_step}: {comparison.largest_difference:.2e}"


KINDS = ("Job", "Deployment")
