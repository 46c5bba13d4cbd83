"""`python -m tests.simulation --seed 1 --runs 1000`; `--seed N --trace` replays one schedule."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter

from .run import CLAIMS, DECISIONS, LEADERS, SHELLS, replay, simulate_all


def main() -> int:
    """Returns 1 if any schedule broke an invariant."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first schedule")
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.set_defaults(mode=DECISIONS)
    what = parser.add_mutually_exclusive_group()
    for mode, text in (
        (SHELLS, "with the product's shells, not only its decisions"),
        (CLAIMS, "embedded masters and their claims, on virtual machines and containers"),
        (LEADERS, "several masters over etcd, and which of them leads"),
    ):
        what.add_argument(f"--{mode}", action="store_const", dest="mode", const=mode, help=text)
    parser.add_argument("--trace", action="store_true", help="replay the one schedule of --seed, line by line")
    parser.add_argument("--most-failures", type=int, default=10, help="stop after that many failing seeds")
    options = parser.parse_args()
    if options.trace:
        lines, outcome = replay(options.seed, options.mode)
        print("\n".join(lines))
        print(outcome.failure or "every invariant held")
        return 1 if outcome.failure else 0
    began = time.monotonic()
    failures: Counter[str] = Counter()
    cut: Counter[str] = Counter()
    done = 0
    for outcome in simulate_all(range(options.seed, options.seed + options.runs), options.processes, options.mode):
        done += 1
        cut.update([outcome.cut] if outcome.cut else [])
        if outcome.failure:
            failures[outcome.name] += 1
            print(f"seed {outcome.seed}: {outcome.failure}", flush=True)
            if sum(failures.values()) >= options.most_failures:
                break
    seconds = time.monotonic() - began
    print(f"{done} schedules in {seconds:.1f} s, {sum(failures.values())} failed {dict(failures) or ''}")
    if cut:
        print(f"{cut.total()} of them ended early, as the job had moved to another directory: {dict(cut)}")
    if failures:
        mode = "" if options.mode == DECISIONS else f"--{options.mode} "
        print(f"replay one with: python -m tests.simulation {mode}--trace --seed N")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
