"""What a change of the world costs, part by part, over the size of the state and the number of its tensors.

Real agents with an embedded master on this machine, one rank per node, are compared with torchrun and each framework's
own save and load, one after the other in the same run. A node joins (1 to 2); then it leaves on notice, or is killed
with all its processes at once (2 to 1). The marks of `--trace-dir` (`dalsegno pauses DIR`) divide each change into its
parts, whose sum is the pause. Each measured change is a line of a file, from which `--draw` makes the table and the
picture of docs/pause.md. At the end the larger states stand beside the smallest of the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from benchmarks.own_memory import own_memory
from benchmarks.pause_page import Change, draw, growth, read_changes
from benchmarks.peers import Job, a_job, hosts
from benchmarks.reading_once import reading_once
from benchmarks.results import DEFAULT_DIRECTORY, DIRECTORY_VARIABLE, machine
from dalsegno.agent.decisions.pauses import WorldChange, pauses
from dalsegno.protos.contract import Variable
from dalsegno.protos.trace import read
from examples.demo import end_by_signals
from examples.history import StepLine
from tests.support.jobs import local_processes as processes

SCRIPT = Path(__file__).resolve().parent / "pause_rank.py"
# Bytes of weights and both moments of AdamW in fp32, for each parameter.
BYTES_EACH = 12
SIZES = {"16MB": 16 * 10**6, "150MB": 150 * 10**6, "0.5GB": 500 * 10**6, "2GB": 2 * 10**9}
TENSORS = (100, 1000, 5000)
# Drains go to memory, and so does every fifth step.
MEMORY, MEMORY_EVERY = ("--memory-replicas=1",), 5
# For each way: the framework, and the flags for `dlrover-run` that decide how the change is made.
WAYS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ddp": ("ddp", ()),
    "ddp-memory": ("ddp", MEMORY),
    # The same by a Trainer, whose processes stay.
    "ddp-stay": ("ddp", MEMORY),
    # A Trainer of transformers.
    "hf": ("hf", ()),
    "hf-memory": ("hf", MEMORY),
    "hf-stay": ("hf", MEMORY),
    "fsdp2": ("fsdp2", ()),
    "zero1": ("zero1", ()),
    "zero1-memory": ("zero1", MEMORY),
    "zero1-universal": ("zero1", ("--universal-checkpoint=gate",)),
    "zero1-beside": ("zero1", ("--universal-checkpoint",)),
    "zero3": ("zero3", ()),
    "zero3-universal": ("zero3", ("--universal-checkpoint=gate",)),
    "zero3-beside": ("zero3", ("--universal-checkpoint",)),
}
LAUNCHERS = {"ours": "dlrover-run", "torchrun": "torchrun, tuned"}
# What happens, and how many ranks there are behind it.
RANKS = {"join": 2, "leave": 1, "kill": 1}
SCENES = tuple(RANKS)
# Steps and seconds that a world trains before something happens to it: standby workers are warm by then.
STEPS, SETTLE = 5, 4.0
# Its saves until then: so many that older ones are deleted.
SAVES = 5


@dataclass(frozen=True)
class Cell:
    """What is measured: a way of `WAYS`, a state of so many bytes in so many tensors, a launcher of `LAUNCHERS`."""

    way: str
    bytes: int
    tensors: int
    launcher: str

    @property
    def framework(self) -> str:
        return WAYS[self.way][0]


def shape(size: int, tensors: int) -> tuple[int, int]:
    """Layers and their width, so that weights and biases, two tensors each, and their moments take `size` bytes."""
    layers = max(1, tensors // 2)
    parameters = size / BYTES_EACH / layers
    # Each layer has width^2 + width parameters.
    return layers, max(1, round((parameters + 0.25) ** 0.5 - 0.5))


@dataclass
class Options:
    """How it is measured; see the flags."""

    scenes: Sequence[str] = SCENES
    save_every: int = 10
    saves: int = SAVES
    step_time: float = 0.1
    settle: float = SETTLE
    patience: float = 300.0
    directory: Path | None = None
    # Where marks are kept; None: not kept.
    trace: Path | None = None


def measure(cell: Cell, options: Options) -> list[Change]:
    """Runs a job of one node; another node joins, and leaves on notice or is killed.

    Raises:
        TimeoutError: A change did not come about; the message has the last lines of the job's consoles.
    """
    layers, width = shape(cell.bytes, cell.tensors)
    flags = [f"--framework={cell.framework}", f"--layers={layers}", f"--width={width}"]
    flags += [f"--save-every={options.save_every}", f"--step-time={options.step_time}"]
    if WAYS[cell.way][1] == MEMORY:
        flags.append(f"--memory-every={MEMORY_EVERY}")
    flags += ["--stay"] * cell.way.endswith("-stay")
    with tempfile.TemporaryDirectory(prefix="pause-trace-") as folder:
        marks = options.trace or Path(folder)
        environment = {"DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu")}
        if cell.launcher != "ours":
            environment[Variable.TRACE] = str(marks)
        with a_job(
            LAUNCHERS[cell.launcher],
            options.directory,
            **{"nnodes": "1:2", "script": SCRIPT, "flags": tuple(flags), "alone": "--own"},
            more=(*WAYS[cell.way][1], "--grow-interval=0", f"--trace-dir={marks}"),
            environment=environment,
            patience=options.patience,
        ) as job:
            try:
                return list(_play(cell, job, marks, options))
            except TimeoutError as error:
                raise TimeoutError(f"{error}: {_consoles(job)}") from error


def _play(cell: Cell, job: Job, marks: Path, options: Options) -> list[Change]:
    began = time.time()
    job.start_node()
    job.wait(lambda: hosts(job), "node 0 hosts")
    _settle(job, 1, began, options)
    found = []
    for scene in _scenes(options.scenes):
        load, event = os.getloadavg()[0], time.time()
        if scene == "join":
            node = job.start_node()
        elif scene == "leave":
            os.kill(node.pid, signal.SIGTERM)
        else:
            processes.send([node.pid, *job.node_processes(len(job.nodes) - 1)], signal.SIGKILL)
        _settle(job, 2 if scene == "join" else 1, event, options)
        pause = pauses(read(marks))[-1]
        if scene in options.scenes:
            found.append(_change(cell, scene, pause, job.poll(), event, load))
    return found


def _scenes(asked: Sequence[str]) -> list[str]:
    """What happens, in order: somebody must join before each leave or kill."""
    ends = [scene for scene in ("leave", "kill") if scene in asked]
    return [scene for end in ends for scene in ("join", end)] or ["join"]


def _settle(job: Job, size: int, since: float, options: Options) -> None:
    """Waits until a world of this size has made some steps, and three more after its saves, and is at rest."""
    job.wait(lambda: len(job.steps_of_world(size, since)) >= STEPS, f"a world of {size}")
    first = job.steps_of_world(size, since)[0]
    saved = (max(line.step for line in job.lines) // options.save_every + options.saves) * options.save_every
    job.wait(
        lambda: time.time() - first >= options.settle and max(line.step for line in job.poll()) > saved + 2,
        f"a world of {size} that has saved",
    )


def _change(cell: Cell, scene: str, pause: WorldChange, lines: Sequence[StepLine], event: float, load: float) -> Change:
    before = [line for line in lines if line.time <= event]
    after = [line for line in lines if line.time > event]
    first = min(line.time for line in after if line.epoch == after[-1].epoch)
    times = sorted({line.time for line in after if line.time <= first})
    gap = max(b - a for a, b in zip([max(line.time for line in before), *times], times, strict=False))
    reached = max(line.step for line in lines if line.epoch != after[-1].epoch)
    ends = sorted({line.time for line in before if line.rank == 0})
    past = min((line.time for line in after if line.step > reached), default=after[-1].time)
    return Change(
        **dataclasses.asdict(cell),
        scene=scene,
        pause=pause.seconds,
        gap=gap,
        # From the last step before the event to the first step that nobody had made.
        past=past - max(line.time for line in lines if line.epoch != after[-1].epoch),
        step=statistics.median(b - a for a, b in zip(ends[-STEPS:], ends[-STEPS + 1 :], strict=False)),
        lost=pause.lost,
        load=load,
        parts=dict(pause.parts),
    )


def _consoles(job: Job) -> str:
    said = [path.read_text(errors="replace").strip()[-600:] for path in sorted(job.directory.glob("*.console"))]
    return " | ".join(said)


def _sizes(text: str) -> int:
    if text in SIZES:
        return SIZES[text]
    raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(SIZES)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks pause", description=__doc__)
    parser.add_argument(
        "--frameworks", nargs="+", choices=WAYS, default=list(WAYS), metavar="NAME", help=", ".join(WAYS)
    )
    parser.add_argument(
        "--sizes", nargs="+", type=_sizes, default=list(SIZES.values()), metavar="SIZE", help=", ".join(SIZES)
    )
    parser.add_argument("--tensors", nargs="+", type=int, default=list(TENSORS), metavar="N")
    parser.add_argument("--scenes", nargs="+", choices=SCENES, default=list(SCENES))
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=list(LAUNCHERS))
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=10, help="steps between two saves (%(default)s)")
    parser.add_argument("--saves", type=int, default=SAVES, help="saves before each change (%(default)s)")
    parser.add_argument("--step-time", type=float, default=0.1, help="least seconds of a step (%(default)s)")
    parser.add_argument("--patience", type=float, default=300.0, help="seconds that a change may take (%(default)s)")
    parser.add_argument(
        "--own-memory",
        type=float,
        default=0.0,
        metavar="GIB",
        help="touch so much memory, and keep it from being given back to the host of this virtual machine",
    )
    parser.add_argument("--directory", type=Path, help="for checkpoints, on the disk to measure")
    parser.add_argument("--results", type=Path, help="lines are added to this file")
    parser.add_argument(
        "--draw", type=Path, metavar="PAGE", help="measure nothing: put table and picture of the results there"
    )
    return parser


def main(arguments: Sequence[str] = ()) -> int:
    """Measures, with a line for each change, or draws what was measured. Returns 0 if all could be measured."""
    flags = _parser().parse_args(arguments)
    folder = Path(os.environ.get(DIRECTORY_VARIABLE) or DEFAULT_DIRECTORY)
    results = flags.results or folder / "pause.jsonl"
    if flags.draw is not None:
        draw(read_changes(results), flags.draw)
        return 0
    results.parent.mkdir(parents=True, exist_ok=True)
    # Each `with` ends what it has started, even if this process is ended by a signal.
    end_by_signals()
    given = ("scenes", "save_every", "saves", "step_time", "patience", "directory")
    options = Options(**{name: getattr(flags, name) for name in given})
    print(machine(), flush=True)
    failed, measured = 0, list[Change]()
    with own_memory(flags.own_memory):
        for repeat in range(flags.repeats):
            for cell in _cells(flags):
                try:
                    for change in measure(cell, options):
                        measured.append(dataclasses.replace(change, read=_read(cell.bytes, RANKS[change.scene])))
                        _write(results, measured[-1], repeat)
                except TimeoutError as error:
                    failed += 1
                    print(f"{cell}: {error}", flush=True)
    print(growth(measured), flush=True)
    return min(failed, 1)


@lru_cache
def _read(size: int, ranks: int) -> float:
    """Median seconds of three; with nothing else under way."""
    return statistics.median(reading_once(size, ranks) for _ in range(3))


def _cells(flags: argparse.Namespace) -> list[Cell]:
    """All cells that were asked for, torchrun's right after the one that it is compared with."""
    found = []
    for size in flags.sizes:
        for tensors in flags.tensors:
            for way in flags.frameworks:
                own = [name for name in flags.launchers if name == "ours" or way == WAYS[way][0]]
                found += [Cell(way, size, tensors, launcher) for launcher in own]
    return found


def _write(results: Path, change: Change, repeat: int) -> None:
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in change.parts.items())
    what = f"{change.way} {change.bytes / 1e6:,.0f} MB {change.tensors} tensors {change.launcher} {change.scene}"
    print(f"{what}: {change.pause:.2f} s (no step for {change.gap:.2f}, lost {change.lost}): {parts}", flush=True)
    with results.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**dataclasses.asdict(change), "repeat": repeat}) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
