"""How long the next pod of a relayed run takes from its entry to its first step.

The Commander, the pods and their agents are real processes on one machine, the volume is a folder, and the trainer is a
black box without torch. The pod before gets a notice, or loses all its processes at once; the next one is started then,
or waits as a spare already. The load of the machine counts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.results import report
from tests.support.jobs.pods import Pod, Run, relayed

# Longer than anything here takes unless the lease of a dead pod is waited for.
_LEASE_SECONDS = 20.0
# Seconds of one step.
_PACE = 0.05


def _notice(pod: Pod) -> None:
    pod.notice()
    pod.process.wait(60)


def _kill(pod: Pod) -> None:
    pod.vanish()


# How the pod before goes, and whether the next one waits by then.
_WAYS: dict[str, tuple[Callable[[Pod], None] | None, bool]] = {
    "the first pod": (None, False),
    "after a notice": (_notice, False),
    "after kill -9": (_kill, False),
    "a spare, after a notice": (_notice, True),
    "a spare, after kill -9": (_kill, True),
}


def measured(way: str, folder: Path) -> dict[str, float]:
    """Seconds, part by part, of one pod that follows another, from its start, or for a spare from the other's end."""
    go, spare = _WAYS[way]
    trainer = ("--end-when-asked", "--save-every=20", f"--pace={_PACE}")
    with relayed(folder, *trainer, steps=100_000, lease_seconds=_LEASE_SECONDS) as run:
        if go is None:
            begun = time.time()
            run.pod("a")
            return _parts(run, 1, begun)
        a = run.pod("a")
        run.wait_saved()
        if spare:
            b = run.pod("b")
            run.wait(lambda: "is a spare" in b.said, "b waits")
        begun = time.time()
        go(a)
        if not spare:
            begun = time.time()
            run.pod("b")
        return _parts(run, 2, begun)


def _parts(run: Run, epoch: int, begun: float) -> dict[str, float]:
    def first() -> float | None:
        return time.time() if run.epochs().get(epoch) else None

    deadline, stepped = time.monotonic() + 60.0, None
    while stepped is None and time.monotonic() < deadline:
        time.sleep(0.005)  # why: another process's file tells nobody that it has changed
        stepped = first()
    if stepped is None:
        raise SystemExit(f"no step of epoch {epoch} within 60 s\n{run.said()}")
    at = {name: run.events(name)[-1]["time"] - begun for name in ("acquire", "started")}
    return {
        "has the lease (s)": at["acquire"],
        "trainer started (s)": at["started"],
        "first step (s)": stepped - begun,
    }


def main(arguments: Sequence[str] = ()) -> int:
    """Plays each way several times, and reports medians."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks successor", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="of each way")
    parser.add_argument("--way", choices=tuple(_WAYS), action="append", help="only this one; may be repeated")
    options = parser.parse_args(arguments)
    rows = []
    for way in options.way or _WAYS:
        found = []
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory(prefix="dalsegno-successor-") as name:
                found.append(measured(way, Path(name)))
            print(way, {key: round(value, 2) for key, value in found[-1].items()}, flush=True)
        medians = {key: round(statistics.median(one[key] for one in found), 2) for key in found[0]}
        slowest = round(max(one["first step (s)"] for one in found), 2)
        rows.append({"the next pod": way, **medians, "slowest (s)": slowest})
    report("successor", rows, title="From a pod's entry to its first step", settings=vars(options))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
